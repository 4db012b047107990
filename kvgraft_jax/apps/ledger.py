"""Works on the ledgers of recorded runs, in directories of their own.

recheck DIR: checks the chain of lines and the head record, and derives every
score and every summary figure anew; --head compares with a head kept elsewhere,
--full runs the checkers again. `recheck.py` of this package does the same, but
--full, as a single file.

preregister DIR --out=FILE: writes what another machine must be told to repeat a
finished run, and every hash that it must find; prints the file's SHA-256, which
is what to publish.

replay FILE --run_dir=NEWDIR: runs the same settings here, compares, and names
every factor of the numerics that differs.

diff DIR OTHER: explains two runs that disagree by where they first do.
"""

from collections.abc import Callable
import os
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax import errors
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
      'full', False, 'recheck: run the checkers of all verdicts again.',
      flag_values=fv)
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
  for name in ('other', 'head', 'full', 'out', 'sha256', 'run_dir', 'model',
               'threads'):
    value = getattr(args, name)
    if value not in (None, False) and name not in _TAKES[args.action]:
      raise errors.UsageError(
          f'{args.action} takes no --{name}, found {value!r:.80}; remove it')
  return ACTIONS[args.action](args)


def _recheck(args: Any) -> tuple[int, dict[str, Any]]:
  flags.require(args, 'dir')
  if args.head is not None and not recheck.is_hash(args.head):
    raise errors.UsageError(
        f'--head={args.head:.80} is no hash; give 64 lower-case hex digits')
  result = recheck.check(args.dir, args.head)
  checked = 0
  # What checkers read must be what was written.
  if args.full and not result.problems:
    checked = _run_checkers(args.dir, result)
  lines, found = recheck.report(result)
  for line in lines:
    common.say(line)
  if args.full:
    common.say(f'checkers run again: {checked}')
    found['checkers_run'] = checked
  return int(bool(result.problems)), found


def _run_checkers(directory: str, result: recheck.Result) -> int:
  """Runs the checkers of all verdicts; adds problems; returns how many ran."""
  from kvgraft_jax import replay  # Imports jax.

  lines = ledger.read(directory)
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
      result.problems.append(f'{where}: the checker cannot run: {e}')
      continue
    ran += 1
    if passed != body['passed']:
      result.problems.append(
          f'{where}: passed is {body["passed"]}, the checker now says {passed}')
  return ran


def _preregister(args: Any) -> tuple[int, dict[str, Any]]:
  from kvgraft_jax import registration  # Later: nothing else here needs it.

  flags.require(args, 'dir', 'out')
  sha256 = registration.write(args.dir, args.out)
  value, _ = registration.read(args.out, sha256)
  common.say(f'{args.out}: {len(value["expected"])} lines of expected results;'
             f' publish its SHA-256 {sha256}')
  return 0, {'out': args.out, 'sha256': sha256,
             'expected': len(value['expected']), 'head': value['run']['head']}


def _replay(args: Any) -> tuple[int, dict[str, Any]]:
  from kvgraft_jax import replay  # Imports jax.

  flags.require(args, 'dir', 'run_dir')
  if args.sha256 is not None and not recheck.is_hash(args.sha256.lower()):
    raise errors.UsageError(
        f'--sha256={args.sha256:.80} is no hash; give 64 hex digits')
  if args.threads:
    # Read by XLA when it makes the CPU client, which no import does.
    os.environ['NPROC'] = str(args.threads)
  with common.Progress('replay') as bar:
    update = bar.callback
    found, sha256 = replay.replay(
        args.dir, args.run_dir, command=common.command_line('ledger'),
        model=args.model,
        sha256=args.sha256,
        progress=update and (lambda what, done, total: update(done, total)))
  for factor in found.factors:
    common.say(f'{factor.name}{" (class)" if factor.in_class else ""}: theirs'
               f' {factor.theirs}, ours {factor.ours}')
  common.say(str(found))
  return int(not found.ok), found.to_json() | {
      'run_dir': args.run_dir, 'registration_sha256': sha256}


def _diff(args: Any) -> tuple[int, dict[str, Any]]:
  from kvgraft_jax import divergence  # Later: it imports tensorstore.

  flags.require(args, 'dir', 'other')
  found = divergence.explain(args.dir, args.other)
  for word, one in zip(
      ['first'] + ['then'] * len(found.divergences), found.divergences):
    common.say(f'{word}: {one}')
  if not found.first:
    common.say('the runs agree')
  every = [one.to_json() for one in found.divergences]
  return int(bool(every)), {
      'equal': not every, 'first': every[0] if every else None,
      'then': every[1:], 'counts': found.counts}


ACTIONS: dict[str, Callable[[Any], tuple[int, dict[str, Any]]]] = {
    'recheck': _recheck,
    'preregister': _preregister,
    'replay': _replay,
    'diff': _diff,
}
# What each takes besides `dir`.
_TAKES = {
    'recheck': ('head', 'full'),
    'preregister': ('out',),
    'replay': ('sha256', 'run_dir', 'model', 'threads'),
    'diff': ('other',),
}


if __name__ == '__main__':
  cli.start('ledger')
