"""The own-position study: where may a stored block stand?

A block of tokens and a tail behind it are computed with nothing in front,
their rotary positions counted from an offset m. Rotary scores depend on
differences of positions alone (arXiv:2104.09864), so in real arithmetic the
tail's logits would not depend on m. Compared are

    fresh   computed at m           against computed at 0
    own     block stored at m and restored at m, tail computed behind it
                                    against fresh at m
    moved   block stored at 0, its keys turned by m, tail computed behind it
                                    against fresh at m

A case differs from `base` in one factor, to tell what the difference depends
on. The step programs are those of the engine; `float64` runs the plain NumPy
forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import numerics
from kvgraft_jax import programs as programs_lib
from kvgraft_jax import reference
from kvgraft_jax import rope as rope_lib

FRESH, OWN, MOVED = WHATS = ('fresh', 'own', 'moved')
PLAIN = 'float64'  # The dtype of the plain forward.
_FLOATS = {'bfloat16': ml_dtypes.bfloat16, 'float32': np.float32}


@dataclasses.dataclass(frozen=True)
class Case:
  """One set of factors.

  Attributes:
    name: of the case.
    about: what differs from `base`, for people.
    dtype: bfloat16, float32 or float64.
    window: whether only what the tail can see of sliding layers is stored.
    float32_angles: rotary angles as products of float32 numbers, instead of
      rows that are exact to the last bit.
    kinds: layers whose rotary positions are counted from the offset.
    slots: the offset moves cache slots and masks, and no rotary position.
    page_divisor: the page is the profile's divided by it.
    chunk_divisor: the chunk is the profile's divided by it.
  """

  name: str
  about: str
  dtype: str = 'bfloat16'
  window: bool = False
  float32_angles: bool = False
  kinds: tuple[str, ...] = config_lib.KINDS
  slots: bool = False
  page_divisor: int = 1
  chunk_divisor: int = 1


CASES = {c.name: c for c in (
    Case('base', 'bfloat16, every row stored, exact rotary rows'),
    Case('float32', 'float32 weights, operands and cache', dtype='float32'),
    Case('float64', 'float64 throughout, the plain NumPy forward',
         dtype=PLAIN),
    Case('float32_both', 'float32 throughout, rotary angles too',
         dtype='float32', float32_angles=True),
    Case('window', 'sliding layers: only what the tail can see is stored',
         window=True),
    Case('float32_angles', 'rotary angles multiplied in float32',
         float32_angles=True),
    Case('sliding_only', 'the offset reaches the sliding layers alone (base'
         ' 10,000)', kinds=(config_lib.SLIDING,)),
    Case('global_only', 'the offset reaches the global layers alone (base'
         ' 1,000,000)', kinds=(config_lib.GLOBAL,)),
    Case('half_page', 'attention partials of half as many positions',
         page_divisor=2),
    Case('small_chunk', 'prefill steps of an eighth of the rows',
         chunk_divisor=8),
    Case('slots', 'cache slots move by the offset, rotary positions stay',
         slots=True),
)}


@dataclasses.dataclass(frozen=True)
class State:
  """Logits behind each token of the tail.

  Attributes:
    what: of `WHATS`.
    m: offset.
    logits: [t, V], float32 or float64.
    tokens_computed: positions that were run for it.
    tokens_restored: positions whose keys and values were taken as stored.
  """

  what: str
  m: int
  logits: np.ndarray
  tokens_computed: int
  tokens_restored: int


@dataclasses.dataclass(frozen=True)
class Comparison:
  """One of the three comparisons at one offset.

  Attributes:
    what: of `WHATS`.
    m: offset.
    a: what is compared with.
    b: what is compared.
    keys_equal: entries of the first layer's keys that have the same bits.
    keys: how many there are.
    keys_max_abs: largest difference of such an entry.
  """

  what: str
  m: int
  a: State
  b: State
  keys_equal: int
  keys: int
  keys_max_abs: float


def profile_of(model: engine.Model, case: Case) -> numerics.Profile:
  """Returns the profile that a case runs with.

  Raises:
    UsageError: if the model's page or chunk cannot be divided so.
  """
  chunk = model.profile.chunk // case.chunk_divisor
  return dataclasses.replace(
      model.profile, page=model.profile.page // case.page_divisor, chunk=chunk,
      tile=min(chunk, model.profile.tile))


def compare(
    model: engine.Model, case: Case, tokens: Sequence[int], block: int,
    offsets: Sequence[int],
) -> Iterator[Comparison]:
  """Yields every comparison of one text.

  Args:
    model: in the case's dtype; in any for float64, whose weights are taken.
    case: the factors.
    tokens: ids of the block and the tail.
    block: tokens of the block.
    offsets: m, ascending; 0 is a control: nothing moves.
  """
  tail = list(tokens[block:])
  runner: _Steps | _Plain = (
      _Plain(model) if case.dtype == PLAIN
      else _Steps(model, case, max(offsets) + len(tokens)))

  def fresh(m):
    runner.place(m)
    rows, logits = runner.fresh(tokens[:block], tail)
    return rows, State(FRESH, m, logits, len(tokens), 0)

  def behind(what, rows, m):
    runner.place(m)
    return State(what, m, runner.behind(rows, tail, block), len(tail), block)

  rows_0, at_0 = fresh(0)
  for m in offsets:
    rows_m, at_m = (rows_0, at_0) if not m else fresh(m)
    if m:
      yield _compared(FRESH, m, at_0, at_m, rows_0, rows_m)
    yield _compared(
        OWN, m, at_m, behind(OWN, rows_m, m), rows_m, rows_m)
    turned = runner.turn(rows_0, m)
    yield _compared(
        MOVED, m, at_m, behind(MOVED, turned, m), rows_m, turned)


def _compared(what, m, a, b, rows_a, rows_b) -> Comparison:
  keys_a, keys_b = rows_a.first_keys, rows_b.first_keys
  apart = abs(keys_a.astype(np.float64) - keys_b.astype(np.float64))
  return Comparison(
      what, m, a, b, int((keys_a == keys_b).sum()), keys_a.size,
      float(apart.max()))


@dataclasses.dataclass(frozen=True)
class _Rows:
  """Keys and values of a block on the host, in whatever form a runner has."""

  content: Any
  first_keys: np.ndarray


class _Shifted(programs_lib.Programs):
  """Step programs whose rotary rows or slots are counted from an offset."""

  def __init__(self, config, profile, params, case: Case):
    super().__init__(config, profile, params)
    self.case = case
    self.place(0)

  def place(self, m: int) -> None:
    """Sets the offset of what follows."""
    self.offset = 0 if self.case.slots else m
    self.start = m if self.case.slots else 0
    if self.case.slots:
      self._scalars['first_position'] = jnp.asarray(m, jnp.int32)

  def share(self, other: programs_lib.Programs) -> None:
    """Takes the compiled steps of the same shapes and profile."""
    self._compiled = other._compiled

  def rope_rows(self, positions):
    return {
        kind: self.angles(
            positions - self.start
            + (self.offset if kind in self.case.kinds else 0),
            self.config.spec(kind))
        for kind in config_lib.KINDS}

  def angles(self, positions, spec):
    """Returns cos and sin, float32 [n, H / 2], in the case's way."""
    if not self.case.float32_angles:
      return rope_lib.rope_rows(positions, spec)
    half = spec.head_dim // 2
    exponent = np.arange(half, dtype=np.float32) * np.float32(
        -2 / spec.head_dim)
    frequency = np.float32(spec.rope_theta) ** exponent
    frequency /= np.float32(spec.rope_divisor)
    if spec.rope_pairs is not None:
      frequency[spec.rope_pairs:] = 0
    angle = positions[:, None].astype(np.float32) * frequency
    return np.cos(angle), np.sin(angle)


