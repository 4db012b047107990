r"""The final answer in free text: a table of places, a table of readings.

A place is where authors put an answer, such as `\boxed{}` or "the answer is".
Places are tried in order, the last occurrence of each first; what stands there
is read as the rule says (a number, a letter, a line). The result is one plain
form: no thousands separators, currency, units, LaTeX, or full stop.
"""

from collections.abc import Callable
from collections.abc import Iterator
import fractions
import re

_NUMBER = re.compile(
    r'(?<![\w.])'  # Not in a word (H2O), not the decimals of another number.
    r'((?:(?<![\w)\]}])[+-])?)'  # A sign, if it is not a subtraction.
    r'\$?\s?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?'
    r'|\.[0-9]+)'
    r'([eE][+-]?[0-9]+(?!\w))?'
    r'(?:\s?/\s?([0-9]+)(?![0-9.]))?'
    r'(?!(?:st|nd|rd|th)\b)')
_MIXED = re.compile(
    r'(?<![\w./])(-?)([0-9]{1,9})\s+([0-9]{1,9})/([0-9]{1,9})(?![\w.])')
_LETTER = re.compile(
    r'\(([A-Za-z])\)'
    r"|(?<![\w'])([A-H])(?=[).:,;*$]|\s*$|\s+(?:is|because|since)\b)"
    r'|(?<![\w\'])([B-H])(?![\w\'])')

# What LaTeX adds to a number, and what it stands for.
_LATEX = (
    (r'\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}', r'\1/\2'),
    (r'\\[dt]?frac\s*([0-9])\s*([0-9])', r'\1/\2'),
    (r'\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\^\{?[0-9]\}?)?', ' '),
    (r'(?<=[A-Za-z])\^\{?[0-9]\}?', ''),  # Of a unit.
    (r'\{,\}', ','),
    (r'(?<=[0-9])\\[,!](?=[0-9]{3})', ','),
    (r'\\[,;:! ]|~', ' '),
    (r'\^\s*\{?\\circ\}?|\\%|\\degree', ' '),
    (r'\\(?:left|right|displaystyle)', ''),
    (r'\\[()\[\]]', ''),
    (r'\\\$', '$'),
    ('[\u2212\u2013\u2010\u2011]', '-'),
    ('\u00d7', '*'),
    ('[\u202f\u00a0]', ' '),
)


def _latex(text: str) -> str:
  for pattern, instead in _LATEX:
    text = re.sub(pattern, instead, text)
  return text


_BRACE = re.compile(r'\\f?boxed\s*\{|\\.|[{}]', re.DOTALL)
_TEXT, _LINE, _TRIES = 100_000, 1000, 100  # Looked at; bounds the time.


# Readings: what stands at a place -> the answer, or None.


def _numbers(text: str) -> list[str]:
  """Returns the plain form of each number in a text."""
  text = _MIXED.sub(
      lambda m: f'{m[1]}{int(m[2]) * int(m[4]) + int(m[3])}/{m[4]}',
      _latex(text).replace('$', ' '))
  found = []
  for sign, digits, exponent, divisor in _NUMBER.findall(text):
    digits = digits.replace(',', '')
    if digits.startswith('.'):
      digits = f'0{digits}'
    whole, _, decimals = digits.partition('.')
    if not decimals.strip('0') and not exponent:
      digits = whole  # 12.00 is 12.
    number = f'{"-" if sign == "-" else ""}{digits}{exponent}'
    found.append(f'{number}/{divisor}' if divisor else number)
  return found


def _first_number(text: str) -> str | None:
  for part in (text.rpartition('=')[2], text):
    if numbers := _numbers(part):
      return numbers[0]
  return None


def _only_number(text: str) -> str | None:
  numbers = set(_numbers(text.rpartition('=')[2]))
  return numbers.pop() if len(numbers) == 1 else None


def _last_number(text: str) -> str | None:
  numbers = _numbers(text)
  return numbers[-1] if numbers else None


def _letters(text: str) -> list[str]:
  return [''.join(groups).upper() for groups in _LETTER.findall(
      re.sub(r'\\(?:text|mathrm|textbf|textrm)\s*\{([^{}]*)\}', r'\1', text))]


