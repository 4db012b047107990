"""Attention as page partials merged in ascending order.

For every page: scores, the page's own maximum, unnormalised weights, their
sum and the weighted values. Partials are merged by ascending absolute page
number in float32 with the online-softmax formula (arXiv:1805.02867), and a
page that a row cannot see is skipped by a select on the merged state. So a
row's bits depend neither on the cache's capacity, nor on how many pages were
skipped, nor on where a page lives.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import layers
from kvgraft_jax import numerics

# Finite, so that no difference of two of them is NaN.
MASKED = -1e30
# Rows handled at once; smaller steps handle all theirs. Rows of a later block
# see fewer masked pages, which halves the work of a sliding layer.
ROW_BLOCK = 128

# m [K, R * G, 1], l [K, R * G, 1], acc [K, R * G, H], float32.
State = tuple[jax.Array, jax.Array, jax.Array]


def visible(
    q_positions: jax.Array, k_positions: jax.Array, window: int | None
) -> jax.Array:
  """Returns bool [Q, P]: key is not later, and inside the window.

  The window counts the query's own position.
  """
  distance = q_positions[:, None] - k_positions[None, :]
  seen = distance >= 0
  return seen if window is None else seen & (distance < window)


def _dot(a, b, dims, unrolled: bool) -> jax.Array:
  """Batched dot over the kv heads (leading axis of both), float32 out."""
  precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  if not unrolled:
    return lax.dot_general(
        a, b, (((2,), (dims,)), ((0,), (0,))), precision=precision,
        preferred_element_type=jnp.float32)
  return jnp.stack([
      lax.dot_general(
          a[h], b[h], (((1,), (dims - 1,)), ((), ())), precision=precision,
          preferred_element_type=jnp.float32)
      for h in range(a.shape[0])
  ])


def page_partial(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, unrolled: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns one page's maximum, weight sum and weighted values.

  Args:
    q: [K, Q * G, H], scaled, in the compute dtype.
    k: [P, K, H].
    v: [P, K, H].
    mask: bool [Q, P].
    unrolled: one product a kv head instead of a batched one.

  Returns:
    m [K, QG, 1], l [K, QG, 1], acc [K, QG, H], all float32.
  """
  groups = q.shape[1] // mask.shape[0]
  k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
  mask = jnp.repeat(mask, groups, axis=0)[None]
  scores = jnp.where(mask, _dot(q, k, 2, unrolled), MASKED)
  m = layers.tree_max(scores)
  p = jnp.exp(scores - m)
  l = layers.tree_sum(p)
  acc = _dot(p.astype(v.dtype), v, 1, unrolled)
  return m, l, acc


def merge(state, partial, seen: jax.Array, one: jax.Array):
  """Folds a page's partial into the running (m, l, acc).

  Args:
    state: m, l, acc of the pages in front.
    partial: m, l, acc of this page.
    seen: bool [1, QG, 1], whether the row sees anything of this page.
    one: the seal.
  """
  m, l, acc = state
  m_page, l_page, acc_page = partial
  m_new = jnp.maximum(m, m_page)
  old, new = jnp.exp(m - m_new), jnp.exp(m_page - m_new)
  return (
      jnp.where(seen, m_new, m),
      jnp.where(seen, l * old * one + l_page * new * one, l),
      jnp.where(seen, acc * old * one + acc_page * new * one, acc),
  )


