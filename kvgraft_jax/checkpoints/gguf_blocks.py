"""GGUF storage types: how a block of bytes becomes float32 values.

Layouts: github.com/ggml-org/ggml `ggml-common.h`; the arithmetic is that of the
public `gguf` package, to the bit.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

# What the sixteen codes of the IQ4 types stand for.
_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10,
     1, 13, 25, 38, 53, 69, 89, 113], np.int8,
)


@dataclasses.dataclass(frozen=True)
class Block:
  """A storage type: `values` elements in `nbytes` bytes.

  Attributes:
    name: such as 'Q4_K'.
    values: elements of a block, all in one row.
    nbytes: bytes of a block.
    unpack: uint8 [n, nbytes] -> float32 [n, values].
  """

  name: str
  values: int
  nbytes: int
  unpack: Callable[[np.ndarray], np.ndarray]


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
  """Returns the float16 at byte `start` of each block as float32 [n, 1]."""
  pair = np.ascontiguousarray(blocks[:, start:start + 2])
  return pair.view('<f2').astype(np.float32)


def _fields(packed: np.ndarray, run: int, bits: int) -> np.ndarray:
  """Returns the fields of `bits` bits, the lowest of each run of bytes first.

  Args:
    packed: uint8 [n, m * run].
    run: bytes behind which the next higher field follows.
    bits: 1, 2 or 4.

  Returns:
    uint8 [n, m * run * 8 / bits].
  """
  runs = packed.reshape(len(packed), -1, 1, run)
  mask = np.uint8((1 << bits) - 1)
  fields = [runs >> np.uint8(s) & mask for s in range(0, 8, bits)]
  return np.concatenate(fields, axis=2).reshape(len(packed), -1)


def _scaled(scale: np.ndarray, q: np.ndarray) -> np.ndarray:
  """Returns each scale [n, k] times its share of q [n, k * m]."""
  parts = q.reshape(*scale.shape, -1)
  return (scale[:, :, None] * parts).reshape(q.shape)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns eight scales and eight minima of uint8 [n, 12]."""
  a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
  scale = np.concatenate([a & 63, c & 15 | (a >> 6) << 4], axis=1)
  minimum = np.concatenate([b & 63, c >> 4 | (b >> 6) << 4], axis=1)
  return scale, minimum


