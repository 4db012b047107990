"""Stores that the `artifact` lines of a ledger name, read again."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import errors
from kvgraft_jax import recheck
from kvgraft_jax import results
from kvgraft_jax import store as store_lib


@dataclasses.dataclass(frozen=True)
class Report:
  """What reading the stores of a run found.

  Attributes:
    blocks: stored blocks that were read, each with its digests checked.
    unread: one line for each artifact whose store is not there.
    problems: one line for each block, or artifact, that is damaged.
  """

  blocks: int
  unread: list[str]
  problems: list[str]


def find(
    directory: str | os.PathLike[str], body: Mapping[str, Any]
) -> tuple[store_lib.Store, artifact_lib.Manifest]:
  """Returns the store of an `artifact` line, and the artifact in it.

  Args:
    directory: of the run.
    body: of the line.

  Raises:
    NotFoundError: if the store is not there, or not the artifact in it.
    KvgraftError: as reading a manifest does.
  """
  store = _open(pathlib.Path(directory), body)
  return store, store.find(body['artifact'])


def _open(
    directory: pathlib.Path, body: Mapping[str, Any]
) -> store_lib.Store:
  if not body.get('store'):
    raise errors.NotFoundError(f'{directory}: its ledger names no store')
  place = directory / body['store']
  if not place.is_dir():
    raise errors.NotFoundError(f'{place}: there is no store')
  return store_lib.Store(str(place), create=False)


def read_block(
    store: store_lib.Store, manifest: artifact_lib.Manifest, kind: str,
    start: int, stop: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns K and V, bit patterns [layers, positions, heads, dim], checked."""
  layout = manifest.layouts[kind]
  shape = (len(layout.layers), stop - start, layout.kv_heads, layout.head_dim)
  k, v = (np.empty(shape, layout.element) for _ in artifact_lib.PARTS)
  store.read(manifest, kind, start, stop, k, v)
  return k, v


def check(
    directory: str | os.PathLike[str], lines: Sequence[recheck.Line]
) -> Report:
  """Reads every block of every artifact whose store is there.

  Args:
    directory: of the run.
    lines: of its ledger.
  """
  found = Report(0, [], [])
  for number, line in enumerate(lines, 1):
    if line['kind'] != 'artifact':
      continue
    body, where = line['body'], recheck.where(number, line)
    try:
      store = _open(pathlib.Path(directory), body)
    except errors.NotFoundError as e:
      found.unread.append(f'{where}: {e}')
      continue
    try:
      manifest = store.find(body['artifact'])
      stored = {'digests': results.digests(manifest)}
      if results.blocks(stored) != results.blocks(body):
        raise errors.DamageError(
            'its digests are not those of the stored artifact')
      store.tokens(manifest)
    except errors.KvgraftError as e:
      found.problems.append(f'{where}: {e}')
      continue
    for kind, geometry in manifest.geometries.items():
      for block in geometry.blocks:
        try:
          read_block(store, manifest, kind, block.start, block.stop)
          found = dataclasses.replace(found, blocks=found.blocks + 1)
        except errors.KvgraftError as e:
          found.problems.append(f'{where}: {e}')
  return found
