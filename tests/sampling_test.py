"""Sampling: order of the steps, ties, distribution, pinned draws."""

import dataclasses
import decimal
import math

import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax import sampling

_ROW = np.array([0.5, 2.0, -1.0, 1.25, 2.0, -3.5], np.float32)
_PINNED_UNIFORM = [
    float.fromhex(x) for x in (
        '0x1.ed7fd363d430cp-1',
        '0x1.ea263ab050129p-1',
        '0x1.06682aa6c6ebcp-2',
    )
]
_PINNED_DRAWS = [
    ({'temperature': 1.0},
     [762, 199, 241, 4003, 1639, 3430, 1940, 665]),
    ({'temperature': 1.0, 'top_k': 64, 'top_p': 0.95},
     [2639, 1741, 1042, 754, 665, 1563, 3338, 1364]),
    ({'temperature': 0.6, 'top_p': 0.5},
     [2550, 1131, 3770, 144, 3393, 398, 521, 754]),
    ({'temperature': 0.0},
     [987, 987, 987, 987, 987, 987, 987, 987]),
]


def _wide_row(seed=0, size=4096):
  """Multiples of 1/64 in [-8, 8), scattered, the same wherever tests run."""
  ids = np.arange(size, dtype=np.uint64) + np.uint64(seed * size)
  hashed = (ids * np.uint64(2654435761)) % np.uint64(2**32)
  return (hashed >> np.uint64(22)).astype(np.float32) / 64 - 8


def _draws(row, count, **kwargs):
  return [sampling.sample(row, position=i, **kwargs) for i in range(count)]


def test_greedy_takes_the_first_maximum():
  assert sampling.sample(_ROW) == 1
  assert sampling.sample(_ROW[::-1]) == 1  # the other 2.0, moved to the front
  # The other parameters do not matter at temperature 0.
  assert sampling.sample(_ROW, top_k=1, top_p=0.1, seed=9, position=7) == 1


def test_top_one_gives_a_tie_to_the_lower_id():
  assert set(_draws(_ROW, 50, temperature=1.0, top_k=1)) == {1}
  # Ids 3, 1, 4, 0 in order of size with 1 and 4 equal: of two, keep 3 and 1.
  row = np.array([0.0, 2.0, -1.0, 2.5, 2.0], np.float32)
  assert set(_draws(row, 200, temperature=1.0, top_k=2)) == {1, 3}


def test_top_p_keeps_the_fewest_that_reach_it():
  # Probabilities 1/2, 1/4, 1/8, 1/8.
  row = np.log(np.array([0.25, 0.5, 0.125, 0.125])).astype(np.float32)
  for top_p, expected in (
      (0.3, {1}), (0.6, {0, 1}), (0.8, {0, 1, 2}), (0.9, {0, 1, 2, 3}),
      (1.0, {0, 1, 2, 3}),
  ):
    got = set(_draws(row, 400, temperature=1.0, top_p=top_p))
    assert got == expected, top_p


def test_top_k_comes_before_top_p():
  # Probabilities 0.4, 0.3, 0.2, 0.1. Of the first two alone the larger holds
  # 4/7 > 0.55, so one is left; top-p first would leave two.
  row = np.log(np.array([0.1, 0.4, 0.2, 0.3])).astype(np.float32)
  assert set(_draws(row, 300, temperature=1.0, top_p=0.55)) == {1, 3}
  assert set(_draws(row, 300, temperature=1.0, top_p=0.55, top_k=2)) == {1}


def test_temperature_comes_before_top_p():
  row = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
  # At temperature 1/2 the largest holds 16/30 > 0.5.
  assert set(_draws(row, 200, temperature=0.5, top_p=0.5)) == {0}
  assert set(_draws(row, 200, temperature=1.0, top_p=0.5)) == {0, 1}


