"""Problems with known answers: the shipped set, and JSONL files.

A dataset is JSONL with `id`, `problem` and `answer` at least. The shipped set
was written for this project: data/problems/families.jsonl holds what the
problems of a family share, problems.jsonl the problems themselves, which
scripts/make_problems.py writes. A programs file holds verified programs for
problems whose texts stay elsewhere: they are joined by id and by address.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Any
from typing import TypeVar

from kvgraft_jax import checkers
from kvgraft_jax import errors
from kvgraft_jax import statements

SHIPPED = 'shipped'
# base: the first met; parameter: a base template with other numbers; transfer:
# the same structure in other words; near: a base problem with one unit, word,
# sign or fixed number changed, so that its answer is another.
SPLITS = ('base', 'parameter', 'transfer', 'near')

FAMILIES_FILE = (
    pathlib.Path(__file__).parent / 'data' / 'problems' / 'families.jsonl')
PROBLEMS_FILE = FAMILIES_FILE.with_name('problems.jsonl')


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem.

  Attributes:
    id: unique in its dataset.
    problem: the statement.
    answer: the right answer.
    rule: of the check that compares answers.
    tolerance: of the rule, a decimal; None where the rule takes none.
    family: problems with one method; '' for none.
    split: one of SPLITS; '' for none.
    parameters: name -> value that the programs read for this statement.
    schema: what the numbers of the statement are, in their order: the
      parameters with their ranges, and constants. Empty if it is not
      parameterised.
    instances: further parameters, of the schema, to check the programs on.
    solution: worked method; '' if there is none.
    wrong: plausible wrong answers.
    programs: sources of independent methods.
  """

  id: str
  problem: str
  answer: str
  rule: str = 'integer'
  tolerance: str | None = None
  family: str = ''
  split: str = ''
  parameters: Mapping[str, int | str] = dataclasses.field(
      default_factory=dict)
  schema: tuple[Mapping[str, Any], ...] = ()
  instances: tuple[Mapping[str, int | str], ...] = ()
  solution: str = ''
  wrong: tuple[str, ...] = ()
  programs: tuple[str, ...] = ()

  @property
  def sha256(self) -> str:
    """Address of the canonical statement."""
    return statements.address(self.problem)


@dataclasses.dataclass(frozen=True)
class Programs:
  """Programs for a problem whose statement is elsewhere.

  Attributes:
    id: of the problem in its dataset.
    statement_sha256: address of its canonical statement.
    programs: sources of independent methods.
    solution: worked method in words of its own.
    rule: of the check that compares answers; '' for the problem's own.
    parameters: name -> value that the programs read; empty for the problem's
      own.
  """

  id: str
  statement_sha256: str
  programs: tuple[str, ...]
  solution: str
  rule: str = ''
  parameters: Mapping[str, int | str] = dataclasses.field(
      default_factory=dict)

  def join(self, problem: Problem) -> Problem:
    """Returns `problem` with what is here.

    Raises:
      UsageError: if it was written for another statement, or its rule cannot
        read the problem's answer.
    """
    if problem.id != self.id:
      raise errors.UsageError(
          f'the programs of {self.id!r} cannot be joined to problem'
          f' {problem.id!r}; give the problem of their id')
    if problem.sha256 != self.statement_sha256:
      raise errors.UsageError(
          f'the programs of {self.id!r} are for another statement: their'
          f' statement_sha256 is {self.statement_sha256}, expected'
          f' {problem.sha256}, the address of the canonical statement of'
          f' problem {self.id!r}; `kvgraft library address --problem=...`'
          ' prints it')
    joined = dataclasses.replace(
        problem, programs=self.programs, solution=self.solution,
        rule=self.rule or problem.rule,
        parameters=self.parameters or problem.parameters)
    _check_answer(f'programs of {self.id!r}', joined)
    return joined


_Record = TypeVar('_Record', Problem, Programs)


def load(source: str | os.PathLike[str]) -> list[Problem]:
  """Returns the problems of a dataset, in the order of the file.

  Args:
    source: 'shipped', 'shipped:SPLIT', or the path of a JSONL file.

  Raises:
    NotFoundError: if there is no such file or split.
    UsageError: naming the first line that is malformed, or whose answer its
      rule cannot read; or if there is no problem.
  """
  name, _, split = str(source).partition(':')
  if name != SHIPPED:
    return _read(source, Problem, {})
  if split and split not in SPLITS:
    raise errors.NotFoundError(
        f'{source}: the shipped set has no split {split!r}, expected one of'
        f' {", ".join(SPLITS)}')
  shared = {
      family['family']: {
          'schema': family['parameters'], 'instances': family['held_out'],
          'programs': family['programs']}
      for _, family in _lines(FAMILIES_FILE, Problem)}
  return [problem for problem in _read(PROBLEMS_FILE, Problem, shared)
          if split in ('', problem.split)]


