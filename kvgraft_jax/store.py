"""Stores of artifacts on TensorStore: local files, memory, S3, GCS.

A deposit writes data files into a directory of its own and becomes visible
with its manifest, which is written last and only if there is none. Reads are
strict: a lost or altered byte is an error, never zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import datetime
import difflib
import functools
import json
import os
import re
import shutil
from typing import Any
import uuid

import numpy as np
import tensorstore as ts

from kvgraft_jax import artifact
from kvgraft_jax import errors
from kvgraft_jax import hashing

_DRIVERS = ('file', 'memory', 's3', 'gcs')
_REFERENCE = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
_PREFIX = re.compile(r'[0-9a-fA-F]{4,64}')
_MANIFEST = re.compile(r'a/([0-9a-f]{64})/manifest\.json')
_NAME = re.compile(r'names/([A-Za-z0-9][A-Za-z0-9._-]*)')
_LOCK = '.__lock'
# Bytes of one read: enough of them for every core, each worth a thread.
_READ_BYTES = 1 << 21
_WRITES_IN_FLIGHT = 4
_DAMAGE = ('NOT_FOUND', 'DATA_LOSS', 'FAILED_PRECONDITION', 'OUT_OF_RANGE',
           'INVALID_ARGUMENT')
_TS_ERRORS = (ValueError, OSError, RuntimeError, IndexError, MemoryError)


@functools.cache
def _context() -> ts.Context:
  """One for the process, so that memory:// names one store everywhere."""
  # The default of 32 retries turns a wrong address into many silent minutes.
  retries = {'max_retries': 4}
  return ts.Context({
      'file_io_mode': {'mode': 'memmap'},
      'gcs_request_retries': retries,
      's3_request_retries': retries,
  })


@functools.cache
def _pool() -> futures.ThreadPoolExecutor:
  return futures.ThreadPoolExecutor(
      min(16, os.cpu_count() or 1), 'kvgraft-digest')


def _kvstore_spec(url: str) -> dict[str, Any]:
  """Returns the TensorStore kvstore spec of a path, URL or JSON spec."""
  if not isinstance(url, str) or not url or '\0' in url:
    raise errors.UsageError(
        f'store is {url!r:.80}, expected a path or a URL such as gs://BUCKET/DIR')
  try:
    if url.startswith('{'):
      spec = ts.KvStore.Spec(json.loads(url)).to_json()
    elif '://' in url:
      spec = ts.KvStore.Spec(url).to_json()
    else:
      path = os.path.abspath(os.path.expanduser(url))
      path.encode('utf-8')  # TensorStore takes no other names.
      spec = {'driver': 'file', 'path': path}
  except (ValueError, TypeError) as e:
    raise errors.UsageError(
        f'store {url!r:.200} cannot be opened: {_reason(e)}') from None
  if spec['driver'] not in _DRIVERS:
    raise errors.UsageError(
        f'store {url!r:.200} uses driver {spec["driver"]!r}, expected one of'
        f' {_DRIVERS}')
  if spec['driver'] == 'file' and not spec.get('path'):
    raise errors.UsageError(f'store {url!r:.200} has no path; give one')
  if spec['driver'] == 's3':
    spec.setdefault('use_conditional_write', True)
  spec['path'] = spec.get('path', '').rstrip('/') + '/'
  if spec['path'] == '/' and spec['driver'] != 'file':
    spec['path'] = ''
  return spec


def _reason(error: Exception) -> str:
  """Returns code and cause of a TensorStore error in one line."""
  text = re.split(r' \[(?:tensorstore_spec|source locations)=', str(error))[0]
  code = re.match(r'[A-Z_]+: ', text)
  # What comes in between repeats the path that our own message names.
  cause = text.rpartition('": ')[2]
  if code and not cause.startswith(code[0]):
    cause = code[0] + cause
  return ' '.join(cause.split())[:300]


def _storage_error(error: Exception, doing: str) -> errors.StorageError:
  reason = _reason(error)
  if re.search('No space left|File too large|quota|RESOURCE_EXHAUSTED', reason):
    step = 'free space or use another store'
  elif re.search('denied|Read-only|not permitted|PERMISSION|UNAUTHENTICATED',
                 reason):
    step = 'check the permissions or use another store'
  else:
    step = 'check the disk or the network and try again'
  return errors.StorageError(f'{doing} failed: {reason}; {step}')


