"""The buffers through which cold pages flow, filled ahead by threads."""

from __future__ import annotations

import collections
from collections.abc import Generator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import queue
import threading
import time
from typing import Any

import jax
import numpy as np

from kvgraft_jax import cold as cold_lib
from kvgraft_jax import interrupts


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Returns zeros that the device can take over without a copy (64 bytes)."""
  n = int(np.prod(shape)) * np.dtype(dtype).itemsize
  raw = np.zeros(n + 64, np.uint8)
  offset = -raw.ctypes.data % 64
  return raw[offset:offset + n].view(dtype).reshape(shape)


@dataclasses.dataclass
class _Slot:
  """A pair of host buffers, what fills them and what reads them.

  A thread sets `error` and `filling`, then wakes who waits. An interrupt may
  end a wait at any moment: with a future, or a condition, it could leave the
  lock taken that the thread needs, for ever.
  """

  k: np.ndarray
  v: np.ndarray
  filling: bool = False
  error: BaseException | None = None
  reader: Any = None
  woken: queue.SimpleQueue = dataclasses.field(
      default_factory=queue.SimpleQueue)

  def fill(self, cold: cold_lib.Cold, row: int, start: int, stop: int) -> None:
    """Fills the buffers; in a thread."""
    n = stop - start
    try:
      cold.fill(row, start, stop, self.k[:n], self.v[:n])
    except BaseException as e:  # For who waits.
      self.error = e
    self.filling = False
    self.woken.put(None)

  def wait(self) -> None:
    """Returns once no thread fills the buffers."""
    while self.filling:
      with contextlib.suppress(queue.Empty):
        self.woken.get(timeout=1)


class Ring:
  """A few pairs of buffers for K and V of one layer's cold pages.

  On CPU the device reads the host buffers themselves; elsewhere each is copied
  to the device. A buffer is filled again once the program that reads it has
  ended, so that no more than `buffers` of them are ever on the device.

  Attributes:
    nbytes: of all buffers.
    waited_s: seconds in which the device had nothing to do but wait for them.
  """

  def __init__(self, shape: tuple[int, int, int], element, buffers: int):
    """Makes `buffers` pairs of arrays of `shape` [group, K, H]."""
    self._slots = [
        _Slot(aligned_zeros(shape, element), aligned_zeros(shape, element))
        for _ in range(buffers)]
    self._pool = futures.ThreadPoolExecutor(
        max(1, buffers - 1), 'kvgraft-read-ahead')
    self.nbytes = sum(s.k.nbytes + s.v.nbytes for s in self._slots)
    self.waited_s = 0.0
    self.lock = threading.Lock()

  def flow(
      self, cold: cold_lib.Cold, requests: Sequence[tuple[int, int, int]]
  ) -> Generator[_Slot, None, None]:
    """Yields a filled slot for each (layer row, start, stop), in order.

    The consumer sets its `reader` to what must be ready before it is filled
    again. When this ends, however it ends, no thread fills any more.
    """
    pending: collections.deque[_Slot] = collections.deque()
    free = collections.deque(self._slots)
    left = collections.deque(requests)

    def submit():
      slot = free.popleft()
      if slot.reader is not None:
        jax.block_until_ready(slot.reader)
        slot.reader = None
      with interrupts.deferred():
        slot.error, slot.filling = None, True
        try:
          self._pool.submit(slot.fill, cold, *left.popleft())
        except BaseException:
          slot.filling = False
          raise
        pending.append(slot)

    try:
      self._let_fills_end()  # A second interrupt may have left some.
      # One is left to what the device reads at the moment.
      while left and len(pending) < len(self._slots) - 1:
        submit()
      busy = None
      while pending:
        slot = pending.popleft()
        if slot.filling:
          jax.block_until_ready(busy)  # Only what comes behind it is waiting.
          began = time.perf_counter()
          slot.wait()
          self.waited_s += time.perf_counter() - began
        if slot.error is not None:
          raise slot.error
        yield slot
        busy = slot.reader
        free.append(slot)
        if left:
          submit()
    finally:
      # The one just waited for, too: an interrupt does not end its thread.
      self._let_fills_end()

  def _let_fills_end(self) -> None:
    for slot in self._slots:
      slot.wait()