@pytest.mark.parametrize('kwargs', [
    {'temperature': 1.0},
    {'temperature': 0.7},
    {'temperature': 2.0, 'top_k': 4},
    {'temperature': 1.0, 'top_p': 0.9},
])
def test_draws_follow_the_exact_probabilities(kwargs):
  count = 3000
  scaled = _ROW.astype(np.float64) / kwargs['temperature']
  weights = np.exp(scaled)
  order = sorted(range(_ROW.size), key=lambda i: (-_ROW[i], i))
  order = order[:kwargs.get('top_k') or None]
  total, reached, kept = weights[order].sum(), 0.0, []
  for i in order:
    if reached >= kwargs.get('top_p', 1.0) * total:
      break
    reached += weights[i]
    kept.append(i)
  expected = np.zeros(_ROW.size)
  expected[kept] = weights[kept] / weights[kept].sum()

  got = np.bincount(_draws(_ROW, count, seed=3, **kwargs), minlength=_ROW.size)
  assert not got[expected == 0].any()
  seen = expected > 0
  # Chi-squared with at most 5 degrees of freedom: 20.5 has p = 0.001. The
  # seed is fixed, so this passes always or never.
  chi = (got[seen] - count * expected[seen]) ** 2 / (count * expected[seen])
  assert chi.sum() < 20.5


def test_each_of_seed_sample_and_position_moves_the_draw():
  row = np.zeros(1 << 16, np.float32)
  base = {'seed': 5, 'sample_index': 6, 'position': 7}
  first = sampling.sample(row, temperature=1.0, **base)
  assert first == sampling.sample(row, temperature=1.0, **base)
  for name in base:
    moved = dict(base, **{name: base[name] + 1})
    assert sampling.sample(row, temperature=1.0, **moved) != first
  swapped = dict(base, sample_index=7, position=6)
  assert sampling.sample(row, temperature=1.0, **swapped) != first


def test_pinned_draws():
  # The uniform has these bits on every platform.
  assert [sampling.uniform(0, 0, 0), sampling.uniform(1, 2, 3),
          sampling.uniform(2**64 - 1, 0, 131071)] == _PINNED_UNIFORM
  row = _wide_row()
  for kwargs, expected in _PINNED_DRAWS:
    assert _draws(row, 8, seed=11, **kwargs) == expected, kwargs


def test_a_draw_does_not_depend_on_the_others():
  rows = [_wide_row(seed) for seed in range(4)]
  kwargs = {'temperature': 0.8, 'top_k': 50, 'top_p': 0.9, 'seed': 2}
  keys = [(r, s, p) for r in range(4) for s in range(3) for p in (0, 17)]

  def run(order):
    return {
        (r, s, p): sampling.sample(
            rows[r], sample_index=s, position=p, **kwargs)
        for r, s, p in order
    }

  forward = run(keys)
  assert forward == run(keys[::-1])
  assert all(run([k])[k] == forward[k] for k in keys)
  # A row that is a slice of a batch, not contiguous, is the same row.
  batch = np.stack(rows, axis=1)
  assert forward[(2, 1, 17)] == sampling.sample(
      batch[:, 2], sample_index=1, position=17, **kwargs)


def test_a_permuted_vocabulary_permutes_the_draw():
  row = np.unique(_wide_row())  # no ties
  permutation = np.random.Generator(np.random.PCG64(1)).permutation(row.size)
  kwargs = {'temperature': 1.0, 'top_k': 40, 'seed': 4}
  for position in range(20):
    token = sampling.sample(row, position=position, **kwargs)
    moved = sampling.sample(row[permutation], position=position, **kwargs)
    assert permutation[moved] == token


def test_every_top_k_agrees_with_a_full_sort():
  row = _wide_row(size=300)  # many ties among 1024 values
  row = np.round(row)
  order = sorted(range(row.size), key=lambda i: (-row[i], i))
  for top_k in (0, 1, 2, 7, 64, 299, 300, 1000):
    got = sampling._top_ids(row, top_k)
    assert got.tolist() == order[:top_k or None], top_k


def test_exp_is_accurate_and_free_of_subnormals():
  x = -np.concatenate([
      np.linspace(0, 2, 2001), np.linspace(2, 699.9, 4001)])
  got = sampling._exp(x)
  exact = np.array([math.exp(v) for v in x])
  assert (np.abs(got - exact) <= 2 * np.spacing(exact)).all()
  assert got[0] == 1.0
  assert sampling._exp(np.array([-700.5, -1e300, -np.inf])).tolist() == [0] * 3


def test_cumulative_sums_run_first_to_last():
  values = np.random.Generator(np.random.PCG64(0)).random(5000)
  total, sums = 0.0, []
  for value in values:
    total += value
    sums.append(total)
  assert np.cumsum(values).tolist() == sums


