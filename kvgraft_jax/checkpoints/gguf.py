"""Reader of GGUF version 3 files: header first, then one tensor at a time.

Format: github.com/ggml-org/ggml `docs/gguf.md`. Everything that can be refused
is refused from the header, before any weight is read.
"""

from collections.abc import Sequence
import dataclasses
import math
import mmap
import os
import struct
from typing import Any

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import gguf_blocks

_MAGIC = b'GGUF'
_VERSION = 3
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: '<u1', 1: '<i1', 2: '<u2', 3: '<i2', 4: '<u4', 5: '<i4', 6: '<f4',
    7: '?', 10: '<u8', 11: '<i8', 12: '<f8',
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where one tensor lies.

  Attributes:
    name: name in the file.
    dtype: storage type, such as 'Q4_K'.
    shape: numpy order; a matrix is [out, in].
    start: first byte in the file.
    nbytes: bytes in the file.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  start: int
  nbytes: int


class _Cursor:
  """Reads header values one behind the other."""

  def __init__(self, data: np.ndarray, source: str):
    self._data = data.data
    self._source = source
    self.at = 0

  def damage(self, what: str) -> errors.DamageError:
    return errors.DamageError(
        f'{self._source}: {what} at byte {self.at} of the GGUF header; the'
        ' file is truncated or damaged: fetch it again'
    )

  def take(self, count: int) -> memoryview:
    if count > len(self._data) - self.at:
      raise self.damage(f'{count} bytes expected, the file ends')
    self.at += count
    return self._data[self.at - count:self.at]

  def u32(self) -> int:
    return int.from_bytes(self.take(4), 'little')

  def u64(self) -> int:
    return int.from_bytes(self.take(8), 'little')

  def string(self) -> str:
    raw = bytes(self.take(self.u64()))
    try:
      return raw.decode('utf-8')
    except UnicodeDecodeError:
      raise self.damage('a string that is not UTF-8') from None

  def strings(self, count: int) -> list[str]:
    """Reads `count` strings in a tight loop: vocabularies are long."""
    data, at, end = self._data, self.at, len(self._data)
    length_at = struct.Struct('<Q').unpack_from
    out = []
    try:
      for _ in range(count):
        stop = at + 8 + length_at(data, at)[0]
        if stop > end:
          raise self.damage('a string that runs past the end')
        out.append(str(data[at + 8:stop], 'utf-8'))
        at = stop
    except (struct.error, UnicodeDecodeError):
      self.at = at
      raise self.damage('a broken string') from None
    self.at = at
    return out

  def value(self) -> Any:
    """Reads a typed value: scalar, string, numpy array or list of strings."""
    kind = self.u32()
    if kind == _STRING:
      return self.string()
    if kind == _ARRAY:
      kind, count = self.u32(), self.u64()
      if kind == _STRING:
        return self.strings(count)
      if kind not in _SCALARS:
        raise self.damage(f'an array of unknown type {kind}')
      dtype = np.dtype(_SCALARS[kind])
      return np.frombuffer(self.take(count * dtype.itemsize), dtype)
    if kind not in _SCALARS:
      raise self.damage(f'a value of unknown type {kind}')
    dtype = np.dtype(_SCALARS[kind])
    return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
  with open(path, 'rb') as f:
    return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


