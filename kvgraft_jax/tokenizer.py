"""Text to token ids and back, from values: no file is read here.

Every tokenizer has `encode`, `decode`, `piece`, `token_bytes`, `vocab_size`,
`bos_id`, `eos_ids` and `fingerprint`.
"""

import codecs
import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import heapq
import re
from typing import Any
import zlib

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import hashing

# Piece kinds as GGUF (and SentencePiece) number them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPACE = '\u2581'  # Stands for a blank inside normal pieces.
_SPACE_BYTES = _SPACE.encode('utf-8')
_REPLACEMENT = '\ufffd'.encode('utf-8')
_MEMO = 1 << 20  # Looked-up strings remembered.


def utf8(text: str) -> bytes:
  """Returns the UTF-8 bytes of `text`.

  Raises:
    UsageError: if it holds a lone surrogate.
  """
  try:
    return text.encode('utf-8')
  except UnicodeEncodeError as e:
    raise errors.UsageError(
        f'text: character {e.start} is the lone surrogate'
        f' {text[e.start]!r}, which has no UTF-8 form: give valid Unicode'
    ) from None


class Tokenizer:
  """What all tokenizers share.

  Attributes:
    vocab_size: ids run from 0 to this less one.
    bos_id: id put in front of a text.
    eos_ids: ids that end a generation.
  """

  vocab_size: int
  bos_id: int
  eos_ids: tuple[int, ...]

  @property
  def fingerprint(self) -> str:
    """Hex SHA-256 over everything that decides ids and text."""
    raise NotImplementedError

  def encode(self, text: str, *, add_bos: bool) -> list[int]:
    """Returns the ids of `text`, with `bos_id` in front if asked."""
    raise NotImplementedError

  def piece(self, token: int) -> str:
    """Returns the name of one id."""
    raise NotImplementedError

  def token_bytes(self, token: int, *, show_special: bool = False) -> bytes:
    """Returns the bytes that one id stands for."""
    raise NotImplementedError

  def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
    """Returns the text of `ids`.

    Args:
      ids: token ids.
      show_special: write control tokens such as '<bos>' instead of nothing.

    Returns:
      The text; invalid UTF-8 becomes U+FFFD.
    """
    parts = [self.token_bytes(i, show_special=show_special) for i in ids]
    return b''.join(parts).decode('utf-8', 'replace')

  def _check_id(self, token: int) -> None:
    if not 0 <= token < self.vocab_size:
      raise errors.UsageError(
          f'token id: expected 0 to {self.vocab_size - 1}, found {token}: it'
          " is not in this tokenizer's vocabulary"
      )


class StreamDecoder:
  """Decodes ids one by one, holding back incomplete UTF-8."""

  def __init__(self, tokenizer: Tokenizer, *, show_special: bool = False):
    self._tokenizer = tokenizer
    self._show_special = show_special
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

  def push(self, token: int) -> str:
    """Returns the text that became complete with `token`, often one word."""
    return self._decoder.decode(
        self._tokenizer.token_bytes(token, show_special=self._show_special)
    )

  def finish(self) -> str:
    """Returns what is left: U+FFFD for an incomplete end, else ''."""
    return self._decoder.decode(b'', final=True)


class ByteTokenizer(Tokenizer):
  """Ids 0 pad, 1 eos, 2 bos, 3 unk, then one id a byte; 260 to 319 unused."""

  vocab_size = 320
  bos_id = 2
  eos_ids = (1,)
  fingerprint = hashing.sha256('kvgraft.tokenizer', b'byte', b'1')

  _SPECIAL = ('<pad>', '<eos>', '<bos>', '<unk>')

  def encode(self, text: str, *, add_bos: bool) -> list[int]:
    """Returns the ids of `text`; nothing in it is read as a control token."""
    head = [self.bos_id] if add_bos else []
    return head + [4 + b for b in utf8(text)]

  def token_bytes(self, token: int, *, show_special: bool = False) -> bytes:
    """Returns the bytes that one id stands for."""
    self._check_id(token)
    if token < 4:
      return self._SPECIAL[token].encode() if show_special else b''
    return bytes([token - 4]) if token < 260 else _REPLACEMENT

  def piece(self, token: int) -> str:
    """Returns the name of one id."""
    self._check_id(token)
    if token < 4:
      return self._SPECIAL[token]
    return f'<0x{token - 4:02X}>' if token < 260 else f'<unused{token}>'


