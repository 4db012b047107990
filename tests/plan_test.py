"""The plan against real deposits, real caches and formulas by hand."""

import json
import math
import os
import pathlib

import jax
import pytest

import command_helpers
import kvgraft_jax as kv
from kvgraft_jax import cache
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import memory
from kvgraft_jax import numerics
from kvgraft_jax import plan
from kvgraft_jax import rope
from kvgraft_jax import store as store_lib
from kvgraft_jax.checkpoints import hf_export
from kvgraft_jax.checkpoints import tree
import model_helpers

CPU = numerics.Profile('bfloat16', chunk=512, tile=4, page=128)
# Bytes of one token in one sliding and one global layer, K and V in bfloat16:
# 2 parts * kv heads * head dim * 2 bytes; and how many layers there are.
BY_HAND = {
    'gemma4-12b': ((2 * 8 * 256 * 2, 40, 8), (2 * 1 * 512 * 2, 8, 1)),
    'gemma4-31b': ((2 * 16 * 256 * 2, 50, 16), (2 * 4 * 512 * 2, 10, 4)),
}


def data_bytes(root) -> int:
  """Returns bytes of all data files below `root`."""
  return sum(p.stat().st_size for p in pathlib.Path(root).rglob('*')
             if p.is_file() and (p.name == 'tokens' or p.name.startswith('c.')))


