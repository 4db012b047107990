"""Graft an artifact into a new context.

    positions   0 ............ parent.end ............ child.end
    chain       [ parent [0, e) )[ child [e, n) )
    global      slot = position, all of [0, n)
    sliding     ring, the blocks that hold [n - window, n)
    graft(m)    the same from [0, m) alone, for any m that the chain can serve

A graft never touches a live cache: it reads and checks everything, then hands
over a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import functools
import time

import jax

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import cold as cold_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import numerics
from kvgraft_jax import recorder as recorder_lib
from kvgraft_jax import ring as ring_lib
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming as streaming_lib

ON_MISMATCH = ('fail', 'recompute', 'inexact')


@dataclasses.dataclass(frozen=True)
class Artifact:
  """A deposit.

  Attributes:
    manifest: what the store holds.
    name: name it was given, or None.
    tokens_computed: positions that this deposit ran.
    existed: whether the key was in the store already.
    tokens_resumed: positions that an earlier process had run for it.
    usage: of memory and store; None where nothing was computed.
  """

  manifest: artifact_lib.Manifest
  name: str | None = None
  tokens_computed: int = 0
  existed: bool = False
  tokens_resumed: int = 0
  usage: streaming_lib.Usage | None = None

  def __repr__(self) -> str:
    fields = self.manifest.fields
    return (f'Artifact({self.id[:12]}, {self.name!r}, positions'
            f' [{fields.start}, {fields.end}))')

  @property
  def id(self) -> str:
    """Hex SHA-256 of the content."""
    return self.manifest.id

  @property
  def key(self) -> str:
    """Hex SHA-256 that was known before computing."""
    return self.manifest.key

  @property
  def length(self) -> int:
    """Tokens of a context grafted from the whole chain."""
    return self.manifest.fields.end


Ref = str | Artifact | artifact_lib.Manifest


@dataclasses.dataclass(frozen=True)
class Segment:
  """Positions [start, stop) that one artifact of a chain serves."""

  manifest: artifact_lib.Manifest
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Source:
  """What serves positions [start, stop) of a cache that is restored.

  Attributes:
    start: first position.
    stop: one past the last position.
    block: positions of a stored block.
    read: called with (kind, start, stop, K out, V out, layers=slice or None),
      as `Store.read`; returns the bytes read.
  """

  start: int
  stop: int
  block: int
  read: Callable[..., int]

  def backing(self) -> cold_lib.Backing:
    """Returns what a streamed context reads its global layers from."""
    def read(layers, start, stop, k, v):
      return self.read(config_lib.GLOBAL, start, stop, k, v, layers=layers)
    return cold_lib.Backing(self.start, self.stop, self.block, read)


def sources(
    store: store_lib.Store, segments: Iterable[Segment], verify: bool = True
) -> list[Source]:
  """Returns the sources of a chain."""
  return [
      Source(s.start, s.stop, s.manifest.fields.block, functools.partial(
          store.read, s.manifest, verify=verify)) for s in segments]


def layouts(
    config: config_lib.ModelConfig, dtype: str
) -> dict[str, artifact_lib.KindLayout]:
  """Returns the artifact layout of a model's cache."""
  return {
      kind: artifact_lib.KindLayout(
          layers=config.kind_layers(kind), kv_heads=config.spec(kind).kv_heads,
          head_dim=config.spec(kind).head_dim, dtype=dtype,
          window=config.spec(kind).window)
      for kind in config_lib.KINDS}


def default_block(profile: numerics.Profile) -> int:
  """Returns positions a stored block holds unless asked otherwise."""
  return max(profile.page, min(512, profile.chunk))


def check_block(model: engine.Model, block: int | None) -> int:
  """Returns positions of a stored block; None for the default.

  Raises:
    UsageError: if it is no multiple of the page.
  """
  page = model.profile.page
  block = default_block(model.profile) if block is None else block
  if block < 1 or block % page:
    raise errors.UsageError(
        f'block: expected a multiple of the page ({page}), found {block}')
  return block


def manifest_of(store: store_lib.Store, ref: Ref) -> artifact_lib.Manifest:
  """Returns the manifest that a reference names."""
  if isinstance(ref, Artifact):
    return ref.manifest
  if isinstance(ref, artifact_lib.Manifest):
    return ref
  return store.find(ref)


