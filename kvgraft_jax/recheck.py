"""Checks a ledger: its chain, its head, every score and every summary figure.

  python3 recheck.py DIR [--head=HASH]

This file needs Python 3.9 or newer and nothing else: no package, no model, no
accelerator. LEDGER.md describes what it reads, and what can be derived. Exit
code 0: everything that can be derived agrees; 1: each problem has a line;
2: wrong usage, or no ledger. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import fractions
import hashlib
import json
import operator
import os
import re
import stat
import sys
from typing import Any

Line = dict[str, Any]

FORMAT = 1
NO_HASH = '0' * 64  # `prev` of line 0.
LEDGER = 'ledger.jsonl'
HEAD = 'head.json'

_KEYS = {'body', 'hash', 'kind', 'n', 'prev'}
_HEX = re.compile('[0-9a-f]{64}')
_DEPTH = 100
_DIGITS = 4300  # What Python converts by default.
_NUMBER = re.compile(
    r'[+-]?(?=\.?[0-9])[0-9]*(?:\.[0-9]*)?(?:[eE]([+-]?[0-9]+))?')
_KIND = re.compile('[a-z][a-z0-9_]*')  # No two that look alike.
_GROUPED = re.compile(r'[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?')
_EXPONENT = 1000  # Beyond every float64; larger powers only cost time.

# Fields that must be there, by kind; integers count, so that none is negative.
# Other kinds are free.
_FIELDS: dict[str, dict[str, type]] = {
    'run': {'format': int, 'run': str, 'command': list, 'config': dict,
            'code': dict, 'model': dict, 'created': str},
    'profile': {'id': str, 'profile': dict, 'class': dict,
                'profile_fingerprint': str, 'class_fingerprint': str,
                'self_test': dict},
    'input': {'id': str, 'sha256': str, 'tokens_sha256': str, 'tokens': int},
    'artifact': {'id': str, 'artifact': str, 'key': str, 'start': int,
                 'end': int, 'profile': str, 'input': str, 'store': str,
                 'digests': list},
    'output': {'id': str, 'input': str, 'text': str, 'token_ids': list},
    'logits': {'id': str, 'profile': str, 'group': dict, 'rows': list,
               'sha256': list, 'argmax': list, 'tokens_computed': int,
               'tokens_restored': int},
    'compare': {'id': str, 'a': str, 'b': str, 'group': dict, 'rows': int,
                'equal': int, 'argmax_agree': int, 'kl': list,
                'max_abs': list},
    'digest': {'id': str, 'group': dict, 'sha256': str},
    'score': {'id': str, 'rule': str, 'group': dict, 'value': bool},
    'summary': {'id': str, 'over': dict, 'field': str, 'rule': str},
    'verdict': {'id': str, 'checker': str, 'ran': dict, 'passed': bool,
                'because': list},
    'resources': {'id': str, 'group': dict, 'seconds': str, 'energy': dict},
    'registration': {'sha256': str},
    'expected': {'id': str, 'registration': dict},
    'replayed': {'id': str, 'group': dict, 'equal': int, 'differing': int,
                 'missing': int},
    'recovered': {'dropped_bytes': int, 'adopted_lines': int},
    'note': {'text': str},
    'end': {'status': str},
}
_NAMES = {int: 'an integer', str: 'a string', list: 'a list',
          dict: 'an object', bool: 'true or false'}


# Lines and their chain.


def canonical(value: Any) -> bytes:
  """Returns the one JSON form of `value`: sorted keys, UTF-8, no spaces.

  Raises:
    ValueError: if a value has no such form: a float, another type, a lone
      surrogate, too deep, too many digits.
  """
  _check_canonical(value, 0)
  return json.dumps(
      value, sort_keys=True, ensure_ascii=False, separators=(',', ':')
  ).encode('utf-8')


def _check_canonical(value: Any, depth: int) -> None:
  if depth > _DEPTH:
    raise ValueError(f'nested deeper than {_DEPTH}')
  if isinstance(value, dict):
    for key, item in value.items():
      if not isinstance(key, str):
        raise ValueError(f'key {_short(key)} is no string')
      _check_canonical(item, depth + 1)
  elif isinstance(value, (list, tuple)):
    for item in value:
      _check_canonical(item, depth + 1)
  elif not (value is None or isinstance(value, (str, int))):
    raise ValueError(f'{type(value).__name__} {_short(value)} has no canonical'
                     ' form; use an integer or a string')


def line_hash(line: Line) -> str:
  """Returns the hash of a line: SHA-256 of all but its field `hash`."""
  rest = {k: v for k, v in line.items() if k != 'hash'}
  return hashlib.sha256(canonical(rest)).hexdigest()


def head_bytes(head: str, lines: int) -> bytes:
  """Returns the content of head.json."""
  return canonical({'format': FORMAT, 'head': head, 'lines': lines}) + b'\n'


def parse(data: bytes) -> Any:
  """Returns the value of canonical JSON; any other form is refused.

  Raises:
    ValueError: saying what is wrong.
  """
  def refuse(text: str) -> Any:
    raise ValueError(f'number {text[:40]}, expected an integer or a string')

  def integer(text: str) -> int:
    if len(text) > _DIGITS:
      raise ValueError(f'integer of {len(text)} characters, at most {_DIGITS}')
    return int(text)

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
      counted = collections.Counter(name for name, _ in pairs)
      raise ValueError(f'key {_short(counted.most_common(1)[0][0])} occurs'
                       ' twice')
    return found

  try:
    text = data.decode('utf-8')
  except UnicodeDecodeError as e:
    raise ValueError(f'no UTF-8 at byte {e.start}') from None
  try:
    value = json.loads(text, parse_float=refuse, parse_constant=refuse,
                       parse_int=integer, object_pairs_hook=unique)
  except json.JSONDecodeError as e:
    raise ValueError(f'no JSON at character {e.pos}: {e.msg}') from None
  except RecursionError:
    raise ValueError(f'nested deeper than {_DEPTH}') from None
  if canonical(value) != data:
    raise ValueError('not canonical JSON (order of keys, spaces or escapes)')
  return value


def parse_line(data: bytes) -> Line:
  """Returns a line, given without its line feed; its hash is not checked.

  Raises:
    ValueError: saying what is wrong.
  """
  line = parse(data)
  if not isinstance(line, dict) or set(line) != _KEYS:
    raise ValueError(f'expected an object with the keys {sorted(_KEYS)}')
  for name, kind in (('body', dict), ('hash', str), ('kind', str), ('n', int),
                     ('prev', str)):
    if not _is(line[name], kind):
      raise ValueError(f'{name} is {_short(line[name])}, expected'
                       f' {_NAMES[kind]}')
  if not _KIND.fullmatch(line['kind']):
    raise ValueError(f'kind is {_short(line["kind"])}, expected lower-case'
                     ' letters, digits and _')
  if not 0 <= line['n'] < 1 << 53:
    raise ValueError(f'n is {_short(line["n"])}, expected a small number')
  return line


def _is(value: Any, kind: type) -> bool:
  return isinstance(value, kind) and (
      kind is bool or not isinstance(value, bool))


def _short(value: Any) -> str:
  """Returns a value as printable ASCII, cut."""
  try:
    text = json.dumps(value)
  except (TypeError, ValueError, RecursionError):
    text = ascii(type(value).__name__)
  return text if len(text) <= 80 else f'{text[:77]}...'


def _name(text: str) -> str:
  """Returns a text as `_short` does, without the quotes."""
  return _short(text)[1:-1]


def read_lines(data: bytes) -> tuple[list[tuple[int, Line]], list[str]]:
  """Reads the lines of a ledger and checks their chain.

  Args:
    data: all bytes of ledger.jsonl.

  Returns:
    The lines that can be read, each with its number in the file from 1, and
    the problems, one line of text each.
  """
  lines: list[tuple[int, Line]] = []
  problems: list[str] = []
  if not data:
    return [], [f'{LEDGER}: is empty, expected at least one line']
  rows = data.split(b'\n')
  torn = rows.pop()
  if torn:
    rows.append(torn)
  n = 0  # Expected.
  prev = {NO_HASH}  # Acceptable, empty where the line in front is unreadable.
  for number, row in enumerate(rows, 1):
    found = []
    if torn and number == len(rows):
      found.append('the line feed at its end is missing: it was cut')
    try:
      line = parse_line(row)
    except ValueError as e:
      problems.append(f'line {number}: {"; ".join([*found, str(e)])}')
      n, prev = n + 1, set()
      continue
    own = line_hash(line)
    if line['hash'] != own:
      found.append(f'its hash is {own}, it says {_short(line["hash"])}: the'
                   ' line was changed')
    if line['n'] != n:
      found.append(f'n is {line["n"]}, expected {n}: lines were removed,'
                   ' inserted or swapped here')
    if prev and line['prev'] not in prev:
      found.append('prev is not the hash of the line in front')
    if number == 1 and (line['kind'], line['body'].get('format')) != (
        'run', FORMAT):
      found.append(f'expected kind "run" of format {FORMAT}')
    if found:
      problems.append(f'{where(number, line)}: {"; ".join(found)}')
    lines.append((number, line))
    n, prev = line['n'] + 1, {own, line['hash']}
  return lines, problems


def where(number: int, line: Line) -> str:
  """Returns the place of a line for messages."""
  name = line['body'].get('id')
  return (f'line {number} (n {line["n"]}), {_name(line["kind"])}'
          + (f' {_short(name)}' if isinstance(name, str) else ''))


# Scores.


def fraction(value: Any) -> fractions.Fraction:
  """Returns the exact value of an integer or a decimal such as "1.5e-07".

  Raises:
    ValueError: if it is neither, or beyond 1e1000.
  """
  return fractions.Fraction(_exact(value))


def _exact(value: Any) -> decimal.Decimal:
  """Returns a number in a form that is as exact, and quickly ordered."""
  if _is(value, int):
    return decimal.Decimal(value)
  found = (_NUMBER.fullmatch(value)
           if isinstance(value, str) and len(value) <= _EXPONENT else None)
  if not found:
    raise ValueError(f'{_short(value)} is no number')
  if abs(int(found[1] or '0')) > _EXPONENT:
    raise ValueError(f'{_short(value)} is beyond 1e{_EXPONENT}')
  return decimal.Decimal(value)


def normalise(text: str) -> str:
  """Returns a text with each run of white space as one space, none around."""
  return ' '.join(text.split())


def _string(value: Any) -> str:
  if not isinstance(value, str):
    raise ValueError(f'{_short(value)} is no string')
  return value


def _plain(value: Any) -> str:
  """Returns a number's text without space around it and commas of thousands."""
  text = str(value) if _is(value, int) else _string(value).strip()
  return text.replace(',', '') if _GROUPED.fullmatch(text) else text


