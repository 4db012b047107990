"""Exact attention over more positions than the device holds.

    positions   0 ............................ base ........... done
    global      cold: host memory and stores  |  hot: on the device
    sliding                                      the ring, on the device

A step of a streamed context runs the pieces of the layers between two global
attentions as programs of their own. At each global attention the cold pages of
that layer flow, in ascending order, through a few device buffers; their
partials are made and merged by the code that the in-memory step uses, then
those of the hot pages, the step's own rows among them. Every product that
feeds an addition is sealed (see `layers`), so cutting a layer changes no bit;
the self-test's invariance `stream` measures that.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import cold as cold_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import interrupts
from kvgraft_jax import memory
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics
from kvgraft_jax import programs as programs_lib
from kvgraft_jax import recorder as recorder_lib
from kvgraft_jax import ring as ring_lib
from kvgraft_jax import segments as segments_lib

# Positions of a device buffer: a dispatch costs as much as some hundred, and
# beyond some thousand nothing is gained.
_LONGEST_GROUP = 4096
# Stored blocks are read whole, so groups are multiples of the usual one.
_BLOCK = 512
_BUFFERS = 3


@dataclasses.dataclass(frozen=True)
class Streaming:
  """How much memory a streamed context takes.

  Attributes:
    device_kv_bytes: most bytes of keys and values on the device, the sliding
      layers' windows included; constant over the context's life. None for as
      much as makes steps fast: more keeps more positions on the device.
    host_kv_bytes: most bytes of the global layers' in host memory; None for
      half of what is available when the context begins. What a context records
      of sliding layers, for a deposit (`record`), comes on top.

  Raises:
    UsageError: if a value is not a whole number.
  """

  device_kv_bytes: int | None = None
  host_kv_bytes: int | None = None

  def __post_init__(self):
    for name, value in vars(self).items():
      if value is not None and not isinstance(value, (int, np.integer)):
        raise errors.UsageError(
            f'{name}: expected a whole number of bytes, found {value!r:.80}')

  def host_limit(self) -> int:
    """Returns the most bytes in host memory."""
    if self.host_kv_bytes is not None:
      return self.host_kv_bytes
    return (memory.host_bytes() or 1 << 62) // 2


@dataclasses.dataclass(frozen=True)
class Usage:
  """What a context has taken so far.

  Attributes:
    device_kv_bytes: most bytes of keys and values on the device.
    device_kv_source: 'buffers', their own sizes; or 'allocator', what the
      device's allocator had given at most, less what it had given when the
      context began: what steps need in passing included.
    host_kv_bytes: most bytes of them in host memory, recorded rows included.
    store_bytes_read: from stores, by its forks too (as `score` makes them).
    store_blocks_read: likewise, K and V of one layer counted as one.
    store_wait_s: seconds in which they waited for nothing but a store.
    tokens_restored: positions that came from a store.
    tokens_computed: positions that were run, those of forks too.
  """

  device_kv_bytes: int
  device_kv_source: str
  host_kv_bytes: int
  store_bytes_read: int
  store_blocks_read: int
  store_wait_s: float
  tokens_restored: int
  tokens_computed: int

  def then(self, other: Usage) -> Usage:
    """Returns what this and, when it is gone, another context have taken."""
    return Usage(
        max(self.device_kv_bytes, other.device_kv_bytes), self.device_kv_source,
        max(self.host_kv_bytes, other.host_kv_bytes),
        self.store_bytes_read + other.store_bytes_read,
        self.store_blocks_read + other.store_blocks_read,
        self.store_wait_s + other.store_wait_s,
        self.tokens_restored + other.tokens_restored,
        self.tokens_computed + other.tokens_computed)


@dataclasses.dataclass(frozen=True)
class Reads:
  """What was read from stores to build a context."""

  nbytes: int = 0
  blocks: int = 0
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a budget of device memory is used.

  Attributes:
    hot: positions of the global layers that stay on the device.
    group: positions of a buffer through which one global layer flows.
    buffers: how many there are.
    device_bytes: keys and values on the device, all in all.
  """

  hot: int
  group: int
  buffers: int
  device_bytes: int


