"""Cold positions of a streamed context: in host memory and in stores.

A streamed context holds on the device only the last positions of its global
layers. The ones in front are cold: rows that left the device are in host
memory until a store holds them too, and what is read from a store stays in
host memory as far as `host_kv_bytes` allows. What came first stays: a step
reads every cold position once, in the same order, so evicting the oldest would
always evict what is needed next.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
import dataclasses
import threading

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import memory

# Called with (rows of the global layers, start, stop, K out, V out); fills
# both, [layers, stop - start, K, H], and returns the bytes that it read.
Read = Callable[[slice, int, int, np.ndarray, np.ndarray], int]


@dataclasses.dataclass(frozen=True)
class Backing:
  """Positions [start, stop) that a store holds.

  Attributes:
    start: first position.
    stop: one past the last one.
    block: positions of a stored block.
    read: reads them.
  """

  start: int
  stop: int
  block: int
  read: Read


@dataclasses.dataclass(frozen=True)
class _Extent:
  """Rows [start, stop) of all global layers in host memory, [L, n, K, H]."""

  start: int
  stop: int
  k: np.ndarray
  v: np.ndarray

  @property
  def nbytes(self) -> int:
    return self.k.nbytes + self.v.nbytes


class _Tally:
  """What a cache and its copies have read from stores."""

  def __init__(self):
    self.nbytes = self.blocks = 0
    self._lock = threading.Lock()

  def add(self, nbytes: int, blocks: int) -> None:
    with self._lock:
      self.nbytes += nbytes
      self.blocks += blocks


class Cold:
  """Keys and values of positions [0, stop) of the global layers.

  Attributes:
    stop: one past the last position that is held.
    host_kv_bytes: most bytes held in host memory.
    peak_host_bytes: most that were.
  """

  def __init__(
      self, shape: tuple[int, int, int], element: np.dtype, host_kv_bytes: int
  ):
    """Holds nothing yet.

    Args:
      shape: (global layers L, kv heads K, head dim H).
      element: type of a bit pattern.
      host_kv_bytes: most bytes to hold in host memory.
    """
    self._shape = shape
    self._element = element
    self.host_kv_bytes = host_kv_bytes
    self.stop = 0
    self.peak_host_bytes = 0
    self._tally = _Tally()
    self._own: list[_Extent] = []
    self._backings: list[Backing] = []
    # (layer row, start) -> what was read from a store at once.
    self._kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    self._host_bytes = 0
    self._lock = threading.Lock()

  def copy(self) -> Cold:
    """Returns an independent one that shares the arrays."""
    other = Cold(self._shape, self._element, self.host_kv_bytes)
    with self._lock:
      for name, value in vars(self).items():
        if name != '_lock':
          copied = isinstance(value, (list, dict))
          setattr(other, name, value.copy() if copied else value)
    return other

  @property
  def host_bytes(self) -> int:
    """Bytes in host memory now."""
    return self._host_bytes

  @property
  def store_bytes(self) -> int:
    """Bytes that this and its copies have read from stores."""
    return self._tally.nbytes

  @property
  def store_blocks(self) -> int:
    """Blocks that they have read from stores, each layer's counted."""
    return self._tally.blocks

  def _backed(self, start: int, stop: int) -> bool:
    at = start
    for b in self._backings:
      if b.start <= at < b.stop:
        at = b.stop
    return at >= stop

  def _drop(self, wanted: int) -> None:
    """Frees at least `wanted` bytes that a store holds too, if it can."""
    while wanted > 0 and self._kept:
      _, pair = self._kept.popitem()
      freed = pair[0].nbytes + pair[1].nbytes
      self._host_bytes -= freed
      wanted -= freed
    for extent in reversed(list(self._own)):
      if wanted <= 0:
        return
      if self._backed(extent.start, extent.stop):
        self._own.remove(extent)
        self._host_bytes -= extent.nbytes
        wanted -= extent.nbytes

  def make_room(self, positions: int) -> None:
    """Makes room in host memory for the rows of so many more positions.

    Raises:
      CapacityError: if what no store holds leaves none; nothing is lost then.
    """
    layers, heads, dim = self._shape
    needed = 2 * layers * heads * dim * positions * self._element.itemsize
    with self._lock:
      self._drop(self._host_bytes + needed - self.host_kv_bytes)
      total = self._host_bytes + needed
    if total > self.host_kv_bytes:
      raise errors.CapacityError(
          f'host_kv_bytes: {memory.human(total)} of the keys and values of'
          f' {self.stop + positions} positions would be there, expected at most'
          f' {memory.human(self.host_kv_bytes)}; raise --host_kv_bytes, or'
          ' deposit with --stream, which keeps them in the store')

  def append(self, k: np.ndarray, v: np.ndarray) -> None:
    """Takes over rows [stop, stop + n) of all layers, each [L, n, K, H]."""
    extent = _Extent(self.stop, self.stop + k.shape[1], k, v)
    with self._lock:
      self._own.append(extent)
      self._host_bytes += extent.nbytes
      self.stop = extent.stop
      self.peak_host_bytes = max(self.peak_host_bytes, self._host_bytes)

  def back(self, backing: Backing) -> None:
    """Learns that a store holds some positions, which may reach past `stop`.

    A backing that begins where another one does takes its place.
    """
    with self._lock:
      self._backings = sorted(
          [b for b in self._backings if b.start != backing.start] + [backing],
          key=lambda b: b.start)
      self._drop(self._host_bytes - self.host_kv_bytes)

  def empty_rows(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns K and V of so many positions, all zero, [L, n, K, H]."""
    layers, heads, dim = self._shape
    k, v = (np.zeros((layers, positions, heads, dim), self._element)
            for _ in range(2))
    return k, v

  def fill(
      self, row: int, start: int, stop: int, k: np.ndarray, v: np.ndarray
  ) -> None:
    """Copies positions [start, stop) of one layer into `k` and `v`, [n, K, H].

    Raises:
      KvgraftError: as `Store.read` does; nothing else has changed then.
    """
    self._fill(slice(row, row + 1), start, stop, k[None], v[None], keep=True)

  def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns K and V of all layers at [start, stop), each [L, n, K, H].

    None of them where `stop` is in front of `start`.
    """
    stop = max(start, stop)
    k, v = self.empty_rows(stop - start)
    if start < stop:
      self._fill(slice(0, k.shape[0]), start, stop, k, v)
    return k, v

  def _fill(self, layers: slice, start, stop, k, v, keep=False) -> None:
    """Fills all of [layers, start:stop).

    With `keep` what is read of the only layer stays in host memory, if it may.
    """
    at = start
    while at < stop:
      holder, end = self._holder(at)
      end = min(end, stop)
      here = slice(at - start, end - start)
      if isinstance(holder, _Extent):
        there = slice(at - holder.start, end - holder.start)
        k[:, here] = holder.k[layers, there]
        v[:, here] = holder.v[layers, there]
      elif not (keep and self._recall(
          layers.start, at, k[0, here], v[0, here])):
        nbytes = holder.read(layers, at, end, k[:, here], v[:, here])
        blocks = -(-end // holder.block) - at // holder.block
        self._tally.add(nbytes, blocks * (layers.stop - layers.start))
        if keep:
          self._keep(layers.start, at, k[0, here], v[0, here])
      at = end

  def _recall(self, row: int, start: int, k: np.ndarray, v: np.ndarray) -> bool:
    """Fills `k` and `v` with what was kept, if it is enough."""
    with self._lock:
      kept = self._kept.get((row, start))
    if kept is None or len(kept[0]) < len(k):
      return False
    k[...], v[...] = (side[:len(k)] for side in kept)
    return True

  def _keep(self, row: int, start: int, k: np.ndarray, v: np.ndarray) -> None:
    """Keeps what was read from a store, if host memory may take it."""
    with self._lock:
      shorter = self._kept.get((row, start), (k[:0], v[:0]))
      more = k.nbytes + v.nbytes - shorter[0].nbytes - shorter[1].nbytes
      if 0 < more <= self.host_kv_bytes - self._host_bytes:
        self._kept[row, start] = k.copy(), v.copy()
        self._host_bytes += more
        self.peak_host_bytes = max(self.peak_host_bytes, self._host_bytes)

  def _holder(self, at: int) -> tuple[_Extent | Backing, int]:
    """Returns what holds position `at`, and up to where; host memory first."""
    with self._lock:
      i = bisect.bisect_right(self._own, at, key=lambda e: e.start)
      if i and at < self._own[i - 1].stop:
        return self._own[i - 1], self._own[i - 1].stop
      following = self._own[i].start if i < len(self._own) else self.stop
      for backing in self._backings:
        if backing.start <= at < backing.stop:
          return backing, min(backing.stop, following)
    raise AssertionError(f'cold position {at} is nowhere')