def _f32(blocks: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(blocks).view('<f4').astype(np.float32)


def _f16(blocks: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(blocks).view('<f2').astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
  high = np.ascontiguousarray(blocks).view('<u2').astype(np.uint32)
  return (high << np.uint32(16)).view(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
  """d, 32 nibbles; value d * (q - 8)."""
  q = _fields(blocks[:, 2:], 16, 4).view(np.int8) - np.int8(8)
  return _half(blocks, 0) * q


def _q4_1(blocks: np.ndarray) -> np.ndarray:
  """d, m, 32 nibbles; value d * q + m."""
  q = _fields(blocks[:, 4:], 16, 4)
  return _half(blocks, 0) * q + _half(blocks, 2)


def _fifth(blocks: np.ndarray, start: int) -> np.ndarray:
  """Returns 32 five-bit values: four bytes of high bits, then nibbles."""
  high = np.unpackbits(
      blocks[:, start:start + 4], axis=1, bitorder='little'
  )
  return _fields(blocks[:, start + 4:], 16, 4) | high << np.uint8(4)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
  """d, 32 fifth bits, 32 nibbles; value d * (q - 16)."""
  q = _fifth(blocks, 2).view(np.int8) - np.int8(16)
  return _half(blocks, 0) * q


def _q5_1(blocks: np.ndarray) -> np.ndarray:
  """d, m, 32 fifth bits, 32 nibbles; value d * q + m."""
  return _half(blocks, 0) * _fifth(blocks, 4) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
  """d, 32 x int8."""
  return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
  """16 nibble pairs of scale and minimum, 256 bit pairs, d, dmin."""
  scale = _half(blocks, 80) * (blocks[:, :16] & 15)
  minimum = _half(blocks, 82) * (blocks[:, :16] >> 4)
  values = _scaled(scale, _fields(blocks[:, 16:80], 32, 2))
  return values - np.repeat(minimum, 16, axis=1)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
  """256 high bits, 256 bit pairs, 16 six-bit scales, d.

  Value d * (s - 32) * q; a high bit of 0 takes 4 from q.
  """
  low, high = blocks[:, 96:104], blocks[:, 104:108]
  scale = _fields(low, 8, 4) | _fields(high, 4, 2) << np.uint8(4)
  scale = scale.view(np.int8) - np.int8(32)
  q = _fields(blocks[:, 32:96], 32, 2) | (
      _fields(blocks[:, :32], 32, 1) << np.uint8(2)
  )
  return _scaled(
      _half(blocks, 108) * scale, q.view(np.int8) - np.int8(4)
  )


def _q4_k(blocks: np.ndarray) -> np.ndarray:
  """d, dmin, 8 six-bit scales and minima, 256 nibbles."""
  scale, minimum = _six_bits(blocks[:, 4:16])
  values = _scaled(_half(blocks, 0) * scale, _fields(blocks[:, 16:], 32, 4))
  return values - np.repeat(_half(blocks, 2) * minimum, 32, axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
  """d, dmin, 8 six-bit scales and minima, 256 fifth bits, 256 nibbles."""
  scale, minimum = _six_bits(blocks[:, 4:16])
  q = _fields(blocks[:, 48:], 32, 4) | (
      _fields(blocks[:, 16:48], 32, 1) << np.uint8(4)
  )
  values = _scaled(_half(blocks, 0) * scale, q)
  return values - np.repeat(_half(blocks, 2) * minimum, 32, axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
  """256 nibbles, 256 bit pairs, 16 int8 scales, d; value d * s * (q - 32)."""
  q = _fields(blocks[:, :128], 64, 4) | (
      _fields(blocks[:, 128:192], 32, 2) << np.uint8(4)
  )
  scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
  return _scaled(scale, q.view(np.int8) - np.int8(32))


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
  """d, 32 nibbles; value d * table[q]."""
  return _half(blocks, 0) * _IQ4[_fields(blocks[:, 2:], 16, 4)]


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
  """d, 8 six-bit scales, 256 nibbles; value d * (s - 32) * table[q]."""
  low = _fields(blocks[:, 4:8], 1, 4)
  high = _fields(blocks[:, 2:4], 1, 2)
  scale = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
  q = _fields(blocks[:, 8:], 16, 4)
  return _scaled(_half(blocks, 0) * scale, _IQ4[q])


# By the number in the file.
TYPES = {
    0: Block('F32', 1, 4, _f32),
    1: Block('F16', 1, 2, _f16),
    2: Block('Q4_0', 32, 18, _q4_0),
    3: Block('Q4_1', 32, 20, _q4_1),
    6: Block('Q5_0', 32, 22, _q5_0),
    7: Block('Q5_1', 32, 24, _q5_1),
    8: Block('Q8_0', 32, 34, _q8_0),
    10: Block('Q2_K', 256, 84, _q2_k),
    11: Block('Q3_K', 256, 110, _q3_k),
    12: Block('Q4_K', 256, 144, _q4_k),
    13: Block('Q5_K', 256, 176, _q5_k),
    14: Block('Q6_K', 256, 210, _q6_k),
    20: Block('IQ4_NL', 32, 18, _iq4_nl),
    23: Block('IQ4_XS', 256, 136, _iq4_xs),
    30: Block('BF16', 1, 2, _bf16),
}
BY_NAME = {block.name: block for block in TYPES.values()}
# Names of the others, for messages.
OTHERS = {
    9: 'Q8_1', 15: 'Q8_K', 16: 'IQ2_XXS', 17: 'IQ2_XS', 18: 'IQ3_XXS',
    19: 'IQ1_S', 21: 'IQ3_S', 22: 'IQ2_S', 24: 'I8', 25: 'I16', 26: 'I32',
    27: 'I64', 28: 'F64', 29: 'IQ1_M', 34: 'TQ1_0', 35: 'TQ2_0', 39: 'MXFP4',
    40: 'NVFP4', 41: 'Q1_0',
}
