import copy
import dataclasses
import functools

from flax import nnx
import jax
import numpy as np
import pytest

import kvgraft_jax as kv
from kvgraft_jax import config as config_lib
from kvgraft_jax import programs as programs_lib
import model_helpers

_ROWS = 4
_IDS = model_helpers.tokens(_ROWS)


@pytest.fixture(scope='module')
def model():
  """The tiny model's first and last layer: half the time to compile."""
  whole = model_helpers.tiny()
  model = copy.copy(whole)
  model.config = dataclasses.replace(
      whole.config, layers=(config_lib.SLIDING, config_lib.GLOBAL))
  model.params = {k: v for k, v in whole.params.items()
                  if not k.startswith('layer_')}
  model.params |= {'layer_0': whole.params['layer_0'],
                   'layer_1': whole.params['layer_4']}
  model.programs = programs_lib.Programs(
      model.config, model.profile, model.params)
  return model


@pytest.fixture(scope='module')
def module(model):
  return kv.nn.Gemma(model.config, model.profile)


@pytest.fixture(scope='module')
def expected(model):
  """Hidden rows and cache of the compiled program itself."""
  hidden, cache = model.programs.run_step(
      model.params, model.programs.empty_cache(1, 256),
      np.asarray([_IDS], np.int32), np.zeros(1, np.int32))
  return jax.tree.map(np.asarray, (hidden, cache))


def _inputs(module):
  starts = np.zeros(1, np.int32)
  return (np.asarray([_IDS], np.int32), starts, module.empty_cache(1, 256),
          module.rope(starts, _ROWS))


def _equal(found, expected):
  found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
  assert len(found) == len(expected)
  for a, b in zip(found, expected):
    assert np.asarray(a).tobytes() == b.tobytes()


def _options(module):
  return dict(module.profile.compiler_options)


def test_linen_module_has_the_engines_bits(model, module, expected):
  apply = jax.jit(module.apply, compiler_options=_options(module))
  hidden, cache = apply({'params': model.params}, *_inputs(module))
  _equal((hidden, cache), expected)
  logits = jax.jit(functools.partial(module.apply, method='logits'),
                   compiler_options=_options(module))(
                       {'params': model.params}, hidden[0], cache)
  want = model.prefill(_IDS).logits()
  assert np.asarray(logits)[-1].tobytes() == want.tobytes()


def test_init_makes_the_engines_tree(model, module):
  made = jax.eval_shape(
      functools.partial(module.init), jax.random.key(0), *_inputs(module))
  shapes = jax.tree.map(lambda x: (x.shape, x.dtype), made['params'])
  assert shapes == jax.tree.map(
      lambda x: (x.shape, x.dtype), dict(model.params))


@pytest.fixture(scope='module')
def bridged(model, module):
  """The module for NNX users, with the engine's weights in it."""
  wrapped = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0))
  for name, value in model.params.items():
    setattr(wrapped, name, jax.tree.map(nnx.Param, value))
  return wrapped


def test_nnx_jit(model, bridged, module, expected):
  # It takes no compiler options, so it equals what has none either.
  found = nnx.jit(lambda m, *args: m(*args))(bridged, *_inputs(module))
  plain = jax.jit(module.apply)({'params': model.params}, *_inputs(module))
  _equal(found, jax.tree.map(np.asarray, plain))
  np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=0.05)


def test_nnx_split_and_merge_in_jit_with_donation(bridged, module, expected):
  graph, state = nnx.split(bridged)

  @functools.partial(
      jax.jit, donate_argnums=2, compiler_options=_options(module))
  def run(state, tokens, cache, starts, rope):
    return nnx.merge(graph, state)(tokens, starts, cache, rope)

  tokens, starts, cache, rope = _inputs(module)
  found = run(state, tokens, cache, starts, rope)
  _equal(found, expected)
  assert cache.k['global'].is_deleted()


def test_nnx_eager_equals_linen_eager(model, bridged, module, expected):
  found = bridged(*_inputs(module))
  _equal(found, jax.tree.map(
      np.asarray, module.apply({'params': model.params}, *_inputs(module))))
  np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=0.05)


@pytest.mark.parametrize('name', [
    'tiny-gemma4-e2b',
    pytest.param('tiny-gemma4-26b-a4b', marks=pytest.mark.slow)])
def test_gemma4_has_the_engines_bits(name):
  # One program here, two in the engine where layers share keys and values.
  model = kv.load_model(f'{name}:0', self_test=False)
  module = kv.nn.Gemma(model.config, model.profile)
  hidden, cache = model.programs.run_step(
      model.params, model.programs.empty_cache(1, 256),
      np.asarray([_IDS], np.int32), np.zeros(1, np.int32))
  expected = jax.tree.map(np.asarray, (hidden, cache))
  apply = jax.jit(module.apply, compiler_options=_options(module))
  _equal(apply({'params': model.params}, *_inputs(module)), expected)
