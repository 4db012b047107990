"""The arrays of an Orbax tree on disk, and whether their files are whole.

Orbax keeps all of them in one OCDBT database or each in a zarr directory of
its own. They are read by whole chunks, with no more memory than the chunks
that one slice touches.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import math
import pathlib
from typing import Any
import urllib.parse

import numpy as np
import tensorstore as ts

from kvgraft_jax import errors

OCDBT = 'manifest.ocdbt'


class Arrays:
  """Read access to named arrays."""

  def __init__(
      self, folder: pathlib.Path, source: str, *, zarr3: bool, whole: bool
  ):
    """Checks that files are there, without reading an array.

    Args:
      folder: directory of the tree.
      source: name for messages.
      zarr3: whether arrays are in that format, and not in the one before it.
      whole: whether arrays of zeros have data, so that absent data is lost.

    Raises:
      DamageError: if a data file is missing or cut off.
    """
    self._folder = folder
    self._source = source
    self._driver = 'zarr3' if zarr3 else 'zarr'
    self._ocdbt = (folder / OCDBT).is_file()
    # A file of its own can be lost without a trace; zeros are less likely.
    self._whole = whole or not self._ocdbt
    if self._ocdbt:
      self._check_database()
    elif any(folder.glob('ocdbt.process_*')):
      raise errors.DamageError(
          f'{source}: expected the file {OCDBT}, found none: get the'
          ' checkpoint again')

  def describe(
      self, names: Iterable[str]
  ) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns name -> (shape, name of the dtype).

    Raises:
      DamageError: if one has no header or lacks data files.
    """
    context = ts.Context()
    opening = {name: self._open(name, context) for name in names}
    out = {}
    for name, future in opening.items():
      array = self._result(name, future)
      if not self._ocdbt:
        self._check_chunks(name, array)
      out[name] = tuple(array.shape), array.dtype.name
    return out

  def slices(
      self, name: str, index: tuple[int, ...], order: Sequence[int], step: int
  ) -> Iterator[np.ndarray]:
    """Yields transpose(array[index], order) in slices of its first axis.

    Args:
      name: of the array.
      index: leading axes that are picked.
      order: of the other axes.
      step: the most rows of a slice.

    Raises:
      DamageError: if data cannot be read or decoded.
    """
    array = self._result(name, self._open(name, ts.Context()))
    chunk = _chunk(array)
    sliced = len(index) + order[0]
    cache = 0
    if chunk[sliced] <= step:
      step -= step % chunk[sliced]
    else:
      # A chunk serves several slices, and is kept until they are read.
      cache = array.dtype.numpy_dtype.itemsize * math.prod(
          c if axis < len(index) or axis == sliced else -(-n // c) * c
          for axis, (n, c) in enumerate(zip(array.shape, chunk)))
      cache += 1 << 20  # What the cache itself takes.
    array = self._result(name, self._open(
        name, ts.Context({'cache_pool': {'total_bytes_limit': cache}})))
    view = (array[index] if index else array).transpose(order)
    for start in range(0, view.shape[0], step):
      stop = min(start + step, view.shape[0])
      yield self._result(name, view[start:stop].read(order='C'))

  def _open(self, name: str, context: ts.Context) -> ts.Future:
    """Starts to open an array."""
    kvstore: dict[str, Any] = {'driver': 'file', 'path': f'{self._folder}/'}
    if self._ocdbt:
      kvstore = {'driver': 'ocdbt', 'base': kvstore, 'path': f'{name}/'}
    else:
      kvstore['path'] += f'{name}/'
    return ts.open(
        {'driver': self._driver, 'kvstore': kvstore,
         'fill_missing_data_reads': not self._whole},
        open=True, read=True, context=context)

  def _result(self, name: str, future: ts.Future) -> Any:
    try:
      return future.result()
    except ValueError as e:
      # Their text goes on with the whole specification.
      reason = str(e).split(' [')[0][:300]
      raise errors.DamageError(
          f'{self._source}: array {name} cannot be read: {reason}: get the'
          ' checkpoint again') from None

  def _check_database(self) -> None:
    """Refuses a database whose files are missing or end early."""
    base = ts.KvStore.open(
        {'driver': 'file', 'path': f'{self._folder}/'}).result()
    ends: dict[str, int] = {}
    manifest = self._result(OCDBT, ts.ocdbt.dump(base))
    nodes = [manifest['versions'][-1]['root'].get('location')]
    while nodes:
      node = nodes.pop()
      if node is None:
        continue  # An empty tree.
      for reference in (node, *_strings(
          self._result(OCDBT, ts.ocdbt.dump(base, node)))):
        kind, *file, offset, length = reference.split(':')
        name = urllib.parse.unquote(''.join(file))
        ends[name] = max(ends.get(name, 0), int(offset) + int(length))
        if kind == 'btreenode' and reference != node:
          nodes.append(reference)
    for name, end in ends.items():
      path = self._folder / name
      size = path.stat().st_size if path.is_file() else None
      if size is None or size < end:
        raise errors.DamageError(
            f'{path}: expected at least {end} bytes, found'
            f' {"no file" if size is None else size}: get the checkpoint'
            ' again')

  def _check_chunks(self, name: str, array: ts.TensorStore) -> None:
    """Refuses an array of which a chunk has no file."""
    expected = math.prod(
        -(-n // c) for n, c in zip(array.shape, _chunk(array)))
    found = sum(p.is_file() and p.name not in ('.zarray', 'zarr.json')
                for p in (self._folder / name).rglob('*'))
    if found < expected:
      raise errors.DamageError(
          f'{self._source}: array {name} expected {expected} data files, found'
          f' {found}: get the checkpoint again')


def _chunk(array: ts.TensorStore) -> tuple[int, ...]:
  """Returns the shape of a chunk, the unit of compression."""
  return tuple(int(c or 1) for c in array.chunk_layout.read_chunk.shape or ())


def _strings(value: Any) -> Iterator[str]:
  """Yields the references in a dumped node."""
  if isinstance(value, str) and value.startswith(('value:', 'btreenode:')):
    yield value
  elif isinstance(value, dict):
    for item in value.values():
      yield from _strings(item)
  elif isinstance(value, list):
    for item in value:
      yield from _strings(item)