def _whole(value: Any) -> int:
  text = _plain(value)
  if len(text) > _EXPONENT or not re.fullmatch('[+-]?[0-9]+', text):
    raise ValueError(f'{_short(value)} is no integer')
  return int(text)


def _ratio(value: Any) -> fractions.Fraction:
  top, slash, bottom = _plain(value).partition('/')
  if not slash:
    return fraction(top)
  divisor = _whole(bottom)
  if not divisor:
    raise ValueError(f'{_short(value)} divides by zero')
  return fractions.Fraction(_whole(top), divisor)


def _letter(value: Any) -> str:
  found = re.fullmatch(r'\(?([A-Za-z])[).:]{0,2}', _string(value).strip())
  if not found:
    raise ValueError(f'{_short(value)} is no letter of a choice')
  return found[1].upper()


def _equal(got: Any, right: Any, /, **unused_extra: Any) -> bool:
  return bool(got == right)


def _by(read: Any, same: Any = _equal) -> Any:
  """Returns a rule: an answer that cannot be read is wrong."""
  def rule(answer: Any, expected: Any, **extra: Any) -> bool:
    right = read(expected)
    try:
      got = read(answer)
    except ValueError:
      return False
    return same(got, right, **extra)
  return rule


def _near(
    got: Any, right: Any, /, *, tolerance: Any = None, **unused_extra: Any,
) -> bool:
  allowed = fraction(tolerance)
  if allowed < 0:
    raise ValueError(f'tolerance {_short(tolerance)} is negative')
  return bool(abs(got - right) <= allowed)


