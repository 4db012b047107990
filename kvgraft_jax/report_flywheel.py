"""The section of a report that shows a flywheel run."""

from collections.abc import Mapping
from collections.abc import Sequence
import statistics
from typing import Any

from kvgraft_jax import report_page as page

Bodies = Sequence[Mapping[str, Any]]
_WHAT = {
    ('bare', 'greedy'): 'Bare: one greedy solution',
    ('bare', 'vote'): 'Bare: vote of samples, the greedy one included',
    ('bare', 'ladder'): 'Bare: whole ladder',
    ('recurrence', 'read'): 'Seen again: answer read out of the graft',
    ('recurrence', 'replayed'): 'Seen again: solution written out of the graft',
    ('recurrence', 'given'): 'Seen again: answer given',
    ('parameter', 'given'): 'Known method, other numbers: stored program',
    ('transfer', 'vote'): 'Transfer: vote without the library',
    ('transfer', 'grafted'): 'Transfer: behind the nearest method',
    ('transfer', 'given'): 'Transfer: answer given by the gate',
    ('near', 'given'): 'Near ones, asked of the library alone',
    ('control', 'given'): 'Control: library emptied',
}
_TOKENS = ('tokens_restored', 'tokens_computed', 'tokens_decoded')


def section(
    answers: Bodies, scores: Bodies, likelihoods: Bodies, problems: Bodies,
    attempts: Bodies, added: Bodies,
) -> page.Section:
  """Returns what was asked, how it was answered, and at what cost.

  Args:
    answers: lines of kind `answer`.
    scores: of kind `score`, with the same ids.
    likelihoods: of kind `likelihood`.
    problems: of kind `problem`.
    attempts: of kind `attempt`.
    added: of kind `entry`.
  """
  if not answers:
    return page.absent('Flywheel')
  right = {page.plain(b.get('id')): b.get('value') is True for b in scores}
  groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
  for body in answers:
    group = page.mapping(body.get('group'))
    key = tuple(page.plain(group.get(k)) for k in ('phase', 'round', 'what'))
    groups.setdefault(key, []).append(body)
  blocks: page.Blocks = [
      page.Text('A problem seen again is recall; a known method with other'
                ' numbers is a program that runs; transfer is one worked'
                ' problem grafted in front of another. They are counted'
                ' apart.'),
      page.Table(
          'Answers and tokens by phase; a near one counts as right only if the'
          ' library gives its true answer, and should give none.',
          ['Phase', 'Round', 'Asked', 'Right', 'Restored', 'Computed',
           'Decoded', 'Decoded, median of an answer', 'Decode steps', 'Hits',
           'Wrong hits'],
          [_row(key, found, right) for key, found in groups.items()],
          range(1, 11))]
  if likelihoods:
    blocks.append(_likelihoods(likelihoods))
  if added:
    blocks.append(_entries(added))
  blocks.append(page.Fold('Every problem', [_problems(
      problems, answers, right)]))
  if attempts:
    blocks.append(page.Fold('Every attempt', [_attempts(attempts)]))
  return page.Section('flywheel', 'Flywheel', blocks)


def _row(
    key: tuple[str, ...], found: Bodies, right: Mapping[str, bool]
) -> list[str | page.Cell]:
  phase, number, what = key
  wrong = sum(b.get('wrong_hit') is True for b in found)
  good = sum(right.get(page.plain(b.get('id')), False) for b in found)
  totals = [sum(page.whole(b.get(name)) for b in found) for name in _TOKENS]
  steps = [page.whole(b['steps']) for b in found if 'steps' in b]
  median = statistics.median(
      page.whole(b.get('tokens_decoded')) for b in found)
  return [
      _WHAT.get((phase, what), f'{phase}: {what}'),
      '' if number == '0' else number, f'{len(found):,}', f'{good:,}',
      *(f'{n:,}' for n in totals), f'{median:g}',
      f'{sum(steps):,}' if steps else page.Cell('soft', 'not known'),
      f'{sum(b.get("hit") is True for b in found):,}',
      page.Cell('bad', f'{wrong:,}') if wrong else '0']


def _likelihoods(found: Bodies) -> page.Table:
  groups: dict[str, list[bool]] = {}
  for body in found:
    what = page.plain(page.mapping(body.get('group')).get('what'))
    groups.setdefault(what, []).append(body.get('right') is True)
  return page.Table(
      'Transfer by likelihood: how often the right answer is likelier than each'
      ' of three wrong ones (chance: one in four).',
      ['In front of the question', 'Asked', 'Right answer likeliest'],
      [['one worked problem' if what == 'grafted' else 'nothing',
        f'{len(values):,}', f'{sum(values):,}']
       for what, values in groups.items()], range(1, 3))


def _entries(added: Bodies) -> page.Table:
  counts: dict[tuple[str, ...], int] = {}
  for body in added:
    group = page.mapping(body.get('group'))
    key = tuple(page.plain(group.get(k))
                for k in ('round', 'source', 'checker'))
    counts[key] = counts.get(key, 0) + 1
  names = {'model': 'the model', 'provided': 'programs of the dataset',
           'programs': 'independent programs that agree', 'key': 'answer key'}
  return page.Table(
      'What was added to the library, each verified first.',
      ['Solved by', 'Verified by', 'Round', 'Entries'],
      [[names.get(source, source), names.get(checker, checker), number,
        f'{n:,}'] for (number, source, checker), n in counts.items()],
      range(2, 4))


def _problems(
    problems: Bodies, answers: Bodies, right: Mapping[str, bool]
) -> page.Table:
  columns: dict[tuple[str, ...], None] = {}
  given: dict[str, dict[tuple[str, ...], str | page.Cell]] = {}
  for body in answers:
    group = page.mapping(body.get('group'))
    key = tuple(page.plain(group.get(k)) for k in ('phase', 'round', 'what'))
    columns[key] = None
    text = body.get('answer')
    look = 'good' if right.get(page.plain(body.get('id'))) else 'soft'
    given.setdefault(page.plain(body.get('problem')), {})[key] = page.Cell(
        look, 'none' if text is None else page.plain(text)[:24])
  return page.Table(
      'Answers by phase; right ones are marked.',
      ['Problem', 'Statement, or the start of its address', 'Expected',
       *(' '.join(k for k in key if k != '0') for key in columns)],
      [[page.plain(b.get('id')),
        page.plain(b.get('text') or page.plain(b.get('statement_sha256'))[:12]),
        page.plain(b.get('expected')),
        *(given.get(page.plain(b.get('id')), {}).get(key, '')
          for key in columns)] for b in problems])


def _attempts(attempts: Bodies) -> page.Table:
  rows: list[list[str | page.Cell]] = []
  for body in attempts:
    group = page.mapping(body.get('group'))
    text = page.plain(body.get('text', ''))
    answer = body.get('answer')
    rows.append([
        page.plain(body.get('problem')), page.plain(group.get('rung')),
        page.plain(group.get('round')), page.number(body.get('tokens_decoded')),
        'none' if answer is None else page.plain(answer)[:24],
        text[:160] + ('…' if len(text) > 160 else '') or 'not kept'])
  return page.Table(
      'Replies of the model on the ladder.',
      ['Problem', 'Rung', 'Round', 'Tokens', 'Answer', 'Text'], rows, [3])