def _wait(future: Any, doing: str) -> Any:
  """Returns a TensorStore future's result; its errors become StorageError."""
  try:
    return future.result()
  except _TS_ERRORS as e:
    raise _storage_error(e, doing) from None


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
    self._spec = _kvstore_spec(url)
    self._local = self._spec['driver'] == 'file'
    path = self._spec['path']
    scheme = self._spec['driver'].replace('gcs', 'gs')
    bucket = self._spec.get('bucket')
    self._root = path if self._local else (
        f'{scheme}://{bucket}/{path}' if bucket else f'{scheme}://{path}')
    if self._local and os.path.exists(path.rstrip('/') or '/'):
      if not os.path.isdir(path):
        raise errors.UsageError(
            f'store {path} is a file, expected a directory')
    elif self._local and not create:
      raise errors.NotFoundError(
          f'there is no store at {path}; check --store or make a deposit first')
    self._kv = _wait(ts.KvStore.open(self._spec, context=_context()),
                     f'opening the store {self._root}')

  def where(self, name: str) -> str:
    """Returns the full name of the object `name`, for messages."""
    return self._root + name

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
    data = self._load(f'a/{key}/manifest.json')
    return None if data is None else self._parse(key, data)

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
    found = [self._parse(key, data)
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
    data = self._load(f'names/{name}')
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
    if not self._write_new(f'names/{name}', data):
      taken = self._parse_name(name, self._load(f'names/{name}') or b'')['id']
      if taken != manifest.id:
        raise errors.UsageError(
            f'name {name!r} is taken by artifact {taken[:12]}; choose another'
            ' name')

  # Reading.

  def tokens(self, manifest: artifact.Manifest) -> np.ndarray:
    """Returns the token ids of [start, end), int32 [end - start], checked."""
    fields = manifest.fields
    name = f'a/{manifest.key}/{manifest.attempt}/tokens'
    data = self._load(name)
    ids = np.frombuffer(data or b'', '<i4', len(data or b'') // 4)
    if data is None or len(data) != 4 * (fields.end - fields.start) or (
        hashing.tokens_sha256(ids) != fields.tokens_sha256):
      raise errors.DamageError(
          f'artifact {manifest.id[:12]}: tokens are lost or not those that were'
          f' deposited ({self.where(name)}); {_REPAIR}')
    return ids.astype(np.int32)

  def read(
      self, manifest: artifact.Manifest, kind: str, start: int, stop: int,
      k_out: np.ndarray, v_out: np.ndarray, *, verify: bool = True,
  ) -> int:
    """Reads positions [start, stop) of all layers of a kind into arrays.

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
      verify: whether to check every block's digest.

    Returns:
      The number of bytes read.

    Raises:
      UsageError: if the range is not stored or an array does not fit.
      DamageError: if a block is lost or its bytes are not the deposited ones.
      StorageError: if the store cannot be read.
    """
    layout = manifest.layouts.get(kind)
    if layout is None:
      raise errors.UsageError(
          f'artifact {manifest.id[:12]} has no {kind} layers')
    shape = manifest.geometries[kind]
    if not shape.start <= start < stop <= shape.end:
      raise errors.UsageError(
          f'artifact {manifest.id[:12]}: {kind} positions [{start}, {stop}) are'
          f' not stored, available are [{shape.start}, {shape.end})')
    expected = (len(layout.layers), stop - start, layout.kv_heads,
                layout.head_dim)
    for out in (k_out, v_out):
      if out.shape != expected or out.dtype != layout.element or not (
          out.flags.writeable and out[0].flags.c_contiguous):
        raise errors.UsageError(
            f'output is {out.dtype}{list(out.shape)}, expected writeable'
            f' {layout.element}{list(expected)} with contiguous layers')
    array = self._open(manifest.key, manifest.attempt, manifest.fields, kind,
                       layout)
    reads = []
    for number, block in enumerate(shape.blocks):
      lo, hi = max(start, block.start), min(stop, block.stop)
      if lo >= hi:
        continue
      layer_bytes = (hi - lo) * k_out[0, 0].nbytes
      step = max(1, _READ_BYTES // layer_bytes)
      for first in range(0, expected[0], step):
        layers = slice(first, min(first + step, expected[0]))
        for part, out in enumerate((k_out, v_out)):
          reads.append(_Read(
              self, manifest, kind, number, layers, part, lo, hi,
              out[layers, lo - start:hi - start], verify))
    return _run(reads, array, verify)

  # Writing.

  def create(
      self, key_fields: artifact.KeyFields,
      layouts: dict[str, artifact.KindLayout], tokens: np.ndarray,
  ) -> Writer:
    """Returns a writer of a new artifact; `get` tells whether there is one.

    Args:
      key_fields: the key's fields.
      layouts: kind -> layout.
      tokens: integer token ids of [start, end).
    """
    return Writer(self, key_fields, layouts, tokens)

  def delete_attempt(self, key: str, attempt: str) -> None:
    """Removes one writer's data files, unless a manifest names them."""
    if not artifact.is_hash(key) or not artifact.is_attempt(attempt):
      raise errors.UsageError(f'{key!r:.80} {attempt!r:.80} name no attempt')
    if attempt.encode() in (self._load(f'a/{key}/manifest.json') or b''):
      raise errors.UsageError(
          f'attempt {attempt} belongs to a deposited artifact')
    prefix = f'a/{key}/{attempt}/'
    if self._local:
      shutil.rmtree(self.where(prefix), ignore_errors=True)
    else:
      _wait(self._kv.delete_range(_keys_below(prefix)),
            f'removing {self.where(prefix)}')

  # Objects.

  def _load(self, name: str) -> bytes | None:
    result = _wait(self._kv.read(name), f'reading {self.where(name)}')
    return result.value if result.state == 'value' else None

  def _write_new(self, name: str, data: bytes) -> bool:
    """Writes an object if there is none; tells whether it did."""
    doing = f'writing {self.where(name)}'
    found = _wait(self._kv.read(name), doing)
    if found.state == 'value':
      return False
    stamp = _wait(self._kv.write(
        name, data, if_equal=found.stamp.generation), doing)
    return stamp.generation != b''

  def _list(self, prefix: str) -> Sequence[str]:
    keys = _wait(self._kv.list(_keys_below(prefix)),
                 f'listing {self.where(prefix)}')
    return sorted(k.decode('utf-8', 'replace') for k in keys)

  def _parse(self, key: str, data: bytes) -> artifact.Manifest:
    where = self.where(f'a/{key}/manifest.json')
    manifest = artifact.Manifest.from_bytes(data, where)
    if manifest.key != key:
      raise errors.DamageError(
          f'{where}: it is the manifest of key {manifest.key[:12]}; {_REPAIR}')
    return manifest

  def _manifests(
      self, on_error: Callable[[Exception], None] = lambda e: None
  ) -> Iterator[tuple[str, bytes]]:
    """Yields key and manifest bytes of every artifact."""
    matches = [_MANIFEST.fullmatch(name) for name in self._list('a/')]
    pending = [(m[1], m[0], self._kv.read(m[0])) for m in matches if m]
    for key, name, future in pending:
      try:
        result = _wait(future, f'reading {self.where(name)}')
      except errors.StorageError as e:
        on_error(e)
        continue
      if result.state == 'value':
        yield key, result.value

  def _examine(self) -> Sequence[artifact.Manifest | Exception]:
    found: Any = []
    for key, data in self._manifests(found.append):
      try:
        found.append(self._parse(key, data))
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
        f'no artifact {ref!r} in {self._root} ({len(found) - damaged}'
        f' artifacts){hint}; list them with `kvgraft ls`')

  # Names.

  def _find_name(self, name: str) -> artifact.Manifest:
    data = self._load(f'names/{name}')
    if data is None:
      raise self._not_found(name)
    value = self._parse_name(name, data)
    manifest = self.get(value['key'])
    if manifest is None:
      raise errors.NotFoundError(
          f'name {name!r} means artifact {value["id"][:12]}, which is no longer'
          f' in {self._root}; list what is there with `kvgraft ls`')
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
    for name in self._list('names/'):
      match = _NAME.fullmatch(name)
      if match is None or name.endswith(_LOCK):
        continue
      try:
        data = self._load(name)
        if data is not None:
          found[match[1]] = self._parse_name(match[1], data)
      except errors.KvgraftError as e:
        found[match[1]] = e
    return found

  def _open(
      self, key: str, attempt: str, fields: artifact.KeyFields, kind: str,
      layout: artifact.KindLayout,
  ) -> ts.TensorStore:
    """Opens a kind's array; its zarr.json is never read."""
    path = f'a/{key}/{attempt}/{kind}/'
    return _wait(ts.open({
        'driver': 'zarr3',
        'kvstore': dict(self._spec, path=self._spec['path'] + path),
        'metadata': artifact.zarr_metadata(fields, layout),
        'open': True,
        'assume_metadata': True,
        'fill_missing_data_reads': False,
        'store_data_equal_to_fill_value': True,
    }, context=_context()), f'opening {self.where(path)}')

  def _sync_directories(self, name: str) -> None:
    """Makes new directory entries durable, from `name` up to the store's."""
    if not self._local:
      return
    root = self._root.rstrip('/')
    path = self.where(name).rstrip('/')
    try:
      while len(path) >= len(root):
        fd = os.open(path or '/', os.O_RDONLY)
        try:
          os.fsync(fd)
        finally:
          os.close(fd)
        path = path.rpartition('/')[0]
        if not path:
          break
    except OSError as e:
      raise _storage_error(e, f'writing {self.where(name)}') from None


_REPAIR = 'remove the artifact and deposit it again'


def _check_reference(ref: Any) -> None:
  if (not isinstance(ref, str) or not _REFERENCE.fullmatch(ref) or '..' in ref
      or ref.endswith(_LOCK)):
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


def _keys_below(prefix: str) -> ts.KvStore.KeyRange:
  return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord('/') + 1))


