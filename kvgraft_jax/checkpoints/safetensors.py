"""Safetensors files: written piecewise, read as mapped views or by header.

Format: github.com/huggingface/safetensors. In aligned files data begins at a
multiple of 4096 and each tensor at a multiple of 64 bytes, so that mapped views
can be used by a device without a copy. The format allows no holes: what fills
them is a U8 tensor whose name begins with PAD.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import mmap
import os
from typing import Any

import ml_dtypes
import numpy as np

from kvgraft_jax import errors

PAD = '_pad.'
_DATA_ALIGN = 4096
_TENSOR_ALIGN = 64
_NAMES = {
    'U8': np.dtype(np.uint8),
    'I32': np.dtype('<i4'),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F32': np.dtype('<f4'),
}
_CODES = {dtype: name for name, dtype in _NAMES.items()}
_BITS = {
    'BOOL': 8, 'U8': 8, 'I8': 8, 'I16': 16, 'U16': 16, 'F16': 16, 'BF16': 16,
    'I32': 32, 'U32': 32, 'F32': 32, 'I64': 64, 'U64': 64, 'F64': 64,
    'C64': 64, 'F8_E4M3': 8, 'F8_E5M2': 8, 'F8_E8M0': 8, 'F8_E4M3FNUZ': 8,
    'F8_E5M2FNUZ': 8, 'F6_E2M3': 6, 'F6_E3M2': 6, 'F4': 4,
}
_MOST_HEADER = 100_000_000  # Bytes; as the format's own library has it.


@dataclasses.dataclass(frozen=True)
class Layout:
  """A file about to be written.

  Attributes:
    header: bytes in front of the data.
    starts: name -> first byte of its data in the file.
    nbytes: size of the whole file.
  """

  header: bytes
  starts: dict[str, int]
  nbytes: int


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where one tensor lies.

  Attributes:
    dtype: the format's name, such as 'BF16'.
    shape: of the tensor, C order.
    start: first byte in the file.
    nbytes: bytes in the file.
  """

  dtype: str
  shape: tuple[int, ...]
  start: int
  nbytes: int