def test_a_tiny_temperature_is_greedy():
  for temperature in (1e-12, 1e-300, 5e-324):
    assert set(_draws(_ROW, 50, temperature=temperature)) == {1, 4}
    assert set(_draws(_ROW, 20, temperature=temperature, top_k=1)) == {1}


@pytest.mark.parametrize('name,value', [
    ('temperature', -0.1), ('temperature', math.nan),
    ('temperature', math.inf), ('temperature', '1'), ('temperature', True),
    ('top_k', -1), ('top_k', 2.0), ('top_k', False),
    ('top_p', 0.0), ('top_p', 1.01), ('top_p', math.nan), ('top_p', None),
    ('seed', -1), ('seed', 2**64), ('seed', 1.5),
    ('sample_index', -1), ('position', -1), ('position', 0.5),
])
def test_bad_parameters_name_themselves(name, value):
  with pytest.raises(errors.UsageError) as raised:
    sampling.sample(_ROW, **{name: value})
  message = str(raised.value)
  assert message.startswith(f'{name}: expected ') and '\n' not in message
  assert str(value) in message
  if name in ('temperature', 'top_k', 'top_p', 'seed'):
    params = dataclasses.replace(sampling.SamplingParams(), **{name: value})
    with pytest.raises(errors.UsageError):
      params.check()


def test_numpy_scalars_are_parameters_too():
  sampling.SamplingParams(
      np.float32(0.5), np.int32(3), np.float64(0.9), np.int64(1)
  ).check()


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
  row = _ROW.copy()
  row[3] = bad
  for call in (
      lambda: sampling.sample(row),
      lambda: sampling.sample(row, temperature=1.0),
      lambda: sampling.kl_divergence(_ROW, row),
      lambda: sampling.kl_divergence(row, _ROW),
      lambda: sampling.log_softmax_at(row, 0),
  ):
    with pytest.raises(errors.NumericsError, match='at id 3 .1 of 6'):
      call()


def test_shapes_and_tokens_are_checked():
  with pytest.raises(errors.UsageError, match='shape'):
    sampling.sample(np.zeros((1, 4), np.float32))
  with pytest.raises(errors.UsageError, match='one size'):
    sampling.kl_divergence(_ROW, _ROW[:5])
  for token in (-1, 6):
    with pytest.raises(errors.UsageError, match='token'):
      sampling.log_softmax_at(_ROW, token)


def test_kl_divergence():
  wide = _wide_row()
  assert sampling.kl_divergence(wide, wide.copy()) == 0.0
  p, q = np.array([0.5, 0.25, 0.25]), np.array([0.125, 0.125, 0.75])
  p_row, q_row = np.log(p).astype(np.float32), np.log(q).astype(np.float32)
  # 1/2 ln 4 + 1/4 ln 2 + 1/4 ln 1/3
  exact = 1.25 * math.log(2) - 0.25 * math.log(3)
  assert sampling.kl_divergence(p_row, q_row) == pytest.approx(exact, abs=1e-7)
  # A shift of all logits changes no probability.
  assert sampling.kl_divergence(wide, wide + np.float32(8)) < 1e-14
  nudged = wide.copy()
  nudged[5] = np.nextafter(nudged[5], np.float32(99))
  assert sampling.kl_divergence(wide, nudged) >= 0.0


@pytest.mark.parametrize('scale', [1e-14, 1e-9, 3e-4, 2e-3, 0.5, 40.0])
def test_kl_divergence_of_rows_that_nearly_agree(scale):
  """Against sixty digits, where the plain formula gives nothing but noise."""
  rng = np.random.default_rng(1)
  p_row = rng.normal(size=50) * 4
  q_row = p_row + scale * rng.normal(size=50)
  with decimal.localcontext(prec=60):
    p, q = ([decimal.Decimal(float(v)).exp() for v in row]
            for row in (p_row, q_row))
    total_p, total_q = sum(p), sum(q)
    exact = sum(a / total_p * ((a / total_p) / (b / total_q)).ln()
                for a, b in zip(p, q))
  found = sampling.kl_divergence(p_row, q_row)
  assert found > 0
  assert found == pytest.approx(float(exact), rel=1e-9)


def test_log_softmax_at():
  row = _wide_row()
  values = row.astype(np.float64)
  exact = math.log(math.fsum(math.exp(v) for v in values))
  for token in (0, 17, 4095):
    assert sampling.log_softmax_at(row, token) == pytest.approx(
        values[token] - exact, abs=1e-12)
