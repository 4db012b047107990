"""Writers of artifacts: blocks in any order, the manifest last."""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import datetime
from typing import Any
import uuid

import numpy as np

from kvgraft_jax import artifact
from kvgraft_jax import attempts
from kvgraft_jax import blocks
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import journal as journal_lib
from kvgraft_jax import kvstore

_WRITES_IN_FLIGHT = 4
_OUTER = {'created', 'provenance', 'self_test', 'profile'}


def new_journal(
    kv: kvstore.KvStore, fields: artifact.KeyFields,
    layouts: Mapping[str, artifact.KindLayout], attempt: str | None = None,
) -> journal_lib.Journal:
  """Returns an empty journal of a new attempt, or of the one given."""
  artifact.check_layouts(layouts)
  shapes = {k: artifact.geometry(fields, v) for k, v in layouts.items()}
  return journal_lib.Journal(
      kv, fields.key, layouts, shapes, attempt or uuid.uuid4().hex)


def find_journal(
    kv: kvstore.KvStore, fields: artifact.KeyFields,
    layouts: Mapping[str, artifact.KindLayout],
) -> journal_lib.Journal | None:
  """Returns the journal with the most finished blocks, None if there is none.

  Entries and data files that cannot be used are removed from its attempt.
  """
  best, most, in_the_way = None, -1, set[str]()
  for attempt in journal_lib.attempts_of(kv, fields.key):
    found = new_journal(kv, fields, layouts, attempt)
    entries = found.entries()
    whole, broken = _data_files(kv, fields, layouts, attempt)
    found.load(entries, whole)
    count = sum(map(len, found.blocks.values()))
    if count > most:
      best, most, in_the_way = found, count, broken
  if best is not None:
    best.forget_unusable()
    for name in sorted(in_the_way):
      kv.delete(name)
  return best


def _data_files(
    kv: kvstore.KvStore, fields: artifact.KeyFields,
    layouts: Mapping[str, artifact.KindLayout], attempt: str,
) -> tuple[set[str], set[str]]:
  """Returns the names of an attempt's data files: whole ones, cut ones.

  Only local files can be cut short: the others appear as a whole.
  """
  prefix = attempts.prefix(fields.key, attempt)
  sizes = {prefix + name: size
           for name, size in artifact.data_files(fields, layouts).items()}
  there = sizes.keys() & set(kv.list(prefix))
  broken = {n for n in there if kv.local and kv.size(n) != sizes[n]}
  return there - broken, broken


