"""Sound checks of answers: against a key, by unit tests, by programs.

A check that passed says why (`evidence`) and names everything that was run
(`ran`). Candidates are untrusted: their programs run in `sandbox`, and what
they say about themselves counts for nothing. Agreement of two independent
programs needs no key, so an answer can be verified that nobody knew.
"""

import ast
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import importlib.util
import json
import re
import secrets
import subprocess
import sys
from typing import Any
import warnings

from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import recheck
from kvgraft_jax import sandbox

Parameters = Mapping[str, int | str]

_LIMITS = sandbox.Limits()
_PATTERN_S = 5  # A pattern can take exponential time.
_SYMBOLIC = sandbox.Limits(cpu_s=30, wall_s=60, memory_bytes=2 << 30)


@dataclasses.dataclass(frozen=True)
class Check:
  """What a check found.

  Attributes:
    passed: whether the answer is verified.
    answer: what was checked, or what was agreed on.
    evidence: why; canonical JSON. `sees_key` tells whether the check knew the
      right answer, `reason` why it did not pass.
    ran: hex hash of everything that was run: sources, parameters, tests,
      limits, rule, expected answer.
  """

  passed: bool
  answer: str | None
  evidence: dict[str, Any]
  ran: str


def _compile(pattern: str) -> None:
  """Raises ValueError unless a text is a pattern."""
  try:
    with warnings.catch_warnings(action='ignore'):
      re.compile(pattern)
  except (re.error, OverflowError, RecursionError) as error:
    raise ValueError(f'pattern {errors.quoted(pattern)}: {error}') from None


def _regex(answer: str, pattern: str, **unused_extra: Any) -> bool:
  _compile(pattern)
  code = ('import json, re, sys; pattern, text = json.load(sys.stdin);'
          ' sys.exit(0 if re.fullmatch(pattern, text) else 3)')
  try:
    done = subprocess.run(
        [sys.executable, '-I', '-S', '-c', code], check=False,
        input=json.dumps([pattern, answer]).encode(), capture_output=True,
        timeout=_PATTERN_S)
  except subprocess.TimeoutExpired:
    return False
  return done.returncode == 0


_SYMBOLIC_SOURCE = r"""
import json
import re
import sys
from sympy import nsimplify, simplify
from sympy.parsing import sympy_parser

def read(text):
  for pattern, instead in (
      (r'\\left|\\right|\\,|\\!|\$', ''),
      (r'\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}', r'((\1)/(\2))'),
      (r'\\sqrt\s*\{([^{}]*)\}', r'sqrt(\1)'),
      (r'\\(?:cdot|times)', '*'), (r'\\', ''), (r'\{', '('), (r'\}', ')')):
    text = re.sub(pattern, instead, text)
  return sympy_parser.parse_expr(text, transformations=(
      *sympy_parser.standard_transformations,
      sympy_parser.convert_xor,
      sympy_parser.implicit_multiplication_application))

answer, expected = json.load(sys.stdin)
try:
  right = read(expected)
except Exception:
  sys.exit('expected')
try:
  got = read(answer)
  same = got == right or simplify(got - right) == 0
except Exception:
  sys.exit('answer')
print('same' if same else 'different')
"""


def _symbolic(answer: str, expected: str, *, unsafe: bool = False,
              **unused_extra: Any) -> bool:
  """Tells whether sympy shows two expressions to be equal.

  Its parser evaluates what it reads, so this runs in the sandbox.
  """
  if importlib.util.find_spec('sympy') is None:
    raise errors.MissingDependencyError(
        'the rule symbolic needs sympy: pip install "kvgraft_jax[flywheel]"')
  result = sandbox.run(
      _SYMBOLIC_SOURCE, stdin=json.dumps([answer, expected]),
      limits=_SYMBOLIC, unsafe=unsafe, packages=True)
  if result.exit_code == 1 and result.stderr.strip() == 'expected':
    raise ValueError(f'{expected!r} is no expression')
  return result.ok and result.stdout.strip() == 'same'


def _scored(rule: str, answer: str, expected: str, *, tolerance: Any = None,
            **unused_extra: Any) -> bool:
  return recheck.SCORES[rule](
      answer, expected, tolerance='0' if tolerance is None else str(tolerance))


