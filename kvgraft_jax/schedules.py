"""The invariance matrix: one text through the whole model by many schedules.

The self-test runs a few layers; here all of them run, and every schedule must
leave the same keys, values and logits wherever the self-test promises so.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import hashlib
import tempfile

import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import grafting
from kvgraft_jax import selftest
from kvgraft_jax import store as store_lib

BATCH = 4
_ONE_BY_ONE = 16  # Last tokens that are run alone, as in generation.


@dataclasses.dataclass(frozen=True)
class Schedule:
  """What one schedule left.

  Attributes:
    name: of the schedule.
    about: what was done, for people.
    promised: whether the self-test says that it equals the others.
    sha256: over the cache rows that a continuation can see, and the last
      position's logits.
    tokens_computed: positions that were run.
  """

  name: str
  about: str
  promised: bool
  sha256: str
  tokens_computed: int


def count(model: engine.Model) -> int:
  """Returns how many schedules `run` yields."""
  return len(selftest.row_ladder(model.profile)) + 6


def run(
    model: engine.Model, tokens: Sequence[int]
) -> Iterator[Schedule]:
  """Yields the schedules of a text of at least 32 tokens, one after another."""
  proved = model.self_test().invariances
  total, chunk, tile = len(tokens), model.profile.chunk, model.profile.tile
  slots = model.slots_for(total)
  for rows in selftest.row_ladder(model.profile):
    yield Schedule(
        f'rows_{rows}', f'steps of {rows} rows', bool(proved[f'rows_{rows}']),
        _steps(model, tokens, rows, slots), total)
  yield Schedule(
      'capacity', f'a cache of {2 * slots} slots instead of {slots}',
      bool(proved['capacity']), _steps(model, tokens, chunk, 2 * slots), total)
  yield Schedule(
      'neighbours', 'other tokens in the padding', bool(proved['neighbours']),
      _steps(model, tokens, chunk, slots, pad=7), total)
  yield Schedule(
      'batch', f'one of {BATCH} sequences of unequal lengths, {tile} rows each',
      bool(proved['batch'] and proved['tile']), _batch(model, tokens, slots),
      total)
  cut = total * 10 // 21  # No multiple of anything.
  # Later calls choose steps as a context does, chunks and tiles mixed.
  free = bool(proved['slot'] and proved['tile'])
  context = model.prefill(tokens[:cut]).extend(tokens[cut:])
  yield Schedule(
      'split', f'{cut} tokens, then the others', free, _of(context),
      context.tokens_computed)
  context = model.prefill(tokens[:-_ONE_BY_ONE])
  for token in tokens[-_ONE_BY_ONE:]:
    context.append(token)
    context.compute()
  yield Schedule(
      'one_by_one', f'the last {_ONE_BY_ONE} tokens alone, as in generation',
      free, _of(context), context.tokens_computed)
  with tempfile.TemporaryDirectory(prefix='kvgraft-') as folder:
    store = store_lib.Store(folder, create=True)
    made = depositing.deposit(model, store, list(tokens[:cut]))
    # Where nothing is promised the matrix shows what comes of it.
    context = grafting.graft(model, store, made, on_mismatch='inexact')
    context.extend(tokens[cut:])
  yield Schedule(
      'graft', f'{cut} tokens from a store, then the others',
      free and model.self_test().exact, _of(context), context.tokens_computed)


def _steps(model, tokens, rows, slots, pad=0) -> str:
  cache = model.programs.empty_cache(1, slots)
  for at in range(0, len(tokens), rows):
    part = tokens[at:at + rows]
    step = np.full((1, rows), pad, np.int32)
    step[0, :len(part)] = part
    hidden, cache = model.programs.run_step(
        model.params, cache, step, np.asarray([at], np.int32),
        (len(part) - 1, len(part)))
  return _digest(model, hidden[0], cache, len(tokens))


def _batch(model, tokens, slots) -> str:
  """Runs the text beside three shorter ones; returns the text's digest."""
  tile, total, b = model.profile.tile, len(tokens), 2
  lengths = np.asarray([total - 1, tile + 1, total, total // 2], np.int32)
  cache = model.programs.empty_cache(BATCH, slots)
  done, last = np.zeros(BATCH, np.int32), None
  while done[b] < total:
    step = np.zeros((BATCH, tile), np.int32)
    valid = np.minimum(tile, lengths - done)
    for i, n in enumerate(valid):
      step[i, :n] = tokens[done[i]:done[i] + n]
    hidden, cache = model.programs.run_step(
        model.params, cache, step, done.copy())
    last = hidden[b, valid[b] - 1:valid[b]]
    done += valid
  return _digest(model, last, cache, total, b)


def _of(context: engine.Context) -> str:
  last = context.last_hidden()[None]
  return _digest(context.model, last, context.cache, context.length)


def _digest(
    model: engine.Model, last, cache: cache_lib.KVCache, done: int, b: int = 0
) -> str:
  """Returns SHA-256 over visible K and V of sequence `b`, and its logits."""
  sha = hashlib.sha256()
  for rows in cache_lib.visible_rows(
      cache, model.config, model.profile.chunk, done, b):
    sha.update(rows.tobytes())
  sha.update(model.programs.run_head(model.params, last).tobytes())
  return sha.hexdigest()
