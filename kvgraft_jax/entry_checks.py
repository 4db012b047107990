"""Verification of what shall enter the library; it takes no verdict.

`verify` runs the checker that a candidate names. Many candidates with the same
programs are verified together: a program then runs on hundreds of instances in
one sandboxed process, which saves starting one for each. What a program leaves
behind there can only change its own answers, and those must agree with the
answers of another program in another sandbox, and, for some that are drawn,
with those that both give alone. Where that does not succeed, a candidate is
verified alone, every instance in a process of its own.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import random
from typing import Any

from kvgraft_jax import checkers
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import parameters as parameters_lib
from kvgraft_jax import sandbox
from kvgraft_jax import statements

KINDS = ('programs', 'key', 'tests')
MIN_INSTANCES = 3  # Beside the statement's own numbers.

_LIMITS = sandbox.Limits()
_TOGETHER = 8  # From how many candidates on one process runs them all.
_RUNS = 1000  # Instances a process.
_DRAWN = 3  # Candidates of a group that are verified alone as well.
_DRAW = random.SystemRandom()  # Else a program could know which.

# Reads {"program", "instances"}, prints the list of answers; null: none.
_DRIVER = '''\
import io
import json
import sys
task = json.load(sys.stdin)
code = compile(task['program'], 'program', 'exec')
streams = sys.stdin, sys.stdout
answers = []
for values in task['instances']:
  sys.stdin = io.TextIOWrapper(io.BytesIO(json.dumps(values).encode()))
  sys.stdout = printed = io.TextIOWrapper(io.BytesIO())
  lines = []
  try:
    exec(code, {'__name__': '__main__'})
    printed.flush()
    lines = printed.buffer.getvalue().decode().split('\\n')
  except (Exception, SystemExit):
    pass
  lines = [line.strip() for line in lines if line.strip()]
  answers.append(lines[-1] if lines else None)
sys.stdin, sys.stdout = streams
print(json.dumps(answers))
'''


@dataclasses.dataclass(frozen=True)
class Candidate:
  """What may become an entry of the library, if its checker passes.

  Attributes:
    problem: the statement.
    solution: worked method, which is what a graft shows.
    answer: the answer.
    rule: how answers are compared, one of checkers.RULES.
    checker: 'programs': two or more different programs must agree, no key is
      seen; 'key': `answer` must equal `expected`; 'tests': the code `answer`
      must pass the tests `expected`.
    family: problems with one method; '' for none.
    parameters: schema of the statement's numbers; None if the programs answer
      this statement only.
    programs: sources; the first is the one that answers other numbers.
    instances: with a schema: further parameters to agree on, by default the
      schema's corners and two more. Without: what the programs read, the
      statement's own values first.
    expected: the key, or the tests.
    tolerance: of the rule, a decimal.
    provenance: where it comes from; strings and integers.
    limits: of each run.
  """

  problem: str
  solution: str
  answer: str
  rule: str
  checker: str
  family: str = ''
  parameters: parameters_lib.Schema | None = None
  programs: tuple[str, ...] = ()
  instances: tuple[Mapping[str, int | str], ...] = ()
  expected: str | None = None
  tolerance: str | None = None
  provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  limits: sandbox.Limits = _LIMITS

  @property
  def runs(self) -> list[parameters_lib.Values]:
    """What the programs run on, the statement's own values first.

    Raises:
      UsageError: if the schema does not fit statement or instances.
    """
    given = [dict(values) for values in self.instances]
    if self.parameters is None:
      return given or [{}]
    template = statements.template(self.problem)
    own = parameters_lib.read(template, self.parameters)
    if own is None:
      raise errors.UsageError(
          f'the numbers of the statement are {", ".join(template.numbers)}, the'
          f' parameters are {list(self.parameters)!r:.300}; give one for each'
          ' number, with its range')
    for values in given:
      if not parameters_lib.fits(values, self.parameters):
        raise errors.UsageError(
            f'the instance {errors.quoted(values, 120)} does not fit the'
            ' parameters; give values of their types and ranges')
    if not given:
      given = parameters_lib.sample(self.parameters, MIN_INSTANCES + 2)[
          :MIN_INSTANCES + 1]
    others = []
    for values in given:
      if values != own and values not in others:
        others.append(values)
    if len(others) < MIN_INSTANCES:
      raise errors.UsageError(
          f'expected at least {MIN_INSTANCES} different instances besides the'
          f' statement\'s own numbers, found {len(others)}; widen the ranges or'
          ' give instances, or leave the parameters out')
    return [own, *others]

  def check_form(self) -> None:
    """Raises UsageError where the fields do not go together."""
    for name in ('problem', 'answer', 'solution', 'family'):
      value = getattr(self, name)
      if not isinstance(value, str) or (
          name in ('problem', 'answer') and not value.strip()):
        raise errors.UsageError(
            f'{name} is {errors.quoted(value)}, expected text')
    for name in ('expected', 'tolerance'):
      value = getattr(self, name)
      if not isinstance(value, (str, type(None))):
        raise errors.UsageError(
            f'{name} is {errors.quoted(value)}, expected text')
    for name, form in (('programs', Sequence), ('instances', Sequence),
                       ('provenance', Mapping), ('limits', sandbox.Limits)):
      value = getattr(self, name)
      if not isinstance(value, form):
        raise errors.UsageError(
            f'{name} is {errors.quoted(value)}, expected {form.__name__}')
    for name, kind in (('programs', str), ('instances', Mapping)):
      for value in getattr(self, name):
        if not isinstance(value, kind):
          raise errors.UsageError(
              f'{name} hold {errors.quoted(value)}, expected only'
              f' {"text" if kind is str else "objects"}')
    try:
      hashing.canonical_json([
          self.problem, self.solution, self.answer, self.rule, self.family,
          self.expected, self.tolerance, self.provenance, self.programs,
          self.instances])
    except (TypeError, UnicodeEncodeError) as e:
      raise errors.UsageError(
          f'the entry cannot be written: {e}; give text and integers') from None
    if self.checker not in KINDS:
      raise errors.UsageError(
          f'checker {errors.quoted(self.checker)} is unknown; choose one of'
          f' {", ".join(KINDS)}')
    if not isinstance(self.rule, str) or self.rule not in checkers.RULES:
      raise errors.UsageError(
          f'rule {errors.quoted(self.rule)} is unknown; choose one of'
          f' {", ".join(checkers.RULES)}')
    if self.checker == 'programs':
      if len(self.programs) < 2:
        raise errors.UsageError(
            'expected two or more independent programs, found'
            f' {len(self.programs)}; give another, or an answer key')
      if self.expected is not None:
        raise errors.UsageError(
            'programs are checked against each other and see no key; leave the'
            ' expected answer out')
      if self.parameters is not None:
        parameters_lib.check(self.parameters)
    else:
      if self.expected is None:
        raise errors.UsageError(
            f'checker {self.checker!r} has nothing to check against; give the'
            f' {"tests" if self.checker == "tests" else "expected answer"}')
      if self.programs or self.parameters is not None or self.instances:
        raise errors.UsageError(
            'programs, parameters and instances are taken only by the checker'
            f' "programs", found {self.checker!r}')


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What the check of a candidate found.

  Attributes:
    passed: whether it may enter.
    why: of a refusal.
    evidence: what the checker saw.
    ran: hash of everything that was run.
  """

  passed: bool
  why: str
  evidence: dict[str, Any]
  ran: str