class SpmTokenizer(Tokenizer):
  """SentencePiece BPE with byte fallback, rebuilt from its vocabulary.

  Control and user-defined pieces are cut out of the text first, longest at
  each place; in the rest the adjacent pair whose union has the highest score
  is merged until no union is a piece.

  The vocabulary is held as flat arrays with a hash table over them, so that a
  tokenizer of 262,144 pieces is there in milliseconds.
  """

  def __init__(
      self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
  ):
    """Takes what `from_pieces` made; kept as `arrays` and `values`.

    Args:
      arrays: 'pieces' uint8, UTF-8 of all normal and other pieces joined;
        'ends' int32 [V], behind each piece in bytes; 'scores' float32 [V];
        'kinds' uint8 [V]; 'table' int32, ids of normal pieces, open addressing
        by CRC-32, -1 where empty.
      values: 'bos_id', 'eos_ids', 'unk_id', and 'uncut': characters that some
        piece holds in front of a blank.
    """
    self.arrays, self.values = dict(arrays), dict(values)
    self.vocab_size = len(arrays['ends'])
    self.bos_id = values['bos_id']
    self.eos_ids = tuple(values['eos_ids'])
    self._unk_id = values['unk_id']
    self._blob = arrays['pieces'].tobytes()
    self._ends = arrays['ends'].data
    self._scores = arrays['scores'].data
    self._kinds = arrays['kinds'].data
    self._table = arrays['table'].data
    self._found: dict[str, int] = {}
    behind = ''.join(map(re.escape, _SPACE + values['uncut']))
    self._split = re.compile(f'(?<![{behind}])(?={_SPACE})').split

  @classmethod
  def from_pieces(
      cls,
      pieces: Sequence[str],
      scores: np.ndarray,
      kinds: np.ndarray,
      *,
      bos_id: int,
      eos_ids: Sequence[int],
      unk_id: int,
  ) -> 'SpmTokenizer':
    """Returns the tokenizer of a vocabulary.

    Args:
      pieces: text of each id [V]; normal pieces write a blank as U+2581.
      scores: float32 [V]; higher merges earlier.
      kinds: integer [V], NORMAL to BYTE.
      bos_id: id put in front of a text.
      eos_ids: ids that end a generation.
      unk_id: id of what cannot be written, where byte pieces are missing.

    Raises:
      UsageError: if lengths differ, a piece occurs twice or an id is outside.
    """
    if not len(pieces) == len(scores) == len(kinds):
      raise errors.UsageError(
          f'tokenizer: {len(pieces)} pieces, {len(scores)} scores,'
          f' {len(kinds)} kinds; expected equal counts: the file is no complete'
          ' vocabulary'
      )
    if len(set(pieces)) != len(pieces):
      twice = collections.Counter(pieces).most_common(1)[0][0]
      raise errors.UsageError(
          f'tokenizer: piece {twice!r} occurs twice, expected once: the file'
          ' is no valid vocabulary'
      )
    kinds = np.array(kinds, np.uint8)
    raw = [p.encode('utf-8') for p in pieces]
    normal = np.flatnonzero(kinds == NORMAL).tolist()
    out = cls({
        'pieces': np.frombuffer(b''.join(raw), np.uint8),
        'ends': np.cumsum([len(p) for p in raw], dtype='<i4'),
        'scores': np.array(scores, '<f4'),
        'kinds': kinds,
        'table': _hash_table(raw, normal),
    }, {
        'bos_id': bos_id, 'eos_ids': list(eos_ids), 'unk_id': unk_id,
        'uncut': _uncut([pieces[i] for i in normal]),
    })
    for token in (bos_id, unk_id, *eos_ids):
      out._check_id(token)
    for i in np.flatnonzero(kinds == BYTE).tolist():
      if not re.fullmatch('<0x[0-9A-Fa-f]{2}>', pieces[i]):
        raise errors.UsageError(
            "tokenizer: expected a byte piece such as '<0x0A>', found"
            f' {pieces[i]!r}: the file is no valid vocabulary'
        )
    return out

  @functools.cached_property
  def fingerprint(self) -> str:
    """Hex SHA-256 over everything that decides ids and text."""
    ids = {k: v for k, v in self.values.items() if k != 'uncut'}
    return hashing.sha256(
        'kvgraft.tokenizer', b'spm', b'1', hashing.canonical_json(ids),
        *(self.arrays[k].data for k in ('pieces', 'ends', 'scores', 'kinds')),
    )

  @functools.cached_property
  def _special(self) -> dict[str, int]:
    kinds = self.arrays['kinds']
    ids = np.flatnonzero((kinds == CONTROL) | (kinds == USER_DEFINED))
    return {p: i for i in ids.tolist() if (p := self.piece(i))}

  @functools.cached_property
  def _special_match(self) -> 'LongestMatch':
    return LongestMatch(self._special)

  @functools.cached_property
  def _byte_ids(self) -> dict[int, int]:
    ids = np.flatnonzero(self.arrays['kinds'] == BYTE).tolist()
    return {_byte_value(self._raw(i)): i for i in ids}

  def _raw(self, token: int) -> bytes:
    return self._blob[self._ends[token - 1] if token else 0:self._ends[token]]

  def piece(self, token: int) -> str:
    """Returns one piece as the vocabulary writes it."""
    self._check_id(token)
    return self._raw(token).decode('utf-8')

  def token_bytes(self, token: int, *, show_special: bool = False) -> bytes:
    """Returns the bytes that one id stands for."""
    self._check_id(token)
    raw, kind = self._raw(token), self._kinds[token]
    if kind == BYTE:
      return bytes([_byte_value(raw)])
    if kind == NORMAL:
      return raw.replace(_SPACE_BYTES, b' ')
    return raw if kind == USER_DEFINED or show_special else b''

  def encode(self, text: str, *, add_bos: bool) -> list[int]:
    """Returns the ids of `text`.

    Args:
      text: valid Unicode; control tokens in it are parsed. U+2581 cannot be
        told from a blank.
      add_bos: put `bos_id` in front.

    Returns:
      Token ids.
    """
    utf8(text)
    out = [self.bos_id] if add_bos else []
    known: dict[str, list[int]] = {}  # Words repeat.
    for plain, special in self._special_match.cut(text):
      for word in self._split(plain.replace(' ', _SPACE)):
        ids = known.get(word)
        if ids is None:
          ids = known[word] = self._merge(word)
        out += ids
      if special:
        out.append(self._special[special])
    return out

  def _merge(self, word: str) -> list[int]:
    """Returns the ids of one unit that no piece crosses the ends of."""
    parts = list(word)  # '' once merged into the part on its left.
    count = len(parts)
    left, right = list(range(-1, count - 1)), list(range(1, count + 1))
    heap: list[tuple[float, int, int, str]] = []

    def offer(a: int, b: int) -> None:
      union = parts[a] + parts[b]
      token = self._find(union)
      if token >= 0:
        heapq.heappush(heap, (-self._scores[token], a, b, union))

    for i in range(count - 1):
      offer(i, i + 1)
    while heap:
      _, a, b, union = heapq.heappop(heap)
      if not parts[a] or not parts[b] or parts[a] + parts[b] != union:
        continue  # One of the two has changed since.
      parts[a], parts[b] = union, ''
      right[a] = right[b]
      if right[a] < count:
        left[right[a]] = a
        offer(a, right[a])
      if left[a] >= 0:
        offer(left[a], a)
    out = []
    for part in filter(None, parts):
      token = self._find(part)
      out += [token] if token >= 0 else self._fallback(part)
    return out

  def _find(self, part: str) -> int:
    """Returns the id of a normal piece, or -1."""
    known = self._found.get(part)
    if known is not None:
      return known
    raw, mask = part.encode('utf-8'), len(self._table) - 1
    at = zlib.crc32(raw) & mask
    while (token := self._table[at]) >= 0 and self._raw(token) != raw:
      at = (at + 1) & mask
    if len(self._found) >= _MEMO:
      self._found.clear()
    self._found[part] = token
    return token

  def _fallback(self, part: str) -> list[int]:
    try:
      return [self._byte_ids[b] for b in part.encode('utf-8')]
    except KeyError:
      return [self._unk_id]


