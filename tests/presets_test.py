"""The ten published sizes, by shapes alone: no weights are made."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics
from kvgraft_jax.checkpoints import tree

# Billions of parameters of the text model, to three digits.
PARAMETERS = {
    'gemma3-270m': 0.268, 'gemma3-1b': 1.00, 'gemma3-4b': 3.88,
    'gemma3-12b': 11.8, 'gemma3-27b': 27.0, 'gemma4-e2b': 4.63,
    'gemma4-e4b': 7.46, 'gemma4-12b': 11.9, 'gemma4-26b-a4b': 25.2,
    'gemma4-31b': 30.7}
# Bytes a token of all cached layers in bfloat16: sliding, global.
KV_BYTES = {
    'gemma3-270m': (15360, 3072), 'gemma3-1b': (22528, 4096),
    'gemma3-4b': (118784, 20480), 'gemma3-12b': (327680, 65536),
    'gemma3-27b': (425984, 81920), 'gemma4-e2b': (12288, 6144),
    'gemma4-e4b': (40960, 16384), 'gemma4-12b': (327680, 16384),
    'gemma4-26b-a4b': (204800, 20480), 'gemma4-31b': (819200, 81920)}


def shape_of(config, dtype):
  """Returns the parameter tree as shapes."""
  return tree.nest({
      path: jax.ShapeDtypeStruct(
          shape, jnp.dtype(dtype if is_matrix else 'float32'))
      for path, (shape, is_matrix) in tree.flatten(tree.param_shapes(config))})


@pytest.mark.parametrize('name', config_lib.PRESETS)
def test_a_step_of_every_size_has_the_published_shapes(name):
  config = config_lib.PRESETS[name]
  profile = numerics.default_profile('bfloat16')
  params = shape_of(config, 'bfloat16')
  count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
  assert float(f'{count / 1e9:.3g}') == PARAMETERS[name]
  assert set(PARAMETERS) == set(config_lib.PRESETS)

  shapes = cache_lib.shapes(config, profile, 1, 4096)
  bits = {k: jax.ShapeDtypeStruct(s, np.uint16) for k, s in shapes.items()}
  for kind, wanted in zip(('sliding', 'global'), KV_BYTES[name]):
    layers, _, _, heads, dim = shapes[kind]
    assert 2 * 2 * layers * heads * dim == wanted, kind
  scalars = {
      k: jax.ShapeDtypeStruct((), np.float32)
      for k in model_lib.scalars(config, 'bfloat16')}
  rope = {
      kind: (jax.ShapeDtypeStruct(
          (4, config.spec(kind).head_dim // 2), np.float32),) * 2
      for kind in config_lib.KINDS}
  cache = cache_lib.KVCache(dict(bits), dict(bits), scalars)
  hidden, after = jax.eval_shape(
      functools.partial(model_lib.step, config=config, profile=profile),
      params, cache, jax.ShapeDtypeStruct((1, 4), np.int32),
      jax.ShapeDtypeStruct((1,), np.int32), rope)
  assert hidden.shape == (1, 4, config.width) and hidden.dtype == np.float32
  assert after.k == cache.k and after.v == cache.v
  logits = jax.eval_shape(
      functools.partial(model_lib.head, config=config), params,
      jax.ShapeDtypeStruct((4, config.width), np.float32), scalars)
  assert logits.shape == (4, 262144)


@pytest.mark.parametrize('name', config_lib.PRESETS)
def test_the_canonical_tensors_are_the_parameters(name):
  config = config_lib.PRESETS[name]
  slots = tree.slots(config)
  leaves = dict(tree.flatten(tree.param_shapes(config)))
  filled = {path: [] for path in leaves}
  for slot in slots.values():
    filled[slot.path].append((slot.row, slot.row + slot.shape[0]))
    assert leaves[slot.path][0][1:] == slot.shape[1:]
  for path, parts in filled.items():  # Every row of a leaf, once.
    ends = sorted(parts)
    assert ends[0][0] == 0 and ends[-1][1] == leaves[path][0][0]
    assert all(a[1] == b[0] for a, b in zip(ends, ends[1:]))


@pytest.mark.parametrize(
    'name, local, shared, producers', [
        ('gemma4-e2b', 28, 20, {'sliding': 13, 'global': 14}),
        ('gemma4-e4b', 35, 18, {'sliding': 22, 'global': 23})])
def test_shared_layers_read_the_published_producers(
    name, local, shared, producers):
  config = config_lib.PRESETS[name]
  assert config.layers.count('sliding') == local
  assert config.shared_layers == shared
  for layer in range(config.first_shared, len(config.layers)):
    kind = config.layers[layer]
    row = config.cache_row(layer)
    assert config.kind_layers(kind)[row] == producers[kind]
