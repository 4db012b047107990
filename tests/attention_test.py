import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import attention
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import numerics

_ONE = np.float32(1)
_CHUNK, _PAGE, _WINDOW = 32, 16, 24


def _profile(dtype='float32', page=_PAGE, heads='unrolled'):
  return numerics.Profile(dtype, _CHUNK, 4, page, heads)


def _seen(queries, keys, window):
  return np.asarray(attention.visible(
      jnp.asarray(queries), jnp.asarray(keys), window)).astype(int).tolist()


def test_mask_of_a_global_layer():
  assert _seen([2, 3], [0, 1, 2, 3], None) == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_mask_of_a_window_counts_the_query_itself():
  assert _seen([3, 4], [0, 1, 2, 3, 4], 3) == [[0, 1, 1, 1, 0],
                                               [0, 0, 1, 1, 1]]
  assert _seen([4], [3, 4, 5], 1) == [[0, 1, 0]]


def test_mask_of_a_page_that_no_row_sees():
  assert _seen([40, 41], [0, 1, 2, 15], 24) == [[0] * 4] * 2  # Too old.
  assert _seen([40, 41], [48, 49], None) == [[0] * 2] * 2  # Not yet there.


def test_mask_at_both_ends_of_the_window():
  assert _seen([100], [76, 77, 100, 101], 24) == [[0, 1, 1, 0]]


@pytest.mark.parametrize('window', [None, 1, 5, 16, 17, 24])
@pytest.mark.parametrize('page', [4, 16])
def test_page_range_is_exactly_the_pages_seen(window, page):
  for first, rows in itertools.product(range(60), (1, 4, 7)):
    last = first + rows - 1
    lo, hi = attention.page_range(
        jnp.int32(first), jnp.int32(last), window, page)
    pages = {k // page for q in range(first, last + 1) for k in range(q + 1)
             if window is None or q - k < window}
    assert list(range(int(lo), int(hi))) == sorted(pages), (first, last)


class _Cache:
  """K and V of one layer, written and attended step by step."""

  def __init__(self, spec, profile, slots):
    self.spec, self.profile, self.first = spec, profile, None
    self.margin = 0 if spec.window is None else profile.chunk
    shape = (1, 1, slots + 2 * self.margin, spec.kv_heads, spec.head_dim)
    # Stale bits in every slot, as an earlier lap would have left them.
    stale = cache_lib.to_bits(jnp.full(shape, 3.0, jnp.float32), profile.dtype)
    self.k = self.v = stale

  def step(self, q, k, v, start):
    out, self.k, self.v = _step(
        q, k, v, self.k, self.v, np.int32(start), self.spec, self.profile,
        self.margin, _ONE, self.first)
    return np.asarray(out)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _step(
    q, k, v, k_cache, v_cache, start, spec, profile, margin, one, first=None):
  k_cache, v_cache = (
      cache_lib.write_rows(
          c, cache_lib.to_bits(rows, profile.dtype), 0, 0, start, margin)
      for c, rows in ((k_cache, k), (v_cache, v)))
  return attention.attend(
      q, k_cache, v_cache, layer=0, b=0, start=start, spec=spec,
      profile=profile, one=one, first_position=first)


def _random(length, spec, heads=4, seed=0):
  rng = np.random.default_rng(seed)
  def normal(n):
    return rng.normal(size=(length, n, spec.head_dim)).astype(np.float32)
  return normal(heads), normal(spec.kv_heads), normal(spec.kv_heads)


def _spec(kv_heads=2, window=_WINDOW, dim=32):
  return config_lib.AttentionSpec(kv_heads, dim, window, 10_000)


def _ordinary(q, k, v, spec):
  """Ordinary masked softmax attention in float64, [T, N, H]."""
  q, k, v = (x.astype(np.float64) for x in (q, k, v))
  groups = q.shape[1] // spec.kv_heads
  k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
  scores = np.einsum('qnh,knh->nqk', q, k)
  distance = np.arange(len(q))[:, None] - np.arange(len(q))[None]
  mask = distance >= 0
  if spec.window is not None:
    mask &= distance < spec.window
  scores = np.where(mask, scores, -np.inf)
  p = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum('nqk,knh->qnh', p / p.sum(-1, keepdims=True), v)


def _schedule(total, seed):
  """Steps (start, rows, valid): unaligned starts, padded chunks and tiles."""
  rng = np.random.default_rng(seed)
  at, steps = 0, []
  while at < total:
    rows = _CHUNK if rng.random() < 0.6 else 4
    valid = min(total - at, int(rng.integers(1, rows + 1)))
    steps.append((at, rows, valid))
    at += valid
  return steps


def _run(cache, q, k, v, steps, padding):
  """Returns the outputs of the valid rows; padded rows hold `padding`."""
  outputs = []
  for start, rows, valid in steps:
    parts = []
    for x in (q, k, v):
      part = np.full((rows,) + x.shape[1:], padding, np.float32)
      part[:valid] = x[start:start + valid]
      parts.append(part)
    outputs.append(cache.step(*parts, start)[:valid])
  return np.concatenate(outputs)


@pytest.mark.parametrize('window,kv_heads,heads', [
    (_WINDOW, 2, 'unrolled'), (None, 1, 'unrolled'), (None, 4, 'batched')])