def _first_letter(text: str) -> str | None:
  text = text.strip(' $*')
  if re.fullmatch(r'[A-Za-z]', text):
    return text.upper()
  found = _letters(text)
  return found[0] if found else None


def _last_letter(text: str) -> str | None:
  found = _letters(text)
  return found[-1] if found else None


def _text(text: str) -> str | None:
  text = text.strip()
  if text.endswith('.') and not text.endswith('..'):
    text = text[:-1].rstrip()
  for mark in ('$$', '$', '`', '"', "'", '*'):
    if len(text) > 2 * len(mark) and text.startswith(mark) and (
        text.endswith(mark)):
      text = text[len(mark):-len(mark)].strip()
  return text or None


def _last_line(text: str) -> str | None:
  return _text((text.split('\n') or [''])[-1])


# Places: text -> what stands there, the last one first.


def _boxed(text: str) -> Iterator[str]:
  found: list[tuple[int, int]] = []  # Start and end of each closed box.
  open_: list[int | None] = []  # Of each open brace: where its box starts.
  for match in _BRACE.finditer(text):
    if match[0] == '}':
      start = open_.pop() if open_ else None
      if start is not None:
        found.append((start, match.start()))
    elif not match[0].startswith('\\') or 'boxed' in match[0]:
      open_.append(match.end() if len(match[0]) > 1 else None)
  for start, end in sorted(found, reverse=True):
    yield text[start:end]


def _behind(pattern: str) -> Callable[[str], Iterator[str]]:
  """Returns a place: the rest of the line behind a pattern."""
  def place(text: str) -> Iterator[str]:
    ends = [m.end() for m in re.finditer(pattern, text, re.IGNORECASE)]
    for end in reversed(ends[-_TRIES:]):
      found = re.match(r'[\s*_]*([^\n]+)', text[end:end + _LINE])
      if found:
        yield found[1]
  return place


def _whole(text: str) -> Iterator[str]:
  yield text[-10 * _LINE:].rstrip()


_PLACES: tuple[tuple[str, Callable[[str], Iterator[str]]], ...] = (
    ('boxed', _boxed),
    ('marked', _behind(r'\bfinal answer\b[*_]*(?:\s+is\b)?[*_]*\s*[:=]?')),
    ('marked', _behind(r'####')),
    ('marked', _behind(r'\banswer[*_]*\s*[:=]')),
    ('marked', _behind(r'\banswer\s+is\b\s*:?')),
    ('anywhere', _whole),
)
_READINGS: dict[str, dict[str, Callable[[str], str | None]]] = {
    'number': {'boxed': _only_number, 'marked': _first_number,
               'anywhere': _last_number},
    'letter': {'boxed': _first_letter, 'marked': _first_letter,
               'anywhere': _last_letter},
    'text': {'boxed': _text, 'marked': _text, 'anywhere': _last_line},
}
_KINDS = {'integer': 'number', 'rational': 'number', 'decimal': 'number',
          'choice': 'letter'}


def extract(text: str, rule: str = 'integer') -> str | None:
  r"""Returns the final answer that a text gives, None if there is none.

  Args:
    text: free text of an author or a model.
    rule: of the check that follows; it decides what an answer looks like: a
      number, a letter of a choice, else the text of a line. A number of another
      kind is returned as it is: "3/4" where an integer is wanted is an answer,
      though a wrong one.
  """
  text = text[-_TEXT:]
  reading = _READINGS[_KINDS.get(rule, 'text')]
  for kind, place in _PLACES:
    for found in place(text):
      answer = reading[kind](found)
      if answer is not None:
        return _lowest(answer) if rule == 'rational' else answer
      if kind == 'boxed':
        return None  # A box is the answer, even one that cannot be read.
  return None


def _lowest(number: str) -> str:
  """Returns a rational in lowest terms."""
  try:
    return str(fractions.Fraction(number)) if '/' in number and (
        len(number) < 1000) else number
  except (ValueError, ZeroDivisionError):
    return number
