"""Compiled programs, one for each fixed shape, and their persistent cache."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import functools
import hashlib
import os
import threading
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics
from kvgraft_jax import paths
from kvgraft_jax import rope as rope_lib


def enable_compilation_cache() -> str | None:
  """Lets jax keep compiled programs in the user's cache directory.

  The folder is named by the CPU's features and jaxlib's version, because an
  entry made for another CPU may crash. Does nothing where the importer, or
  `JAX_COMPILATION_CACHE_DIR`, has chosen a folder already.

  Returns:
    The folder in use, or None where it cannot be made.
  """
  chosen = getattr(jax.config, 'jax_compilation_cache_dir', None)
  if chosen:
    return chosen
  env = numerics.environment()
  what = '|'.join(f'{k}={v}' for k, v in sorted(env.items()))
  folder = paths.cache_dir() / 'xla' / (
      f"{env['jaxlib']}-{env['backend']}-"
      f'{hashlib.sha256(what.encode()).hexdigest()[:16]}')
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:
    return None
  if not os.access(folder, os.W_OK):
    return None
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)
  return str(folder)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
  """Traces as the class says, whatever the importer has set for itself."""
  with jax.enable_x64(False), jax.default_matmul_precision(None):
    yield


@functools.partial(jax.jit, static_argnames='size')
def _slice(hidden: jax.Array, first: jax.Array, size: int) -> jax.Array:
  return lax.dynamic_slice_in_dim(hidden, first, size, axis=1)


def _cut(hidden: jax.Array, first: int, size: int) -> jax.Array:
  """Returns rows [first, first + size) of axis 1; compiled once a size."""
  if size == hidden.shape[1]:
    return hidden
  return _slice(hidden, np.int32(first), size)


class Programs:
  """Step and head programs of one (config, profile); compiled when needed.

  A model whose last layers share keys and values has two programs a step,
  always: one for the owners, one for the sharers. So no value is ever computed
  by another kind of program, and rows whose hidden state nobody asks for skip
  the sharers.

  Attributes:
    hlo_sha256: program name -> SHA-256 of its StableHLO without locations.
  """

  def __init__(
      self, config: config_lib.ModelConfig, profile: numerics.Profile,
      params: model_lib.Params,
  ):
    self.config = config
    self.profile = profile
    self.hlo_sha256: dict[str, str] = {}
    self._params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    self._scalars = {
        name: jnp.asarray(x)
        for name, x in model_lib.scalars(config, profile.dtype).items()}
    self._compiled: dict[tuple, Any] = {}
    self._lock = threading.Lock()

  def _compile(self, name: tuple, fun: Callable, args: tuple, donate=()):
    with self._lock, _own_settings():
      if name not in self._compiled:
        lowered = jax.jit(
            fun, donate_argnums=donate,
            compiler_options=dict(self.profile.compiler_options),
        ).lower(*args)
        text = lowered.as_text().encode()
        self.hlo_sha256['.'.join(map(str, name))] = hashlib.sha256(
            text).hexdigest()
        self._compiled[name] = lowered.compile()
      return self._compiled[name]

  def compiled(
      self, name: tuple, fun: Callable, args: tuple, donate: tuple = ()
  ) -> Callable:
    """Returns `fun`, compiled for arguments like `args` unless it is already.

    Args:
      name: of the program and its shapes.
      fun: a pure function.
      args: arrays, or what `jax.jit` lowers for.
      donate: numbers of the arguments that it may overwrite.
    """
    found = self._compiled.get(name)
    return found if found is not None else self._compile(
        name, fun, args, donate)

  def step(self, rows: int, batch: int, capacity: int) -> Callable:
    """Returns the compiled `model.owners` for this shape; donates the cache.

    Where no layer shares keys and values these are all layers.
    """
    name = ('step', rows, batch, capacity)
    if name in self._compiled:
      return self._compiled[name]
    fun = functools.partial(
        model_lib.owners, config=self.config, profile=self.profile)
    cache, tokens, starts, rope = self._step_shapes(rows, batch, capacity)
    return self._compile(
        name, fun, (self._params, cache, tokens, starts, rope), donate=(1,))

  def sharers(self, rows: int, batch: int, capacity: int) -> Callable:
    """Returns the compiled `model.sharers`; donates the cache."""
    name = ('sharers', rows, batch, capacity)
    if name in self._compiled:
      return self._compiled[name]
    fun = functools.partial(
        model_lib.sharers, config=self.config, profile=self.profile)
    cache, tokens, starts, rope = self._step_shapes(rows, batch, capacity)
    hidden = jax.ShapeDtypeStruct(
        tokens.shape + (self.config.width,), np.float32)
    return self._compile(
        name, fun, (self._params, cache, hidden, tokens, starts, rope),
        donate=(1,))

  def _step_shapes(self, rows: int, batch: int, capacity: int) -> tuple:
    """Returns shapes of cache, tokens, starts and rope."""
    bits = cache_lib.BITS[self.profile.dtype]
    shapes: dict[str, Any] = {
        kind: jax.ShapeDtypeStruct(shape, bits)
        for kind, shape in cache_lib.shapes(
            self.config, self.profile, batch, capacity).items()}
    cache = cache_lib.KVCache(
        dict(shapes), dict(shapes), self.fresh_scalars())
    rope = {}
    for kind in config_lib.KINDS:
      half = self.config.spec(kind).head_dim // 2
      rope[kind] = (jax.ShapeDtypeStruct((batch * rows, half), np.float32),) * 2
    return (cache, jax.ShapeDtypeStruct((batch, rows), np.int32),
            jax.ShapeDtypeStruct((batch,), np.int32), rope)

  def head(self) -> Callable:
    """Returns the compiled `model.head` for one tile of rows."""
    name = ('head', self.profile.tile)
    if name in self._compiled:
      return self._compiled[name]
    fun = functools.partial(model_lib.head, config=self.config)
    rows = jax.ShapeDtypeStruct((self.profile.tile, self.config.width),
                                np.float32)
    return self._compile(name, fun, (self._params, rows, self._scalars))

  def empty_cache(self, batch: int, capacity: int) -> cache_lib.KVCache:
    """Returns a cache of zeros."""
    return cache_lib.empty(
        self.config, self.profile, batch=batch, capacity=capacity,
        scalars=model_lib.scalars(self.config, self.profile.dtype))

  def run_step(
      self, params: model_lib.Params, cache: cache_lib.KVCache,
      tokens: np.ndarray, starts: np.ndarray,
      wanted: tuple[int, int] | None = None,
  ) -> tuple[jax.Array, cache_lib.KVCache]:
    """Runs one step; the bound of the cache is checked here, on the host.

    Args:
      params: weights.
      cache: donated.
      tokens: int32 [B, R], padding included.
      starts: int32 [B].
      wanted: rows [first, stop) of each sequence whose hidden state matters;
        None for all. Only layers that share keys and values make use of it.

    Returns:
      hidden float32 [B, stop - first, D] and the new cache.
    """
    batch, rows = tokens.shape
    capacity = cache.capacity
    if int(starts.max()) + rows > capacity:
      raise AssertionError(
          f'step of {rows} rows at {starts} is past the {capacity} slots')
    held = [cache]

    def owners(where):
      hidden, held[0] = self.step(rows, batch, capacity)(
          params, held[0], *where)
      return hidden

    def sharers(hidden, where):
      hidden, held[0] = self.sharers(hidden.shape[1], batch, capacity)(
          params, held[0], hidden, *where)
      return hidden

    hidden = self.run_rows(tokens, starts, wanted, owners, sharers)
    return hidden, held[0]

  def run_rows(
      self, tokens: np.ndarray, starts: np.ndarray,
      wanted: tuple[int, int] | None, owners: Callable, sharers: Callable,
  ) -> jax.Array:
    """Runs a step's one or two programs; returns the wanted hidden rows.

    Args:
      tokens: int32 [B, R].
      starts: int32 [B].
      wanted: as in `run_step`.
      owners: called with (tokens, starts, rope), returns hidden [B, R, D].
      sharers: called with hidden [B, r, D] and (tokens, starts, rope) of its
        rows, returns hidden [B, r, D]; only if layers share keys and values.
    """
    rows = tokens.shape[1]
    where = self._where(tokens, starts)
    hidden = owners(where)
    first, stop = wanted or (0, rows)
    skip = 0
    if self.config.shared_layers and first < stop:
      some = rows if stop - first > self.profile.tile else min(
          rows, self.profile.tile)
      skip = min(first, rows - some)
      hidden = _cut(hidden, skip, some)
      if some < rows:
        where = self._where(tokens[:, skip:skip + some], starts + skip)
      hidden = sharers(hidden, where)
    return _cut(hidden, first - skip, stop - first)

  def _where(
      self, tokens: np.ndarray, starts: np.ndarray
  ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Returns tokens, starts and rotary rows as a program takes them."""
    positions = (starts[:, None] + np.arange(tokens.shape[1])).reshape(-1)
    # Padding may lie behind the last exact position; nobody reads its rows.
    positions = np.minimum(positions, rope_lib.MAX_POSITION)
    return (jnp.asarray(tokens, np.int32), jnp.asarray(starts, np.int32),
            self.rope_rows(positions))

  def rope_rows(
      self, positions: np.ndarray
  ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns kind -> cos and sin, float32 [n, H / 2], of int positions [n]."""
    return {kind: rope_lib.rope_rows(positions, self.config.spec(kind))
            for kind in config_lib.KINDS}

  def fresh_scalars(self) -> dict[str, jax.Array]:
    """Returns the scalars of a new cache; a step donates them with it."""
    return {name: jnp.copy(x) for name, x in self._scalars.items()}

  def run_head(
      self, params: model_lib.Params, hidden: jax.Array | np.ndarray
  ) -> np.ndarray:
    """Returns logits float32 [n, V] of n hidden rows, a tile at a time."""
    tile = self.profile.tile
    result = []
    for at in range(0, hidden.shape[0], tile):
      rows = np.zeros((tile, self.config.width), np.float32)
      part = np.asarray(hidden[at:at + tile])
      rows[:len(part)] = part
      logits = self.head()(params, rows, self._scalars)
      result.append(np.asarray(logits)[:len(part)])
    return np.concatenate(result)
