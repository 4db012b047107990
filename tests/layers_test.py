import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import attention
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import experts
from kvgraft_jax import layers
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics
from kvgraft_jax import rope as rope_lib
from kvgraft_jax.checkpoints import random_init
import model_helpers

_ONE = np.float32(1)


def _normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize('size', [1, 2, 5, 24, 640, 1152])
def test_tree_sum_is_exact_on_integers_and_close_on_floats(size):
  whole = np.random.default_rng(size).integers(-1000, 1000, (3, size))
  tree_sum = jax.jit(layers.tree_sum)
  got = tree_sum(whole.astype(np.float32))
  np.testing.assert_array_equal(got[:, 0], whole.sum(-1))
  x = _normal(3, size)
  got = np.asarray(tree_sum(x))
  want = x.astype(np.float64).sum(-1, keepdims=True)
  np.testing.assert_allclose(
      got, want, rtol=0, atol=1e-6 * np.abs(x).sum(-1).max())
  got = jax.jit(layers.tree_max)(x)
  np.testing.assert_array_equal(got, x.max(-1, keepdims=True))


def _tree(row):
  """The documented order of additions, one float32 at a time."""
  row = list(row)
  while len(row) > 1 and len(row) % 2 == 0:
    half = len(row) // 2
    row = [np.float32(a + b) for a, b in zip(row[:half], row[half:])]
  return functools.reduce(lambda a, b: np.float32(a + b), row)


