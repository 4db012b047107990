"""Documents of a directory, and how they are split into passages.

A passage is a piece of a document, at most so many tokens long. It ends where
a paragraph ends, and where it can in front of a heading; a paragraph is cut
only where it alone is too long. The pieces together are the document.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import MutableMapping
import dataclasses
import gzip
import os
import pathlib
import re
import zlib

from kvgraft_jax import errors
from kvgraft_jax import hashing

SUFFIXES = ('', '.txt', '.text', '.md', '.rst')
MOST_BYTES = 64 << 20
RULES = 1  # Of splitting: others make other passages.
_TITLE = 100  # Characters.
_HEADING = 80  # Characters, at most.
_CAPS = 4  # Letters, at least, of a heading in capitals.
_WORDS = 6  # At most, of a numbered heading that ends with a full stop.

Path = str | os.PathLike[str]
Count = Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Document:
  """A text of a directory.

  Attributes:
    path: relative to the directory, with '/'.
    title: its first heading or first line, or else its path.
    text: all of it.
    sha256: hash of the text.
  """

  path: str
  title: str
  text: str
  sha256: str


@dataclasses.dataclass(frozen=True)
class Passage:
  """A piece of a document.

  Attributes:
    text: of the piece.
    start: its first character in the document.
    stop: one past its last one.
    heading: the last heading at or in front of its start; '' without one.
    headings: those that stand in it, in order.
  """

  text: str
  start: int
  stop: int
  heading: str
  headings: tuple[str, ...]


def documents(
    text_dir: Path, skipped: MutableMapping[str, list[str]] | None = None
) -> Iterator[Document]:
  """Yields the documents of a directory and those below, sorted by path.

  They are files of UTF-8 text with an ending of SUFFIXES, or that and '.gz'.
  Links to directories, and links that lead out of `text_dir`, are not followed;
  what is hidden (a name that begins with a dot) is left out.

  Args:
    text_dir: the directory.
    skipped: if given, reason -> paths of the files that were skipped for it.

  Raises:
    NotFoundError: if there is no such directory.
    StorageError: if a directory cannot be read.
  """
  for path in _files(text_dir):
    found = _read(pathlib.Path(text_dir), path)
    if isinstance(found, Document):
      yield found
    elif skipped is not None:
      skipped.setdefault(found, []).append(path)


def read(text_dir: Path, path: str) -> Document | None:
  """Returns one document of `documents`, None if it is none any more."""
  found = _read(pathlib.Path(text_dir), path)
  return found if isinstance(found, Document) else None


def _files(text_dir: Path) -> list[str]:
  """Returns the relative paths of all files below a directory, sorted."""
  root = os.fspath(text_dir)
  if not os.path.isdir(root):
    raise errors.NotFoundError(
        f'{root}: there is no such directory; give one with text files')

  def failed(e: OSError) -> None:
    raise errors.StorageError(
        f'{e.filename}: {e.strerror}; check its permissions, or leave it out'
    ) from None

  found = []
  try:
    for folder, below, names in os.walk(root, onerror=failed):
      below[:] = [name for name in below if not name.startswith('.')]
      inside = pathlib.PurePath(folder).relative_to(root)
      found += [(inside / name).as_posix() for name in names
                if not name.startswith('.')]
  except RecursionError:  # Up to Python 3.11.
    raise errors.StorageError(
        f'{root}: directories are nested too deeply; give a part of them'
    ) from None
  return sorted(found)


def _read(root: pathlib.Path, path: str) -> Document | str:
  """Returns a document, or the reason why it is skipped."""
  file = root / path
  plain = path.removesuffix('.gz')
  if pathlib.PurePosixPath(plain).suffix.lower() not in SUFFIXES:
    return 'another kind of file'
  try:
    path.encode()
    if not file.resolve().is_relative_to(root.resolve()):
      return 'a link out of the directory'
    if not file.is_file():
      return 'no regular file'
    with (open(file, 'rb') if plain == path else gzip.open(file)) as f:
      data = f.read(MOST_BYTES + 1)
  except UnicodeEncodeError:
    return 'a name that is not UTF-8'
  except (OSError, EOFError, RuntimeError, zlib.error):
    # RuntimeError: a link to itself, up to Python 3.12.
    return 'cannot be read'
  if len(data) > MOST_BYTES:
    return f'more than {MOST_BYTES >> 20} MiB'
  if b'\0' in data:
    return 'binary'
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError:
    return 'not UTF-8'
  if not text.strip():
    return 'empty'
  return Document(
      path, title_of(text) or path, text,
      hashing.sha256('kvgraft.document', data))


def title_of(text: str) -> str:
  """Returns a document's first heading or first line with a letter, or ''."""
  # A heading further down names a part of the document.
  lines = text[:1 << 16].splitlines()
  first = next((i for i, line in enumerate(lines)
                if any(map(str.isalnum, line))), None)
  if first is None:
    return ''
  title = _heading(lines[max(0, first - 1):first + 3]) or _heading(
      lines[first:first + 3]) or _bare(lines[first])
  return errors.shortened(title, _TITLE)