def limits_json(limits: sandbox.Limits) -> dict[str, int | str]:
  """Returns limits without floats."""
  return {name: int(value) if value == int(value) else repr(value)
          for name, value in dataclasses.asdict(limits).items()}


def limits_from(value: Mapping[str, int | str]) -> sandbox.Limits:
  """Returns the limits that `limits_json` wrote."""
  return sandbox.Limits(**{
      name: float(limit) if isinstance(limit, str) else limit
      for name, limit in value.items()})  # type: ignore[arg-type]


def verify(candidate: Candidate, *, unsafe: bool = False) -> Outcome:
  """Runs the checker of one candidate.

  Args:
    candidate: of good form.
    unsafe: run programs although they cannot be kept apart here.

  Raises:
    SandboxError: if they cannot, and not `unsafe`.
    UsageError: if the candidate cannot be checked as it is.
  """
  c = candidate
  if c.checker == 'tests':
    check = checkers.unit_tests(
        c.answer, c.expected or '', limits=c.limits, unsafe=unsafe)
    return Outcome(check.passed, '' if check.passed else
                   f'the code fails: {check.evidence["reason"]}',
                   check.evidence, check.ran)
  if c.checker == 'key':
    check = checkers.against_key(
        c.rule, c.answer, c.expected or '', tolerance=c.tolerance,
        unsafe=unsafe)
    return Outcome(check.passed, '' if check.passed else
                   f'the answer {errors.quoted(c.answer)} is not the expected'
                   ' one',
                   check.evidence, check.ran)
  check = checkers.programs_agree(
      list(c.programs), c.runs, c.rule, tolerance=c.tolerance,
      limits=c.limits, unsafe=unsafe)
  if not check.passed or check.answer is None:
    return Outcome(
        False, check.evidence['reason'], check.evidence, check.ran)
  return _against(
      c, [row[0] for row in check.evidence['answers']], check.evidence,
      check.ran, unsafe)


def _against(
    c: Candidate, agreed: Sequence[str], evidence: dict[str, Any], ran: str,
    unsafe: bool,
) -> Outcome:
  """Compares the answer with what the programs agreed on, own values first."""
  why = ''
  if not checkers.same(
      c.rule, c.answer, agreed[0], tolerance=c.tolerance, unsafe=unsafe):
    why = (f'the programs agree on {errors.quoted(agreed[0])}, the answer is'
           f' {errors.quoted(c.answer)}')
  elif c.parameters is not None and all(
      checkers.same(c.rule, other, agreed[0], unsafe=unsafe)
      for other in agreed[1:]):
    # They may ignore what they read, and would be wrong for other numbers.
    why = (f'the programs print {errors.quoted(agreed[0])} for all'
           f' {len(agreed)} instances, expected answers that depend on the'
           ' parameters; read them from stdin, give instances with other'
           ' answers, or leave the parameters out')
  return Outcome(not why, why, evidence, ran)