class GgufFile:
  """An open GGUF file.

  Attributes:
    source: name for messages.
    files: the paths.
    data: the whole file, uint8, mapped read-only (joined in memory if it came
      in several parts).
    metadata: key -> scalar, string, numpy array or list of strings.
    tensors: name -> TensorInfo.
  """

  def __init__(self, paths: Sequence[str | os.PathLike[str]]):
    """Maps the file and parses its header.

    Args:
      paths: the file, or the parts that make it when joined in order.

    Raises:
      NotFoundError: if a path is no readable file.
      UsageError: if it is no GGUF version 3 file or has an unknown type.
      DamageError: if it is truncated or its header contradicts itself.
    """
    self.source = os.fspath(paths[0])
    self.files = tuple(paths)
    try:
      maps = [_map(path) for path in paths]
    except OSError as e:
      raise errors.NotFoundError(
          f'{e.filename or self.source}: cannot read the model file:'
          f' {e.strerror}'
      ) from None
    except ValueError:  # Nothing cannot be mapped.
      raise errors.DamageError(
          f'{self.source}: expected a GGUF file, found an empty one: fetch it'
          ' again'
      ) from None
    parts = [np.frombuffer(m, np.uint8) for m in maps]
    self.data = parts[0] if len(parts) == 1 else np.concatenate(parts)
    self._map = maps[0] if len(maps) == 1 else None
    cursor = _Cursor(self.data, self.source)
    magic = bytes(self.data[:4])
    if magic != _MAGIC:
      raise errors.UsageError(
          f'{self.source}: expected a GGUF file, found one that begins with'
          f' {magic!r}: give a .gguf model file'
      )
    cursor.take(4)
    version = cursor.u32()
    if version != _VERSION:
      raise errors.UsageError(
          f'{self.source}: expected GGUF version {_VERSION} (little-endian),'
          f' found {version}: convert the file with a current converter'
      )
    tensor_count, value_count = cursor.u64(), cursor.u64()
    self.metadata: dict[str, Any] = {}
    for _ in range(value_count):
      key = cursor.string()
      if key in self.metadata:
        raise cursor.damage(f'a second value for {key}')
      self.metadata[key] = cursor.value()
    shards = self.metadata.get('split.count', 0)
    if shards not in (0, 1):
      raise errors.UsageError(
          f'{self.source}: expected a whole GGUF file, found one of {shards}'
          " split ones: join them with llama.cpp's 'llama-gguf-split --merge"
          " FIRST OUT' and give that file"
      )
    self.tensors = self._read_infos(cursor, tensor_count)

  def _read_infos(
      self, cursor: _Cursor, count: int
  ) -> dict[str, TensorInfo]:
    raw = []
    for _ in range(count):
      name, rank = cursor.string(), cursor.u32()
      if not 1 <= rank <= 4:
        raise cursor.damage(f'{name}: rank {rank}')
      shape = tuple(cursor.u64() for _ in range(rank))[::-1]
      raw.append((name, shape, cursor.u32(), cursor.u64()))
    align = self.metadata.get('general.alignment', 32)
    if not isinstance(align, int) or align < 1:
      raise cursor.damage(f'alignment {align!r}')
    base = -(-cursor.at // align) * align
    infos, end = {}, base
    for name, shape, kind, offset in sorted(raw, key=lambda r: r[3]):
      if kind not in gguf_blocks.TYPES:
        raise errors.UsageError(
            f'{self.source}: tensor {name} has the type'
            f' {gguf_blocks.OTHERS.get(kind, kind)}, expected one of'
            f' {", ".join(gguf_blocks.BY_NAME)}: use a file that is quantised'
            ' to those'
        )
      block = gguf_blocks.TYPES[kind]
      if shape[-1] % block.values or 0 in shape:
        raise cursor.damage(f'{name}: shape {list(shape)} for {block.name}')
      nbytes = math.prod(shape) // block.values * block.nbytes
      start = base + offset
      if name in infos or offset % align or start < end:
        raise cursor.damage(f'{name}: duplicate, misaligned or overlapping')
      end = start + nbytes
      if end > len(self.data):
        raise errors.DamageError(
            f'{self.source}: {name} ends at byte {end}, the file has'
            f' {len(self.data)}: the file is truncated: fetch it again'
        )
      infos[name] = TensorInfo(name, block.name, shape, start, nbytes)
    return infos

  def rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Returns rows [start, stop) of a tensor, dequantised.

    Args:
      name: tensor in `tensors`; rank 1 counts as one row.
      start: first row; of a higher rank, rows count through all axes but the
        last.
      stop: behind the last row.

    Returns:
      float32 [stop - start, in].

    Raises:
      NumericsError: if a value is NaN or infinite.
    """
    info = self.tensors[name]
    block = gguf_blocks.BY_NAME[info.dtype]
    width = info.shape[-1]
    row_bytes = width // block.values * block.nbytes
    begin, end = (info.start + row * row_bytes for row in (start, stop))
    raw = self.data[begin:end].reshape(-1, block.nbytes)
    with np.errstate(all='ignore'):
      values = block.unpack(raw)
      flat = values.reshape(-1)
      # Finite unless a value is not, or squares overflow: then look closer.
      squares = flat @ flat
    values = values.reshape(stop - start, width)
    self._forget(begin, end)
    if not np.isfinite(squares) and not np.isfinite(flat).all():
      bad = int(np.argmin(np.isfinite(flat)))
      raise errors.NumericsError(
          f'{self.source}: {name} row {start + bad // width} column'
          f' {bad % width} is {flat[bad]}, expected a finite weight:'
          ' the file is damaged: fetch it again'
      )
    return values

  def _forget(self, start: int, stop: int) -> None:
    """Takes mapped bytes out of this process's memory; they may come back."""
    if self._map is not None and hasattr(self._map, 'madvise'):
      start -= start % mmap.PAGESIZE
      self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
