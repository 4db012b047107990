"""Deposit tokens or a context as an artifact: at once, or block by block."""

from __future__ import annotations

import collections
from collections.abc import Iterable
import dataclasses
import time
from typing import Any

import numpy as np

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import hashing
from kvgraft_jax import numerics
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming as streaming_lib

# A kill costs at most so many blocks, or so many seconds; a checkpoint costs
# some small files.
_CHECKPOINT_BLOCKS = 4
_CHECKPOINT_S = 10.0


def deposit(
    model: engine.Model, store: store_lib.Store,
    tokens_or_context: Iterable[int] | engine.Context,
    parent: grafting.Ref | None = None, sliding: str = 'full',
    name: str | None = None, *, parent_length: int | None = None,
    block: int | None = None,
    provenance: dict[str, Any] | None = None,
    streaming: streaming_lib.Streaming | None = None,
    progress: engine.Progress | None = None,
) -> grafting.Artifact:
  """Stores the KV state of tokens, or of a context, as an artifact.

  Args:
    model: computes what is not there yet.
    store: where to.
    tokens_or_context: token ids, to be computed behind `parent`; or a context,
      whose parent is the artifact it was grafted from.
    parent: artifact in front of the tokens; only with token ids.
    sliding: 'full' keeps every sliding block and allows any prefix later;
      'window' keeps what a continuation at the end can see.
    name: a name to give the artifact, which no other may have.
    parent_length: positions of the parent that stand in front; None for all.
    block: positions of a stored block, a multiple of the page; None for 512.
    provenance: free strings and integers, kept beside the content.
    streaming: write block by block while computing token ids, in this much
      memory; what was written when it is interrupted is taken up by the next
      call with the same arguments. The artifact is the same. Only with ids.
    progress: called with (positions done, positions in all).

  Returns:
    The artifact: what the store already had if the key was deposited before.

  Raises:
    UsageError: if there are no tokens, a value is not accepted, or the name
      is taken.
    IncompatibleError: if the parent is of another model or numerics class.
    StorageError: if the store cannot be written; nothing is listed then.
    ConflictError: if the key is in the store with other content.
  """
  block = grafting.check_block(model, block)
  if sliding not in (artifact_lib.FULL, artifact_lib.WINDOW):
    raise errors.UsageError(
        f"sliding: expected 'full' or 'window', found {sliding!r}")
  if name is not None:
    store_lib.check_name(name)
  if streaming is not None:
    if isinstance(tokens_or_context, engine.Context):
      raise errors.UsageError(
          'streaming: expected token ids to compute, found a context; leave it'
          ' out to deposit a context')
    model.check_streaming(streaming)
  context, own, start, parent_key = _what(
      model, store, tokens_or_context, parent, parent_length)
  fields = artifact_lib.KeyFields(
      model=model.fingerprint, tokenizer=model.tokenizer_fingerprint,
      template=model.template_fingerprint,
      numerics_class=numerics.class_fingerprint(model.numerics_class),
      parent=parent_key, start=start, end=start + len(own),
      tokens_sha256=hashing.tokens_sha256(own), block=block, sliding=sliding)
  existing = store.get(fields.key)
  taken = None if name is None else store.name_target(name)
  # The name of an artifact that was removed and is deposited again is its own.
  if existing is None and taken is not None and taken[1] != fields.key:
    raise errors.UsageError(
        f'name {name!r} is taken by artifact {taken[0][:12]}; choose another'
        ' name')
  if existing is not None:
    if name is not None:
      store.set_name(name, existing)
    return grafting.Artifact(existing, name, 0, True)
  if streaming is not None:
    made = _Stream(model, store, fields, own, streaming).run(
        parent, parent_length, provenance, progress)
    if name is not None:
      store.set_name(name, made.manifest)
    return dataclasses.replace(made, name=name)
  if context is None:
    context = _behind(model, store, parent, parent_length)
    if sliding == artifact_lib.WINDOW:
      # What `artifact.sliding_start` may reach back to.
      context.keep_last((model.config.sliding.window or 0) + 1 + block)
    context.extend(own, progress=progress)
  before = context.tokens_computed
  context.compute(progress=progress)
  last_logits = context.logits_sha256()
  computed = context.tokens_computed - (
      before if isinstance(tokens_or_context, engine.Context) else 0)
  manifest = _write(model, store, fields, context, own, last_logits, provenance)
  if name is not None:
    store.set_name(name, manifest)
  return grafting.Artifact(
      manifest, name, computed, False, usage=context.usage())


