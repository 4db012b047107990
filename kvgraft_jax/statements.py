"""Canonical form, address and template of a problem statement.

Two statements with one canonical form get one answer, so only what cannot
change the meaning is unified: kinds of white space, of minus signs and of
quotation marks, full-width digits and letters, superscripts, LaTeX delimiters
and symbols, commas of thousands. Case, units, signs, brackets and trailing
zeros stay, and so does all that is quoted or laid out like code. Where it is
not clear what is meant the text stays as well: the price is a miss, never a
wrong hit.
"""

import functools
import re
from typing import NamedTuple
import unicodedata

from kvgraft_jax import errors
from kvgraft_jax import hashing

SLOT = '□'  # Stands for a number in a skeleton.

_PASSES = 8  # Each pass may make a pattern for the next; two are enough.
_QUOTED = '\ue000'  # Stands for a quoted part while the rest is folded.

# Texts about their own signs, or laid out like code, are left as they are.
_ABOUT_TEXT = re.compile(
    r'\b(?:characters?|symbols?|signs|commas?|spaces|blanks?|whitespace'
    r'|indent\w*|typed|string|hyphens?|dash(?:es)?|apostrophes?|backslash\w*'
    r'|latex|unicode|utf|ascii|bytes?|code ?points?|encod\w*)\b'
    r'|```|\t|\n[ ]+\S|[' + _QUOTED + SLOT + ']',
    re.I)
_TABLE = re.compile(r'\S {3,}\S')
_ABOUT_LINES = re.compile(
    r'\b(?:lines?|rows?|verses?|poems?|haikus?|lyrics|stanzas?|paragraphs?'
    r'|prints?|printed|outputs?|code|program)\b', re.I)
# Near these words 1,234 may well be two numbers.
_ABOUT_LISTS = re.compile(
    r'\b(?:numbers|integers|digits?|lists?|sets?|pairs?|triples?|tuples?'
    r'|sequences?|series|points?|coordinates?|vectors?|intervals?|values'
    r'|terms|elements|gcd|lcm|max|min)\b', re.I)

# Apostrophes quote as well, but they only matter around several spaces.
_LITERAL = re.compile(
    r'`[^`\n]*`|"[^"\n]*"|«[^»\n]*»|‘[^’\n]*  [^’\n]*’'
    r"|(?<!\w)'[^'\n]*  [^'\n]*'(?!\w)")
_TABLE_OF_SIGNS = {
    **{c: c - 0xFEE0 for c in (
        *range(0xFF10, 0xFF1A), *range(0xFF21, 0xFF3B),
        *range(0xFF41, 0xFF5B), *map(ord, '＋－＝％＊／'))},
    **str.maketrans('−‐‑﹣’‘µ⋅∙', "----''μ··"),
    **str.maketrans({'\ufeff': None, '\u00ad': None, '…': '...'}),
}
_RAISED = str.maketrans('⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ', '0123456789+-ni')
_LOWERED = str.maketrans('₀₁₂₃₄₅₆₇₈₉', '0123456789')
_SYMBOLS = {
    'times': '×', 'cdot': '·', 'div': '÷', 'pm': '±', 'le': '≤', 'leq': '≤',
    'ge': '≥', 'geq': '≥', 'ne': '≠', 'neq': '≠', 'degree': '°',
    'infty': '∞', 'ldots': '...', 'dots': '...', 'dfrac': r'\frac',
    'tfrac': r'\frac', 'alpha': 'α', 'beta': 'β', 'gamma': 'γ', 'delta': 'δ',
    'theta': 'θ', 'lambda': 'λ', 'mu': 'μ', 'pi': 'π', 'sigma': 'σ',
    'omega': 'ω',
}
_SYMBOL = re.compile(rf'\\({"|".join(_SYMBOLS)})(?![A-Za-z])')

_MATH = re.compile(  # As Markdown readers decide, so that prices stay.
    r'(?<![^\s(\[{])\$(?!\s)([^$\n]*[^$\s+\-*/=\\])\$'
    r'(?=[.,;:?!)\]]*(?:\s|\Z))')
_WORDS = re.compile(r'[A-Za-z]{2,}|[aAI]|(?:.*\s)?[A-Za-z]{2,}(?:\s.*)?')

