"""The verdicts of a report, and the figures that they rest on.

Verdicts of one checker that passed on the same conditions share a row, where
"…" stands for what differs; one that failed stands alone.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from kvgraft_jax import recheck
from kvgraft_jax import report_page as page

_SHOWN = 12  # Conditions of a row; more stand in the table of all.

Bodies = Sequence[Mapping[str, Any]]
Summaries = Mapping[str, Mapping[str, Any]]


def section(verdicts: Bodies, summaries: Summaries) -> page.Section:
  """Returns what checkers said and why.

  Args:
    verdicts: bodies of the `verdict` lines.
    summaries: id -> body, of the whole ledger.
  """
  if not verdicts:
    return page.absent('Verdicts')
  groups: dict[Any, list[Mapping[str, Any]]] = {}
  for i, body in enumerate(verdicts):
    # A number is in no key of the others.
    key = _key(body, summaries) if body.get('passed') is True else i
    groups.setdefault(key, []).append(body)
  passed = sum(body.get('passed') is True for body in verdicts)
  return page.Section('verdicts', 'Verdicts', [
      page.Text(f'{page.count(len(verdicts), "verdict")}, {passed:,} passed.'),
      page.Table('What each checker ran, and the figures that its verdict rests'
                 ' on: name, value, what is required. Verdicts that passed on'
                 ' the same conditions share a row.',
                 ['Verdict', 'Result', 'Ran', 'Because'],
                 [_row(bodies, summaries) for bodies in groups.values()])])


def conditions(verdicts: Bodies, summaries: Summaries) -> list[page.Section]:
  """Returns every condition of every verdict, if there are any."""
  rows = [[page.plain(body.get('id')), *_condition(c, summaries)]
          for body in verdicts for c in _because(body)]
  if not rows:
    return []
  title = f'All conditions: {page.count(len(rows), "figure")}'
  return [page.Section('conditions', 'Conditions of verdicts', [
      page.Fold(title, [page.Table(
          'Figures that verdicts rest on, and what each is required to be.',
          ['Verdict', 'Figure', 'Value', 'Required'], rows, [2, 3])])])]


def _row(bodies: Bodies, summaries: Summaries) -> list[str | page.Cell]:
  body, several = bodies[0], len(bodies) > 1
  name: str | page.Cell = page.plain(body.get('id'))
  if several:
    name = page.Cell('list', entries=[
        f'{page.plain(body.get("checker"))}, {len(bodies):,} verdicts:',
        ', '.join(map(_label, bodies))])
  ran = _ran(body) if several else body.get('ran')
  because = _because(body)
  if body.get('passed') is not True:  # First what it failed by.
    because = sorted(because, key=lambda c: _holds(c, summaries))
  found = [_condition(c, summaries) for c in because]
  if several:
    found = [(_pattern(a, body), b, c) for a, b, c in found]
  shown = [f'{a}: {b}, {c}' for a, b, c in found[:_SHOWN]]
  if len(found) > _SHOWN:
    shown.append(f'and {len(found) - _SHOWN:,} more, see Conditions of'
                 ' verdicts')
  return [
      name,
      page.Cell('good', '✓ passed') if body.get('passed') is True
      else page.Cell('bad', '✗ FAILED'),
      page.Cell('list', entries=[
          page.plain(body.get('checker', '')), *page.pairs(ran).entries]),
      page.Cell('list', entries=[
          *(shown or ['no figure of this ledger']),
          *(page.pairs(body['evidence']).entries
            if body.get('evidence') else [])])]


def _key(body: Mapping[str, Any], summaries: Summaries) -> Any:
  """Returns what verdicts have in common that share a row."""
  return page.plain([
      body.get('checker'), _ran(body), body.get('evidence'),
      [(_pattern(a, body), b, c) for a, b, c in (
          _condition(c, summaries) for c in _because(body))]])


def _label(body: Mapping[str, Any]) -> str:
  """Returns the part of a verdict's id behind its checker's name."""
  return page.plain(body.get('id')).removeprefix(
      f'{page.plain(body.get("checker"))}/')


def _pattern(summary: str, body: Mapping[str, Any]) -> str:
  """Returns the id of a summary without the verdict's own label."""
  label = _label(body)
  return '/'.join('…' if part == label else part for part in summary.split('/'))


def _ran(body: Mapping[str, Any]) -> Any:
  """Returns what a verdict ran, without the verdict's own label."""
  ran, label = body.get('ran'), _label(body)
  if not isinstance(ran, dict):
    return ran
  return {name: value for name, value in ran.items() if value != label}


def _because(body: Mapping[str, Any]) -> list[dict[str, Any]]:
  return [page.mapping(c) for c in page.sequence(body.get('because'))]


def _condition(
    condition: Mapping[str, Any], summaries: Summaries,
) -> tuple[str, str, str]:
  """Returns a figure's name, its value and what is required of it."""
  name = page.plain(condition.get('summary'))
  value = (page.plain(summaries[name].get('value')) if name in summaries
           else 'not in this ledger')
  return (name, value, f'{page.plain(condition.get("op"))}'
          f' {page.plain(condition.get("value"))}')


def _holds(condition: Mapping[str, Any], summaries: Summaries) -> bool:
  value = page.mapping(summaries.get(page.plain(condition.get('summary'))))
  try:
    return recheck.holds(value.get('value'), page.plain(condition.get('op')),
                         condition.get('value'))
  except ValueError:
    return False
