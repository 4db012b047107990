"""The architecture that the header of a Gemma GGUF file describes.

Keys: github.com/ggml-org/llama.cpp `gguf-py/gguf/constants.py` and
`conversion/gemma.py`. The header of a Gemma 3 file leaves out what all of them
share; that of a Gemma 4 file tells everything but the rotary pairs, which are
in a small tensor, and whether global layers have a value projection.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import gguf

ROPE_FREQS = 'rope_freqs.weight'  # Divisors of the global frequencies.
_MOST_LAYERS = 1024  # Beyond it, a damaged header.
_STILL = 1e20  # A divisor from here on stops the rotation of its pair.


def value(file: gguf.GgufFile, key: str, kind: type[Any]) -> Any:
  """Returns a metadata value.

  Args:
    file: an open file.
    key: the whole key.
    kind: its type; an int must be positive.

  Raises:
    UsageError: if it is missing or of another type.
  """
  found = file.metadata.get(key)
  if not isinstance(found, kind) or (kind is int and found < 1):
    raise errors.UsageError(
        f'{file.source}: {key} expected {kind.__name__}, found'
        f' {str(found)[:40]!r}: the file is no complete Gemma model'
    )
  return found


def read(file: gguf.GgufFile, vocab: int) -> config_lib.ModelConfig:
  """Returns the architecture.

  Args:
    file: an open file.
    vocab: text vocabulary.

  Raises:
    UsageError: if it is no Gemma 3 or 4, or a variant that is not supported.
  """
  family = file.metadata.get('general.architecture')
  if family not in ('gemma3', 'gemma4'):
    raise errors.UsageError(
        f"{file.source}: expected the architecture 'gemma3' or 'gemma4', found"
        f' {family!r}: give a Gemma text model'
    )
  reader = _Reader(file, family)
  config = reader.gemma3(vocab) if family == 'gemma3' else reader.gemma4(vocab)
  for spec in (config.sliding, config.full):
    if config.num_heads % spec.kv_heads or spec.head_dim % 2:
      raise errors.UsageError(
          f'{file.source}: {config.num_heads} query heads, {spec.kv_heads} kv'
          f' heads of {spec.head_dim}: expected a multiple and an even size:'
          f' the file is no {family} model'
      )
  return config


def _size(config: config_lib.ModelConfig) -> tuple[Any, ...]:
  """Returns what tells the published sizes apart."""
  return (config.family, len(config.layers), config.width, config.hidden,
          config.num_heads, config.full.head_dim)


class _Reader:
  """Reads the keys of one family."""

  def __init__(self, file: gguf.GgufFile, family: str):
    self._file = file
    self._family = family

  def gemma3(self, vocab: int) -> config_lib.ModelConfig:
    """Returns the config of a Gemma 3."""
    head_dim = self._number('attention.key_length')
    self._expect('attention.value_length', head_dim)
    self._expect('rope.scaling.type', 'linear', 'linear')
    self._expect('final_logit_softcapping', 0, 0)
    self._check_common()
    kv_heads = self._number('attention.head_count_kv')
    count = self._layer_count()
    period = self._whole('attention.sliding_window_pattern', 6)
    config = config_lib.ModelConfig(
        name='gguf',
        family='gemma3',
        vocab_size=vocab,
        width=self._number('embedding_length'),
        hidden=self._number('feed_forward_length'),
        num_heads=self._number('attention.head_count'),
        layers=tuple(
            config_lib.SLIDING if (i + 1) % period else config_lib.GLOBAL
            for i in range(count)
        ),
        sliding=config_lib.AttentionSpec(
            kv_heads, head_dim, self._number('attention.sliding_window'),
            self._whole('rope.freq_base_swa', 10_000),
        ),
        full=config_lib.AttentionSpec(
            kv_heads, head_dim, None, self._whole('rope.freq_base', 1_000_000)
        ),
        query_scale_dim=head_dim,
        max_context=self._number('context_length'),
    )
    # No file names the query scale, and older converters no rotary scaling:
    # both follow from the published size.
    preset = next(
        (p for p in config_lib.PRESETS.values() if _size(p) == _size(config)),
        config,
    )
    divisor = self._whole('rope.scaling.factor', preset.full.rope_divisor)
    return dataclasses.replace(
        config,
        name=preset.name,
        query_scale_dim=preset.query_scale_dim,
        full=dataclasses.replace(config.full, rope_divisor=divisor),
    )

  def gemma4(self, vocab: int) -> config_lib.ModelConfig:
    """Returns the config of a Gemma 4."""
    count = self._layer_count()
    layers = tuple(
        config_lib.SLIDING if is_sliding else config_lib.GLOBAL
        for is_sliding in self._array('attention.sliding_window_pattern', count)
    )
    shared = self._count('attention.shared_kv_layers')
    owners = layers[:max(0, count - shared)]
    if not set(config_lib.KINDS) <= set(owners):
      raise self._refusal(
          'attention.shared_kv_layers',
          'sliding and global layers in front of the shared ones', shared
      )
    kv_heads = self._by_kind(
        'attention.head_count_kv', layers, config_lib.KINDS
    )
    # The feed-forward width may change where the sharing of keys begins.
    parts = ['own'] * len(owners) + ['shared'] * shared
    hidden = self._by_kind('feed_forward_length', parts, ('own', 'shared'))
    full_dim = self._number('attention.key_length')
    sliding_dim = self._number('attention.key_length_swa')
    self._expect('attention.value_length', full_dim)
    self._expect('attention.value_length_swa', sliding_dim)
    # Which of them rotate is a matter of the divisors below.
    self._expect('rope.dimension_count', full_dim, full_dim)
    self._expect('rope.dimension_count_swa', sliding_dim, sliding_dim)
    self._expect('rope.scaling.factor', 1, 1)
    self._check_common()
    experts = self._count('expert_count')
    config = config_lib.ModelConfig(
        name='gguf',
        family='gemma4',
        vocab_size=vocab,
        width=self._number('embedding_length'),
        hidden=hidden['own'],
        num_heads=self._number('attention.head_count'),
        layers=layers,
        sliding=config_lib.AttentionSpec(
            kv_heads[config_lib.SLIDING], sliding_dim,
            self._number('attention.sliding_window'),
            self._whole('rope.freq_base_swa', 10_000),
        ),
        full=config_lib.AttentionSpec(
            kv_heads[config_lib.GLOBAL], full_dim, None,
            self._whole('rope.freq_base', 1_000_000),
            rope_pairs=self._rope_pairs(full_dim // 2),
            value_from_key=not any(
                f'blk.{i}.attn_v.weight' in self._file.tensors
                for i, kind in enumerate(owners) if kind == config_lib.GLOBAL
            ),
        ),
        query_scale_dim=1,
        max_context=self._number('context_length'),
        norm_offset=0,
        final_softcap=(
            self._whole('final_logit_softcapping', 0)
            if self._get('final_logit_softcapping', 0) != 0 else None
        ),
        value_norm=True,
        layer_scalar=True,
        shared_layers=shared,
        shared_hidden=(
            hidden['shared']
            if hidden.get('shared', hidden['own']) != hidden['own'] else 0
        ),
        per_layer_dim=self._count('embedding_length_per_layer_input'),
        num_experts=experts,
        top_k_experts=self._number('expert_used_count') if experts else 0,
        expert_hidden=(
            self._number('expert_feed_forward_length') if experts else 0
        ),
    )
    if config.top_k_experts > config.num_experts:
      raise self._refusal('expert_used_count', f'at most {experts}',
                          config.top_k_experts)
    return config_lib.known(config)

  def _layer_count(self) -> int:
    count = self._number('block_count')
    if count > _MOST_LAYERS:
      raise self._refusal('block_count', f'at most {_MOST_LAYERS}', count)
    return count

  def _rope_pairs(self, pairs: int) -> int | None:
    """Returns how many leading pairs rotate, None for all of them."""
    info = self._file.tensors.get(ROPE_FREQS)
    if info is None or info.shape != (pairs,):
      raise errors.UsageError(
          f'{self._file.source}: tensor {ROPE_FREQS} expected shape'
          f' {[pairs]}, found {list(info.shape) if info else "none"}: convert'
          ' the model with a current converter'
      )
    divisors = self._file.rows(ROPE_FREQS, 0, 1)[0]
    moving = int(np.sum(divisors == 1))
    if not (divisors[:moving] == 1).all() or (divisors[moving:] < _STILL).any():
      raise errors.UsageError(
          f'{self._file.source}: tensor {ROPE_FREQS} expected ones and, behind'
          f' them, divisors above {_STILL:g}, found'
          f' {divisors[moving:].min():g} among them: this variant is not'
          ' supported'
      )
    return moving if moving < pairs else None

  def _check_common(self) -> None:
    eps = value(
        self._file, f'{self._family}.attention.layer_norm_rms_epsilon', float
    )
    if f'{eps:.0e}' != '1e-06':
      raise self._refusal('attention.layer_norm_rms_epsilon', '1e-06', eps)
    self._expect('attn_logit_softcapping', 0, 0)

  def _get(self, key: str, default: Any = None) -> Any:
    return self._file.metadata.get(f'{self._family}.{key}', default)

  def _number(self, key: str) -> int:
    return value(self._file, f'{self._family}.{key}', int)

  def _count(self, key: str) -> int:
    """Returns a number that may be 0 and is 0 if it is missing."""
    return self._number(key) if self._get(key, 0) != 0 else 0

  def _whole(self, key: str, default: int) -> int:
    """Returns a number that some write as a float."""
    found = self._get(key, default)
    if not isinstance(found, (int, float)) or found < 1 or found % 1:
      raise self._refusal(key, 'a whole number', found)
    return int(found)

  def _expect(self, key: str, expected: Any, default: Any = None) -> None:
    found = self._get(key, default)
    if isinstance(found, np.ndarray) or found != expected:
      raise self._refusal(key, expected, found)

  def _array(self, key: str, count: int) -> list[int]:
    """Returns one number a layer, none of them negative."""
    found = self._get(key)
    if (not isinstance(found, np.ndarray) or found.shape != (count,)
        or found.dtype.kind not in 'biu' or (found < 0).any()):
      raise self._refusal(key, f'an array of {count} numbers', found)
    return found.tolist()

  def _by_kind(
      self, key: str, labels: Sequence[str], kinds: Sequence[str]
  ) -> dict[str, int]:
    """Returns label -> value of a key with one value, or one a layer."""
    if not isinstance(self._get(key), np.ndarray):
      return dict.fromkeys(kinds, self._number(key))
    out: dict[str, int] = {}
    for i, (label, found) in enumerate(
        zip(labels, self._array(key, len(labels)))
    ):
      if found < 1 or out.setdefault(label, found) != found:
        raise self._refusal(
            f'{key}[{i}]', out[label] if found else 'at least 1', found
        )
    return out

  def _refusal(self, key: str, expected: Any, found: Any) -> errors.UsageError:
    return errors.UsageError(
        f'{self._file.source}: {self._family}.{key} expected {expected}, found'
        f' {str(found)[:40]}: this variant is not supported'
    )
