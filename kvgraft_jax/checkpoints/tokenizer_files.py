"""Tokenizers from a checkpoint's files, byte-exact in both directions.

`tokenizer.json` goes through the package tokenizers, `tokenizer.model` through
sentencepiece, and the merges of a GGUF file are written as a `tokenizer.json`
first. All of them read control tokens in a text, write a blank as U+2581 and
fall back to bytes; what does otherwise is no Gemma tokenizer and is refused.

A tokenizer may know more ids than the model has rows of text (image
placeholders) or fewer: ids the model lacks are refused where they are run, ids
the tokenizer lacks where they are turned into text.
"""

from collections.abc import Sequence
import functools
import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import tokenizer as tokenizer_lib

TOKENIZER_JSON = 'tokenizer.json'
TOKENIZER_MODEL = 'tokenizer.model'

_BOS = 2  # Of every published Gemma.
_BLANK = '\u2581'
_REPLACEMENT = '\ufffd'.encode('utf-8')
_BYTE_PIECE = re.compile('<0x([0-9A-Fa-f]{2})>')
# SentencePiece calls these user-defined, as it calls '<b>'.
_CONTROL = re.compile(
    r'<(?:mask|unused\d+|(?:start|end)_of_(?:turn|image))>|<\|.+>|<.+\|>'
)


class HfTokenizer(tokenizer_lib.Tokenizer):
  """A Hugging Face `tokenizer.json`: BPE with byte fallback.

  Attributes:
    data: the file's bytes; with `bos_id` and `eos_ids` all there is to keep.
  """

  def __init__(
      self,
      data: bytes,
      *,
      bos: int | str = _BOS,
      eos_ids: Sequence[int] | None = None,
      source: str = TOKENIZER_JSON,
  ):
    """Reads the file.

    Args:
      data: content of the file.
      bos: id put in front of a text, or its piece.
      eos_ids: ids that end a generation; None for the piece '<eos>'.
      source: name for messages.

    Raises:
      DamageError: if it is no JSON.
      UsageError: if it is no Gemma tokenizer or a special id is outside.
      MissingDependencyError: if the package tokenizers is missing.
    """
    try:
      import tokenizers  # pylint: disable=g-import-not-at-top
    except ImportError:
      raise _missing(source, 'tokenizers') from None
    self.data = data
    try:
      self._hf = tokenizers.Tokenizer.from_buffer(data)
    except Exception as e:  # The package raises nothing narrower.
      raise _unreadable(source, data, e) from None
    self._hf.no_truncation()
    self._hf.no_padding()
    self._check_kind(source)
    ids = self._hf.get_vocab(with_added_tokens=True).values()
    self.vocab_size = max(ids, default=-1) + 1
    added = self._hf.get_added_tokens_decoder()
    self._added = {i: token.special for i, token in added.items()}
    self.bos_id, self.eos_ids = _special_ids(
        source, self.vocab_size, self._hf.token_to_id, bos, eos_ids
    )
    _check_round_trip(self, source)

  def _check_kind(self, source: str) -> None:
    """Refuses what does not decode as `token_bytes` does."""
    decoder = self._hf.decoder
    if getattr(self._hf.model, 'dropout', None):
      raise _other_kind(source, 'merges drawn at random')
    # A decoder tells what it does by doing it.
    if decoder is None or decoder.decode(
        [f'{_BLANK}a{_BLANK}', '<0x0A>', '##b@@</w>\u0120']
    ) != ' a \n##b@@</w>\u0120':
      raise _other_kind(source, 'another decoder')

  @functools.cached_property
  def fingerprint(self) -> str:
    """Hex SHA-256 over the file's bytes and the bos id."""
    return _fingerprint(b'hf', self.data, self.bos_id)

  def encode(self, text: str, *, add_bos: bool) -> list[int]:
    """Returns the ids of `text`.

    Args:
      text: valid Unicode; the file's added tokens in it are parsed. U+2581
        cannot be told from a blank.
      add_bos: put `bos_id` in front; nothing else is ever added.

    Returns:
      Token ids.
    """
    tokenizer_lib.utf8(text)
    ids = self._hf.encode(text, add_special_tokens=False).ids
    return [self.bos_id, *ids] if add_bos else ids

  def piece(self, token: int) -> str:
    """Returns one piece as the file writes it; '' for an id it leaves out."""
    self._check_id(token)
    return self._hf.id_to_token(token) or ''

  def token_bytes(self, token: int, *, show_special: bool = False) -> bytes:
    """Returns the bytes that one id stands for."""
    piece = self.piece(token)
    if not piece:
      return _REPLACEMENT
    special = self._added.get(token)
    if special:
      return piece.encode('utf-8') if show_special else b''
    byte = _BYTE_PIECE.fullmatch(piece)
    if byte and special is None:
      return bytes([int(byte[1], 16)])
    return piece.replace(_BLANK, ' ').encode('utf-8')


