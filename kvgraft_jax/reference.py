"""The plain forward of Gemma 3 in NumPy: what every fast path is held against.

No cache, no pages, no compiled programs, nothing shared with the fast path:
each formula stands here once, over all positions, in one dtype. Memory grows
with T * T, so it is for tests and checks of up to a few thousand tokens.

Letters: T tokens, D width, F feed-forward width, N query heads, K key/value
heads, H head dim, V vocabulary. Norm scales in `params` are the effective
multiplier (1 + w already added); matrices are [out, in].
"""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors

_EPS = 1e-6
_VOCAB_ROWS = 32768  # embedding rows converted at once in the head


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """Returns x / sqrt(mean(x^2) + 1e-6) * scale over the last axis."""
  mean_square = np.mean(x * x, axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + _EPS) * scale


def gelu(x: np.ndarray) -> np.ndarray:
  """Returns the tanh form of the Gaussian error linear unit."""
  c = math.sqrt(2.0 / math.pi)
  return 0.5 * x * (1.0 + np.tanh(c * (x + 0.044715 * x * x * x)))


def rotate(x: np.ndarray, spec: config_lib.AttentionSpec) -> np.ndarray:
  """Rotates each head of row t by position t, pairing i with i + H / 2.

  Args:
    x: [T, heads, H].
    spec: rotary base, divisor and number of rotating pairs.

  Returns:
    [T, heads, H] in the dtype of `x`; the angles are float64.
  """
  length, _, head_dim = x.shape
  half = head_dim // 2
  frequency = float(spec.rope_theta) ** (-2.0 * np.arange(half) / head_dim)
  frequency /= spec.rope_divisor
  if spec.rope_pairs is not None:
    frequency[spec.rope_pairs:] = 0.0
  angle = np.arange(length)[:, None, None] * frequency  # [T, 1, H / 2]
  cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
  first, second = x[..., :half], x[..., half:]
  return np.concatenate(
      [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def attention_mask(length: int, window: int | None) -> np.ndarray:
  """Returns bool [T, T]: whether query row i sees key column j.

  Args:
    length: T.
    window: positions a query sees, itself included; None sees all before it.
  """
  query = np.arange(length)[:, None]
  key = np.arange(length)[None, :]
  mask = key <= query
  if window is not None:
    mask &= query - key < window
  return mask


def softmax(scores: np.ndarray) -> np.ndarray:
  """Returns the softmax over the last axis."""
  weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def _attention(
    layer: Mapping[str, Any], config: config_lib.ModelConfig, kind: str,
    h: np.ndarray,
) -> np.ndarray:
  """Returns the attention branch [T, D] of normed rows `h` [T, D]."""
  spec = config.spec(kind)
  length, n, k, dim = len(h), config.num_heads, spec.kv_heads, spec.head_dim
  attn = layer['attn']
  qkv = h @ _array(attn['qkv']['w'], h.dtype).T
  query, key, value = np.split(qkv, [n * dim, (n + k) * dim], axis=-1)
  query = query.reshape(length, n, dim)
  key = key.reshape(length, k, dim)
  value = value.reshape(length, k, dim)
  query = rms_norm(query, _array(attn['query_norm']['scale'], h.dtype))
  key = rms_norm(key, _array(attn['key_norm']['scale'], h.dtype))
  query, key = rotate(query, spec), rotate(key, spec)

  mask = attention_mask(length, spec.window)
  heads = []
  for head in range(n):
    kv_head = head // (n // k)
    scores = query[:, head] @ key[:, kv_head].T
    scores = scores * config.query_scale_dim**-0.5
    weights = softmax(np.where(mask, scores, -np.inf))
    heads.append(weights @ value[:, kv_head])
  return np.concatenate(heads, axis=-1) @ _array(
      attn['attn_vec']['w'], h.dtype
  ).T


def _mlp(layer: Mapping[str, Any], h: np.ndarray) -> np.ndarray:
  """Returns the feed-forward branch [T, D] of normed rows `h` [T, D]."""
  both = h @ _array(layer['mlp']['gating']['w'], h.dtype).T
  gate, up = np.split(both, 2, axis=-1)
  return (gelu(gate) * up) @ _array(layer['mlp']['linear']['w'], h.dtype).T


def forward(
    params: Mapping[str, Any],
    config: config_lib.ModelConfig,
    tokens: Sequence[int],
    *,
    dtype: Any = np.float32,
    round_embedding_scale: bool = False,
) -> np.ndarray:
  """Runs all layers and the final norm over `tokens` at positions 0..T-1.

  Args:
    params: parameter tree; leaves of any float type, used as `dtype`.
    config: a Gemma 3 architecture.
    tokens: T ids in [0, V).
    dtype: of every array, float32 or float64.
    round_embedding_scale: round sqrt(D) to bfloat16, as bfloat16 models do.

  Returns:
    [T, D] in `dtype`: the rows that the output head reads.

  Raises:
    UsageError: if the family is another or the tokens are not ids in range.
  """
  if config.family != 'gemma3':
    raise errors.UsageError(
        f'reference forward: expected family gemma3, found {config.family}'
    )
  ids = np.asarray(tokens)
  if (
      ids.ndim != 1 or not ids.size or ids.dtype.kind not in 'iu'
      or ids.min() < 0 or ids.max() >= config.vocab_size
  ):
    raise errors.UsageError(
        'reference forward: expected a non-empty list of token ids in [0,'
        f' {config.vocab_size})'
    )
  scale = math.sqrt(config.width)
  if round_embedding_scale:
    scale = _round_to_bfloat16(scale)
  # Not `*= scale`: a float32 row times a Python float stays float32.
  x = _array(params['embedder']['input_embedding'][ids], dtype) * scale
  for i, kind in enumerate(config.layers):
    layer = params[f'layer_{i}']

    def norm(name: str, y: np.ndarray, layer: Mapping[str, Any] = layer):
      return rms_norm(y, _array(layer[name]['scale'], dtype))

    branch = _attention(layer, config, kind, norm('pre_attention_norm', x))
    x = x + norm('post_attention_norm', branch)
    branch = _mlp(layer, norm('pre_ffw_norm', x))
    x = x + norm('post_ffw_norm', branch)
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
  table = params['embedder']['input_embedding']
  out = np.empty((len(hidden), config.vocab_size), dtype)
  for start in range(0, config.vocab_size, _VOCAB_ROWS):
    stop = min(start + _VOCAB_ROWS, config.vocab_size)
    out[:, start:stop] = hidden @ _array(table[start:stop], dtype).T
  if config.final_softcap is not None:
    out = config.final_softcap * np.tanh(out / config.final_softcap)
  return out


def _array(leaf: Any, dtype: Any) -> np.ndarray:
  return np.asarray(leaf).astype(dtype)


def _round_to_bfloat16(value: float) -> float:
  """Returns `value`, positive and normal, to 8 significant bits."""
  mantissa, exponent = math.frexp(value)
  return math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)