class LongestMatch:
  """Finds the longest of many literals, leftmost first."""

  def __init__(self, literals: Iterable[str]):
    # Literals are looked up by their first two characters and a length: a
    # regular expression of thousands of alternatives tries them one by one.
    self._lengths: dict[str, list[int]] = {}
    self._literals = frozenset(literals)
    seconds: dict[str, set[str]] = {}
    for literal in self._literals:
      self._lengths.setdefault(literal[:2], []).append(len(literal))
      seconds.setdefault(literal[0], set()).add(literal[1:2])
    for key, lengths in self._lengths.items():
      self._lengths[key] = sorted(set(lengths), reverse=True)
    self._single = frozenset(p for p in self._literals if len(p) == 1)
    choices = []
    for first, found in seconds.items():
      tail = ''.join(map(re.escape, sorted(found - {''})))
      choices.append(
          re.escape(first) if '' in found else f'{re.escape(first)}[{tail}]'
      )
    # (?!) matches nowhere.
    self._candidate = re.compile('|'.join(choices) or '(?!)', re.DOTALL)

  def cut(self, text: str) -> Iterator[tuple[str, str]]:
    """Yields (text in front, literal); the last literal is ''."""
    done = at = 0
    while found := self._candidate.search(text, at):
      at = found.start()
      literal = self._at(text, at)
      if not literal:
        at += 1
        continue
      yield text[done:at], literal
      done = at = at + len(literal)
    yield text[done:], ''

  def _at(self, text: str, at: int) -> str:
    for length in self._lengths.get(text[at:at + 2], ()):
      if text[at:at + length] in self._literals:
        return text[at:at + length]
    return text[at] if text[at] in self._single else ''


def _byte_value(raw: bytes) -> int:
  return int(raw[3:5], 16)


def _hash_table(raw: Sequence[bytes], ids: Sequence[int]) -> np.ndarray:
  """Returns ids placed by the CRC-32 of their bytes, at most half full."""
  size = 1 << (2 * len(ids)).bit_length()
  table = [-1] * size
  for i in ids:
    at = zlib.crc32(raw[i]) & (size - 1)
    while table[at] >= 0:
      at = (at + 1) & (size - 1)
    table[at] = i
  return np.array(table, '<i4')


def _uncut(pieces: Iterable[str]) -> str:
  """Returns the characters that some piece holds in front of a blank.

  Nearly every piece has its blank in front, so text may be cut before a blank
  and each word merged alone; not behind these characters.
  """
  found = set()
  for piece in pieces:
    at = piece.find(_SPACE, 1)
    while at > 0:
      found.add(piece[at - 1])
      at = piece.find(_SPACE, at + 1)
  return ''.join(sorted(found - {_SPACE}))
