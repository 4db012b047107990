"""The published sizes, and the config files of the project."""

import pathlib
import re
import runpy

from absl import flags as absl_flags
import pytest

from kvgraft_jax import cache
from kvgraft_jax import config as config_lib
from kvgraft_jax import numerics
from kvgraft_jax import plan
from kvgraft_jax.apps import deposit
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import flywheel
from kvgraft_jax.apps import verify

FLYWHEELS = ('flywheel_270m', 'aime2025_gemma4_12b', 'aime2025_gemma4_31b')
CONFIGS = pathlib.Path(__file__).resolve().parent.parent / 'configs'
SIZES = {name.replace('-', '_'): name for name in config_lib.PRESETS}

# Name -> parameters in 10**9; layers that own keys, sliding and global; bytes
# of K and V of a token in one of each, bfloat16; embedding rows.
PUBLISHED = {
    'gemma3-270m': (0.268, 15, 3, 1024, 1024),
    'gemma3-1b': (1.000, 22, 4, 1024, 1024),
    'gemma3-4b': (3.880, 29, 5, 4096, 4096),
    'gemma3-12b': (11.77, 40, 8, 8192, 8192),
    'gemma3-27b': (27.01, 52, 10, 8192, 8192),
    'gemma4-e2b': (4.63, 12, 3, 1024, 2048),
    'gemma4-e4b': (7.46, 20, 4, 2048, 4096),
    'gemma4-12b': (11.91, 40, 8, 8192, 2048),
    'gemma4-26b-a4b': (25.23, 25, 5, 8192, 4096),
    'gemma4-31b': (30.70, 50, 10, 16384, 8192),
}


@pytest.mark.parametrize('name', config_lib.PRESETS)
def test_published_sizes(name):
  billions, n_sliding, n_global, sliding, full = PUBLISHED[name]
  config = config_lib.PRESETS[name]
  assert plan.parameters(config) / 1e9 == pytest.approx(billions, rel=1e-3)
  assert len(config.kind_layers(config_lib.SLIDING)) == n_sliding
  assert len(config.kind_layers(config_lib.GLOBAL)) == n_global
  assert cache.token_bytes(config, 'bfloat16') == {
      'sliding': n_sliding * sliding, 'global': n_global * full}
  assert cache.token_bytes(config, 'float32') == {
      'sliding': 2 * n_sliding * sliding, 'global': 2 * n_global * full}


@pytest.mark.parametrize('name, sliding, full', [
    ('gemma4-e2b', 13, 14), ('gemma4-e4b', 22, 23)])
def test_shared_layers_read_the_last_owner(name, sliding, full):
  config = config_lib.PRESETS[name]
  assert config.first_shared == full + 1
  for layer in range(config.first_shared, len(config.layers)):
    kind = config.layers[layer]
    owner = config.kind_layers(kind)[config.cache_row(layer)]
    assert owner == (sliding if kind == config_lib.SLIDING else full)
  for layer in range(config.first_shared):
    kind = config.layers[layer]
    assert config.kind_layers(kind)[config.cache_row(layer)] == layer


@pytest.mark.parametrize(
    'config', [*config_lib.PRESETS.values(),
               *config_lib.TINY_PRESETS.values()], ids=lambda c: c.name)
def test_the_json_form_is_the_config(config):
  assert config_lib.ModelConfig.from_json(
      config.to_json(), config.name) == config


def test_each_published_size_has_a_file():
  found = {p.stem for p in CONFIGS.glob('*.py')}
  assert found == {*SIZES, *FLYWHEELS, 'tiny'}


@pytest.mark.parametrize('stem', FLYWHEELS)
def test_a_flywheel_config_is_accepted(stem):
  path = CONFIGS / f'{stem}.py'
  values = absl_flags.FlagValues()
  flywheel.define(values)
  flags.common(values)
  flags.parse(values, ['/run', f'--config={path}'], flywheel.POSITIONAL)
  assert values.model.endswith(stem.rpartition('_')[2])
  assert values.style == ('plain' if '270m' in stem else 'chat')
  assert values.programs is None or (CONFIGS.parent / values.programs).exists()
  text = runpy.run_path(str(path))['__doc__']
  assert 'Expected' in text and f'--config=configs/{stem}.py' in text


@pytest.mark.parametrize('stem', SIZES)
def test_a_config_file_is_accepted_and_says_what_the_plan_says(stem):
  path, name = CONFIGS / f'{stem}.py', SIZES[stem]
  for command in (deposit, verify):
    values = absl_flags.FlagValues()
    command.define(values)
    flags.common(values)
    flags.parse(values, [f'--config={path}', '--store=/s'])
    assert (values.model, values.dtype) == (name, 'bfloat16')
    assert values.capacity == 32768
  values = absl_flags.FlagValues()
  deposit.define(values)
  flags.common(values)
  flags.parse(values, [f'--config={path}', '--model=/path'])
  assert values.model == '/path'

  made = plan.make(
      config_lib.PRESETS[name],
      numerics.Profile('bfloat16', chunk=512, tile=4, page=128), 32768)
  text = runpy.run_path(str(path))['__doc__']
  assert 'Expected' in text and f'--config=configs/{stem}.py' in text
  assert f'kvgraft plan --model={name} --context=32768' in text
  needs = text[text.index('Needs'):]
  numbers = [int(n.replace(',', '')) for n in re.findall(
      r'^  ([\d,]+)|([\d,]+) (?:bytes of weights|sliding|global)', needs, re.M)
             for n in n if n]
  kv = made.kv_per_token
  assert numbers == [
      made.parameters, made.weights, sum(kv.values()), kv['sliding'],
      kv['global'], made.cache]
