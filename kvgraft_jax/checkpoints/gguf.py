"""Reader of GGUF version 3 files: header first, then one tensor at a time.

Format: github.com/ggml-org/ggml `docs/gguf.md`; block layouts: `ggml-common.h`.
Everything that can be refused is refused from the header, before any weight is
read.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math
import os
import struct
from typing import Any

import numpy as np

from kvgraft_jax import errors

_MAGIC = b'GGUF'
_VERSION = 3
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: '<u1', 1: '<i1', 2: '<u2', 3: '<i2', 4: '<u4', 5: '<i4', 6: '<f4',
    7: '?', 10: '<u8', 11: '<i8', 12: '<f8',
}


@dataclasses.dataclass(frozen=True)
class _Block:
  """A storage type: `values` elements in `nbytes` bytes."""

  name: str
  values: int
  nbytes: int
  # uint8 [n, nbytes] -> float32 [n, values].
  unpack: Callable[[np.ndarray], np.ndarray]


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
  """Returns the float16 at byte `start` of each block as float32 [n, 1]."""
  pair = np.ascontiguousarray(blocks[:, start:start + 2])
  return pair.view('<f2').astype(np.float32)


def _unpack_f32(blocks: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(blocks).view('<f4').astype(np.float32)


def _unpack_f16(blocks: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(blocks).view('<f2').astype(np.float32)


def _unpack_bf16(blocks: np.ndarray) -> np.ndarray:
  high = np.ascontiguousarray(blocks).view('<u2').astype(np.uint32)
  return (high << np.uint32(16)).view(np.float32)


def _unpack_q8_0(blocks: np.ndarray) -> np.ndarray:
  """d, 32 x int8."""
  return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _unpack_q5_0(blocks: np.ndarray) -> np.ndarray:
  """d, 32 fifth bits, 32 nibbles: low nibbles first; value d * (q - 16)."""
  fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder='little')
  low = np.concatenate([blocks[:, 6:] & 15, blocks[:, 6:] >> 4], axis=1)
  return _half(blocks, 0) * ((low | fifth << 4).astype(np.int8) - np.int8(16))


def _unpack_q4_k(blocks: np.ndarray) -> np.ndarray:
  """d, dmin, 8 six-bit scales and minima, 256 nibbles."""
  n = len(blocks)
  a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
  scale = np.concatenate([a & 63, c & 15 | (a >> 6) << 4], axis=1)
  minimum = np.concatenate([b & 63, c >> 4 | (b >> 6) << 4], axis=1)
  scale = (_half(blocks, 0) * scale)[:, :, None]
  minimum = (_half(blocks, 2) * minimum)[:, :, None]
  packed = blocks[:, 16:].reshape(n, 4, 1, 32)
  q = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(n, 8, 32)
  return (scale * q - minimum).reshape(n, 256)


def _unpack_q6_k(blocks: np.ndarray) -> np.ndarray:
  """256 nibbles, 256 bit pairs, 16 int8 scales, d; value d*s * (q - 32)."""
  n = len(blocks)
  packed = blocks[:, :128].reshape(n, 2, 1, 64)
  low = np.concatenate([packed & 15, packed >> 4], axis=2)
  pairs = blocks[:, 128:192].reshape(n, 2, 1, 32)
  high = np.concatenate([pairs >> s & 3 for s in (0, 2, 4, 6)], axis=2)
  q = low.reshape(n, 256) | high.reshape(n, 256) << 4
  q = (q.astype(np.int8) - np.int8(32)).reshape(n, 16, 16)
  scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
  return (scale[:, :, None] * q).reshape(n, 256)


_TYPES = {
    0: _Block('F32', 1, 4, _unpack_f32),
    1: _Block('F16', 1, 2, _unpack_f16),
    6: _Block('Q5_0', 32, 22, _unpack_q5_0),
    8: _Block('Q8_0', 32, 34, _unpack_q8_0),
    12: _Block('Q4_K', 256, 144, _unpack_q4_k),
    14: _Block('Q6_K', 256, 210, _unpack_q6_k),
    30: _Block('BF16', 1, 2, _unpack_bf16),
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


class GgufFile:
  """An open GGUF file.

  Attributes:
    source: name for messages.
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
    try:
      parts = [np.memmap(p, np.uint8, 'r') for p in paths]
    except OSError as e:
      raise errors.NotFoundError(
          f'{e.filename or self.source}: cannot read the model file:'
          f' {e.strerror}'
      ) from None
    except ValueError:  # Numpy refuses to map nothing.
      raise errors.DamageError(
          f'{self.source}: expected a GGUF file, found an empty one: fetch it'
          ' again'
      ) from None
    self.data = parts[0] if len(parts) == 1 else np.concatenate(parts)
    self.data = np.asarray(self.data)
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
      if kind not in _TYPES:
        raise errors.UsageError(
            f'{self.source}: {name} has tensor type {kind}, known are'
            f' {", ".join(t.name for t in _TYPES.values())}: use a file that'
            ' is quantised to those'
        )
      block = _TYPES[kind]
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
      start: first row.
      stop: behind the last row.

    Returns:
      float32 [stop - start, in].

    Raises:
      NumericsError: if a value is NaN or infinite.
    """
    info = self.tensors[name]
    block = next(t for t in _TYPES.values() if t.name == info.dtype)
    width = info.shape[-1]
    row_bytes = width // block.values * block.nbytes
    raw = self.data[info.start + start * row_bytes:
                    info.start + stop * row_bytes]
    with np.errstate(all='ignore'):
      values = block.unpack(raw.reshape(-1, block.nbytes))
      flat = values.reshape(-1)
      # Finite unless a value is not, or squares overflow: then look closer.
      squares = flat @ flat
    values = values.reshape(stop - start, width)
    if not np.isfinite(squares) and not np.isfinite(flat).all():
      bad = int(np.argmin(np.isfinite(flat)))
      raise errors.NumericsError(
          f'{self.source}: {name} row {start + bad // width} column'
          f' {bad % width} is {flat[bad]}, expected a finite weight:'
          ' the file is damaged: fetch it again'
      )
    return values