# Rule -> whether an answer is right; an expected answer that cannot be read is
# a ValueError.
RULES: dict[str, Callable[..., bool]] = {
    **{name: functools.partial(_scored, name) for name in (
        'integer', 'rational', 'decimal', 'choice', 'equal')},
    'regex': _regex,
    'symbolic': _symbolic,
}


def same(rule: str, answer: str | None, expected: str, *,
         tolerance: str | None = None, unsafe: bool = False) -> bool:
  """Tells whether an answer is the expected one; an unreadable one is not.

  Args:
    rule: a name in RULES.
    answer: None is never right.
    expected: for `regex` a pattern that the whole answer must match.
    tolerance: for `decimal`, largest absolute difference as a decimal; None is
      '0'.
    unsafe: see `sandbox.run`; for `symbolic`.

  Raises:
    UsageError: if the rule is unknown or the expected answer cannot be read.
  """
  if rule not in RULES:
    raise errors.UsageError(
        f'rule {rule!r} is unknown; known are {", ".join(RULES)}')
  try:
    return RULES[rule](answer or '', expected, tolerance=tolerance,
                       unsafe=unsafe) and answer is not None
  except ValueError as error:
    raise errors.UsageError(
        f'rule {rule} cannot compare with the expected answer: {error}'
    ) from None


def check_key(
    rule: str, expected: str, *, tolerance: str | None = None
) -> None:
  """Raises UsageError unless a rule can read an expected answer.

  Nothing runs, so that what `symbolic` cannot read shows only when compared.
  """
  if rule == 'symbolic':
    return
  try:
    if rule == 'regex':
      _compile(expected)
      return
  except ValueError as error:
    raise errors.UsageError(f'rule regex: {error}') from None
  same(rule, expected, expected, tolerance=tolerance)


def _limits(limits: sandbox.Limits) -> dict[str, str]:
  return {k: str(v) for k, v in dataclasses.asdict(limits).items()}


def _check(passed: bool, answer: str | None, evidence: dict[str, Any],
           ran: dict[str, Any]) -> Check:
  return Check(passed, answer, evidence,
               hashing.json_sha256('kvgraft.check', ran))


def against_key(rule: str, answer: str | None, expected: str, *,
                tolerance: str | None = None, unsafe: bool = False) -> Check:
  """Checks an answer against the expected one; see `same`."""
  passed = same(rule, answer, expected, tolerance=tolerance, unsafe=unsafe)
  how = {'kind': 'key', 'rule': rule, 'tolerance': tolerance,
         'expected': expected}
  return _check(
      passed, answer,
      {**how, 'sees_key': True,
       'reason': '' if passed else 'the answer is not the expected one'},
      {**how, 'answer': answer})


# Programs.


def run_program(
    source: str, parameters: Parameters, *,
    limits: sandbox.Limits = _LIMITS, unsafe: bool = False,
) -> tuple[str | None, sandbox.Result]:
  """Runs a program on parameters.

  Args:
    source: reads one JSON object, name -> value, from stdin; the last line that
      it prints and that is not empty is its answer.
    parameters: name -> integer or string.
    limits: of the run.
    unsafe: see `sandbox.run`.

  Returns:
    (answer, or None if it failed or printed nothing; how it ended).
  """
  result = sandbox.run(source, stdin=json.dumps(dict(parameters)),
                       limits=limits, unsafe=unsafe)
  lines = [line.strip() for line in result.stdout.splitlines()]
  lines = [line for line in lines if line]
  return (lines[-1] if result.ok and lines else None), result


def _shape(source: str) -> str | None:
  """Returns what is left of a program without names, comments and layout."""
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
  names: dict[str, str] = {}

  def name(old: str) -> str:
    return names.setdefault(old, f'n{len(names)}')

  for node in ast.walk(tree):
    if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef,
                         ast.ClassDef)):
      first = node.body[0] if node.body else None
      if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        node.body = node.body[1:]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
      node.name = name(node.name)
    elif isinstance(node, ast.Name):
      node.id = name(node.id)
    elif isinstance(node, ast.arg):
      node.arg, node.annotation = name(node.arg), None
    elif isinstance(node, ast.alias):
      node.asname = name(node.asname or node.name)
  return ast.dump(tree)