def verify_all(
    candidates: Sequence[Candidate], *, unsafe: bool = False
) -> Iterator[Outcome]:
  """Yields the outcome of each candidate, in their order; see `verify`.

  One that cannot be checked as it is has not passed.
  """
  groups: dict[Any, list[int]] = {}
  for n, c in enumerate(candidates):
    if c.checker == 'programs':
      groups.setdefault((c.programs, c.limits), []).append(n)
  together: dict[int, Outcome] = {}
  for (programs, limits), members in groups.items():
    if len(members) >= _TOGETHER:
      found = _verify_group(
          programs, limits, [candidates[n] for n in members], unsafe)
      together |= {members[k]: outcome for k, outcome in found.items()}
  for n, c in enumerate(candidates):
    yield together[n] if n in together else _verify_alone(c, unsafe)


def _verify_alone(c: Candidate, unsafe: bool) -> Outcome:
  try:
    return verify(c, unsafe=unsafe)
  except errors.MissingDependencyError:
    raise
  except errors.UsageError as e:
    return Outcome(False, str(e), {'reason': str(e)}, '')


def _verify_group(
    programs: tuple[str, ...], limits: sandbox.Limits,
    members: list[Candidate], unsafe: bool,
) -> dict[int, Outcome]:
  """Returns index -> outcome of the members that pass when run together."""
  runs: dict[int, list[parameters_lib.Values]] = {}
  for k, c in enumerate(members):
    try:
      runs[k] = c.runs
    except errors.UsageError:
      pass  # Alone it will say why.
  unique = list({_key(values): values for one in runs.values()
                 for values in one}.values())
  tables = [dict(zip(map(_key, unique), run_many(
      source, unique, limits=limits, unsafe=unsafe))) for source in programs]
  found: dict[int, Outcome] = {}
  for k, one in runs.items():
    c = members[k]
    answers = [[table[_key(values)] for values in one] for table in tables]
    if not all(agree(c, column, unsafe=unsafe) for column in zip(*answers)):
      continue
    evidence = {'answers': answers, 'instances': one, 'sees_key': False,
                'together': len(members)}
    ran = hashing.json_sha256('kvgraft.together', {
        'driver': _DRIVER, 'programs': list(programs), 'instances': one,
        'rule': c.rule, 'tolerance': c.tolerance,
        'limits': limits_json(limits)})
    outcome = _against(
        c, [answer or '' for answer in answers[0]], evidence, ran, unsafe)
    if outcome.passed:
      found[k] = outcome
  # Whether the programs are different ones, and answer alone what they answer
  # together, the checker says.
  for k in _DRAW.sample(list(found), min(_DRAWN, len(found))):
    if not _verify_alone(members[k], unsafe).passed:
      return {}
  return found


def _key(values: Mapping[str, int | str]) -> str:
  return json.dumps(values, sort_keys=True)


def agree(
    c: Candidate, column: Sequence[str | None], *, unsafe: bool = False
) -> bool:
  """Tells whether all programs gave one answer to an instance."""
  first, *others = column
  if first is None or None in others:
    return False
  try:
    return all(
        checkers.same(c.rule, other, first, tolerance=c.tolerance,
                      unsafe=unsafe) for other in others)
  except errors.UsageError:
    return False  # The rule cannot read what was printed.


def run_many(
    source: str, instances: Sequence[Mapping[str, int | str]], *,
    limits: sandbox.Limits = _LIMITS, unsafe: bool = False,
) -> list[str | None]:
  """Runs a program on many instances, hundreds of them in one process.

  Args:
    source: of the program.
    instances: what it reads, one after the other.
    limits: of one process.
    unsafe: as in `verify`.

  Returns:
    The answers; None where there is none, and for the instances that shared a
    process that did not end well, which are few.

  Raises:
    SandboxError: if programs cannot be kept apart here, and not `unsafe`.
  """
  answers: list[str | None] = []
  for at in range(0, len(instances), _RUNS):
    answers += _run_part(
        source, list(instances[at:at + _RUNS]), limits, unsafe)
  return answers


def _run_part(
    source: str, part: list[Mapping[str, int | str]], limits: sandbox.Limits,
    unsafe: bool,
) -> list[str | None]:
  result = sandbox.run(
      _DRIVER, stdin=json.dumps({'program': source, 'instances': part}),
      limits=limits, unsafe=unsafe)
  if result.ok:
    try:
      answers = json.loads(result.stdout.strip().splitlines()[-1])
      if len(answers) == len(part) and all(
          a is None or isinstance(a, str) for a in answers):
        return list(answers)
    except (ValueError, IndexError, TypeError):
      pass
  if len(part) < 2 * _TOGETHER:
    return [None] * len(part)
  half = len(part) // 2  # The limits may be too narrow for so many.
  return (_run_part(source, part[:half], limits, unsafe)
          + _run_part(source, part[half:], limits, unsafe))