def chain(
    store: store_lib.Store, ref: Ref, length: int | None = None
) -> list[Segment]:
  """Returns who serves which positions of [0, length), ascending.

  Raises:
    UsageError: if `length` is not one of 1 to the artifact's end.
    DamageError: if a parent is lost or the chain has a gap.
  """
  manifest = manifest_of(store, ref)
  end = manifest.fields.end
  length = end if length is None else length
  if not 1 <= length <= end:
    raise errors.UsageError(
        f'length: expected 1 to {end}, the tokens of artifact'
        f' {manifest.id[:12]}, found {length}')
  segments, stop = [], length
  while True:
    start = manifest.fields.start
    if start < stop:
      segments.append(Segment(manifest, start, stop))
      stop = start
    if not start:
      return segments[::-1]
    child, parent_key = manifest, manifest.fields.parent
    found = store.get(parent_key)
    if found is None:
      raise errors.DamageError(
          f'artifact {child.id[:12]}: its parent with key {parent_key[:12]} is'
          ' not in the store; copy it there, or deposit the chain again')
    manifest = found
    if manifest.fields.end < start:
      raise errors.DamageError(
          f'artifact {child.id[:12]} starts at {start}, expected at most'
          f' {manifest.fields.end}, where its parent ends')


def check_model(
    model: engine.Model, manifest: artifact_lib.Manifest
) -> None:
  """Raises IncompatibleError if the artifact is not of this very model."""
  fields = manifest.fields
  for factor, theirs, ours in (
      ('model', fields.model, model.fingerprint),
      ('tokenizer', fields.tokenizer, model.tokenizer_fingerprint),
      ('template', fields.template, model.template_fingerprint)):
    if theirs != ours:
      raise errors.IncompatibleError(
          f'artifact {manifest.id[:12]}: {factor} differs, expected'
          f' {theirs[:16]}, found {ours[:16]} in {model.source}; load the model'
          f' it was deposited with{_origin(manifest)}'
          + ('' if factor == 'model' else
             f' (same weights, but another form of the {factor} counts as'
             ' another one)' if fields.model == model.fingerprint else '')
          + ', or deposit the text again', factor)


def _origin(manifest: artifact_lib.Manifest) -> str:
  source = manifest.provenance.get('model')
  return f' ({source!s:.80})' if source else ''


def _recorded_class(
    manifest: artifact_lib.Manifest
) -> dict[str, str] | None:
  """Returns the artifact's class, None unless it is the one of its key.

  It stands in the outer section, which no id covers.
  """
  found = manifest.profile.get('class')
  if isinstance(found, dict) and (
      numerics.class_fingerprint(found) == manifest.fields.numerics_class):
    return found
  return None


def check_early(
    model: engine.Model, manifest: artifact_lib.Manifest
) -> None:
  """Raises what can be known to differ before any self-test has run."""
  check_model(model, manifest)
  theirs = _recorded_class(manifest)
  differs = theirs and numerics.first_difference(
      numerics.certain(theirs), numerics.certain(model.profile.factors()))
  if differs:
    raise _mismatch(manifest, *differs)


def _mismatch(
    manifest: artifact_lib.Manifest, factor: str, theirs: str, ours: str
) -> errors.ClassMismatchError:
  return errors.ClassMismatchError(
      f'artifact {manifest.id[:12]}: numerics differ in {factor}, expected'
      f' {theirs or "none"}, found {ours or "none"}; bits may differ: deposit'
      ' again here, or graft with --on_mismatch=recompute or =inexact',
      factor)


def check_class(
    model: engine.Model, manifest: artifact_lib.Manifest
) -> None:
  """Raises ClassMismatchError, naming the first differing factor."""
  ours = model.numerics_class
  theirs_hash = manifest.fields.numerics_class
  report = model.self_test()
  if numerics.class_fingerprint(ours) != theirs_hash:
    theirs = _recorded_class(manifest)
    differs = theirs and numerics.first_difference(theirs, ours)
    raise _mismatch(manifest, *(differs or (
        'numerics class', theirs_hash[:16],
        numerics.class_fingerprint(ours)[:16])))
  if not report.exact:
    failed = ', '.join(
        n for n in numerics.REQUIRED if not report.invariances.get(n))
    raise errors.ClassMismatchError(
        f'the self-test refuted {failed} on this machine, so no bits can be'
        ' promised; see `kvgraft numerics`, or pass --on_mismatch=inexact',
        failed)


