"""Journals of attempts: which blocks of a deposit are finished and durable.

An entry, `journal/NNNNNNNN` in the attempt's directory, lists the blocks that
were finished since the one before, with their digests, and may name a state of
the writer's caller, an object of its own. Entries are only ever added, so that
file systems and buckets serve alike and two processes may continue one attempt.
An entry that cannot be used ends the journal: what follows is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import logging
import re
from typing import Any

from kvgraft_jax import artifact
from kvgraft_jax import attempts
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import kvstore

_FORMAT = 1
_ENTRY = re.compile(r'a/[0-9a-f]{64}/([0-9a-f]{32})/journal/(\d{8})')
_FIELDS = {'attempt', 'blocks', 'done', 'format', 'key', 'number', 'state'}
# The last state, and one more in case that its entry is damaged.
_STATES = 2

_LOG = logging.getLogger(__name__)

# A block whose bytes are durable: kind, index from the first stored block of
# the kind, hex BLAKE3 of each layer's K, then V.
Finished = tuple[str, int, tuple[str, ...]]


def attempts_of(kv: kvstore.KvStore, key: str) -> Sequence[str]:
  """Returns the attempts of a key that have a journal and no manifest."""
  matches = [_ENTRY.fullmatch(name) for name in kv.list(f'a/{key}/')]
  found = sorted({m[1] for m in matches if m})
  return [a for a in found if not attempts.is_published(kv, key, a)]


def leading(found: Mapping[int, Any]) -> int:
  """Returns how many indices from 0 on are there without a gap."""
  count = 0
  while count in found:
    count += 1
  return count


class Journal:
  """The journal of one attempt.

  Attributes:
    attempt: the attempt's directory.
    blocks: kind -> index of a block -> its digests, as entries list them.
  """

  def __init__(
      self, kv: kvstore.KvStore, key: str,
      layouts: Mapping[str, artifact.KindLayout],
      shapes: Mapping[str, artifact.Geometry], attempt: str,
  ):
    """Creates a journal without entries; `load` reads those of the store.

    Args:
      kv: the store.
      key: the artifact's key.
      layouts: kind -> layout.
      shapes: kind -> where its positions are stored.
      attempt: the attempt.
    """
    self.attempt = attempt
    self.blocks: dict[str, dict[int, tuple[str, ...]]] = {
        k: {} for k in layouts
    }
    self._kv = kv
    self._key = key
    self._layouts = layouts
    self._shapes = shapes
    self._prefix = f'{attempts.prefix(key, self.attempt)}journal/'
    self._next = 0
    self._states: list[str] = []
    self._unusable: list[str] = []

  @property
  def is_empty(self) -> bool:
    """Whether there is no entry in the store."""
    return self._next == 0

  def append(
      self, blocks: Sequence[Finished], state: bytes | None = None
  ) -> None:
    """Adds an entry; it is durable when this returns.

    Args:
      blocks: what was finished since the last one.
      state: what the caller needs to go on behind them.
    """
    digest = None
    if state is not None:
      digest = hashing.blake3_hex('kvgraft.state', state)
      self._kv.put(self._state_name(digest), state)
    known = {k: dict(v) for k, v in self.blocks.items()}
    for kind, index, digests in blocks:
      known[kind][index] = digests
    entry = {
        'attempt': self.attempt,
        'blocks': [[kind, self._shapes[kind].blocks[index].number,
                    list(digests)] for kind, index, digests in blocks],
        'done': {k: leading(v) for k, v in known.items()},
        'format': _FORMAT,
        'key': self._key,
        'state': digest,
    }
    # Another process may continue the same attempt and have taken a number.
    while not self._kv.put_new(
        self._entry_name(self._next),
        artifact.sign(hashing.canonical_json(dict(entry, number=self._next)))):
      self._next += 1
    self._next += 1
    self._kv.sync_directories(self._prefix)
    self.blocks = known
    if digest is not None:
      self._keep_states(digest)

  def entries(self) -> dict[int, str]:
    """Returns number -> name of the entries that are there now."""
    matches = [_ENTRY.fullmatch(name) for name in self._kv.list(self._prefix)]
    return {int(m[2]): m[0] for m in matches if m}

  def load(self, names: Mapping[int, str], files: Set[str]) -> None:
    """Reads the entries up to the first that cannot be used.

    Args:
      names: of the entries, by number.
      files: names of the attempt's data files that are there as a whole, listed
        after `names`: another process may be writing more of both.
    """
    pending = {n: self._kv.start_load(name) for n, name in names.items()}
    self._next = max(names, default=-1) + 1
    ended = False
    for number, name in names.items():
      if not ended:
        try:
          self._take(number, self._kv.value_of(name, pending[number]), files)
          continue
        except errors.DamageError as e:
          _LOG.warning('%s; what follows is computed again',
                       str(e).partition(';')[0])
          ended = True
      self._unusable.append(name)

  def forget_unusable(self) -> None:
    """Removes the entries that `load` could not use."""
    # From here on numbers may be missing: only `done` shows a hole.
    while self._unusable:
      self._kv.delete(self._unusable.pop())

  def state(self) -> bytes | None:
    """Returns the last state that is as it was saved, None if there is none."""
    for digest in reversed(self._states):
      name = self._state_name(digest)
      data = self._kv.load(name)
      if data is not None and (
          hashing.blake3_hex('kvgraft.state', data) == digest):
        return data
      _LOG.warning('%s: the saved state is lost or damaged',
                   self._kv.where(name))
    return None

  def remove(self) -> None:
    """Removes all entries and states."""
    self._kv.delete_below(self._prefix)

  def _entry_name(self, number: int) -> str:
    return f'{self._prefix}{number:08d}'

  def _state_name(self, digest: str) -> str:
    # By content: two processes cannot spoil each other's.
    return f'{self._prefix}state-{digest}'

  def _keep_states(self, digest: str) -> None:
    self._states = [s for s in self._states if s != digest] + [digest]
    for old in self._states[:-_STATES]:
      self._kv.delete(self._state_name(old))
    del self._states[:-_STATES]

  def _take(
      self, number: int, data: bytes | None, files: Set[str]
  ) -> None:
    """Adds an entry's blocks and state; DamageError if it cannot be used."""
    where = self._kv.where(self._entry_name(number))
    value = artifact.parse_signed(data or b'', where)
    try:
      found, done = self._check(number, value)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
      raise errors.DamageError(
          f'{where}: it is not an entry of this deposit ({e!s:.100})') from None
    blocks = {k: dict(v) for k, v in self.blocks.items()}
    for kind, index, digests in found:
      if blocks[kind].setdefault(index, digests) != digests:
        raise errors.DamageError(
            f'{where}: an earlier entry has other digests of {kind} block'
            f' {self._shapes[kind].blocks[index].number}')
      name = attempts.data_file(self._key, self.attempt, kind, index)
      if name not in files:
        raise errors.DamageError(
            f'{where}: {self._kv.where(name)} is lost or has another size')
    for kind, count in done.items():
      if leading(blocks[kind]) < count:
        raise errors.DamageError(f'{where}: the entry before it is missing')
    self.blocks = blocks
    if value['state'] is not None:
      self._states.append(value['state'])

  def _check(
      self, number: int, value: dict[str, Any]
  ) -> tuple[list[Finished], dict[str, int]]:
    """Returns the blocks of an entry and its counts; ValueError if unfit."""
    expected = {'attempt': self.attempt, 'format': _FORMAT, 'key': self._key,
                'number': number}
    for name, wanted in expected.items():
      if value[name] != wanted:
        raise ValueError(f'{name} is {value[name]!s:.40}, expected {wanted}')
    if set(value) != _FIELDS:
      raise ValueError(f'its fields are {sorted(value)}')
    state, done = value['state'], value['done']
    if state is not None and not artifact.is_hash(state):
      raise ValueError('state is no digest')
    if set(done) != set(self._layouts) or not all(
        type(n) is int for n in done.values()):
      raise ValueError('done is not a number for each kind')
    found: list[Finished] = []
    for kind, block, digests in value['blocks']:
      shape = self._shapes[kind]
      index = block - shape.blocks[0].number
      count = 2 * len(self._layouts[kind].layers)
      if type(block) is not int or not 0 <= index < len(shape.blocks):
        raise ValueError(f'there is no {kind} block {block!s:.20}')
      if len(digests) != count or not all(map(artifact.is_hash, digests)):
        raise ValueError(f'{kind} block {block} has no {count} digests')
      found.append((kind, index, tuple(digests)))
    return found, done