def _what(model, store, what, parent, parent_length):
  """Returns (context or None, own tokens, start, parent key) of a deposit."""
  if isinstance(what, engine.Context):
    if parent is not None:
      raise errors.UsageError(
          'parent: a context has the parent it was grafted from; pass token ids'
          ' to choose another')
    if not what.exact:
      raise errors.UsageError(
          'the context was grafted inexactly (another numerics class) and'
          ' cannot be deposited; graft with on_mismatch=\'recompute\'')
    start = what.parent_length
    parent_key = what.parent.key if what.parent is not None else ''
    own = what.tokens[start:]
    context = what
  else:
    context, start, parent_key = None, 0, ''
    if parent is not None:
      segments = grafting.chain(store, parent, parent_length)
      start, leaf = segments[-1].stop, segments[-1].manifest
      parent_key = leaf.key
      grafting.check_model(model, leaf)
      grafting.check_class(model, leaf)
    own = model.check_tokens(what, start)
  if not own:
    raise errors.UsageError(
        'deposit: expected at least one token'
        + (' behind the parent' if start else '') + ', found none')
  return context, own, start, parent_key


def _behind(model, store, parent, parent_length, streaming=None):
  """Returns a context behind the parent, an empty one if there is none."""
  if parent is None:
    return engine.Context(model, streaming=streaming)
  return grafting.graft(
      model, store, parent, parent_length, streaming=streaming)


def _write(model, store, fields, context, own, last_logits, provenance):
  """Writes every block of [start, end) and publishes the manifest."""
  made = grafting.layouts(model.config, model.profile.dtype)
  with store.create(fields, made, np.asarray(own, np.int32)) as writer:
    for kind, layout in made.items():
      first, stop = artifact_lib.stored_range(fields, layout)
      for block in artifact_lib.blocks_of(first, stop, fields.block):
        _write_block(writer, context, kind, block)
    return writer.commit(
        last_logits_sha256=last_logits, outer=_outer(model, provenance))


def _write_block(writer, context, kind, block):
  k, v = context.rows(kind, block.start, block.stop)
  writer.write_block(kind, block.number, np.stack([k, v], axis=1))


def _outer(model, provenance):
  """Returns what a manifest says beside its content."""
  return {
      'provenance': provenance or {},
      'self_test': model.self_test().to_json(),
      'profile': {
          'class': model.numerics_class,
          'factors': model.profile.factors(),
          'programs': dict(model.programs.hlo_sha256),
      },
  }


