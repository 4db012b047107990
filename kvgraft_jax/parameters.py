"""Schemas that say what the numbers of a statement are to a program.

A schema is a list in the order of the statement's numbers. An item is
{'constant': '3'}, or {'name', 'type', 'min', 'max'} with a type of TYPES and,
for integers, 'multiple_of'. A rational may be two numbers with a slash between.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import fractions
import functools
import json
import random
import re
from typing import Any

from kvgraft_jax import errors
from kvgraft_jax import recheck
from kvgraft_jax import statements

Schema = Sequence[Mapping[str, Any]]
Values = dict[str, int | str]

_FORMS = {
    'integer': re.compile(r'0|-?[1-9][0-9]*'),
    'decimal': re.compile(r'-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?'),
    'rational': re.compile(
        r'-?(?:0|[1-9][0-9]*)(?:\.[0-9]+|/[1-9][0-9]*)?'),
}
TYPES = tuple(_FORMS)


def check(schema: Any) -> None:
  """Raises UsageError unless `schema` is well-formed."""
  if not isinstance(schema, (list, tuple)) or not schema:
    raise errors.UsageError(
        f'the parameters are {schema!r:.80}, expected a list of objects, one'
        ' for each number of the statement')
  seen: dict[str, Any] = {}
  for place, item in enumerate(schema, 1):
    problem = _problem(item)
    if problem:
      raise errors.UsageError(
          f'parameter {place} is {item!r:.120}: {problem}')
    if 'name' in item and seen.setdefault(item['name'], item) != item:
      raise errors.UsageError(
          f'parameter {place} is {item!r:.120}: its name has another type or'
          ' range in front')
  if not seen:
    raise errors.UsageError(
        'the parameters are all constants; leave them out')


def _problem(item: Any) -> str:
  """Returns what is wrong with an item of a schema, '' for nothing."""
  if not isinstance(item, Mapping):
    return 'expected an object'
  if 'constant' in item:
    return '' if set(item) == {'constant'} and isinstance(
        item['constant'], str) else 'expected only a constant, a string'
  if set(item) - {'multiple_of'} != {'name', 'type', 'min', 'max'}:
    return 'expected name, type, min and max'
  if not isinstance(item['name'], str) or not item['name'].isidentifier():
    return 'expected an identifier as name'
  if item['type'] not in TYPES:
    return f'expected a type of {", ".join(TYPES)}'
  try:
    lowest, highest = _value(item['min']), _value(item['max'])
    if not lowest <= highest:
      return 'expected min <= max'
    if 'multiple_of' in item:
      unit = item['multiple_of']
      if item['type'] != 'integer' or type(unit) is not int or unit < 1:
        return 'expected a positive integer as multiple_of an integer'
      if -(-lowest // unit) * unit > highest:
        return f'expected a multiple of {unit} from min to max'
  except ZeroDivisionError:
    return 'expected no ratio to zero'
  except (TypeError, ValueError) as e:
    return str(e)
  return ''


@functools.lru_cache(4096, typed=True)
def _value(text: Any) -> fractions.Fraction:
  """Returns an exact value.

  Raises:
    ValueError: if it is no integer, decimal or ratio.
    ZeroDivisionError: if it is a ratio to zero.
  """
  if isinstance(text, str):
    top, slash, bottom = text.partition('/')
    if slash:
      return recheck.fraction(top) / int(bottom)
    return recheck.fraction(top)
  return recheck.fraction(text)


def read(template: statements.Template, schema: Schema) -> Values | None:
  """Returns the parameters that a statement gives, None if it does not fit.

  Args:
    template: of the statement.
    schema: well-formed; constants must be met as written, the others must have
      their type and range, and one name must have one value.
  """
  between = template.skeleton.split(statements.SLOT)[1:]
  numbers, found, at = template.numbers, Values(), 0
  for item in schema:
    if at >= len(numbers):
      return None
    text = numbers[at]
    if item.get('type') == 'rational' and between[at] == '/' and at + 1 < len(
        numbers):
      at += 1
      text = f'{text}/{numbers[at]}'
    at += 1
    if 'constant' in item:
      if text != item['constant']:
        return None
      continue
    value = _typed(text, item)
    if value is None or found.setdefault(item['name'], value) != value:
      return None
  return found if at == len(numbers) else None


def _typed(text: str, item: Mapping[str, Any]) -> int | str | None:
  """Returns a number as a program gets it, None if the schema excludes it."""
  if len(text) > 100 or not _FORMS[item['type']].fullmatch(text):
    return None
  value = _value(text)
  if not _value(item['min']) <= value <= _value(item['max']):
    return None
  if value % item.get('multiple_of', 1) and 'multiple_of' in item:
    return None
  return int(text) if item['type'] == 'integer' else text


def fits(values: Mapping[str, Any], schema: Schema) -> bool:
  """Tells whether `values` are parameters of a schema, each in its range."""
  items = {item['name']: item for item in schema if 'name' in item}
  return set(values) == set(items) and all(
      isinstance(values[name], (int, str)) and not isinstance(
          values[name], bool)
      and _typed(str(values[name]), item) == values[name]
      for name, item in items.items())


def sample(schema: Schema, count: int) -> list[Values]:
  """Returns different parameters of a schema, its corners first.

  Args:
    schema: well-formed.
    count: how many; fewer come back where the schema has fewer.
  """
  return list(_sample(json.dumps(list(schema)), count))


@functools.lru_cache(256)
def _sample(schema_json: str, count: int) -> tuple[Values, ...]:
  schema = json.loads(schema_json)
  draw = random.Random(0)
  items = {item['name']: item for item in schema if 'name' in item}
  found: list[Values] = []
  for n in range(20 * count):
    values = {name: _draw(item, draw, n) for name, item in items.items()}
    if values not in found and fits(values, schema):
      found.append(values)
    if len(found) == count:
      break
  return tuple(found)


def _draw(item: Mapping[str, Any], draw: random.Random, n: int) -> int | str:
  """Returns the lowest, the highest, then any value of an item."""
  lowest, highest = _value(item['min']), _value(item['max'])
  if item['type'] != 'integer':
    return str(item['min'] if n == 0 else item['max'] if n == 1 else
               draw.randint(-(-lowest // 1), max(-(-lowest // 1),
                                                 highest // 1)))
  unit = item.get('multiple_of', 1)
  first, last = -(-lowest // unit), highest // unit
  return unit * (first if n == 0 else last if n == 1 else
                 draw.randint(first, last))
