"""Google DeepMind's Gemma checkpoints: Orbax trees, read slice by slice.

Names and shapes: google-deepmind/gemma `gm/nn`, `gm/nn/gemma4`; the layouts of
the stored tree: its `gm/ckpts`. One leaf is written in up to four ways:

  nested    layer_7/attn/q_einsum/w
  flat      'transformer/layer_7/attn/q_einsum' holds w
  stacked   'transformer/stacked_layers/attention_type_1/attn/q_einsum' holds w
            with a leading axis: slice 1 of a pattern of 6 is layer 7
  kauldron  nested, under params, beside the optimiser's state

and all of them are `layer_7/attn/q_einsum` here. There is no config file: the
sizes tell which published model it is.

A leaf is read by whole storage chunks. Beside what is yielded, the memory
needed is that of the chunks one slice touches: a leaf that was saved as one
compressed chunk, as Orbax does unless told otherwise, is decoded whole.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import time
from typing import Any

import ml_dtypes
import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import huggingface
from kvgraft_jax.checkpoints import orbax_arrays
from kvgraft_jax.checkpoints import orbax_names as names_lib
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints import tokenizer_files
from kvgraft_jax.checkpoints import tree

_METADATA = '_METADATA'
_KAULDRON_ITEM = 'default'
_CHUNK_BYTES = 16 << 20  # Of a chunk that `write` makes.
_DTYPES = ('bfloat16', 'float32')
# Encoders, and what takes their output into the text model.
_MULTIMODAL = re.compile(
    r'(vision_encoder|audio_encoder|SigLiPFromPatches_0)/|embedder/(mm|audio)_')
_FOREIGN = (
    (re.compile('lora', re.IGNORECASE), 'an adapter',
     'merge it into the weights first'),
    (re.compile('IntEinsum|Quantized'),
     'a quantised or quantisation-aware weight',
     'give the bfloat16 checkpoint'),
)
_STACKED = re.compile(r'stacked_layers/attention_type_(\d+)/')
_LAYER = re.compile(r'layer_(\d+)/')


@dataclasses.dataclass(frozen=True)
class _Stored:
  """A leaf on disk.

  Attributes:
    name: of the array.
    shape: without the axis of a stacked leaf.
    dtype: name.
    slice: of a stacked leaf, or None.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  slice: int | None = None


def is_orbax(path: str | os.PathLike[str]) -> bool:
  """Returns whether `path` is a directory that Orbax wrote a tree to."""
  return _item(pathlib.Path(path)) is not None


def _item(path: pathlib.Path) -> pathlib.Path | None:
  """Returns the directory that holds the tree, or None."""
  for folder in (path, path / _KAULDRON_ITEM):
    if (folder / _METADATA).is_file():
      return folder
  return None


