"""Rotary rows against exact values, stored hashes and batching."""

import dataclasses
import decimal
import hashlib

import numpy as np
import pytest

from kvgraft_jax import config
from kvgraft_jax import errors
from kvgraft_jax import rope

LOCAL = config.PRESETS['gemma3-270m'].sliding
GLOBAL = config.PRESETS['gemma3-270m'].full
SCALED = config.PRESETS['gemma3-4b'].full
PARTIAL = config.PRESETS['gemma4-e2b'].full
SPECS = {
    'local': LOCAL, 'global': GLOBAL, 'scaled': SCALED, 'partial': PARTIAL}
# The ends of the range, page and block borders, and published context ends.
POSITIONS = (0, 1, 2, 127, 128, 511, 512, 8191, 32767, 131071, 2**24 - 1, 2**24)

# SHA-256 of cos then sin, little-endian float32, of POSITIONS.
HASHES = {
    'local':
        '911c806d2d8c0ec7c925fbea8df37619652fa1bd1576060f2a7705c4ab447576',
    'global':
        'cb9820cfb3d1d4c46bf928476c7303078e12adfa2ee8c08393c2d25aaf9de613',
    'scaled':
        'b053c1609cfd9d38158fa0fda120e57f312035c316eedcc9c1c114d71d1a8e3a',
    'partial':
        'f150e7956d28f7b2b0bcc62b73d909088f40b05c74ea2e109de4ba533f693eb9',
}
# The same of FAR_POSITIONS, which are beyond what any model was trained for.
FAR_POSITIONS = (1_000_000, 4_000_000, 2**24 - 1)
FAR_HASHES = {
    'local':
        '98800e2e8b9ce6bb8af4eb6499e6ba73846c213d3c7f6d1f90c23b35d774a24d',
    'global':
        'cf8e67525cb87ac844bbb9a8de509fb03f10b01c96c8bdf3fa5fb05fd32be130',
    'scaled':
        'e49e8de8bf057af45e4193ff85359eaa166db4ee3731560d6d65a534fba7d1a6',
    'partial':
        '7cfc7c10b3eda2c16d307cddf7d851828e8b37b68e623d5f30b689617d822051',
}


def _pi() -> decimal.Decimal:
  """Returns pi by Machin's formula, at the precision in force."""

  def arctan_inverse(n: int) -> decimal.Decimal:
    total, power, k = decimal.Decimal(0), 1 / decimal.Decimal(n), 1
    while total + power / k != total:
      total += power / k
      power /= -n * n
      k += 2
    return total

  return 4 * (4 * arctan_inverse(5) - arctan_inverse(239))


def _exact(
    position: int,
    pair: int,
    spec: config.AttentionSpec,
    pi: decimal.Decimal,
) -> list[decimal.Decimal]:
  """Returns [cos, sin] of one angle by Taylor series in decimals."""
  exponent = decimal.Decimal(-2 * pair) / spec.head_dim
  angle = decimal.Decimal(spec.rope_theta) ** exponent
  angle = (angle * position / spec.rope_divisor) % (2 * pi)
  sums, term, k = [decimal.Decimal(0)] * 2, decimal.Decimal(1), 0
  while k < 8 or abs(term) > decimal.Decimal('1e-40'):
    sums[k % 2] += -term if k % 4 >= 2 else term
    k += 1
    term *= angle / k
  return sums


def _ulps(value: np.float32, exact: decimal.Decimal) -> decimal.Decimal:
  """Returns the distance in units of the last place of the exact value."""
  unit = float(np.spacing(np.abs(np.float32(float(exact)))))
  return abs(decimal.Decimal(float(value)) - exact) / decimal.Decimal(unit)


@pytest.mark.parametrize('name', SPECS)
def test_rows_are_correctly_rounded(name):
  spec = SPECS[name]
  positions = (0, 1, 8191, 131071, *FAR_POSITIONS)
  cos, sin = rope.rope_rows(np.array(positions), spec)
  worst = decimal.Decimal(0)
  with decimal.localcontext(prec=60):
    pi = _pi()
    for row, position in enumerate(positions):
      for pair in range(spec.rope_pairs or spec.head_dim // 2):
        exact_cos, exact_sin = _exact(position, pair, spec, pi)
        worst = max(
            worst,
            _ulps(cos[row, pair], exact_cos),
            _ulps(sin[row, pair], exact_sin),
        )
  # Half a unit is exact rounding: all of these values have it.
  assert worst <= decimal.Decimal('0.5')


@pytest.mark.parametrize('name', SPECS)
@pytest.mark.parametrize('positions, hashes', [
    (POSITIONS, HASHES), (FAR_POSITIONS, FAR_HASHES)], ids=['all', 'far'])
def test_rows_have_the_stored_bits(name, positions, hashes):
  cos, sin = rope.rope_rows(np.array(positions), SPECS[name])
  data = cos.astype('<f4').tobytes() + sin.astype('<f4').tobytes()
  assert hashlib.sha256(data).hexdigest() == hashes[name]


def test_a_row_does_not_depend_on_its_batch():
  positions = np.random.default_rng(0).integers(0, 2**24, 300)
  positions = np.concatenate([positions, np.arange(300)])
  cos, sin = rope.rope_rows(positions, GLOBAL)
  for size in (1, 4, 7, 64):
    for start in range(0, positions.size, 97):
      part = slice(start, start + size)
      part_cos, part_sin = rope.rope_rows(positions[part], GLOBAL)
      np.testing.assert_array_equal(part_cos, cos[part])
      np.testing.assert_array_equal(part_sin, sin[part])


def test_shape_dtype_and_first_row():
  cos, sin = rope.rope_rows(np.arange(3), LOCAL)
  assert cos.shape == sin.shape == (3, 128)
  assert cos.dtype == sin.dtype == np.float32
  assert (cos[0] == 1).all() and (sin[0] == 0).all()
  assert not np.signbit(sin[0]).any()
  cos, sin = rope.rope_rows(np.arange(0), LOCAL)
  assert cos.shape == sin.shape == (0, 128)


def test_pairs_behind_rope_pairs_stay_put():
  partial = dataclasses.replace(GLOBAL, rope_pairs=64)
  cos, sin = rope.rope_rows(np.array(POSITIONS), partial)
  whole_cos, whole_sin = rope.rope_rows(np.array(POSITIONS), GLOBAL)
  np.testing.assert_array_equal(cos[:, :64], whole_cos[:, :64])
  np.testing.assert_array_equal(sin[:, :64], whole_sin[:, :64])
  assert (cos[:, 64:] == 1).all() and (sin[:, 64:] == 0).all()


def test_divisor_divides_the_angle():
  positions = np.arange(1000)
  scaled = rope.rope_rows(8 * positions, SCALED)
  plain = rope.rope_rows(positions, GLOBAL)
  np.testing.assert_array_equal(scaled[0], plain[0])
  np.testing.assert_array_equal(scaled[1], plain[1])


@pytest.mark.parametrize('position', [-1, 2**24 + 1])
def test_a_position_out_of_range_is_refused(position):
  with pytest.raises(errors.CapacityError, match='outside 0..16777216'):
    rope.rope_rows(np.array([5, position]), LOCAL)
