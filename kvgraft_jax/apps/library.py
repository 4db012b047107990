"""Keeps verified solutions, each with what verifies it again.

add LIBRARY ...: verifies a problem, or a dataset with programs, and adds it.
ask LIBRARY --problem=...: which entry serves a statement, and its answer.
address --problem=...: the address of a statement, which names it.
ls LIBRARY: lists the entries.
show LIBRARY ID: everything about one entry.
retract LIBRARY ID --reason=...: takes an entry out of use for good.
reverify LIBRARY [ID]: runs the checkers again.
export LIBRARY FILE: writes all records as JSONL, those of retracted entries,
  of retractions, verifications and artifacts included.
import LIBRARY FILE: adds the entries of an export that pass here, its
  retractions and its artifacts; verifications are made anew.
stats LIBRARY: counts; checks every record and the chain.

`kvgraft library ACTION --help` tells more of each.
"""

from collections.abc import Iterable
import json
import textwrap
import time
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax import checkers
from kvgraft_jax import datasets
from kvgraft_jax import errors
from kvgraft_jax import library as library_lib
from kvgraft_jax import routing
from kvgraft_jax import statements
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = 'ls /tmp/library'
POSITIONAL = ('action', 'library', 'item')

_ONE = ('problem', 'solution', 'answer', 'rule', 'tolerance', 'family',
        'program', 'check_program', 'parameters', 'instances', 'expected',
        'tests')
