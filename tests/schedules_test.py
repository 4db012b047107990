"""The schedules of the invariance matrix."""

import copy

import pytest

from kvgraft_jax import schedules
from kvgraft_jax import selftest
import model_helpers

_TOKENS = model_helpers.tokens(101)


@pytest.mark.parametrize('dtype', model_helpers.DTYPES)
def test_promised_schedules_leave_one_result(dtype):
  model = model_helpers.exact(dtype)
  found = list(schedules.run(model, _TOKENS))
  assert len(found) == schedules.count(model) == len(
      {s.name for s in found})
  assert len({s.sha256 for s in found if s.promised}) == 1
  computed = {s.name: s.tokens_computed for s in found}
  assert computed.pop('graft') == 101 - 48  # The rest came from a store.
  assert set(computed.values()) == {101}


def test_promises_are_those_of_the_self_test():
  model = copy.copy(model_helpers.exact())
  report = model.self_test()
  refuted = selftest.Report(
      report.version, report.tokens,
      {**report.invariances, 'slot': False, 'batch': False, 'rows_16': False},
      report.digests, report.elapsed_s)
  model._report = refuted
  promised = {s.name: s.promised for s in schedules.run(model, _TOKENS)}
  assert {n for n, yes in promised.items() if not yes} == {
      'rows_16', 'batch', 'split', 'one_by_one', 'graft'}


def test_another_text_has_another_result():
  model = model_helpers.exact()
  one, other = (next(schedules.run(model, t)).sha256 for t in (
      _TOKENS, [*_TOKENS[:50], 7, *_TOKENS[51:]]))
  assert one != other
