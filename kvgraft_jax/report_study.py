"""The own-position study of a report: tables and plots of its summaries.

Figures are the summaries "study/CASE/WHAT/M/STATISTIC" as the ledger has them,
if they are over those lines; others stand among the further lines.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import re
from typing import Any

from kvgraft_jax import report_page as page
from kvgraft_jax import report_plots

_TITLE = 'Own-position study'
_ID = re.compile('study/([^/]+)/([^/]+)/([0-9]{1,9})/([^/]+)')
_ABOUT = {
    'fresh': 'computed with positions counted from M, against computed at 0',
    'own': 'grafted at its own position M, against computed at M',
    'moved': 'stored at 0, keys turned by M, grafted at M, against computed'
             ' at M',
}
_COLUMNS = {
    'equal': 'Rows with equal SHA-256', 'argmax_agree': 'Same argmax',
    'kl_median': 'KL of a row, median over rows (nats)',
    'kl_p99': 'KL of a row, p99 over rows (nats)',
    'kl_max': 'KL of a row, maximum over rows (nats)',
    'max_abs_median': 'Largest logit difference of a row, median over rows',
    'max_abs_max': 'Largest logit difference of a row, maximum over rows',
    'keys_equal': 'Keys of the first layer equal',
    'keys_max_abs': 'Largest key difference, maximum over keys',
}
# Counts, and what they are counts of.
_OF = {'equal': 'rows', 'argmax_agree': 'rows', 'keys_equal': 'keys'}
_BASE = 'base'
_INEXACT = ('fresh', 'moved')
_TITLES = {'fresh': 'fresh at M against fresh at 0',
           'moved': 'moved by M against fresh at M'}
_ZOOM = 'bfloat16'  # The other dtypes differ by so much less.
_P99, _P99_ROWS = 'kl_p99', 100  # Of fewer rows p99 is the largest one.


class _Study:
  """Figures by case, comparison, offset and statistic.

  Attributes:
    used: ids of the summaries that they are.
    few: whether a p99 is left out, since it is of too few rows.
    dtypes: case -> dtype, '' where no line says it.
    whats: comparisons, the known ones first.
  """

  def __init__(
      self, compares: Sequence[Mapping[str, Any]],
      summaries: Mapping[str, Mapping[str, Any]],
  ):
    self.used: set[str] = set()
    self.few = False
    self.dtypes: dict[str, str] = {}
    self._values: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for body in compares:
      group = page.mapping(body.get('group'))
      self.dtypes.setdefault(page.plain(group.get('case', '')), page.plain(
          group.get('dtype', '')))
    for name, body in summaries.items():
      match = _ID.fullmatch(name)
      if match and _is_of(body, *match.groups()):
        case, what, m, statistic = match.groups()
        if statistic == _P99 and page.whole(summaries.get(
            name.replace(_P99, 'rows'), {}).get('value')) < _P99_ROWS:
          self.few = True
          continue
        self.used.add(name)
        self.dtypes.setdefault(case, '')
        self._values.setdefault((case, what), {}).setdefault(
            int(m), {})[statistic] = body.get('value')
    found = dict.fromkeys(what for _, what in self._values)
    self.whats = [w for w in _ABOUT if w in found] + [
        w for w in found if w not in _ABOUT]
    self.cases = [c for c in self.dtypes
                  if any((c, w) in self._values for w in self.whats)]

  def of(self, case: str, what: str) -> dict[int, dict[str, Any]]:
    """Returns offset -> statistic -> value, offsets ascending."""
    return dict(sorted(self._values.get((case, what), {}).items()))

  def points(self, case: str, what: str, statistic: str) -> dict[int, float]:
    """Returns offset -> number, where there is one that is not negative."""
    found = {m: page.real(values.get(statistic))
             for m, values in self.of(case, what).items()}
    return {m: x for m, x in found.items() if x is not None and x >= 0}


def _is_of(
    body: Mapping[str, Any], case: str, what: str, m: str, statistic: str,
) -> bool:
  """Tells whether a figure is what its id says; a recheck reads no ids."""
  field, rule = body.get('field'), body.get('rule')
  return statistic == (field if rule == 'sum' else f'{field}_{rule}') and (
      body.get('over') == {'kind': 'compare', 'where': {
          'group.part': 'study', 'group.case': case, 'group.what': what,
          'group.m': int(m)}})


def section(
    compares: Sequence[Mapping[str, Any]],
    summaries: Mapping[str, Mapping[str, Any]],
    cases: Sequence[Mapping[str, Any]],
) -> tuple[page.Section, set[str]]:
  """Returns the section, and the ids of the summaries that it shows.

  Args:
    compares: bodies of the study's `compare` lines.
    summaries: id -> body, of the whole ledger.
    cases: bodies of the `case` lines.

  Raises:
    MissingDependencyError: if there is something to plot and no matplotlib.
  """
  study = _Study(compares, summaries)
  if not study.cases:
    return page.absent(_TITLE), set()
  about = {page.plain(b.get('id')): page.plain(b.get('about', ''))
           for b in cases}
  blocks: page.Blocks = [page.Text(
      'A block of text and a tail behind it are computed with rotary positions'
      ' counted from an offset M. Rotary scores depend on differences of'
      ' positions alone, so in exact arithmetic the logits of the tail would'
      ' not depend on M. KL is KL(a || b) of a row of logits in nats, where a'
      ' is what is compared with. The largest logit difference of a row is'
      ' that of the logit that differs most. p99 is the 99th percentile of the'
      f' rows, shown where there are at least {_P99_ROWS}'
      f'{"; here some are fewer" if study.few else ""}.'),
      page.Table('Cases, and what differs from base.',
                 ['Case', 'Dtype', 'What it is'],
                 [[c, study.dtypes[c], about.get(c, '')] for c in study.cases])]
  blocks += _overview(study)
  blocks += _by_case(study)
  blocks += _rounding(study)
  for what in study.whats:
    blocks.append(page.Text(what.capitalize(), 'heading'))
    shown = [c for c in study.cases if c == _BASE and what in _INEXACT]
    folded = [c for c in study.cases if c not in shown and study.of(c, what)]
    blocks.append(page.Text(_totals(study, what)))
    if shown:
      blocks.append(_table(study, what, shown))
    if folded:
      blocks.append(page.Fold(
          f'{what}: {page.count(len(folded), "case")}',
          [_table(study, what, folded)]))
  return page.Section('study', _TITLE, blocks), study.used


def _totals(study: _Study, what: str) -> str:
  """Returns how many rows are equal in all cases at all offsets."""
  found = [values for case in study.cases
           for values in study.of(case, what).values()
           if {'equal', 'rows'} <= values.keys()]
  equal, rows = (sum(page.whole(values[name]) for values in found)
                 for name in ('equal', 'rows'))
  return ('Rows with equal SHA-256, all cases and offsets together:'
          f' {equal:,} of {rows:,}.')


def _table(
    study: _Study, what: str, cases: Sequence[str],
) -> page.Table:
  """Returns every figure of a comparison, one row a case and offset."""
  entries = [(case, m, values) for case in cases
             for m, values in study.of(case, what).items()]
  present = dict.fromkeys(s for _, _, values in entries for s in values)
  columns = [s for s in _COLUMNS if s in present] + [
      s for s in present if s not in _COLUMNS and s not in _OF.values()]

  def entry(values: Mapping[str, Any], statistic: str) -> str:
    if statistic not in values:
      return '–'
    text = page.number(values[statistic])
    if _OF.get(statistic) in values:
      text += f' of {page.number(values[_OF[statistic]])}'
    return text

  return page.Table(
      f'{what}: {_ABOUT.get(what, "compared at offset M")}.',
      ['Case', 'M (tokens)', *(_COLUMNS.get(s, s) for s in columns)],
      [[case, f'{m:,}',
        *(entry(values, s) for s in columns)] for case, m, values in entries],
      range(1, 2 + len(columns)))


def _overview(study: _Study) -> page.Blocks:
  """Returns plots of all cases for each comparison that is not exact."""
  figures: dict[str, list[page.Figure]] = {}
  for what in _INEXACT:
    dtypes: dict[str, dict[str, dict[int, float]]] = {}
    for case in study.cases:
      points = {m: x for m, x in study.points(case, what, 'kl_median').items()
                if m}
      if points:
        dtypes.setdefault(study.dtypes[case], {})[case] = points
    chosen = [(dtypes, 'all', 'all cases')] if dtypes else []
    if len(dtypes) > 1 and _ZOOM in dtypes:
      chosen.append(({_ZOOM: dtypes[_ZOOM]}, 'zoom', f'{_ZOOM} cases only'))
    for cases, name, words in chosen:
      each = '; '.join(f'{c}: {_range(p)}'
                       for found in cases.values() for c, p in found.items())
      figures.setdefault(name, []).append(page.Figure(
          report_plots.overview(
              f'{_TITLES[what]}\n{words}', cases, f'{name}-{what}'),
          f'KL of a row, median over rows, in nats, one row a case, {what},'
          f' {words}. {each}',
          f'{what}, {words}: KL of a row, median over rows, one marker an'
          ' offset. The grey band is 0: every bit equal.'))
  if not figures:
    return []
  return [page.Text('All cases', 'heading'),
          *map(page.Figures, figures.values())]


def _range(points: Mapping[int, float]) -> str:
  """Returns the values at the first and last offset in words."""
  ends = list(dict.fromkeys([min(points), max(points)]))
  return ', '.join(
      f'{page.number(repr(points[m]))} at M = {m:,}' for m in ends)


def _by_case(study: _Study) -> page.Blocks:
  """Returns KL against the offset, a plot a case."""
  figures = []
  for i, case in enumerate(study.cases):
    series = {}
    for what in study.whats:
      # Where all is 0, the maximum says it.
      middle = (study.points(case, what, 'kl_median')
                or study.points(case, what, 'kl_max'))
      for name, points in (('median', middle),
                           ('p99', study.points(case, what, 'kl_p99'))):
        if points:
          series[what, name] = points
    if not series:
      continue
    base = {} if case == _BASE else study.points(_BASE, 'moved', 'kl_median')
    caption = f'{case}: KL of a row against the offset'
    caption += '; dotted grey: base, moved, median.' if base else '.'
    figures.append(page.Figure(
        report_plots.kl_by_offset(case, series, base, f'kl{i}'),
        f'Log-log plot of KL divergence in nats against offset M, case {case}.'
        ' ' + '; '.join(
            f'{what}, {_range(points)}'
            for (what, name), points in series.items() if name == 'median'),
        caption))
  if not figures:
    return []
  return [
      page.Text('KL against the offset', 'heading'),
      page.Text('Filled markers are medians, or maxima where no median is in'
                ' the ledger; hollow ones, if any, are p99. Zero has no place'
                ' on a logarithmic axis: the grey band below it holds what is'
                ' exactly 0. Each plot has its own range.'),
      page.Figures(figures)]


def _rounding(study: _Study) -> page.Blocks:
  """Returns differences by dtype beside what rounding predicts."""
  cases: dict[str, str] = {}
  for case in study.cases:
    if study.dtypes[case] in report_plots.ROUNDOFF:
      cases.setdefault(study.dtypes[case], case)
  dtypes = [d for d in report_plots.ROUNDOFF if d in cases]
  if len(dtypes) < 2:
    return []
  rows, figures = [], []
  for statistic, power, name, quantity in (
      ('max_abs_max', 1,
       'Largest logit difference of a row, maximum over rows',
       'largest logit difference of a row,\nmaximum over rows (logits)'),
      ('kl_median', 2, 'KL of a row, median over rows',
       'KL of a row,\nmedian over rows (nats)')):
    series: dict[str, dict[str, list[float]]] = {}
    for what in _INEXACT:
      for dtype in dtypes:
        found = [x for m, x in study.points(
            cases[dtype], what, statistic).items() if m]
        if found:
          series.setdefault(what, {})[dtype] = found
    for what, values in series.items():
      first = next(iter(values))
      start = report_plots.median(values[first])
      for dtype, found in values.items():
        middle = report_plots.median(found)
        exponent = power * (
            report_plots.ROUNDOFF[dtype] - report_plots.ROUNDOFF[first])
        rows.append([
            f'{name}, {what}', cases[dtype], dtype,
            f'2^{report_plots.ROUNDOFF[dtype]}', page.number(repr(middle)),
            page.number(repr(middle / start)) if start else '–',
            page.number(repr(2.0 ** exponent))])
    if any(len(values) > 1 for values in series.values()):
      figures.append(page.Figure(
          report_plots.rounding(series, power, quantity, f'round{power}'),
          f'Log-log plot of: {name}; against the unit roundoff of'
          f' {", ".join(dtypes)}, with lines of slope {power}.',
          f'{name} against the unit roundoff. Markers: median over M; bars:'
          ' smallest to largest; dotted: what rounding predicts from'
          f' {dtypes[0]}, slope {power}.'))
  if not figures:
    return []
  return [
      page.Text('What rounding predicts', 'heading'),
      page.Text('If rounding is the cause, a difference of logits is'
                ' proportional to the unit roundoff u, and KL, which is'
                ' quadratic in small differences, to its square.'),
      page.Figures(figures),
      page.Table(
          'Medians over the offsets, and their ratio to the first dtype:'
          ' measured and predicted.',
          ['Quantity', 'Case', 'Dtype', 'u', 'Value', 'Ratio', 'Predicted'],
          rows, range(3, 7))]
