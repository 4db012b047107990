"""Works on the ledgers of recorded runs, in directories of their own.

recheck DIR: derives everything anew that can be derived.
preregister DIR --out=FILE: writes what another machine must find.
replay FILE --run_dir=NEWDIR: runs the same settings here, and compares.
diff DIR OTHER: explains two runs that disagree by where they first do.

`kvgraft ledger ACTION --help` tells more of each.
"""

from typing import Any

from absl import flags as absl_flags

from kvgraft_jax import errors
from kvgraft_jax import findings
from kvgraft_jax import ledger
from kvgraft_jax import recheck
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = 'recheck runs/evidence'
POSITIONAL = ('action', 'dir', 'other')


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_enum(
      'action', None, list(ACTIONS), 'What to do.', flag_values=fv)
  absl_flags.DEFINE_string(
      'dir', None, 'Directory of a run; replay: file of a registration.',
      flag_values=fv)
  absl_flags.DEFINE_string(
      'other', None, 'diff: directory of the other run.', flag_values=fv)
  absl_flags.DEFINE_string(
      'head', None, 'recheck: hash that the last line must have, kept'
      ' elsewhere.', flag_values=fv)
  absl_flags.DEFINE_boolean(
      'full', False, 'recheck: run everything that was recorded again, with the'
      ' model, which takes as long as the run did, compare, and read the'
      ' stores.', flag_values=fv)
  absl_flags.DEFINE_string(
      'out', None, 'preregister: file to write; it must not exist.',
      flag_values=fv)
  absl_flags.DEFINE_string(
      'sha256', None, 'replay: hash that the registration must have, as it was'
      ' published.', flag_values=fv)
  absl_flags.DEFINE_string(
      'run_dir', None, 'replay: directory of the new run.', flag_values=fv)
  absl_flags.DEFINE_string(
      'model', None, 'replay: where the same weights are here; by default where'
      ' they were.', flag_values=fv)
  absl_flags.DEFINE_integer(
      'threads', None, 'replay: CPU threads; all cores by default.',
      lower_bound=1, upper_bound=1024, flag_values=fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs an action; returns exit code and JSON."""
  flags.require(args, 'action')
  action = ACTIONS[args.action]
  for other in ACTIONS.values():
    for name in (*other.arguments, *other.flags):
      value = getattr(args, name)
      if value not in (None, False) and name not in (
          *action.arguments, *action.flags):
        raise errors.UsageError(
            f'{args.action} takes no --{name}, found {value!r:.80}; remove it')
  flags.require(args, *action.arguments)
  return action.run(args)


def _recheck(args: Any) -> tuple[int, dict[str, Any]]:
  """Derives anew what can be derived: chain, head, totals, verdicts, findings.

  `recheck.py` of this package does the same, but for the findings and --full,
  as a single file that needs nothing but Python. What was measured (KL and
  differences of rows that are not equal, seconds, energy) only running it again
  confirms: --full does, with the recorded model, and takes as long as the run.
  It also reads every block of the stores that are there.
  """
  if args.head is not None and not recheck.is_hash(args.head):
    raise errors.UsageError(
        f'--head={args.head:.80} is no hash; give 64 lower-case hex digits')
  nothing = recheck.missing(args.dir)
  if nothing:
    raise errors.NotFoundError(nothing)
  result = recheck.check(args.dir, args.head)
  more: dict[str, Any] = {}
  said: list[str] = []
  # Whoever derives more must read what was written.
  if not result.problems:
    lines = ledger.read(args.dir)
    _derive_findings(lines, result)
    if args.full:
      common.pin_threads(args)  # Says what it is at, as well.
      more, said = _run_again(args.dir, lines, result)
  (*texts, verdict), summary = recheck.report(result)
  for text in [*texts, *said, verdict]:
    common.say(text)
  return int(bool(result.problems)), summary | more


def _derive_findings(
    lines: list[recheck.Line], result: recheck.Result
) -> None:
  """Derives the findings of a run; adds problems and counts."""
  notes = [(number, line) for number, line in enumerate(lines, 1)
           if line['kind'] == 'note'
           and findings.derivable(line['body'], lines)]
  if not notes or lines[0]['body']['run'] not in ('evidence', 'flywheel'):
    return
  try:
    derived = findings.sentences(lines)
  except (ArithmeticError, AttributeError, LookupError, TypeError,
          ValueError) as e:
    number, line = notes[0]
    result.problems.append(
        f'{recheck.where(number, line)}: findings cannot be derived, the'
        f' figures are not those of such a run ({type(e).__name__}:'
        f' {e!a:.80})')
    return
  for number, line in notes:
    result.texts -= 1
    result.rederived['note'] = result.rederived.get('note', 0) + 1
    if line['body']['text'] not in derived:
      result.problems.append(
          f'{recheck.where(number, line)}: the figures do not say'
          f' "{ascii(line["body"]["text"])[1:-1]:.200}"')


def _run_again(
    directory: str, lines: list[recheck.Line], result: recheck.Result
) -> tuple[dict[str, Any], list[str]]:
  """Runs all checkers and reads all stores; adds problems.

  Returns:
    Fields of the JSON, and lines for people.
  """
  from kvgraft_jax import run_stores  # Imports tensorstore.

  stores = run_stores.check(directory, lines)
  result.problems += stores.problems
  checked = _run_checkers(lines, result)
  said = [f'checkers run again: {checked}',
          f'stored blocks read: {stores.blocks}',
          *(f'not read: {text}' for text in stores.unread)]
  return {'checkers_run': checked, 'blocks_read': stores.blocks,
          'stores_missing': len(stores.unread)}, said


def _run_checkers(lines: list[recheck.Line], result: recheck.Result) -> int:
  """Runs the checkers of all verdicts; adds problems; returns how many ran."""
  from kvgraft_jax import replay  # Imports jax.

  ran = 0
  for number, line in enumerate(lines, 1):
    if line['kind'] != 'verdict':
      continue
    body, where = line['body'], recheck.where(number, line)
    checker = replay.CHECKERS.get(body['checker'])
    if checker is None:
      result.problems.append(
          f'{where}: checker {body["checker"]!a} is unknown; known are'
          f' {", ".join(replay.CHECKERS)}')
      continue
    try:
      passed = checker(lines, body)
    except errors.KvgraftError as e:
      why = ('it is not as recorded' if isinstance(e, errors.DamageError)
             else 'the checker cannot run')
      result.problems.append(f'{where}: {why}: {e}')
      continue
    ran += 1
    if body['id'] in result.not_rederivable:
      result.not_rederivable.remove(body['id'])
    if passed != body['passed']:
      result.problems.append(
          f'{where}: passed is {body["passed"]}, the checker now says {passed}')
  return ran


def _preregister(args: Any) -> tuple[int, dict[str, Any]]:
  """Writes what another machine must be told to repeat a finished run.

  The file holds the settings, and every hash that must be found; its SHA-256,
  which is printed, is what to publish before the run is repeated.
  """
  from kvgraft_jax import registration  # Later: nothing else here needs it.

  flags.require(args, 'out')
  sha256 = registration.write(args.dir, args.out)
  value, _ = registration.read(args.out, sha256)
  common.say(f'{args.out}: {len(value["expected"])} lines of expected results;'
             f' publish its SHA-256 {sha256}')
  return 0, {'out': args.out, 'sha256': sha256,
             'expected': len(value['expected']), 'head': value['run']['head']}


def _replay(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs the settings of a registration here, and compares.

  Names every factor of the numerics that differs. The new run's ledger holds
  the comparison as well.
  """
  from kvgraft_jax import replay  # Imports jax.

  flags.require(args, 'run_dir')
  if args.sha256 is not None and not recheck.is_hash(args.sha256.lower()):
    raise errors.UsageError(
        f'--sha256={args.sha256:.80} is no hash; give 64 hex digits')
  common.pin_threads(args)
  with common.Progress('replay') as bar:
    update = bar.callback
    found, sha256 = replay.replay(
        args.dir, args.run_dir, command=common.command_line('ledger'),
        model=args.model, sha256=args.sha256,
        progress=update and (
            lambda what, done, total: update(done, total, what)))
  for factor in found.factors:
    common.say(f'{factor.name}{" (class)" if factor.in_class else ""}: theirs'
               f' {factor.theirs}, ours {factor.ours}')
  common.say(str(found))
  return int(not found.ok), found.to_json() | {
      'run_dir': args.run_dir, 'registration_sha256': sha256}


def _diff(args: Any) -> tuple[int, dict[str, Any]]:
  """Explains two runs that disagree by where they first do.

  Both must pass their recheck. Digests of the ledgers are compared; where K or
  V differ, the first block that does is read from the stores, and nothing else
  of them.
  """
  from kvgraft_jax import divergence  # Later: it imports tensorstore.

  for directory in (args.dir, args.other):
    ledger.checked(directory)
  found = divergence.explain(args.dir, args.other)
  for word, one in zip(
      ['first'] + ['then'] * len(found.divergences), found.divergences):
    common.say(f'{word}: {one}')
  if not found.first:
    common.say('everything that was recorded of both agrees')
  blocks = found.counts['block']
  if blocks['equal'] and not blocks['differing']:
    common.say('no store was read, since the recorded digests of blocks agree;'
               f' `kvgraft ledger recheck {args.dir} --full` reads them')
  common.say(str(found))
  every = [one.to_json() for one in found.divergences]
  return int(bool(every)), {
      'equal': not every, 'results_equal': found.results_equal,
      'first': every[0] if every else None, 'then': every[1:],
      'counts': found.counts}


ACTIONS = {
    'recheck': cli.Action(
        _recheck, ('dir',), ('head', 'full'), 'runs/evidence --full'),
    'preregister': cli.Action(
        _preregister, ('dir',), ('out',), 'runs/evidence --out=expected.json'),
    'replay': cli.Action(
        _replay, ('dir',), ('sha256', 'run_dir', 'model', 'threads'),
        'expected.json --run_dir=runs/again'),
    'diff': cli.Action(_diff, ('dir', 'other'), (), 'runs/evidence runs/again'),
}


if __name__ == '__main__':
  cli.start('ledger')
