"""A Hugging Face directory as a source: config.json and safetensors files.

Everything is accepted or refused from config, index and headers; weights are
then read slice by slice, never mapped, so that memory holds one slice.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import functools
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import hf_config
from kvgraft_jax.checkpoints import safetensors
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints import tokenizer_files
from kvgraft_jax.checkpoints import tree

CONFIG = 'config.json'
WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
_ADAPTERS = ('adapter_config.json', 'adapter_model.safetensors')
# What the text model's names begin with, in the releases' order.
PREFIXES = ('model.', 'language_model.model.', 'model.language_model.')
_HEADS = ('lm_head.weight', 'language_model.lm_head.weight')
# Parts for images and sound, with or without 'model.' in front.
_TOWERS = (
    'audio_tower', 'embed_audio', 'embed_vision', 'multi_modal_projector',
    'vision_embedder', 'vision_tower',
)
# Published files have these in layers that share keys; nothing reads them.
_UNUSED_IF_SHARED = ('k_proj.', 'v_proj.', 'k_norm.', 'v_norm.')
_TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
# What a copy of the text model keeps as it is.
_COMPANIONS = (
    'added_tokens.json', 'generation_config.json', 'special_tokens_map.json',
    'tokenizer.json', 'tokenizer.model', 'tokenizer_config.json',
)
_QUANTISED = ('I', 'U', 'F8_', 'F6_', 'F4')
_DTYPES = {
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F16': np.dtype('<f2'),
    'F32': np.dtype('<f4'),
}


def config_of(folder: str | os.PathLike[str]) -> config_lib.ModelConfig | None:
  """Returns the architecture of a directory's config.json; None without one.

  Raises:
    UsageError: if it is no unquantised Gemma 3 or 4.
    DamageError: if the file is damaged.
  """
  folder = pathlib.Path(folder)
  if not (folder / CONFIG).is_file():
    return None
  return _read_config(folder)[1].config


def _read_config(
    folder: pathlib.Path,
) -> tuple[dict[str, Any], hf_config.HfConfig]:
  """Returns config.json and what it says; named as the directory is."""
  values = _read_object(folder / CONFIG)
  name = pathlib.Path(os.path.abspath(folder)).name
  return values, hf_config.from_json(values, name, str(folder / CONFIG))


class HfDirectory:
  """A Hugging Face directory whose headers have been accepted.

  Attributes:
    source: the directory.
    config: the architecture.
    slots: canonical name -> where it goes in the parameter tree.
    template: text of its chat template, or None.
    files: config, index and safetensors files.
    skipped: tensors of the files that the text model has no use for, sorted.
    token_ids: the config's bos, eos and pad ids, as far as it has them.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    """Checks config, index and headers.

    Args:
      folder: the directory.

    Raises:
      UsageError: if it is no unquantised Gemma 3 or 4, or a tensor is missing,
        surplus, misshapen or of another dtype.
      DamageError: if a file is damaged.
    """
    self.source = os.fspath(folder)
    self._folder = pathlib.Path(folder)
    self._refuse_adapters()
    values, parsed = _read_config(self._folder)
    self.config = parsed.config
    text = values.get('text_config')
    self.token_ids = {
        key: part[key] for key in _TOKEN_IDS for part in (text, values)
        if isinstance(part, dict) and part.get(key) is not None
    }
    self.slots = tree.slots(self.config)
    self._paths, self._entries = self._read_headers()
    self._names, self.skipped = self._assign()
    self._check_shapes(parsed.rows)
    self._check_dtypes()
    self.template = read_template(self._folder)
    index = [self._folder / INDEX] if self._indexed() else []
    self.files = [
        self._folder / CONFIG, *index, *sorted(set(self._paths.values()))
    ]

  @functools.cached_property
  def tokenizer(self) -> tokenizer_lib.Tokenizer | None:
    """The directory's own, read when it is first asked for; or None."""
    return tokenizer_files.load(self._folder)

  def companions(self) -> list[pathlib.Path]:
    """Returns the files of tokenizer and generation that are there."""
    paths = [self._folder / name for name in _COMPANIONS]
    return [path for path in paths if path.is_file()]

  def value_dtype(self, name: str) -> str:
    """Returns 'bfloat16' or 'float32': the dtype `pieces` yields."""
    code = self._entries[self._names[name]].dtype
    return 'bfloat16' if code == 'BF16' else 'float32'

  def pieces(self, name: str) -> Iterator[np.ndarray]:
    """Yields a canonical tensor in slices of its first axis, in order.

    Args:
      name: canonical name.

    Yields:
      [rows, ...] of `value_dtype`; norm weights as the file has them.

    Raises:
      NotFoundError: if the file cannot be read any more.
      DamageError: if it has become shorter.
    """
    theirs, shape = self._names[name], self.slots[name].shape
    entry, path = self._entries[theirs], self._paths[theirs]
    dtype, step = _DTYPES[entry.dtype], source_lib.piece_rows(shape)
    try:
      with open(path, 'rb', buffering=0) as f:
        f.seek(entry.start)
        for start in range(0, shape[0], step):
          rows = min(step, shape[0] - start)
          piece = np.empty((rows, *shape[1:]), dtype)
          left = piece.reshape(-1).view(np.uint8).data
          while left:
            count = f.readinto(left)
            if not count:
              raise errors.DamageError(
                  f'{path}: tensor {theirs} expected {len(left)} bytes more,'
                  ' found the end of the file: fetch it again')
            left = left[count:]
          yield piece.astype(np.float32) if entry.dtype == 'F16' else piece
    except OSError as e:
      raise _unreadable(path, e) from None

  def _refuse_adapters(self) -> None:
    for name in _ADAPTERS:
      if (self._folder / name).exists():
        raise errors.UsageError(
            f'{self._folder / name}: adapters (LoRA) are not supported yet:'
            ' merge it into the model and give that directory')

  def _indexed(self) -> bool:
    return not (self._folder / WEIGHTS).exists()

  def _read_headers(
      self,
  ) -> tuple[dict[str, pathlib.Path], dict[str, safetensors.Entry]]:
    """Returns name -> file and name -> Entry of all tensors."""
    if not self._indexed():
      path = self._folder / WEIGHTS
      entries = safetensors.read_header(path)
      return dict.fromkeys(entries, path), entries
    index = self._folder / INDEX
    if not index.exists():
      raise self._no_weights()
    files = _read_object(index).get('weight_map')
    if not isinstance(files, dict) or not all(
        isinstance(v, str) and v == os.path.basename(v) and v
        for v in files.values()):
      raise errors.DamageError(
          f'{index}: expected weight_map with a file name for each tensor,'
          f' found {files!r:.80}: fetch it again')
    paths: dict[str, pathlib.Path] = {}
    entries = {}
    for name in sorted(set(files.values())):
      path = self._folder / name
      if not os.path.isfile(path):
        raise errors.NotFoundError(
            f'{index}: names {name:.80}, found no such file beside it: fetch'
            ' the whole checkpoint')
      found = safetensors.read_header(path)
      twice = sorted(set(found) & set(entries))
      if twice:
        raise errors.DamageError(
            f'{path}: tensor {twice[0]} expected in one file, found it in'
            f' {paths[twice[0]].name} too: fetch the checkpoint again')
      entries |= found
      paths |= dict.fromkeys(found, path)
    for name in sorted(set(files) | set(paths)):
      found_in = paths[name].name if name in paths else 'no file'
      if files.get(name) != found_in:
        raise errors.DamageError(
            f'{index}: tensor {name} expected in {files.get(name, "no file")},'
            f' found in {found_in}: fetch the checkpoint again')
    return paths, entries

  def _no_weights(self) -> errors.UsageError:
    pickled = sorted(
        p.name for p in self._folder.glob('*.bin')) + sorted(
            p.name for p in self._folder.glob('*.pt*'))
    if pickled:
      return errors.UsageError(
          f'{self._folder / pickled[0]}: expected {WEIGHTS} or {INDEX}, found'
          ' pickled weights, which can run code and are not read: convert them'
          ' to safetensors')
    return errors.NotFoundError(
        f'{self._folder}: expected {WEIGHTS} or {INDEX} beside {CONFIG}, found'
        ' neither: fetch the whole checkpoint')

  def _assign(self) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns canonical name -> name in the files, and what is skipped."""
    prefix = self._prefix()
    names, skipped, surplus = {}, [], []
    for theirs in sorted(self._entries):
      ours = theirs.removeprefix(prefix)
      if ours != theirs and ours in self.slots:
        names[ours] = theirs
      elif self._is_unused(theirs, ours):
        skipped.append(theirs)
      else:
        surplus.append(theirs)
    missing = [prefix + n for n in sorted(set(self.slots) - set(names))]
    for what, these in (('is missing', missing), ('is not expected', surplus)):
      if these:
        raise errors.UsageError(
            f'{self.source}: tensor {these[0]} {what} ({len(these)} in all):'
            f' expected the {len(self.slots)} tensors of a'
            f' {len(self.config.layers)}-layer {self.config.family} model as'
            f' {CONFIG} describes it: fetch the whole checkpoint')
    return names, tuple(skipped)

  def _prefix(self) -> str:
    """Returns what the names of the text model begin with."""
    found = [p for p in PREFIXES if f'{p}embed_tokens.weight' in self._entries]
    if len(found) != 1:
      raise errors.UsageError(
          f'{self.source}: tensor embed_tokens.weight expected once behind'
          f' {" or ".join(PREFIXES)}, found it {len(found)} times: give a'
          ' Gemma 3 or Gemma 4 checkpoint in the Hugging Face layout')
    return found[0]

  def _is_unused(self, theirs: str, ours: str) -> bool:
    tower = theirs.removeprefix('model.').partition('.')[0]
    if tower in _TOWERS or theirs in _HEADS:
      return True  # The head is tied: the config says so.
    part, _, rest = ours.partition('.self_attn.')
    shared = range(self.config.first_shared, len(self.config.layers))
    return (
        part in {f'layers.{i}' for i in shared}
        and rest.startswith(_UNUSED_IF_SHARED))

  def _check_shapes(self, rows: Mapping[str, int]) -> None:
    for name, theirs in self._names.items():
      shape = self.slots[name].shape
      shape = (rows.get(name, shape[0]), *shape[1:])
      found = self._entries[theirs].shape
      if found != shape:
        raise errors.UsageError(
            f'{self._paths[theirs]}: tensor {theirs} expected shape'
            f' {list(shape)}, found {list(found)}: weights and {CONFIG} are not'
            ' of one model')

  def _check_dtypes(self) -> None:
    for theirs in self._names.values():
      found = self._entries[theirs].dtype
      where = f'{self._paths[theirs]}: tensor {theirs}'
      if found.startswith(_QUANTISED):
        raise hf_config.quantised(f'{where} is {found}')
      if found not in _DTYPES:
        raise errors.UsageError(
            f'{where} expected {", ".join(_DTYPES)}, found {found}: store the'
            ' weights in one of these')


def read_template(folder: pathlib.Path) -> str | None:
  """Returns the text of a directory's chat template, or None.

  Args:
    folder: with chat_template.jinja, chat_template.json or a 'chat_template'
      in tokenizer_config.json; the first of these that is there counts.

  Raises:
    NotFoundError: if the file cannot be read.
    DamageError: if it is damaged.
  """
  path = folder / 'chat_template.jinja'
  if path.exists():
    try:
      return path.read_bytes().decode('utf-8')
    except OSError as e:
      raise _unreadable(path, e) from None
    except UnicodeDecodeError as e:
      raise errors.DamageError(
          f'{path}: expected UTF-8, found other bytes ({e}): fetch it again'
      ) from None
  for name in ('chat_template.json', 'tokenizer_config.json'):
    path = folder / name
    value = _read_object(path).get('chat_template') if path.exists() else None
    if isinstance(value, list):
      value = next(
          (v.get('template') for v in value
           if isinstance(v, dict) and v.get('name') == 'default'), None)
    if isinstance(value, str):
      return value
  return None


def _read_object(path: pathlib.Path) -> dict[str, Any]:
  """Returns a JSON file that holds an object, each key once."""
  try:
    value = safetensors.strict_json(path.read_bytes())
    if not isinstance(value, dict):
      raise ValueError(f'{type(value).__name__} instead of an object')
    return value
  except OSError as e:
    raise _unreadable(path, e) from None
  except ValueError as e:
    raise errors.DamageError(
        f'{path}: expected a JSON object, found damage ({e}): fetch it again'
    ) from None


def _unreadable(path: pathlib.Path, error: OSError) -> errors.NotFoundError:
  return errors.NotFoundError(
      f'{path}: cannot read the file: {error.strerror}: fetch it again')