class OrbaxDirectory:
  """An Orbax checkpoint that has been accepted as a Gemma model.

  Attributes:
    source: name for messages.
    config: the architecture: that of a preset.
    slots: canonical name -> where it goes in the parameter tree.
    template: of a chat template in the directory, or None.
    files: everything in the directory.
    skipped: leaves that the text model does not use.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Checks metadata, names, shapes and files; reads no weights.

    Args:
      path: directory of the tree, or of a Kauldron step.

    Raises:
      NotFoundError: if there is no Orbax tree.
      UsageError: if it is not a Gemma 3 or 4 model that is known by its sizes,
        or a leaf is missing, surplus, misshapen, an adapter or quantised.
      DamageError: if metadata or data files are missing or cut off.
    """
    self.source = os.fspath(path)
    folder = _item(pathlib.Path(path))
    if folder is None:
      raise errors.NotFoundError(
          f'{self.source}: expected an Orbax checkpoint, found no {_METADATA}'
          ' file: give the directory that holds it')
    self._folder = folder
    self.files: Sequence[str | os.PathLike[str]] = sorted(
        p for p in folder.rglob('*') if p.is_file())
    self.skipped: list[str] = []
    self.template = huggingface.read_template(pathlib.Path(path))
    stored = self._read_tree()
    self.config = self._match(stored)
    self.slots = tree.slots(self.config)
    self._places = self._check(stored)

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer | None:
    """From a file in the directory or beside it, read when asked for."""
    path = pathlib.Path(os.path.abspath(self.source))
    for folder in (path, path.parent):
      own = folder / f'tokenizer_{self.config.family}.model'
      if own.is_file():
        return tokenizer_files.SentencePieceTokenizer(
            own.read_bytes(), source=str(own))
      found = tokenizer_files.load(folder)
      if found is not None:
        return found
    return None

  def _read_tree(self) -> dict[str, _Stored]:
    """Returns leaf -> array, of every leaf of the text model."""
    try:
      metadata = json.loads((self._folder / _METADATA).read_bytes())
      paths = [
          tuple(str(k['key']) for k in entry['key_metadata'])
          for entry in metadata['tree_metadata'].values()
          if not entry['value_metadata'].get('skip_deserialize')
      ]
      zarr3 = bool(metadata.get('use_zarr3'))
      whole = bool(metadata.get('store_array_data_equal_to_fill_value'))
    except (OSError, ValueError, KeyError, TypeError, AttributeError,
            RecursionError) as e:
      raise errors.DamageError(
          f'{self.source}: expected the metadata of an Orbax tree in'
          f' {_METADATA}, found {type(e).__name__}: get the checkpoint again'
      ) from None
    # A trainer's state: the weights are one part of it.
    training = any(keys[:1] == ('params',) for keys in paths)
    wanted = {}
    for keys in paths:
      path = '/'.join(keys[1:] if training else keys)
      path = path.removeprefix('transformer/')
      if (training and keys[0] != 'params') or _MULTIMODAL.match(path):
        self.skipped.append('/'.join(keys))
        continue
      for pattern, what, advice in _FOREIGN:
        if pattern.search(path):
          raise errors.UsageError(
              f'{self.source}: leaf {"/".join(keys)} is {what}: expected a'
              f' plain Gemma model: {advice}')
      wanted['.'.join(keys)] = path
    self._arrays = orbax_arrays.Arrays(
        self._folder, self.source, zarr3=zarr3, whole=whole)
    return self._expand(wanted)

  def _expand(self, wanted: Mapping[str, str]) -> dict[str, _Stored]:
    """Returns leaf -> array, from array name -> path; unstacks."""
    arrays = self._arrays.describe(wanted)
    kinds = [int(m[1]) for m in map(_STACKED.match, wanted.values()) if m]
    pattern = 1 + max(kinds, default=0)
    stored: dict[str, _Stored] = {}

    def add(path: str, leaf: _Stored) -> None:
      if names_lib.key(path) in stored:
        raise errors.UsageError(
            f'{self.source}: leaf {path} is stored twice, expected once: this'
            ' is no Gemma checkpoint')
      stored[names_lib.key(path)] = leaf

    for name, path in wanted.items():
      shape, dtype = arrays[name]
      match = _STACKED.match(path)
      if match is None:
        add(path, _Stored(name, shape, dtype))
        continue
      for i in range(shape[0] if shape else 0):
        layer = i * pattern + int(match[1])
        add(f'layer_{layer}/{path[match.end():]}',
            _Stored(name, shape[1:], dtype, i))
    return stored

  def _match(self, stored: Mapping[str, _Stored]) -> config_lib.ModelConfig:
    """Returns the preset that has the sizes found."""
    found = self._sizes(stored)
    presets = (*config_lib.PRESETS.values(), *config_lib.TINY_PRESETS.values())
    matches = [c for c in presets if _preset_sizes(c) == found]
    if len(matches) != 1:
      sizes = ', '.join(f'{name} {value}' for name, value in found.items())
      names = ' and '.join(c.name for c in matches) or 'none'
      raise errors.UsageError(
          f'{self.source}: expected the sizes of one known model, found those'
          f' of {names}: {sizes}: give a published Gemma 3 or 4 checkpoint')
    return matches[0]

  def _sizes(self, stored: Mapping[str, _Stored]) -> dict[str, Any]:
    def shape(leaf: str, rank: int) -> tuple[int, ...]:
      value = stored.get(leaf)
      if value is None or len(value.shape) != rank:
        what = 'none' if value is None else f'shape {list(value.shape)}'
        raise errors.UsageError(
            f'{self.source}: leaf {leaf} expected with {rank} axes, found'
            f' {what}: this is no Gemma 3 or 4 text model')
      return value.shape

    width = shape('embedder/input_embedding', 2)[1]
    if 'layer_0/attn/_query_norm/scale' in stored:
      family = 'gemma3'
    elif 'layer_0/skip_scale' in stored:
      family = 'gemma4'
    else:
      raise errors.UsageError(
          f'{self.source}: expected a Gemma 3 or Gemma 4 model, found neither'
          ' the query norm of the one nor the layer scale of the other: this'
          ' architecture is not supported')
    heads, _, head_dim = shape('layer_0/attn/q_einsum', 3)
    experts = 'layer_0/mlp/router_logits' in stored
    gating = shape(f'layer_0/mlp{2 if experts else ""}/gating_einsum', 3)
    layers = {int(m[1]) for m in map(_LAYER.match, stored) if m}
    return {
        'family': family,
        'layers': 1 + max(layers),
        'width': width,
        'hidden': gating[2] if gating[1] == width else gating[1],
        'heads': heads,
        'head size': head_dim,
        'experts':
            shape('layer_0/mlp/router_logits', 2)[1] if experts else 0,
        'per-layer embedding':
            shape('embedder/per_layer_projection_norm/scale', 1)[0]
            if 'embedder/per_layer_projection_norm/scale' in stored else 0,
    }

  def _check(
      self, stored: Mapping[str, _Stored]
  ) -> dict[str, tuple[names_lib.Part, _Stored]]:
    """Returns canonical name -> its place and its array."""
    parts = names_lib.parts(self.config)
    known = {names_lib.key(p.leaf) for p in parts.values()}
    needed = {names_lib.key(parts[name].leaf) for name in self.slots}
    for what, these in (
        ('is missing', sorted(needed - set(stored))),
        ('is not expected', sorted(set(stored) - known)),
    ):
      if these:
        raise errors.UsageError(
            f'{self.source}: leaf {these[0]} {what} ({len(these)} in all):'
            f' expected the {len(known)} leaves of {self.config.name}: give a'
            ' whole checkpoint of that model')
    places = {}
    for name, part in parts.items():
      leaf = stored.get(names_lib.key(part.leaf))
      if leaf is None:
        continue  # Keys of a layer that has none of its own.
      if leaf.shape != part.shape and name.endswith(
          ('mlp.gate_proj.weight', 'mlp.up_proj.weight')):
        two, f, d = part.shape
        # The other form of the same layer.
        part = dataclasses.replace(part, shape=(two, d, f), axes=(1, 0))
      if leaf.shape != part.shape:
        shape = parts[name].shape
        raise errors.UsageError(
            f'{self.source}: leaf {names_lib.key(part.leaf)} expected shape'
            f' {list(shape)}, found {list(leaf.shape)}: this is not'
            f' {self.config.name}')
      if leaf.dtype not in _DTYPES:
        raise errors.UsageError(
            f'{self.source}: leaf {names_lib.key(part.leaf)} expected'
            f' {" or ".join(_DTYPES)}, found {leaf.dtype}: give a checkpoint'
            ' that is not quantised')
      if name in self.slots:
        places[name] = part, leaf
    self.skipped.extend(sorted(set(stored) - needed))
    return places

  def value_dtype(self, name: str) -> str:
    """Returns 'bfloat16' or 'float32': the dtype `pieces` yields."""
    return self._places[name][1].dtype

  def pieces(self, name: str) -> Iterator[np.ndarray]:
    """Yields a canonical tensor in slices of its first axis, in order.

    Args:
      name: canonical name.

    Yields:
      bfloat16 or float32 [rows, ...]; of a norm, w.

    Raises:
      DamageError: if the data cannot be read or decoded.
    """
    part, leaf = self._places[name]
    shape = self.slots[name].shape
    stacked = () if leaf.slice is None else (leaf.slice,)
    # Of the leaf's axis that comes first: a row of it is whole rows of ours.
    rows = shape[0] // part.view_shape[0]
    for piece in self._arrays.slices(
        leaf.name, stacked + part.index, part.order,
        max(1, source_lib.piece_rows(shape) // rows)):
      yield piece.reshape(-1, *shape[1:])


def _preset_sizes(config: config_lib.ModelConfig) -> dict[str, Any]:
  """Returns what tells models apart, as `OrbaxDirectory` finds it."""
  return {
      'family': config.family,
      'layers': len(config.layers),
      'width': config.width,
      'hidden': config.layer_hidden(0),
      'heads': config.num_heads,
      'head size': config.spec(config.layers[0]).head_dim,
      'experts': config.num_experts,
      'per-layer embedding': config.per_layer_dim,
  }


class _Leaf(np.ndarray):
  """Values that nobody changes while they are written."""

  def __deepcopy__(self, memo: Any) -> '_Leaf':
    # Orbax copies every array first, in case its owner goes on changing it.
    return self


def write(
    source: source_lib.Source, folder: str | os.PathLike[str]
) -> None:
  """Writes a checkpoint's weights as a nested tree, in the source's dtypes.

  Orbax takes a tree as a whole, so all weights are in host memory, and up to
  as much again while they are compressed. Chunks are small enough to be read
  slice by slice.

  Args:
    source: an accepted checkpoint.
    folder: a directory that does not exist yet.

  Raises:
    UsageError: if the directory exists.
    MissingDependencyError: if the package orbax-checkpoint is missing.
    StorageError: if it cannot be written.
    DamageError: if the source cannot be read to its end.
  """
  try:
    from orbax import checkpoint as ocp  # pylint: disable=g-import-not-at-top
  except ImportError:
    raise errors.MissingDependencyError(
        f'{folder}: the package that writes Orbax checkpoints is not'
        " installed: pip install 'orbax-checkpoint'") from None
  folder = os.path.abspath(folder)
  try:
    # Orbax's threads wait for minutes where it cannot make its directory.
    os.makedirs(folder)
    os.rmdir(folder)
  except FileExistsError:
    raise errors.UsageError(
        f'{folder}: expected a directory that does not exist yet, found one:'
        ' name another') from None
  except OSError as e:
    raise errors.StorageError(
        f'{folder}: cannot make the directory: {e.strerror}: permit writing'
        ' there or name another directory') from None
  flat = _leaves(source)
  chunks = ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
  done = False
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(
          folder, tree.nest(flat),
          save_args=tree.nest(dict.fromkeys(flat, chunks)))
    done = True
  except (OSError, ValueError) as e:
    reason = str(e).split(' [')[0][:300]
    raise errors.StorageError(
        f'{folder}: cannot write the checkpoint: {reason}: free space or name'
        ' another directory') from None
  finally:
    if not done:
      _remove_unfinished(folder)


def _remove_unfinished(folder: str) -> None:
  """Removes what Orbax leaves when it fails; its writers go on for a while."""
  left = f'{folder}.orbax-checkpoint-tmp'
  quiet = 0
  for _ in range(50):
    shutil.rmtree(left, ignore_errors=True)
    time.sleep(0.1)
    quiet = 0 if os.path.exists(left) else quiet + 1
    if quiet == 3:
      return


def _leaves(source: source_lib.Source) -> dict[str, np.ndarray]:
  """Returns path in the nested layout -> values."""
  parts = names_lib.parts(source.config)
  kinds: dict[str, set[str]] = {}
  for name in source.slots:
    kinds.setdefault(parts[name].leaf, set()).add(source.value_dtype(name))
  flat: dict[str, np.ndarray] = {}
  for name, part in parts.items():
    if part.leaf not in flat:
      # Keys of a layer that has none of its own are stored but not used; a
      # leaf that joins tensors of two dtypes takes the wider.
      narrow = kinds.get(part.leaf, {'bfloat16'}) == {'bfloat16'}
      flat[part.leaf] = np.zeros(
          part.shape, ml_dtypes.bfloat16 if narrow else np.float32
      ).view(_Leaf)
    if name not in source.slots:
      continue
    shape = source.slots[name].shape
    view = flat[part.leaf][part.index].transpose(part.order)
    rows = view
    if view.flags.c_contiguous:
      rows = view.reshape(shape)
    else:
      rows = np.empty(shape, view.dtype)
    start = 0
    for piece in source.pieces(name):
      rows[start:start + piece.shape[0]] = piece
      start += piece.shape[0]
    if not view.flags.c_contiguous:
      view[...] = rows.reshape(part.view_shape)
  return flat