class _Steps:
  """A case on the engine's step programs."""

  def __init__(self, model: engine.Model, case: Case, longest: int):
    profile = profile_of(model, case)
    self._model, self._case, self._profile = model, case, profile
    self._programs = _Shifted(model.config, profile, model.params, case)
    if profile == model.profile and not case.slots:
      self._programs.share(model.programs)
    self._capacity = cache_lib.slots_for(model.config, profile, longest)
    self.place = self._programs.place

  def fresh(self, block, tail):
    """Returns rows of the block, and the tail's logits, from nothing."""
    cache = cache_lib.empty(
        self._model.config, self._profile, batch=1, capacity=self._capacity,
        scalars=self._programs.fresh_scalars())
    cache, written = self._run(cache, block, 0, [])
    rows = self._rows(cache, len(block), written)
    hidden: list[np.ndarray] = []
    self._run(cache, tail, len(block), hidden)
    return rows, self._head(hidden)

  def behind(self, rows, tail, block):
    """Returns the tail's logits behind a restored block."""
    hidden: list[np.ndarray] = []
    self._run(self._restored(rows), tail, block, hidden)
    return self._head(hidden)

  def turn(self, rows, m):
    """Returns the rows with keys turned by m positions, in float32."""
    content = dict(rows.content)
    for kind in () if self._case.slots else self._case.kinds:
      first, k, v = content[kind]
      cos, sin = self._programs.angles(
          np.asarray([m]), self._model.config.spec(kind))
      a, b = np.split(self._floats(k).astype(np.float32), 2, axis=-1)
      turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
      turned = turned.astype(_FLOATS[self._profile.dtype]).view(k.dtype)
      content[kind] = first, turned, v
    return self._of(content)

  def _floats(self, bits):
    return bits.view(_FLOATS[self._profile.dtype])

  def _head(self, hidden):
    return self._programs.run_head(
        self._model.params, np.concatenate(hidden))

  def _run(self, cache, tokens, at, hidden):
    """Runs tokens from index `at`; returns cache and the end of its rows."""
    profile, done, written = self._profile, 0, at
    while done < len(tokens):
      left = len(tokens) - done
      few = left <= max(profile.tile, engine.TILES_BELOW * profile.chunk)
      rows = profile.tile if few else profile.chunk
      part = tokens[done:done + rows]
      step = np.zeros((1, rows), np.int32)
      step[0, :len(part)] = part
      start = self._programs.start + at + done
      out, cache = self._programs.run_step(
          self._model.params, cache, step, np.asarray([start], np.int32))
      hidden.append(np.asarray(out[0, :len(part)]))
      written = at + done + rows
      done += len(part)
    return cache, written

  def _slots(self, kind, shape, first, stop):
    """Returns the slots of indices [first, stop) in an array of `shape`."""
    positions = self._programs.start + np.arange(first, stop)
    return cache_lib.slots_at(
        positions, self._model.config.spec(kind).window, shape[2],
        self._profile.chunk)

  def _rows(self, cache, count, written):
    """Copies the block's rows to the host; the ring may have lost some."""
    content = {}
    for kind in config_lib.KINDS:
      window, first = self._model.config.spec(kind).window, 0
      if window is not None:
        ring = cache_lib.ring_size(window, self._profile)
        first = max(0, count - window if self._case.window else written - ring)
      slots = self._slots(kind, cache.k[kind].shape, first, count)
      k, v = (np.asarray(side[kind])[:, 0, slots]
              for side in (cache.k, cache.v))
      content[kind] = first, k, v
    return self._of(content)

  def _of(self, content):
    first, keys, _ = content[self._model.config.layers[0]]
    return _Rows(content, self._floats(keys)[0])

  def _restored(self, rows):
    """Returns a new cache with the rows of the block and zeros elsewhere."""
    shapes = cache_lib.shapes(
        self._model.config, self._profile, 1, self._capacity)
    k: dict[str, jax.Array] = {}
    v: dict[str, jax.Array] = {}
    for kind, (first, *pair) in rows.content.items():
      slots = self._slots(
          kind, shapes[kind], first, first + pair[0].shape[1])
      for side, array in zip((k, v), pair):
        whole = np.zeros(shapes[kind], array.dtype)
        whole[:, 0, slots] = array
        side[kind] = jnp.asarray(whole)
    return cache_lib.KVCache(k, v, self._programs.fresh_scalars())