class _Read:
  """One read: some layers' K or V of positions [lo, hi) of one block."""

  def __init__(
      self, store: Store, manifest: artifact.Manifest, kind: str, number: int,
      layers: slice, part: int, lo: int, hi: int, out: np.ndarray, verify: bool,
  ):
    self._store = store
    self._manifest = manifest
    self._kind = kind
    self._number = number
    self._layers = layers
    self._part = part
    self._out = out
    self._block = manifest.geometries[kind].blocks[number]
    self._first = lo
    self._last = hi
    self._kept = slice(0, hi - lo)
    self._target = out
    if verify and (lo, hi) != self._block[1:]:
      _, self._first, self._last = self._block
      self._kept = slice(lo - self._first, hi - self._first)
      self._target = np.empty(
          (out.shape[0], self._last - self._first) + out.shape[2:], out.dtype)

  @property
  def nbytes(self) -> int:
    return self._target.nbytes

  def start(self, array: ts.TensorStore) -> None:
    """Starts the read."""
    origin = self._manifest.geometries[self._kind].origin
    source = array[self._layers, self._part,
                   self._first - origin:self._last - origin]
    source = source[ts.d[:2].translate_to[0]]
    self._future = ts.array(self._target).write(source).commit

  def wait(self) -> None:
    """Waits for the bytes."""
    try:
      self._future.result()
    except _TS_ERRORS as e:
      layers = self._manifest.layouts[self._kind].layers[self._layers]
      ends = '-'.join(str(n) for n in sorted({layers[0], layers[-1]}))
      reason = _reason(e)
      if reason.split(':')[0] in _DAMAGE:
        raise self._damage(ends, reason) from None
      raise _storage_error(e, f'reading {self._name(ends)}') from None

  def check(self) -> None:
    """Checks the digests and copies what was asked for out of the scratch."""
    layers = self._manifest.layouts[self._kind].layers[self._layers]
    digests = self._manifest.digests[self._kind][self._number]
    digests = digests[2 * self._layers.start + self._part::2]
    for layer, rows, expected in zip(layers, self._target, digests):
      found = artifact.block_digest(
          self._kind, layer, artifact.PARTS[self._part], self._first,
          self._last, rows)
      if found != expected:
        raise self._damage(
            str(layer), f'digest is {found[:12]}, expected {expected[:12]}')
    if self._target is not self._out:
      self._out[...] = self._target[:, self._kept]

  def _damage(self, layer: str, what: str) -> errors.DamageError:
    return errors.DamageError(f'{self._name(layer)}: {what}; {_REPAIR}')

  def _name(self, layer: str) -> str:
    path = self._store.where(
        f'a/{self._manifest.key}/{self._manifest.attempt}/{self._kind}/'
        f'c.0.0.{self._number}.0.0')
    part = artifact.PARTS[self._part]
    return (f'artifact {self._manifest.id[:12]} {self._kind} layer {layer}'
            f' {part} block {self._block.number} ({path})')