def _sha256(answer: Any, expected: Any, **unused_extra: Any) -> bool:
  kind, _, digest = _string(expected).partition(':')
  if kind != 'sha256' or not _HEX.fullmatch(digest):
    raise ValueError(f'{_short(expected)} is no "sha256:" with 64 hex digits')
  if not isinstance(answer, str):
    return False
  data = normalise(answer).encode('utf-8')
  return hashlib.sha256(data).hexdigest() == digest


# Rule -> whether an answer is right. An answer that cannot be read (null too)
# is wrong; an expected value that cannot be read is a ValueError.
SCORES = {
    'equal': _by(_string),
    'integer': _by(_whole),
    'rational': _by(_ratio),
    'decimal': _by(lambda value: fraction(_plain(value)), _near),
    'choice': _by(_letter),
    'sha256': _sha256,
}


# Summaries.


def _decimal(value: Any) -> str:
  try:
    return repr(float(fractions.Fraction(value)))
  except OverflowError:
    raise ValueError('the value is beyond float64') from None


def _keep(values: list[Any], value: Any) -> int | str:
  """Returns an integer if every value is one."""
  return int(value) if all(_is(v, int) for v in values) else _decimal(value)


def _numbers(values: list[Any]) -> list[decimal.Decimal]:
  if not values:
    raise ValueError('nothing is selected')
  return [_exact(value) for value in values]


