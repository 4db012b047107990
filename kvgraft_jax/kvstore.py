"""Objects and arrays in a TensorStore key-value store.

Local files, memory, S3 and GCS by one code. Every failure is a StorageError
that names the object. No other part of the store imports TensorStore.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import functools
import json
import os
import re
import shutil
from typing import Any

import numpy as np
import tensorstore as ts

from kvgraft_jax import artifact
from kvgraft_jax import errors

# Ending of files that TensorStore keeps while it writes; a kill leaves some.
LOCK = '.__lock'

_DRIVERS = ('file', 'memory', 's3', 'gcs')
_DAMAGE = ('NOT_FOUND', 'DATA_LOSS', 'FAILED_PRECONDITION', 'OUT_OF_RANGE',
           'INVALID_ARGUMENT')
_TS_ERRORS = (ValueError, OSError, RuntimeError, IndexError, MemoryError)
# Open arrays that are kept: those of a chain, its kinds, and an attempt.
_OPEN_ARRAYS = 64


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


def _parse_url(url: str) -> dict[str, Any]:
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
      if path.startswith('//'):  # A host, to TensorStore.
        path = path[1:]
      path.encode('utf-8')  # TensorStore takes no other names.
      spec = {'driver': 'file', 'path': path}
  except (ValueError, TypeError) as e:
    raise errors.UsageError(
        f'store {url!r:.200} cannot be opened: {reason(e)}') from None
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


def reason(error: Exception) -> str:
  """Returns code and cause of a TensorStore error in one line."""
  text = re.split(r' \[(?:tensorstore_spec|source locations)=', str(error))[0]
  code = re.match(r'[A-Z_]+: ', text)
  # What comes in between repeats the path that our own message names.
  cause = text.rpartition('": ')[2]
  if code and not cause.startswith(code[0]):
    cause = code[0] + cause
  return ' '.join(cause.split())[:300]


def storage_error(error: Exception, doing: str) -> errors.StorageError:
  """Returns what to raise when `doing` failed."""
  why = reason(error)
  if re.search('No space left|File too large|quota|RESOURCE_EXHAUSTED', why):
    step = 'free space or use another store'
  elif re.search('denied|Read-only|not permitted|PERMISSION|UNAUTHENTICATED',
                 why):
    step = 'check the permissions or use another store'
  else:
    step = 'check the disk or the network and try again'
  return errors.StorageError(f'{doing} failed: {why}; {step}')


def wait(future: Any, doing: str) -> Any:
  """Returns a TensorStore future's result; its errors become StorageError."""
  try:
    return future.result()
  except _TS_ERRORS as e:
    raise storage_error(e, doing) from None


def wait_for_read(future: Any) -> tuple[str, Exception] | None:
  """Waits for a read; returns the reason and the error of a failed one."""
  try:
    future.result()
  except _TS_ERRORS as e:
    return reason(e), e
  return None


def is_damage(why: str) -> bool:
  """Tells whether a read failed for what is stored, not for the storage."""
  return why.split(':')[0] in _DAMAGE


def start_read(
    array: ts.TensorStore, layers: slice, part: int, rows: slice,
    out: np.ndarray,
) -> ts.Future:
  """Starts to read some layers' K or V of some rows into `out`."""
  source = array[layers, part, rows][ts.d[:2].translate_to[0]]
  return ts.array(out).write(source).commit


def start_write(
    array: ts.TensorStore, rows: slice, values: np.ndarray
) -> tuple[ts.Future, ts.Future]:
  """Starts to write all layers of some rows.

  Returns:
    Futures of the moment when `values` has been copied, and of the end.
  """
  write = array[:, :, rows].write(values)
  # Without this the write would begin only when somebody waits for it.
  write.commit.force()
  return write.copy, write.commit


