"""The reference forward against facts that can be worked out by hand."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import reference
import model_helpers

_SLIDING = config_lib.SLIDING
_GLOBAL = config_lib.GLOBAL


def _config(layers, window=4):
  return config_lib.ModelConfig(
      name='hand', family='gemma3', vocab_size=23, width=8, hidden=12,
      num_heads=4, layers=tuple(layers),
      sliding=config_lib.AttentionSpec(2, 6, window, 10_000),
      full=config_lib.AttentionSpec(2, 6, None, 1_000_000, 8),
      query_scale_dim=9, max_context=64,
  )


def _params(config, seed=0):
  """Random weights; norm scales vary, so that a missed one shows."""
  rng = np.random.default_rng(seed)

  def matrix(rows, cols):
    return rng.normal(0, cols**-0.5, (rows, cols)).astype(np.float32)

  def scale(size):
    return {'scale': rng.uniform(0.5, 1.5, size).astype(np.float32)}

  d, f, n = config.width, config.hidden, config.num_heads
  params = {
      'embedder': {'input_embedding': matrix(config.vocab_size, d)},
      'final_norm': scale(d),
  }
  for i, kind in enumerate(config.layers):
    k, h = config.spec(kind).kv_heads, config.spec(kind).head_dim
    params[f'layer_{i}'] = {
        'pre_attention_norm': scale(d), 'post_attention_norm': scale(d),
        'pre_ffw_norm': scale(d), 'post_ffw_norm': scale(d),
        'attn': {
            'qkv': {'w': matrix((n + 2 * k) * h, d)},
            'attn_vec': {'w': matrix(d, n * h)},
            'query_norm': scale(h), 'key_norm': scale(h),
        },
        'mlp': {'gating': {'w': matrix(2 * f, d)},
                'linear': {'w': matrix(d, f)}},
    }
  return params


def test_mask_of_window_four():
  expected = [
      [1, 0, 0, 0, 0, 0],
      [1, 1, 0, 0, 0, 0],
      [1, 1, 1, 0, 0, 0],
      [1, 1, 1, 1, 0, 0],
      [0, 1, 1, 1, 1, 0],
      [0, 0, 1, 1, 1, 1],
  ]
  np.testing.assert_array_equal(
      reference.attention_mask(6, 4), np.array(expected, bool)
  )
  np.testing.assert_array_equal(
      reference.attention_mask(6, None), np.tril(np.ones((6, 6), bool))
  )


def test_rotary_is_identity_at_position_zero():
  x = np.random.default_rng(1).normal(size=(3, 2, 8)).astype(np.float32)
  spec = config_lib.AttentionSpec(2, 8, None, 10_000)
  out = reference.rotate(x, spec)
  np.testing.assert_array_equal(out[0], x[0])
  assert np.abs(out[1:] - x[1:]).min() > 0


@pytest.mark.parametrize('divisor,pairs', [(1, None), (8, None), (1, 2)])
def test_rotary_is_a_complex_rotation_of_the_halves(divisor, pairs):
  x = np.random.default_rng(2).normal(size=(5, 1, 8))
  spec = config_lib.AttentionSpec(1, 8, None, 10_000, divisor, pairs)
  out = reference.rotate(x, spec)
  for t in range(5):
    for i in range(4):
      angle = t / 10_000 ** (2 * i / 8) / divisor
      if pairs is not None and i >= pairs:
        angle = 0.0
      z = complex(x[t, 0, i], x[t, 0, i + 4])
      z *= complex(math.cos(angle), math.sin(angle))
      assert out[t, 0, i] == pytest.approx(z.real, abs=1e-14)
      assert out[t, 0, i + 4] == pytest.approx(z.imag, abs=1e-14)


def _norm(values, scale):
  mean = sum(v * v for v in values) / len(values)
  return [v / math.sqrt(mean + 1e-6) * float(s)
          for v, s in zip(values, scale, strict=True)]


def _times(matrix, values):
  return [sum(float(w) * v for w, v in zip(row, values, strict=True))
          for row in matrix]


def _gelu(x):
  return 0.5 * x * (
      1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
  )


def _by_hand(params, config, tokens):
  """Scalar arithmetic over Python lists: one global layer, few tokens."""
  layer, spec = params['layer_0'], config.full
  attn, h, half = layer['attn'], spec.head_dim, spec.head_dim // 2
  n, k = config.num_heads, spec.kv_heads
  table = params['embedder']['input_embedding']
  xs = [[float(v) * math.sqrt(config.width) for v in table[t]] for t in tokens]
  queries, keys, values = [], [], []
  for t, x in enumerate(xs):
    qkv = _times(attn['qkv']['w'], _norm(
        x, layer['pre_attention_norm']['scale']))
    heads = [qkv[i * h:(i + 1) * h] for i in range(n + 2 * k)]
    turned = []
    for i, head in enumerate(heads[:n + k]):
      name = 'query_norm' if i < n else 'key_norm'
      head = _norm(head, attn[name]['scale'])
      pairs = []
      for j in range(half):
        angle = t / spec.rope_theta ** (2 * j / h) / spec.rope_divisor
        pairs.append(complex(head[j], head[j + half])
                     * complex(math.cos(angle), math.sin(angle)))
      turned.append([p.real for p in pairs] + [p.imag for p in pairs])
    queries.append(turned[:n])
    keys.append(turned[n:])
    values.append(heads[n + k:])
  rows = []
  for t, x in enumerate(xs):
    joined = []
    for i in range(n):
      kv = {0: 0, 1: 0, 2: 1, 3: 1}[i]  # four query heads, two kv heads
      weights = [
          math.exp(sum(a * b for a, b in zip(
              queries[t][i], keys[s][kv], strict=True)) / 3.0)  # 9 ** -0.5
          for s in range(t + 1)
      ]
      joined += [
          sum(w * values[s][kv][j] for s, w in enumerate(weights))
          / sum(weights)
          for j in range(h)
      ]
    branch = _norm(_times(attn['attn_vec']['w'], joined),
                   layer['post_attention_norm']['scale'])
    x = [a + b for a, b in zip(x, branch, strict=True)]
    both = _times(layer['mlp']['gating']['w'],
                  _norm(x, layer['pre_ffw_norm']['scale']))
    f = config.hidden
    inner = [_gelu(both[i]) * both[f + i] for i in range(f)]
    branch = _norm(_times(layer['mlp']['linear']['w'], inner),
                   layer['post_ffw_norm']['scale'])
    x = [a + b for a, b in zip(x, branch, strict=True)]
    rows.append(_times(table, _norm(x, params['final_norm']['scale'])))
  return np.array(rows)


@pytest.mark.parametrize('tokens', [[7], [7, 0, 22]])
@pytest.mark.parametrize('dtype,tolerance', [
    (np.float64, 1e-12), (np.float32, 2e-5)])
def test_logits_worked_out_by_hand(tokens, dtype, tolerance):
  config = _config([_GLOBAL])
  params = _params(config)
  got = reference.logits(params, config, tokens, dtype=dtype)
  assert got.dtype == dtype
  np.testing.assert_allclose(
      got, _by_hand(params, config, tokens), rtol=0, atol=tolerance
  )


def test_one_token_ignores_rotary_and_window():
  tokens = [11]
  config = _config([_SLIDING, _GLOBAL])
  params = _params(config)
  other = dataclasses.replace(
      config,
      sliding=dataclasses.replace(config.sliding, window=1, rope_theta=7),
      full=dataclasses.replace(config.full, rope_theta=3, rope_divisor=1),
  )
  np.testing.assert_array_equal(
      reference.logits(params, config, tokens),
      reference.logits(params, other, tokens),
  )


@pytest.mark.parametrize('layers,last', [
    ([_SLIDING], 3 + 3),  # a window of 4 reaches 3 back
    ([_SLIDING, _SLIDING], 3 + 3 + 3),
    ([_GLOBAL], 15),
    ([_SLIDING, _GLOBAL], 15),
])
def test_a_changed_token_is_seen_exactly_where_it_should_be(layers, last):
  config = _config(layers)
  params = _params(config)
  tokens = np.arange(16) % config.vocab_size
  changed = tokens.copy()
  changed[3] = 20
  before = reference.forward(params, config, tokens, dtype=np.float64)
  after = reference.forward(params, config, changed, dtype=np.float64)
  differs = np.abs(before - after).max(axis=-1) > 1e-12
  np.testing.assert_array_equal(np.flatnonzero(differs),
                                np.arange(3, last + 1))


def test_rows_and_prefixes_agree_with_the_whole():
  config = _config([_SLIDING, _GLOBAL])
  params = _params(config)
  tokens = [3, 1, 4, 1, 5, 9, 2, 6]
  whole = reference.logits(params, config, tokens, dtype=np.float64)
  assert whole.shape == (8, config.vocab_size)
  some = reference.logits(params, config, tokens, [7, 2], dtype=np.float64)
  np.testing.assert_allclose(some, whole[[7, 2]], rtol=0, atol=1e-12)
  prefix = reference.logits(params, config, tokens[:3], dtype=np.float64)
  np.testing.assert_allclose(prefix, whole[:3], rtol=0, atol=1e-12)


def test_bfloat16_weights_are_used_at_their_exact_values():
  config = _config([_SLIDING, _GLOBAL])

  def cast(tree, dtype):
    if isinstance(tree, dict):
      return {k: cast(v, dtype) for k, v in tree.items()}
    return tree.astype(dtype)

  short = cast(_params(config), ml_dtypes.bfloat16)
  got = reference.logits(short, config, [1, 2, 3])
  assert got.dtype == np.float32
  np.testing.assert_array_equal(
      got, reference.logits(cast(short, np.float32), config, [1, 2, 3])
  )


@pytest.mark.parametrize('width,expected', [
    (640, 25.25), (1152, 34.0), (1536, 39.25), (2560, 50.5), (5376, 73.5)])
def test_rounded_embedding_scale(width, expected):
  # No layers: the hidden rows are the normed embedding; eps keeps its scale
  # visible when the embedding is as small as this.
  config = dataclasses.replace(_config([]), width=width)
  row = np.full((config.vocab_size, width), 1e-4)
  params = {'embedder': {'input_embedding': row},
            'final_norm': {'scale': np.ones(width)}}
  for rounded, scale in ((True, expected), (False, math.sqrt(width))):
    got = reference.forward(
        params, config, [0], dtype=np.float64, round_embedding_scale=rounded
    )
    x = 1e-4 * scale
    np.testing.assert_allclose(got, x / math.sqrt(x * x + 1e-6), rtol=1e-12)


def test_final_softcap():
  config = _config([_GLOBAL])
  params = _params(config)
  plain = reference.logits(params, config, [5, 6], dtype=np.float64)
  capped = reference.logits(
      params, dataclasses.replace(config, final_softcap=2), [5, 6],
      dtype=np.float64,
  )
  np.testing.assert_allclose(capped, 2 * np.tanh(plain / 2), rtol=1e-12)


@pytest.mark.parametrize('tokens', [[], [23], [-1], [[1, 2]], [0.5]])
def test_tokens_out_of_range_are_refused(tokens):
  config = _config([])
  with pytest.raises(errors.UsageError, match=r'\[0, 23\)'):
    reference.forward(_params(config), config, tokens)


@pytest.mark.parametrize('cut', [1, 5, 9])
def test_two_pieces_are_the_whole(cut):
  config = _config([_SLIDING, _GLOBAL, _SLIDING, _GLOBAL])
  params, tokens = _params(config), list(range(1, 12))
  whole = reference.forward(params, config, tokens, dtype=np.float64)
  kept: list = []
  front = reference.forward(
      params, config, tokens[:cut], dtype=np.float64, kept=kept)
  behind = reference.forward(
      params, config, tokens[cut:], dtype=np.float64, past=kept)
  np.testing.assert_allclose(
      np.concatenate([front, behind]), whole, rtol=0, atol=1e-12)
  assert [len(k) for k, _ in kept] == [cut] * 4


def test_two_pieces_are_the_whole_where_layers_share():
  model = model_helpers.tiny_of('tiny-gemma4-e2b:0', 'float32')
  tokens = model_helpers.tokens(40)
  kept: list = []
  whole, front, behind = (
      reference.forward(model.params, model.config, part, dtype=np.float64,
                        **more)
      for part, more in ((tokens, {}), (tokens[:30], {'kept': kept}),
                         (tokens[30:], {'past': kept})))
  np.testing.assert_allclose(
      np.concatenate([front, behind]), whole, rtol=0, atol=1e-11)
  assert [pair is None for pair in kept] == [False] * 5 + [True] * 5


def test_a_shift_of_every_kind_changes_nothing_but_rounding():
  config = _config([_SLIDING, _GLOBAL])
  params, tokens = _params(config), list(range(1, 12))

  def run(**shift):
    return reference.forward(
        params, config, tokens, dtype=np.float64, shift=shift or None)

  base = run()
  for shift in ({_SLIDING: 500, _GLOBAL: 500}, {_SLIDING: 0, _GLOBAL: 70}):
    moved = run(**shift)
    np.testing.assert_allclose(moved, base, rtol=0, atol=1e-11)
    assert (moved != base).any()