def load_programs(path: str | os.PathLike[str]) -> dict[str, Programs]:
  """Returns the programs of a file, by the id of their problem.

  Args:
    path: JSONL with the fields of `Programs`.

  Raises:
    NotFoundError: if there is no such file.
    UsageError: naming the first line that is malformed; or if there is none.
  """
  return {item.id: item for item in _read(path, Programs, {})}


def _read(
    path: str | os.PathLike[str], kind: type[_Record],
    shared: Mapping[str, Mapping[str, Any]],
) -> list[_Record]:
  """Returns the records of a file.

  Args:
    path: of JSONL.
    kind: of the records.
    shared: family -> fields for its lines that do not have them.
  """
  found: dict[str, _Record] = {}
  for number, line in _lines(path, kind):
    line = {**shared.get(str(line.get('family')), {}), **line}
    record = _record(f'{path}, line {number}', kind, line)
    if isinstance(record, Problem):
      _check_answer(f'{path}, line {number}', record)
    if record.id in found:
      raise errors.UsageError(
          f'{path}, line {number}: the id {record.id!r} occurs twice; ids must'
          ' be unique')
    found[record.id] = record
  if not found:
    what = 'problem' if kind is Problem else 'programs'
    raise errors.UsageError(
        f'{path}: holds no {what}, expected one object a line with'
        f' {", ".join(_REQUIRED[kind])}')
  return list(found.values())


def _check_answer(where: str, problem: Problem) -> None:
  """Raises UsageError unless the problem's rule can read its answer."""
  try:
    checkers.check_key(
        problem.rule, problem.answer, tolerance=problem.tolerance)
  except errors.UsageError as e:
    raise errors.UsageError(
        f'{where}: problem {problem.id!r} has the answer'
        f' {errors.quoted(problem.answer)} and the rule {problem.rule!r}: {e};'
        ' set "rule" on its line to one that reads it, of'
        f' {", ".join(checkers.RULES)}') from None


def _lines(
    path: str | os.PathLike[str], kind: type[_Record]
) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields the number from 1 and the object of each line that is not blank."""
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as e:
    reason = getattr(e, 'strerror', None) or e
    raise errors.NotFoundError(
        f'{path}: cannot be read as a dataset ({reason}); expected "{SHIPPED}",'
        f' "{SHIPPED}:SPLIT" or the path of a JSONL file' if kind is Problem
        else f'{path}: cannot be read as programs ({reason}); expected the path'
        ' of a JSONL file with programs') from None
  for number, row in enumerate(text.split('\n'), 1):
    if row.strip():
      try:
        line = json.loads(row)
      except (ValueError, RecursionError) as e:
        raise errors.UsageError(
            f'{path}, line {number}: no JSON ({e}); expected one object a'
            ' line') from None
      if not isinstance(line, dict):
        raise errors.UsageError(
            f'{path}, line {number}: found {type(line).__name__}, expected an'
            ' object')
      yield number, line


def _record(
    where: str, kind: type[_Record], line: Mapping[str, Any]
) -> _Record:
  """Returns the record of the fields of a line."""
  known = [field.name for field in dataclasses.fields(kind)]
  unknown = [name for name in line if name not in known]
  if unknown:
    raise errors.UsageError(
        f'{where}: has unknown {", ".join(map(errors.quoted, unknown))}, known'
        f' are {", ".join(known)}; remove or rename them')
  values = {}
  for field in dataclasses.fields(kind):
    found = line.get(field.name)
    if found is not None:
      read, expected = _READERS.get(field.name, (_text, 'a string'))
      values[field.name] = read(found)
      if values[field.name] is None:
        raise errors.UsageError(
            f'{where}: {field.name} is {json.dumps(found)[:80]}, expected'
            f' {expected}')
  missing = [name for name in _REQUIRED[kind] if not values.get(name)]
  if missing:
    raise errors.UsageError(
        f'{where}: has no {", ".join(missing)}, found'
        f' {", ".join(sorted(line)) or "nothing"}')
  return kind(**values)


# Each reader returns None for what it cannot read.


def _text(value: Any) -> str | None:
  """Returns a string; ids and answers are often written as integers."""
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...] | None:
  ok = isinstance(value, list) and all(isinstance(v, str) for v in value)
  return tuple(value) if ok else None


def _parameters(value: Any) -> dict[str, int | str] | None:
  ok = isinstance(value, dict) and all(
      isinstance(v, (int, str)) and not isinstance(v, bool)
      for v in value.values())
  return dict(value) if ok else None


def _objects(value: Any) -> tuple[dict[str, Any], ...] | None:
  ok = isinstance(value, list) and all(isinstance(v, dict) for v in value)
  return tuple(value) if ok else None


_REQUIRED = {
    Problem: ('id', 'problem', 'answer'),
    Programs: ('id', 'statement_sha256', 'programs', 'solution'),
}
_READERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    'parameters': (_parameters, 'an object of integers and strings'),
    'schema': (_objects, 'a list of objects'),
    'instances': (_objects, 'a list of objects'),
    'wrong': (_texts, 'a list of strings'),
    'programs': (_texts, 'a list of strings'),
}
