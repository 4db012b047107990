"""Random weights that are the same numbers on every backend.

Threefry bits become odd integers of at most 255, times a power of two: every
step is exact, and every value fits bfloat16.
"""

import functools
import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import hashing
from kvgraft_jax.checkpoints import tree

_RECIPE = 1  # Raised when the numbers change.
_SMALL_WORDS = 1 << 13  # Tensors up to 4 values a word share one program.


def fingerprint(config: config_lib.ModelConfig, seed: int) -> str:
  """Returns the hex model fingerprint: SHA-256 of the recipe."""
  return hashing.json_sha256('kvgraft.model.random', {
      'config': config.to_json(), 'recipe': _RECIPE, 'seed': seed,
  })


def init_params(
    config: config_lib.ModelConfig, seed: int, dtype: str
) -> dict[str, Any]:
  """Makes the parameter tree on the default device, one tensor at a time.

  Matrices are uniform with a standard deviation within a factor 2 of
  fan_in ** -0.5; norm multipliers are uniform around 1, deviation 0.29.

  Args:
    config: the architecture.
    seed: 0 to 2**32 - 1.
    dtype: 'bfloat16' or 'float32', of the matrices; the values are equal.

  Returns:
    Nested dict of jax arrays as `tree.param_shapes` gives them.
  """
  flat = {}
  # The option decides the bits, so it is set here and not left to the caller.
  with jax.threefry_partitionable(True):
    root = jax.random.key(np.uint32(seed), impl='threefry2x32')
    for path, (shape, is_matrix) in tree.flatten(tree.param_shapes(config)):
      word = hashlib.sha256(path.encode('utf-8')).digest()[:4]
      name = np.uint32(int.from_bytes(word, 'little'))
      kind = dtype if is_matrix else 'float32'
      exponent = _exponent(shape[-1]) if is_matrix else 9
      scale, center = np.float32(2.0 ** -exponent), np.float32(not is_matrix)
      size = math.prod(shape)
      if size <= 4 * _SMALL_WORDS:
        # A bit depends on its index, not on the count: cut off the rest.
        values = np.asarray(_small(root, name, scale, center))
        flat[path] = jax.device_put(
            values[:size].reshape(shape).astype(kind)
        )
      else:
        # Each is finished before the next begins: memory stays near the final.
        flat[path] = jax.block_until_ready(
            _large(root, name, scale, center, shape, kind)
        )
  return tree.nest(flat)


def _exponent(fan_in: int) -> int:
  """Returns e so that odd integers to 255, times 2**-e, deviate as wanted."""
  return (fan_in * 21845).bit_length() // 2  # Their variance is 21845.


def _odd(root: jax.Array, name: jax.Array, words: tuple[int, ...]) -> jax.Array:
  """Returns float32 [*words[:-1], 4 * words[-1]], odd integers to +-255."""
  bits = jax.random.bits(jax.random.fold_in(root, name), words, jnp.uint32)
  octets = jnp.stack([bits >> s & 255 for s in (0, 8, 16, 24)], axis=-1)
  octets = octets.reshape(*words[:-1], 4 * words[-1]).astype(jnp.int32)
  return (2 * octets - 255).astype(jnp.float32)


@jax.jit
def _small(
    root: jax.Array, name: jax.Array, scale: jax.Array, center: jax.Array
) -> jax.Array:
  return center + scale * _odd(root, name, (_SMALL_WORDS,))


@functools.partial(jax.jit, static_argnums=(4, 5))
def _large(
    root: jax.Array, name: jax.Array, scale: jax.Array, center: jax.Array,
    shape: tuple[int, ...], dtype: str,
) -> jax.Array:
  """Returns one tensor; its rows are whole words: widths divide by 4."""
  words = (*shape[:-1], shape[-1] // 4)
  return (center + scale * _odd(root, name, words)).astype(dtype)