class SentencePieceTokenizer(tokenizer_lib.Tokenizer):
  """A SentencePiece `tokenizer.model`.

  Ids are the library's own. It reads no control pieces in a text, so '<bos>'
  and its like are cut out first. A `tokenizer.json` of the same vocabulary has
  the same ids, except for runs of more than 31 blanks.

  Attributes:
    data: the file's bytes; with `bos_id` and `eos_ids` all there is to keep.
  """

  def __init__(
      self,
      data: bytes,
      *,
      bos: int | str = _BOS,
      eos_ids: Sequence[int] | None = None,
      source: str = TOKENIZER_MODEL,
  ):
    """Reads the file.

    Args:
      data: content of the file.
      bos: id put in front of a text, or its piece.
      eos_ids: ids that end a generation; None for the piece '<eos>'.
      source: name for messages.

    Raises:
      DamageError: if it cannot be read.
      UsageError: if it is no Gemma tokenizer or a special id is outside.
      MissingDependencyError: if the package sentencepiece is missing.
    """
    try:
      import sentencepiece  # pylint: disable=g-import-not-at-top
    except ImportError:
      raise _missing(source, 'sentencepiece') from None
    self.data = data
    self._sp = sentencepiece.SentencePieceProcessor()
    try:
      self._sp.load_from_serialized_proto(data)
    except RuntimeError:
      raise errors.DamageError(
          f'{source}: expected a SentencePiece model, found {len(data)} bytes'
          ' that do not read as one: fetch the file again'
      ) from None
    self.vocab_size = self._sp.piece_size()
    everything = list(range(self.vocab_size))
    self._pieces = self._sp.id_to_piece(everything)
    self._bytes = {
        i: int(self._pieces[i][3:5], 16)
        for i, is_byte in enumerate(self._sp.is_byte(everything)) if is_byte
    }
    self._control = {
        self._pieces[i]: i
        for i, is_control in enumerate(self._sp.is_control(everything))
        if is_control or i == self._sp.unk_id()
    }
    self._cut = tokenizer_lib.LongestMatch(self._control).cut
    self._hidden = {
        *self._control.values(),
        *(i for i, p in enumerate(self._pieces) if _CONTROL.fullmatch(p)),
    }
    self.bos_id, self.eos_ids = _special_ids(
        source, self.vocab_size,
        {p: i for i, p in enumerate(self._pieces)}.get, bos, eos_ids,
    )
    _check_round_trip(self, source)

  @functools.cached_property
  def fingerprint(self) -> str:
    """Hex SHA-256 over the file's bytes and the bos id."""
    return _fingerprint(b'sentencepiece', self.data, self.bos_id)

  def encode(self, text: str, *, add_bos: bool) -> list[int]:
    """Returns the ids of `text`.

    Args:
      text: valid Unicode; control pieces in it are parsed. U+2581 cannot be
        told from a blank.
      add_bos: put `bos_id` in front.

    Returns:
      Token ids.
    """
    tokenizer_lib.utf8(text)
    out = [self.bos_id] if add_bos else []
    for plain, control in self._cut(text):
      if plain:
        out += self._sp.encode(plain, out_type=int)
      if control:
        out.append(self._control[control])
    return out

  def piece(self, token: int) -> str:
    """Returns one piece as the file writes it."""
    self._check_id(token)
    return self._pieces[token]

  def token_bytes(self, token: int, *, show_special: bool = False) -> bytes:
    """Returns the bytes that one id stands for."""
    piece = self.piece(token)
    if token in self._bytes:
      return bytes([self._bytes[token]])
    if token in self._hidden:
      return piece.encode('utf-8') if show_special else b''
    return piece.replace(_BLANK, ' ').encode('utf-8')