@pytest.mark.parametrize('rows', [1, 4, 512])
@pytest.mark.parametrize('size', [24, 64, 640])
def test_tree_sum_has_one_order_at_every_row_count(rows, size):
  x = _normal(rows, size)
  got = np.asarray(jax.jit(layers.tree_sum)(x))
  for i in {0, rows // 2, rows - 1}:
    assert got[i, 0] == _tree(x[i])


def test_rms_norm_against_float64():
  x, scale = _normal(5, 64) * np.float32(3), _normal(64, seed=1)
  got = layers.rms_norm(
      x, scale, np.float32(1 / 64), np.float32(1e-6), _ONE)
  wide = x.astype(np.float64)
  want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_rms_norm_keeps_epsilon():
  x = np.full((1, 64), 1e-4, np.float32)
  got = layers.rms_norm(
      x, np.ones(64, np.float32), np.float32(1 / 64), np.float32(1e-6), _ONE)
  np.testing.assert_allclose(got, 1e-4 / math.sqrt(1.01e-6), rtol=1e-5)


def test_gelu_against_float64():
  x = np.linspace(-9, 9, 1001, dtype=np.float32)
  got = layers.gelu_tanh(
      x, np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715), _ONE)
  want = [0.5 * v * (1 + math.tanh(
      math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.tolist()]
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize('kind', config_lib.KINDS)
def test_rotary_is_a_complex_rotation(kind):
  spec = config_lib.TINY.spec(kind)
  positions = np.asarray([0, 1, 77, 4095])
  x = _normal(4, 3, spec.head_dim)
  half = spec.head_dim // 2
  got = np.asarray(layers.rotary(x, *rope_lib.rope_rows(positions, spec), _ONE))
  wide = x.astype(np.float64)
  for t, position in enumerate(positions):
    angle = position * float(spec.rope_theta) ** (
        -np.arange(half) / half) / spec.rope_divisor
    z = (wide[t, :, :half] + 1j * wide[t, :, half:]) * np.exp(1j * angle)
    np.testing.assert_allclose(got[t, :, :half], z.real, rtol=0, atol=2e-6)
    np.testing.assert_allclose(got[t, :, half:], z.imag, rtol=0, atol=2e-6)
  np.testing.assert_array_equal(got[0], x[0])


def test_matmul_rounds_operands_and_accumulates_in_float32():
  x, w = _normal(4, 640), _normal(8, 640, seed=1)
  for dtype, tolerance in ((jnp.bfloat16, 1e-4), (jnp.float32, 1e-4)):
    low = jnp.asarray(w).astype(dtype)
    got = layers.matmul(jnp.asarray(x), low)
    assert got.dtype == jnp.float32
    want = (np.asarray(jnp.asarray(x).astype(dtype), np.float64)
            @ np.asarray(low, np.float64).T)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


# The seal: one layer in five programs or more, cut also between a norm and the
# residual addition that it feeds, where contraction differs.


class _Layer:
  """One layer and its inputs; pieces as functions of arrays alone."""

  def __init__(self, config, profile, params, literal_one):
    self.config, self.profile = config, profile
    self.params = params
    self.kind = config.layers[0]
    self.literal = literal_one
    self.rows = profile.chunk
    positions = np.arange(self.rows)
    self.rope = {k: rope_lib.rope_rows(positions, config.spec(k))
                 for k in config_lib.KINDS}
    self.tokens = np.asarray(
        model_helpers.tokens(self.rows, vocab=config.vocab_size), np.int32)

  def empty(self):
    return cache_lib.empty(
        self.config, self.profile, batch=1, capacity=self.rows,
        scalars=model_lib.scalars(self.config, self.profile.dtype))

  def scalars(self, s):
    """Returns the run-time scalars, or with the seal as a literal."""
    return dict(s) | {'one': jnp.float32(1)} if self.literal else s

  def run(self, function, *args):
    program = jax.jit(
        function, compiler_options=dict(self.profile.compiler_options))
    return jax.tree.map(np.asarray, program(*args))

  def whole(self):
    def step(params, cache, tokens, starts, rope):
      cache = cache.replace(scalars=self.scalars(cache.scalars))
      hidden, cache = model_lib.step(
          params, cache, tokens, starts, rope, config=self.config,
          profile=self.profile)
      return hidden, cache.k[self.kind], cache.v[self.kind]

    hidden, k, v = self.run(
        step, self.params, self.empty(), self.tokens[None],
        np.zeros(1, np.int32), self.rope)
    return hidden[0], k, v

  def cut(self):
    layer, spec = self.params['layer_0'], self.config.spec(self.kind)
    cache = self.empty()
    s = jax.tree.map(np.asarray, cache.scalars)
    margin = 0 if spec.window is None else self.profile.chunk

    def first(params, tokens, rope, s):
      s = self.scalars(s)
      x = model_lib.embed(params, tokens, s)
      inputs = None
      if self.config.per_layer_dim:
        inputs = model_lib.per_layer_inputs(
            params, tokens, x, range(1), self.config, s)[:, 0]
      return x, inputs, model_lib.qkv_rows(
          params['layer_0'], x, rope, self.kind, self.config, s)

    def second(q, k, v, k_cache, v_cache, start, s):
      s = self.scalars(s)
      written = [
          cache_lib.write_rows(
              c, cache_lib.to_bits(rows, self.profile.dtype), 0, 0, start,
              margin) for c, rows in ((k_cache, k), (v_cache, v))]
      return attention.attend(
          q, *written, layer=0, b=0, start=start, spec=spec,
          profile=self.profile, one=s['one'])

    def third(layer, mixed, s):
      s = self.scalars(s)
      out = layers.matmul(mixed.reshape(mixed.shape[0], -1),
                          layer['attn']['attn_vec']['w'])
      return _norm(out, layer['post_attention_norm'], s)

    def fourth(layer, x, normed, s):
      s = self.scalars(s)
      x = x + normed * s['one']
      both = layers.matmul(_norm(x, layer['pre_ffw_norm'], s),
                           layer['mlp']['gating']['w'])
      hidden = layers.gated(
          both, s['gelu_inner'], s['gelu_cubic'], s['one'])
      outs = [layers.matmul(hidden, layer['mlp']['linear']['w'])]
      if self.config.num_experts:
        ids, weights = experts.route(
            layer['router'], x, self.config.top_k_experts, s)
        outs.append(experts.mix(
            layer['experts'], _norm(x, layer['pre_ffw_norm_2'], s), ids,
            weights, s))
        names = 'post_ffw_norm_1', 'post_ffw_norm_2'
        outs = [_norm(o, layer[n], s) for n, o in zip(names, outs)]
      return x, outs

    def fifth(layer, x, outs, s):
      s = self.scalars(s)
      out = outs[0]
      if self.config.num_experts:
        out = outs[0] * s['one'] + outs[1] * s['one']
      return x + _norm(out, layer['post_ffw_norm'], s) * s['one']

    def sixth(layer, x, inputs, s):
      s = self.scalars(s)
      gate = layers.gelu_tanh(
          layers.matmul(x, layer['per_layer_input_gate']['w']),
          s['gelu_inner'], s['gelu_cubic'], s['one'])
      out = layers.matmul(gate * inputs, layer['per_layer_projection']['w'])
      return _norm(out, layer['post_per_layer_input_norm'], s)

    def seventh(layer, x, normed, s):
      s = self.scalars(s)
      if normed is not None:
        x = x + normed * s['one']
      if self.config.layer_scalar:
        x = x * layer['layer_scalar'][0] * s['one']
      return x

    x, inputs, (q, k, v) = self.run(
        first, self.params, self.tokens, self.rope, s)
    mixed, k_cache, v_cache = self.run(
        second, q, k, v, cache.k[self.kind], cache.v[self.kind], np.int32(0), s)
    normed = self.run(third, layer, mixed, s)
    x, outs = self.run(fourth, layer, x, normed, s)
    x = self.run(fifth, layer, x, outs, s)
    normed = None
    if inputs is not None:
      normed = self.run(sixth, layer, x, inputs, s)
    return self.run(seventh, layer, x, normed, s), k_cache, v_cache


def _norm(x, params, s):
  return layers.rms_norm(
      x, params['scale'], s['inv_width'], s['eps'], s['one'])


def _one_layer(config, kind):
  """A config of one layer; the other kind's cache stays empty."""
  return dataclasses.replace(config, layers=(kind,))


def _differing(case):
  """Returns (differing values, all values) between whole and cut programs."""
  pairs = [(a.view(np.uint32), b.view(np.uint32))
           for a, b in zip(case.whole(), case.cut())]
  assert all(np.asarray(a).any() for a, _ in pairs)
  return sum(int((a != b).sum()) for a, b in pairs), sum(
      a.size for a, _ in pairs)


def _tiny_case(kind, dtype, literal, preset='tiny'):
  config = dataclasses.replace(
      _one_layer(config_lib.TINY_PRESETS[preset], kind), shared_layers=0)
  return _Layer(config, numerics.default_profile(
      dtype, chunk=32, tile=4, page=16),
                random_init.init_params(config, 3, dtype), literal)


@pytest.mark.parametrize('kind, preset', [
    ('sliding', 'tiny'), ('global', 'tiny'),
    ('sliding', 'tiny-gemma4-e2b'), ('global', 'tiny-gemma4-31b'),
    ('sliding', 'tiny-gemma4-26b-a4b')])
def test_a_sealed_layer_in_pieces_equals_the_whole(kind, preset):
  differing, count = _differing(_tiny_case(kind, 'float32', False, preset))
  assert differing == 0, f'{differing} of {count} values'


def test_without_the_seal_the_five_programs_differ():
  # Shows that the cut above is one at which contraction matters. A compiler
  # that never contracts could make this pass too; then the seal costs nothing.
  differing, count = _differing(_tiny_case('sliding', 'float32', True))
  print(f'literal seal: {differing} of {count} values differ')
  if not numerics.cpu_features() or 'fma' not in numerics.cpu_features():
    pytest.skip('no fused multiply-add here')
  assert differing > 0


@pytest.mark.slow  # 30 s each at a load of 5.
@pytest.mark.parametrize('kind', config_lib.KINDS)
def test_a_sealed_layer_of_270m_shapes_in_five_programs(kind):
  config = dataclasses.replace(
      _one_layer(config_lib.PRESETS['gemma3-270m'], kind), vocab_size=4096)
  profile = numerics.default_profile('float32')
  params = random_init.init_params(config, 3, 'float32')
  differing, count = _differing(_Layer(config, profile, params, False))
  assert differing == 0, f'{differing} of {count} values'
  control, _ = _differing(_Layer(config, profile, params, True))
  print(f'literal seal: {control} of {count} values differ')
