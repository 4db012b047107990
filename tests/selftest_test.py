import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import layers
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics
from kvgraft_jax import selftest
import model_helpers

_IDS = model_helpers.tokens(150)


@pytest.fixture(scope='module')
def model():
  return model_helpers.tiny()


@pytest.fixture(scope='module')
def report(model):
  return selftest.run(model.config, model.profile, model.params)


@pytest.fixture
def cache_dir(monkeypatch, tmp_path):
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path))
  return tmp_path


def test_report_names_what_it_tested(report):
  assert set(numerics.REQUIRED) < set(report.invariances)
  assert {'batch', 'chunk', 'rows_32', 'rows_16', 'rows_8', 'rows_4'} < set(
      report.invariances)
  assert report.invariances['mesh'] is None
  assert all(isinstance(v, bool) for n, v in report.invariances.items()
             if n != 'mesh')
  assert set(report.digests) == {
      'rows_32', 'rows_16', 'rows_8', 'rows_4', 'run', 'slot', 'neighbours',
      'capacity', 'stream'}
  assert report.tokens == 32 + 16 + 3


def test_tiny_is_invariant_here(report):
  if numerics.environment()['backend'] != 'cpu':
    pytest.skip('CPU only')
  refuted = [n for n, v in report.invariances.items() if v is False]
  assert refuted == [] and report.exact
  assert len(set(report.digests.values())) == 1


def test_row_ladder():
  ladder = selftest.row_ladder
  assert ladder(numerics.Profile('bfloat16', 512, 4, 128)) == [
      512, 256, 128, 64, 16, 4]
  assert ladder(numerics.Profile('float32', 512, 64, 128)) == [
      512, 256, 128, 64, 16, 4]
  assert ladder(numerics.Profile('float32', 4, 2, 16)) == [4, 2]


def test_exact_needs_every_required_invariance(report):
  for name in numerics.REQUIRED:
    for value in (False, None):
      changed = dataclasses.replace(
          report, invariances=report.invariances | {name: value})
      assert not changed.exact
  for name in ('batch', 'chunk'):  # The class keeps a chunk that is not proven.
    other = dataclasses.replace(
        report, invariances=report.invariances | {name: False})
    assert other.exact == report.exact


def test_json_round_trip(report):
  text = json.dumps(report.to_json())
  back = selftest.Report.from_json(json.loads(text))
  assert back.to_json() == report.to_json()
  assert back.invariances == report.invariances


def test_the_second_time_it_is_read(model, report, cache_dir, monkeypatch):
  calls = []
  monkeypatch.setattr(
      selftest, 'run', lambda *a: calls.append(a) or report)
  args = model.config, model.profile, model.params
  first = selftest.load_or_run(*args)
  second = selftest.load_or_run(*args)
  assert len(calls) == 1 and first.to_json() == second.to_json()
  path, = (cache_dir / 'selftest').iterdir()
  for damage in (b'', b'{', b'[]', b'{"version": 1}', b'\xff'):
    path.write_bytes(damage)
    calls.clear()
    assert selftest.load_or_run(*args).to_json() == report.to_json()
    assert len(calls) == 1, damage
  # Another machine, profile or shape has a report of its own.
  other = dataclasses.replace(model.profile, page=32)
  selftest.load_or_run(model.config, other, model.params)
  wider = dataclasses.replace(model.config, hidden=256)
  selftest.load_or_run(wider, model.profile, model.params)
  assert len(calls) == 3


def test_an_unwritable_cache_only_costs_time(model, report, monkeypatch,
                                             tmp_path):
  file = tmp_path / 'file'
  file.write_text('')
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(file))
  monkeypatch.setattr(selftest, 'run', lambda *a: report)
  args = model.config, model.profile, model.params
  assert selftest.load_or_run(*args) is report


def test_the_report_agrees_with_the_whole_model(model, report):
  """Chunk, tile and capacity: five layers against the two of the report."""
  base = model.prefill(_IDS).logits_sha256()
  other = model_helpers.variant(model, chunk=64, tile=8)
  small = model.context()
  for token in _IDS:
    small.extend([token])
  found = {
      'chunk': other.prefill(_IDS).logits_sha256() == base,
      'tile': small.logits_sha256() == base,
      'run': model.prefill(_IDS).logits_sha256() == base,
  }
  assert found == {name: report.invariances[name] for name in found}


def test_a_row_count_dependence_is_found(model, monkeypatch):
  """A sum whose last bit depends on the row count, as a library's may."""
  tree_sum = layers.tree_sum

  def uneven(x):
    total = tree_sum(x)
    bits = jax.lax.bitcast_convert_type(total, jnp.uint32)
    more = np.uint32(x.shape[0] == 2)
    return jax.lax.bitcast_convert_type(bits + more, jnp.float32)

  monkeypatch.setattr(layers, 'tree_sum', uneven)
  report = _short(model)
  assert report.invariances['tile'] is False
  assert report.invariances['chunk'] is False
  assert not report.exact
  assert report.invariances['run'] is report.invariances['capacity'] is True


@pytest.mark.slow  # 10 s on 2 cores.
def test_a_slot_dependence_is_found(model, monkeypatch):
  """A norm that favours the first row of a step."""
  rms_norm = layers.rms_norm

  def favour(x, *args):
    out = rms_norm(x, *args)
    return out.at[0].multiply(np.float32(1.0000002))

  monkeypatch.setattr(layers, 'rms_norm', favour)
  report = _short(model)
  assert report.invariances['slot'] is False
  assert report.invariances['chunk'] is False
  assert not report.exact


def _short(model):
  """Runs the self-test on a profile of few programs."""
  profile = dataclasses.replace(model.profile, chunk=4, tile=2)
  # Layers are traced once; a patched one must neither be missed nor stay.
  model_lib.run_layer.clear_cache()
  try:
    return selftest.run(model.config, profile, model.params)
  finally:
    model_lib.run_layer.clear_cache()