def layout(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    metadata: Mapping[str, str] | None = None,
    *,
    aligned: bool = True,
) -> Layout:
  """Returns where each tensor goes, in the order given.

  Args:
    tensors: name -> (shape, dtype).
    metadata: strings kept in the header.
    aligned: fill the gaps with PAD tensors, which other readers may refuse;
      if not, tensors follow one another.
  """
  header: dict[str, object] = {}
  if metadata:
    header['__metadata__'] = dict(metadata)
  at, starts = 0, {}

  def add(name: str, code: str, shape: tuple[int, ...], nbytes: int) -> None:
    nonlocal at
    header[name] = {
        'dtype': code, 'shape': list(shape), 'data_offsets': [at, at + nbytes]
    }
    starts[name] = at
    at += nbytes

  for name, (shape, dtype) in tensors.items():
    gap = -at % _TENSOR_ALIGN
    if gap and aligned:
      add(f'{PAD}{at}', 'U8', (gap,), gap)
    dtype = np.dtype(dtype)
    add(name, _CODES[dtype], shape, math.prod(shape) * dtype.itemsize)
  text = json.dumps(header, separators=(',', ':')).encode('utf-8')
  align = _DATA_ALIGN if aligned else 8
  base = -(-(8 + len(text)) // align) * align
  text = text.ljust(base - 8)
  return Layout(
      header=len(text).to_bytes(8, 'little') + text,
      starts={n: base + s for n, s in starts.items() if n in tensors},
      nbytes=base + at,
  )


def pack(
    arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> bytes:
  """Returns a whole small file."""
  plan = layout({n: (a.shape, a.dtype) for n, a in arrays.items()}, metadata)
  out = bytearray(plan.nbytes)
  out[:len(plan.header)] = plan.header
  for name, array in arrays.items():
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    out[plan.starts[name]:plan.starts[name] + raw.size] = raw.data
  return bytes(out)


def unpack(
    data: bytes | memoryview | mmap.mmap, source: str
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Returns (name -> read-only view, metadata) of a file in memory.

  Args:
    data: the whole file.
    source: name for messages.

  Raises:
    DamageError: if the header does not describe the data.
  """
  try:
    length = int.from_bytes(data[:8], 'little')
    header = json.loads(bytes(data[8:8 + length]))
    metadata = header.pop('__metadata__', {})
    out = {}
    for name, entry in header.items():
      begin, end = entry['data_offsets']
      dtype, shape = _NAMES[entry['dtype']], entry['shape']
      if (end - begin != math.prod(shape) * dtype.itemsize
          or not 0 <= begin <= end <= len(data) - 8 - length):
        raise ValueError(f'{name}: offsets {begin} to {end}')
      if name.startswith(PAD):
        continue
      out[name] = np.frombuffer(
          data, dtype, math.prod(shape), 8 + length + begin
      ).reshape(shape)
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise errors.DamageError(
        f'{source}: expected a safetensors file, found a damaged header'
        f' ({e}): delete it, so that it is made again'
    ) from None
  for array in out.values():
    array.flags.writeable = False
  return out, metadata


def load(
    path: str | os.PathLike[str],
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Maps a file: (name -> read-only view into the page cache, metadata)."""
  with open(path, 'rb') as f:
    data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
  return unpack(data, os.fspath(path))


def read_header(path: str | os.PathLike[str]) -> dict[str, Entry]:
  """Returns name -> Entry of a file, checked against its size; reads no data.

  Args:
    path: of the file.

  Raises:
    NotFoundError: if it cannot be read.
    DamageError: if it is truncated, or the header does not describe the data.
  """
  source = os.fspath(path)
  try:
    with open(path, 'rb') as f:
      size = os.fstat(f.fileno()).st_size
      length = int.from_bytes(f.read(8), 'little')
      if not 2 <= length <= min(_MOST_HEADER, size - 8):
        raise _damage(source, f'a header of {length} bytes in {size}')
      text = f.read(length)
  except OSError as e:
    raise errors.NotFoundError(
        f'{source}: cannot read the file: {e.strerror}: fetch it again'
    ) from None
  try:
    header = strict_json(text)
  except ValueError as e:
    raise _damage(source, f'a header that is no JSON ({e})') from None
  if not isinstance(header, dict):
    raise _damage(source, 'a header that is no object')
  header.pop('__metadata__', None)
  base = 8 + length
  out = {
      name: _entry(source, name, value, base) for name, value in header.items()
  }
  end, last = base, 'the header'
  for name in sorted(out, key=lambda n: (out[n].start, out[n].nbytes)):
    entry = out[name]
    if entry.start != end:
      what = 'overlaps' if entry.start < end else 'leaves a hole behind'
      raise _damage(source, f'a tensor {name} that {what} {last}')
    end, last = entry.start + entry.nbytes, name
  if end != size:
    raise _damage(
        source, f'{size} bytes where the header tells of {end}: the file is'
        f' {"truncated" if size < end else "longer than it should be"}')
  return out


def strict_json(text: bytes) -> Any:
  """Returns parsed JSON.

  Args:
    text: UTF-8.

  Raises:
    ValueError: if it is no JSON, or a key occurs twice in an object.
  """
  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
      keys = [k for k, _ in pairs]
      twice = next(k for k in keys if keys.count(k) > 1)
      raise ValueError(f'key {twice!r} occurs twice')
    return out

  try:
    return json.loads(text, object_pairs_hook=unique)
  except RecursionError:
    raise ValueError('nested too deeply') from None


def _entry(source: str, name: str, value: Any, base: int) -> Entry:
  """Returns one tensor's Entry from its part of the header."""
  try:
    code, shape = value['dtype'], value['shape']
    begin, end = value['data_offsets']
    sizes = [*shape, begin, end]
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in sizes):
      raise ValueError
    bits = math.prod(shape) * _BITS[code]
  except (ValueError, KeyError, TypeError):
    raise _damage(
        source, f'a tensor {name} of dtype, shape or offsets that the format'
        f' does not know ({value!r:.120})') from None
  if bits != 8 * (end - begin):
    raise _damage(
        source, f'a tensor {name} of {end - begin} bytes for {code}'
        f' {list(shape)}')
  return Entry(code, tuple(shape), base + begin, end - begin)


def _damage(source: str, found: str) -> errors.DamageError:
  return errors.DamageError(
      f'{source}: expected a whole safetensors file, found {found}: fetch it'
      ' again')
