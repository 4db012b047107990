"""Canonical JSON and tagged, length-framed hashes.

SHA-256 names things; BLAKE3 checks blocks on read. Changing anything here
changes every key and id, so the forms are part of the artifact format.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import hashlib
import json
from typing import Any

import blake3
import numpy as np


def canonical_json(value: Any) -> bytes:
  """Returns the one JSON form of `value`: sorted keys, UTF-8, no spaces.

  Args:
    value: nested dicts (string keys), lists, strings, integers, booleans, None.

  Raises:
    TypeError: if a float or another type occurs; floats have no canonical form.
  """
  _check_canonical(value, '$')
  return json.dumps(
      value, sort_keys=True, ensure_ascii=False, separators=(',', ':')
  ).encode('utf-8')


def _check_canonical(value: Any, path: str) -> None:
  if value is None or isinstance(value, (str, bool, int)):
    return
  if isinstance(value, Mapping):
    for key, item in value.items():
      if not isinstance(key, str):
        raise TypeError(f'{path}: keys must be strings, found {key!r}')
      _check_canonical(item, f'{path}.{key}')
    return
  if isinstance(value, (list, tuple)):
    for i, item in enumerate(value):
      _check_canonical(item, f'{path}[{i}]')
    return
  raise TypeError(
      f'{path}: {type(value).__name__} has no canonical JSON form; use an'
      ' integer or a string'
  )


def _frame(
    tag: str, parts: Iterable[bytes | memoryview]
) -> Iterable[bytes | memoryview]:
  """Yields tag and parts, each behind its length, so no two inputs collide."""
  head = tag.encode('utf-8')
  yield len(head).to_bytes(8, 'little')
  yield head
  for part in parts:
    view = memoryview(part).cast('B') if len(part) else memoryview(b'')
    yield view.nbytes.to_bytes(8, 'little')
    yield view


def sha256(tag: str, *parts: bytes | memoryview) -> str:
  """Returns hex SHA-256 of the framed `parts` under `tag`."""
  digest = hashlib.sha256()
  for piece in _frame(tag, parts):
    digest.update(piece)
  return digest.hexdigest()


def blake3_hex(tag: str, *parts: bytes | memoryview) -> str:
  """Returns hex BLAKE3 of the framed `parts` under `tag`."""
  digest = blake3.blake3()
  for piece in _frame(tag, parts):
    digest.update(piece)
  return digest.hexdigest()


def json_sha256(tag: str, value: Any) -> str:
  """Returns hex SHA-256 of the canonical JSON of `value` under `tag`."""
  return sha256(tag, canonical_json(value))


def tokens_sha256(tokens: Iterable[int]) -> str:
  """Returns hex SHA-256 of token ids as little-endian int32."""
  ids = np.asarray(list(tokens) if not isinstance(tokens, np.ndarray) else
                   tokens)
  return sha256('kvgraft.tokens', np.ascontiguousarray(ids, '<i4').data)


def logits_sha256(row: np.ndarray) -> str:
  """Returns the plain SHA-256 of one float32 little-endian logits row [V].

  Unframed, so that it can be recomputed with any tool from the raw row.
  """
  return hashlib.sha256(np.ascontiguousarray(row, '<f4').data).hexdigest()
