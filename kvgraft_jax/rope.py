"""Rotary rows from the host, bit-equal on every machine.

Angles are counted in quarter turns. Constants come from 60-digit decimals; at
run time only float64 additions, subtractions and multiplications occur, each
its own numpy call, so that neither libm, nor the SIMD level, nor a fused
multiply-add can reach the bits.

Errors: the angle is off by less than 2**-57 quarter turns up to position 2**24
(`position * hi` is exact), the polynomials by less than 2**-47 of the result.
So the float32 values are correctly rounded but for ties missed by as little.
"""

import decimal
import functools

import numpy as np

from kvgraft_jax import config
from kvgraft_jax import errors

MAX_POSITION = 1 << 24

_PI = '3.14159265358979323846264338327950288419716939937510582097494459230782'
_DIGITS = 60
_TERMS = 8
# A position has 24 bits, so 29 bits are left for an exact product.
_HI_BITS = 29
# Adding and subtracting it rounds to the nearest integer, ties to even.
_ROUNDER = 1.5 * 2.0**52
# Values worked on at once: small enough for the caches of a core.
_BLOCK = 8192


def rope_rows(
    positions: np.ndarray, spec: config.AttentionSpec
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rotary rows of `positions`.

  Args:
    positions: integers [R], each in [0, 2**24].
    spec: attention spec with head dim H; pairs behind `rope_pairs` stay put.

  Returns:
    (cos, sin), float32 [R, H / 2]; a row depends on its own position only.

  Raises:
    CapacityError: if a position is out of range.
  """
  positions = np.asarray(positions)
  if positions.size and not (
      0 <= positions.min() and positions.max() <= MAX_POSITION
  ):
    raise errors.CapacityError(
        f'rotary position {positions.min()}..{positions.max()} is outside'
        f' 0..{MAX_POSITION}; use a shorter context'
    )
  hi, lo = _frequencies(spec)
  sin_terms, cos_terms = _polynomials()
  rows, pairs = positions.size, hi.size
  cos = np.ones((rows, spec.head_dim // 2), np.float32)
  sin = np.zeros_like(cos)
  step = max(1, _BLOCK // max(1, pairs))
  for start in range(0, rows, step):
    block = slice(start, start + step)
    place = positions[block, None].astype(np.float64)
    angle = place * hi
    quadrant = (angle + _ROUNDER) - _ROUNDER
    angle -= quadrant
    angle += place * lo
    square = angle * angle
    odd = _evaluate(sin_terms, square)
    odd *= angle
    even = _evaluate(cos_terms, square)
    quarter = quadrant.astype(np.int32)
    swapped = (quarter & 1).astype(bool)
    # 1.0 - {0, 2}: the sign of each after that many quarter turns.
    cos[block, :pairs] = np.where(swapped, odd, even) * (
        1.0 - ((quarter + 1) & 2)
    )
    sin[block, :pairs] = np.where(swapped, even, odd) * (1.0 - (quarter & 2))
  return cos, sin


def _evaluate(terms: tuple[float, ...], square: np.ndarray) -> np.ndarray:
  """Returns the polynomial in `square` by Horner's rule, highest term first."""
  value = square * terms[0]
  for term in terms[1:-1]:
    value += term
    value *= square
  value += terms[-1]
  return value


@functools.lru_cache(maxsize=64)
def _frequencies(spec: config.AttentionSpec) -> tuple[np.ndarray, np.ndarray]:
  """Returns quarter turns per position as float64 (hi, lo), one per pair."""
  pairs = spec.head_dim // 2
  if spec.rope_pairs is not None:
    pairs = min(pairs, spec.rope_pairs)
  hi, lo = np.empty(pairs), np.empty(pairs)
  with decimal.localcontext(prec=_DIGITS):
    ratio = (-2 * decimal.Decimal(spec.rope_theta).ln() / spec.head_dim).exp()
    turn = 2 / (decimal.Decimal(_PI) * spec.rope_divisor)
    for i in range(pairs):
      hi[i] = _leading_bits(turn)
      lo[i] = float(turn - decimal.Decimal(float(hi[i])))
      turn *= ratio
  return hi, lo


def _leading_bits(value: decimal.Decimal) -> float:
  """Returns `value` cut to its leading bits."""
  mantissa, exponent = float(value).as_integer_ratio()
  drop = max(0, mantissa.bit_length() - _HI_BITS)
  return (mantissa >> drop << drop) / exponent


@functools.cache
def _polynomials() -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns terms of sin(pi/2 r) / r and cos(pi/2 r) in r**2, highest first.

  Taylor terms: |r| <= 0.54 leaves less than 2**-47 behind the last one.
  """
  sin_terms, cos_terms = [], []
  with decimal.localcontext(prec=_DIGITS):
    half_pi = decimal.Decimal(_PI) / 2
    term = decimal.Decimal(1)
    for i in range(_TERMS):
      sign = -1 if i % 2 else 1
      cos_terms.append(float(sign * term))
      term *= half_pi / (2 * i + 1)
      sin_terms.append(float(sign * term))
      term *= half_pi / (2 * i + 2)
  return tuple(sin_terms[::-1]), tuple(cos_terms[::-1])
