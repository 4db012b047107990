"""Step and head programs of the decoder, as pure functions.

Letters: B sequences, R rows a sequence in this step, M = B * R, L layers, N
query heads, K kv heads, H head dim, D width, F hidden, V vocabulary, P page.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import attention
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import layers
from kvgraft_jax import numerics

Params = Mapping[str, Any]
Rope = Mapping[str, tuple[jax.Array, jax.Array]]


def scalars(
    config: config_lib.ModelConfig, dtype: str
) -> dict[str, np.ndarray]:
  """Returns the float32 scalars that programs must receive at run time.

  The embedding scale is rounded to bfloat16 in the bfloat16 profile only, as
  published implementations do.
  """
  def f32(x):
    return np.asarray(x, np.float32)

  embed = f32(config.width**0.5)
  if dtype == 'bfloat16':
    embed = f32(embed.astype(jnp.bfloat16))
  values = {
      'one': f32(1.0),
      'eps': f32(1e-6),
      'inv_width': f32(1.0 / config.width),
      'embed_scale': embed,
      'query_scale': f32(config.query_scale_dim**-0.5),
      'gelu_inner': f32((2.0 / np.pi) ** 0.5),
      'gelu_cubic': f32(0.044715),
  }
  for kind in config_lib.KINDS:
    values[f'inv_head_{kind}'] = f32(1.0 / config.spec(kind).head_dim)
  return values


def embed(params: Params, tokens: jax.Array, s: Mapping[str, jax.Array]):
  """Returns float32 [M, D] for token ids int32 [M]."""
  rows = params['embedder']['input_embedding'][tokens]
  return rows.astype(jnp.float32) * s['embed_scale'] * s['one']


def _norm(x, params, s):
  return layers.rms_norm(x, params['scale'], s['inv_width'], s['eps'],
                         s['one'])


def qkv_rows(layer: Params, x, rope, kind: str, config, s):
  """Returns q [M, N, H] rotated and scaled, k rotated and v [M, K, H]."""
  spec, one = config.spec(kind), s['one']
  n, k, dim = config.num_heads, spec.kv_heads, spec.head_dim
  h = _norm(x, layer['pre_attention_norm'], s)
  qkv = layers.matmul(h, layer['attn']['qkv']['w'])
  qkv = qkv.reshape(x.shape[0], n + 2 * k, dim)
  # Queries and keys are normed and rotated as one array of N + K heads.
  scale = jnp.concatenate([
      jnp.broadcast_to(layer['attn'][name]['scale'], (heads, dim))
      for name, heads in (('query_norm', n), ('key_norm', k))])
  qk = layers.rms_norm(qkv[:, :n + k], scale, s[f'inv_head_{kind}'], s['eps'],
                       one)
  cos, sin = rope[kind]
  qk = layers.rotary(qk, cos, sin, one)
  return qk[:, :n] * s['query_scale'], qk[:, n:], qkv[:, n + k:]


def attention_out(layer: Params, x, mixed, s):
  """Returns the residual stream [M, D] after attention; mixed [M, N, H]."""
  out = layers.matmul(mixed.reshape(x.shape[0], -1),
                      layer['attn']['attn_vec']['w'])
  return x + _norm(out, layer['post_attention_norm'], s) * s['one']


def feed_forward(layer: Params, x, s):
  """Returns the residual stream [M, D] after the gated MLP."""
  h = _norm(x, layer['pre_ffw_norm'], s)
  both = layers.matmul(h, layer['mlp']['gating']['w'])
  hidden = both.shape[-1] // 2
  gate = layers.gelu_tanh(both[:, :hidden], s['gelu_inner'], s['gelu_cubic'],
                          s['one'])
  out = layers.matmul(gate * both[:, hidden:], layer['mlp']['linear']['w'])
  return x + _norm(out, layer['post_ffw_norm'], s) * s['one']


# Jitted on its own so that it is traced once a kind and not once a layer;
# XLA inlines the calls.
@functools.partial(
    jax.jit, static_argnames=('kind', 'n_batch', 'config', 'profile'))
def _layer(
    layer: Params, x, k_cache, v_cache, row, starts, rope: Rope, s, *,
    kind: str, n_batch: int, config: config_lib.ModelConfig,
    profile: numerics.Profile,
):
  """Runs one layer; `row` is its row of the caches of its kind."""
  spec = config.spec(kind)
  n_rows = x.shape[0] // n_batch
  margin = 0 if spec.window is None else profile.chunk
  q, k, v = qkv_rows(layer, x, rope, kind, config, s)
  k_bits = cache_lib.to_bits(k, profile.dtype)
  v_bits = cache_lib.to_bits(v, profile.dtype)
  mixed = []
  for b in range(n_batch):
    rows = slice(b * n_rows, (b + 1) * n_rows)
    k_cache = cache_lib.write_rows(
        k_cache, k_bits[rows], row, b, starts[b], margin)
    v_cache = cache_lib.write_rows(
        v_cache, v_bits[rows], row, b, starts[b], margin)
    out, k_cache, v_cache = attention.attend(
        q[rows], k_cache, v_cache, layer=row, b=b, start=starts[b], spec=spec,
        profile=profile, one=s['one'])
    mixed.append(out)
  x = attention_out(layer, x, jnp.concatenate(mixed), s)
  return feed_forward(layer, x, s), k_cache, v_cache


def step(
    params: Params, cache: cache_lib.KVCache, tokens: jax.Array,
    starts: jax.Array, rope: Rope, *, config: config_lib.ModelConfig,
    profile: numerics.Profile,
) -> tuple[jax.Array, cache_lib.KVCache]:
  """Runs R rows of each of B sequences through every layer.

  The caller has checked on the host that starts + R <= capacity.

  Args:
    params: the parameter tree (`checkpoints.tree`).
    cache: donated by the compiled program.
    tokens: int32 [B, R]; rows behind a sequence's end are padding, whose
      K and V no later row sees before they are overwritten.
    starts: int32 [B], position of each sequence's first row.
    rope: kind -> (cos, sin), each float32 [B * R, H/2].
    config: architecture.
    profile: numerics.

  Returns:
    hidden float32 [B, R, D] before the final norm, and the new cache.
  """
  n_batch, n_rows = tokens.shape
  s = cache.scalars
  k_cache, v_cache = dict(cache.k), dict(cache.v)
  x = embed(params, tokens.reshape(-1), s)
  counts = dict.fromkeys(config_lib.KINDS, 0)
  for i, kind in enumerate(config.layers):
    x, k_cache[kind], v_cache[kind] = _layer(
        params[f'layer_{i}'], x, k_cache[kind], v_cache[kind],
        np.int32(counts[kind]), starts, rope, s, kind=kind, n_batch=n_batch,
        config=config, profile=profile)
    counts[kind] += 1
  hidden = x.reshape(n_batch, n_rows, -1)
  return hidden, cache_lib.KVCache(k_cache, v_cache, s)


def head(
    params: Params, hidden: jax.Array, s: Mapping[str, jax.Array],
    *, config: config_lib.ModelConfig,
) -> jax.Array:
  """Returns logits float32 [R, V] of hidden float32 [R, D]; R is the tile."""
  table = params['embedder']['input_embedding']
  if config.final_softcap is not None:
    raise NotImplementedError('final soft cap')
  return layers.matmul(_norm(hidden, params['final_norm'], s), table)
