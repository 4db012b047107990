import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import numerics
from kvgraft_jax import programs as programs_lib
from kvgraft_jax.checkpoints import tree
import model_helpers

_PROFILE = numerics.Profile('bfloat16', 32, 4, 16)
_RING = cache_lib.ring_size(24, _PROFILE)


def test_ring_holds_window_and_chunk_in_whole_pages():
  assert _RING == 64  # 24 + 32 - 1 = 55, in pages of 16.
  default = numerics.default_profile('bfloat16', chunk=512, page=128)
  assert cache_lib.ring_size(512, default) == 1024
  assert cache_lib.ring_size(1, _PROFILE) == 32
  assert cache_lib.ring_size(2, _PROFILE) == 48


def test_shapes_of_the_tiny_model():
  assert cache_lib.shapes(config_lib.TINY, _PROFILE, 3, 250) == {
      'sliding': (3, 3, 64 + 2 * 32, 2, 32), 'global': (2, 3, 256, 2, 32)}


@functools.partial(jax.jit, static_argnums=(2, 3, 5))
def _write(cache, rows, layer, b, start, margin):
  return cache_lib.write_rows(cache, rows, layer, b, start, margin)


@functools.partial(jax.jit, static_argnums=(1, 2, 4, 5))
def _page(cache, layer, b, number, dtype, margin):
  return cache_lib.read_page(cache, layer, b, number, 16, dtype, margin)


@pytest.mark.parametrize('start', [0, 1, 31, 64 - 32, 64 - 31, 63, 64, 1000])
@pytest.mark.parametrize('rows', [4, 32])
def test_ring_write_against_numpy(start, rows):
  rng = np.random.default_rng(start)
  before = rng.integers(0, 2**16, (2, 3, 64 + 64, 2, 4), np.uint16)
  new = rng.integers(0, 2**16, (rows, 2, 4), np.uint16)
  got = np.asarray(_write(before, new, 1, 2, np.int32(start), 32))
  slots = (start + np.arange(rows)) % 64
  want = before.copy()
  want[1, 2, 32 + slots] = new
  # The ring is exact; the margins are never read.
  np.testing.assert_array_equal(got[:, :, 32:96], want[:, :, 32:96])
  others = np.ones((2, 3), bool)
  others[1, 2] = False
  np.testing.assert_array_equal(got[others], before[others])


@pytest.mark.parametrize('start,rows', [(0, 32), (17, 4), (96, 32), (60, 4)])
def test_global_write_against_numpy(start, rows):
  rng = np.random.default_rng(start)
  before = rng.integers(0, 2**32, (2, 1, 128, 2, 4), np.uint32)
  new = rng.integers(0, 2**32, (rows, 2, 4), np.uint32)
  got = np.asarray(_write(before, new, 0, 0, np.int32(start), 0))
  want = before.copy()
  want[0, 0, start:start + rows] = new
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize('dtype', numerics.DTYPES)
@pytest.mark.parametrize('margin', [0, 32])
def test_read_page_against_numpy(dtype, margin):
  rng = np.random.default_rng(0)
  floats = jnp.asarray(
      rng.normal(size=(2, 2, 64 + 2 * margin, 2, 4)), jnp.float32)
  bits = np.asarray(cache_lib.to_bits(floats, dtype))
  for number in (0, 3, 4, 5, 9) if margin else (0, 3):
    got = np.asarray(_page(bits, 1, 0, np.int32(number), dtype, margin))
    slot = margin + number * 16 % 64
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(
        got.view(bits.dtype), bits[1, 0, slot:slot + 16])


def test_every_bfloat16_pattern_survives():
  every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)

  @functools.partial(
      jax.jit, compiler_options={'xla_allow_excess_precision': False})
  def there_and_back(x):
    return cache_lib.to_bits(cache_lib.from_bits(x, 'bfloat16'), 'bfloat16')

  np.testing.assert_array_equal(there_and_back(every), every)


def test_float32_patterns_survive():
  some = np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32)

  @jax.jit
  def there_and_back(x):
    return cache_lib.to_bits(cache_lib.from_bits(x, 'float32'), 'float32')

  np.testing.assert_array_equal(there_and_back(some), some)


@pytest.mark.parametrize('dtype', numerics.DTYPES)
def test_to_bits_rounds_to_nearest_even(dtype):
  x = np.random.default_rng(1).normal(size=4096).astype(np.float32)
  x[:2] = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # Ties.
  got = np.asarray(cache_lib.to_bits(jnp.asarray(x), dtype))
  want = np.asarray(x).astype(jnp.dtype(dtype))
  np.testing.assert_array_equal(got, want.view(got.dtype))
  if dtype == 'bfloat16':
    assert want[:2].astype(np.float32).tolist() == [1.0, 1 + 2.0**-6]


