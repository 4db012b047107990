"""Checks of an artifact against a fresh computation: verify and audit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

import numpy as np

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import blocks as blocks_lib
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import hashing
from kvgraft_jax import sampling
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming as streaming_lib

GREEDY_TOKENS = 64
LONGEST_TAIL = 19  # Of `continuations`.


@dataclasses.dataclass(frozen=True)
class VerifyReport:
  """What `verify` found; counts are of `continuations`.

  Attributes:
    continuations: how many were compared.
    sha256_equal: those whose last logits have the same SHA-256.
    argmax_agree: those with the same first maximum.
    max_kl: largest KL(fresh || grafted) of any row, in nats.
    greedy_tokens_equal: leading equal tokens of `GREEDY_TOKENS`.
    greedy_tokens: how many were decoded.
    end_to_end_equal: whether one continuation, computed from position 0 in
      one go, has the grafted logits' SHA-256 as well.
    restored_only: whether every graft computed its tail and nothing else.
    tokens_restored: positions of a graft.
    tail_tokens: positions that the grafts computed, in all.
    length: positions grafted.
  """

  continuations: int
  sha256_equal: int
  argmax_agree: int
  max_kl: float
  greedy_tokens_equal: int
  greedy_tokens: int
  end_to_end_equal: bool
  restored_only: bool
  tokens_restored: int
  tail_tokens: int
  length: int

  @property
  def ok(self) -> bool:
    """Whether everything agreed."""
    return (
        self.sha256_equal == self.argmax_agree == self.continuations
        and self.max_kl == 0.0 and self.end_to_end_equal
        and self.greedy_tokens_equal == self.greedy_tokens
        and self.restored_only)


def continuations(
    model: engine.Model, tokens: Sequence[int], count: int
) -> list[list[int]]:
  """Returns `count` different tails, fixed, longer than two tiles if small.

  Half are pieces of the text itself, half are arbitrary ids.
  """
  rng = np.random.Generator(np.random.PCG64(20260723))
  longest = min(2 * model.profile.tile + 3, LONGEST_TAIL)
  result = []
  for i in range(count):
    size = 1 + i % longest
    if i % 2 and len(tokens) > size:
      at = int(rng.integers(1, len(tokens) - size + 1))
      result.append(list(tokens[at:at + size]))
    else:
      result.append(rng.integers(
          5, model.config.vocab_size, size=size).tolist())
  return result


def verify(
    model: engine.Model, store: store_lib.Store, ref: grafting.Ref, *,
    n_continuations: int = 50, length: int | None = None,
    on_mismatch: str = 'fail',
    streaming: streaming_lib.Streaming | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
  """Compares grafts with a fresh computation in this process.

  The fresh prefix is computed once, from nothing; one continuation more is
  computed from position 0 end to end. Every continuation gets a graft of its
  own from the store.

  Args:
    model: the artifact's.
    store: where it is.
    ref: the artifact.
    n_continuations: how many tails to compare.
    length: positions to graft; None for all.
    on_mismatch: as in `graft`; 'recompute' is refused, it proves nothing.
    streaming: of the grafts; the fresh side is always in the device's memory.
    progress: called with (continuations done, in all).

  Raises:
    KvgraftError: as `graft` does.
  """
  if n_continuations < 1:
    raise errors.UsageError(
        f'continuations: expected at least 1, found {n_continuations}')
  if on_mismatch == 'recompute':
    raise errors.UsageError(
        "on_mismatch: verify compares a graft, so expected 'fail' or 'inexact',"
        " found 'recompute'")
  def grafted():
    return grafting.graft(
        model, store, ref, length, on_mismatch, streaming=streaming)

  first = grafted()
  tokens = list(first.tokens)
  fresh = model.prefill(tokens)
  assert fresh.tokens_restored == 0
  tails = continuations(model, tokens, n_continuations)
  equal = agree = tail_tokens = 0
  max_kl, restored_only = 0.0, True
  grafted_hash = ''
  for i, tail in enumerate(tails):
    context = grafted()
    # Both sides pass every token through; hidden rows give logits of each.
    ours = context.logits_of(tail)
    theirs = fresh.fork().logits_of(tail)
    restored_only &= (context.tokens_computed == len(tail)
                      and context.tokens_restored == len(tokens))
    tail_tokens += context.tokens_computed
    a = hashing.logits_sha256(ours[-1])
    grafted_hash = grafted_hash or a
    equal += a == hashing.logits_sha256(theirs[-1])
    agree += int(ours[-1].argmax() == theirs[-1].argmax())
    max_kl = max([max_kl] + [
        sampling.kl_divergence(p, q) for p, q in zip(theirs, ours)])
    if progress:
      progress(i + 1, len(tails))
  whole = model.prefill(tokens + tails[0])
  room = min(GREEDY_TOKENS, model.capacity - len(tokens))
  greedy_equal = 0
  if room:
    a = first.generate(room, stop_ids=())[0].token_ids
    b = fresh.generate(room, stop_ids=())[0].token_ids
    while greedy_equal < room and a[greedy_equal] == b[greedy_equal]:
      greedy_equal += 1
    # Behind an empty tail the graft ran its last position alone.
    restored_only &= first.tokens_restored == len(tokens) - 1
  return VerifyReport(
      continuations=len(tails), sha256_equal=equal, argmax_agree=agree,
      max_kl=max_kl, greedy_tokens_equal=greedy_equal, greedy_tokens=room,
      end_to_end_equal=whole.logits_sha256() == grafted_hash,
      restored_only=restored_only, tokens_restored=len(tokens),
      tail_tokens=tail_tokens, length=len(tokens))


@dataclasses.dataclass(frozen=True)
class AuditReport:
  """What `audit` found.

  Attributes:
    blocks_checked: stored blocks that were recomputed, both kinds together.
    blocks_equal: those with equal bytes.
    blocks_not_auditable: chosen blocks that cannot be checked alone.
    differing: one line for each block that differs.
    last_logits_equal: whether the last position's logits have the recorded
      hash; None if the last block was not checked.
    tokens_computed: positions run.
  """

  blocks_checked: int
  blocks_equal: int
  blocks_not_auditable: int
  differing: list[str]
  last_logits_equal: bool | None
  tokens_computed: int

  @property
  def ok(self) -> bool:
    """Whether everything agreed."""
    return (self.blocks_checked == self.blocks_equal
            and self.last_logits_equal is not False)


def choose_blocks(
    manifest: artifact_lib.Manifest, blocks: str | int | Sequence[int]
) -> list[artifact_lib.Block]:
  """Returns the position blocks to audit.

  Args:
    manifest: of the artifact.
    blocks: 'all', how many, spread over the artifact, or a list of numbers.

  Raises:
    UsageError: if `blocks` is none of these.
  """
  fields = manifest.fields
  every = artifact_lib.blocks_of(fields.start, fields.end, fields.block)
  if blocks == 'all':
    return every
  if isinstance(blocks, Sequence) and not isinstance(blocks, str):
    numbered = {b.number: b for b in every}
    for number in blocks:
      if number not in numbered:
        raise errors.UsageError(
            f'blocks: expected {every[0].number} to {every[-1].number}, found'
            f' {number!r:.80}')
    return [numbered[number] for number in sorted(set(blocks))]
  try:
    count = int(blocks)
  except ValueError:
    count = 0
  if count < 1:
    raise errors.UsageError(
        f"blocks: expected 'all' or a positive number, found {blocks!r}")
  picks = np.linspace(0, len(every) - 1, min(count, len(every)))
  return [every[int(round(i))] for i in picks]


def audit(
    model: engine.Model, store: store_lib.Store, ref: grafting.Ref, *,
    blocks: str | int | Sequence[int] = 'all',
    streaming: streaming_lib.Streaming | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
  """Recomputes stored blocks from the blocks in front of them.

  Any block can be checked alone, without computing what is in front of it;
  together all blocks prove the artifact by induction.

  Args:
    model: the artifact's.
    store: where it is.
    ref: the artifact; blocks of its parents are audited with them.
    blocks: 'all', how many, spread evenly, or their numbers.
    streaming: of the contexts that recompute them.
    progress: called with (blocks done, in all).

  Raises:
    KvgraftError: as `graft` does.
  """
  manifest = grafting.manifest_of(store, ref)
  grafting.check(model, manifest)
  model.check_streaming(streaming)
  chosen = choose_blocks(manifest, blocks)
  stored = artifact_lib.available(manifest)
  own = store.tokens(manifest)
  checked = equal = skipped = computed = 0
  differing, last_equal = [], None
  for number, block in enumerate(chosen):
    try:
      context = (
          grafting.graft(
              model, store, manifest, block.start, streaming=streaming)
          if block.start else engine.Context(model, streaming=streaming))
    except errors.UsageError as e:
      if isinstance(e, (errors.CapacityError, errors.IncompatibleError)):
        raise
      # Its window is not stored: only from position 0 could it be computed.
      skipped += sum(block.stop > first for first, _ in stored.values())
      continue
    at = manifest.fields.start
    before = context.tokens_computed
    context.extend(own[block.start - at:block.stop - at].tolist())
    computed += context.tokens_computed - before
    for kind, layout in manifest.layouts.items():
      geometry = manifest.geometries[kind]
      for i, part in enumerate(geometry.blocks):
        if part.number != block.number:
          continue
        k, v = context.rows(kind, part.start, part.stop)
        # Raises if what is stored is not what was deposited: no later block
        # may have read it.
        store.read(manifest, kind, part.start, part.stop,
                   np.empty_like(k), np.empty_like(v))
        digests = blocks_lib.digests_of(
            kind, layout, part.start, part.stop, np.stack([k, v], axis=1))
        checked += 1
        wrong = [j for j, (a, b) in enumerate(
            zip(digests, manifest.digests[kind][i])) if a != b]
        if wrong:
          differing.append(
              f'{kind} block {part.number}, positions {part.start} to'
              f' {part.stop - 1}: layer {layout.layers[wrong[0] // 2]} and'
              f' {len(wrong) - 1} more parts differ')
        else:
          equal += 1
    if block.stop == manifest.fields.end:
      last_equal = context.logits_sha256() == manifest.last_logits_sha256
    if progress:
      progress(number + 1, len(chosen))
  return AuditReport(checked, equal, skipped, differing, last_equal, computed)
