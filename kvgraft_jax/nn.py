"""The decoder as a Flax Linen module: a thin shell over `model`.

No hidden state: the cache is passed in and returned. `nnx.bridge.ToNNX` wraps
the module for NNX users.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import model
from kvgraft_jax import numerics
from kvgraft_jax import rope as rope_lib
from kvgraft_jax.checkpoints import tree


class Gemma(nn.Module):
  """Gemma text decoder.

  Parameters are the tree of `checkpoints.tree.param_shapes`, so those of a
  loaded model fit as they are: `Gemma(model.config, model.profile).apply(
  {'params': model.params}, ...)`. Matrices are [out, in] in the profile's
  dtype, norm scales float32 and effective (Gemma 3's 1 + w).

  Attributes:
    config: architecture.
    profile: numerics; step sizes are those of the arguments.
  """

  config: config_lib.ModelConfig
  profile: numerics.Profile

  def setup(self):
    """Declares the parameters."""
    self.tree = {
        name: self.param(name, self._init, shapes)
        for name, shapes in tree.param_shapes(self.config).items()}

  def _init(self, key: jax.Array, shapes: tree.Shapes) -> model.Params:
    """Returns normal matrices of unit gain and norms that change nothing."""
    made: dict[str, Any] = {}
    for n, (name, leaf) in enumerate(shapes.items()):
      here = jax.random.fold_in(key, n)
      if isinstance(leaf, dict):
        made[name] = self._init(here, leaf)
        continue
      shape, is_matrix = leaf
      made[name] = jnp.ones(shape, np.float32)
      if is_matrix:
        made[name] = (jax.random.normal(here, shape, np.float32)
                      * shape[-1] ** -0.5).astype(self.profile.dtype)
    return made

  def __call__(
      self, tokens: jax.Array, starts: jax.Array, cache: cache_lib.KVCache,
      rope: model.Rope,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """Runs R rows of each of B sequences; see `model.step`."""
    return model.step(self.tree, cache, tokens, starts, rope,
                      config=self.config, profile=self.profile)

  def logits(self, hidden: jax.Array, cache: cache_lib.KVCache) -> jax.Array:
    """Returns float32 [n, V] of hidden rows [n, D]."""
    return model.head(self.tree, hidden, cache.scalars, config=self.config)

  def empty_cache(self, batch: int, capacity: int) -> cache_lib.KVCache:
    """Returns a cache of zeros for `capacity` positions, padding included."""
    return cache_lib.empty(
        self.config, self.profile, batch=batch, capacity=capacity,
        scalars=model.scalars(self.config, self.profile.dtype))

  def rope(self, starts: np.ndarray, rows: int) -> model.Rope:
    """Returns the rotary rows of positions starts.. for `__call__`."""
    positions = (np.asarray(starts)[:, None] + np.arange(rows)).reshape(-1)
    result = {}
    for kind in config_lib.KINDS:
      cos, sin = rope_lib.rope_rows(positions, self.config.spec(kind))
      result[kind] = (jnp.asarray(cos), jnp.asarray(sin))
    return result