def _dependent(programs: Sequence[str]) -> str:
  """Returns why programs are not independent of each other, or ''."""
  shapes = [_shape(source) for source in programs]
  for i, shape in enumerate(shapes):
    if shape is None:
      return f'program {i} is no Python'
    if shape in shapes[:i]:
      return (f'the programs are not independent: program {i} is program'
              f' {shapes.index(shape)} but for names, comments or layout')
  return ''


def programs_agree(
    programs: Sequence[str], instances: Sequence[Parameters],
    rule: str = 'integer', *, tolerance: str | None = None,
    limits: sandbox.Limits = _LIMITS, unsafe: bool = False,
) -> Check:
  """Checks that independent programs give one answer on every instance.

  Args:
    programs: sources, two or more, see `run_program`; equal ones (but for
      names, comments and layout) do not pass.
    instances: parameters, those of the problem itself first.
    rule: a name in RULES by which answers are the same; not `regex`.
    tolerance: see `same`.
    limits: of each run.
    unsafe: see `sandbox.run`.

  Returns:
    A check whose answer is that of the first program on the first instance.
  """
  if len(programs) < 2 or not instances:
    raise errors.UsageError(
        'expected two or more programs and at least one instance, found'
        f' {len(programs)} and {len(instances)}')
  if rule not in RULES or rule == 'regex':
    raise errors.UsageError(
        f'rule {rule!r} cannot compare two programs; expected one of'
        f' {", ".join(r for r in RULES if r != "regex")}')
  how = {'kind': 'programs', 'rule': rule, 'tolerance': tolerance,
         'instances': [dict(i) for i in instances]}
  ran = {**how, 'programs': list(programs), 'limits': _limits(limits)}
  rows: list[list[str | None]] = []
  sandboxed = True
  reason = _dependent(programs)
  for parameters in instances if not reason else ():
    row: list[str | None] = []
    rows.append(row)
    for i, source in enumerate(programs):
      answer, result = run_program(
          source, parameters, limits=limits, unsafe=unsafe)
      row.append(answer)
      sandboxed &= result.sandboxed
      if answer is None:
        reason = f'program {i} gave no answer: {_ending(result, limits)}'
      elif not _agree(rule, answer, row[0], tolerance, unsafe):
        reason = (
            f'the programs do not agree: program {i} says'
            f' {errors.quoted(answer)}, program 0 {errors.quoted(row[0])}')
      if reason:
        reason += f' (instance {len(rows) - 1})'
        break
    if reason:
      break
  return _check(
      not reason, rows[0][0] if rows and not reason else None,
      {**how, 'answers': rows, 'sees_key': False, 'sandboxed': sandboxed,
       'reason': reason}, ran)


def _agree(rule: str, answer: str, other: str | None, tolerance: str | None,
           unsafe: bool) -> bool:
  try:
    return same(rule, answer, other or '', tolerance=tolerance, unsafe=unsafe)
  except errors.UsageError:
    return False  # What the first program printed cannot be read.


def _ending(result: sandbox.Result, limits: sandbox.Limits) -> str:
  """Returns in a few words how a run ended."""
  if result.ok:
    return 'it printed nothing'
  last = errors.shortened(result.stderr.strip().rpartition('\n')[2], 120)
  how = {
      'exit': f'it ended with exit code {result.exit_code}',
      'cpu': f'it ran longer than {limits.cpu_s:g} s of CPU time',
      'wall': f'it ran longer than {limits.wall_s:g} s of wall time',
      'memory': f'it took more than {limits.memory_bytes >> 20} MiB of memory',
      'output': f'it printed more than {limits.output_bytes >> 10} KiB',
  }.get(result.ended, f'it ended by {result.ended}')
  return how + (f', {last}' if last else '')


# Unit tests.

