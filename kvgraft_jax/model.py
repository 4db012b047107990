"""Step and head programs of the decoder, as pure functions.

Letters: B sequences, R rows a sequence in this step, M = B * R, L layers, N
query heads, K kv heads, H head dim, D width, F hidden, V vocabulary, P size of
a per-layer embedding.
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
from kvgraft_jax import experts
from kvgraft_jax import layers
from kvgraft_jax import numerics

Params = Mapping[str, Any]
Rope = Mapping[str, tuple[jax.Array, jax.Array]]


def scalars(
    config: config_lib.ModelConfig, dtype: str
) -> dict[str, np.ndarray]:
  """Returns the float32 scalars that programs must receive at run time.

  Embedding scales are rounded to bfloat16 in the bfloat16 profile only, as
  published implementations do.
  """
  def f32(x):
    return np.asarray(x, np.float32)

  def embedding_scale(size):
    scale = f32(size**0.5)
    return f32(scale.astype(jnp.bfloat16)) if dtype == 'bfloat16' else scale

  values = {
      'one': f32(1.0),
      'eps': f32(1e-6),
      'inv_width': f32(1.0 / config.width),
      'embed_scale': embedding_scale(config.width),
      'query_scale': f32(config.query_scale_dim**-0.5),
      'gelu_inner': f32((2.0 / np.pi) ** 0.5),
      'gelu_cubic': f32(0.044715),
  }
  for kind in config_lib.KINDS:
    values[f'inv_head_{kind}'] = f32(1.0 / config.spec(kind).head_dim)
  if config.num_experts or config.per_layer_dim:
    values['inv_sqrt_width'] = f32(config.width**-0.5)
  if config.per_layer_dim:
    values |= {
        'inv_per_layer': f32(1.0 / config.per_layer_dim),
        'per_layer_scale': embedding_scale(config.per_layer_dim),
        'inv_sqrt_two': f32(2.0**-0.5),
    }
  if config.final_softcap is not None:
    values |= {'softcap': f32(config.final_softcap),
               'inv_softcap': f32(1.0 / config.final_softcap)}
  return values


def embed(params: Params, tokens: jax.Array, s: Mapping[str, jax.Array]):
  """Returns float32 [M, D] for token ids int32 [M]."""
  rows = params['embedder']['input_embedding'][tokens]
  return rows.astype(jnp.float32) * s['embed_scale'] * s['one']


def _norm(x, params, s):
  return layers.rms_norm(x, params['scale'], s['inv_width'], s['eps'],
                         s['one'])


def per_layer_inputs(
    params: Params, tokens: jax.Array, x: jax.Array, numbers: range, config, s
) -> jax.Array:
  """Returns what layers are told of their tokens, float32 [M, n, P].

  Args:
    params: the parameter tree.
    tokens: int32 [M].
    x: their scaled embeddings, float32 [M, D].
    numbers: n successive layers.
    config: architecture, with `per_layer_dim` P.
    s: run-time scalars.
  """
  table, size = params['embedder'], config.per_layer_dim
  part = slice(numbers.start * size, numbers.stop * size)
  shape = (x.shape[0], len(numbers), size)
  context = layers.matmul(x, table['per_layer_model_projection']['w'][part])
  context = layers.rms_norm(
      (context * s['inv_sqrt_width']).reshape(shape),
      table['per_layer_projection_norm']['scale'], s['inv_per_layer'],
      s['eps'], s['one'])
  rows = table['per_layer_embedding'][tokens][:, part].astype(jnp.float32)
  rows = rows.reshape(shape) * s['per_layer_scale']
  return (context * s['one'] + rows * s['one']) * s['inv_sqrt_two']


def qkv_rows(
    layer: Params, x, rope, kind: str, config, s, shared: bool = False
):
  """Returns q [M, N, H] rotated and scaled, k rotated and v [M, K, H].

  A shared layer has no k and v of its own: they are None.
  """
  spec, one = config.spec(kind), s['one']
  n, dim = config.num_heads, spec.head_dim
  k = 0 if shared else spec.kv_heads
  h = _norm(x, layer['pre_attention_norm'], s)
  qkv = layers.matmul(h, layer['attn']['qkv']['w'])
  qkv = qkv.reshape(x.shape[0], -1, dim)
  # Queries and keys are normed and rotated as one array of N + K heads.
  scale = jnp.concatenate([
      jnp.broadcast_to(layer['attn'][name]['scale'], (heads, dim))
      for name, heads in (('query_norm', n), ('key_norm', k)) if heads])
  inv_head = s[f'inv_head_{kind}']
  qk = layers.rms_norm(qkv[:, :n + k], scale, inv_head, s['eps'], one)
  cos, sin = rope[kind]
  qk = layers.rotary(qk, cos, sin, one)
  q = qk[:, :n] * s['query_scale']
  if shared:
    return q, None, None
  v = qkv[:, n:n + k] if spec.value_from_key else qkv[:, n + k:]
  if config.value_norm:
    v = layers.rms_norm(v, None, inv_head, s['eps'], one)
  return q, qk[:, n:], v


def attention_out(layer: Params, x, mixed, s):
  """Returns the residual stream [M, D] after attention; mixed [M, N, H]."""
  out = layers.matmul(mixed.reshape(x.shape[0], -1),
                      layer['attn']['attn_vec']['w'])
  return x + _norm(out, layer['post_attention_norm'], s) * s['one']


def _gated(layer: Params, h, s):
  """Returns the dense gated MLP of normed rows, [M, D]."""
  both = layers.matmul(h, layer['mlp']['gating']['w'])
  hidden = layers.gated(both, s['gelu_inner'], s['gelu_cubic'], s['one'])
  return layers.matmul(hidden, layer['mlp']['linear']['w'])


def feed_forward(layer: Params, x, config, s):
  """Returns the residual stream [M, D] after the feed-forward branch.

  With experts these stand beside the dense MLP, and a third norm takes the
  sum of both.
  """
  out = _gated(layer, _norm(x, layer['pre_ffw_norm'], s), s)
  if config.num_experts:
    ids, weights = experts.route(
        layer['router'], x, config.top_k_experts, s)
    mixed = experts.mix(
        layer['experts'], _norm(x, layer['pre_ffw_norm_2'], s), ids, weights,
        s)
    out = (_norm(out, layer['post_ffw_norm_1'], s) * s['one']
           + _norm(mixed, layer['post_ffw_norm_2'], s) * s['one'])
  return x + _norm(out, layer['post_ffw_norm'], s) * s['one']


def per_layer_branch(layer: Params, x, inputs, s):
  """Returns the residual stream [M, D] after the per-layer inputs [M, P]."""
  gate = layers.matmul(x, layer['per_layer_input_gate']['w'])
  gate = layers.gelu_tanh(gate, s['gelu_inner'], s['gelu_cubic'], s['one'])
  out = layers.matmul(gate * inputs, layer['per_layer_projection']['w'])
  return x + _norm(out, layer['post_per_layer_input_norm'], s) * s['one']


def finish_layer(layer: Params, x, mixed, inputs, config, s):
  """Returns the residual stream [M, D] behind a layer.

  Args:
    layer: its parameters.
    x: the residual stream in front of it.
    mixed: attention of its rows, [M, N, H].
    inputs: its per-layer inputs [M, P], or None.
    config: architecture.
    s: run-time scalars.
  """
  x = attention_out(layer, x, mixed, s)
  x = feed_forward(layer, x, config, s)
  if inputs is not None:
    x = per_layer_branch(layer, x, inputs, s)
  if config.layer_scalar:
    x = x * layer['layer_scalar'][0] * s['one']
  return x


# Jitted on its own so that it is traced once a kind and not once a layer;
# XLA inlines the calls.
@functools.partial(
    jax.jit,
    static_argnames=('kind', 'shared', 'n_batch', 'config', 'profile'))
def run_layer(
    layer: Params, x, k_cache, v_cache, row, starts, rope: Rope, inputs, s, *,
    kind: str, shared: bool, n_batch: int, config: config_lib.ModelConfig,
    profile: numerics.Profile,
):
  """Runs one layer; `row` is the row of its kind's caches that it reads.

  A shared layer reads what the owner of the row wrote in this very step.
  """
  spec = config.spec(kind)
  n_rows = x.shape[0] // n_batch
  margin = 0 if spec.window is None else profile.chunk
  q, k, v = qkv_rows(layer, x, rope, kind, config, s, shared)
  if not shared:
    k_bits = cache_lib.to_bits(k, profile.dtype)
    v_bits = cache_lib.to_bits(v, profile.dtype)
  mixed = []
  sequences = [slice(b * n_rows, (b + 1) * n_rows) for b in range(n_batch)]
  # All are written before the first loop reads: XLA copies the whole cache for
  # a write between two loops of one layer.
  for b, rows in enumerate(sequences) if not shared else ():
    k_cache = cache_lib.write_rows(
        k_cache, k_bits[rows], row, b, starts[b], margin)
    v_cache = cache_lib.write_rows(
        v_cache, v_bits[rows], row, b, starts[b], margin)
  for b, rows in enumerate(sequences):
    out, k_cache, v_cache = attention.attend(
        q[rows], k_cache, v_cache, layer=row, b=b, start=starts[b], spec=spec,
        profile=profile, one=s['one'], first_position=s.get('first_position'))
    mixed.append(out)
  x = finish_layer(layer, x, jnp.concatenate(mixed), inputs, config, s)
  return x, k_cache, v_cache


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
  hidden, cache = owners(params, cache, tokens, starts, rope, config=config,
                         profile=profile)
  if not config.shared_layers:
    return hidden, cache
  return sharers(params, cache, hidden, tokens, starts, rope, config=config,
                 profile=profile)


def owners(
    params: Params, cache: cache_lib.KVCache, tokens: jax.Array,
    starts: jax.Array, rope: Rope, *, config: config_lib.ModelConfig,
    profile: numerics.Profile,
) -> tuple[jax.Array, cache_lib.KVCache]:
  """Runs the layers that own keys and values; see `step`.

  Returns:
    hidden float32 [B, R, D] behind them, and the new cache: all of it.
  """
  x = embed(params, tokens.reshape(-1), cache.scalars)
  return _run(params, cache, x, tokens, starts, rope,
              range(config.first_shared), config, profile)


def sharers(
    params: Params, cache: cache_lib.KVCache, hidden: jax.Array,
    tokens: jax.Array, starts: jax.Array, rope: Rope, *,
    config: config_lib.ModelConfig, profile: numerics.Profile,
) -> tuple[jax.Array, cache_lib.KVCache]:
  """Runs the layers that share keys and values, for the rows it is given.

  Args:
    params: the parameter tree.
    cache: already holds the rows of these positions; comes back unchanged.
    hidden: float32 [B, R, D], what `owners` returned.
    tokens: int32 [B, R].
    starts: int32 [B].
    rope: as in `step`.
    config: architecture.
    profile: numerics.

  Returns:
    hidden float32 [B, R, D] before the final norm, and the cache.
  """
  x = hidden.reshape(-1, hidden.shape[-1])
  return _run(params, cache, x, tokens, starts, rope,
              range(config.first_shared, len(config.layers)), config, profile)


def _run(params, cache, x, tokens, starts, rope, numbers, config, profile):
  """Runs successive layers; returns hidden [B, R, D] and the cache."""
  n_batch, n_rows = tokens.shape
  s = cache.scalars
  k_cache, v_cache = dict(cache.k), dict(cache.v)
  inputs = None
  if config.per_layer_dim:
    ids = tokens.reshape(-1)
    embedded = x if not numbers.start else embed(params, ids, s)
    inputs = per_layer_inputs(params, ids, embedded, numbers, config, s)
  for i in numbers:
    kind = config.layers[i]
    x, k_cache[kind], v_cache[kind] = run_layer(
        params[f'layer_{i}'], x, k_cache[kind], v_cache[kind],
        np.int32(config.cache_row(i)), starts, rope,
        None if inputs is None else inputs[:, i - numbers.start], s,
        kind=kind, shared=i >= config.first_shared, n_batch=n_batch,
        config=config, profile=profile)
  hidden = x.reshape(n_batch, n_rows, -1)
  return hidden, cache_lib.KVCache(k_cache, v_cache, s)


def head(
    params: Params, hidden: jax.Array, s: Mapping[str, jax.Array],
    *, config: config_lib.ModelConfig,
) -> jax.Array:
  """Returns logits float32 [R, V] of hidden float32 [R, D]; R is the tile."""
  table = params['embedder']['input_embedding']
  logits = layers.matmul(_norm(hidden, params['final_norm'], s), table)
  if config.final_softcap is None:
    return logits
  return s['softcap'] * jnp.tanh(logits * s['inv_softcap'])
