"""The own-position study against the plain forward and against the engine."""

import dataclasses

import numpy as np
import pytest

from kvgraft_jax import config as config_lib
from kvgraft_jax import entries
from kvgraft_jax import reference
from kvgraft_jax import study
import model_helpers

_BLOCK, _TAIL = 40, 6
_TOKENS = model_helpers.tokens(_BLOCK + _TAIL)
_PAGE = 16


def _found(case, offsets, dtype='bfloat16', tokens=None):
  model = model_helpers.tiny(dtype)
  return {(c.what, c.m): c for c in study.compare(
      model, case, tokens or _TOKENS, _BLOCK, offsets)}


def _compared(comparison):
  """Returns the ledger's comparison of it, rows by hash included."""
  a, b = (entries.logits(
      state.what, state.logits, 0, profile='', group={}, computed=0, restored=0)
          for state in (comparison.a, comparison.b))
  return entries.compare('', a, b, {})


def _equal(comparison):
  return _compared(comparison)['equal']


def _sizes(comparison, figure='max_abs'):
  return list(map(float, _compared(comparison)[figure]))


def _changed(**changes):
  return dataclasses.replace(study.CASES['base'], name='changed', **changes)


@pytest.mark.parametrize('name', study.CASES)
def test_exact_at_its_own_position_in_every_case(name):
  case = study.CASES[name]
  dtype = 'float32' if case.dtype == 'float64' else case.dtype
  found = _found(case, (0, 8, 304), dtype)
  for m in (0, 8, 304):
    own = found['own', m]
    assert _equal(own) == _TAIL
    assert _sizes(own) == _sizes(own, 'kl') == [0.0] * _TAIL
    # The graft really happened: the tail was computed and nothing else.
    assert (own.b.tokens_restored, own.b.tokens_computed) == (_BLOCK, _TAIL)
    assert own.a.tokens_computed == _BLOCK + _TAIL
  control = found['moved', 0]
  assert _equal(control) == _TAIL and control.keys_equal == control.keys
  if name != 'slots':  # Nor is it a comparison that cannot fail.
    for what in ('fresh', 'moved'):
      assert _equal(found[what, 304]) == 0
      assert min(_sizes(found[what, 304])) > 0
      assert min(_sizes(found[what, 304], 'kl')) > 0


def test_a_changed_bit_is_seen(monkeypatch):
  restored = study._Steps._restored

  def changed(self, rows):
    for _, k, _ in rows.content.values():
      k[0, 30, 0, 3] ^= 1
    return restored(self, rows)

  monkeypatch.setattr(study._Steps, '_restored', changed)
  assert _equal(_found(study.CASES['base'], (0,))['own', 0]) < _TAIL


def test_base_case_at_zero_is_the_engine():
  model = model_helpers.tiny()
  found = _found(study.CASES['base'], (0,))
  context = model.prefill(_TOKENS[:_BLOCK])
  assert found['own', 0].a.logits.tobytes() == context.logits_of(
      _TOKENS[_BLOCK:]).tobytes()


@pytest.mark.parametrize('kinds', [
    config_lib.KINDS, (config_lib.SLIDING,), (config_lib.GLOBAL,)])
def test_fresh_at_an_offset_is_that_of_the_plain_forward(kinds):
  model, m = model_helpers.tiny('float32'), 700
  found = _found(_changed(dtype='float32', kinds=kinds), (m,), 'float32')
  shift = {kind: m if kind in kinds else 0 for kind in config_lib.KINDS}
  hidden = reference.forward(
      model.params, model.config, _TOKENS, dtype=np.float64, shift=shift)
  want = reference.head(model.params, model.config, hidden[_BLOCK:])
  np.testing.assert_allclose(
      found['own', m].a.logits, want, rtol=0, atol=2e-4)


def test_turned_keys_are_those_of_the_offset():
  moved = _found(_changed(dtype='float32'), (900,), 'float32')['moved', 900]
  assert 0 < moved.keys_equal < moved.keys
  assert moved.keys_max_abs < 4e-6
  # In bfloat16 the same, to the rounding of a key of up to 16.
  moved = _found(study.CASES['base'], (900,))['moved', 900]
  assert moved.keys_max_abs <= 2.0 ** -4


def test_slots_move_by_whole_pages_without_a_trace():
  found = _found(study.CASES['slots'], (0, 8, _PAGE, 5 * _PAGE, 63 * _PAGE))
  for m in (_PAGE, 5 * _PAGE, 63 * _PAGE):
    for what in ('fresh', 'own', 'moved'):
      assert _equal(found[what, m]) == _TAIL
  # Half a page regroups the partial sums.
  assert _equal(found['fresh', 8]) < _TAIL


def test_float32_angles_leave_small_positions_alone_and_drift_at_large_ones():
  exact = _found(study.CASES['float32'], (4, 4096), 'float32')
  both = _found(study.CASES['float32_both'], (4, 4096), 'float32')

  def size(found, m):
    return float(np.median(_sizes(found['moved', m])))

  assert size(both, 4) < 3 * size(exact, 4)
  assert size(both, 4096) > 5 * size(exact, 4096)


def test_window_storage_keeps_less_and_gives_the_same(monkeypatch):
  sizes, restored = [], study._Steps._restored

  def seen(self, rows):
    sizes.append(rows.content[config_lib.SLIDING][1].shape[1])
    return restored(self, rows)

  monkeypatch.setattr(study._Steps, '_restored', seen)
  full = _found(study.CASES['base'], (8,))
  window = _found(study.CASES['window'], (8,))
  assert sizes == [_BLOCK] * 2 + [model_helpers.WINDOW] * 2
  for key in full:
    assert full[key].b.logits.tobytes() == window[key].b.logits.tobytes()


def test_rounding_shrinks_with_the_dtype():
  sizes = []
  for name, dtype in (('base', 'bfloat16'), ('float32', 'float32'),
                      ('float64', 'float32')):
    moved = _found(study.CASES[name], (100,), dtype)['moved', 100]
    sizes.append(float(np.median(_sizes(moved))))
  assert sizes[0] > 1e3 * sizes[1] > 1e6 * sizes[2] > 0
