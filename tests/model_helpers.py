"""Models, tokens and checks that several tests share.

Models are kept for the whole process, so that a program is compiled once.
"""

import copy
import dataclasses
import functools
import hashlib

import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import programs as programs_lib

DTYPES = ('bfloat16', 'float32')
WINDOW = config_lib.TINY.sliding.window


@functools.cache
def tiny(
    dtype: str = 'bfloat16', seed: int = 0, chunk: int = 32, tile: int = 4,
    page: int = 16, capacity: int | None = None,
) -> engine.Model:
  """Returns tiny:SEED; its self-test runs when a class is needed."""
  return engine.load_model(
      f'tiny:{seed}', dtype=dtype, chunk=chunk, tile=tile, page=page,
      capacity=capacity, self_test=False)


@functools.cache
def tiny_of(spec: str, dtype: str = 'bfloat16') -> engine.Model:
  """Returns any tiny model; its self-test runs when a class is needed."""
  return engine.load_model(spec, dtype=dtype, self_test=False)


@functools.cache
def exact(dtype: str = 'bfloat16') -> engine.Model:
  """Returns tiny:0 with the smallest tile that its self-test proves."""
  model = tiny(dtype)
  return model if model.self_test().exact else tiny(dtype, tile=32)


@functools.cache
def variant(model: engine.Model, **changes) -> engine.Model:
  """Returns a model of the same weights and report under another profile."""
  other = copy.copy(model)
  other.profile = dataclasses.replace(model.profile, **changes)
  other.programs = programs_lib.Programs(
      model.config, other.profile, model.params)
  return other


@functools.cache
def real(dtype: str = 'bfloat16') -> engine.Model:
  """Returns the real Gemma 3 270M with the default profile."""
  return engine.load_model('gemma3-270m', dtype=dtype)


def tokens(count: int, seed: int = 0, vocab: int = 320) -> list[int]:
  """Returns `count` ids of [5, vocab) by plain arithmetic."""
  value, result = 12345 + seed, []
  for _ in range(count):
    value = (value * 1103515245 + 12345) % 2**31
    result.append(5 + (value >> 8) % (vocab - 5))
  return result


def cache_sha256(context: engine.Context, side: str = 'both') -> str:
  """Returns SHA-256 over all that a continuation can see of K, V or both."""
  context.compute()
  model, done = context.model, context.length
  sha = hashlib.sha256()
  for array, positions in visible_rows(model, context.cache, done, side):
    sha.update(np.ascontiguousarray(array[:, positions]).tobytes())
  return sha.hexdigest()


def visible_rows(model: engine.Model, cache, done: int, side: str = 'both'):
  """Yields (host array [L, S, K, H], visible slots) of each kind and side."""
  for kind in config_lib.KINDS:
    window = model.config.spec(kind).window
    positions = np.arange(0 if window is None else max(0, done - window), done)
    margin = 0 if window is None else model.profile.chunk
    for name, arrays in (('k', cache.k), ('v', cache.v)):
      if side in (name, 'both'):
        array = np.asarray(arrays[kind])[:, 0]
        yield array, margin + positions % (array.shape[1] - 2 * margin)
