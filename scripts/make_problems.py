"""Writes problems.jsonl of the shipped set from families.jsonl.

  python scripts/make_problems.py          # writes problems.jsonl
  python scripts/make_problems.py --check  # exits 1 if it is out of date

Run it after a change of families.jsonl, which has one family a line: its
template and schema, two programs, the parameters of its `base` and `parameter`
problems and of held-out instances, and `transfer` and `near` problems with a
text, and where need be with programs, of their own. A text may hold expressions
in braces over the parameters, such as `{a} * {b} = {a * b}`. The answer is what
the first program prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import decimal
import fractions
import io
import json
import pathlib
import re
import sys
from typing import Any

DATA = pathlib.Path(__file__).resolve().parents[1].joinpath(
    'kvgraft_jax', 'data', 'problems')
FAMILIES = DATA / 'families.jsonl'
PROBLEMS = DATA / 'problems.jsonl'

WRONG = 3  # Wrong answers a problem.

_MONTHS = (
    'January February March April May June July August September October'
    ' November December').split()
_ONES = 'one two three four five six seven eight nine'.split()
_TENS = 'twenty thirty forty fifty sixty seventy eighty ninety'.split()

_NAMES: dict[str, Any] = {
    'DECIMAL': decimal.Decimal,
    'FRACTION': fractions.Fraction,
    'MONTHS': _MONTHS,
    'NUMBERED': [f'{i} {month}' for i, month in enumerate(_MONTHS, 1)],
    'WORDS': [
        'zero', *_ONES, *(
            'ten eleven twelve thirteen fourteen fifteen sixteen seventeen'
            ' eighteen nineteen').split(),
        *(ten + one for ten in _TENS
          for one in ['', *(f'-{one}' for one in _ONES)])],
}


def fill(text: str, parameters: Mapping[str, int]) -> str:
  """Returns a text with the values of the expressions in its braces."""
  names = _NAMES | dict(parameters)
  return re.sub(r'\{([^{}]+)\}', lambda m: str(eval(m[1], names)), text)


def run(source: str, parameters: Mapping[str, int]) -> str:
  """Returns what a program of the project prints for `parameters`."""
  stdin, out = sys.stdin, io.StringIO()
  sys.stdin = io.StringIO(json.dumps(parameters))
  try:
    with contextlib.redirect_stdout(out):
      exec(compile(source, 'program', 'exec'), {})
  finally:
    sys.stdin = stdin
  return out.getvalue().strip()


def same(rule: str, a: str, b: str) -> bool:
  """Returns whether two answers are equal by a rule."""
  if rule == 'equal':
    return a == b
  return fractions.Fraction(a) == fractions.Fraction(b)


def problems(family: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields the problems of a family."""
  for split in ('base', 'parameter', 'transfer', 'near'):
    for number, variant in enumerate(family[split], 1):
      if split in ('base', 'parameter'):
        variant = {'problem': family['problem'], 'parameters': variant}
      yield problem(family, split, number, variant)


def problem(
    family: Mapping[str, Any], split: str, number: int,
    variant: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns one problem.

  Args:
    family: line of families.jsonl.
    split: of the problem.
    number: in its family and split, from 1.
    variant: `problem` and `parameters`; `programs` and `wrong` where they are
      not the family's.

  Raises:
    ValueError: if there are too few wrong answers, or if a `near` problem has
      the answer of the problem that it resembles.
  """
  parameters, rule = variant['parameters'], family['rule']
  name = f'{family["family"]}-{split}-{number}'
  answer = run(variant.get('programs', family['programs'])[0], parameters)
  candidates = [fill(w, parameters)
                for w in variant.get('wrong', family['wrong'])]
  if split == 'near':
    # The most tempting one: what the problem that it resembles has.
    candidates.insert(0, run(family['programs'][0], parameters))
    if same(rule, candidates[0], answer):
      raise ValueError(f'{name}: the change leaves the answer {answer}')
  wrong: list[str] = []
  for candidate in candidates:
    if not any(same(rule, candidate, other) for other in [answer, *wrong]):
      wrong.append(candidate)
  if len(wrong) < WRONG:
    raise ValueError(f'{name}: needs {WRONG} wrong answers, found {wrong}')
  line = {
      'id': name, 'family': family['family'], 'split': split,
      'problem': fill(variant['problem'], parameters), 'answer': answer,
      'rule': rule, 'parameters': parameters, 'wrong': wrong[:WRONG]}
  if 'tolerance' in family:
    line['tolerance'] = family['tolerance']
  if split in ('base', 'parameter'):
    line['solution'] = fill(family['solution'], parameters)
  else:
    line['schema'] = []  # Its numbers are not those of the family's template.
  if 'programs' in variant:
    line['programs'] = variant['programs']
  return line


def render() -> str:
  """Returns the content of problems.jsonl."""
  families = [json.loads(row) for row in FAMILIES.read_text(
      encoding='utf-8').splitlines()]
  return ''.join(
      json.dumps(line, ensure_ascii=False) + '\n'
      for family in families for line in problems(family))


def main() -> int:
  """Writes problems.jsonl, or says whether it is out of date."""
  text = render()
  if '--check' in sys.argv[1:]:
    current = PROBLEMS.read_text(encoding='utf-8') == text
    print('up to date' if current else 'run python scripts/make_problems.py')
    return 0 if current else 1
  PROBLEMS.write_text(text, encoding='utf-8')
  return 0


if __name__ == '__main__':
  sys.exit(main())
