"""Copies cache rows to the host: blocks to store, and rows leaving the ring."""

from __future__ import annotations

import functools

import jax
from jax import lax
import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import numerics


@functools.partial(jax.jit, static_argnames='size')
def _slice(array: jax.Array, slot: jax.Array, size: int) -> jax.Array:
  return lax.dynamic_slice_in_dim(array[:, 0], slot, size, axis=1)


def read_global(
    cache: cache_lib.KVCache, start: int, stop: int, page: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns K and V of the global layers at [start, stop), [L, n, K, H]."""
  kind = config_lib.GLOBAL
  return (_pages(cache.k[kind], start, stop, page, margin=0),
          _pages(cache.v[kind], start, stop, page, margin=0))


def _pages(array, start, stop, page, margin) -> np.ndarray:
  """Reads whole pages, one compiled slice for all, and cuts the ends off."""
  ring_pages = (array.shape[2] - 2 * margin) // page
  first, last = start // page, -(-stop // page)
  parts = [
      np.asarray(_slice(array, np.int32(margin + n % ring_pages * page), page))
      for n in range(first, last)]
  whole = np.concatenate(parts, axis=1)
  return whole[:, start - first * page:stop - first * page]


class Recorder:
  """Keeps sliding rows on the host before the ring overwrites them.

  Attributes:
    base: first position that can be had.
  """

  def __init__(
      self, config: config_lib.ModelConfig, profile: numerics.Profile,
      base: int,
  ):
    self.base = base
    self._page = profile.page
    self._margin = profile.chunk
    self._ring = cache_lib.ring_size(config.sliding.window or 0, profile)
    self._stop = base
    self._parts: list[tuple[np.ndarray, np.ndarray]] = []

  def copy(self) -> Recorder:
    """Returns an independent recorder that shares the recorded arrays."""
    other = object.__new__(Recorder)
    other.__dict__.update(self.__dict__, _parts=list(self._parts))
    return other

  @property
  def nbytes(self) -> int:
    """Bytes held on the host."""
    return sum(k.nbytes + v.nbytes for k, v in self._parts)

  def before_step(
      self, cache: cache_lib.KVCache, done: int, rows: int
  ) -> None:
    """Copies all rows computed so far if the step would overwrite any."""
    if self._stop < done + rows - self._ring:
      self._record(cache, done)

  def _record(self, cache: cache_lib.KVCache, done: int) -> None:
    if done <= self._stop:
      return
    kind = config_lib.SLIDING
    k, v = (_pages(side[kind], self._stop, done, self._page, self._margin)
            for side in (cache.k, cache.v))
    self._parts.append((k, v))
    self._stop = done

  def rows(
      self, cache: cache_lib.KVCache, done: int, start: int, stop: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns K and V at [start, stop), unsigned [L, n, K, H].

    Raises:
      UsageError: if `start` is in front of `base`.
    """
    if start < self.base:
      raise errors.UsageError(
          f'sliding rows from position {start}: expected a start from'
          f' {self.base} on, since earlier rows have left the window and were'
          " not recorded; prefill or graft with record=True, or deposit with"
          " sliding='window'")
    self._record(cache, done)
    if len(self._parts) > 1:
      self._parts = [(np.concatenate([k for k, _ in self._parts], axis=1),
                      np.concatenate([v for _, v in self._parts], axis=1))]
    k, v = self._parts[0]
    return (k[:, start - self.base:stop - self.base],
            v[:, start - self.base:stop - self.base])
