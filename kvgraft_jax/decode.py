"""Token by token: greedy and sampled decoding, alone or in a batch."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import sampling
from kvgraft_jax import speculation

# An `engine.Context`, which is built on this module.
Context = Any
# Called with a sample's tokens so far; True ends it behind the last of them.
StopWhen = Callable[[list[int]], bool]

# Sequences of one batched program; fewer are padded, more run in groups.
BATCH = 4


@dataclasses.dataclass
class Generation:
  """One sampled continuation.

  Attributes:
    token_ids: the new tokens, without the stop token.
    text: their text; '' where the model has no tokenizer.
    finish_reason: 'stop', 'length' (as many as asked for) or 'capacity' (no
      more fit).
    logits_sha256: of the logits that chose the first token.
    steps: step programs whose rows chose its tokens, the one that ran the
      end of the prompt included. How it was made, so no part of equality.
  """

  token_ids: list[int]
  text: str
  finish_reason: str
  logits_sha256: str
  steps: int = dataclasses.field(default=0, compare=False)


class _Sample:
  """A continuation in the making."""

  def __init__(self, context: Context, index: int, limit: int):
    self.context = context
    self.index = index
    room = context.model.capacity - context.length
    self.limit = min(limit, room)
    self.at_limit = 'length' if limit <= room else 'capacity'
    self.start = context.length
    self.tokens: list[int] = []
    self.first_hash = ''
    self.steps = 0
    self.reason = '' if self.limit > 0 else self.at_limit

  def choose(
      self, logits, params, stop_ids, stop_when, on_token
  ) -> int | None:
    """Samples the next token; None once this continuation has ended."""
    if not self.first_hash:
      self.first_hash = hashing.logits_sha256(logits)
    token = sampling.sample(
        logits, temperature=params.temperature, top_k=params.top_k,
        top_p=params.top_p, seed=params.seed, sample_index=self.index,
        position=self.start + len(self.tokens))
    if token in stop_ids:
      self.reason = 'stop'
      return None
    self.tokens.append(token)
    if on_token:
      on_token(self.index, token)
    if stop_when and stop_when(self.tokens):
      self.reason = 'stop'
      return None
    if len(self.tokens) >= self.limit:
      self.reason = self.at_limit
      return None
    return token

  def result(self) -> Generation:
    tokenizer = self.context.model.tokenizer
    text = tokenizer.decode(self.tokens) if tokenizer else ''
    return Generation(
        self.tokens, text, self.reason, self.first_hash, self.steps)


def generate(
    contexts: Sequence[Context], params: sampling.SamplingParams, *,
    max_new_tokens: int, stop_ids: Iterable[int] | None = None,
    stop_when: StopWhen | None = None, speculate: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Generation]:
  """Continues each context; one context runs alone, several as a batch.

  Args:
    contexts: of one model, none empty. A single one is extended; those of a
      batch stay as they are. The same context may occur several times.
    params: how to choose.
    max_new_tokens: most tokens for each.
    stop_ids: ids that end a continuation; None for the tokenizer's.
    stop_when: called with the new tokens of a continuation as each is chosen;
      True ends it behind the last of them.
    speculate: most rows of a step of a single context (see `speculation`); 1
      for none, None for the default.
    on_token: called with (index of the context, token id).

  Raises:
    UsageError: if a parameter is out of its range or a context is empty.
  """
  params.check()
  if max_new_tokens < 1:
    raise errors.UsageError(
        f'max_new_tokens: expected at least 1, found {max_new_tokens}')
  model = contexts[0].model
  if stop_ids is None:
    stop_ids = model.tokenizer.eos_ids if model.tokenizer else ()
  stop = frozenset(stop_ids)
  rows = model.speculative_rows(speculate)
  samples = [_Sample(c, i, max_new_tokens) for i, c in enumerate(contexts)]
  if len(samples) == 1:
    _alone(samples[0], rows, params, stop, stop_when, on_token)
  elif contexts[0].streaming is not None:
    for sample in samples:  # A batch would need room for all on the device.
      with sample.context.trial() as sample.context:
        _alone(sample, rows, params, stop, stop_when, on_token)
  else:
    for at in range(0, len(samples), BATCH):
      _together(samples[at:at + BATCH], params, stop, stop_when, on_token)
  return [s.result() for s in samples]


def _alone(
    sample: _Sample, rows: int, params, stop, stop_when, on_token
) -> None:
  context = sample.context
  lookup = speculation.Lookup(rows, context.model.profile.tile)
  while not sample.reason:
    sample.steps += 1
    # Every row chooses one token more than the guess it stands on.
    room = sample.limit - len(sample.tokens) - 1
    guess = lookup.propose(context.tokens, room)
    for logits in context.ahead(guess):
      sample.choose(logits, params, stop, stop_when, on_token)
      if context.length < sample.start + len(sample.tokens):
        context.append(sample.tokens[-1])
      if sample.reason:
        break


def _stack(contexts: Sequence[Context], slots: int):
  """Returns one cache of the contexts' caches, padded to BATCH sequences."""
  caches = [c.grown_cache(slots) for c in contexts]
  caches += [caches[0]] * (BATCH - len(caches))

  def join(*arrays):
    return jnp.concatenate(arrays, axis=1)

  return cache_lib.KVCache(
      jax.tree.map(join, *(c.k for c in caches)),
      jax.tree.map(join, *(c.v for c in caches)),
      contexts[0].model.programs.fresh_scalars())


def _together(
    samples: list[_Sample], params, stop, stop_when, on_token
) -> None:
  contexts = [s.context for s in samples]
  model = contexts[0].model
  hidden = np.stack([np.asarray(c.last_hidden()) for c in contexts])
  longest = max(s.start + max(s.limit, 0) for s in samples)
  cache = _stack(contexts, model.slots_for(longest))
  done = np.asarray(
      [c.length for c in contexts] + [0] * (BATCH - len(samples)), np.int32)
  tile = model.profile.tile
  while not all(s.reason for s in samples):
    logits = contexts[0].head(hidden)
    step = np.zeros((BATCH, tile), np.int32)
    for b, sample in enumerate(samples):
      if not sample.reason:
        sample.steps += 1
        token = sample.choose(logits[b], params, stop, stop_when, on_token)
        step[b, 0] = token or 0
    active = [b for b, s in enumerate(samples) if not s.reason]
    if not active:
      return
    # Idle sequences run padding behind their end, which nothing reads.
    out, cache = model.programs.run_step(model.params, cache, step, done)
    out = np.asarray(out[:, 0])
    for b in active:
      hidden[b] = out[b]
      done[b] += 1