_MARKDOWN = re.compile(r'#{1,6}\s+(\S.*)')
_UNDERLINE = re.compile(r'([=\-~^*#_])\1{2,}')
_NUMBERED = re.compile(
    r'(?:(?:section|chapter|part|article|appendix)\s+)?'
    r'(?:\d+(?:\.\d+)*|[ivxlc]+)[.:)]\s+\S.*', re.I)
_WORD_NUMBER = re.compile(
    r'(?:section|chapter|part|article|appendix)\s+'
    r'(?:\d+(?:\.\d+)*|[ivxlc]+|[a-z])\b.*', re.I)


def _bare(line: str) -> str:
  """Returns a line without white space and marks around it."""
  return ' '.join(line.split()).strip('#=*-~ ')


def _heading(lines: list[str]) -> str:
  """Returns the heading that a paragraph begins with, or ''.

  Args:
    lines: the first three of it, or all.
  """
  first, second, third = (
      [line.strip() for line in lines] + ['', '', ''])[:3]
  if _UNDERLINE.fullmatch(first) and _UNDERLINE.fullmatch(third):
    first, second = second, third  # A line above the title as well.
  found = _MARKDOWN.fullmatch(first)
  if found:
    return errors.shortened(_bare(found[1]), _HEADING)
  if not any(map(str.isalpha, first)) or len(first) > _HEADING:
    return ''
  if _UNDERLINE.fullmatch(second):
    return _bare(first)
  if _WORD_NUMBER.fullmatch(first):
    return _bare(first)
  sentence = first.endswith('.') and len(first.split()) > _WORDS
  if _NUMBERED.fullmatch(first) and not second and not sentence:
    return _bare(first)
  if _capitals(first) and not _capitals(second):
    return _bare(first)
  return ''


def _capitals(line: str) -> bool:
  return line.isupper() and sum(map(str.isalpha, line)) >= _CAPS


@dataclasses.dataclass
class _Unit:
  """What is not cut further."""

  text: str
  tokens: int
  heading: str = ''


def split(text: str, *, tokens: Count, limit: int) -> list[Passage]:
  """Splits a document into passages.

  Args:
    text: of the document.
    tokens: returns how many tokens a text has.
    limit: most tokens of a passage, 1 or more.

  Returns:
    The passages; their texts together are `text`.

  Raises:
    UsageError: if a single character has more tokens than `limit`.
  """
  found: list[Passage] = []
  held: list[_Unit] = []
  size, at, heading = 0, 0, ''

  def close() -> None:
    nonlocal size, at, heading
    while held:
      # Tokens may join or part where units meet, so the sum is an estimate.
      count = len(held)
      joined = ''.join(unit.text for unit in held)
      while count > 1 and tokens(joined) > limit:
        count -= 1
        joined = ''.join(unit.text for unit in held[:count])
      own = tuple(unit.heading for unit in held[:count] if unit.heading)
      heading = held[0].heading or heading
      found.append(Passage(joined, at, at + len(joined), heading, own))
      at += len(joined)
      heading = own[-1] if own else heading
      del held[:count]
      if sum(unit.tokens for unit in held) <= limit // 2:
        break
    size = sum(unit.tokens for unit in held)

  for unit in _units(text, tokens, limit):
    if held and (size + unit.tokens > limit
                 or unit.heading and 2 * size >= limit):
      close()
    held.append(unit)
    size += unit.tokens
  while held:
    close()
  return found


def _units(text: str, tokens: Count, limit: int) -> Iterator[_Unit]:
  """Yields the paragraphs of a text, those too long in pieces."""
  for lines in _paragraphs(text):
    whole = ''.join(lines)
    heading = _heading(lines[:3])
    for part, count in _pieces(whole, tokens, limit, 0):
      yield _Unit(part, count, heading)
      heading = ''


def _paragraphs(text: str) -> Iterator[list[str]]:
  """Yields the lines of each paragraph and of the blank ones behind it."""
  held: list[str] = []
  blank = False
  for line in text.splitlines(keepends=True):
    if blank and line.strip():
      yield held
      held = []
    # Blank lines in front of the first paragraph are part of it.
    blank = not line.strip() and any(map(str.strip, held[:1] + held[-1:]))
    held.append(line)
  if held:
    yield held


# White space stands in front of a word: so its tokens are those in the text.
_CUTS = (
    re.compile(r'.*?(?:\n|\Z)', re.S),
    re.compile(r'.+?(?:(?<=[.!?;:])(?=\s)|\Z)', re.S),
    re.compile(r'\s*\S+(?:\s+\Z)?|\s+\Z'),
)


def _pieces(
    text: str, tokens: Count, limit: int, level: int
) -> Iterator[tuple[str, int]]:
  """Yields a text in pieces within the limit, each with its tokens."""
  count = tokens(text)
  if count <= limit:
    yield text, count
    return
  if level < len(_CUTS):
    parts = [part for part in _CUTS[level].findall(text) if part]
  elif len(text) > 1:
    parts = [text[:len(text) // 2], text[len(text) // 2:]]
  else:
    raise errors.UsageError(
        f'a passage of {limit} tokens cannot hold {text!r}, which has {count};'
        ' allow more tokens')
  for part in parts:
    yield from _pieces(part, tokens, limit, level + 1)