_GROUPED = re.compile(r'[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?')
_WITH_COMMA = re.compile(
    r'[0-9][0-9.]*(?:,|\{,\})[0-9](?:[0-9.,]|\{,\})*(?<![.,}])')
# "100,200 and 300" are three numbers as well as two.
_LISTED = re.compile(
    r'(?:,? (?:and|or|&)|,) (?![0-9]{1,3}(?:,|\{,\})[0-9])[0-9]')
# In many other languages 1,234 is less than two.
_ENGLISH = re.compile(
    r'\b(?:the|what|how|there|each|many|does|which|with)\b', re.I)
_BRACKETS = {**dict.fromkeys('([{⟨', 1), **dict.fromkeys(')]}⟩', -1)}

_NUMBER = re.compile(
    r'`[^`\n]*`|"[^"\n]*"|_\{[^{}]*\}'
    r'|(?<!\w)(?<![0-9]\.)([0-9]+(?:\.[0-9]+)?)(?![0-9]|\.[0-9]|\d)')


class Template(NamedTuple):
  """A statement without its numbers.

  Attributes:
    skeleton: canonical form with SLOT in place of each number.
    numbers: the numbers as they are written, signs included, in their order.
  """

  skeleton: str
  numbers: tuple[str, ...]


@functools.lru_cache(1024)
def canonical(text: str) -> str:
  """Returns the canonical form of a statement.

  Raises:
    UsageError: if the text is no valid Unicode.
  """
  try:
    text.encode('utf-8')
  except UnicodeEncodeError as e:
    raise errors.UsageError(
        f'the statement has half a surrogate pair at {e.start}, expected'
        ' valid Unicode') from None
  text = unicodedata.normalize('NFC', text)
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  text = re.sub(r'\A(?:[ \t]*\n)+', '', text).rstrip()
  if '\n' not in text:
    text = text.lstrip()
  if _ABOUT_TEXT.search(text) or '\n' in text and _TABLE.search(text):
    return text
  for _ in range(_PASSES):
    before, text = text, _fold(text)
    if text == before:
      break
  return text


def address(text: str) -> str:
  """Returns the hex SHA-256 that names a statement, however it is written."""
  return hashing.sha256('kvgraft.statement', canonical(text).encode('utf-8'))


def template(text: str) -> Template:
  """Returns a statement's template.

  Units, words and operators belong to the skeleton, a sign to its number.
  Digits in names, indices, versions and quoted parts are no numbers.
  """
  text = canonical(text)
  if SLOT in text:
    return Template(text, ())
  pieces, numbers, end = [], [], 0
  for found in _NUMBER.finditer(text):
    if found[1] is None:
      continue
    start = found.start()
    if start and text[start - 1] == '-' and _is_sign(text[:start - 1]):
      start -= 1
    pieces.append(text[end:start])
    numbers.append(text[start:found.end()])
    end = found.end()
  return Template(SLOT.join([*pieces, text[end:]]), tuple(numbers))


def _is_sign(before: str) -> bool:
  """Tells whether a minus behind `before` is a sign, and no operator."""
  if not before or before[-1] in '([{=,:;*/×·÷^<>≤≥≠|+-\'$~≈±':
    return True
  if not before[-1].isspace():
    return False
  return not re.search(
      r'(?:[0-9)\]}%°$!]|(?:^|[^A-Za-z])[A-Za-z]|[α-ωΑ-Ω])\s*\Z', before)


def _fold(text: str) -> str:
  text = text.translate({ord('“'): '"', ord('”'): '"'})
  text = _joined(text)
  literals = _LITERAL.findall(text)
  text = _symbols(_spaces(_LITERAL.sub(_QUOTED, text)))
  text = _math(_thousands(text))
  parts = text.split(_QUOTED)
  return ''.join(
      piece for pair in zip(parts, [*literals, '']) for piece in pair).strip()


def _joined(text: str) -> str:
  """Undoes hard wraps of prose, where a line break is a space."""
  lines = [line.rstrip() for line in text.split('\n')]
  if len(lines) == 1 or _ABOUT_LINES.search(text):
    return '\n'.join(lines)
  done = lines[:1]
  for line in lines[1:]:
    last = done[-1]
    wrapped = (
        re.search(r'\S\s+\S*[^\W\d_][,;]?\Z', last)
        and re.match(r'[a-z][\w\'-]*,?\s+\S', line)
        and last.count('"') % 2 == last.count('`') % 2 == 0)
    if wrapped:
      done[-1] = f'{last} {line}'
    else:
      done.append(line)
  return re.sub('\n{3,}', '\n\n', '\n'.join(done))