def by_hand(name: str, tokens: int, window: bool) -> int:
  """Returns bytes of an artifact of [0, tokens), written out again."""
  total = 4 * tokens
  for token_bytes, layers, heads in BY_HAND[name]:
    first = 0
    if window and token_bytes == BY_HAND[name][0][0]:
      first = max(0, (tokens - 1025) // 512 * 512)
    blocks = math.ceil(tokens / 512) - first // 512
    rows = tokens - first
    if blocks > 1:
      rows = math.ceil(rows / 256) * 256
    # An index entry of 16 bytes for each column and inner chunk, a checksum.
    inner = 2 if blocks > 1 else 1
    total += rows * layers * token_bytes
    total += blocks * (16 * inner * layers * 2 * heads + 4)
  return total


@pytest.mark.parametrize('sliding', plan.MODES)
def test_artifacts_are_as_large_as_planned(tmp_path, sliding):
  model = model_helpers.exact()
  for length in (1, 31, 32, 33, 57, 58, 89, 150):
    root = tmp_path / str(length)
    made = kv.deposit(model, store_lib.Store(str(root)),
                      model_helpers.tokens(length), sliding=sliding)
    planned = plan.artifact_bytes(model.config, model.profile, length, sliding)
    assert made.manifest.nbytes == data_bytes(root) == planned


@pytest.mark.parametrize('sliding', plan.MODES)
def test_children_are_as_large_as_planned(tmp_path, sliding):
  model = model_helpers.exact()
  store = store_lib.Store(str(tmp_path))
  parent = kv.deposit(model, store, model_helpers.tokens(70))
  for start, length, block in ((70, 1, None), (70, 90, None), (33, 40, 64)):
    before = data_bytes(tmp_path)
    child = kv.deposit(
        model, store, model_helpers.tokens(length, seed=1), parent,
        parent_length=start, sliding=sliding, block=block)
    planned = plan.artifact_bytes(
        model.config, model.profile, start + length, sliding, start, block)
    assert child.manifest.nbytes == planned
    assert data_bytes(tmp_path) - before == planned


@pytest.mark.parametrize('dtype', model_helpers.DTYPES)
def test_weights_and_cache_are_as_large_as_planned(dtype):
  model = model_helpers.tiny(dtype)
  assert numerics.profile_for(model.config, dtype).chunk == model.profile.chunk
  assert numerics.profile_for(model.config, dtype).page == model.profile.page
  leaves = jax.tree.leaves(model.params)
  assert tree.weight_bytes(model.config, dtype) == sum(x.nbytes for x in leaves)
  assert plan.parameters(model.config) == sum(x.size for x in leaves)
  for length in (1, 200, 225):
    made = plan.make(model.config, model.profile, length)
    context = model.prefill(model_helpers.tokens(length))
    assert made.cache == context.nbytes
    assert made.cache_slots == context.cache.capacity
    assert made.recorded == length * 3 * 2 * 2 * 32 * (
        2 if dtype == 'bfloat16' else 4)


@pytest.mark.parametrize('spec', ['tiny:0', 'tiny-gemma4-12b:0'])
def test_streamed_contexts_take_and_read_what_is_planned(tmp_path, spec):
  model = model_helpers.tiny_of(spec)
  store = store_lib.Store(str(tmp_path))
  # Around a page of 16 and a block of 32, which is read whole.
  for length in (1, 16, 17, 33, 64, 100, 209):
    planned = plan.make(model.config, model.profile, length).streamed
    made = kv.deposit(model, store, model_helpers.tokens(length))
    context = kv.graft(
        model, store, made, streaming=kv.Streaming(host_kv_bytes=1))
    assert context.nbytes == planned.device_kv_default
    before = context.usage().store_bytes_read
    context.append(7)
    context.compute()
    assert context.usage().store_bytes_read - before == planned.read_per_step
  context = model.prefill([5], streaming=kv.Streaming(planned.device_kv_least))
  assert context.nbytes == planned.device_kv_least
  with pytest.raises(errors.UsageError, match='device_kv_bytes'):
    model.prefill([5], streaming=kv.Streaming(planned.device_kv_least - 1))


def test_a_streamed_context_needs_the_same_at_every_length():
  config = config_lib.PRESETS['gemma3-270m']
  made = [plan.make(config, CPU, n, beyond=True)
          for n in (8_192, 1 << 18, 1 << 24)]
  assert len({(m.streamed.needed, m.streamed.needed_least)
              for m in made}) == 1
  # 3 global layers of one kv head: 3,072 bytes a token.
  assert [m.streamed.read_per_step for m in made] == [
      8_192 * 3072, (1 << 18) * 3072, (1 << 24) * 3072]
  small = made[0].streamed
  assert small.device_kv_least < small.device_kv_default < made[0].cache
  assert made[0].needed - made[0].cache == small.needed - (
      small.device_kv_default)


def test_the_default_profile_is_the_models():
  model = engine.load_model('tiny:0', self_test=False)
  assert numerics.profile_for(model.config, 'bfloat16') == model.profile


def test_the_published_arithmetic():
  small = config_lib.PRESETS['gemma4-12b']
  assert sum(cache.token_bytes(small, 'bfloat16').values()) == 344_064
  made = plan.make(small, CPU, 464)
  # 159,645,696 bytes of K and V, 1,856 of token ids, 10,504 of two indices.
  assert made.artifact == {'full': 159_658_056, 'window': 159_658_056}
  assert memory.human(made.artifact['full']) == '160 MB'
  large = config_lib.PRESETS['gemma4-31b']
  assert sum(cache.token_bytes(large, 'bfloat16').values()) == 901_120


@pytest.mark.parametrize('name, tokens, passage, count, full, window', [
    # 88 passages: K and V of the global layers alone are 46.8 GB.
    ('gemma4-12b', 2_854_766, 32_441, 88, 984_516_062_648, 83_805_149_656),
    ('gemma4-31b', 2_854_766, 32_441, 88, 2_578_469_023_160, 326_691_772_888),
    ('gemma4-12b', 50_000_000, 16_000, 3125, 17_343_125_600_000,
     2_136_917_237_500),
    ('gemma4-31b', 50_000_000, 16_000, 3125, 45_422_024_800_000,
     7_406_504_437_500),
])
def test_a_published_corpus(name, tokens, passage, count, full, window):
  made = plan.corpus(config_lib.PRESETS[name], CPU, tokens, passage)
  assert made.passages == count
  assert made.store == {'full': full, 'window': window}
  lengths = [passage] * (tokens // passage) + [tokens % passage]
  for mode in plan.MODES:
    assert made.store[mode] == sum(
        by_hand(name, n, mode == 'window') for n in lengths if n)
    assert made.passage[mode] == by_hand(name, passage, mode == 'window')


def test_the_longest_context_is_the_last_that_fits():
  config = config_lib.PRESETS['gemma4-e4b']
  for deposit in (False, True):
    available = 18 * 10**9
    longest = plan.largest_context(config, CPU, available, deposit=deposit)
    assert 0 < longest < config.max_context

    def needed(n, deposit=deposit):
      return plan.needed_bytes(config, CPU, n, deposit=deposit)

    assert needed(longest) <= available < needed(longest + 1)
  assert plan.largest_context(config, CPU, 10**9) == 0
  assert plan.largest_context(config, CPU, 10**12) == config.max_context
  assert plan.largest_context(
      config, CPU, 10**12, beyond=True) == rope.MAX_POSITION


@pytest.mark.parametrize('spec, name', [
    ('gemma4-12b', 'gemma4-12b'), ('random:gemma3-27b:7', 'gemma3-27b'),
    ('tiny:0', 'tiny'), ('tiny-gemma4-e2b:3', 'tiny-gemma4-e2b')])
def test_a_size_is_found_by_name(spec, name):
  assert plan.config_of(spec).name == name


def test_command():
  found = command_helpers.ok(
      'plan', '--model=gemma4-12b', '--context=464', '--devices=8',
      '--corpus_tokens=2854766', '--passage_tokens=32441')
  assert found['artifact'] == {'full': 159658056, 'window': 159658056}
  assert found['weights'] == 23_816_240_320
  assert found['weights_per_device'] == found['weights'] // 8
  assert found['kv_per_token'] == {'sliding': 327_680, 'global': 16_384}
  assert found['corpus']['store']['window'] == 83_805_149_656
  assert found['fits'] == (found['needed'] <= found['available_bytes'])
  assert found['fits'] == (found['largest_context'] >= 464)
  result = command_helpers.call('plan', '--context=200000')
  assert result.rc == 0 and result.json is not None
  assert [m['model'] for m in result.json['models']] == list(config_lib.PRESETS)
  assert [m['context'] for m in result.json['models']] == [
      min(200_000, c.max_context) for c in config_lib.PRESETS.values()]
  assert all(name in result.stdout for name in config_lib.PRESETS)


def test_command_beyond_the_trained_length():
  argv = ('plan', '--model=gemma3-1b', '--context=1000000',
          '--allow_beyond_trained')
  found = command_helpers.ok(*argv)
  assert found['context'] == 1_000_000 and found['beyond_trained'] is True
  streamed = found['streamed']
  # The last page is on the device; the one in front of it ends a block.
  assert streamed['read_per_step'] == 999_936 * 4096
  assert found['fits_streamed'] == (
      streamed['needed'] <= found['available_bytes'])
  text = command_helpers.call(*argv).stdout
  assert 'beyond the trained length' in text
  assert memory.human(streamed['device_kv_default']) + ' by default' in text
  assert memory.human(streamed['device_kv_least']) + ' at least' in text
  assert memory.human(streamed['read_per_step']) + ' from host' in text
  short = command_helpers.call('plan', '--model=gemma3-1b', '--context=1000')
  assert short.json['beyond_trained'] is False
  assert 'beyond the trained length' not in short.stdout
  found = command_helpers.ok(
      'plan', '--context=200000', '--allow_beyond_trained')
  assert {m['context'] for m in found['models']} == {200_000}
  found = command_helpers.ok(
      'plan', '--model=tiny:0', '--corpus_tokens=20000',
      '--passage_tokens=9999', '--allow_beyond_trained')
  assert found['corpus']['passages'] == 3


@pytest.mark.parametrize('argv, message', [
    (['--model=gemma9'], 'no such size or checkpoint'),
    (['--model=gemma3-1b', '--context=32769'],
     '1 to 32768, the context of gemma3-1b, found 32769; choose fewer, or'
     ' --allow_beyond_trained'),
    (['--model=gemma3-1b', '--context=16777217', '--allow_beyond_trained'],
     '1 to 16777216, the positions that are exact'),
    (['--model=gemma3-1b', '--corpus_tokens=5'], 'give both'),
    (['--corpus_tokens=5', '--passage_tokens=5'], 'one --model'),
    (['--model=tiny:0', '--corpus_tokens=5', '--passage_tokens=9999'],
     '1 to 4096'),
])
def test_refusals(argv, message):
  assert message in command_helpers.refusal(2, 'plan', *argv)


def _write(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)


def test_host_memory_is_bounded_by_control_groups(tmp_path):
  proc, groups = tmp_path / 'proc', tmp_path / 'cgroup'
  assert memory.host_bytes(proc, groups) is None
  _write(proc / 'meminfo', 'MemTotal: 9000 kB\nMemAvailable: 8000 kB\n')
  assert memory.host_bytes(proc, groups) == 8_192_000

  # Version 2: the tightest of a group and those around it.
  _write(proc / 'self' / 'cgroup', '0::/job/step\n')
  for name, limit, used in (('job', '5000000', 1_000_000),
                            ('job/step', 'max', 900_000)):
    _write(groups / name / 'memory.max', limit + '\n')
    _write(groups / name / 'memory.current', f'{used}\n')
  _write(groups / 'job' / 'memory.stat', 'anon 7\ninactive_file 300000\n')
  assert memory.host_bytes(proc, groups) == 4_300_000

  # Version 1, seen from inside a container: the group is the mounted root.
  _write(proc / 'self' / 'cgroup', '4:cpu,memory:/docker/abc\n0::/\n')
  v1 = groups / 'memory'
  _write(v1 / 'memory.limit_in_bytes', '2000000\n')
  _write(v1 / 'memory.usage_in_bytes', '1800000\n')
  _write(v1 / 'memory.stat', 'inactive_file 1\ntotal_inactive_file 50000\n')
  assert memory.host_bytes(proc, groups) == 250_000
  _write(v1 / 'memory.usage_in_bytes', '2100000\n')
  assert memory.host_bytes(proc, groups) == 0


def test_what_cannot_fit_is_refused():
  available = memory.available_bytes()
  assert available is not None and 0 < available <= (
      os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))
  memory.check(1, 'a byte')
  with pytest.raises(errors.CapacityError, match='^X needs 1,000 PB .*plan'):
    memory.check(10**18, 'X')


@pytest.mark.parametrize('nbytes, text', [
    (0, '0 B'), (999, '999 B'), (1000, '1.00 kB'), (9_994, '9.99 kB'),
    (99_949, '99.9 kB'), (159_658_056, '160 MB'), (999_600_000, '1.00 GB'),
    (83_805_149_656, '83.8 GB')])
def test_human(nbytes, text):
  assert memory.human(nbytes) == text


@pytest.mark.parametrize('text, nbytes', [
    ('786432', 786432), ('1', 1), ('12B', 12), ('48MB', 48_000_000),
    ('1.5GiB', 3 << 29), ('1.1 kb', 1100), (' 2TiB ', 2 << 40),
    ('0.1PB', 10**14), ('1.50 GB', 1_500_000_000)])
def test_sizes_as_they_are_given(text, nbytes):
  assert memory.parse_bytes(text, 'x') == nbytes


@pytest.mark.parametrize('text', [
    '', '0', '0.5', '-1', '1e9', '48M', 'MB', '1,5GB', '1.GB', '1 2', '\u0661',
    'infGB'])
def test_what_is_no_size_is_refused(text):
  with pytest.raises(errors.UsageError, match='--x: expected a size such as'):
    memory.parse_bytes(text, 'x')


def test_a_config_alone_is_enough(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(
      hf_export.config_json(config_lib.PRESETS['gemma4-e2b'], 'bfloat16')))
  assert plan.config_of(str(tmp_path)) == config_lib.PRESETS['gemma4-e2b']
  (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
  with pytest.raises(errors.UsageError, match='model_type expected'):
    plan.config_of(str(tmp_path))
