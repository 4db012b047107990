"""Layer maths as pure functions whose bits do not depend on the row count.

Three rules, each measured, keep them so:

* Sums and maxima along an axis are fixed trees of elementwise operations; a
  library reduction changes its order of additions with the row count.
* Every product that feeds an addition is sealed: multiplied by `one`, a 1.0
  that the program receives at run time. fma(round(a * b), 1, c) equals
  round(round(a * b) + c), so it no longer matters whether the compiler
  contracts. A literal 1.0 would be folded away.
* A scalar factor that is not a power of two is a run-time argument as well,
  or the compiler moves it across the seal.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp


def tree_reduce(
    x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
  """Reduces the last axis by halving it, then left to right; keeps it as 1."""
  n = x.shape[-1]
  while n > 1 and n % 2 == 0:
    n //= 2
    x = combine(x[..., :n], x[..., n:])
  total = x[..., :1]
  for i in range(1, n):
    total = combine(total, x[..., i:i + 1])
  return total


def tree_sum(x: jax.Array) -> jax.Array:
  """Returns the sum over the last axis, [..., 1]."""
  return tree_reduce(x, jnp.add)


def tree_max(x: jax.Array) -> jax.Array:
  """Returns the maximum over the last axis, [..., 1]."""
  return tree_reduce(x, jnp.maximum)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns x @ w.T in float32: x [..., I] rounded to w's dtype, w [O, I]."""
  precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
  return lax.dot_general(
      x.astype(w.dtype), w, (((x.ndim - 1,), (1,)), ((), ())),
      precision=precision, preferred_element_type=jnp.float32)


def rms_norm(
    x: jax.Array, scale: jax.Array | None, inv_size: jax.Array, eps: jax.Array,
    one: jax.Array,
) -> jax.Array:
  """Returns x / sqrt(mean(x^2) + eps) * scale over the last axis, float32.

  Root mean square layer normalisation, arXiv:1910.07467. `scale` is the
  effective multiplier (Gemma 3 stores w and uses 1 + w); None for none.
  """
  mean_square = tree_sum(x * x * one) * inv_size
  inv_rms = lax.rsqrt(mean_square * one + eps)
  if scale is None:
    return x * inv_rms
  scale = jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
  return x * inv_rms * scale


def gelu_tanh(
    x: jax.Array, inner: jax.Array, cubic: jax.Array, one: jax.Array
) -> jax.Array:
  """Returns the tanh form of GELU, arXiv:1606.08415.

  Args:
    x: float32.
    inner: float32 [], sqrt(2 / pi).
    cubic: float32 [], 0.044715.
    one: the seal.
  """
  bent = x + cubic * (x * x * x) * one
  return x * 0.5 * (1.0 + jnp.tanh(inner * bent) * one)


def gated(
    both: jax.Array, inner: jax.Array, cubic: jax.Array, one: jax.Array
) -> jax.Array:
  """Returns gelu(gate) * up, float32 [M, F]; both [M, 2F], gate first."""
  hidden = both.shape[-1] // 2
  gate = gelu_tanh(both[:, :hidden], inner, cubic, one)
  return gate * both[:, hidden:]


def rotary(
    x: jax.Array, cos: jax.Array, sin: jax.Array, one: jax.Array
) -> jax.Array:
  """Rotates pairs (i, i + H/2) of the last axis; arXiv:2104.09864.

  Args:
    x: float32 [M, heads, H].
    cos: float32 [M, H/2], from the host (`rope.rope_rows`).
    sin: float32 [M, H/2].
    one: the seal.
  """
  half = x.shape[-1] // 2
  a, b = x[..., :half], x[..., half:]
  cos, sin = cos[:, None], sin[:, None]
  return jnp.concatenate(
      [a * cos * one - b * sin * one, b * cos * one + a * sin * one], axis=-1)