def _run(reads: list[_Read], array: ts.TensorStore, verify: bool) -> int:
  """Reads and checks, overlapped; all have ended when this returns or raises.

  All reads are started at once: one at a time costs three times as much.
  """
  checks = []
  failed: BaseException | None = None
  for read in reads:
    read.start(array)
  for read in reads:
    try:
      read.wait()
      if failed is None and verify:
        checks.append(_pool().submit(read.check))
    except errors.KvgraftError as e:
      failed = failed or e
  for check in checks:
    failed = failed or check.exception()
  if failed is not None:
    raise failed
  return sum(read.nbytes for read in reads)


class Writer:
  """Writes one artifact; a context manager.

  Leaving the context without a commit removes what was written.
  """

  def __init__(
      self, store: Store, fields: artifact.KeyFields,
      layouts: dict[str, artifact.KindLayout], tokens: np.ndarray,
  ):
    artifact.check_layouts(layouts)
    ids = np.asarray(tokens)
    if ids.dtype.kind not in 'iu' or ids.shape != (
        fields.end - fields.start,) or (
            hashing.tokens_sha256(ids) != fields.tokens_sha256):
      raise errors.UsageError(
          f'tokens {list(ids.shape)} are not the {fields.end - fields.start}'
          ' that the key names')
    self._store = store
    self._fields = fields
    self._layouts = dict(layouts)
    self._attempt = uuid.uuid4().hex
    self._prefix = f'a/{fields.key}/{self._attempt}/'
    self._shapes = {k: artifact.geometry(fields, v) for k, v in layouts.items()}
    self._digests: dict[str, dict[int, tuple[str, ...]]] = {
        k: {} for k in layouts
    }
    self._pending: list[tuple[Any, str]] = []
    self._done = False
    self._arrays = {
        kind: store._open(fields.key, self._attempt, fields, kind, layout)
        for kind, layout in layouts.items()
    }
    self._put('tokens', np.ascontiguousarray(ids, '<i4').tobytes())
    for kind, layout in layouts.items():
      # For other zarr readers only.
      self._put(f'{kind}/zarr.json', hashing.canonical_json(
          artifact.zarr_metadata(fields, layout)))

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *unused_exc_info) -> None:
    if not self._done:
      self._discard()

  def write_block(self, kind: str, block_index: int, array: np.ndarray) -> None:
    """Writes all layers of one block; each exactly once, in any order.

    The array may be changed or freed as soon as this returns.

    Args:
      kind: 'sliding' or 'global'.
      block_index: absolute number of the block, position // Q.
      array: [layers, 2, valid positions, kv_heads, head_dim] bit patterns.

    Raises:
      UsageError: if block or array are not those expected.
      StorageError: if an earlier block could not be written.
    """
    if kind not in self._layouts:
      raise errors.UsageError(f'the artifact has no {kind!r:.80} layers')
    layout, shape = self._layouts[kind], self._shapes[kind]
    number = block_index - shape.blocks[0].number
    if not 0 <= number < len(shape.blocks):
      raise errors.UsageError(
          f'{kind} block is {block_index}, expected {shape.blocks[0].number} to'
          f' {shape.blocks[-1].number}')
    if number in self._digests[kind]:
      raise errors.UsageError(f'{kind} block {block_index} is already written')
    _, start, stop = shape.blocks[number]
    expected = (len(layout.layers), 2, stop - start, layout.kv_heads,
                layout.head_dim)
    if array.shape != expected or array.dtype != layout.element:
      raise errors.UsageError(
          f'{kind} block {block_index} is {array.dtype}{list(array.shape)},'
          f' expected {layout.element}{list(expected)}')
    array = np.ascontiguousarray(array)
    rows = slice(start - shape.origin, stop - shape.origin)
    write = self._arrays[kind][:, :, rows].write(array)
    # Without this the write would begin only when somebody waits for it.
    write.commit.force()
    where = self._store.where(f'{self._prefix}{kind}/c.0.0.{number}.0.0')
    self._pending.append((write.commit, f'writing {where}'))
    self._digests[kind][number] = tuple(_pool().map(
        lambda i: artifact.block_digest(
            kind, layout.layers[i // 2], artifact.PARTS[i % 2], start, stop,
            array[i // 2, i % 2]),
        range(2 * len(layout.layers))))
    _wait(write.copy, f'writing {where}')
    while len(self._pending) > _WRITES_IN_FLIGHT:
      _wait(*self._pending.pop(0))

  def commit(
      self, *, last_logits_sha256: str, outer: dict[str, Any]
  ) -> artifact.Manifest:
    """Publishes the artifact.

    Args:
      last_logits_sha256: hex SHA-256 of the logits of position end - 1.
      outer: 'provenance', 'self_test', 'profile' (objects of strings and
        integers) and 'created' (text), each optional.

    Returns:
      The manifest in the store: another writer's if that was first.

    Raises:
      UsageError: if a block is missing or `outer` has no canonical form.
      StorageError: if the data or the manifest could not be written.
      ConflictError: if the key exists with other content.
    """
    for kind, shape in self._shapes.items():
      for number, block in enumerate(shape.blocks):
        if number not in self._digests[kind]:
          raise errors.UsageError(f'{kind} block {block.number} is not written')
    unknown = set(outer) - {'created', 'provenance', 'self_test', 'profile'}
    if unknown:
      raise errors.UsageError(f'outer section has unknown {sorted(unknown)}')
    now = datetime.datetime.now(datetime.UTC)
    manifest = artifact.Manifest(
        fields=self._fields,
        layouts=self._layouts,
        digests={k: tuple(v[i] for i in sorted(v))
                 for k, v in self._digests.items()},
        last_logits_sha256=last_logits_sha256,
        attempt=self._attempt,
        created=outer.get('created', now.strftime('%Y-%m-%dT%H:%M:%SZ')),
        provenance=outer.get('provenance', {}),
        self_test=outer.get('self_test', {}),
        profile=outer.get('profile', {}),
    )
    try:
      data = manifest.to_bytes()
    except TypeError as e:
      raise errors.UsageError(f'outer section: {e}') from None
    while self._pending:
      _wait(*self._pending.pop(0))
    # TensorStore syncs each file and its directory, but no directory above.
    self._store._sync_directories(self._prefix)
    return self._publish(manifest, data)

  def _publish(
      self, manifest: artifact.Manifest, data: bytes
  ) -> artifact.Manifest:
    store, name = self._store, f'a/{manifest.key}/manifest.json'
    # From here on only the store can tell whether the attempt is in use.
    self._done = True
    try:
      store._write_new(name, data)
      winner = store.get(manifest.key)
    except errors.KvgraftError as e:
      # A failed remote write may still arrive; a local one has or has not.
      if store._local or not isinstance(e, errors.StorageError):
        self._discard()
      raise
    if winner is None:
      raise errors.StorageError(
          f'{store.where(name)} vanished after it was written; deposit again')
    if winner.attempt == self._attempt:
      return winner
    self._discard()
    if winner.id != manifest.id:
      raise errors.ConflictError(
          f'key {manifest.key[:12]} is deposited as {winner.id[:12]}, this'
          f' computation gives {manifest.id[:12]}: the first difference is'
          f' {artifact.first_difference(manifest, winner)}; run `kvgraft audit`'
          ' on both machines')
    return winner

  def _put(self, name: str, data: bytes) -> None:
    name = self._prefix + name
    future = self._store._kv.write(name, data)
    self._pending.append((future, f'writing {self._store.where(name)}'))

  def _discard(self) -> None:
    """Removes the attempt as far as possible; its errors are not news."""
    self._done = True
    for future, _ in self._pending:
      with contextlib.suppress(Exception):
        future.result()
    self._pending.clear()
    with contextlib.suppress(errors.KvgraftError):
      self._store.delete_attempt(self._fields.key, self._attempt)
