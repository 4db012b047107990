"""Cache of converted models: weights as the model holds them, mapped on load.

One directory per source content. `DTYPE.safetensors` holds the parameter tree,
`tokenizer.safetensors` the vocabulary; `DTYPE.json` is written last and names
both by size and hash, so that a directory without a sound index is an empty
one. Every file is written under a temporary name, synced and renamed. A lock
keeps two processes from converting twice; safety does not rest on it.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import math
import os
import pathlib
import secrets
from typing import Any

import blake3
import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import paths
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import safetensors
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints import tokenizer_files
from kvgraft_jax.checkpoints import tree

CONTENT = 'kvgraft.source'  # Tag of the memo of `content_sha256`.
_FORMAT = 3  # Of everything below the cache directory; old ones are ignored.
_TOKENIZER = 'tokenizer.safetensors'
_JSON = 'tokenizer.json'  # Array of a tokenizer that is kept as such a file.
_TEMPORARY = 'tmp-'


@dataclasses.dataclass(frozen=True)
class Entry:
  """A converted model, mapped.

  Attributes:
    config: the architecture.
    params: nested dict of read-only arrays, 64-byte aligned.
    tokenizer: the model's own.
    template: text of its chat template, or None.
    model_fingerprint: hex.
  """

  config: config_lib.ModelConfig
  params: dict[str, Any]
  tokenizer: tokenizer_lib.Tokenizer
  template: str | None
  model_fingerprint: str


def load_or_convert(
    content: str, dtype: str, open_source: Callable[[], source_lib.Source]
) -> Entry:
  """Returns a model from the cache, converted now if it is not there.

  Args:
    content: hex SHA-256 of the source's bytes.
    dtype: 'bfloat16' or 'float32', of the matrices.
    open_source: opens the source; called only to convert.

  Raises:
    DamageError: if the source changes while it is read.
    StorageError: if the cache directory cannot be written.
  """
  folder = paths.cache_dir() / 'models' / f'{_FORMAT}-{content}'
  entry = _load(folder, dtype)
  if entry is None:
    source = open_source()
    with _writing(folder):
      entry = _load(folder, dtype)  # Another process may have made it.
      if entry is None:
        _convert(source, content, folder, dtype)
        entry = _load(folder, dtype)
  if entry is None:
    raise errors.StorageError(
        f'{folder}: the converted model does not read back as written: check'
        ' the disk, or set KVGRAFT_CACHE_DIR to another one'
    )
  return entry


def content_sha256(files: Sequence[str | os.PathLike[str]]) -> str:
  """Returns hex SHA-256 of the files' bytes joined in order.

  Remembered in the cache directory by path, size, time and inode.

  Args:
    files: paths.

  Raises:
    NotFoundError: if one cannot be read.
  """
  memo = Memo(CONTENT, files)
  if memo.value is not None:
    return memo.value
  digest = hashlib.sha256()
  try:
    for path in files:
      with open(path, 'rb') as f:
        while block := f.read(1 << 20):
          digest.update(block)
  except OSError as e:
    raise _unreadable(files, e) from None
  return memo.keep(digest.hexdigest())


class Memo:
  """A hash that files decide, remembered until one of them changes.

  They are told apart by path, size, time and inode.

  Attributes:
    value: hex, or None if it is not known.
  """

  def __init__(
      self, tag: str, files: Sequence[str | os.PathLike[str]], more: Any = None
  ):
    """Looks it up in the cache directory.

    Args:
      tag: what the hash is of.
      files: paths.
      more: canonical JSON that decides the hash too.

    Raises:
      NotFoundError: if a file cannot be read.
    """
    self._files = files
    self._state = self._now()
    name = hashing.json_sha256(
        tag, self._state if more is None else [self._state, more])
    self._path = paths.cache_dir() / 'sources' / f'{name}.json'
    self.value: str | None = (
        _read_sealed(self._path) or {}).get('sha256')

  def keep(self, value: str) -> str:
    """Remembers and returns `value`; not if a file has changed meanwhile."""
    if not self.is_stale():
      # Only a memo: what cannot be kept is computed again.
      with contextlib.suppress(errors.StorageError):
        with _writing(self._path.parent):
          _replace(self._path, _seal({'sha256': value, 'source': self._state}))
    return value

  def is_stale(self) -> bool:
    """Returns whether a file has changed since."""
    return self._now() != self._state

  def _now(self) -> list[list[Any]]:
    try:
      return _state(self._files)
    except OSError as e:
      raise _unreadable(self._files, e) from None


def changed(source: str) -> errors.DamageError:
  """Returns the refusal of a source that was written to while it was read."""
  return errors.DamageError(
      f'{source}: expected files that stay as they are while they are read,'
      ' found one changed: wait until it is whole, then load it again')


def _unreadable(
    files: Sequence[str | os.PathLike[str]], error: OSError
) -> errors.NotFoundError:
  return errors.NotFoundError(
      f'{error.filename or files[0]}: cannot read the model file:'
      f' {error.strerror}')


def _state(files: Sequence[str | os.PathLike[str]]) -> list[list[Any]]:
  out = []
  for path in files:
    stat = os.stat(path)
    out.append([
        os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino
    ])
  return out


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
  """Holds the folder's lock, without leftovers of dead writers."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'lock', 'a', encoding='utf-8') as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX)
      except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
          raise
      else:
        # Nobody else writes now, so these belong to the dead.
        for left in folder.glob(f'{_TEMPORARY}*'):
          left.unlink(missing_ok=True)
      yield
  except OSError as e:
    raise errors.StorageError(
        f'{folder}: cannot write the model cache: {e.strerror}: free space or'
        ' permit writing there, or set KVGRAFT_CACHE_DIR to another directory'
    ) from None


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[Any]:
  """Yields a file that becomes `path` at once and whole, or not at all."""
  temporary = path.parent / f'{_TEMPORARY}{secrets.token_hex(8)}'
  try:
    with open(temporary, 'xb+') as f:
      yield f
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def _replace(path: pathlib.Path, data: bytes) -> None:
  with _replacing(path) as f:
    f.write(data)