def from_gguf_merges(
    tokens: Sequence[str],
    merges: Sequence[str],
    kinds: np.ndarray | Sequence[int],
    *,
    bos_id: int,
    eos_ids: Sequence[int],
    unk_id: int,
    source: str = 'GGUF',
) -> HfTokenizer:
  """Returns the tokenizer of a GGUF file whose tokenizer model is 'gemma4'.

  Args:
    tokens: piece of each id [V].
    merges: 'left right', first merged first; a piece has no blank in it.
    kinds: integer [V], as `tokenizer.NORMAL` to `tokenizer.BYTE`.
    bos_id: id put in front of a text.
    eos_ids: ids that end a generation.
    unk_id: id of what cannot be written, where byte pieces are missing.
    source: name for messages.

  Raises:
    UsageError: if the vocabulary or a special id is not valid.
  """
  vocab = {piece: i for i, piece in enumerate(tokens)}
  if not len(vocab) == len(tokens) == len(kinds):
    raise errors.UsageError(
        f'{source}: {len(tokens)} pieces, {len(vocab)} of them distinct,'
        f' {len(kinds)} kinds; expected equal counts: the file is no complete'
        ' vocabulary'
    )
  _, (unk_id,) = _special_ids(source, len(vocab), vocab.get, bos_id, [unk_id])
  pairs = [merge.split(' ') for merge in merges]
  wrong = [m for m, p in zip(merges, pairs) if len(p) != 2]
  if wrong:
    raise errors.UsageError(
        f"{source}: expected merges such as 't he', found {wrong[0]!r}: the"
        ' file is no valid vocabulary'
    )
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False,
           'normalized': False}
  special = (tokenizer_lib.CONTROL, tokenizer_lib.UNKNOWN)
  value = {
      'version': '1.0',
      'added_tokens': [
          {'id': i, 'content': tokens[i], **flags, 'special': kind in special}
          for i, kind in enumerate(np.asarray(kinds).tolist())
          if kind in (*special, tokenizer_lib.USER_DEFINED)
      ],
      'normalizer': _replace(' ', _BLANK),
      # Merges run over the whole text: no piece ends where words do.
      'pre_tokenizer': None,
      'decoder': {'type': 'Sequence', 'decoders': [
          _replace(_BLANK, ' '), {'type': 'ByteFallback'}, {'type': 'Fuse'},
      ]},
      'model': {
          'type': 'BPE', 'unk_token': tokens[unk_id], 'fuse_unk': True,
          'byte_fallback': True, 'vocab': vocab, 'merges': pairs,
      },
  }
  data = json.dumps(value, ensure_ascii=False, separators=(',', ':'))
  return HfTokenizer(
      data.encode('utf-8'), bos=bos_id, eos_ids=eos_ids, source=source
  )


def load(
    folder: str | os.PathLike[str], *, eos_ids: Sequence[int] | None = None
) -> tokenizer_lib.Tokenizer | None:
  """Returns the tokenizer in a directory, or None if it holds none.

  Args:
    folder: `tokenizer.json` is preferred to `tokenizer.model`.
    eos_ids: ids that end a generation; None for the directory's own.

  Raises:
    DamageError: if a file is broken.
    UsageError: if it is no Gemma tokenizer or a special id is outside.
    MissingDependencyError: if the package that reads it is missing.
  """
  folder = pathlib.Path(folder)
  kinds = {TOKENIZER_JSON: HfTokenizer, TOKENIZER_MODEL: SentencePieceTokenizer}
  for name, kind in kinds.items():
    path = folder / name
    if path.exists():
      return kind(
          _read(path), bos=_bos(folder), source=str(path),
          eos_ids=(stop_ids(folder) or None) if eos_ids is None else eos_ids,
      )
  return None


def stop_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
  """Returns every id that a checkpoint's files let end a generation, sorted.

  Args:
    folder: `config.json`, its `text_config` and `generation_config.json` each
      name one id, several or none.

  Raises:
    DamageError: if a file is broken.
    UsageError: if an id is no integer.
  """
  folder = pathlib.Path(folder)
  found: list[Any] = []
  for name in ('config.json', 'generation_config.json'):
    for value in _values(folder / name, 'eos_token_id'):
      found += value if isinstance(value, list) else [value]
  for token in found:
    if type(token) is not int:
      raise errors.UsageError(
          f'{folder}: eos_token_id expected an id or a list of ids, found'
          f' {token!r}: correct config.json or generation_config.json'
      )
  return tuple(sorted(set(found)))