class _Plain:
  """float64 on the plain forward: the block in one piece, then the tail."""

  def __init__(self, model: engine.Model):
    self._model = model
    self.place(0)

  def place(self, m: int) -> None:
    """Sets the offset of what follows."""
    self._shift = dict.fromkeys(config_lib.KINDS, m)

  def _forward(self, tokens, past, kept):
    return reference.forward(
        self._model.params, self._model.config, tokens, dtype=np.float64,
        shift=self._shift, past=past, kept=kept)

  def _logits(self, tail, past):
    return reference.head(
        self._model.params, self._model.config,
        self._forward(tail, past, None))

  def fresh(self, block, tail):
    """Returns rows of the block, and the tail's logits, from nothing."""
    rows: list[reference.KeyValue | None] = []
    self._forward(block, None, rows)
    return self._of(rows), self._logits(tail, rows)

  def behind(self, rows, tail, block):
    """Returns the tail's logits behind a restored block."""
    del block
    return self._logits(tail, rows.content)

  def turn(self, rows, m):
    """Returns the rows with keys turned by m positions."""
    config, turned = self._model.config, []
    for kind, pair in zip(config.layers, rows.content):
      if pair is not None:
        key, value = pair
        pair = reference.rotate(
            key, config.spec(kind), np.full(len(key), m)), value
      turned.append(pair)
    return self._of(turned)

  def _of(self, rows):
    return _Rows(rows, rows[0][0])
