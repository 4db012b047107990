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
    keep: positions in front of the last computed one that must stay to be had;
      None for all.
  """

  def __init__(
      self, config: config_lib.ModelConfig, profile: numerics.Profile,
      base: int,
  ):
    self.base = base
    self.keep: int | None = None
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
    while self.keep is not None:
      following = self.base + self._parts[0][0].shape[1]
      if following > done - self.keep:
        break
      self._parts.pop(0)
      self.base = following

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
    found, at = [], self.base
    for k, v in self._parts:
      part = slice(max(start - at, 0), max(stop - at, 0))
      if part.start < k.shape[1] and part.start < part.stop:
        found.append((k[:, part], v[:, part]))
      at += k.shape[1]
    if len(found) == 1:
      return found[0]
    keys, values = zip(*found)
    return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)