class _Stream:
  """A deposit that writes its blocks while it computes.

  Where sliding layers keep their last blocks alone, the window in front of a
  checkpoint is saved with it: without it nothing could go on from there.
  """

  def __init__(self, model, store, fields, own, streaming):
    self._model = model
    self._store = store
    self._fields = fields
    self._own = np.asarray(own, np.int32)
    self._streaming = streaming
    self._layouts = grafting.layouts(model.config, model.profile.dtype)
    self._window = model.config.sliding.window or 0
    self._whole = fields.sliding == artifact_lib.FULL

  def run(self, parent, parent_length, provenance, progress):
    """Computes, writes and publishes; returns the Artifact."""
    model, fields = self._model, self._fields
    args = fields, self._layouts, self._own
    self._check_host()
    writer = self._store.resume(*args) or self._store.create(
        *args, journal=True)
    with writer:
      state = None if self._whole else writer.state
      at = self._resume_at(writer, state)
      if at > fields.start:
        context = self._restored(writer, state, at, parent, parent_length)
      else:
        context = _behind(
            model, self._store, parent, parent_length, self._streaming)
      if progress:
        progress(at, fields.end)
      context.keep_last(self._window + 1 + fields.block + model.profile.chunk)
      left = self._blocks_left(writer, at)
      size = model.profile.chunk
      kept, kept_s = at, time.monotonic()
      while at < fields.end:
        stop = min(at + size, fields.end)
        context.extend(self._own[at - fields.start:stop - fields.start])
        at = stop
        self._write_finished(writer, context, left, at)
        if (at - kept >= _CHECKPOINT_BLOCKS * fields.block
            or time.monotonic() - kept_s >= _CHECKPOINT_S):
          self._checkpoint(writer, context, left)
          kept, kept_s = at, time.monotonic()
        if progress:
          progress(at, fields.end)
      last = context.logits_sha256()
      manifest = writer.commit(
          last_logits_sha256=last, outer=_outer(model, provenance))
    return grafting.Artifact(
        manifest, None, context.tokens_computed,
        tokens_resumed=context.tokens_restored and (
            fields.end - fields.start - context.tokens_computed),
        usage=context.usage())

  def _check_host(self):
    """Raises UsageError if host memory may not take what has to pass it."""
    config, profile = self._model.config, self._model.profile
    layout = streaming_lib.layout(
        config, profile, self._streaming.device_kv_bytes, self._model.capacity)
    # What leaves the device waits here until its block is whole.
    needed = (layout.hot + self._fields.block) * cache_lib.token_bytes(
        config, profile.dtype)[config_lib.GLOBAL]
    if self._streaming.host_limit() < needed:
      raise errors.UsageError(
          f'host_kv_bytes: expected at least {needed} for a deposit that'
          f' streams, found {self._streaming.host_limit()}; raise it, or lower'
          ' --device_kv_bytes')

  def _blocks(self, kind):
    return artifact_lib.blocks_of(
        *artifact_lib.stored_range(self._fields, self._layouts[kind]),
        self._fields.block)

  def _blocks_left(self, writer, at):
    """Returns kind -> blocks that have to be written from position `at` on."""
    return {kind: collections.deque(
        b for i, b in enumerate(self._blocks(kind))
        if b.stop > at or i >= writer.done(kind)) for kind in self._layouts}

  def _resume_at(self, writer, state):
    """Returns the position up to which there is all that is needed."""
    start = self._fields.start
    ends = {kind: self._blocks(kind)[done - 1].stop if done else start
            for kind in self._layouts for done in [writer.done(kind)]}
    if self._whole:
      return min(ends.values())
    at = int.from_bytes(state[:8], 'little') if state else 0
    return at if start < at <= ends[config_lib.GLOBAL] else start

  def _checkpoint(self, writer, context, left):
    at = left[config_lib.GLOBAL][0].start if left[config_lib.GLOBAL] else 0
    if self._whole or not at:
      writer.checkpoint()
      return
    k, v = context.sliding_rows(max(0, at - self._window), at)
    writer.checkpoint(state=b''.join((
        at.to_bytes(8, 'little'), np.ascontiguousarray(k).tobytes(),
        np.ascontiguousarray(v).tobytes())))

  def _write_finished(self, writer, context, left, done):
    """Writes the blocks that are complete; lets them leave host memory."""
    for kind, blocks in left.items():
      while blocks and blocks[0].stop <= done:
        block = blocks.popleft()
        _write_block(writer, context, kind, block)
        if kind == config_lib.GLOBAL:
          context.streamed.cold.back(self._source(writer, block.stop).backing())

  def _source(self, writer, stop):
    return grafting.Source(
        self._fields.start, stop, self._fields.block, writer.read)

  def _restored(self, writer, state, at, parent, parent_length):
    """Returns the context of [0, at), from the parent and the writer."""
    fields, found, tokens = self._fields, [], []
    leaf = None
    if parent is not None:
      segments = grafting.chain(self._store, parent, parent_length)
      leaf = segments[-1].manifest
      found = grafting.sources(self._store, segments)
      tokens = grafting.chain_tokens(self._store, segments)
    found = found + [self._source(writer, at)]
    first = max(0, at - self._window)
    if state is not None:  # It may reach over the border to the parent.
      found = [dataclasses.replace(
          s, read=self._with_state(s.read, state[8:], first, at))
               for s in found]
    tokens = tokens + self._own[:at - fields.start].tolist()
    context = grafting.restore(
        self._model, tokens, found, first, streaming=self._streaming)
    context.parent, context.parent_length = leaf, fields.start
    return context

  def _with_state(self, read_stored, state, first, at):
    """Returns a `read` that takes sliding rows from the saved state."""
    layout = self._layouts[config_lib.SLIDING]
    k, v = np.frombuffer(state, layout.element).reshape(
        2, len(layout.layers), at - first, layout.kv_heads, layout.head_dim)

    def read(kind, start, stop, k_out, v_out, layers=None):
      if kind == config_lib.GLOBAL:
        return read_stored(kind, start, stop, k_out, v_out, layers=layers)
      k_out[...] = k[:, start - first:stop - first]
      v_out[...] = v[:, start - first:stop - first]
      return k_out.nbytes + v_out.nbytes

    return read