class KvStore:
  """The objects of one store.

  Attributes:
    local: whether it is a directory of this machine.
    root: its name for messages, ending in '/'; the path of a local one.
  """

  def __init__(self, url: str, *, create: bool = True):
    """Opens a store; nothing is written.

    Args:
      url: a path, a URL (file://, memory://, s3://, gs://) or a TensorStore
        kvstore spec as JSON.
      create: whether a local store may not exist yet.

    Raises:
      UsageError: if `url` names no store.
      NotFoundError: if `create` is false and the directory does not exist.
    """
    self._spec = _parse_url(url)
    self.local = self._spec['driver'] == 'file'
    path = self._spec['path']
    scheme = self._spec['driver'].replace('gcs', 'gs')
    bucket = self._spec.get('bucket')
    self.root = path if self.local else (
        f'{scheme}://{bucket}/{path}' if bucket else f'{scheme}://{path}')
    if self.local and os.path.exists(path.rstrip('/') or '/'):
      if not os.path.isdir(path):
        raise errors.UsageError(
            f'store {path} is a file, expected a directory')
    elif self.local and not create:
      raise errors.NotFoundError(
          f'there is no store at {path}; check --store or make a deposit first')
    self._kv = wait(ts.KvStore.open(self._spec, context=_context()),
                    f'opening the store {self.root}')
    self.open_array = functools.lru_cache(_OPEN_ARRAYS)(self._open_array)

  def where(self, name: str) -> str:
    """Returns the full name of the object `name`, for messages."""
    return self.root + name

  def start_load(self, name: str) -> ts.Future:
    """Starts to read an object; `value_of` gives its bytes."""
    return self._kv.read(name)

  def value_of(self, name: str, future: ts.Future) -> bytes | None:
    """Returns the bytes of a started read, None if there is no object."""
    result = wait(future, f'reading {self.where(name)}')
    return result.value if result.state == 'value' else None

  def load(self, name: str) -> bytes | None:
    """Returns the bytes of an object, None if there is none."""
    return self.value_of(name, self.start_load(name))

  def start_put(self, name: str, data: bytes) -> ts.Future:
    """Starts to write an object, whether there is one or not."""
    return self._kv.write(name, data)

  def put(self, name: str, data: bytes) -> None:
    """Writes an object, whether there is one or not."""
    wait(self.start_put(name, data), f'writing {self.where(name)}')

  def put_new(self, name: str, data: bytes) -> bool:
    """Writes an object if there is none; tells whether it did."""
    doing = f'writing {self.where(name)}'
    found = wait(self._kv.read(name), doing)
    if found.state == 'value':
      return False
    stamp = wait(self._kv.write(
        name, data, if_equal=found.stamp.generation), doing)
    return stamp.generation != b''

  def list(self, prefix: str) -> Sequence[str]:
    """Returns the names of all objects below a prefix that ends in '/'."""
    keys = wait(self._kv.list(_keys_below(prefix)),
                f'listing {self.where(prefix)}')
    return sorted(k.decode('utf-8', 'replace') for k in keys)

  def size(self, name: str) -> int | None:
    """Returns the bytes of a local file; None if lost or not local."""
    if not self.local:
      return None
    with contextlib.suppress(OSError):
      return os.stat(self.where(name)).st_size
    return None

  def delete(self, name: str) -> None:
    """Removes an object, if there is one."""
    wait(self._kv.write(name, None), f'removing {self.where(name)}')

  def delete_below(self, prefix: str) -> None:
    """Removes all objects below a prefix that ends in '/'."""
    if self.local:
      shutil.rmtree(self.where(prefix), ignore_errors=True)
    else:
      wait(self._kv.delete_range(_keys_below(prefix)),
           f'removing {self.where(prefix)}')

  def sync_directories(self, name: str) -> None:
    """Makes new directory entries durable, from `name` up to the store's."""
    if not self.local:
      return
    root = self.root.rstrip('/')
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
      raise storage_error(e, f'writing {self.where(name)}') from None

  def _open_array(
      self, path: str, fields: artifact.KeyFields, layout: artifact.KindLayout,
  ) -> ts.TensorStore:
    """Opens a kind's array; its zarr.json is never read.

    `open_array` keeps the last ones: opening costs more than a small read.
    Nothing of their content is kept.
    """
    return wait(ts.open({
        'driver': 'zarr3',
        'kvstore': dict(self._spec, path=self._spec['path'] + path),
        'metadata': artifact.zarr_metadata(fields, layout),
        'open': True,
        'assume_metadata': True,
        'fill_missing_data_reads': False,
        'store_data_equal_to_fill_value': True,
    }, context=_context()), f'opening {self.where(path)}')


def _keys_below(prefix: str) -> ts.KvStore.KeyRange:
  return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord('/') + 1))
