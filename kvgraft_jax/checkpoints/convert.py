"""Writes any checkpoint as a Hugging Face directory or an Orbax tree.

Values keep the dtype in which the source hands them out, so the model
fingerprint of the result is the source's, unless another dtype is asked for.
A directory is written under a temporary name beside its place, its config last,
and renamed when it is whole.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import secrets
import shutil
from typing import Any

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import hf_export
from kvgraft_jax.checkpoints import huggingface
from kvgraft_jax.checkpoints import orbax_trees
from kvgraft_jax.checkpoints import safetensors
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints import tokenizer_files
from kvgraft_jax.checkpoints import tree

FORMATS = ('safetensors', 'orbax')
_SHARD_BYTES = 5_000_000_000  # A larger tensor has a file of its own.
_PREFIX = huggingface.PREFIXES[0]
_TEMPLATE = 'chat_template.jinja'
_GENERATION = 'generation_config.json'


@dataclasses.dataclass(frozen=True)
class Result:
  """What was written.

  Attributes:
    tensors: how many canonical tensors.
    nbytes: of all files.
    model_fingerprint: hex, of the result.
    tokenizer: names of the tokenizer's files; none if it cannot be kept
      exactly, or there is none.
  """

  tensors: int
  nbytes: int
  model_fingerprint: str
  tokenizer: tuple[str, ...]


def convert(
    source: source_lib.Source,
    out: str | os.PathLike[str],
    form: str,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
  """Writes a checkpoint.

  Args:
    source: where it comes from.
    out: directory to make; it may exist if it is empty.
    form: 'safetensors' or 'orbax'.
    dtype: 'bfloat16' or 'float32', of every value; None keeps them.
    progress: called with (bytes done, bytes in all).

  Raises:
    UsageError: if `out` is not empty, a mount point or a URL, or the form
      cannot hold the model.
    DamageError: if a value is NaN or infinite, or the source is damaged.
    StorageError: if it cannot be written.
  """
  if '://' in os.fspath(out):
    raise errors.UsageError(
        f'--out={out}: expected a directory on this machine, found a URL: write'
        ' it here, then copy it there')
  out = pathlib.Path(os.path.realpath(out))
  if os.path.ismount(out):
    # Known before the work: what is written is renamed to `out` at the end.
    raise errors.UsageError(
        f'--out={out}: expected a directory to make, found a mount point: name'
        f' one in it, such as {out / "model"}')
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise errors.UsageError(
        f'--out={out}: expected a new or empty directory, found'
        f' {"files in it" if out.is_dir() else "a file"}: nothing is ever'
        ' overwritten; name another one')
  tap = _Tap(source, dtype, progress)
  temporary = out.parent / f'.{out.name}.tmp-{secrets.token_hex(6)}'
  try:
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < tap.nbytes:
      raise errors.StorageError(
          f'--out={out}: expected {tap.nbytes:,} bytes of free space, found'
          f' {free:,}: free some or name a directory elsewhere')
    if form == 'orbax':
      orbax_trees.write(tap, temporary)
      # There is no config for the ids of the tokenizer.
      kept = _write_tokenizer(source, temporary, _token_ids(source))
    else:
      config = hf_export.config_json(
          source.config, tap.common_dtype) | _token_ids(source)
      temporary.mkdir()
      _write_weights(tap, temporary)
      kept = _write_tokenizer(source, temporary)
      # Without it no reader takes the directory for a checkpoint.
      _write(temporary / huggingface.CONFIG, _json_bytes(config))
    nbytes = sum(p.stat().st_size for p in temporary.rglob('*') if p.is_file())
    _sync_folder(temporary)
    os.rename(temporary, out)
    _sync_folder(out.parent)
  except OSError as e:
    if e.errno in (errno.ENOTEMPTY, errno.EEXIST) and out.is_dir():
      raise errors.StorageError(
          f'--out={out}: expected nothing there, found files that another'
          ' process wrote meanwhile: they are untouched; name another directory'
      ) from None
    raise errors.StorageError(
        f'--out={out}: cannot write it: {e.strerror or e}: free space or permit'
        ' writing there, or name another directory') from None
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
  return Result(
      tensors=len(source.slots), nbytes=nbytes,
      model_fingerprint=tap.fingerprint(), tokenizer=kept)


class _Tap:
  """A source whose values are cast, checked and hashed as they are read."""

  def __init__(
      self, source: source_lib.Source, dtype: str | None,
      progress: Callable[[int, int], None] | None,
  ):
    self.source, self.config = source.source, source.config
    self.slots, self.files = source.slots, source.files
    self.tokenizer, self.template = source.tokenizer, source.template
    self._inner, self._dtype = source, dtype
    self._progress, self._done = progress, 0
    self._digests: dict[str, str] = {}
    self.nbytes = sum(self.size(name) for name in self.slots)

  def size(self, name: str) -> int:
    """Returns the bytes of a canonical tensor."""
    itemsize = source_lib.DTYPES[self.value_dtype(name)].itemsize
    return int(np.prod(self.slots[name].shape)) * itemsize

  @property
  def common_dtype(self) -> str:
    """'bfloat16' where it holds every value, else 'float32'."""
    found = {self.value_dtype(name) for name in self.slots}
    return 'bfloat16' if found == {'bfloat16'} else 'float32'

  def value_dtype(self, name: str) -> str:
    """Returns the dtype that `pieces` yields."""
    return self._dtype or self._inner.value_dtype(name)

  def pieces(self, name: str) -> Iterator[np.ndarray]:
    """Yields a canonical tensor in slices of its first axis, in order."""
    digest, dtype = hashlib.sha256(), self.value_dtype(name)
    for piece in self._inner.pieces(name):
      piece = piece.astype(source_lib.DTYPES[dtype], copy=False)
      piece = np.ascontiguousarray(piece)
      source_lib.check_finite(self._inner, name, piece)
      digest.update(piece.reshape(-1).view(np.uint8).data)
      self._done += piece.nbytes
      if self._progress:
        self._progress(self._done, self.nbytes)
      yield piece
    self._digests[name] = tree.tensor_digest(
        name, self.slots[name].shape, dtype, digest.hexdigest())

  def fingerprint(self) -> str:
    """Returns the model fingerprint of what was read."""
    return tree.model_fingerprint(self.config, self._digests)


def _write_weights(tap: _Tap, folder: pathlib.Path) -> None:
  """Writes the safetensors files, and the index if they are several."""
  shards: list[list[str]] = [[]]
  room = _SHARD_BYTES
  for name in tap.slots:
    if shards[-1] and tap.size(name) > room:
      shards.append([])
      room = _SHARD_BYTES
    shards[-1].append(name)
    room -= tap.size(name)
  files: dict[str, str] = {}
  for i, names in enumerate(shards):
    path = folder / huggingface.WEIGHTS
    if len(shards) > 1:
      path = folder / f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
    # The wider dtype in front keeps every tensor at a multiple of its size.
    names = sorted(names, key=lambda n: tap.value_dtype(n) == 'bfloat16')
    plan = safetensors.layout({
        _PREFIX + n: (
            tap.slots[n].shape, source_lib.DTYPES[tap.value_dtype(n)])
        for n in names
    }, {'format': 'pt'}, aligned=False)
    with open(path, 'xb') as f:
      f.write(plan.header)
      for name in names:
        for piece in tap.pieces(name):
          f.write(piece.reshape(-1).view(np.uint8).data)
      f.flush()
      os.fsync(f.fileno())
    files |= {_PREFIX + n: path.name for n in names}
  if len(shards) > 1:
    _write(folder / huggingface.INDEX, _json_bytes({
        'metadata': {'total_size': tap.nbytes},
        'weight_map': dict(sorted(files.items())),
    }))


def _write_tokenizer(
    source: source_lib.Source, folder: pathlib.Path,
    token_ids: dict[str, Any] | None = None,
) -> tuple[str, ...]:
  """Writes the chat template and what can be kept of the tokenizer.

  Args:
    source: whose they are.
    folder: where to.
    token_ids: for generation_config.json, beside what the source has there.
  """
  if source.template is not None:
    _write(folder / _TEMPLATE, source.template.encode('utf-8'))
  tokenizer = source.tokenizer
  files: dict[str, bytes] = {}
  if isinstance(source, huggingface.HfDirectory):
    files = {p.name: p.read_bytes() for p in source.companions()}
  elif isinstance(tokenizer, tokenizer_files.HfTokenizer):
    files = {tokenizer_files.TOKENIZER_JSON: tokenizer.data}
  elif isinstance(tokenizer, tokenizer_files.SentencePieceTokenizer):
    files = {tokenizer_files.TOKENIZER_MODEL: tokenizer.data}
  elif isinstance(tokenizer, tokenizer_lib.SpmTokenizer):
    data = hf_export.tokenizer_model(tokenizer)
    if data is not None:
      files = {tokenizer_files.TOKENIZER_MODEL: data}
  if token_ids and tokenizer is not None:
    token_ids['eos_token_id'] = list(tokenizer.eos_ids)
    own = json.loads(files.get(_GENERATION, b'{}'))
    files[_GENERATION] = _json_bytes(own | token_ids)
  for name, data in files.items():
    _write(folder / name, data)
  return tuple(n for n in sorted(files) if n.startswith('tokenizer.'))


def _token_ids(source: source_lib.Source) -> dict[str, Any]:
  """Returns the ids for a config.json."""
  if isinstance(source, huggingface.HfDirectory):
    return source.token_ids
  if source.tokenizer is None:
    return {}
  return {
      'bos_token_id': source.tokenizer.bos_id,
      'eos_token_id': list(source.tokenizer.eos_ids),
  }


def _json_bytes(value: Any) -> bytes:
  return (json.dumps(value, indent=2, sort_keys=True) + '\n').encode('utf-8')


def _write(path: pathlib.Path, data: bytes) -> None:
  with open(path, 'xb') as f:
    f.write(data)
    f.flush()
    os.fsync(f.fileno())


def _sync_folder(folder: pathlib.Path) -> None:
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