def test_attend_against_ordinary_softmax(window, kv_heads, heads):
  spec, profile = _spec(kv_heads, window), _profile(heads=heads)
  total = 200
  q, k, v = _random(total, spec, seed=kv_heads)
  slots = 256 if window is None else cache_lib.ring_size(window, profile)
  got = _run(_Cache(spec, profile, slots), q, k, v, _schedule(total, 1), 0.0)
  np.testing.assert_allclose(
      got, _ordinary(q, k, v, spec), rtol=0, atol=2e-5)


def test_attend_in_bfloat16_is_ordinary_attention_of_rounded_rows():
  spec, profile = _spec(), _profile('bfloat16')
  q, k, v = (np.asarray(jnp.asarray(x).astype('bfloat16'), np.float32)
             for x in _random(64, spec))
  slots = cache_lib.ring_size(spec.window, profile)
  got = _run(_Cache(spec, profile, slots), q, k, v,
             [(0, 32, 32), (32, 32, 32)], 0.0)
  np.testing.assert_allclose(
      got, _ordinary(q, k, v, spec), rtol=0, atol=2e-2)


def test_ring_equals_a_cache_that_never_wraps():
  """Brute force over six laps of the ring, compared in bits."""
  spec, profile = _spec(), _profile()
  ring = cache_lib.ring_size(spec.window, profile)
  total = 6 * ring + 5
  q, k, v = _random(total, spec)
  for seed in range(4):
    steps = _schedule(total, seed)
    small = _run(_Cache(spec, profile, ring), q, k, v, steps, 1e3)
    large = _run(_Cache(spec, profile, 512), q, k, v, steps, 1e3)
    assert small.tobytes() == large.tobytes(), seed


def test_a_ring_of_one_page_less_fails():
  """Shows that the brute force above would notice."""
  spec, profile = _spec(), _profile()
  ring = cache_lib.ring_size(spec.window, profile)
  total = 6 * ring + 5
  q, k, v = _random(total, spec)
  steps = _schedule(total, 0)
  large = _run(_Cache(spec, profile, 512), q, k, v, steps, 1e3)
  small = _run(_Cache(spec, profile, ring - _PAGE), q, k, v, steps, 1e3)
  assert small.tobytes() != large.tobytes()


@pytest.mark.parametrize('window', [_WINDOW, None])
def test_rows_do_not_see_padding_stale_slots_or_capacity(window):
  spec, profile = _spec(window=window), _profile()
  total = 150
  q, k, v = _random(total, spec)
  steps = _schedule(total, 2)
  base = 256 if window is None else cache_lib.ring_size(window, profile)
  hashes = {
      _run(_Cache(spec, profile, slots), q, k, v, steps, padding).tobytes()
      for slots, padding in ((base, 0.0), (base, 1e4), (512, -1e4))}
  assert len(hashes) == 1


@pytest.mark.parametrize('window', [_WINDOW, None])
@pytest.mark.parametrize('first', [7, _PAGE, 75])
def test_nothing_in_front_of_the_first_position_is_seen(window, first):
  spec, profile = _spec(window=window), _profile()
  total = 150
  q, k, v = _random(total, spec)
  k[:first], v[:first] = 1e4, 1e4
  steps = [(first + at, rows, valid)
           for at, rows, valid in _schedule(total - first, 3)]
  slots = 256 if window is None else cache_lib.ring_size(window, profile)
  cache = _Cache(spec, profile, slots)
  for at in range(0, first, 4):
    cache.step(q[at:at + 4], k[at:at + 4], v[at:at + 4], at)
  cache.first = np.int32(first)
  got = _run(cache, q, k, v, steps, 0.0)
  np.testing.assert_allclose(
      got, _ordinary(q[first:], k[first:], v[first:], spec), rtol=0, atol=2e-5)
  if not first % _PAGE:  # By whole pages: not one bit changes.
    alone = _run(_Cache(spec, profile, slots), q[first:], k[first:], v[first:],
                 _schedule(total - first, 3), 0.0)
    assert got.tobytes() == alone.tobytes()


def test_a_skipped_page_leaves_the_state_as_it_is():
  rng = np.random.default_rng(0)
  state = tuple(rng.normal(size=s).astype(np.float32)
                for s in ((2, 6, 1), (2, 6, 1), (2, 6, 8)))
  page = tuple(x + 1 for x in state)
  seen = np.asarray([1, 0, 1, 0, 0, 1], bool)[None, :, None]
  merged = attention.merge(state, page, jnp.asarray(seen), _ONE)
  for before, after in zip(state, merged):
    same = np.asarray(after) == before
    assert same[:, ~seen[0, :, 0]].all() and not same[:, seen[0, :, 0]].any()


def test_merge_is_softmax_over_both_pages():
  q = np.zeros((1, 1, 2), np.float32) + 1
  k = np.random.default_rng(1).normal(size=(8, 1, 2)).astype(np.float32)
  v = np.random.default_rng(2).normal(size=(8, 1, 2)).astype(np.float32)
  mask = np.ones((1, 4), bool)
  state = (np.full((1, 1, 1), attention.MASKED, np.float32),
           np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 2), np.float32))
  for at in (0, 4):
    partial = attention.page_partial(
        *map(jnp.asarray, (q, k[at:at + 4], v[at:at + 4], mask)), True)
    state = attention.merge(state, partial, np.ones((1, 1, 1), bool), _ONE)
  scores = k[:, 0].astype(np.float64).sum(-1)
  p = np.exp(scores - scores.max())
  want = (p / p.sum()) @ v[:, 0].astype(np.float64)
  np.testing.assert_allclose((state[2] / state[1])[0, 0], want, rtol=1e-5)