def least_bytes(
    config: config_lib.ModelConfig, profile: numerics.Profile
) -> int:
  """Returns the least device bytes that a streamed context can do with."""
  return _bytes(config, profile, profile.page + profile.chunk, profile.page, 2)


def _bytes(config, profile, hot: int, group: int, buffers: int) -> int:
  """Returns bytes on the device: rings, hot positions, buffers."""
  kind = config_lib.GLOBAL
  one_layer = cache_lib.token_bytes(config, profile.dtype)[kind] // len(
      config.kind_layers(kind))
  return cache_lib.bytes_at(config, profile, hot) + one_layer * group * buffers


def layout(
    config: config_lib.ModelConfig, profile: numerics.Profile,
    device_kv_bytes: int | None = None, capacity: int | None = None,
) -> Layout:
  """Returns how the global layers share what the sliding windows leave.

  Args:
    config: architecture.
    profile: numerics.
    device_kv_bytes: as in `Streaming`.
    capacity: most positions of a context; None for no limit.

  Raises:
    CapacityError: if it is too little.
  """
  least = least_bytes(config, profile)
  if device_kv_bytes is None:
    device_kv_bytes = _bytes(
        config, profile, profile.page + profile.chunk, _LONGEST_GROUP, _BUFFERS)
  if device_kv_bytes < least:
    raise errors.CapacityError(
        f'device_kv_bytes: expected at least {least} for {config.name} in'
        f' {profile.dtype} (its sliding windows, {profile.page + profile.chunk}'
        f' positions of its global layers and two buffers of {profile.page}),'
        f' found {device_kv_bytes}; raise it, or use a smaller --chunk')
  page = profile.page
  grain = max(page, min(_BLOCK, profile.chunk))
  hot, buffers, group = page + profile.chunk, 2, page

  def fits(hot, group, buffers):
    return _bytes(config, profile, hot, group, buffers) <= device_kv_bytes

  while group < grain and fits(hot, 2 * group, buffers):
    group *= 2
  if fits(hot, group, _BUFFERS):
    buffers = _BUFFERS
    while group < _LONGEST_GROUP and fits(hot, 2 * group, buffers):
      group *= 2
  a_page = _bytes(config, profile, hot + page, group, buffers) - _bytes(
      config, profile, hot, group, buffers)
  spare = device_kv_bytes - _bytes(config, profile, hot, group, buffers)
  more = spare // a_page
  if capacity is not None:
    more = min(more, max(0, -(-(capacity - page) // page)))
  hot += int(more) * page
  return Layout(
      hot, group, buffers, _bytes(config, profile, hot, group, buffers))


def step_rows(profile: numerics.Profile) -> list[int]:
  """Returns the row counts of streamed steps, ascending, all self-tested."""
  return sorted({profile.tile, max(profile.tile, min(16, profile.chunk)),
                 profile.chunk})


class Streamed:
  """The cache of a streamed context.

  Attributes:
    cache: what is on the device: the rings and the hot positions.
    base: position of the first hot slot, a multiple of the page.
    cold: all positions in front of it.
    layout: how the device memory is used.
  """

  def __init__(
      self, programs: programs_lib.Programs, streaming: Streaming,
      ring: ring_lib.Ring | None = None, capacity: int | None = None,
  ):
    """Holds nothing yet.

    Args:
      programs: of the model.
      streaming: the memory that it may take.
      ring: buffers to share with another one; None for own ones.
      capacity: most positions of the context; None for no limit.
    """
    config, profile = programs.config, programs.profile
    self._programs = programs
    self._streaming = streaming
    self._capacity = capacity
    self.layout = layout(
        config, profile, streaming.device_kv_bytes, capacity)
    spec = config.spec(config_lib.GLOBAL)
    element = np.dtype(cache_lib.BITS[profile.dtype])
    self._groups = config.num_heads // spec.kv_heads
    self._one = jnp.asarray(np.float32(1.0))
    self.base = 0
    self._cache: cache_lib.KVCache | None = None
    shape = (spec.kv_heads, spec.head_dim)
    self.cold = cold_lib.Cold(
        (len(config.kind_layers(config_lib.GLOBAL)), *shape), element,
        streaming.host_limit())
    self._ring = ring or ring_lib.Ring(
        (self.layout.group, *shape), element, self.layout.buffers)
    self._names: dict[tuple, str] = {}

  @property
  def cache(self) -> cache_lib.KVCache:
    """What is on the device; made when it is first asked for."""
    if self._cache is None:
      self._cache = self._programs.empty_cache(1, self.layout.hot)
    return self._cache

  @cache.setter
  def cache(self, cache: cache_lib.KVCache) -> None:
    self._cache = cache

  @property
  def whole(self) -> bool:
    """Whether nothing of it is lost (see `cache.is_whole`)."""
    return cache_lib.is_whole(self._cache)

  @property
  def nbytes(self) -> int:
    """Bytes of keys and values on the device."""
    return self._ring.nbytes + (self._cache.nbytes if self._cache else 0)

  @property
  def waited_s(self) -> float:
    """Seconds in which steps waited for cold pages."""
    return self._ring.waited_s

  def warm_up(self, params: model_lib.Params, rows: Iterable[int]) -> None:
    """Compiles steps of so many rows; what this cache held is lost."""
    profile = self._programs.profile
    page = profile.page
    self.cold.append(*self.cold.empty_rows(page))
    self.base = page
    for count in rows:
      self.run_step(params, np.zeros((1, count), np.int32),
                    np.full(1, page, np.int32))

  def copy(self) -> Streamed:
    """Returns an independent one; the device memory is copied."""
    other = Streamed(
        self._programs, self._streaming, self._ring, self._capacity)
    other.base, other.cold = self.base, self.cold.copy()
    other.cache = jax.tree.map(jnp.copy, self.cache)
    return other

  @contextlib.contextmanager
  def parked(self) -> Iterator[None]:
    """Keeps what is on the device in host memory, for the block.

    In the block nothing but `copy` may be called.
    """
    # A copy: where the device is the CPU, a view would keep its memory.
    self.cache = jax.tree.map(np.array, self.cache)
    try:
      yield
    finally:
      self.cache = jax.tree.map(jnp.array, self.cache)

  def drop(self) -> None:
    """Frees the device memory; what it held is lost."""
    self._cache = None

  def make_room(self, done: int, rows: int) -> None:
    """Lets hot positions grow cold, so that `rows` more find room.

    The last computed position always stays hot.

    Raises:
      CapacityError: if host memory may not take them; nothing changed then.
    """
    page, hot = self._programs.profile.page, self.layout.hot
    lacking = done + rows - self.base - hot
    if lacking <= 0:
      return
    # At least half at once, so that what stays is not moved at every step.
    pages = min(max(-(-lacking // page), hot // page // 2),
                max(done - 1, 0) // page - self.base // page)
    assert pages * page >= lacking, (done, rows, self.base, hot)
    self.cold.make_room(pages * page)
    stop, args = self.base + pages * page, (self.cache, np.int32(pages))
    # Compiled before anything changes: that is when users interrupt.
    move = self._programs.compiled(('move', hot), functools.partial(
        segments_lib.move_down, page=page), args, (0,))
    assert self.cold.stop == self.base, (self.cold.stop, self.base)
    leaving = self.rows(self.base, stop)
    with interrupts.deferred():
      self.cold.append(*leaving)
      self.cache, self.base = move(*args), stop

  def restore(
      self, cache: cache_lib.KVCache, base: int,
      backings: Sequence[cold_lib.Backing],
  ) -> None:
    """Takes over positions that a store holds.

    Args:
      cache: the rings, and the hot positions from `base` on.
      base: position of the first hot slot, a multiple of the page.
      backings: hold all of [0, base).
    """
    self.cache, self.base = cache, base
    for backing in backings:
      self.cold.back(backing)
    self.cold.stop = base

  def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns K and V of the global layers at [start, stop), [L, n, K, H]."""
    cold = self.cold.rows(start, min(stop, self.base))
    if stop <= self.base:
      return cold
    first = max(start, self.base)
    hot = recorder_lib.read_global(
        self.cache, first - self.base, stop - self.base,
        self._programs.profile.page)
    if first == start:
      return hot
    k, v = (np.concatenate(pair, axis=1) for pair in zip(cold, hot))
    return k, v

  def visible_rows(self, done: int) -> Iterator[np.ndarray]:
    """Yields what `cache.visible_rows` does, of `done` positions."""
    yield from cache_lib.visible_rows(
        self.cache, self._programs.config, self._programs.profile.chunk, done,
        kinds=(config_lib.SLIDING,))
    yield from self.rows(0, done)

  def run_step(
      self, params: model_lib.Params, tokens: np.ndarray, starts: np.ndarray,
      wanted: tuple[int, int] | None = None,
  ) -> jax.Array:
    """Runs one step; see `Programs.run_step`.

    After an error of a store the positions in front of `starts` are as they
    were, and the same step can be run again.
    """
    end = int(starts[0]) + tokens.shape[1]
    if end - self.base > self.layout.hot:
      raise AssertionError(
          f'step up to {end}: past the {self.layout.hot} slots at {self.base}')
    return self._programs.run_rows(
        tokens, starts, wanted,
        lambda where: self._pass(params, None, *where),
        lambda hidden, where: self._pass(params, hidden, *where))

  def _pass(self, params, hidden, tokens, starts, rope) -> jax.Array:
    """Runs the owners of keys and values, or behind `hidden` the sharers."""
    config = self._programs.config
    numbers = range(config.first_shared) if hidden is None else range(
        config.first_shared, len(config.layers))
    parts = segments_lib.segments(config, numbers)
    carry: dict[str, Any] = {'embedder': params['embedder']}
    if hidden is not None:
      carry['x'] = hidden.reshape(-1, hidden.shape[-1])
    group = self.layout.group
    spans = [(at, min(at + group, self.base))
             for at in range(0, self.base, group)]
    requests = [(config.cache_row(part.closes), *span)
                for part in parts if part.closes is not None for span in spans]
    with self._ring.lock:
      flow = self._ring.flow(self.cold, requests)
      try:
        for part in parts:
          where = {
              'tokens': tokens, 'starts': starts, 'rope': rope,
              'base': np.int32(self.base),
              'rows': np.asarray(
                  [config.cache_row(i) for i in part.layers], np.int32),
              'inputs': np.asarray(
                  [i - numbers.start for i in part.layers], np.int32)}
          carry = self._run_segment(params, carry, where, part, numbers)
          if part.closes is not None:
            carry['state'] = self._fold(carry, spans, flow, starts)
      finally:
        flow.close()
    return carry['x'].reshape(1, tokens.shape[1], -1)

  def _run_segment(self, params, carry, where, part, numbers):
    config = self._programs.config
    layers = [params[f'layer_{i}'] for i in part.layers]
    rows = where['tokens'].shape[1]
    if (rows, part) not in self._names:
      # Segments of one shape are one executable.
      shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), (layers, carry))
      sharing = [i >= config.first_shared for i in part.layers]
      self._names[rows, part] = hashlib.sha256(repr((
          shapes, sharing, part.opens is None, part.closes is None,
          numbers if 'embedder' in carry else None)).encode()).hexdigest()[:12]
    key = rows, self.layout.hot, self._names[rows, part]
    args = layers, carry, self.cache, where
    program = self._program('segment', key, functools.partial(
        segments_lib.run_segment, segment=part, numbers=numbers,
        config=config, profile=self._programs.profile), args, donate=(2,))
    with interrupts.deferred():
      carry, self.cache = program(*args)
    return carry

  def _fold(self, carry, spans, flow, starts):
    page = self._programs.profile.page
    state = carry['state']
    for start, stop in spans:
      slot = next(flow)
      k, v = (jax.device_put(side, may_alias=True)
              for side in (slot.k, slot.v))
      args = (carry['q'], state, k, v, np.int32(start // page),
              np.int32((stop - start) // page), starts[0], self._one)
      state = self._program(
          'fold', (carry['q'].shape[1], self.layout.group), functools.partial(
              segments_lib.fold_group, groups=self._groups,
              profile=self._programs.profile), args)(*args)
      slot.reader = state
    return state

  def _program(self, name, key, fun, args, donate=()):
    """Returns a program, compiled once for these shapes."""
    return self._programs.compiled((name, *key), fun, args, donate)
