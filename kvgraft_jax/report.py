"""The HTML report of a run, made from its ledger alone.

The page is one file: no address is loaded, plots are SVG within it, and the
same ledger gives the same bytes. What the ledger holds of a kind or part that
no section knows stands in tables of its own.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import os
import re
from typing import Any

from kvgraft_jax import errors
from kvgraft_jax import findings
from kvgraft_jax import ledger
from kvgraft_jax import report_flywheel
from kvgraft_jax import report_page as page
from kvgraft_jax import report_setup
from kvgraft_jax import report_study
from kvgraft_jax import report_verdicts

# Of lines that no section knows, and of their fields.
_ROWS, _COLUMNS, _CHARACTERS = 40, 10, 160


def render(directory: str | os.PathLike[str]) -> str:
  """Returns the HTML page of a run directory.

  Args:
    directory: with a ledger whose chain is whole.

  Raises:
    DamageError: if the ledger is damaged.
    UsageError: if it holds no line.
    MissingDependencyError: if there is something to plot and no matplotlib.
  """
  return render_lines(ledger.read(directory))


def render_lines(lines: Sequence[Mapping[str, Any]]) -> str:
  """Returns the HTML page of the lines that `ledger.read` gave.

  Args:
    lines: of a whole ledger.

  Raises:
    UsageError: if there is none.
    MissingDependencyError: if there is something to plot and no matplotlib.
  """
  if not lines:
    raise errors.UsageError(
        'the ledger holds no line, expected those of a run; run `kvgraft'
        ' evidence` first')
  view = _Lines(lines)
  run = (view.take('run') or [{}])[0]
  summaries = {page.plain(b.get('id')): b for b in view.take('summary')}
  head = page.plain(lines[-1]['hash'])
  facts = _facts(view, run, head)
  for part in ('fifty', 'prefix', 'study'):
    view.take('logits', _part(part))  # What they are compared with is shown.
  study, used = report_study.section(
      view.take('compare', _part('study')), summaries, view.take('case'))
  verdicts = view.take('verdict')
  sections = [
      _findings(view), *_flywheel(view),
      report_verdicts.section(verdicts, summaries), _exactness(view),
      _invariance(view), study, _resources(view),
      report_setup.section(
          run, view.take('profile'), view.take('input'), view.take('artifact'),
          [line['kind'] for line in lines]),
      *report_verdicts.conditions(verdicts, summaries)]
  sections.append(_others(
      view, [b for name, b in summaries.items() if name not in used]))
  return page.render(_title(run), facts, _warnings(run), sections)


class _Lines:
  """A ledger's lines, and which of them the page has shown."""

  def __init__(self, lines: Sequence[Mapping[str, Any]]):
    self.all = lines
    self._shown: set[int] = set()

  def take(
      self, kind: str, keep: Callable[[dict[str, Any]], bool] | None = None,
  ) -> list[dict[str, Any]]:
    """Returns the bodies of a kind that `keep`, and counts them as shown."""
    found = {i: line['body'] for i, line in enumerate(self.all)
             if line['kind'] == kind and (keep is None or keep(line['body']))}
    self._shown |= found.keys()
    return list(found.values())

  def rest(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Returns the bodies that were not taken, by kind and part."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for i, line in enumerate(self.all):
      if i not in self._shown:
        part = _labels(line['body']).get('part', '')
        found.setdefault((line['kind'], part), []).append(line['body'])
    return found


def _labels(body: Mapping[str, Any]) -> dict[str, str]:
  return {name: page.plain(value)
          for name, value in page.mapping(body.get('group')).items()}


def _part(name: str) -> Callable[[dict[str, Any]], bool]:
  return lambda body: _labels(body).get('part') == name


def _title(run: Mapping[str, Any]) -> str:
  name = page.plain(run.get('run', 'run'))
  date = page.plain(run.get('created', 'date not recorded'))[:10]
  return f'{name[:1].upper()}{name[1:]}: {_source(run)}, {date}'


def _source(run: Mapping[str, Any]) -> str:
  return page.plain(page.mapping(run.get('model')).get(
      'source', 'model not recorded'))


def _warnings(run: Mapping[str, Any]) -> list[str]:
  if not findings.random_weights(_source(run)):
    return []
  return ['random weights: figures test the software, not a language model.']


def _facts(
    view: _Lines, run: Mapping[str, Any], head: str,
) -> list[tuple[str, str | page.Cell]]:
  code = page.mapping(run.get('code'))
  end = view.take('end')
  result: list[tuple[str, str | page.Cell]] = [
      ('Begun', page.plain(run.get('created', 'not recorded'))),
      ('State', page.plain(end[-1].get('status')) if end
       else page.Cell('bad', 'not finished: no end line')),
      ('Code', 'kvgraft_jax '
       + page.plain(code.get('version', '(version not recorded)'))),
      ('Ledger', page.count(len(view.all), 'line')),
      ('Head hash', page.Cell('code', head))]
  result += [
      ('Registered', page.Cell('code', page.plain(body.get('sha256'))))
      for body in view.take('registration')]
  result += [
      ('Recovered', f'bytes of a torn line that were dropped:'
       f' {page.number(body.get("dropped_bytes"))}, lines adopted:'
       f' {page.number(body.get("adopted_lines"))}')
      for body in view.take('recovered')]
  return result


def _findings(view: _Lines) -> page.Section:
  """Returns the sentences that the run recorded, each derived again."""
  title = 'What was found'
  bodies = view.take('note', _is_finding)
  notes = [page.plain(body.get('text', '')) for body in bodies]
  if not notes:
    return page.absent(title)
  if not all(findings.derivable(body, view.all) for body in bodies):
    return page.Section('found', title, [*map(page.Text, notes), page.Text(
        'another version of this program wrote these sentences, and they were'
        ' not derived again; the tables count.', 'warning')])
  try:
    derived = findings.sentences(view.all)
  except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
    derived = []  # Of a run without findings, or with strange fields.
  blocks: page.Blocks = []
  for note in notes:
    blocks += [page.Text(t) for t in re.split(r'\n\s*\n', note)]
    if note not in derived:
      blocks.append(page.Text(
          'the figures of this ledger do not give the text above, by the rules'
          ' of this version; the tables count.', 'warning'))
  missing = [text for text in derived if text not in notes]
  if missing:
    blocks += [page.Text(
        'the figures give what follows as well, which the run did not record.',
        'warning'), *map(page.Text, missing)]
  return page.Section('found', title, blocks)


def _is_finding(body: Mapping[str, Any]) -> bool:
  return body.get('role') == findings.ROLE


def _flywheel(view: _Lines) -> list[page.Section]:
  """Returns the section of a flywheel run, none of another run."""
  answers = view.take('answer')
  if not answers:
    return []
  ids = {page.plain(body.get('id')) for body in answers}
  view.take('dataset')
  return [report_flywheel.section(
      answers, view.take('score', lambda b: page.plain(b.get('id')) in ids),
      view.take('likelihood'), view.take('problem'), view.take('attempt'),
      view.take('entry'))]


def _exactness(view: _Lines) -> page.Section:
  """Returns grafts against fresh computations, one row a group."""
  title = 'Fifty-sample exactness'
  groups: dict[str, list[dict[str, Any]]] = {}
  for body in view.take('compare', _part('fifty')):
    groups.setdefault(_group(body, 'whole artifact'), []).append(body)
  for body in view.take('compare', _part('prefix')):
    length = page.number(page.mapping(body['group']).get('m'))
    groups.setdefault(
        _group(body, f'cut to {length} tokens'), []).append(body)
  if not groups:
    return page.absent(title)
  rows: list[list[str]] = []
  for name, bodies in groups.items():
    total = sum(page.whole(b.get('rows')) for b in bodies)
    rows.append([
        name, f'{len(bodies):,}',
        *(f'{sum(page.whole(b.get(field)) for b in bodies):,} of {total:,}'
          for field in ('equal', 'argmax_agree')),
        *(page.number(repr(max(found)) if found else None) for found in (
            [x for b in bodies for x in page.reals(b.get(field))]
            for field in ('kl', 'max_abs')))])
  blocks: page.Blocks = [
      page.Text('Each tail is run behind a graft and behind the same tokens'
                ' computed from nothing; the logits are compared row by row.'),
      page.Table(
          'Grafted against fresh logits.',
          ['Graft', 'Tails', 'Rows with equal SHA-256', 'Same argmax',
           'KL of a row, maximum over rows (nats)',
           'Largest logit difference of a row, maximum over rows'],
          rows, range(1, 6))]
  scores: dict[str, list[bool]] = {}
  for body in view.take('score', _part('fifty')):
    scores.setdefault(_group(body, ''), []).append(body.get('value') is True)
  if scores:
    blocks.append(page.Table(
        'Hashes of the graft that equal those of a computation in one go:'
        ' end to end, the rows of a tail; greedy, the generated tokens.',
        ['Check', 'Equal'],
        [[name, f'{sum(found):,} of {len(found):,}']
         for name, found in scores.items()], [1]))
  return page.Section('exactness', title, blocks)


def _group(body: Mapping[str, Any], what: str) -> str:
  """Returns the values of a body's labels, and what they are labels of."""
  values = [value for name, value in _labels(body).items()
            if name not in ('part', 'm', 'sample')]
  return ', '.join(filter(None, [*values, what]))


def _invariance(view: _Lines) -> page.Section:
  """Returns which schedules leave the state that the first one leaves."""
  title = 'Invariance matrix'
  columns: dict[str, dict[str, dict[str, Any]]] = {}
  for body in view.take('digest', _part('invariance')):
    labels = _labels(body)
    schedule = labels.get('schedule', page.plain(body.get('id')))
    columns.setdefault(labels.get('dtype', 'all'), {})[schedule] = body
  if not columns:
    return page.absent(title)
  about: dict[str, str | page.Cell] = {}
  for found in columns.values():
    for schedule, body in found.items():
      about.setdefault(schedule, page.plain(body.get('about', '')))
  return page.Section('invariance', title, [
      page.Text('The same tokens by different schedules. One SHA-256 covers'
                ' keys, values and logits; equal means every bit. Schedules'
                ' that the self-test does not promise to be equal are marked'
                ' †.'),
      page.Table(
          'State of each schedule against the first of its column, with the'
          ' first digits of its SHA-256.',
          ['Schedule', *columns, 'What it is'],
          [[s, *(_state(found, s) for found in columns.values()), about[s]]
           for s in about])])


def _state(
    found: Mapping[str, Mapping[str, Any]], schedule: str,
) -> str | page.Cell:
  """Returns how a schedule's state compares with the first one's."""
  if schedule not in found:
    return page.Cell('soft', 'not run')
  base = next(iter(found))
  digest = page.plain(found[schedule].get('sha256'))
  free = _labels(found[schedule]).get('promised') == 'no'
  mark = ' †' if free else ''
  state = (
      page.Cell('soft', 'base') if schedule == base
      else page.Cell('good', f'= equal{mark}')
      if digest == page.plain(found[base].get('sha256'))
      else page.Cell('soft' if free else 'bad', f'≠ differs{mark}'))
  return page.Cell('list', entries=[
      state, page.Cell('code', digest[:10], digest)])


def _resources(view: _Lines) -> page.Section:
  """Returns time, tokens, work and energy; what is unknown says so."""
  bodies = view.take('resources')
  if not bodies:
    return page.absent('Resources')
  fields = {
      'seconds': ('Time (s)', 1), 'cpu_seconds': ('CPU time (s)', 1),
      'tokens_computed': ('Tokens computed', 1),
      'tokens_restored': ('Tokens restored', 1),
      'tokens_decoded': ('Tokens decoded', 1), 'flops': ('Work (TFLOP)', 1e12),
      'bytes_read': ('Read (MB)', 1e6), 'bytes_written': ('Written (MB)', 1e6),
      'peak_bytes': ('Peak memory (MB)', 1e6),
      'device_peak_bytes': ('Peak on the device (MB)', 1e6)}
  shown = {field: how for field, how in fields.items()
           if any(body.get(field) is not None for body in bodies)}
  reasons: dict[str, list[str]] = {}
  rows: list[list[str | page.Cell]] = []
  for body in bodies:
    name = page.plain(body.get('id'))
    row: list[str | page.Cell] = [name]
    for field, (_, unit) in shown.items():
      value = body.get(field)
      x = page.real(value)
      row.append(
          page.Cell('soft', 'not known') if value is None
          else page.number(value) if unit == 1 or x is None
          else page.number(repr(x / unit)))
    energy = page.mapping(body.get('energy'))
    if page.real(energy.get('joules')) is None:
      reasons.setdefault(
          page.plain(energy.get('reason', 'no reason given')), []).append(name)
      row.append(page.Cell('soft', 'not measured'))
    else:
      row.append(f'{page.number(energy["joules"])}'
                 f' ({page.plain(energy.get("source", "source not known"))})')
    rows.append(row)
  columns = ['What', *(name for name, _ in shown.values()), 'Energy (J)']
  blocks: page.Blocks = [page.Table(
      'What each part took. Work counts the matrix products that the results'
      ' need; memory is the peak of the process since its start.',
      columns, rows, range(1, len(columns)))]
  unknown = [name for field, (name, _) in fields.items()
             if field not in shown and any(field in b for b in bodies)]
  if unknown:
    blocks.append(page.Text(f'Not known of any part: {", ".join(unknown)}.'))
  blocks += [
      page.Text(f'Energy not measured (parts: {len(names)} of {len(bodies)}):'
                f' {reason}') for reason, names in reasons.items()]
  return page.Section('resources', 'Resources', blocks)


def _others(
    view: _Lines, summaries: Sequence[Mapping[str, Any]],
) -> page.Section:
  """Returns tables of the lines that no other section has shown."""
  blocks: page.Blocks = []
  if summaries:
    title = f'Other summary figures: {len(summaries):,}'
    blocks.append(page.Fold(title, [page.Table(
        'Summary figures, each derived again by a recheck.',
        ['Figure', 'Value', 'Unit', 'Rule', 'Of lines', 'Where', 'Field'],
        [[page.plain(b.get('id')), page.plain(b.get('value')),
          page.plain(b.get('unit', '')), page.plain(b.get('rule')),
          page.plain(page.mapping(b.get('over')).get('kind')),
          _where(page.mapping(b.get('over')).get('where')),
          page.plain(b.get('field'))] for b in summaries], [1])]))
  for (kind, part), bodies in view.rest().items():
    flat = [page.flat(body) for body in bodies[:_ROWS]]
    columns = list(dict.fromkeys(
        name for body in flat for name in body
        if name not in ('id', 'group.part')))
    hidden = len(bodies) - len(flat), max(0, len(columns) - _COLUMNS)
    columns = columns[:_COLUMNS]
    caption = f'{page.count(len(bodies), "line")} of kind {kind}'
    caption += f', part {part}' if part else ''
    caption += f'; {hidden[0]:,} of them not shown' if hidden[0] else ''
    caption += (f'; {page.count(hidden[1], "field")} not shown'
                if hidden[1] else '')
    blocks.append(page.Table(
        f'{caption}.', ['Line', *columns],
        [[page.plain(body.get('id', f'{i + 1:,}')),
          *(_field(body[c]) if c in body else '' for c in columns)]
         for i, body in enumerate(flat)]))
  if not blocks:
    return page.absent('Further lines')
  return page.Section('others', 'Further lines', blocks)


def _where(value: Any) -> str:
  return ', '.join(page.plain(entry) for entry in page.pairs(value).entries
                   if isinstance(entry, str))


def _field(value: Any) -> str | page.Cell:
  """Returns a cell for a field that nobody knows; long ones are cut."""
  if isinstance(value, list) and len(value) > 3:
    first = ', '.join(page.plain(v)[:12] for v in value[:3])
    return f'{first}, … ({len(value):,} in all)'
  return page.cell(value, _CHARACTERS)
