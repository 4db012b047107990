"""Weights from any checkpoint, slice by slice, straight to where they belong.

A source is a checkpoint whose headers have been accepted: it knows config,
tokenizer and template, and yields each canonical tensor (`tree`) in slices
along its first axis. What reads a source never holds more than a slice beside
the final weights.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import functools
import hashlib
import math
import os
from typing import Any
from typing import Protocol

import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import memory
from kvgraft_jax.checkpoints import tree

# Of one slice, as float32. The first axis cannot be cut finer than one row.
PIECE_BYTES = 32 << 20
DTYPES = {
    'bfloat16': np.dtype(ml_dtypes.bfloat16),
    'float32': np.dtype(np.float32),
}
_CHUNK = 512  # Rows of a prefill step, unless they are asked for otherwise.
_NONE = 'none'


class Source(Protocol):
  """A checkpoint whose headers have been accepted.

  Attributes:
    source: name for messages.
    config: the architecture.
    slots: canonical name -> where it goes in the parameter tree.
    tokenizer: the checkpoint's own, or None.
    template: text of its chat template, or None.
    files: what the weights are read from; if none of them changes, neither do
      the weights.
  """

  source: str
  config: config_lib.ModelConfig
  slots: dict[str, tree.Slot]

  @property
  def tokenizer(self) -> Any:
    """May be read from its file only now."""
    ...

  @property
  def template(self) -> str | None:
    """Text of the chat template."""
    ...

  @property
  def files(self) -> Sequence[str | os.PathLike[str]]:
    """Paths."""
    ...

  def value_dtype(self, name: str) -> str:
    """Returns 'bfloat16' or 'float32': the dtype `pieces` yields."""
    ...

  def pieces(self, name: str) -> Iterator[np.ndarray]:
    """Yields a canonical tensor in slices of its first axis, in order.

    Norm weights come as w, not as 1 + w.
    """
    ...


def piece_rows(shape: Sequence[int]) -> int:
  """Returns how many rows of the first axis make one slice."""
  return max(1, PIECE_BYTES // (4 * max(1, math.prod(shape[1:]))))


def template_fingerprint(template: str | None) -> str:
  """Returns the hex fingerprint of a chat template, or 'none'."""
  if template is None:
    return _NONE
  return hashing.sha256('kvgraft.template', template.encode('utf-8'))


def tokenizer_fingerprint(tokenizer: Any) -> str:
  """Returns the hex fingerprint of a tokenizer, or 'none'."""
  return _NONE if tokenizer is None else tokenizer.fingerprint


def stored_dtype(slot: tree.Slot, dtype: str) -> np.dtype:
  """Returns the dtype of a slot's leaf in a model of `dtype`."""
  return DTYPES['float32' if slot.is_norm else dtype]


def prepared(
    source: Source, name: str, dtype: str, digest: Any = None
) -> Iterator[np.ndarray]:
  """Yields the slices of a canonical tensor as the parameter tree holds them.

  Args:
    source: where it comes from.
    name: canonical name.
    dtype: 'bfloat16' or 'float32', of matrices.
    digest: a `hashlib` object that takes in the source's values, or None.

  Raises:
    DamageError: if a value is NaN or infinite.
  """
  slot = source.slots[name]
  stored = stored_dtype(slot, dtype)
  for piece in source.pieces(name):
    piece = np.ascontiguousarray(piece)
    if digest is not None:
      digest.update(piece.reshape(-1).view(np.uint8).data)
    if slot.is_norm and source.config.norm_offset:
      piece = piece.astype(np.float32) + np.float32(source.config.norm_offset)
    piece = piece.astype(stored, copy=False)
    check_finite(source, name, piece)
    yield piece


def check_finite(source: Source, name: str, piece: np.ndarray) -> None:
  """Raises DamageError if a slice of `name` holds NaN or infinity."""
  if not _finite(piece):
    raise errors.DamageError(
        f'{source.source}: tensor {name} holds NaN or infinity, expected'
        ' finite weights: get the file again')


def _finite(piece: np.ndarray) -> bool:
  if piece.dtype == np.float32:
    bits, mask, limit = piece.view(np.uint32), 0x7fffffff, 0x7f800000
  else:
    bits, mask, limit = piece.view(np.uint16), 0x7fff, 0x7f80
  return not bits.size or int((bits & bits.dtype.type(mask)).max()) < limit


def check_memory(
    config: config_lib.ModelConfig, dtype: str, source: str
) -> None:
  """Raises CapacityError if a model cannot run on the device."""
  needed = (tree.weight_bytes(config, dtype)
            + memory.scratch_bytes(config, _CHUNK))
  memory.check(needed, f'model {source!r} in {dtype}')


def load(
    source: Source, dtype: str, fingerprint: str | None = None
) -> tuple[dict[str, Any], str]:
  """Reads all weights to the default device.

  Args:
    source: an accepted checkpoint.
    dtype: 'bfloat16' or 'float32', of the matrices.
    fingerprint: of these weights, where it is known: they are not hashed then.

  Returns:
    The parameter tree, and the hex model fingerprint.

  Raises:
    CapacityError: if the weights cannot fit on the device.
    DamageError: if a value is NaN or infinite, or the file ends early.
  """
  check_memory(source.config, dtype, source.source)
  shapes = dict(tree.flatten(tree.param_shapes(source.config)))
  by_path: dict[str, list[str]] = {}
  for name in sorted(source.slots):
    by_path.setdefault(source.slots[name].path, []).append(name)
  digests, flat = {}, {}
  for path, (shape, is_matrix) in shapes.items():
    leaf = _leaf(shape, DTYPES[dtype if is_matrix else 'float32'])
    for name in by_path[path]:
      digest = hashlib.sha256() if fingerprint is None else None
      row = source.slots[name].row
      for piece in prepared(source, name, dtype, digest):
        leaf.write(row, piece)
        row += piece.shape[0]
      if digest is not None:
        digests[name] = tree.tensor_digest(
            name, source.slots[name].shape, source.value_dtype(name),
            digest.hexdigest())
    flat[path] = leaf.array()
  if fingerprint is None:
    fingerprint = tree.model_fingerprint(source.config, digests)
  return tree.nest(flat), fingerprint


def _leaf(shape: tuple[int, ...], dtype: np.dtype) -> '_HostLeaf | _DeviceLeaf':
  cpu = jax.default_backend() == 'cpu'
  return (_HostLeaf if cpu else _DeviceLeaf)(shape, dtype)


class _HostLeaf:
  """A leaf in host memory that the CPU device takes over without a copy."""

  def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    self._array = raw[offset:offset + nbytes].view(dtype).reshape(shape)

  def write(self, row: int, piece: np.ndarray) -> None:
    """Puts rows at `row`."""
    self._array[row:row + piece.shape[0]] = piece

  def array(self) -> jax.Array:
    """Returns the leaf on the device."""
    return jax.device_put(self._array)


@functools.partial(jax.jit, donate_argnums=0)
def _write(array: jax.Array, piece: jax.Array, row: jax.Array) -> jax.Array:
  return lax.dynamic_update_slice_in_dim(array, piece, row, axis=0)


class _DeviceLeaf:
  """A leaf on an accelerator; the host holds one slice at a time."""

  def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
    self._array = jnp.zeros(shape, dtype)

  def write(self, row: int, piece: np.ndarray) -> None:
    """Puts rows at `row`."""
    self._array = jax.block_until_ready(
        _write(self._array, piece, np.int32(row)))

  def array(self) -> jax.Array:
    """Returns the leaf on the device."""
    return self._array
