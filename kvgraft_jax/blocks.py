"""Reads of stored blocks, each checked against its digest."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
import dataclasses
import functools
import os
from typing import Any

import numpy as np

from kvgraft_jax import artifact
from kvgraft_jax import attempts
from kvgraft_jax import errors
from kvgraft_jax import kvstore

# Bytes of one read: enough of them for every core, each worth a thread.
_READ_BYTES = 1 << 21


@functools.cache
def pool() -> futures.ThreadPoolExecutor:
  """The threads that compute digests."""
  return futures.ThreadPoolExecutor(
      min(16, os.cpu_count() or 1), 'kvgraft-digest')


def digests_of(
    kind: str, layout: artifact.KindLayout, start: int, stop: int,
    array: np.ndarray,
) -> tuple[str, ...]:
  """Returns the digests of each layer's K, then V, of one block.

  Args:
    kind: of layers.
    layout: theirs.
    start: first position.
    stop: one past the last one.
    array: unsigned [L, 2, stop - start, K, H].
  """
  return tuple(pool().map(
      lambda i: artifact.block_digest(
          kind, layout.layers[i // 2], artifact.PARTS[i % 2], start, stop,
          array[i // 2, i % 2]),
      range(2 * len(layout.layers))))


@dataclasses.dataclass(frozen=True)
class Source:
  """The blocks of one attempt, as a manifest or its writer knows them.

  Attributes:
    kv: the store.
    attempt: the directory with the data files.
    fields: the key's fields.
    layouts: kind -> layout.
    geometries: kind -> where its positions are stored.
    digests: kind -> index of a block -> digests of each layer's K, then V.
    label: what it is, for messages.
    repair: what to do when it is damaged, for messages.
  """

  kv: kvstore.KvStore
  attempt: str
  fields: artifact.KeyFields
  layouts: Mapping[str, artifact.KindLayout]
  geometries: Mapping[str, artifact.Geometry]
  digests: Mapping[str, Any]
  label: str
  repair: str


def indices(
    block: int, shape: artifact.Geometry, start: int, stop: int
) -> range:
  """Returns the indices of the stored blocks that [start, stop) touches."""
  first = shape.blocks[0].number
  return range(start // block - first, -(-stop // block) - first)


def read(
    source: Source, kind: str, start: int, stop: int, k_out: np.ndarray,
    v_out: np.ndarray, *, layers: slice | None = None, verify: bool = True,
) -> int:
  """Reads positions [start, stop) of layers of a kind; see `Store.read`."""
  layout = source.layouts.get(kind)
  if layout is None:
    raise errors.UsageError(f'{source.label} has no {kind} layers')
  shape = source.geometries[kind]
  if not shape.start <= start < stop <= shape.end:
    raise errors.UsageError(
        f'{source.label}: {kind} positions [{start}, {stop}) are not stored,'
        f' available are [{shape.start}, {shape.end})')
  rows = _layer_rows(layers, len(layout.layers), kind)
  expected = (len(rows), stop - start, layout.kv_heads, layout.head_dim)
  for out in (k_out, v_out):
    if out.shape != expected or out.dtype != layout.element or not (
        out.flags.writeable and out[0].flags.c_contiguous):
      raise errors.UsageError(
          f'output is {out.dtype}{list(out.shape)}, expected writeable'
          f' {layout.element}{list(expected)} with contiguous layers')
  array = source.kv.open_array(
      attempts.prefix(source.fields.key, source.attempt) + f'{kind}/',
      source.fields, layout)
  return _run(_plan(source, kind, start, stop, k_out, v_out, rows, verify),
              array, verify)


def _layer_rows(layers: slice | None, count: int, kind: str) -> range:
  rows = range(count)[layers or slice(None)]
  if not rows or rows.step != 1:
    raise errors.UsageError(
        f'layers are {layers}, expected some of the {count} {kind} ones, in'
        ' steps of 1')
  return rows


def _plan(
    source: Source, kind: str, start: int, stop: int, k_out: np.ndarray,
    v_out: np.ndarray, rows: range, verify: bool,
) -> list[_Read]:
  """Cuts a read into some of about _READ_BYTES, of layers x blocks."""
  shape = source.geometries[kind]
  size = source.fields.block * k_out[0, 0].nbytes
  step = min(max(1, _READ_BYTES // size), len(rows))
  most = max(1, _READ_BYTES // (size * step))
  touched = indices(source.fields.block, shape, start, stop)
  runs: list[range] = []
  joins = False
  for index in touched:
    _, lo, hi = shape.blocks[index]
    whole = not verify or start <= lo < hi <= stop
    if joins and whole and len(runs[-1]) < most:
      runs[-1] = range(runs[-1].start, index + 1)
    else:
      runs.append(range(index, index + 1))
    joins = whole
  reads = []
  for first in range(0, len(rows), step):
    own = slice(first, min(first + step, len(rows)))
    for run in runs:
      lo = max(start, shape.blocks[run[0]].start)
      hi = min(stop, shape.blocks[run[-1]].stop)
      for part, out in enumerate((k_out, v_out)):
        reads.append(_Read(
            source, kind, run, rows[own], part, lo, hi,
            out[own, lo - start:hi - start], verify))
  return reads


class _Read:
  """One read: some layers' K or V of positions [lo, hi) of adjacent blocks."""

  def __init__(
      self, source: Source, kind: str, run: range, rows: range, part: int,
      lo: int, hi: int, out: np.ndarray, verify: bool,
  ):
    self._source = source
    self._kind = kind
    self._run = run
    self._rows = rows
    self._part = part
    self._out = out
    self._first = lo
    self._last = hi
    self._kept = slice(0, hi - lo)
    self._target = out
    blocks = source.geometries[kind].blocks
    if verify and (lo, hi) != (blocks[run[0]].start, blocks[run[-1]].stop):
      # Of a block at the edge all valid rows are needed for its digest.
      _, self._first, self._last = blocks[run[0]]
      self._kept = slice(lo - self._first, hi - self._first)
      self._target = np.empty(
          (out.shape[0], self._last - self._first) + out.shape[2:], out.dtype)

  @property
  def nbytes(self) -> int:
    return self._target.nbytes

  def start(self, array: Any) -> None:
    """Starts the read."""
    origin = self._source.geometries[self._kind].origin
    self._future = kvstore.start_read(
        array, slice(self._rows.start, self._rows.stop), self._part,
        slice(self._first - origin, self._last - origin), self._target)

  def wait(self, array: Any) -> None:
    """Waits for the bytes."""
    failed = kvstore.wait_for_read(self._future)
    if failed is None:
      return
    if len(self._run) > 1:
      # The error does not name the block: one by one they do.
      blocks = self._source.geometries[self._kind].blocks
      for index in self._run:
        lo = max(self._first, blocks[index].start)
        hi = min(self._last, blocks[index].stop)
        one = _Read(
            self._source, self._kind, range(index, index + 1), self._rows,
            self._part, lo, hi,
            self._target[:, lo - self._first:hi - self._first], False)
        one.start(array)
        one.wait(array)
      return
    why, error = failed
    numbers = [self._source.layouts[self._kind].layers[i] for i in self._rows]
    ends = '-'.join(str(n) for n in sorted({numbers[0], numbers[-1]}))
    if kvstore.is_damage(why):
      raise self._damage(self._run[0], ends, why)
    raise kvstore.storage_error(
        error, f'reading {self._name(self._run[0], ends)}')

  def check(self) -> None:
    """Checks the digests and copies what was asked for out of the scratch."""
    numbers = self._source.layouts[self._kind].layers
    blocks = self._source.geometries[self._kind].blocks
    for index in self._run:
      digests = self._source.digests[self._kind][index]
      _, lo, hi = blocks[index]
      for row, values in zip(self._rows, self._target):
        expected = digests[2 * row + self._part]
        found = artifact.block_digest(
            self._kind, numbers[row], artifact.PARTS[self._part], lo, hi,
            values[lo - self._first:hi - self._first])
        if found != expected:
          raise self._damage(
              index, str(numbers[row]),
              f'digest is {found[:12]}, expected {expected[:12]}')
    if self._target is not self._out:
      self._out[...] = self._target[:, self._kept]

  def _damage(self, index: int, layer: str, what: str) -> errors.DamageError:
    return errors.DamageError(
        f'{self._name(index, layer)}: {what}; {self._source.repair}')

  def _name(self, index: int, layer: str) -> str:
    source = self._source
    number = source.geometries[self._kind].blocks[index].number
    path = source.kv.where(attempts.data_file(
        source.fields.key, source.attempt, self._kind, index))
    return (f'{source.label} {self._kind} layer {layer}'
            f' {artifact.PARTS[self._part]} block {number} ({path})')


def _run(reads: list[_Read], array: Any, verify: bool) -> int:
  """Reads and checks, overlapped; all have ended when this returns or raises.

  All reads are started at once: one at a time costs three times as much.
  """
  checks = []
  failed: BaseException | None = None
  for one in reads:
    one.start(array)
  for one in reads:
    try:
      one.wait(array)
      if failed is None and verify:
        checks.append(pool().submit(one.check))
    except errors.KvgraftError as e:
      failed = failed or e
  for check in checks:
    failed = failed or check.exception()
  if failed is not None:
    raise failed
  return sum(one.nbytes for one in reads)
