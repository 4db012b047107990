"""The figures and verdicts of a flywheel run, over its lines."""

from __future__ import annotations

from typing import Any

from kvgraft_jax import flywheel_work

# Figure -> kind of line, field, rule.
_ANSWERS = {
    'count': ('answer', '', 'count'),
    'right': ('score', 'value', 'count_true'),
    'hits': ('answer', 'hit', 'count_true'),
    'wrong_hits': ('answer', 'wrong_hit', 'count_true'),
    'decoded': ('answer', 'tokens_decoded', 'sum'),
    'computed': ('answer', 'tokens_computed', 'sum'),
    'restored': ('answer', 'tokens_restored', 'sum'),
    'steps': ('answer', 'steps', 'sum'),
    'decoded_median': ('answer', 'tokens_decoded', 'median'),
}


def write(work: flywheel_work.Work) -> None:
  """Writes every figure once, and what is expected of them."""
  groups = {
      tuple(sorted(body['group'].items())): body['group']
      for line in work.ledger.lines
      if line['kind'] == 'answer' and (body := line['body'])}
  wider: dict[str, dict[str, Any]] = {}
  for group in groups.values():
    where = {k: group[k] for k in ('phase', 'round', 'what')}
    wider[_name(where)] = where
    if group['phase'] == 'control':
      wider[_name(where | {'split': group['split']})] = where | {
          'split': group['split']}
  for name, where in wider.items():
    for figure, (kind, field, rule) in _ANSWERS.items():
      if field == 'steps' and where['phase'] != 'recurrence':
        continue  # Only there are tokens looked up in a solution.
      _figure(work, f'{name}/{figure}', kind, where, field, rule)
  for what in ('bare', 'grafted'):
    where = {'phase': 'transfer', 'what': what}
    if any(line['kind'] == 'likelihood' for line in work.ledger.lines):
      _figure(work, f'likelihood/{what}/count', 'likelihood', where, '',
              'count')
      _figure(work, f'likelihood/{what}/right', 'likelihood', where, 'right',
              'count_true')
  for source in ('model', 'provided'):
    _figure(work, f'entries/{source}', 'entry', {'source': source}, '', 'count')
  for checker in ('programs', 'key'):
    _figure(work, f'entries/{checker}', 'entry', {'checker': checker}, '',
            'count')
  _figure(work, 'entries', 'entry', {}, '', 'count')
  _figure(work, 'problems', 'problem', {'split': 'base'}, '', 'count')
  if any(line['kind'] == 'compare' for line in work.ledger.lines):
    for figure in ('rows', 'equal'):
      _figure(work, f'grafts/{figure}', 'compare', {}, figure, 'sum')
  for figure in ('hits', 'wrong_hits'):
    _figure(work, figure, 'answer', {'what': 'given'}, figure[:-1],
            'count_true')
  _verdicts(work)


def _verdicts(work: flywheel_work.Work) -> None:
  expected = {'wrong_hits': [('wrong_hits', 0)],
              'control': [('control/0/given/hits', 0)]}
  rows = work.recorded('summary', 'grafts/rows')
  if rows is not None:  # None where nothing was solved.
    expected = {'grafts': [('grafts/equal', rows['value'])], **expected}
  for name, because in expected.items():
    if not work.recorded('verdict', f'flywheel/{name}'):
      work.ledger.verdict(
          f'flywheel/{name}', 'flywheel', {'dataset': work.settings.dataset},
          [{'summary': id, 'op': '==', 'value': value}
           for id, value in because])


def _name(where: dict[str, Any]) -> str:
  return '/'.join(map(str, where.values()))


def _figure(
    work: flywheel_work.Work, name: str, kind: str, where: dict[str, Any],
    field: str, rule: str,
) -> None:
  """Writes a figure over the lines of some labels, if it is not there."""
  if not work.recorded('summary', name):
    over = {'kind': kind,
            'where': {f'group.{k}': v for k, v in where.items()}}
    work.ledger.summary(name, over, field, rule)