def page_range(
    first: jax.Array, last: jax.Array, window: int | None, page: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the pages [lo, hi) that queries at positions first..last see."""
  hi = last // page + 1
  if window is None:
    return jnp.zeros_like(hi), hi
  return jnp.maximum(first - window + 1, 0) // page, hi


def by_kv_head(
    q: jax.Array, spec: config_lib.AttentionSpec, dtype: str
) -> jax.Array:
  """Returns float32 queries [R, N, H] as [K, R * G, H] of the compute dtype."""
  n_rows, n_heads, dim = q.shape
  groups = n_heads // spec.kv_heads
  q = q.astype(dtype).reshape(n_rows, spec.kv_heads, groups, dim)
  return q.transpose(1, 0, 2, 3).reshape(spec.kv_heads, n_rows * groups, dim)


def by_row(out: jax.Array, n_rows: int) -> jax.Array:
  """Returns [K, R * G, H] as [R, N, H]: the inverse of `by_kv_head`."""
  kv_heads, _, dim = out.shape
  out = out.reshape(kv_heads, n_rows, -1, dim)
  return out.transpose(1, 0, 2, 3).reshape(n_rows, -1, dim)


def empty_state(q: jax.Array) -> State:
  """Returns the (m, l, acc) of queries [K, R * G, H] that saw no page yet."""
  shape = q.shape[:2]
  return (
      jnp.full(shape + (1,), MASKED, jnp.float32),
      jnp.zeros(shape + (1,), jnp.float32),
      jnp.zeros(shape + q.shape[2:], jnp.float32),
  )


def finish(state: State) -> jax.Array:
  """Returns the attention of a state that has seen every page."""
  _, l, acc = state
  return acc * (1.0 / l)


def fold(
    q: jax.Array, state: State, caches: Any, positions: jax.Array,
    lo: jax.Array, hi: jax.Array, read: Callable, *, window: int | None,
    profile: numerics.Profile, one: jax.Array,
    first_position: jax.Array | None = None,
) -> tuple[State, Any]:
  """Folds the pages [lo, hi) into the state of some rows, ascending.

  Args:
    q: [K, R * G, H], scaled, in the compute dtype.
    state: of the pages in front.
    caches: what `read` reads; rides through the loop (see `attend`).
    positions: int32 [R], of the rows.
    lo: int32 [], absolute number of the first page.
    hi: int32 [], one past the last one.
    read: called with (caches, page number), returns K and V, [P, K, H].
    window: positions a row sees; None for all.
    profile: page size and form.
    one: the seal.
    first_position: int32 [], of the first key that exists; None for 0.

  Returns:
    The new state, and `caches`.
  """
  groups, page = q.shape[1] // positions.shape[0], profile.page

  def body(number, carry):
    state, caches = carry
    k, v = read(caches, number)
    k_positions = number * page + jnp.arange(page, dtype=jnp.int32)
    mask = visible(positions, k_positions, window)
    if first_position is not None:
      mask &= k_positions[None, :] >= first_position
    # Visible keys of a row are one run, so two ends tell if there are any.
    first_key, last_key = number * page, number * page + page - 1
    seen = positions >= first_key
    if window is not None:
      seen &= positions - last_key < window
    seen = jnp.repeat(seen, groups)[None, :, None]
    partial = page_partial(q, k, v, mask, profile.heads == 'unrolled')
    return merge(state, partial, seen, one), caches

  return lax.fori_loop(lo, hi, body, (state, caches))


def attend(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, *,
    layer: jax.Array | int, b: int, start: jax.Array,
    spec: config_lib.AttentionSpec, profile: numerics.Profile, one: jax.Array,
    first_position: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Attention of R rows at positions start.. over the cache, own rows included.

  Args:
    q: float32 [R, N, H], rotated and scaled.
    k_cache: unsigned [L, B, S, K, H], already holding the rows themselves.
    v_cache: same.
    layer: row of the caches.
    b: sequence.
    start: int32 [], position of the first row.
    spec: kind of the layer.
    profile: page size, dtype and form.
    one: the seal.
    first_position: int32 [], of the first key that exists; None for 0.

  Returns:
    float32 [R, N, H], and the two caches unchanged: they ride through the
    loops, or XLA would copy them whole to keep them alive behind a loop.
  """
  n_rows = q.shape[0]
  page, dtype = profile.page, profile.dtype
  margin = 0 if spec.window is None else profile.chunk
  q = by_kv_head(q, spec, dtype)
  groups = q.shape[1] // n_rows

  def read(caches, number):
    return tuple(
        cache_lib.read_page(c, layer, b, number, page, dtype, margin)
        for c in caches)

  def rows_at(q_block, first, count, caches):
    positions = first + jnp.arange(count, dtype=jnp.int32)
    lo, hi = page_range(first, first + count - 1, spec.window, page)
    if first_position is not None:
      lo = jnp.maximum(lo, first_position // page)
    state, caches = fold(
        q_block, empty_state(q_block), caches, positions, lo, hi, read,
        window=spec.window, profile=profile, one=one,
        first_position=first_position)
    return finish(state), caches

  caches = (k_cache, v_cache)
  if n_rows <= ROW_BLOCK:
    out, caches = rows_at(q, start, n_rows, caches)
  else:
    size = ROW_BLOCK * groups

    def block(i, carry):
      out, caches = carry
      part = lax.dynamic_slice_in_dim(q, i * size, size, axis=1)
      part, caches = rows_at(part, start + i * ROW_BLOCK, ROW_BLOCK, caches)
      out = lax.dynamic_update_slice_in_dim(out, part, i * size, axis=1)
      return out, caches

    out, caches = lax.fori_loop(
        0, n_rows // ROW_BLOCK, block,
        (jnp.zeros(q.shape, jnp.float32), caches))
  return by_row(out, n_rows), *caches
