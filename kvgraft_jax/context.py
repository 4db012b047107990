"""A context: tokens, the cache of those computed, and what follows them.

Fresh and grafted contexts run the same code; what differs is only where the
first rows of the cache came from.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import decode
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import interrupts
from kvgraft_jax import memory
from kvgraft_jax import recorder as recorder_lib
from kvgraft_jax import sampling
from kvgraft_jax import streaming as streaming_lib

Progress = Callable[[int, int], None]
# An `engine.Model`, which is built on this module.
Model = Any


@dataclasses.dataclass(frozen=True)
class Score:
  """Log-likelihood of tokens behind a context.

  Attributes:
    logprob: sum, in nats.
    logprobs: of each token.
  """

  logprob: float
  logprobs: list[float]


class Context:
  """Tokens at positions 0.. and the cache of those computed so far.

  Attributes:
    model: the model.
    tokens: every token, a sampled one that has not been run yet included.
    tokens_restored: positions that came from a store.
    tokens_computed: positions that were run here.
    exact: whether the restored part is promised to equal a fresh computation.
    parent: manifest of the artifact this context was grafted from, or None.
    parent_length: positions taken from it.
    streaming: the memory it may take, or None if all of it is on the device.
  """

  def __init__(
      self, model: Model, *, record: bool = True,
      streaming: streaming_lib.Streaming | None = None,
  ):
    self.model = model
    self.streaming = streaming
    self.tokens: list[int] = []
    self.tokens_restored = 0
    self.tokens_computed = 0
    self.exact = True
    self.parent: artifact_lib.Manifest | None = None
    self.parent_length = 0
    self._done = 0
    self._cache: cache_lib.KVCache | None = None
    self._streamed: streaming_lib.Streamed | None = None
    if streaming is not None:
      if not isinstance(streaming, streaming_lib.Streaming):
        raise errors.UsageError(
            f'streaming: expected a Streaming, found {streaming!r:.80}')
      self._streamed = streaming_lib.Streamed(
          model.programs, streaming, capacity=model.capacity)
      self.exact = model.streams_exactly()
    self._reads = streaming_lib.Reads()
    self._allocated = memory.allocated_bytes()
    self._most_device = self._most_host = self._tried = 0
    # [D], hidden row of position done - 1.
    self._last: jax.Array | np.ndarray | None = None
    self._record = record
    self._keep: int | None = None
    self._recorder: recorder_lib.Recorder | None = None

  def __repr__(self) -> str:
    return f'Context({self.length} tokens, {self.tokens_restored} restored)'

  @property
  def length(self) -> int:
    """Number of tokens."""
    return len(self.tokens)

  @property
  def cache(self) -> cache_lib.KVCache:
    """What is on the device; valid until the context is next extended."""
    if self._streamed is not None:
      return self._streamed.cache
    assert self._cache is not None
    return self._cache

  @property
  def streamed(self) -> streaming_lib.Streamed | None:
    """The cache of a streamed context, None for another."""
    return self._streamed

  @property
  def nbytes(self) -> int:
    """Bytes of keys and values on the device."""
    if self._streamed is not None:
      return self._streamed.nbytes
    return self._cache.nbytes if self._cache is not None else 0

  def usage(self) -> streaming_lib.Usage:
    """Returns what this context has taken so far, by memory and store."""
    device, source = max(self._most_device, self.nbytes), 'buffers'
    now = memory.allocated_bytes()
    if now is not None and self._allocated is not None:
      device, source = now[1] - self._allocated[0], 'allocator'
    reads, streamed = self._reads, self._streamed
    host = max(self._most_host, self._host_bytes())
    nbytes, blocks, seconds = reads.nbytes, reads.blocks, reads.seconds
    if streamed is not None:
      host = max(host, streamed.cold.peak_host_bytes)
      nbytes += streamed.cold.store_bytes
      blocks += streamed.cold.store_blocks
      seconds += streamed.waited_s
    return streaming_lib.Usage(
        device, source, host, nbytes, blocks, round(seconds, 6),
        self.tokens_restored, self.tokens_computed + self._tried)

  def _host_bytes(self) -> int:
    """Returns bytes of keys and values in host memory now."""
    recorded = self._recorder.nbytes if self._recorder else 0
    return recorded + (self._streamed.cold.host_bytes if self._streamed else 0)

  def restore(
      self, tokens: list[int], cache: cache_lib.KVCache | None, recorder,
      reads: streaming_lib.Reads | None = None,
  ) -> None:
    """Takes over a cache that holds `tokens` already (used by `graft`).

    Args:
      tokens: ids.
      cache: what holds them; None if `streamed` has taken it over.
      recorder: of rows that leave the rings, or None.
      reads: what it took to build the cache.
    """
    self._reads = reads or streaming_lib.Reads()
    self.tokens, self._cache = list(tokens), cache
    self._done = self.tokens_restored = len(tokens)
    self._recorder = recorder

  def extend(
      self, tokens: Iterable[int], *, progress: Progress | None = None
  ) -> Context:
    """Appends `tokens` and computes them; returns this context.

    Raises:
      UsageError: if an id is not one of the model's; nothing has changed then.
      CapacityError: if there is no room; nothing has changed then.
      KvgraftError: of a streamed context, if its store fails or the memory of
        the host is full. The context then ends behind the last step that was
        finished: as it was, if the tokens are no more than a chunk. `length`
        tells; extend it by the rest.
    """
    with self._extended(self.model.check_tokens(tokens, self.length)):
      self.compute(progress=progress)
    return self

  @contextlib.contextmanager
  def _extended(self, tokens: list[int]) -> Iterator[None]:
    """Appends `tokens`; takes back those that have not run after an error.

    What whole steps have run stays: a store, or the user, stopped the others.
    """
    before = self.length
    self.tokens += tokens
    try:
      yield
    except BaseException:
      del self.tokens[max(self._done, before):]
      raise

  def append(self, token: int) -> None:
    """Appends one token without running it yet."""
    self.tokens += self.model.check_tokens([token], self.length)

  def compute(self, *, progress: Progress | None = None) -> None:
    """Runs every token that has not been run."""
    total = self.length
    if progress:
      progress(self._done, total)
    while self._done < total:
      self._step(total)
      if progress:
        jax.block_until_ready(self.cache)
        progress(self._done, total)

  def _prepare(self, rows: int, total: int) -> None:
    """Makes room for a step of `rows` rows, padding included."""
    programs = self.model.programs
    if self._streamed is not None:
      self._streamed.make_room(self._done, rows)
    elif self._cache is None:
      self._cache = programs.empty_cache(1, self.model.slots_for(total))
    else:
      self._cache = grow(self._cache, self.model.slots_for(total))
    if self._record:
      if self._recorder is None:
        self._recorder = recorder_lib.Recorder(
            self.model.config, self.model.profile, 0)
        self._recorder.keep = self._keep
      self._recorder.before_step(self.cache, self._done, rows)
      self._most_host = max(self._most_host, self._host_bytes())
    self._most_device = max(self._most_device, self.nbytes)

  def _step(
      self, total: int, every: bool = False
  ) -> jax.Array | np.ndarray:
    """Runs the next rows.

    Args:
      total: positions to run in all.
      every: whether all hidden rows are wanted, or the last of `total` alone.

    Returns:
      The wanted hidden rows [n, D]; on the host if every one is wanted.
    """
    at, left = self._done, total - self._done
    rows = self.model.rows_for(left)
    valid = min(rows, left)
    wanted = None
    if not every:
      wanted = (valid - 1, valid) if valid == left else (0, 0)
    hidden = self._run(self.tokens[at:at + valid], rows, total, wanted)
    self._last = None
    if len(hidden):
      self._last = hidden[valid - 1 if every else 0]
    self._done += valid
    self.tokens_computed += valid
    return np.asarray(hidden)[:valid] if every else hidden

  def _run(
      self, tokens: Sequence[int], rows: int, total: int,
      wanted: tuple[int, int] | None = None,
  ) -> jax.Array:
    """Runs tokens at the positions behind those done, which stay as they are.

    Args:
      tokens: at most `rows`; padding fills the step up.
      rows: of the program.
      total: positions to make room for.
      wanted: rows [first, stop) to return; None for all.

    Returns:
      Hidden rows [stop - first, D].
    """
    self._check_whole()
    self._prepare(rows, total)
    step = np.zeros((1, rows), np.int32)
    step[0, :len(tokens)] = tokens
    starts = np.asarray([self._done], np.int32)
    if self._streamed is not None:
      return self._streamed.run_step(
          self.model.params, step, starts, wanted)[0]
    programs = self.model.programs
    # Compiled before anything changes: that is when users interrupt.
    programs.step(rows, 1, self.cache.capacity)
    with interrupts.deferred():
      hidden, self._cache = programs.run_step(
          self.model.params, self.cache, step, starts, wanted)
    return hidden[0]

  def _check_whole(self) -> None:
    """Raises if a second interrupt has cut a step from its result."""
    whole = (self._streamed.whole if self._streamed
             else cache_lib.is_whole(self._cache))
    if not whole:
      raise errors.UsageError(
          'the context lost its keys and values when a step was interrupted;'
          ' graft or compute it again')

  def logits(self) -> np.ndarray:
    """Returns float32 [V], the logits behind the last token.

    Raises:
      UsageError: if the context is empty.
      NumericsError: if a logit is not finite.
    """
    return self.head(self.last_hidden()[None])[0]

  def ahead(self, guess: Iterable[int]) -> Iterator[np.ndarray]:
    """Yields the logits behind the last token, then behind right guesses.

    One step runs the last token and the guess. In between the caller appends
    the token it chooses; the first that is not the guessed one ends the
    iteration, and rows behind it count as padding. Without a guess, or where
    more than the last token or nothing at all is left to run, this is
    `logits()` alone.

    Args:
      guess: ids that may follow the last token; as many as a proven step has
        rows for are used.

    Yields:
      float32 [V].

    Raises:
      UsageError: if the context is empty or an id is not one of the model's.
      CapacityError: if there is no room for the guess.
      NumericsError: if a logit is not finite.
    """
    ids: list[int] = self.model.check_tokens(guess, self.length)
    counts = self.model.row_counts() if ids else []
    if self._streamed is not None:
      proven = streaming_lib.step_rows(self.model.profile)
      counts = [n for n in counts if n in proven]
    if not counts or self._done != self.length - 1:
      yield self.logits()
      return
    tokens = (self.tokens[-1:] + ids)[:counts[-1]]
    rows = next(n for n in counts if n >= len(tokens))
    hidden = np.asarray(self._run(tokens, rows, self.length))[:len(tokens)]
    tile = self.model.profile.tile
    logits = np.zeros((0, 0), np.float32)
    for i, row in enumerate(hidden):
      if self.tokens[self._done:] != tokens[i:i + 1]:
        return
      if not i % tile:  # A tile of the head at a time: the next may be idle.
        logits = self.model.programs.run_head(
            self.model.params, hidden[i:i + tile])
      self._last = row
      self._done += 1
      self.tokens_computed += 1
      yield self._finite(logits[i % tile])

  def last_hidden(self) -> jax.Array | np.ndarray:
    """Returns the hidden row [D] of the last token.

    No store holds it: a grafted context runs its last position for it.
    """
    if not self.tokens:
      raise errors.UsageError(
          'logits: expected at least one token in the context, found none')
    self.compute()
    if self._last is None:
      restored = self.tokens_restored
      self._done -= 1
      self.tokens_restored = min(restored, self._done)
      try:
        self.compute()
      except BaseException:
        self._done, self.tokens_restored = self.length, restored
        raise
    assert self._last is not None
    return self._last

  def head(self, hidden: jax.Array | np.ndarray) -> np.ndarray:
    """Returns checked logits float32 [n, V] of hidden rows [n, D]."""
    return self._finite(
        self.model.programs.run_head(self.model.params, hidden))

  def _finite(self, logits: np.ndarray) -> np.ndarray:
    if not np.isfinite(logits).all():
      raise errors.NumericsError(
          f'logits at position {self.length - 1}: expected finite values, found'
          ' NaN or infinity; check the weights')
    return logits

  def hidden_of(self, tokens: Iterable[int]) -> np.ndarray:
    """Extends by `tokens`; returns their hidden rows float32 [n, D], host."""
    ids: list[int] = self.model.check_tokens(tokens, self.length)
    self.compute()
    parts = [np.zeros((0, self.model.config.width), np.float32)]
    with self._extended(ids):
      while self._done < self.length:
        parts.append(np.asarray(self._step(self.length, every=True)))
    return np.concatenate(parts)

  def logits_of(
      self, tokens: Iterable[int], rows: Sequence[int] | None = None
  ) -> np.ndarray:
    """Extends by `tokens` and returns the logits behind some of them.

    Args:
      tokens: ids.
      rows: indices into `tokens`; None for all.

    Returns:
      float32 [len(rows), V].

    Raises:
      UsageError: if a row is not one of `tokens`; nothing has changed then.
    """
    ids: list[int] = self.model.check_tokens(tokens, self.length)
    rows = list(range(len(ids))) if rows is None else list(rows)
    for row in rows:
      if not 0 <= row < len(ids):
        raise errors.UsageError(
            f'rows: expected 0 to {len(ids) - 1}, found {row}')
    return self.head(self.hidden_of(ids)[rows])

  def score(self, tokens: Iterable[int]) -> Score:
    """Returns the log-likelihood of `tokens` behind this context.

    The context's own positions are never scored: a grafted context has logits
    only for what follows. The context does not change.

    Raises:
      UsageError: if the context or `tokens` is empty.
    """
    ids: list[int] = self.model.check_tokens(tokens, self.length)
    if not ids:
      raise errors.UsageError(
          'score: expected at least one token to score, found none')
    values = [sampling.log_softmax_at(self.logits(), ids[0])]
    if len(ids) > 1:
      with self.trial() as ahead:
        hidden = ahead.hidden_of(ids[:-1])
      tile = self.model.profile.tile
      for at in range(0, len(hidden), tile):  # All at once may not fit: V.
        logits = self.head(hidden[at:at + tile])
        values += [sampling.log_softmax_at(row, ids[at + i + 1])
                   for i, row in enumerate(logits)]
    return Score(float(sum(values)), values)

  def generate(
      self, max_new_tokens: int = 64, *, temperature: float = 0.0,
      top_k: int = 0, top_p: float = 1.0, seed: int = 0, num_samples: int = 1,
      stop_ids: Iterable[int] | None = None,
      stop_when: decode.StopWhen | None = None, speculate: int | None = None,
      on_token: Callable[[int, int], None] | None = None,
  ) -> list[decode.Generation]:
    """Samples continuations.

    With one sample the context is extended by it; several samples run as a
    batch and leave the context as it was. Sample i draws what it would draw
    alone.

    Args:
      max_new_tokens: most tokens a sample; fewer where the capacity ends.
      temperature: 0 for greedy.
      top_k: candidates kept; 0 keeps all.
      top_p: probability kept.
      seed: of the draws.
      num_samples: how many.
      stop_ids: ids that end a sample and are no part of it; None for the
        tokenizer's.
      stop_when: called with a sample's tokens so far as each is chosen; True
        ends it behind the last of them, with 'stop'.
      speculate: most rows of a step, which checks tokens guessed by lookup:
        the same tokens, logits and cache in fewer steps. 1 for none; None for
        the default, which is none before the self-test has run. Several
        samples are never speculated.
      on_token: called with (sample, token id) as each token is chosen.

    Returns:
      One `decode.Generation` a sample.

    Raises:
      UsageError: if a parameter is out of its range or the context is empty.
      KvgraftError: of a streamed context, if its store fails. A single sample
        has extended the context by what it chose until then, and the same call
        for the rest goes on with the same draws.
    """
    params = sampling.SamplingParams(temperature, top_k, top_p, seed)
    if num_samples < 1:
      raise errors.UsageError(
          f'num_samples: expected at least 1, found {num_samples}')
    contexts = [self] * num_samples
    return decode.generate(
        contexts, params, max_new_tokens=max_new_tokens, stop_ids=stop_ids,
        stop_when=stop_when, speculate=speculate, on_token=on_token)

  def fork(self) -> Context:
    """Returns an independent copy; the device memory is copied."""
    other = Context(self.model, record=self._record)
    other.streaming = self.streaming
    if self._streamed is not None:
      other._streamed = self._streamed.copy()
    for name in ('tokens_restored', 'tokens_computed', 'exact', 'parent',
                 'parent_length', '_done', '_last', '_keep'):
      setattr(other, name, getattr(self, name))
    other.tokens = list(self.tokens)
    if self._cache is not None:
      other._cache = jax.tree.map(jnp.copy, self._cache)
    if self._recorder is not None:
      other._recorder = self._recorder.copy()
    return other

  @contextlib.contextmanager
  def trial(self) -> Iterator[Context]:
    """Yields a fork that is gone behind the block; `usage` counts it here.

    Of a streamed context the fork takes the place on the device.
    """
    with contextlib.ExitStack() as stack:
      if self._streamed is not None:
        stack.enter_context(self._streamed.parked())
      other = self.fork()
      try:
        yield other
      finally:
        usage = other.usage()
        self._tried += usage.tokens_computed - self.tokens_computed
        if usage.device_kv_source == 'buffers':
          self._most_device = max(self._most_device, usage.device_kv_bytes)
        self._most_host = max(self._most_host, usage.host_kv_bytes)
        if other._streamed is not None:
          other._streamed.drop()

  def grown_cache(self, slots: int) -> cache_lib.KVCache:
    """Returns a cache of `slots` global slots with all tokens computed."""
    self.compute()
    return grow(self.cache, slots)

  def logits_sha256(self) -> str:
    """Returns the SHA-256 of `logits()` as little-endian float32."""
    return hashing.logits_sha256(self.logits())

  def keep_last(self, positions: int) -> None:
    """Keeps sliding rows on the host of the last `positions` alone."""
    self._keep = positions
    if self._recorder is not None:
      self._recorder.keep = positions

  def rows(self, kind: str, start: int, stop: int):
    """Returns `global_rows` or `sliding_rows`, as the kind of layers asks."""
    of = (self.global_rows if kind == config_lib.GLOBAL
          else self.sliding_rows)
    return of(start, stop)

  def global_rows(self, start: int, stop: int):
    """Returns K and V of the global layers at [start, stop), host arrays.

    Returns:
      k, v unsigned [L, stop - start, K, H].
    """
    if self._streamed is not None:
      return self._streamed.rows(start, stop)
    return recorder_lib.read_global(
        self.cache, start, stop, self.model.profile.page)

  def sliding_rows(self, start: int, stop: int):
    """Returns K and V of the sliding layers at [start, stop), host arrays.

    Returns:
      k, v unsigned [L, stop - start, K, H].

    Raises:
      UsageError: if rows have left the ring and were not recorded.
    """
    recorder = self._recorder
    if recorder is None:
      window = self.model.config.sliding.window or 0
      recorder = recorder_lib.Recorder(
          self.model.config, self.model.profile, max(0, self._done - window))
    return recorder.rows(self.cache, self._done, start, stop)


def grow(cache: cache_lib.KVCache, slots: int) -> cache_lib.KVCache:
  """Returns the same cache with room for `slots` global positions."""
  if cache.capacity >= slots:
    return cache
  kind = config_lib.GLOBAL

  def pad(array):
    more = slots - array.shape[2]
    return jnp.pad(array, ((0, 0), (0, 0), (0, more), (0, 0), (0, 0)))

  return cache_lib.KVCache(
      cache.k | {kind: pad(cache.k[kind])},
      cache.v | {kind: pad(cache.v[kind])}, cache.scalars)