def test_a_write_past_the_end_raises_on_the_host():
  model = model_helpers.tiny()
  cache = model.programs.empty_cache(1, 256)
  step = np.zeros((1, 32), np.int32)
  with pytest.raises(AssertionError, match='32 rows at .225. is past the 256'):
    model.programs.run_step(
        model.params, cache, step, np.asarray([225], np.int32))
  assert not any(x.is_deleted() for x in jax.tree.leaves(cache))
  _, cache = model.programs.run_step(
      model.params, cache, step, np.asarray([224], np.int32))
  assert np.asarray(cache.k['global'])[:, 0, 255].any()


# The compiled step.

_LINE = re.compile(r'= (\w+)\[([\d,]+)\]\S* ([\w-]+)\(')
# What may have a cache-sized result: nothing that computes or moves elements.
_FREE = {'parameter', 'get-tuple-element', 'bitcast', 'dynamic-update-slice',
         'fusion', 'while', 'tuple', 'conditional', 'call'}


def _check_step(
    config, profile, rows, capacity, params, program='step', batch=1):
  """Inspects a compiled program for cache-sized work; returns its size."""
  programs = programs_lib.Programs(config, profile, params)
  compiled = getattr(programs, program)(rows, batch, capacity)
  shapes = set(cache_lib.shapes(config, profile, batch, capacity).values())
  sizes = {math.prod(shape) for shape in shapes}
  seen, bad = set(), []
  for line in compiled.as_text().splitlines():
    found = _LINE.search(line)
    if not found:
      continue
    shape = tuple(map(int, found[2].split(',')))
    if len(shape) > 2 and math.prod(shape) in sizes:  # Not a weight.
      seen.add(shape)
      if found[3] not in _FREE or found[1] not in ('u16', 'u32'):
        bad.append(line.strip())
  assert not bad, bad[:3]
  assert shapes <= seen  # The inspection saw the caches at all.
  width = np.dtype(cache_lib.BITS[profile.dtype]).itemsize
  aliased = compiled.memory_analysis().alias_size_in_bytes
  assert aliased >= 2 * width * sum(sizes)
  temporaries = compiled.memory_analysis().temp_size_in_bytes
  return temporaries, width * max(sizes)


@pytest.mark.parametrize('dtype', numerics.DTYPES)
@pytest.mark.parametrize('rows', [4, 32])
def test_step_has_no_cache_sized_copy_or_convert(rows, dtype):
  # 8,208 positions: no other array of the step has that many elements.
  model = model_helpers.tiny(dtype)
  temporaries, cache = _check_step(
      model.config, model.profile, rows, 8208, model.params)
  assert temporaries < cache, 'a temporary as large as the cache'


@pytest.mark.parametrize('dtype', numerics.DTYPES)
def test_nor_has_a_step_of_several_sequences(dtype):
  model = model_helpers.tiny(dtype)
  _check_step(model.config, model.profile, 4, 8208, model.params, batch=4)


@pytest.mark.parametrize('name, program', [
    ('tiny-gemma4-e2b', 'step'), ('tiny-gemma4-e2b', 'sharers'),
    ('tiny-gemma4-26b-a4b', 'step')])
def test_nor_has_a_step_of_gemma4(name, program):
  model = engine.load_model(f'{name}:0', self_test=False)
  temporaries, cache = _check_step(
      model.config, model.profile, 4, 8208, model.params, program)
  assert temporaries < cache


def test_the_inspection_notices_a_converted_cache():
  shape = (2, 1, 8208, 2, 32)

  @jax.jit
  def bad(x):
    return (x.astype(jnp.float32) * 2).astype(jnp.uint16)

  text = bad.lower(jax.ShapeDtypeStruct(shape, np.uint16)).compile().as_text()
  lines = [_LINE.search(line) for line in text.splitlines()]
  assert any(m and m[3] not in _FREE and m[2] == '2,1,8208,2,32' for m in lines)


@pytest.mark.real
@pytest.mark.slow  # 70 s on 2 cores: four programs to compile.
@pytest.mark.parametrize('dtype', numerics.DTYPES)
@pytest.mark.parametrize('rows', [4, 512])
def test_real_step_has_no_cache_sized_copy_or_convert(rows, dtype):
  config = config_lib.PRESETS['gemma3-270m']
  profile = dataclasses.replace(
      numerics.default_profile(dtype), tile=4)

  def struct(leaf):
    if isinstance(leaf, dict):
      return {k: struct(v) for k, v in leaf.items()}
    shape, is_matrix = leaf
    return jax.ShapeDtypeStruct(shape, dtype if is_matrix else 'float32')

  params = {k: struct(v) for k, v in tree.param_shapes(config).items()}
  _check_step(config, profile, rows, 41088, params)