def _total(values: list[Any]) -> fractions.Fraction:
  return sum(map(fractions.Fraction, _numbers(values)), fractions.Fraction(0))


def _median(values: list[Any]) -> str:
  ranked = sorted(_numbers(values))
  half = len(ranked) // 2
  middle = ranked[half:half + 1] if len(ranked) % 2 else (
      ranked[half - 1:half + 1])
  return _decimal(sum(map(fractions.Fraction, middle)) / len(middle))


def _count_true(values: list[Any]) -> int:
  for value in values:
    if not isinstance(value, bool):
      raise ValueError(f'{_short(value)} is neither true nor false')
  return sum(values)


# Rule -> value of the list of what is selected.
SUMMARIES = {
    'count': len,
    'count_true': _count_true,
    'sum': lambda values: _keep(values, _total(values)),
    'mean': lambda values: _decimal(_total(values) / len(values)),
    'median': _median,
    # The smallest value that 99 % of all do not exceed.
    'p99': lambda values: _decimal(
        sorted(_numbers(values))[-(-99 * len(values) // 100) - 1]),
    'min': lambda values: _keep(values, min(_numbers(values))),
    'max': lambda values: _keep(values, max(_numbers(values))),
    'distinct': lambda values: len({canonical(value) for value in values}),
}


def select(lines: list[Line], over: dict[str, Any], field: str) -> list[Any]:
  """Returns the values of a field in the lines of a selection.

  Args:
    lines: of a ledger.
    over: {"kind": KIND, "where": {dotted path in the body: scalar}}.
    field: dotted path in the body, lists are flattened; '' takes whole bodies.

  Raises:
    ValueError: if the selection is malformed or a line lacks the field.
  """
  kind, conditions = over.get('kind'), over.get('where', {})
  if not isinstance(kind, str) or not isinstance(conditions, dict) or (
      set(over) - {'kind', 'where'}):
    raise ValueError('over is not {"kind": STRING, "where": OBJECT}')
  if any(isinstance(v, (dict, list)) for v in conditions.values()):
    raise ValueError('where compares with objects or lists')
  found: list[Any] = []
  for line in lines:
    body = line['body']
    if line['kind'] != kind or not all(
        _same(_at(body, path), value) for path, value in conditions.items()):
      continue
    value = _at(body, field) if field else body
    if value is _MISSING:
      raise ValueError(f'n {line["n"]} has no field {_short(field)}')
    _flatten(value, found)
  return found


_MISSING = object()


def _at(value: Any, path: str) -> Any:
  for name in path.split('.'):
    value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
  return value


def _same(a: Any, b: Any) -> bool:
  return type(a) is type(b) and a == b  # 1 is not true.


def _flatten(value: Any, found: list[Any]) -> None:
  if isinstance(value, list):
    for item in value:
      _flatten(item, found)
  else:
    found.append(value)


def summarise(
    lines: list[Line], over: dict[str, Any], field: str, rule: str,
) -> int | str:
  """Returns a figure over lines: an integer, or repr of a float.

  Args:
    lines: of a ledger, those in front of the summary.
    over: selection, see `select`.
    field: see `select`.
    rule: a name in SUMMARIES.

  Raises:
    ValueError: if it cannot be computed.
  """
  if rule not in SUMMARIES:
    raise ValueError(f'rule {_short(rule)} is unknown, the figure cannot be'
                     f' re-derived; known are {", ".join(SUMMARIES)}')
  return SUMMARIES[rule](select(lines, over, field))


_COMPARISONS = {'==': operator.eq, '!=': operator.ne, '<': operator.lt,
                '<=': operator.le, '>': operator.gt, '>=': operator.ge}


def holds(value: Any, op: str, other: Any) -> bool:
  """Compares numbers as numbers, all else by == and != only.

  Raises:
    ValueError: if `op` is unknown or orders what is no number.
  """
  if op not in _COMPARISONS:
    raise ValueError(f'op {_short(op)} is unknown')
  try:
    return bool(_COMPARISONS[op](fraction(value), fraction(other)))
  except ValueError:
    if op not in ('==', '!='):
      raise
  return _same(value, other) == (op == '==')


# Everything together.


@dataclasses.dataclass
class Result:
  """What a check found.

  Attributes:
    lines: number of lines in the file.
    head: hash of the last line, computed; '' if it cannot be read.
    rederived: kind -> how many lines were derived anew.
    not_rederivable: ids of verdicts that name no summary.
    texts: how many lines are text that was not derived anew.
    problems: one line of text each; empty if everything agrees.
  """

  lines: int
  head: str
  rederived: dict[str, int]
  not_rederivable: list[str]
  texts: int
  problems: list[str]


class _Deriver:
  """Derives each line anew from the lines in front of it."""

  def __init__(self) -> None:
    self.lines: list[Line] = []
    self.ids: dict[tuple[str, str], Any] = {}
    self.rederived: dict[str, int] = {}
    self.not_rederivable: list[str] = []
    self.texts = 0

  def add(self, line: Line) -> list[str]:
    """Returns the problems of a line, and keeps it."""
    kind, body = line['kind'], line['body']
    problems = []
    for name, expected in _FIELDS.get(kind, {}).items():
      if not _is(body.get(name), expected):
        problems.append(
            f'{name} is {_short(body[name])}, expected {_NAMES[expected]}'
            if name in body else f'{name} is missing')
      elif expected is int and body[name] < 0:
        problems.append(f'{name} is {_short(body[name])}, expected 0 or more')
    derive = getattr(self, f'_derive_{kind}', None) if (
        kind in _FIELDS and not problems) else None
    if derive:
      try:
        problems += derive(body)
      except ValueError as e:
        problems.append(f'cannot be re-derived: {e}')
    name = body.get('id')
    if isinstance(name, str):
      if (kind, name) in self.ids:
        problems.append('its id occurs twice')
      self.ids.setdefault((kind, name), body)
    self.lines.append(line)
    return problems

  def _count(self, kind: str) -> None:
    self.rederived[kind] = self.rederived.get(kind, 0) + 1

  def _derive_input(self, body: Any) -> list[str]:
    found: dict[str, Any] = {}
    if 'text' in body:
      data = _string(body['text']).encode('utf-8')
      found['sha256'] = hashlib.sha256(data).hexdigest()
    if 'token_ids' in body:
      found |= {'tokens_sha256': tokens_sha256(body['token_ids']),
                'tokens': len(body['token_ids'])}
    if found:
      self._count('input')
    return _differences(body, found)

  def _derive_logits(self, body: Any) -> list[str]:
    if not len(body['rows']) == len(body['sha256']) == len(body['argmax']):
      return ['rows, sha256 and argmax differ in length']
    problems = []
    for name, kind in (('rows', int), ('sha256', str), ('argmax', int)):
      problems += [f'{name} has {_short(x)}, expected {_NAMES[kind]}'
                   for x in body[name] if not _is(x, kind)][:1]
    if not problems and any(
        x >= y for x, y in zip(body['rows'], body['rows'][1:])):
      problems.append('rows do not ascend, expected each position once')
    return problems

  def _derive_compare(self, body: Any) -> list[str]:
    if body['a'] == body['b']:
      raise ValueError(f'a and b are one logits line, {_short(body["a"])}')
    sides = []
    for side in ('a', 'b'):
      other = self.ids.get(('logits', body[side]))
      if other is None:
        raise ValueError(f'there is no logits line {_short(body[side])} in'
                         ' front')
      if not all(_is(other.get(name), list)
                 for name in ('rows', 'sha256', 'argmax')):
        raise ValueError(f'logits line {_short(body[side])} is malformed')
      sides.append(other)
    a, b = sides
    lengths = {len(x) for x in (a['sha256'], b['sha256'], a['argmax'],
                                b['argmax'], body['kl'], body['max_abs'])}
    if len(lengths) > 1:
      raise ValueError('a, b, kl and max_abs differ in their number of rows')
    if a['rows'] != b['rows']:
      raise ValueError('a and b have rows of other positions')
    equal = [_same(x, y) for x, y in zip(a['sha256'], b['sha256'])]
    problems = _differences(body, {
        'rows': len(equal), 'equal': sum(equal),
        'argmax_agree': sum(map(_same, a['argmax'], b['argmax']))})
    for row, (same, kl, largest) in enumerate(
        zip(equal, body['kl'], body['max_abs'])):
      if same != (fraction(largest) == 0) or same and fraction(kl) != 0:
        problems.append(
            f'row {row}: hashes {"are equal" if same else "differ"}, but'
            f' max_abs is {_short(largest)} and kl {_short(kl)}')
      if fraction(kl) < 0 or fraction(largest) < 0:
        problems.append(f'row {row}: kl {_short(kl)} or max_abs'
                        f' {_short(largest)} is negative')
    self._count('compare')
    return problems

  def _derive_score(self, body: Any) -> list[str]:
    for name in ('answer', 'expected'):
      if name not in body:
        raise ValueError(f'{name} is missing')
    if body['rule'] not in SCORES:
      raise ValueError(f'rule {_short(body["rule"])} is unknown; known are'
                       f' {", ".join(SCORES)}')
    extra = {k: body[k] for k in ('tolerance',) if k in body}
    value = SCORES[body['rule']](body['answer'], body['expected'], **extra)
    self._count('score')
    return _differences(body, {'value': value})

  def _derive_summary(self, body: Any) -> list[str]:
    value = summarise(self.lines, body['over'], body['field'], body['rule'])
    self._count('summary')
    return _differences(body, {'value': value})

  def _derive_expected(self, body: Any) -> list[str]:
    data = canonical(body['registration']) + b'\n'
    named = [line['body'].get('sha256') for line in self.lines
             if line['kind'] == 'registration']
    self._count('expected')
    found = hashlib.sha256(data).hexdigest()
    return [] if named == [found] else [
        f'its SHA-256 is {found}, the registration lines in front name'
        f' {_short(named)}']

  def _derive_verdict(self, body: Any) -> list[str]:
    if not body['because']:
      self.not_rederivable.append(body['id'])
      return []
    value = passes(body['because'], self.lines)
    self._count('verdict')
    return _differences(body, {'passed': value})

  def _derive_note(self, unused_body: Any) -> list[str]:
    self.texts += 1
    return []


def passes(because: list[Any], lines: list[Line]) -> bool:
  """Tells whether all comparisons of a verdict hold.

  Args:
    because: list of {"summary": id, "op": "<=", "value": scalar}.
    lines: of the ledger, those in front of the verdict.

  Raises:
    ValueError: if a comparison is malformed or its summary is not there.
  """
  values: dict[str, Any] = {}
  for line in lines:
    name = line['body'].get('id')
    if line['kind'] == 'summary' and isinstance(name, str):
      values.setdefault(name, line['body'].get('value'))
  result = True
  for item in because:
    if not isinstance(item, dict) or set(item) != {
        'summary', 'op', 'value'} or not (
            isinstance(item['summary'], str) and isinstance(item['op'], str)):
      raise ValueError(f'because has {_short(item)}, expected an object with'
                       ' summary, op and value')
    if item['summary'] not in values:
      raise ValueError(f'there is no summary {_short(item["summary"])} in'
                       ' front')
    result &= holds(values[item['summary']], item['op'], item['value'])
  return result


def _differences(body: dict[str, Any], found: dict[str, Any]) -> list[str]:
  return [f'{name} is {_short(body.get(name))}, re-derived {_short(value)}'
          for name, value in found.items()
          if name not in body or not _same(body[name], value)]


def tokens_sha256(token_ids: Any) -> str:
  """Returns the framed SHA-256 of token ids as little-endian int32.

  Raises:
    ValueError: if they are no list of such integers.
  """
  if not _is(token_ids, list) or not all(
      _is(t, int) and -2 ** 31 <= t < 2 ** 31 for t in token_ids):
    raise ValueError('token_ids is no list of 32-bit integers')
  data = b''.join(t.to_bytes(4, 'little', signed=True) for t in token_ids)
  digest = hashlib.sha256()
  for part in (b'kvgraft.tokens', data):
    digest.update(len(part).to_bytes(8, 'little') + part)
  return digest.hexdigest()


def read_file(path: str) -> bytes:
  """Returns the bytes of a regular file; others could block or never end.

  Raises:
    ValueError: if it cannot be read, saying why.
  """
  try:
    fd = os.open(path, os.O_RDONLY | getattr(os, 'O_NONBLOCK', 0)
                 | getattr(os, 'O_BINARY', 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
      os.close(fd)
      raise ValueError('is no regular file')
    with open(fd, 'rb') as f:
      return f.read()
  except OSError as e:
    raise ValueError(f'cannot be read: {e.strerror}') from None
  except MemoryError:
    raise ValueError('is larger than the memory') from None


def check_head(data: bytes, lines: int, hashes: set[str]) -> list[str]:
  """Returns the problems of head.json.

  Args:
    data: its bytes.
    lines: number of lines in the ledger.
    hashes: acceptable hashes of the last line; empty if it is unreadable.
  """
  try:
    if not data.endswith(b'\n'):
      raise ValueError('the line feed at its end is missing')
    head = parse(data[:-1])
    if not isinstance(head, dict) or set(head) != {'format', 'head', 'lines'}:
      raise ValueError('expected an object with format, head and lines')
    if not _same(head['format'], FORMAT):
      raise ValueError(f'format is {_short(head["format"])}, expected {FORMAT}')
    if not _is(head['lines'], int) or not _is(head['head'], str):
      raise ValueError('expected an integer as lines and a string as head')
  except ValueError as e:
    return [f'{HEAD}: {e}']
  if head['lines'] != lines:
    what = ('the tail was cut' if head['lines'] > lines
            else 'lines were added behind it')
    return [f'{HEAD}: says {_short(head["lines"])} lines, {LEDGER} has {lines}:'
            f' {what}, or {HEAD} was changed']
  if hashes and head['head'] not in hashes:
    return [f'{HEAD}: head is {_short(head["head"])}, the last line\'s hash is'
            f' {min(hashes)}: line {lines} or {HEAD} was changed']
  return []


def check(directory: str | os.PathLike[str], head: str | None = None) -> Result:
  """Checks the ledger in a directory.

  Args:
    directory: with ledger.jsonl and head.json.
    head: hash that its last line must have, kept elsewhere.

  Returns:
    What was found; nothing in the files makes it raise.
  """
  directory = os.fspath(directory)
  if not os.path.isdir(directory):
    return Result(0, '', {}, [], 0, [f'{_short(directory)}: is no directory'])
  try:
    data = read_file(os.path.join(directory, LEDGER))
  except ValueError as e:
    return Result(0, '', {}, [], 0, [f'{LEDGER}: {e}'])
  lines, problems = read_lines(data)
  count = data.count(b'\n') + (not data.endswith(b'\n') and bool(data))
  last = lines[-1][1] if lines and lines[-1][0] == count else None
  own = line_hash(last) if last else ''
  try:
    problems += check_head(
        read_file(os.path.join(directory, HEAD)), count,
        {own, last['hash']} if last else set())
  except ValueError as e:
    problems.append(f'{HEAD}: {e}')
  if head is not None and head != own:
    at = [number for number, line in lines if line_hash(line) == head]
    problems.append(
        f'the head kept elsewhere is {head}, '
        + (f'that of line {at[0]}: lines were added behind it' if at else
           f'the last line\'s hash is {own or "unknown"}: this is another'
           ' history'))
  deriver = _Deriver()
  for number, line in lines:
    problems += [f'{where(number, line)}: {p}' for p in deriver.add(line)]
  return Result(count, own, deriver.rederived, deriver.not_rederivable,
                deriver.texts, problems)


def missing(directory: str | os.PathLike[str]) -> str:
  """Returns why there is nothing to check, '' if there is something."""
  directory = os.fspath(directory)
  if not os.path.isdir(directory):
    return f'{_short(directory)} is no directory; give the directory of a run'
  if not any(os.path.lexists(os.path.join(directory, name))
             for name in (LEDGER, HEAD)):
    return (f'{_short(directory)} holds no {LEDGER}; give the directory of a'
            ' run')
  return ''


def plural(count: int, noun: str) -> str:
  """Returns a count with its noun, such as '1 line' or '2 lines'."""
  return f'{count} {noun}{"" if count == 1 else "s"}'


def report(result: Result) -> tuple[list[str], dict[str, Any]]:
  """Returns the lines for people and the JSON object of a result."""
  derived = ', '.join(f'{n} {kind}' for kind, n in result.rederived.items())
  lines = [*result.problems,
           f'{plural(result.lines, "line")}, head {result.head or "unknown"}',
           f'derived anew: {derived or "nothing"}']
  if result.not_rederivable:
    lines.append('verdicts that only `kvgraft ledger recheck --full` can check:'
                 f' {", ".join(map(_name, result.not_rederivable))}')
  if result.texts:
    lines.append(f'text that was not derived: {plural(result.texts, "note")}')
  lines.append(f'FAILED: {plural(len(result.problems), "problem")}'
               if result.problems else 'everything that can be derived agrees')
  return lines, {
      'ok': not result.problems, 'lines': result.lines, 'head': result.head,
      'rederived': result.rederived,
      'not_rederivable': result.not_rederivable, 'texts': result.texts,
      'problems': len(result.problems), 'problem_list': result.problems[:100]}


def is_hash(text: str) -> bool:
  """Tells whether a text is 64 lower-case hex digits."""
  return bool(_HEX.fullmatch(text))


def main(argv: list[str]) -> int:
  """Checks the ledger that the arguments name; returns the exit code."""
  heads = [a[len('--head='):] for a in argv if a.startswith('--head=')]
  rest = [a for a in argv if not a.startswith('--head=')]
  if rest in (['-h'], ['--help']):
    print(__doc__)
    return 0
  if len(rest) != 1 or rest[0].startswith('-') or len(heads) > 1 or not all(
      map(is_hash, heads)):
    print('usage: python3 recheck.py DIR [--head=64 hex digits]',
          file=sys.stderr)
    return 2
  nothing = missing(rest[0])
  if nothing:
    print(nothing, file=sys.stderr)
    return 2
  result = check(rest[0], *heads)
  lines, summary = report(result)
  for line in [*lines, json.dumps(summary)]:
    print(line.encode('ascii', 'backslashreplace').decode('ascii'))
  sys.stdout.flush()
  return int(bool(result.problems))


if __name__ == '__main__':
  try:
    code = main(sys.argv[1:])
  except OSError as error:  # Nobody reads any more, or stdout is full.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    print(f'cannot write the result: {error.strerror}', file=sys.stderr)
    code = 1
  sys.exit(code)
