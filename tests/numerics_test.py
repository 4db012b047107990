import dataclasses
import json
import pathlib

import numpy as np
import pytest

from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import measure
from kvgraft_jax import numerics
import make_goldens
import model_helpers

_DATA = pathlib.Path(__file__).parent / 'testdata'
_ALL = dict.fromkeys((*numerics.REQUIRED, 'chunk'), True)


def _profile(**changes):
  values = {'dtype': 'bfloat16', 'chunk': 32, 'tile': 4, 'page': 16} | changes
  return numerics.Profile(**values)


@pytest.fixture(scope='module')
def goldens():
  return json.loads((_DATA / 'goldens.json').read_text(encoding='utf-8'))


@pytest.mark.parametrize('changes,message', [
    ({'dtype': 'float16'}, "bfloat16, float32, found 'float16'"),
    ({'chunk': 48}, 'chunk: expected a power of two'),
    ({'tile': 1}, 'tile: .* at least 2 .*, found 1'),
    ({'page': 0}, 'page: .* found 0'),
    ({'page': -16}, 'page: .* found -16'),
    ({'tile': 64}, r'tile: expected at most the chunk \(32\), found 64'),
])
def test_profile_refuses(changes, message):
  with pytest.raises(errors.UsageError, match=message):
    _profile(**changes)


def test_profile_is_frozen_and_hashable():
  assert hash(_profile()) == hash(_profile())
  with pytest.raises(dataclasses.FrozenInstanceError):
    _profile().chunk = 64


@pytest.mark.parametrize('changes', [
    {'dtype': 'float32'}, {'chunk': 64}, {'tile': 8}, {'page': 32},
    {'heads': 'batched'}, {'numerics_version': 2},
    {'compiler_options': (('xla_allow_excess_precision', True),)},
    {'environment': (('jaxlib', '9'),)},
])
def test_every_factor_changes_the_fingerprint(changes):
  assert _profile().fingerprint == _profile().fingerprint
  assert _profile(**changes).fingerprint != _profile().fingerprint


def test_class_drops_chunk_and_tile_only_where_proven():
  profile = _profile()
  whole = profile.factors()
  proven = numerics.numerics_class(profile, _ALL)
  assert set(whole) - set(proven) == {'chunk', 'tile'}
  for name in ('chunk', 'tile'):
    for value in (False, None):
      left = numerics.numerics_class(profile, _ALL | {name: value})
      assert set(left) - set(proven) == {name}
      assert left[name] == whole[name]
  assert numerics.numerics_class(profile, {}) == whole


def test_equal_classes_of_unequal_chunks_share_a_fingerprint():
  a = numerics.numerics_class(_profile(), _ALL)
  b = numerics.numerics_class(_profile(chunk=512, tile=8), _ALL)
  assert numerics.class_fingerprint(a) == numerics.class_fingerprint(b)
  c = numerics.numerics_class(_profile(page=32), _ALL)
  assert numerics.class_fingerprint(a) != numerics.class_fingerprint(c)


def test_first_difference_names_one_factor_in_a_fixed_order():
  ours = _profile(environment=(('jax', '1'), ('threads', '2'))).factors()
  assert numerics.first_difference(ours, ours) is None
  theirs = ours | {'threads': '4', 'page': '32'}
  assert numerics.first_difference(theirs, ours) == ('page', '32', '16')
  extra = ours | {'driver': '550'}
  assert numerics.first_difference(extra, ours) == (
      'driver', '550', 'not listed')
  assert numerics.first_difference(ours, extra) == (
      'driver', 'not listed', '550')


def test_environment_lists_what_may_change_bits(monkeypatch):
  found = numerics.environment()
  assert {'jax', 'jaxlib', 'backend', 'device', 'devices', 'xla_flags'} <= set(
      found)
  if found['backend'] == 'cpu':
    assert {'machine', 'cpu', 'cpu_features', 'threads'} <= set(found)
    assert int(found['threads']) >= 1
    monkeypatch.setenv('NPROC', '7')
    assert numerics.environment()['threads'] == '7'
  monkeypatch.setenv('XLA_FLAGS', '--b=1  --a=2')
  assert numerics.environment()['xla_flags'] == '--a=2 --b=1'
  factors = model_helpers.tiny().profile.factors()
  assert set(found) < set(factors)
  assert factors['option.xla_allow_excess_precision'] == 'False'


