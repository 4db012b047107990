"""Aligned safetensors files: written piecewise, read as mapped views.

Format: github.com/huggingface/safetensors. Data begins at a multiple of 4096
and each tensor at a multiple of 64 bytes, so that mapped views can be used by
a device without a copy. The format allows no holes: what fills them is a U8
tensor whose name begins with PAD.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import mmap
import os

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


def layout(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    metadata: Mapping[str, str] | None = None,
) -> Layout:
  """Returns where each tensor goes, in the order given.

  Args:
    tensors: name -> (shape, dtype).
    metadata: strings kept in the header.
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
    if gap:
      add(f'{PAD}{at}', 'U8', (gap,), gap)
    dtype = np.dtype(dtype)
    add(name, _CODES[dtype], shape, math.prod(shape) * dtype.itemsize)
  text = json.dumps(header, separators=(',', ':')).encode('utf-8')
  base = -(-(8 + len(text)) // _DATA_ALIGN) * _DATA_ALIGN
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
