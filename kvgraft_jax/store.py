"""Stores of artifacts on TensorStore: local files, memory, S3, GCS.

A deposit writes data files into a directory of its own and becomes visible
with its manifest, which is written last and only if there is none. Reads are
strict: a lost or altered byte is an error, never zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import difflib
import re
from typing import Any

import numpy as np

from kvgraft_jax import artifact
from kvgraft_jax import attempts
from kvgraft_jax import blocks
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import journal as journal_lib
from kvgraft_jax import kvstore
from kvgraft_jax import writer

_REFERENCE = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
_PREFIX = re.compile(r'[0-9a-fA-F]{4,64}')
_MANIFEST = re.compile(r'a/([0-9a-f]{64})/manifest\.json')
_NAME = re.compile(r'names/([A-Za-z0-9][A-Za-z0-9._-]*)')


class Store:
  """A store of artifacts and of names for them."""

  def __init__(self, url: str, *, create: bool = True):
    """Opens a store; nothing is written before the first deposit.

    Args:
      url: a path, a URL (file://, memory://, s3://, gs://) or a TensorStore
        kvstore spec as JSON.
      create: whether a local store may not exist yet.

    Raises:
      UsageError: if `url` names no store.
      NotFoundError: if `create` is false and the directory does not exist.
    """
    self.url = url
    self._kv = kvstore.KvStore(url, create=create)

  def where(self, name: str) -> str:
    """Returns the full name of the object `name`, for messages."""
    return self._kv.where(name)

  # Looking up.

  def get(self, key: str) -> artifact.Manifest | None:
    """Returns the complete artifact of `key`, None if there is none.

    Raises:
      DamageError: if its manifest is damaged.
      IncompatibleError: if another format version wrote it.
      StorageError: if it cannot be read.
    """
    if not artifact.is_hash(key):
      raise errors.UsageError(f'key is {key!r:.80}, expected 64 hex digits')
    return attempts.load_manifest(self._kv, key)

  def find(self, ref: str) -> artifact.Manifest:
    """Returns the artifact with an id, id prefix, key or name.

    Args:
      ref: an id, a unique prefix of one (4 or more hex digits), a key, a name.

    Raises:
      UsageError: if `ref` cannot be a reference, or several ids begin with it.
      NotFoundError: if nothing in the store answers to it.
    """
    _check_reference(ref)
    if not _PREFIX.fullmatch(ref):
      return self._find_name(ref)
    ref = ref.lower()
    if len(ref) == 64:
      manifest = self.get(ref)
      if manifest is not None:
        return manifest
    # A cheap test on the raw bytes spares parsing the manifests of the others.
    needle = f'"id":"{ref}'.encode()
    found = [attempts.parse_manifest(self._kv, key, data)
             for key, data in self._manifests() if needle in data]
    found = [m for m in found if m.id.startswith(ref)]
    if len(found) > 1:
      ids = ', '.join(m.id[:max(16, len(ref) + 4)] for m in found[:8])
      raise errors.UsageError(
          f'{len(found)} artifacts begin with {ref}: {ids}; give more digits')
    if not found:
      raise self._not_found(ref)
    return found[0]

  def list(self) -> Sequence[artifact.Manifest]:
    """Returns every complete artifact, oldest first."""
    found = [m for m in self._examine() if isinstance(m, artifact.Manifest)]
    return sorted(found, key=lambda m: (m.created, m.key))

  def list_damaged(self) -> Sequence[str]:
    """Returns one line for each manifest or name that cannot be used."""
    found = [*self._examine(), *self._read_names().values()]
    return [str(v) for v in found if isinstance(v, Exception)]

  def names(self) -> dict[str, str]:
    """Returns name -> artifact id, without damaged names."""
    return {name: value['id'] for name, value in self._read_names().items()
            if isinstance(value, dict)}

  def name_target(self, name: str) -> tuple[str, str] | None:
    """Returns the (id, key) that a name holds, None if it is free.

    Raises:
      UsageError: if `name` cannot be a name.
      DamageError: if what it holds is damaged.
    """
    check_name(name)
    data = self._kv.load(f'names/{name}')
    if data is None:
      return None
    value = self._parse_name(name, data)
    return value['id'], value['key']

  def set_name(self, name: str, ref: str | artifact.Manifest) -> None:
    """Names an artifact; a name is never moved.

    Args:
      name: letters, digits, '.', '_', '-'; at most 128; not only hex digits.
      ref: the artifact, or its id.

    Raises:
      UsageError: if the name cannot be used or names another artifact.
    """
    check_name(name)
    manifest = ref if isinstance(ref, artifact.Manifest) else self.find(ref)
    data = artifact.sign(hashing.canonical_json({
        'format': artifact.FORMAT, 'id': manifest.id, 'key': manifest.key,
        'name': name,
    }))
    if not self._kv.put_new(f'names/{name}', data):
      held = self._kv.load(f'names/{name}') or b''
      taken = self._parse_name(name, held)['id']
      if taken != manifest.id:
        raise errors.UsageError(
            f'name {name!r} is taken by artifact {taken[:12]}; choose another'
            ' name')

  # Reading.

  def tokens(self, manifest: artifact.Manifest) -> np.ndarray:
    """Returns the token ids of [start, end), int32 [end - start], checked."""
    fields = manifest.fields
    name = f'a/{manifest.key}/{manifest.attempt}/tokens'
    data = self._kv.load(name)
    ids = np.frombuffer(data or b'', '<i4', len(data or b'') // 4)
    if data is None or len(data) != 4 * (fields.end - fields.start) or (
        hashing.tokens_sha256(ids) != fields.tokens_sha256):
      raise errors.DamageError(
          f'artifact {manifest.id[:12]}: tokens are lost or not those that were'
          f' deposited ({self.where(name)}); {attempts.REPAIR}')
    return ids.astype(np.int32)

  def read(
      self, manifest: artifact.Manifest, kind: str, start: int, stop: int,
      k_out: np.ndarray, v_out: np.ndarray, *, layers: slice | None = None,
      verify: bool = True,
  ) -> int:
    """Reads positions [start, stop) of layers of a kind into arrays.

    Whole blocks go straight into the arrays; of a block at the edge of the
    range all valid rows are read, checked and then copied in part. After an
    error the arrays' contents are undefined.

    Args:
      manifest: the artifact.
      kind: 'sliding' or 'global'.
      start: first position.
      stop: one past the last position.
      k_out: K, [layers, stop - start, kv_heads, head_dim] bit patterns; each
        layer contiguous, layers at any distance.
      v_out: V, likewise.
      layers: which of the kind's layers, counted in `manifest.layouts`; all if
        not given.
      verify: whether to check every block's digest.

    Returns:
      The number of bytes read.

    Raises:
      UsageError: if the range is not stored or an array does not fit.
      DamageError: if a block is lost or its bytes are not the deposited ones.
      StorageError: if the store cannot be read.
    """
    source = blocks.Source(
        kv=self._kv, attempt=manifest.attempt, fields=manifest.fields,
        layouts=manifest.layouts, geometries=manifest.geometries,
        digests=manifest.digests, label=f'artifact {manifest.id[:12]}',
        repair=attempts.REPAIR)
    return blocks.read(source, kind, start, stop, k_out, v_out, layers=layers,
                       verify=verify)

  # Writing.

  def create(
      self, key_fields: artifact.KeyFields,
      layouts: dict[str, artifact.KindLayout], tokens: np.ndarray,
      journal: bool = False,
  ) -> writer.Writer:
    """Returns a writer of a new artifact; `get` tells whether there is one.

    Args:
      key_fields: the key's fields.
      layouts: kind -> layout.
      tokens: integer token ids of [start, end).
      journal: whether `checkpoint` keeps what is written, so that after an
        error or a kill `resume` goes on from there.
    """
    own = writer.new_journal(self._kv, key_fields, layouts) if journal else None
    return writer.Writer(self._kv, key_fields, layouts, tokens, own)

  def resume(
      self, key_fields: artifact.KeyFields,
      layouts: dict[str, artifact.KindLayout], tokens: np.ndarray,
  ) -> writer.Writer | None:
    """Returns a writer that goes on with the furthest journaled attempt.

    Blocks behind the first entry or data file of it that is lost or damaged
    are not known to the writer. Several processes may resume one attempt.

    Args:
      key_fields: the key's fields.
      layouts: kind -> layout.
      tokens: integer token ids of [start, end).

    Returns:
      The writer, None if no attempt has a journal.

    Raises:
      StorageError: if the store cannot be read or written.
    """
    found = writer.find_journal(self._kv, key_fields, layouts)
    if found is None:
      return None
    return writer.Writer(self._kv, key_fields, layouts, tokens, found)

  def attempts(self, key: str) -> Sequence[str]:
    """Returns the attempts of a key that have a journal and no manifest."""
    if not artifact.is_hash(key):
      raise errors.UsageError(f'key is {key!r:.80}, expected 64 hex digits')
    return journal_lib.attempts_of(self._kv, key)

  def delete_attempt(self, key: str, attempt: str) -> None:
    """Removes one writer's data files, unless a manifest names them."""
    attempts.delete(self._kv, key, attempt)

  # Objects.

  def _manifests(
      self, on_error: Callable[[Exception], None] = lambda e: None
  ) -> Iterator[tuple[str, bytes]]:
    """Yields key and manifest bytes of every artifact."""
    matches = [_MANIFEST.fullmatch(name) for name in self._kv.list('a/')]
    pending = [(m[1], m[0], self._kv.start_load(m[0])) for m in matches if m]
    for key, name, future in pending:
      try:
        data = self._kv.value_of(name, future)
      except errors.StorageError as e:
        on_error(e)
        continue
      if data is not None:
        yield key, data

  def _examine(self) -> Sequence[artifact.Manifest | Exception]:
    found: Any = []
    for key, data in self._manifests(found.append):
      try:
        found.append(attempts.parse_manifest(self._kv, key, data))
      except errors.KvgraftError as e:
        found.append(e)
    return found

  def _not_found(self, ref: str) -> errors.NotFoundError:
    found = self._examine()
    known = [*self.names(), *(m.id for m in found
                              if isinstance(m, artifact.Manifest))]
    close = difflib.get_close_matches(ref, known, 1)
    damaged = sum(isinstance(m, Exception) for m in found)
    hint = f'; did you mean {close[0]}?' if close else ''
    hint += f'; {damaged} manifests are damaged' if damaged else ''
    return errors.NotFoundError(
        f'no artifact {ref!r} in {self._kv.root} ({len(found) - damaged}'
        f' artifacts){hint}; list them with `kvgraft ls`')

  # Names.

  def _find_name(self, name: str) -> artifact.Manifest:
    data = self._kv.load(f'names/{name}')
    if data is None:
      raise self._not_found(name)
    value = self._parse_name(name, data)
    manifest = self.get(value['key'])
    if manifest is None:
      raise errors.NotFoundError(
          f'name {name!r} means artifact {value["id"][:12]}, which is no longer'
          f' in {self._kv.root}; list what is there with `kvgraft ls`')
    if manifest.id != value['id']:
      raise errors.DamageError(
          f'name {name!r} means artifact {value["id"][:12]}, but its key holds'
          f' {manifest.id[:12]}; compare both and remove'
          f' {self.where(f"names/{name}")}')
    return manifest

  def _parse_name(self, name: str, data: bytes) -> dict[str, Any]:
    where = self.where(f'names/{name}')
    value = artifact.parse_signed(data, where)
    if (set(value) != {'format', 'id', 'key', 'name'} or value['name'] != name
        or value['format'] != artifact.FORMAT
        or not artifact.is_hash(value['id'])
        or not artifact.is_hash(value['key'])):
      raise errors.DamageError(
          f'{where}: not a name as it was set; remove it and set it again')
    return value

  def _read_names(self) -> dict[str, dict[str, Any] | Exception]:
    found: dict[str, dict[str, Any] | Exception] = {}
    for name in self._kv.list('names/'):
      match = _NAME.fullmatch(name)
      if match is None or name.endswith(kvstore.LOCK):
        continue
      try:
        data = self._kv.load(name)
        if data is not None:
          found[match[1]] = self._parse_name(match[1], data)
      except errors.KvgraftError as e:
        found[match[1]] = e
    return found


def _check_reference(ref: Any) -> None:
  if (not isinstance(ref, str) or not _REFERENCE.fullmatch(ref) or '..' in ref
      or ref.endswith(kvstore.LOCK)):
    raise errors.UsageError(
        f'{ref!r:.80} is no reference: expected an id, 4 or more of its first'
        ' digits, a key, or a name of letters, digits, ".", "_" and "-" (at'
        ' most 128)')


def check_name(name: Any) -> None:
  """Raises UsageError unless `name` can name an artifact."""
  _check_reference(name)
  if _PREFIX.fullmatch(name):
    raise errors.UsageError(
        f'name {name!r} could be mistaken for an id; add a letter beyond f')