def test_goldens_are_of_this_numerics_version(goldens):
  # Raise NUMERICS_VERSION, then run scripts/make_goldens.py, or neither.
  assert goldens['numerics_version'] == numerics.NUMERICS_VERSION
  assert goldens['recipe'] == make_goldens.RECIPE
  assert goldens['bits']
  for entry in goldens['bits']:
    assert entry['numerics_version'] == numerics.NUMERICS_VERSION


def test_goldens_cannot_change_without_a_new_version(goldens, monkeypatch):
  logits, entry = goldens['logits'], goldens['bits'][0]
  same = make_goldens.merge(goldens, logits, [entry])
  assert same == goldens
  changed = entry | {'logits_sha256': '0' * 64}
  with pytest.raises(SystemExit, match='raise NUMERICS_VERSION first'):
    make_goldens.merge(goldens, logits, [changed])
  with pytest.raises(SystemExit, match='raise NUMERICS_VERSION first'):
    make_goldens.merge(goldens, logits[::-1], [entry])
  other = entry | {'class': '1' * 64}
  added = make_goldens.merge(goldens, logits, [other])
  assert len(added['bits']) == len(goldens['bits']) + 1
  monkeypatch.setattr(numerics, 'NUMERICS_VERSION', 10**6)
  anew = make_goldens.merge(goldens, logits, [changed])
  assert anew['numerics_version'] == 10**6 and anew['bits'] == [changed]


@pytest.mark.parametrize('dtype,tolerance', [
    ('float32', 1e-4), ('bfloat16', 0.3)])
def test_tolerance_goldens(goldens, dtype, tolerance):
  model, rows = model_helpers.tiny(dtype), goldens['recipe']['rows']
  logits = model.context().logits_of(model_helpers.tokens(200), rows)
  np.testing.assert_allclose(
      logits[:, ::20], goldens['logits'], rtol=0, atol=tolerance)


def test_the_script_computes_the_tolerance_goldens(goldens):
  np.testing.assert_allclose(
      make_goldens.tiny_logits(), goldens['logits'], rtol=0, atol=2e-6)


@pytest.mark.parametrize('dtype', [
    'bfloat16',
    pytest.param('float32', marks=pytest.mark.slow),  # Its self-test: 30 s.
])
def test_bit_goldens_of_this_class(goldens, dtype):
  found = make_goldens.bit_golden(model_helpers.tiny(dtype))
  listed = {entry['class']: entry for entry in goldens['bits']}
  if found['class'] not in listed:
    pytest.skip('no bit goldens of this numerics class'
                f" ({dtype}, {found['device']}, jaxlib {found['jaxlib']})")
  assert found == listed[found['class']], (
      'bits changed within one class: raise NUMERICS_VERSION and run'
      ' scripts/make_goldens.py')


@pytest.mark.real
@pytest.mark.slow  # 190 and 70 s at a load of 5, cold caches.
@pytest.mark.parametrize('dtype,tolerance', [
    ('float32', 1e-4), ('bfloat16', 0.5)])
def test_real_goldens(dtype, tolerance):
  stored = json.loads((_DATA / 'goldens_270m.json').read_text(encoding='utf-8'))
  model = model_helpers.real(dtype)
  for name, prompt in stored['prompts'].items():
    rows = [found['row'] for found in prompt['rows']]
    logits = model.context().logits_of(prompt['tokens'], rows)
    for found, values in zip(prompt['rows'], logits):
      np.testing.assert_allclose(
          values[found['ids']], found['logits'], rtol=0, atol=tolerance,
          err_msg=f'{name} row {found["row"]}')
      if dtype == 'float32' or found['margin'] > 1.0:
        assert int(values.argmax()) == found['argmax'], (name, found['row'])


def test_a_table_that_is_only_looked_up_is_not_measured():
  model = engine.load_model('tiny-gemma4-e2b:0', self_test=False)
  found = measure.shapes(model).values()
  assert 'embedder/per_layer_embedding' not in found
  assert {'embedder/input_embedding', 'layer_0/per_layer_input_gate/w'} <= set(
      found)