class Writer:
  """Writes one artifact; a context manager.

  Leaving the context without a commit removes what was written, unless there
  is a journal by which it can be continued.
  """

  def __init__(
      self, kv: kvstore.KvStore, fields: artifact.KeyFields,
      layouts: dict[str, artifact.KindLayout], tokens: np.ndarray,
      journal: journal_lib.Journal | None = None,
  ):
    artifact.check_layouts(layouts)
    ids = np.asarray(tokens)
    if ids.dtype.kind not in 'iu' or ids.shape != (
        fields.end - fields.start,) or (
            hashing.tokens_sha256(ids) != fields.tokens_sha256):
      raise errors.UsageError(
          f'tokens {list(ids.shape)} are not the {fields.end - fields.start}'
          ' that the key names')
    self._kv = kv
    self._fields = fields
    self._layouts = dict(layouts)
    self._journal = journal
    self._attempt = journal.attempt if journal else uuid.uuid4().hex
    self._prefix = attempts.prefix(fields.key, self._attempt)
    self._shapes = {k: artifact.geometry(fields, v) for k, v in layouts.items()}
    self._digests: dict[str, dict[int, tuple[str, ...]]] = {
        k: dict(journal.blocks[k]) if journal else {} for k in layouts
    }
    # Blocks of an earlier process: this one may compute them again, once.
    self._earlier = {(k, i) for k, v in self._digests.items() for i in v}
    self._pending: dict[tuple[str, Any], tuple[Any, str]] = {}
    self._done = False
    self._arrays = {
        kind: kv.open_array(f'{self._prefix}{kind}/', fields, layout)
        for kind, layout in layouts.items()
    }
    self._put('tokens', np.ascontiguousarray(ids, '<i4').tobytes())
    for kind, layout in layouts.items():
      # For other zarr readers only.
      self._put(f'{kind}/zarr.json', hashing.canonical_json(
          artifact.zarr_metadata(fields, layout)))

  @property
  def attempt(self) -> str:
    """The name of the directory that is written to."""
    return self._attempt

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *unused_exc_info) -> None:
    if self._done:
      return
    if self._journal is None or self._journal.is_empty:
      self.discard()
    else:
      self._done = True
      self._let_writes_end()

  def write_block(self, kind: str, block_index: int, array: np.ndarray) -> None:
    """Writes all layers of one block; each exactly once, in any order.

    The array may be changed or freed as soon as this returns. A block that an
    earlier process finished may be written again, if it is the same.

    Args:
      kind: 'sliding' or 'global'.
      block_index: absolute number of the block, position // Q.
      array: [layers, 2, valid positions, kv_heads, head_dim] bit patterns.

    Raises:
      UsageError: if block or array are not those expected.
      StorageError: if an earlier block could not be written; it may be written
        again.
      ConflictError: if an earlier process computed other bytes.
    """
    layout, shape = self._kind(kind), self._shapes[kind]
    number = block_index - shape.blocks[0].number
    if not 0 <= number < len(shape.blocks):
      raise errors.UsageError(
          f'{kind} block is {block_index}, expected {shape.blocks[0].number} to'
          f' {shape.blocks[-1].number}')
    if number in self._digests[kind] and (kind, number) not in self._earlier:
      raise errors.UsageError(f'{kind} block {block_index} is already written')
    _, start, stop = shape.blocks[number]
    expected = (len(layout.layers), 2, stop - start, layout.kv_heads,
                layout.head_dim)
    if array.shape != expected or array.dtype != layout.element:
      raise errors.UsageError(
          f'{kind} block {block_index} is {array.dtype}{list(array.shape)},'
          f' expected {layout.element}{list(expected)}')
    array = np.ascontiguousarray(array)
    digests: tuple[str, ...] = ()
    if (kind, number) in self._earlier:
      digests = blocks.digests_of(kind, layout, start, stop, array)
      self._compare(kind, number, digests)
    rows = slice(start - shape.origin, stop - shape.origin)
    copied, written = kvstore.start_write(self._arrays[kind], rows, array)
    name = attempts.data_file(self._fields.key, self._attempt, kind, number)
    doing = f'writing {self._kv.where(name)}'
    self._pending[kind, number] = written, doing
    # Computed while the bytes are on their way.
    self._digests[kind][number] = digests or blocks.digests_of(
        kind, layout, start, stop, array)
    self._earlier.discard((kind, number))
    self._wait((kind, number), copied)
    self._finish(_WRITES_IN_FLIGHT)

  def read(
      self, kind: str, start: int, stop: int, k_out: np.ndarray,
      v_out: np.ndarray, *, layers: slice | None = None, verify: bool = True,
  ) -> int:
    """Reads positions [start, stop) of a kind back; see `Store.read`.

    May be called from another thread than the one that writes.

    Raises:
      UsageError: if a block of the range is not written, or an array does not
        fit.
      DamageError: if a block is lost or its bytes are not those written.
      StorageError: if a block could not be written or read.
    """
    self._kind(kind)
    shape = self._shapes[kind]
    known = {}
    if shape.start <= start < stop <= shape.end:
      for i in blocks.indices(self._fields.block, shape, start, stop):
        if i not in self._digests[kind]:
          raise errors.UsageError(
              f'{kind} block {shape.blocks[i].number} is not written yet')
        known[i] = self._digests[kind][i]
        pending = self._pending.get((kind, i))
        if pending is not None:
          kvstore.wait(*pending)
    source = blocks.Source(
        kv=self._kv, attempt=self._attempt, fields=self._fields,
        layouts=self._layouts, geometries=self._shapes, digests={kind: known},
        label=f'deposit in {self._attempt[:12]}',
        repair=f'remove {self._kv.where(self._prefix)} and deposit again')
    return blocks.read(source, kind, start, stop, k_out, v_out, layers=layers,
                       verify=verify)

  def done(self, kind: str) -> int:
    """Returns how many blocks from the first stored one are there, no gap."""
    self._kind(kind)
    return journal_lib.leading(self._digests[kind])

  @property
  def state(self) -> bytes | None:
    """The last saved state, None if there is none that is as it was saved."""
    return None if self._journal is None else self._journal.state()

  def checkpoint(self, state: bytes | None = None) -> None:
    """Makes durable what has been written so far, so that it outlives a kill.

    Args:
      state: what the caller needs to go on from here; replaces the last one.

    Raises:
      UsageError: if the writer was created without a journal.
      StorageError: if a block or the journal could not be written.
    """
    if self._journal is None:
      raise errors.UsageError(
          'the writer has no journal; create it with journal=True')
    self._finish()
    known = self._journal.blocks
    finished = [(kind, i, digests)
                for kind, own in self._digests.items()
                for i, digests in sorted(own.items()) if i not in known[kind]]
    if finished or state is not None:
      self._journal.append(finished, state)

  def commit(
      self, *, last_logits_sha256: str, outer: dict[str, Any]
  ) -> artifact.Manifest:
    """Publishes the artifact.

    Args:
      last_logits_sha256: hex SHA-256 of the logits of position end - 1.
      outer: 'provenance', 'self_test', 'profile' (objects of strings and
        integers) and 'created' (text), each optional.

    Returns:
      The manifest in the store: another writer's if that was first.

    Raises:
      UsageError: if a block is missing or `outer` has no canonical form.
      StorageError: if the data or the manifest could not be written.
      DamageError: if a data file of a journaled attempt has been lost.
      ConflictError: if the key exists with other content.
    """
    for kind, shape in self._shapes.items():
      for number, block in enumerate(shape.blocks):
        if number not in self._digests[kind]:
          raise errors.UsageError(f'{kind} block {block.number} is not written')
    unknown = set(outer) - _OUTER
    if unknown:
      raise errors.UsageError(f'outer section has unknown {sorted(unknown)}')
    now = datetime.datetime.now(datetime.UTC)
    manifest = artifact.Manifest(
        fields=self._fields,
        layouts=self._layouts,
        digests={k: tuple(v[i] for i in sorted(v))
                 for k, v in self._digests.items()},
        last_logits_sha256=last_logits_sha256,
        attempt=self._attempt,
        created=outer.get('created', now.strftime('%Y-%m-%dT%H:%M:%SZ')),
        provenance=outer.get('provenance', {}),
        self_test=outer.get('self_test', {}),
        profile=outer.get('profile', {}),
    )
    try:
      data = manifest.to_bytes()
    except TypeError as e:
      raise errors.UsageError(f'outer section: {e}') from None
    self._finish()
    if self._journal is not None:
      self._check_files()
    # TensorStore syncs each file and its directory, but no directory above.
    self._kv.sync_directories(self._prefix)
    return self._publish(manifest, data)

  def discard(self) -> None:
    """Removes the attempt as far as possible; its errors are not news."""
    self._done = True
    self._let_writes_end()
    with contextlib.suppress(errors.KvgraftError):
      attempts.delete(self._kv, self._fields.key, self._attempt)

  def _publish(
      self, manifest: artifact.Manifest, data: bytes
  ) -> artifact.Manifest:
    kv, name = self._kv, attempts.manifest_name(manifest.key)
    # From here on only the store can tell whether the attempt is in use.
    self._done = True
    try:
      kv.put_new(name, data)
      winner = attempts.load_manifest(kv, manifest.key)
    except errors.KvgraftError as e:
      # A failed remote write may still arrive; a local one has or has not.
      if self._journal is None and (
          kv.local or not isinstance(e, errors.StorageError)):
        self.discard()
      raise
    if winner is None:
      raise errors.StorageError(
          f'{kv.where(name)} vanished after it was written; deposit again')
    if winner.attempt != self._attempt:
      self.discard()
    elif self._journal is not None:
      self._journal.remove()
    if winner.id != manifest.id:
      raise errors.ConflictError(
          f'key {manifest.key[:12]} is deposited as {winner.id[:12]}, this'
          f' computation gives {manifest.id[:12]}: the first difference is'
          f' {artifact.first_difference(manifest, winner)}; run `kvgraft audit`'
          ' on both machines')
    return winner

  def _kind(self, kind: str) -> artifact.KindLayout:
    if kind not in self._layouts:
      raise errors.UsageError(f'the artifact has no {kind!r:.80} layers')
    return self._layouts[kind]

  def _compare(self, kind: str, number: int, found: tuple[str, ...]) -> None:
    """Raises ConflictError unless an earlier process computed the same."""
    layout, block = self._layouts[kind], self._shapes[kind].blocks[number]
    for i, (ours, theirs) in enumerate(zip(found, self._digests[kind][number])):
      if ours != theirs:
        raise errors.ConflictError(
            f'{kind} layer {layout.layers[i // 2]} {artifact.PARTS[i % 2]}'
            f' block {block.number} is {theirs[:12]} in the journal of'
            f' {self._kv.where(self._prefix)}, this computation gives'
            f' {ours[:12]}; remove that directory and deposit again')

  def _check_files(self) -> None:
    """Raises DamageError unless all data files are there."""
    whole, _ = _data_files(
        self._kv, self._fields, self._layouts, self._attempt)
    for name in artifact.data_files(self._fields, self._layouts):
      if self._prefix + name not in whole:
        raise errors.DamageError(
            f'{self._kv.where(self._prefix + name)} is lost or has another'
            ' size; deposit again to write what is missing')

  def _put(self, name: str, data: bytes) -> None:
    name = self._prefix + name
    self._pending['', name] = (
        self._kv.start_put(name, data), f'writing {self._kv.where(name)}')

  def _finish(self, left: int = 0) -> None:
    """Waits until at most `left` writes are pending."""
    while len(self._pending) > left:
      key = next(iter(self._pending))
      self._wait(key, self._pending[key][0])
      del self._pending[key]

  def _wait(self, key: tuple[str, Any], future: Any) -> None:
    """Waits for a pending write; a failed block may be written again."""
    kind, number = key
    try:
      kvstore.wait(future, self._pending[key][1])
    except errors.StorageError:
      del self._pending[key]
      if kind:
        del self._digests[kind][number]
      raise

  def _let_writes_end(self) -> None:
    for future, _ in self._pending.values():
      with contextlib.suppress(Exception):
        future.result()
    self._pending.clear()