def _check_layout(
    model: engine.Model, manifest: artifact_lib.Manifest
) -> None:
  ours = layouts(model.config, model.profile.dtype)
  if manifest.layouts != ours:
    kinds = [k for k in ours if manifest.layouts.get(k) != ours[k]]
    raise errors.IncompatibleError(
        f'artifact {manifest.id[:12]}: layout of the {kinds[0]} layers differs,'
        f' expected {ours[kinds[0]].to_json()}, found'
        f' {manifest.layouts[kinds[0]].to_json()}; use the same --dtype and'
        ' model', 'layout')


def check(model: engine.Model, manifest: artifact_lib.Manifest) -> None:
  """Raises IncompatibleError unless bits of both may be compared."""
  check_model(model, manifest)
  check_class(model, manifest)
  _check_layout(model, manifest)


def chain_tokens(
    store: store_lib.Store, segments: Iterable[Segment]
) -> list[int]:
  """Returns the token ids of a chain, checked against their digests."""
  tokens: list[int] = []
  for s in segments:
    first = s.manifest.fields.start
    ids = store.tokens(s.manifest)
    tokens += ids[s.start - first:s.stop - first].tolist()
  return tokens


def _sliding_start(
    segments: list[Segment], length: int, window: int, ring: int
) -> int:
  """Returns the first sliding position to restore: a whole block if it can."""
  visible = max(0, length - window)

  def stored_from(position: int) -> bool:
    return all(
        artifact_lib.available(s.manifest)[config_lib.SLIDING][0]
        <= max(position, s.start) for s in segments if s.stop > position)

  for s in segments:
    if s.start <= visible < s.stop:
      block = s.manifest.fields.block
      aligned = max(visible // block * block, s.start)
      if length - aligned <= ring and stored_from(aligned):
        return aligned
  if stored_from(visible):
    return visible
  leaf = segments[-1].manifest
  least = max(
      artifact_lib.available(s.manifest)[config_lib.SLIDING][0]
      for s in segments)
  raise errors.UsageError(
      f'length {length}: artifact {leaf.id[:12]} keeps sliding layers from'
      f' position {least} on (sliding={leaf.fields.sliding}); available are'
      f' lengths from {least + window} to {leaf.fields.end}')


def restore(
    model: engine.Model, tokens: list[int], found: list[Source], first: int,
    *, record: bool = True, streaming: streaming_lib.Streaming | None = None,
) -> engine.Context:
  """Returns a context whose cache was computed elsewhere.

  Args:
    model: whose cache it is.
    tokens: ids of [0, n).
    found: sources of [0, n), ascending, without a gap.
    first: first position of the sliding layers to read.
    record: keep sliding rows that leave the ring, for a later deposit.
    streaming: of the new context.

  Raises:
    KvgraftError: as `Store.read` does.
  """
  length = len(tokens)
  context = engine.Context(model, record=record, streaming=streaming)
  config, profile = model.config, model.profile
  ring = cache_lib.ring_size(config.sliding.window or length, profile)
  streamed = context.streamed
  # The last computed position has to be on the device.
  base = (length - 1) // profile.page * profile.page if streamed else 0
  slots = streamed.layout.hot if streamed else model.slots_for(length)
  shapes = cache_lib.shapes(config, profile, 1, slots)
  bits = cache_lib.BITS[profile.dtype]
  buffers = {kind: (ring_lib.aligned_zeros(shape, bits),
                    ring_lib.aligned_zeros(shape, bits))
             for kind, shape in shapes.items()}

  nbytes = blocks = 0
  began = time.perf_counter()

  def read(source, kind, start, stop, slot):
    nonlocal nbytes, blocks
    k, v = (side[:, 0, slot:slot + stop - start] for side in buffers[kind])
    nbytes += source.read(kind, start, stop, k, v)
    blocks += len(k) * len(artifact_lib.blocks_of(start, stop, source.block))

  for source in found:
    at = max(base, source.start)
    if at < source.stop:
      read(source, config_lib.GLOBAL, at, source.stop, at - base)
    at = max(first, source.start)
    while at < source.stop:  # The ring's end cuts at most once.
      slot = at % ring
      stop = min(source.stop, at + ring - slot)
      read(source, config_lib.SLIDING, at, stop, profile.chunk + slot)
      at = stop
  reads = streaming_lib.Reads(nbytes, blocks, time.perf_counter() - began)
  device = {kind: tuple(map(jax.device_put, pair))
            for kind, pair in buffers.items()}
  cache: cache_lib.KVCache | None = cache_lib.KVCache(
      {kind: pair[0] for kind, pair in device.items()},
      {kind: pair[1] for kind, pair in device.items()},
      model.programs.fresh_scalars())
  recorder = recorder_lib.Recorder(config, profile, first)
  if streamed:
    assert cache is not None
    streamed.restore(cache, base, [s.backing() for s in found])
    cache = None
  context.restore(tokens, cache, recorder if record else None, reads)
  return context


def graft(
    model: engine.Model, store: store_lib.Store, ref: Ref,
    length: int | None = None, on_mismatch: str = 'fail', *,
    record: bool = True, verify: bool = True,
    streaming: streaming_lib.Streaming | None = None,
    progress: engine.Progress | None = None,
) -> engine.Context:
  """Builds a new context from an artifact and the artifacts in front of it.

  What follows has the bits that it would have after computing the same tokens
  here. After any error no cache has changed.

  Args:
    model: must have the artifact's weights, tokenizer and template.
    store: where the artifact is.
    ref: id, unique prefix of it (4 digits or more), key, name, or an Artifact.
    length: positions to take, [0, length); None for all.
    on_mismatch: where the numerics class differs: 'fail', 'recompute' the
      tokens here, or go on 'inexact' (`Context.exact` is then False).
    record: keep sliding rows that leave the ring, for a later deposit.
    verify: check every block's digest; only benchmarks turn it off.
    streaming: leave the global layers in the store and read them at every step
      (see `streaming`); None for all of the cache on the device.
    progress: of a recomputation.

  Raises:
    NotFoundError: if nothing answers to `ref`.
    UsageError: if `length` is not available.
    IncompatibleError: if weights, tokenizer, template or layout differ.
    ClassMismatchError: if the numerics class differs and `on_mismatch` is
      'fail'.
    CapacityError: if the context would not fit the model's capacity.
    DamageError: if a manifest, a block or tokens are lost or changed.
  """
  if on_mismatch not in ON_MISMATCH:
    raise errors.UsageError(
        f'on_mismatch: expected one of {", ".join(ON_MISMATCH)}, found'
        f' {on_mismatch!r}')
  segments = chain(store, ref, length)
  length = segments[-1].stop
  leaf = segments[-1].manifest
  exact = True
  try:
    model.check_streaming(streaming)
  except errors.ClassMismatchError:
    if on_mismatch != 'inexact':
      raise
    exact = False
  for s in segments:
    check_model(model, s.manifest)
    try:
      check_class(model, s.manifest)
    except errors.ClassMismatchError:
      if on_mismatch == 'recompute':
        return recompute(model, store, leaf, length, record=record,
                         streaming=streaming, progress=progress)
      if on_mismatch == 'fail':
        raise
      exact = False
    _check_layout(model, s.manifest)
  tokens = model.check_tokens(chain_tokens(store, segments))
  window = model.config.sliding.window or length
  first = _sliding_start(
      segments, length, window, cache_lib.ring_size(window, model.profile))
  context = restore(
      model, tokens, sources(store, segments, verify), first, record=record,
      streaming=streaming)
  context.exact = exact
  context.parent, context.parent_length = leaf, length
  return context


def recompute(
    model: engine.Model, store: store_lib.Store, ref: Ref,
    length: int | None = None, *, record: bool = True,
    streaming: streaming_lib.Streaming | None = None,
    progress: engine.Progress | None = None,
) -> engine.Context:
  """Computes an artifact's tokens here, from nothing: what a graft equals.

  Args:
    model: must have the artifact's weights, tokenizer and template.
    store: where the artifact is; only its token ids are read.
    ref: as in `graft`.
    length: positions to take, [0, length); None for all.
    record: as in `graft`.
    streaming: as in `Model.prefill`.
    progress: called with (positions done, positions in all).

  Raises:
    KvgraftError: as `graft` does.
  """
  segments = chain(store, ref, length)
  for s in segments:
    check_model(model, s.manifest)
  return model.prefill(
      chain_tokens(store, segments), record=record, progress=progress,
      streaming=streaming)
