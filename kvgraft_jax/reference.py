"""The plain forward of Gemma in NumPy: what every fast path is held against.

No cache, no pages, no compiled programs, nothing shared with the fast path:
each formula stands here once, over all positions, in one dtype. Memory grows
with T * T, so it is for tests and checks of up to a few thousand tokens.

Letters: T tokens, D width, F feed-forward width, N query heads, K key/value
heads, H head dim, V vocabulary, E experts. Norm scales in `params` are the
effective multiplier (1 + w already added); matrices are [out, in].
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
import operator
from typing import Any

import ml_dtypes
import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors

# Key and value of a layer, each [positions, K, H].
KeyValue = tuple[np.ndarray, np.ndarray]

_EPS = 1e-6
_VOCAB_ROWS = 32768  # embedding rows converted at once in the head


def rms_norm(x: np.ndarray, scale: np.ndarray | float = 1) -> np.ndarray:
  """Returns x / sqrt(mean(x^2) + 1e-6) * scale over the last axis."""
  mean_square = np.mean(x * x, axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + _EPS) * scale


def gelu(x: np.ndarray) -> np.ndarray:
  """Returns the tanh form of the Gaussian error linear unit."""
  c = math.sqrt(2.0 / math.pi)
  return 0.5 * x * (1.0 + np.tanh(c * (x + 0.044715 * x * x * x)))


def rotate(
    x: np.ndarray, spec: config_lib.AttentionSpec,
    positions: np.ndarray | None = None,
) -> np.ndarray:
  """Rotates each head of row t by its position, pairing i with i + H / 2.

  Args:
    x: [T, heads, H].
    spec: rotary base, divisor and number of rotating pairs.
    positions: integers [T]; None for 0..T-1.

  Returns:
    [T, heads, H] in the dtype of `x`; the angles have the platform's widest
    float, which on x86 keeps them exact for float64 to some thousand positions.
  """
  length, _, head_dim = x.shape
  half = head_dim // 2
  exponent = np.arange(half).astype(np.longdouble) * -2 / head_dim
  frequency = np.longdouble(spec.rope_theta) ** exponent / spec.rope_divisor
  if spec.rope_pairs is not None:
    frequency[spec.rope_pairs:] = 0.0
  positions = np.arange(length) if positions is None else positions
  angle = positions[:, None, None] * frequency  # [T, 1, H / 2]
  cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
  first, second = x[..., :half], x[..., half:]
  return np.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def attention_mask(
    length: int, window: int | None, past: int = 0
) -> np.ndarray:
  """Returns bool [T, past + T]: whether query row i sees key column j.

  Args:
    length: T.
    window: positions a query sees, itself included; None sees all before it.
    past: keys in front of the queries' own.
  """
  query = past + np.arange(length)[:, None]
  key = np.arange(past + length)[None, :]
  mask = key <= query
  if window is not None:
    mask &= query - key < window
  return mask


def softmax(scores: np.ndarray) -> np.ndarray:
  """Returns the softmax over the last axis."""
  weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def _project(
    layer: Mapping[str, Any], config: config_lib.ModelConfig, number: int,
    h: np.ndarray, positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
  """Returns query [T, N, H], key and value [T, K, H] of normed rows [T, D].

  Key and value are None in a layer that shares those of another.
  """
  kind = config.layers[number]
  spec, attn = config.spec(kind), layer['attn']
  qkv = h @ _array(attn['qkv']['w'], h.dtype).T
  qkv = qkv.reshape(len(h), -1, spec.head_dim)
  n, k = config.num_heads, spec.kv_heads
  query = rms_norm(qkv[:, :n], _array(attn['query_norm']['scale'], h.dtype))
  query = rotate(query, spec, positions)
  if number >= config.first_shared:
    return query, None, None
  raw = qkv[:, n:n + k]
  value = raw if spec.value_from_key else qkv[:, n + k:]
  if config.value_norm:
    value = rms_norm(value)
  key = rms_norm(raw, _array(attn['key_norm']['scale'], h.dtype))
  return query, rotate(key, spec, positions), value


def _attend(
    config: config_lib.ModelConfig, kind: str, query: np.ndarray,
    key: np.ndarray, value: np.ndarray,
) -> np.ndarray:
  """Returns the mixed values [T, N * H]."""
  length, n, _ = query.shape
  mask = attention_mask(
      length, config.spec(kind).window, len(key) - length)
  heads = []
  for head in range(n):
    kv_head = head // (n // key.shape[1])
    scores = query[:, head] @ key[:, kv_head].T
    scores = scores * config.query_scale_dim**-0.5
    weights = softmax(np.where(mask, scores, -np.inf))
    heads.append(weights @ value[:, kv_head])
  return np.concatenate(heads, axis=-1)


def _gated(gating: np.ndarray, linear: np.ndarray, h: np.ndarray) -> np.ndarray:
  """Returns linear(gelu(gate h) * up h), [T, D]; gate rows come first."""
  gate, up = np.split(h @ gating.T, 2, axis=-1)
  return (gelu(gate) * up) @ linear.T


def _experts(
    layer: Mapping[str, Any], config: config_lib.ModelConfig, x: np.ndarray,
    h: np.ndarray,
) -> np.ndarray:
  """Returns the mixture of experts of `h` [T, D], routed by `x` [T, D]."""
  router, width = layer['router'], config.width
  routed = rms_norm(x, _array(router['scale'], x.dtype)) * width**-0.5
  p = softmax(routed @ _array(router['w'], x.dtype).T)
  expert_scale = _array(router['expert_scale'], x.dtype)
  out = np.zeros_like(h)
  for t, row in enumerate(p):
    best = np.argsort(-row, kind='stable')[:config.top_k_experts]
    for e in best:
      weight = row[e] / row[best].sum() * expert_scale[e]
      gating, linear = (
          _array(layer['experts'][name]['w'][e], x.dtype)
          for name in ('gating', 'linear'))
      out[t] += weight * _gated(gating, linear, h[t])
  return out


def _per_layer_inputs(
    params: Mapping[str, Any], config: config_lib.ModelConfig,
    ids: np.ndarray, x: np.ndarray, round_scale: bool,
) -> np.ndarray:
  """Returns what each layer is told of its tokens, [T, L, size]."""
  table, size = params['embedder'], config.per_layer_dim
  shape = (len(ids), len(config.layers), size)
  projection = _array(table['per_layer_model_projection']['w'], x.dtype)
  context = rms_norm(
      (x @ projection.T * config.width**-0.5).reshape(shape),
      _array(table['per_layer_projection_norm']['scale'], x.dtype))
  rows = _array(table['per_layer_embedding'][ids], x.dtype).reshape(shape)
  return (context + rows * _scale(size, round_scale)) / math.sqrt(2)


def _scale(size: int, rounded: bool) -> float:
  """Returns sqrt(size), the factor of an embedding."""
  scale = math.sqrt(size)
  return _round_to_bfloat16(scale) if rounded else scale


def forward(
    params: Mapping[str, Any],
    config: config_lib.ModelConfig,
    tokens: Sequence[int],
    *,
    dtype: Any = np.float32,
    round_embedding_scale: bool = False,
    shift: Mapping[str, int] | None = None,
    past: Sequence[KeyValue | None] | None = None,
    kept: list[KeyValue | None] | None = None,
) -> np.ndarray:
  """Runs all layers and the final norm over T successive `tokens`.

  Args:
    params: parameter tree; leaves of any float type, used as `dtype`.
    config: the architecture.
    tokens: T ids in [0, V).
    dtype: of every array, float32 or float64.
    round_embedding_scale: round sqrt(D) to bfloat16, as bfloat16 models do.
    shift: kind -> rotary position of the very first token; None for 0.
    past: what `kept` held after the tokens in front of these; None for none.
    kept: takes the key and value of each layer, those of `past` in front.

  Returns:
    [T, D] in `dtype`: the rows that the output head reads.

  Raises:
    UsageError: if the tokens are not ids in range.
  """
  ids = np.asarray(tokens)
  if (
      ids.ndim != 1 or not ids.size or ids.dtype.kind not in 'iu'
      or ids.min() < 0 or ids.max() >= config.vocab_size
  ):
    raise errors.UsageError(
        'reference forward: expected a non-empty list of token ids in [0,'
        f' {config.vocab_size})'
    )
  # Not `*=`: a float32 row times a Python float stays float32.
  x = (_array(params['embedder']['input_embedding'][ids], dtype)
       * _scale(config.width, round_embedding_scale))
  inputs = None
  if config.per_layer_dim:
    inputs = _per_layer_inputs(params, config, ids, x, round_embedding_scale)
  latest: dict[str, KeyValue] = {}  # Of the last owner.
  positions = np.arange(len(ids))
  if past is not None and past[0] is not None:  # The first layer owns.
    positions += len(past[0][0])
  for i, kind in enumerate(config.layers):
    layer = params[f'layer_{i}']
    before = past[i] if past is not None else None

    def matrix(*path: str, layer: Mapping[str, Any] = layer):
      return _array(functools.reduce(operator.getitem, path, layer), dtype)

    def norm(name: str, y: np.ndarray):
      return rms_norm(y, matrix(name, 'scale'))

    query, key, value = _project(
        layer, config, i, norm('pre_attention_norm', x),
        positions + (shift[kind] if shift else 0))
    if key is not None and value is not None:
      if before is not None:
        key, value = (np.concatenate(pair)
                      for pair in zip(before, (key, value)))
      latest[kind] = key, value
    if kept is not None:
      kept.append(None if key is None else latest[kind])
    mixed = _attend(config, kind, query, *latest[kind])
    branch = mixed @ matrix('attn', 'attn_vec', 'w').T
    x = x + norm('post_attention_norm', branch)
    branch = _gated(matrix('mlp', 'gating', 'w'), matrix('mlp', 'linear', 'w'),
                    norm('pre_ffw_norm', x))
    if config.num_experts:
      mixture = _experts(layer, config, x, norm('pre_ffw_norm_2', x))
      branch = (norm('post_ffw_norm_1', branch)
                + norm('post_ffw_norm_2', mixture))
    x = x + norm('post_ffw_norm', branch)
    if inputs is not None:
      gate = gelu(x @ matrix('per_layer_input_gate', 'w').T)
      branch = (gate * inputs[:, i]) @ matrix('per_layer_projection', 'w').T
      x = x + norm('post_per_layer_input_norm', branch)
    if config.layer_scalar:
      x = x * matrix('layer_scalar')
  return rms_norm(x, _array(params['final_norm']['scale'], dtype))


def logits(
    params: Mapping[str, Any],
    config: config_lib.ModelConfig,
    tokens: Sequence[int],
    rows: Sequence[int] | None = None,
    *,
    dtype: Any = np.float32,
    round_embedding_scale: bool = False,
) -> np.ndarray:
  """Returns the logits after each of the positions `rows`; None means all.

  Args:
    params: as in `forward`.
    config: as in `forward`.
    tokens: as in `forward`.
    rows: positions in [0, T).
    dtype: as in `forward`.
    round_embedding_scale: as in `forward`.

  Returns:
    [len(rows), V] in `dtype`.
  """
  hidden = forward(
      params, config, tokens, dtype=dtype,
      round_embedding_scale=round_embedding_scale,
  )
  if rows is not None:
    hidden = hidden[np.asarray(rows, np.int64)]
  return head(params, config, hidden)


def head(
    params: Mapping[str, Any], config: config_lib.ModelConfig,
    hidden: np.ndarray,
) -> np.ndarray:
  """Returns logits [n, V] of rows [n, D] of `forward`, in their dtype."""
  table, dtype = params['embedder']['input_embedding'], hidden.dtype
  out = np.empty((len(hidden), config.vocab_size), dtype)
  for start in range(0, config.vocab_size, _VOCAB_ROWS):
    stop = min(start + _VOCAB_ROWS, config.vocab_size)
    out[:, start:stop] = hidden @ _array(table[start:stop], dtype).T
  if config.final_softcap is not None:
    out = config.final_softcap * np.tanh(out / config.final_softcap)
  return out


def _array(leaf: Any, dtype: Any) -> np.ndarray:
  leaf = np.asarray(leaf)
  if leaf.dtype == np.uint16:  # See `experts.as_bits`.
    leaf = leaf.view(ml_dtypes.bfloat16)
  return leaf.astype(dtype)


def _round_to_bfloat16(value: float) -> float:
  """Returns `value`, positive and normal, to 8 significant bits."""
  mantissa, exponent = math.frexp(value)
  return math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)