def _spaces(text: str) -> str:
  narrow = '\u00a0\u2007\u2009\u202f'
  # Between digits such a space groups, while a plain one parts two numbers.
  text = re.sub(rf'(?<=\d)[{narrow}](?=\d)', '\u202f', text)
  text = re.sub(r'(?<!\d)\u202f|\u202f(?!\d)', ' ', text)
  text = re.sub('[\u00a0\u2000-\u200a\u205f\u3000]', ' ', text)
  return re.sub(' +', ' ', text)


def _symbols(text: str) -> str:
  text = text.translate(_TABLE_OF_SIGNS)
  # A dash in front of a number is a sign; between numbers it may be a range.
  text = re.sub(r'(?<![^\s(=\[{$])(?<!\d\s)–(?=\d)', '-', text)
  text = re.sub('[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+',
                lambda m: f'^{{{m[0].translate(_RAISED)}}}', text)
  text = re.sub('[₀₁₂₃₄₅₆₇₈₉]+',
                lambda m: f'_{{{m[0].translate(_LOWERED)}}}', text)
  text = re.sub(
      r'([\^_])([0-9A-Za-z])(?![0-9A-Za-z_^({\\⁰-₎]|[.,][0-9])', r'\1{\2}',
      text)
  text = _SYMBOL.sub(lambda m: _SYMBOLS[m[1]], text)
  text = re.sub(r'\\(?:left|right)\s*(?=[()\[\]|]|\\[{}|])', '', text)
  text = re.sub(r'\\frac ?([0-9]) ?([0-9])', r'\\frac{\1}{\2}', text)
  text = re.sub(r'(?<=[0-9])\^(?:\\circ(?![A-Za-z])|\{\\circ\})', '°', text)
  text = text.replace(r'\%', '%')
  text = re.sub(r'(?<![^\s($])\.(?=[0-9])', '0.', text)
  return re.sub(' ?([×·÷≤≥≠]) ?', r'\1', text)


def _thousands(text: str) -> str:
  """Removes commas of thousands, where they can be nothing else."""
  found = list(_WITH_COMMA.finditer(text))
  if not found or _ABOUT_LISTS.search(text) or not _ENGLISH.search(text):
    return text
  if not all(_GROUPED.fullmatch(m[0].replace('{,}', ',')) for m in found):
    return text
  depth, depths = 0, []
  for char in text:
    depths.append(depth)
    depth = max(depth + _BRACKETS.get(char, 0), 0)
  pieces, end = [], 0
  for m in found:
    around = text[m.start() - 1:m.start()] + text[m.end():m.end() + 1]
    if (depths[m.start()] or _LISTED.match(text, m.end())
        or re.search(r'[\w.,^()\[\]{}|<>⟨⟩⌊⌋⌈⌉]', around)):
      return text
    pieces += [text[end:m.start()], re.sub(r'\{,\}|,', '', m[0])]
    end = m.end()
  return ''.join([*pieces, text[end:]])


def _math(text: str) -> str:
  """Removes delimiters around mathematics, and thin spaces in it."""
  text = re.sub(r'(?<!\\)\\\((.*?)(?<!\\)\\\)', r'$\1$', text)
  text = re.sub(r'(?<!\\)\\\[(.*?)(?<!\\)\\\]', r'$\1$', text)
  text = re.sub(r'\$\$([^$\n]+)\$\$', r'$\1$', text)
  if r'\$' in text or text.count('$') % 2:
    return text  # Some are prices.

  def bare(found: re.Match[str]) -> str:
    inside = found[1]
    inside = re.sub(r'(?<=[0-9])\\[,;:](?=[0-9])', '\u202f', inside)
    inside = re.sub(r'\\[,;:]', ' ', inside)
    # A lone word, such as the name a, would become one of the sentence.
    return found[0] if _WORDS.fullmatch(inside) else inside

  return _MATH.sub(bare, text)
