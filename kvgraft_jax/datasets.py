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
    rule: of the check that compares answers.
  """

  id: str
  statement_sha256: str
  programs: tuple[str, ...]
  solution: str
  rule: str = 'integer'

  def join(self, problem: Problem) -> Problem:
    """Returns `problem` with the programs, the solution and the rule.

    Raises:
      UsageError: if they were written for another statement.
    """
    if (problem.id, problem.sha256) != (self.id, self.statement_sha256):
      raise errors.UsageError(
          f'the programs of {self.id!r} were written for the statement'
          f' {self.statement_sha256}, problem {problem.id!r} has the statement'
          f' {problem.sha256}; use the dataset that they were written for')
    return dataclasses.replace(
        problem, programs=self.programs, solution=self.solution,
        rule=self.rule)


_Record = TypeVar('_Record', Problem, Programs)


def load(source: str | os.PathLike[str]) -> list[Problem]:
  """Returns the problems of a dataset, in the order of the file.

  Args:
    source: 'shipped', 'shipped:SPLIT', or the path of a JSONL file.

  Raises:
    NotFoundError: if there is no such file or split.
    UsageError: naming the first line that is malformed.
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
      for _, family in _lines(FAMILIES_FILE)}
  return [problem for problem in _read(PROBLEMS_FILE, Problem, shared)
          if split in ('', problem.split)]


def load_programs(path: str | os.PathLike[str]) -> dict[str, Programs]:
  """Returns the programs of a file, by the id of their problem.

  Args:
    path: JSONL with the fields of `Programs`.

  Raises:
    NotFoundError: if there is no such file.
    UsageError: naming the first line that is malformed.
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
  for number, line in _lines(path):
    line = {**shared.get(str(line.get('family')), {}), **line}
    record = _record(f'{path}, line {number}', kind, line)
    if record.id in found:
      raise errors.UsageError(
          f'{path}, line {number}: the id {record.id!r} occurs twice; ids must'
          ' be unique')
    found[record.id] = record
  return list(found.values())


def _lines(
    path: str | os.PathLike[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields the number from 1 and the object of each line that is not blank."""
  try:
    text = pathlib.Path(path).read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as e:
    raise errors.NotFoundError(
        f'{path}: cannot be read as a dataset ({e}); expected "{SHIPPED}",'
        f' "{SHIPPED}:SPLIT" or the path of a JSONL file') from None
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
  """Returns the record of the fields of a line that `kind` knows."""
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
  for name in _REQUIRED[kind]:
    if not values.get(name):
      raise errors.UsageError(
          f'{where}: has no {name}, found {", ".join(sorted(line))}')
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