def _bos(folder: pathlib.Path) -> int | str:
  """Returns the id, or the piece, that a checkpoint puts in front."""
  found = _bos_id(folder / 'config.json')
  if found is not None:
    return found
  for value in _values(folder / 'tokenizer_config.json', 'bos_token'):
    piece = value.get('content') if isinstance(value, dict) else value
    if isinstance(piece, str):
      return piece
  # Beside an Orbax tree there is no config.json.
  found = _bos_id(folder / 'generation_config.json')
  return _BOS if found is None else found


def _bos_id(path: pathlib.Path) -> int | None:
  """Returns the id that a JSON file, if it is there, names."""
  for value in _values(path, 'bos_token_id'):
    if type(value) is not int:
      raise errors.UsageError(
          f'{path}: bos_token_id expected an id, found {value!r}: correct it'
      )
    return value
  return None


def _values(path: pathlib.Path, key: str) -> list[Any]:
  """Returns what a JSON file, if it is there, and its text part say."""
  if not path.exists():
    return []
  try:
    outer = json.loads(_read(path))
    inner = outer.get('text_config') or {}
    values = [part.get(key) for part in (outer, inner)]
  except (ValueError, AttributeError, RecursionError) as e:
    raise errors.DamageError(
        f'{path}: expected a JSON object, found something else ({e}): fetch'
        ' the file again'
    ) from None
  return [v for v in values if v is not None]


def _read(path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as e:
    raise errors.NotFoundError(
        f'{path}: cannot read the file: {e.strerror}'
    ) from None


def _replace(what: str, by: str) -> dict[str, Any]:
  return {'type': 'Replace', 'pattern': {'String': what}, 'content': by}


def _special_ids(
    source: str, vocab_size: int, find: Any, bos: int | str,
    eos_ids: Sequence[int] | None,
) -> tuple[int, tuple[int, ...]]:
  """Returns (bos id, eos ids), all inside the vocabulary."""
  bos_id = find(bos) if isinstance(bos, str) else bos
  if eos_ids is None:
    eos = find('<eos>')
    eos_ids = [] if eos is None else [eos]
  for token in (bos_id, *eos_ids):
    if token is None or not 0 <= token < vocab_size:
      raise errors.UsageError(
          f'{source}: special tokens expected ids from 0 to {vocab_size - 1},'
          f' found {bos if token is None else token!r}: the configuration'
          " files are not this tokenizer's"
      )
  return bos_id, tuple(eos_ids)


def _check_round_trip(tokenizer: tokenizer_lib.Tokenizer, source: str) -> None:
  """Refuses blanks in front, normal forms and missing bytes."""
  # One character of each length in UTF-8, a ligature and runs.
  text = ' a\xe9\ufb01\ue000\U0010fffd  b\t\r\n\n '
  found = tokenizer.decode(tokenizer.encode(text, add_bos=False))
  if found != text:
    raise _other_kind(source, f'{text!r} turned into {found!r}')


def _other_kind(source: str, found: str) -> errors.UsageError:
  return errors.UsageError(
      f'{source}: expected a Gemma tokenizer (BPE with byte fallback, blanks as'
      f' U+2581, text else left as it is), found {found}: give the whole files'
      ' of a Gemma checkpoint'
  )


def _unreadable(
    source: str, data: bytes, error: Exception
) -> errors.KvgraftError:
  """Returns what to raise for a `tokenizer.json` that was not understood."""
  try:
    json.loads(data)
  except ValueError as e:
    return errors.DamageError(
        f'{source}: expected JSON, found {len(data)} bytes that do not read as'
        f' it ({e}): fetch the file again'
    )
  return errors.UsageError(
      f'{source}: expected a Hugging Face tokenizer, found something else'
      f' ({error}): give the files of a Gemma checkpoint, or update the package'
      ' tokenizers'
  )


def _missing(source: str, package: str) -> errors.MissingDependencyError:
  return errors.MissingDependencyError(
      f'{source}: the package that reads it is not installed:'
      f" pip install '{package}'"
  )


def _fingerprint(kind: bytes, data: bytes, bos_id: int) -> str:
  return hashing.sha256(
      'kvgraft.tokenizer', kind, b'1', data, str(bos_id).encode()
  )
