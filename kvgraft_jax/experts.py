"""Mixture of experts whose rows do not depend on one another.

A row's bits may depend neither on how many rows share its experts nor on where
it lies among them. So (token, expert) pairs are sorted by expert, each
expert's list is cut into tiles of a fixed number of rows, one fixed-shape
product a tile, and a token's experts are added up in ascending order.

Letters: M rows, D width, E experts, C chosen a row, F hidden of an expert.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import layers

# Rows of a tile. Part of the numerics (NUMERICS_VERSION): never chosen by how
# many rows there are.
TILE = 16


def route(
    router: Mapping[str, jax.Array], x: jax.Array, chosen: int,
    s: Mapping[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Chooses the experts of each row.

  Probabilities are a softmax over all experts; those of the chosen are scaled
  to a sum of 1, then by each expert's own scale.

  Args:
    router: 'w' [E, D], 'scale' float32 [D], 'expert_scale' float32 [E].
    x: float32 [M, D], the residual stream, not normed.
    chosen: C.
    s: run-time scalars.

  Returns:
    ids int32 [M, C], ascending in a row; of equal probabilities the lower
    index is chosen. weights float32 [M, C].
  """
  h = layers.rms_norm(x, router['scale'], s['inv_width'], s['eps'], s['one'])
  scores = layers.matmul(h * s['inv_sqrt_width'], router['w'])
  p = jnp.exp(scores - layers.tree_max(scores))
  p = p * (1.0 / layers.tree_sum(p))
  top, ids = lax.top_k(p, chosen)
  ids, top = lax.sort((ids.astype(jnp.int32), top), dimension=1, num_keys=1)
  weights = top * (1.0 / layers.tree_sum(top))
  return ids, weights * router['expert_scale'][ids]


def mix(
    experts: Mapping[str, Mapping[str, jax.Array]], x: jax.Array,
    ids: jax.Array, weights: jax.Array, s: Mapping[str, jax.Array],
) -> jax.Array:
  """Returns the weighted sum of each row's experts, float32 [M, D].

  Args:
    experts: 'gating' with 'w' [E, 2F, D], gate rows first; 'linear' with 'w'
      [E, D, F]; floats, or bfloat16 as `as_bits` leaves it.
    x: float32 [M, D], normed.
    ids: int32 [M, C], ascending in a row.
    weights: float32 [M, C].
    s: run-time scalars.
  """
  gating, linear = experts['gating']['w'], experts['linear']['w']
  count, chosen = gating.shape[0], ids.shape[1]
  pairs = ids.reshape(-1)
  order = jnp.argsort(pairs, stable=True).astype(jnp.int32)
  # Sorted place of each pair.
  place = jnp.zeros_like(order).at[order].set(
      jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
  numbers = jnp.arange(count, dtype=jnp.int32)
  sizes = jnp.sum(
      (pairs[:, None] == numbers[None, :]).astype(jnp.int32), axis=0)
  tiles = (sizes + TILE - 1) // TILE
  tile_ends = jnp.cumsum(tiles)
  first_pair, first_tile = jnp.cumsum(sizes) - sizes, tile_ends - tiles
  tokens = jnp.pad(order // chosen, (0, TILE))
  x = x.astype(_floats(gating[0]).dtype)

  def body(number, out):
    expert = jnp.sum((tile_ends <= number).astype(jnp.int32))
    at = first_pair[expert] + (number - first_tile[expert]) * TILE
    h = x[lax.dynamic_slice_in_dim(tokens, at, TILE)]
    both = layers.matmul(h, _one(gating, expert))
    y = layers.matmul(
        layers.gated(both, s['gelu_inner'], s['gelu_cubic'], s['one']),
        _one(linear, expert))
    # Rows behind the list's end belong to the next expert's list or to the
    # padding: the next tile writes them over.
    return lax.dynamic_update_slice_in_dim(out, y, at, axis=0)

  out = lax.fori_loop(
      0, tile_ends[-1], body,
      jnp.zeros((order.size + TILE, x.shape[1]), jnp.float32))
  y = out[place].reshape(ids.shape + (x.shape[1],))
  total = y[:, 0] * weights[:, :1] * s['one']
  for i in range(1, chosen):
    total = total + y[:, i] * weights[:, i:i + 1] * s['one']
  return total


def _one(stacked: jax.Array, number: jax.Array) -> jax.Array:
  """Returns one expert's matrix."""
  return _floats(
      lax.dynamic_index_in_dim(stacked, number, axis=0, keepdims=False))


def _floats(matrix: jax.Array) -> jax.Array:
  if matrix.dtype == jnp.uint16:
    return lax.bitcast_convert_type(matrix, jnp.bfloat16)
  return matrix


def as_bits(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the tree with bfloat16 experts as uint16; nothing is copied.

  XLA:CPU converts a bfloat16 array that a loop slices to float32 in front of
  the loop: all experts, for every layer of every step.

  Args:
    params: the parameter tree of a model with experts, on the CPU.
  """
  def view(leaf):
    if leaf.dtype != jnp.bfloat16:
      return leaf
    return jax.device_put(np.asarray(leaf).view(np.uint16))

  return {
      name: dict(leaf, experts=jax.tree.map(view, leaf['experts']))
      if 'experts' in leaf else leaf
      for name, leaf in params.items()}
