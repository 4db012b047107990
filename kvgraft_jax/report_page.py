"""The parts of a report's page, values as people read them, and its HTML."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
import re
from typing import Any

_TEMPLATE = pathlib.Path(__file__).parent / 'data/templates/report.html.jinja'
_HASH = re.compile('[0-9a-f]{40,}')
# What HTML may not hold as it is.
_CONTROLS = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]')


@dataclasses.dataclass(frozen=True)
class Cell:
  """A value with a look.

  Attributes:
    kind: code, good, bad, soft or list.
    text: shown.
    full: shown when pointed at.
    entries: of a list, each text or a cell.
  """

  kind: str
  text: str = ''
  full: str = ''
  entries: Sequence['str | Cell'] = ()


@dataclasses.dataclass(frozen=True)
class Text:
  """A paragraph; `sort` may be absent, warning, heading or command."""

  text: str
  sort: str = 'text'


@dataclasses.dataclass(frozen=True)
class Table:
  """A table; the first column names the row.

  Attributes:
    caption: what it shows.
    columns: names, with units.
    rows: one value a column.
    numeric: numbers of the columns that are set flush right.
    sort: for the template.
  """

  caption: str
  columns: Sequence[str]
  rows: Sequence[Sequence[str | Cell]]
  numeric: Iterable[int] = ()
  sort: str = 'table'


@dataclasses.dataclass(frozen=True)
class Figure:
  """A plot as an SVG element, what it shows in words, and its caption."""

  svg: str
  label: str
  caption: str


@dataclasses.dataclass(frozen=True)
class Figures:
  """Plots side by side where there is room."""

  figures: Sequence[Figure]
  sort: str = 'figures'


@dataclasses.dataclass(frozen=True)
class Fold:
  """Blocks behind a title, shown on demand and on paper."""

  title: str
  blocks: 'Blocks'
  sort: str = 'fold'


Blocks = list[Text | Table | Figures | Fold]


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of the page; without a title it is one line about its absence."""

  id: str
  title: str
  blocks: Blocks


def absent(what: str) -> Section:
  """Returns the line that stands for a section without content."""
  return Section(
      '', '', [Text(f'{what}: nothing of it in this ledger.', 'absent')])


def render(
    title: str, facts: Sequence[tuple[str, str | Cell]],
    warnings: Sequence[str], sections: Sequence[Section],
) -> str:
  """Returns the page; everything but the plots is escaped.

  Args:
    title: of the page.
    facts: names and values below it.
    warnings: what a reader has to know before any figure.
    sections: in order.
  """
  import jinja2  # pylint: disable=g-import-not-at-top
  template = jinja2.Environment(
      autoescape=True, undefined=jinja2.StrictUndefined).from_string(
          _TEMPLATE.read_text(encoding='utf-8'))
  text = template.render(
      title=title, facts=facts, warnings=warnings, sections=sections)
  return legible(text) + '\n'


def legible(text: str) -> str:
  """Returns a text with what HTML may not hold replaced."""
  return _CONTROLS.sub('\ufffd', text)


# Fields of a ledger, of which only the canonical form is certain.


def number(value: Any) -> str:
  """Returns a number in three digits, None as a dash, all else as it is."""
  if value is None:
    return '–'
  if isinstance(value, int) and not isinstance(value, bool):
    return f'{value:,}'
  x = real(value)
  if x is None:
    return plain(value)
  if x == int(x) and abs(x) < 1e6:
    return f'{int(x):,}'
  if 1e-3 <= abs(x) < 1e6:
    return f'{x:,.{max(0, 2 - math.floor(math.log10(abs(x))))}f}'
  mantissa, exponent = f'{x:.2e}'.split('e')
  return f'{mantissa}e{int(exponent)}'


def count(n: int, noun: str, plural: str = '') -> str:
  """Returns a number of things, in the singular for one."""
  return f'{n:,} {noun if n == 1 else plural or f"{noun}s"}'


def real(value: Any) -> float | None:
  """Returns the finite number that a field holds, or None."""
  if isinstance(value, bool) or not isinstance(value, (int, str)):
    return None
  try:
    x = float(value)
  except (ValueError, OverflowError):
    return None
  return x if math.isfinite(x) else None


def reals(values: Any) -> list[float]:
  """Returns the finite numbers of a list."""
  return [x for x in map(real, sequence(values)) if x is not None]


def whole(value: Any) -> int:
  """Returns an integer field, 0 if it is none."""
  return value if isinstance(value, int) else 0


def mapping(value: Any) -> dict[str, Any]:
  """Returns an object field, {} if it is none."""
  return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
  """Returns a list field, [] if it is none."""
  return value if isinstance(value, list) else []


def plain(value: Any) -> str:
  """Returns a string field as it is and anything else as JSON."""
  if isinstance(value, str):
    return value
  return json.dumps(value, ensure_ascii=False, sort_keys=True)


def cell(value: Any, limit: int | None = None) -> str | Cell:
  """Returns a cell for any field; hashes are cut, longer texts to `limit`."""
  text = plain(value)
  if _HASH.fullmatch(text):
    return Cell('code', text[:12], text)
  if limit and len(text) > limit:
    text = f'{text[:limit]}… ({len(text):,} characters)'
  return text


def flat(value: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns nested objects as one, with dotted names."""
  result: dict[str, Any] = {}
  for name, item in value.items():
    if isinstance(item, dict) and item:
      result |= flat(item, f'{prefix}{name}.')
    else:
      result[f'{prefix}{name}'] = item
  return result


def pairs(value: Any) -> Cell:
  """Returns an object as a list of names and values."""
  if not isinstance(value, dict):
    return Cell('list', entries=[cell(value)] if value is not None else [])
  return Cell('list', entries=[
      f'{name}: {_short(item)}' for name, item in flat(value).items()])


def _short(value: Any) -> str:
  found = cell(value, 300)
  return found if isinstance(found, str) else f'{found.text}…'
