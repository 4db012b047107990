"""Where a store keeps its artifacts: manifests, and attempts to write one.

An attempt is the directory of one deposit. The manifest of its key names the
attempt that came first; it is written last and never changed.
"""

from __future__ import annotations

from kvgraft_jax import artifact
from kvgraft_jax import errors
from kvgraft_jax import kvstore

REPAIR = 'remove the artifact and deposit it again'


def manifest_name(key: str) -> str:
  """Returns the name of a key's manifest."""
  return f'a/{key}/manifest.json'


def prefix(key: str, attempt: str) -> str:
  """Returns what the names of an attempt's objects begin with."""
  return f'a/{key}/{attempt}/'


def data_file(key: str, attempt: str, kind: str, index: int) -> str:
  """Returns the name of a data file; `index` counts from the first stored."""
  return f'{prefix(key, attempt)}{kind}/c.0.0.{index}.0.0'


def parse_manifest(
    kv: kvstore.KvStore, key: str, data: bytes
) -> artifact.Manifest:
  """Returns the manifest in `data`; raises unless it is the one of `key`."""
  where = kv.where(manifest_name(key))
  manifest = artifact.Manifest.from_bytes(data, where)
  if manifest.key != key:
    raise errors.DamageError(
        f'{where}: it is the manifest of key {manifest.key[:12]}; {REPAIR}')
  return manifest


def load_manifest(kv: kvstore.KvStore, key: str) -> artifact.Manifest | None:
  """Returns the complete artifact of `key`, None if there is none."""
  data = kv.load(manifest_name(key))
  return None if data is None else parse_manifest(kv, key, data)


def is_published(kv: kvstore.KvStore, key: str, attempt: str) -> bool:
  """Tells whether the manifest of `key`, damaged or not, names `attempt`."""
  return attempt.encode() in (kv.load(manifest_name(key)) or b'')


def delete(kv: kvstore.KvStore, key: str, attempt: str) -> None:
  """Removes one writer's objects, unless a manifest names them."""
  if not artifact.is_hash(key) or not artifact.is_attempt(attempt):
    raise errors.UsageError(f'{key!r:.80} {attempt!r:.80} name no attempt')
  if is_published(kv, key, attempt):
    raise errors.UsageError(
        f'attempt {attempt} belongs to a deposited artifact')
  kv.delete_below(prefix(key, attempt))