_MANY = ('problems_file', 'programs_file')


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  def text(name: str, what: str) -> None:
    absl_flags.DEFINE_string(name, None, what, flag_values=fv)

  absl_flags.DEFINE_enum(
      'action', None, list(ACTIONS), 'What to do.', flag_values=fv)
  text('library', 'Directory of the library.')
  entry = 'id of an entry, or its first digits'
  text('item', f'show: {entry}.\nretract: {entry}.\nreverify: {entry};'
       ' without it all that are not retracted.\nexport: file to write, which'
       ' must not exist.\nimport: file that `export` wrote.')
  text('problem', 'add: the statement.\nask: the statement to serve.\n'
       'address: the statement to name.')
  text('solution', 'add: the worked method, which a graft shows.')
  text('answer', 'add: the answer.')
  absl_flags.DEFINE_enum(
      'rule', None, list(checkers.RULES), 'add: how answers are compared;'
      ' integer by default.', flag_values=fv)
  text('tolerance', 'add: of the rule decimal, such as 0.01.')
  text('family', 'add: name that problems with one method share.\n'
       'ls: only the entries of this family.')
  text('program', 'add: Python file that reads the parameters, a JSON object,'
       ' from stdin and prints the answer; with --tests, the code to test.')
  absl_flags.DEFINE_multi_string(
      'check_program', None, 'add: Python file with an independent program that'
      ' must print the same; may be repeated.', flag_values=fv)
  text('parameters', 'add: JSON file with the schema of the numbers of the'
       ' statement, in their order: a list of {"name", "type", "min", "max"} or'
       ' {"constant"}. With it other numbers are answered as well.')
  text('instances', 'add: JSON file with a list of parameters to check the'
       ' programs on; by default the corners of the schema and more.')
  text('expected', 'add: the answer key, where there are no programs.')
  text('tests', 'add: Python file with asserts that the code must pass.')
  text('problems_file', "add: JSONL file of problems with programs; 'shipped'"
       ' for the set of this package, shipped:base for a part of it.')
  text('programs_file', 'add: JSONL file with the programs for'
       ' --problems_file.')
  text('reason', 'retract: why.')
  absl_flags.DEFINE_boolean(
      'retracted', False, 'ls: show those that were retracted, too.',
      flag_values=fv)
  absl_flags.DEFINE_boolean(
      'unsafe_exec', False, 'Run programs even where they cannot be kept apart'
      ' from this machine.', flag_values=fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs an action; returns exit code and JSON."""
  flags.require(args, 'action')
  action = ACTIONS[args.action]
  taken = (*action.arguments, *action.flags)
  for name in dict.fromkeys(
      name for other in ACTIONS.values()
      for name in (*other.arguments, *other.flags)):
    value = getattr(args, name)
    if value not in (None, False) and name not in taken:
      raise errors.UsageError(
          f'{args.action} takes no --{name}, found {value!r:.80}; remove it')
  flags.require(args, *(
      name for name in action.arguments
      if (args.action, name) != ('reverify', 'item')))
  return action.run(args)


def _add(args: Any) -> tuple[int, dict[str, Any]]:
  """Verifies a problem, or those of a file, and adds what passes.

  Two or more independent programs (--program, --check_program) must agree and
  print --answer; or the answer must equal --expected; or the code of --program
  must pass --tests. A file's problems need two programs each. Exits 1 if
  anything did not pass.
  """
  many = [name for name in _MANY if getattr(args, name)]
  one = [name for name in _ONE if getattr(args, name) is not None]
  if many and one:
    raise errors.UsageError(
        f'--{many[0]} brings whole problems, found --{one[0]} as well; give'
        ' either')
  if many:
    flags.require(args, 'problems_file')
    return _add_file(args)
  flags.require(args, 'problem')
  candidate = _candidate(args)
  candidate.check_form()
  address = statements.address(candidate.problem)
  with library_lib.Library(args.library, create=True) as library:
    try:
      entry = library.add(**vars(candidate), unsafe=args.unsafe_exec)
    except errors.NotVerifiedError as e:
      cli.warn(f'kvgraft library: {" ".join(str(e).split())}')
      return e.exit_code, {
          'id': None, 'address': address, 'added': 0, 'conflicts': [],
          'refused': [{'problem': candidate.problem, 'why': str(e)}],
          'head': library.head}
    common.say(f'{entry.id}: {_short(entry.answer, 60)}, verified by'
               f' {candidate.checker}')
    conflicts = [name for name in _conflicts(library, [address])
                 if name != entry.id]
    return 0, {'id': entry.id, 'address': address, 'added': 1,
               'conflicts': conflicts, 'refused': [], 'head': library.head}


def _conflicts(
    library: library_lib.Library, addresses: Iterable[str]
) -> list[str]:
  """Returns the entries that answer one statement differently; warns."""
  found = []
  for address in dict.fromkeys(addresses):
    entries = library.conflicts(address)
    if entries:
      common.note(
          f'{_short(entries[0].problem, 60)!r} has different answers: '
          + ', '.join(f'{entry.id[:12]} says {_short(entry.answer, 20)!r}'
                      for entry in entries)
          + '; none is used, retract the wrong one')
      found += [entry.id for entry in entries]
  return found


def _short(text: str, limit: int) -> str:
  """Returns a text on one line, cut with an ellipsis."""
  return errors.shortened(' '.join(text.split()), limit)


def _candidate(args: Any) -> library_lib.Candidate:
  """Returns what the flags of one problem say."""
  parameters = _read_json(args, 'parameters')
  instances = tuple(_read_json(args, 'instances') or ())
  if args.tests:
    flags.require(args, 'program')
    if args.expected is not None or args.check_program or args.answer:
      raise errors.UsageError(
          '--tests check the code of --program alone; remove --expected,'
          ' --check_program and --answer')
    kind, answer = 'tests', _read('program', args.program)
    programs: tuple[str, ...] = ()
    expected: str | None = _read('tests', args.tests)
  else:
    flags.require(args, 'answer')
    answer, expected = args.answer, args.expected
    kind = 'programs' if expected is None else 'key'
    others = [name for name in (
        'program', 'check_program', 'parameters', 'instances')
              if getattr(args, name)]
    if kind == 'key' and others:
      flags_ = ', '.join(f'--{name}' for name in others)
      raise errors.UsageError(
          f'--expected is the key, and programs are checked without one, found'
          f' {flags_} as well; remove --expected, or {flags_}')
    files = [('program', args.program)] if args.program else []
    files += [('check_program', name) for name in args.check_program or ()]
    programs = tuple(_read(flag, name) for flag, name in files)
    if kind == 'programs' and len(programs) < 2:
      raise errors.UsageError(
          'expected two or more independent programs, found'
          f' {len(programs)}; give --program and --check_program, or the key'
          ' with --expected')
  return library_lib.Candidate(
      args.problem, args.solution or '', answer,
      args.rule or ('equal' if args.tests else 'integer'), kind,
      args.family or '', parameters, programs, instances, expected,
      args.tolerance)


def _add_file(args: Any) -> tuple[int, dict[str, Any]]:
  """Adds the problems of a file that have programs."""
  problems = datasets.load(args.problems_file)
  if args.programs_file:
    programs = datasets.load_programs(args.programs_file)
    problems = [programs[p.id].join(p) if p.id in programs else p
                for p in problems]
  good = [p for p in problems if len(p.programs) > 1]
  with library_lib.Library(args.library, create=True) as library:
    count, refused = library.add_all(
        map(library_lib.from_problem, good), unsafe=args.unsafe_exec)
    conflicts = _conflicts(library, (p.sha256 for p in good))
    common.say(f'{count} of {len(good)} problems with programs are in the'
               f' library; {len(problems) - len(good)} have none')
    return int(bool(refused)), {
        'added': count, 'conflicts': conflicts, 'refused': _refused(refused),
        'without_programs': len(problems) - len(good), 'head': library.head}


def _refused(
    refused: list[tuple[library_lib.Candidate, str]]
) -> list[dict[str, str]]:
  for candidate, why in refused:
    common.say(f'refused: {_short(candidate.problem, 60)}: {why}')
  return [{'problem': candidate.problem, 'why': why}
          for candidate, why in refused]


def _ask(args: Any) -> tuple[int, dict[str, Any]]:
  """Says which entry serves a statement, and answers where none is in doubt.

  exact: this very statement was answered. parameters: programs answer it for
  its numbers; they run. similar: the nearest entry, which is an example and no
  answer. bare: nothing. No model is used. Exits 1 if the programs do not agree.
  """
  flags.require(args, 'problem')
  began = time.perf_counter()
  answer = why = None
  with library_lib.Library(args.library) as library:
    router = routing.Router(library)
    route = router.route(args.problem)
    if route.kind == 'exact' and route.entry:
      answer = route.entry.answer
    elif route.kind == 'parameters':
      try:
        answer = router.answer(route, unsafe=args.unsafe_exec)
      except errors.NotVerifiedError as e:
        why = str(e)
        cli.warn(f'kvgraft library: {" ".join(why.split())}')
  seconds = time.perf_counter() - began
  result = {
      'kind': route.kind, 'entry': route.entry and route.entry.id,
      'address': statements.address(args.problem),
      'parameters': route.parameters, 'answer': answer, 'why': why,
      'score': route.score if route.kind == 'similar' else None,
      'nearest': route.entry.problem
                 if route.entry and route.kind == 'similar' else None,
      'seconds': seconds}
  for name, value in result.items():
    if value is not None and name != 'why':
      common.say(f'{name}: ' + (
          f'{value:.4f}' if isinstance(value, float) else
          _short(value, 200) if isinstance(value, str) else json.dumps(value)))
  return int(why is not None), result


def _address(args: Any) -> tuple[int, dict[str, Any]]:
  """Prints the address of a statement: the hash of its canonical form."""
  flags.require(args, 'problem')
  result = {'address': statements.address(args.problem),
            'canonical': statements.canonical(args.problem)}
  common.say(result['address'])
  return 0, result


def _ls(args: Any) -> tuple[int, dict[str, Any]]:
  """Lists the entries, oldest first.

  A line has id, family, checker, whether other numbers are answered as well
  ("any"), answer and statement, long ones cut.
  """
  rows = []
  with library_lib.Library(args.library) as library:
    for entry in library.entries(args.family, args.retracted):
      reason = library.retraction(entry.id) if args.retracted else None
      numbers = '-' if entry.parameters is None else 'any'
      rows.append({
          'id': entry.id, 'family': entry.family, 'answer': entry.answer,
          'address': entry.address, 'checker': entry.checker['kind'],
          'parameterised': entry.parameters is not None, 'retracted': reason})
      common.say(
          f'{entry.id[:12]}  {_short(entry.family, 14) or "-":14} '
          f' {entry.checker["kind"]:8}  {numbers:3} '
          f' {_short(entry.answer, 16):16}  {_short(entry.problem, 60)}'
          + ('' if reason is None else f'  (retracted: {_short(reason, 60)})'))
  return 0, {'entries': rows}


def _show(args: Any) -> tuple[int, dict[str, Any]]:
  """Shows an entry: statement, answer, method, programs, what verified it."""
  with library_lib.Library(args.library) as library:
    entry = library.get(args.item)
    reason = library.retraction(entry.id)
    result = entry.to_json() | {
        'retracted': reason, 'artifacts': library.artifacts(entry.id)}
  for name, value in result.items():
    if name == 'program':
      continue  # It is the first of all.
    if name == 'programs':
      for number, source in enumerate(value):
        other = number == 0 and entry.parameters is not None
        _block(f'program {number}{", for other numbers" if other else ""}',
               source)
    elif isinstance(value, str):
      _block(name, value)
    else:
      common.say(f'{name}: {json.dumps(value)}')
  return 0, result


def _block(name: str, text: str) -> None:
  """Prints a text, one of several lines indented below its name."""
  if '\n' in text.strip():
    text = '\n' + textwrap.indent(text.rstrip(), '  ')
  common.say(f'{name}: {text}' if text[:1] != '\n' else f'{name}:{text}')


def _retract(args: Any) -> tuple[int, dict[str, Any]]:
  """Takes an entry out of use; it stays on record, and it stays retracted."""
  flags.require(args, 'reason')
  with library_lib.Library(args.library) as library:
    name = library.get(args.item).id
    library.retract(name, args.reason)
    common.say(f'{name}: retracted')
    return 0, {'id': name, 'reason': library.retraction(name),
               'head': library.head}


def _reverify(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs the checkers of one entry, or of all, again.

  What does not pass is retracted, and the exit code is 1.
  """
  before = None
  with library_lib.Library(args.library) as library:
    if args.item:
      before = library.retraction(library.get(args.item).id)
    outcomes = library.reverify(args.item, unsafe=args.unsafe_exec)
    head = library.head
  failed = [{'id': name, 'why': outcome.why}
            for name, outcome in outcomes if not outcome.passed]
  for one in failed:
    how = 'retracted' if before is None else 'fails'
    common.say(f'{how} {one["id"]}: {one["why"]}')
  common.say(f'{len(outcomes) - len(failed)} of {len(outcomes)} entries pass')
  if before is not None:
    common.say(f'{outcomes[0][0]} stays retracted: {before}')
  return int(bool(failed)), {
      'verified': len(outcomes) - len(failed), 'failed': failed,
      'stays_retracted': before, 'head': head}


def _export(args: Any) -> tuple[int, dict[str, Any]]:
  """Writes all records to a new file, those of what was retracted included."""
  with library_lib.Library(args.library) as library:
    count = library.export(args.item)
    common.say(f'{args.item}: {count} records')
    return 0, {'file': args.item, 'records': count, 'head': library.head}


def _import(args: Any) -> tuple[int, dict[str, Any]]:
  """Adds the entries of an export whose checkers pass here and now.

  Verdicts in the file count for nothing: what is new here is verified here,
  and what was there already stays as it is. What was retracted there is
  retracted here. Exits 1 if anything did not pass.
  """
  library_lib.read_export(args.item)  # Before a directory is made for it.
  with library_lib.Library(args.library, create=True) as library:
    done = library.import_(args.item, unsafe=args.unsafe_exec)
    common.say(f'added {done.added}, there already {done.present}, refused'
               f' {len(done.refused)}')
    return int(bool(done.refused)), {
        'added': done.added, 'present': done.present,
        'refused': _refused(done.refused), 'head': library.head}


def _stats(args: Any) -> tuple[int, dict[str, Any]]:
  """Counts, and checks every record, the chain and the indices.

  The head names all of it: kept elsewhere, it shows whether anything was
  changed since, or cut off.
  """
  with library_lib.Library(args.library) as library:
    library.check()
    result = library.stats()
  for name, value in result.items():
    if isinstance(value, dict):
      common.say(f'{name}:')
      for key, count in value.items():
        common.say(f'  {key or "(none)"}: {count}')
    else:
      common.say(f'{name}: {value}')
  return 0, result


def _read(flag: str, path: str) -> str:
  try:
    with open(path, encoding='utf-8') as f:
      return f.read()
  except (OSError, ValueError) as e:
    reason = getattr(e, 'strerror', None) or str(e)
    raise errors.UsageError(
        f'--{flag}={path}: {reason}; expected a text file that can be read'
    ) from None


def _read_json(args: Any, flag: str) -> Any:
  """Returns the list in the file that a flag names, None without it."""
  path = getattr(args, flag)
  if path is None:
    return None
  try:
    value = json.loads(_read(flag, path))
  except ValueError as e:
    raise errors.UsageError(
        f'--{flag}={path}: is no JSON ({e}); expected a list') from None
  if not isinstance(value, list) or not all(
      isinstance(item, dict) for item in value):
    raise errors.UsageError(
        f'--{flag}={path}: expected a list of objects')
  return value


ACTIONS = {
    'add': cli.Action(
        _add, ('library',), (*_ONE, *_MANY, 'unsafe_exec'),
        '/tmp/library --problems_file=shipped:base'),
    'ask': cli.Action(
        _ask, ('library',), ('problem', 'unsafe_exec'),
        '/tmp/library --problem="What is 3 + 4?"'),
    'address': cli.Action(
        _address, (), ('problem',), '--problem="What is 3 + 4?"'),
    'ls': cli.Action(
        _ls, ('library',), ('family', 'retracted'), '/tmp/library'),
    'show': cli.Action(_show, ('library', 'item'), (), '/tmp/library 3f2a'),
    'retract': cli.Action(
        _retract, ('library', 'item'), ('reason',),
        '/tmp/library 3f2a --reason="the statement was misread"'),
    'reverify': cli.Action(
        _reverify, ('library', 'item'), ('unsafe_exec',), '/tmp/library'),
    'export': cli.Action(
        _export, ('library', 'item'), (), '/tmp/library library.jsonl'),
    'import': cli.Action(
        _import, ('library', 'item'), ('unsafe_exec',),
        '/tmp/library library.jsonl'),
    'stats': cli.Action(_stats, ('library',), (), '/tmp/library'),
}


if __name__ == '__main__':
  cli.start('library')