def _seal(value: dict[str, Any]) -> bytes:
  """Returns a JSON file that tells whether it is whole."""
  return hashing.canonical_json({
      'blake3': hashing.blake3_hex(
          'kvgraft.index', hashing.canonical_json(value)
      ),
      'index': value,
  })


def _read_sealed(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns what `_seal` wrote, or None if it is missing or damaged."""
  try:
    data = path.read_bytes()
    value = json.loads(data)['index']
    return value if _seal(value) == data else None
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _file_blake3(path: pathlib.Path) -> str:
  digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
  digest.update_mmap(path)
  return digest.hexdigest()


def _convert(
    source: source_lib.Source, content: str, folder: pathlib.Path, dtype: str
) -> None:
  """Writes weights and tokenizer, then the index that makes them count."""
  shapes = dict(tree.flatten(tree.param_shapes(source.config)))
  plan = safetensors.layout({
      path: (shape, source_lib.DTYPES[dtype if is_matrix else 'float32'])
      for path, (shape, is_matrix) in shapes.items()
  })
  weights = folder / f'{dtype}.safetensors'
  with _replacing(weights) as f:
    # Reserves the space, so that a full disk is known before the work.
    if hasattr(os, 'posix_fallocate'):
      os.posix_fallocate(f.fileno(), 0, plan.nbytes)
    else:
      f.truncate(plan.nbytes)
    f.write(plan.header)
    digests = {
        name: _write_tensor(f, source, name, plan.starts, dtype)
        for name in sorted(source.slots)
    }
  packed = _pack_tokenizer(source.tokenizer)
  _replace(folder / _TOKENIZER, packed)
  stat = os.stat(weights)
  if content_sha256(source.files) != content:
    raise changed(source.source)
  _replace(folder / f'{dtype}.json', _seal({
      'config': source.config.to_json(),
      'config_name': source.config.name,
      'model': tree.model_fingerprint(source.config, digests),
      'template': source.template,
      'tokenizer_blake3': blake3.blake3(packed).hexdigest(),
      'weights_blake3': _file_blake3(weights),
      'weights_bytes': stat.st_size,
      'weights_mtime_ns': stat.st_mtime_ns,
  }))


def _write_tensor(
    f: Any, source: source_lib.Source, name: str,
    starts: Mapping[str, int], dtype: str,
) -> str:
  """Writes one canonical tensor to its place; returns its digest."""
  slot = source.slots[name]
  digest = hashlib.sha256()
  row_bytes = source_lib.stored_dtype(slot, dtype).itemsize * math.prod(
      slot.shape[1:])
  f.seek(starts[slot.path] + slot.row * row_bytes)
  for piece in source_lib.prepared(source, name, dtype, digest):
    f.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
  return tree.tensor_digest(
      name, slot.shape, source.value_dtype(name), digest.hexdigest())


def _pack_tokenizer(tokenizer: Any) -> bytes:
  """Returns the file of a tokenizer that a GGUF file can have."""
  if isinstance(tokenizer, tokenizer_lib.SpmTokenizer):
    arrays, values = tokenizer.arrays, tokenizer.values
  else:
    arrays = {_JSON: np.frombuffer(tokenizer.data, np.uint8)}
    values = {'bos': tokenizer.bos_id, 'eos_ids': list(tokenizer.eos_ids)}
  return safetensors.pack(arrays, {'values': json.dumps(values)})


def _unpack_tokenizer(data: bytes) -> tokenizer_lib.Tokenizer:
  """Returns what `_pack_tokenizer` wrote."""
  arrays, metadata = safetensors.unpack(data, _TOKENIZER)
  values = json.loads(metadata['values'])
  if _JSON in arrays:
    return tokenizer_files.HfTokenizer(arrays[_JSON].tobytes(), **values)
  return tokenizer_lib.SpmTokenizer(arrays, values)


def _load(folder: pathlib.Path, dtype: str) -> Entry | None:
  """Returns the entry, or None if it is missing or not what was written."""
  index = _read_sealed(folder / f'{dtype}.json')
  if index is None:
    return None
  weights = folder / f'{dtype}.safetensors'
  try:
    stat = os.stat(weights)
    if stat.st_size != index['weights_bytes']:
      return None
    # Somebody copied or touched it: look at every byte, once per load.
    if (stat.st_mtime_ns != index['weights_mtime_ns']
        and _file_blake3(weights) != index['weights_blake3']):
      return None
    packed = (folder / _TOKENIZER).read_bytes()
    if blake3.blake3(packed).hexdigest() != index['tokenizer_blake3']:
      return None
    flat, _ = safetensors.load(weights)
    tokenizer = _unpack_tokenizer(packed)
    config = config_lib.ModelConfig.from_json(
        index['config'], index['config_name']
    )
  except (OSError, errors.DamageError, KeyError, TypeError):
    return None
  if config.to_json() != index['config']:
    return None  # Written by a version whose configs say less.
  for path, (shape, is_matrix) in tree.flatten(tree.param_shapes(config)):
    stored = source_lib.DTYPES[dtype if is_matrix else 'float32']
    if path not in flat or (flat[path].shape, flat[path].dtype) != (
        shape, stored):
      return None
  return Entry(
      config=config,
      params=tree.nest(flat),
      tokenizer=tokenizer,
      template=index['template'],
      model_fingerprint=index['model'],
  )