# Of the candidate's own process. It answers calls; plain values alone go
# through, so that no object of its can claim to be equal to another.
_WORKER = r"""
import ast, os, sys
channel = os.fdopen(os.dup(1), 'w', buffering=1)
asked = os.fdopen(os.dup(0))
os.dup2(os.open('/dev/null', os.O_RDWR), 0)
os.dup2(2, 1)
names = {'__name__': 'candidate'}

def plain(value):
  text = repr(value)
  ast.literal_eval(text)
  return text

def say(kind, text):
  channel.write(repr((kind, text)) + '\n')

try:
  with open('candidate.py') as f:
    exec(compile(f.read(), 'candidate.py', 'exec'), names)
  found = {}
  for name, value in names.items():
    if not name.startswith('__'):
      if callable(value):
        found[name] = None
      else:
        try:
          found[name] = plain(value)
        except Exception:
          pass
  say('names', repr(found))
except BaseException as e:
  say('raised', repr((type(e).__name__, str(e))))
for line in asked:
  name, args, kwargs = ast.literal_eval(line)
  try:
    say('value', plain(names[name](*args, **kwargs)))
  except BaseException as e:
    say('raised', repr((type(e).__name__, str(e))))
"""

# Of the tests' process, which learns the nonce and never runs the candidate.
_DRIVER = r"""
import ast, builtins, subprocess, sys
with open('tests.py') as f:  # Before the candidate could change it.
  tests = ast.parse(f.read())
worker = subprocess.Popen(
    [sys.executable, '-I', '-B', 'worker.py'], stdin=subprocess.PIPE,
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
nonce = sys.stdin.readline().strip()

def hear():
  line = worker.stdout.readline()
  if not line:
    sys.exit('the candidate ended')
  kind, text = ast.literal_eval(line)
  value = ast.literal_eval(text)
  if kind == 'raised':
    error = getattr(builtins, value[0], None)
    if not (isinstance(error, type) and issubclass(error, Exception)):
      error = RuntimeError
    raise error(value[1])
  return value

def remote(name):
  def call(*args, **kwargs):
    text = repr((name, args, kwargs))
    ast.literal_eval(text)
    worker.stdin.write(text + '\n')
    worker.stdin.flush()
    return hear()
  return call

count = 0
def counted():
  global count
  count += 1

class Count(ast.NodeTransformer):
  def visit_Assert(self, node):
    call = ast.parse('__counted__()').body[0]
    return [node, ast.copy_location(ast.fix_missing_locations(call), node)]

scope = {'__name__': 'tests', '__counted__': counted}
for name, text in hear().items():
  if not name.startswith('__') and not hasattr(builtins, name):
    scope[name] = remote(name) if text is None else ast.literal_eval(text)
tree = ast.fix_missing_locations(Count().visit(tests))
exec(compile(tree, 'tests.py', 'exec'), scope)
worker.kill()
worker.wait()
print()
print(nonce, count)
"""


def unit_tests(
    code: str, tests: str, *, limits: sandbox.Limits = _LIMITS,
    unsafe: bool = False,
) -> Check:
  """Checks code by tests that call its functions.

  The code runs in a process of its own and the tests in another; calls and
  plain values (numbers, texts, lists, dicts, sets, ...) go between them. So
  code that exits early, prints, or patches what it finds passes no test.

  Args:
    code: defines functions and plain values.
    tests: Python with assert statements that use them by name; at least one
      must be reached.
    limits: of both processes together.
    unsafe: see `sandbox.run`.

  Raises:
    UsageError: if the tests are no Python or assert nothing.
  """
  try:
    asserts = sum(isinstance(node, ast.Assert)
                  for node in ast.walk(ast.parse(tests)))
  except (SyntaxError, ValueError) as error:
    raise errors.UsageError(f'the tests are no Python: {error}') from None
  if not asserts:
    raise errors.UsageError('the tests assert nothing; add assert statements')
  nonce = secrets.token_hex(32)
  result = sandbox.run(
      _DRIVER, stdin=nonce + '\n', limits=limits, unsafe=unsafe,
      files={'worker.py': _WORKER.encode(),
             'candidate.py': code.encode('utf-8', 'replace'),
             'tests.py': tests.encode('utf-8', 'replace')})
  last = result.stdout.rstrip('\n').rpartition('\n')[2].split(' ')
  passed = (result.ok and len(last) == 2 and
            secrets.compare_digest(last[0].encode(), nonce.encode()) and
            int(last[1]) > 0)
  reason = '' if passed else (
      'no assert was reached' if result.ok else _ending(result, limits))
  return _check(
      passed, None,
      {'kind': 'tests', 'asserts': int(last[1]) if passed else 0,
       'sees_key': True, 'sandboxed': result.sandboxed, 'reason': reason},
      {'kind': 'tests', 'code': code, 'tests': tests,
       'limits': _limits(limits)})
