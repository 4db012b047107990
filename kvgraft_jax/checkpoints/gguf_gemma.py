"""What a Gemma 3 GGUF file says: config, tokenizer, canonical tensors."""

from collections.abc import Iterator
import dataclasses
from typing import Any

import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import tree

_LAYER_NAMES = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'attn_q_norm': 'self_attn.q_norm',
    'attn_k_norm': 'self_attn.k_norm',
    'post_attention_norm': 'post_attention_layernorm',
    'ffn_norm': 'pre_feedforward_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
    'post_ffw_norm': 'post_feedforward_layernorm',
}
_PIECE_VALUES = 1 << 23  # float32 values dequantised at once: 32 MiB.


def _size(config: config_lib.ModelConfig) -> tuple[int, ...]:
  """Returns what tells the published sizes apart."""
  return (len(config.layers), config.width, config.hidden, config.num_heads,
          config.full.head_dim)


class GemmaGguf:
  """A GGUF file whose header has been accepted as a Gemma 3 model.

  Attributes:
    source: name for messages.
    config: the architecture.
    tokenizer: from the file's vocabulary.
    slots: canonical name -> where it goes in the parameter tree.
    template_fingerprint: of the file's chat template, or 'none'.
  """

  def __init__(self, file: gguf.GgufFile):
    """Checks the header.

    Args:
      file: an open file.

    Raises:
      UsageError: if it is another architecture, a value is missing or a tensor
        is missing, surplus or misshapen.
    """
    self.source = file.source
    self._file = file
    architecture = file.metadata.get('general.architecture')
    if architecture != 'gemma3':
      raise errors.UsageError(
          f"{self.source}: expected the architecture 'gemma3', found"
          f' {architecture!r}: give a Gemma 3 text model'
      )
    tokens = self._get('tokenizer.ggml.tokens', list)
    kinds = self._get('tokenizer.ggml.token_type', np.ndarray)
    self._rows = len(tokens)
    # Larger models pad the vocabulary with rows that are never text.
    used = np.flatnonzero(kinds != tokenizer_lib.UNUSED)
    vocab = int(used[-1]) + 1 if used.size else self._rows
    self.config = self._read_config(vocab)
    self.tokenizer = self._read_tokenizer(vocab)
    template = file.metadata.get('tokenizer.chat_template')
    self.template_fingerprint = (
        hashing.sha256('kvgraft.template', template.encode('utf-8'))
        if isinstance(template, str) else 'none'
    )
    self.slots = tree.slots(self.config)
    self._names = self._check_tensors()

  def _get(self, key: str, kind: type[Any]) -> Any:
    """Returns a metadata value; integers must be positive."""
    value = self._file.metadata.get(key)
    if not isinstance(value, kind) or (kind is int and value < 1):
      raise errors.UsageError(
          f'{self.source}: {key} expected {kind.__name__}, found'
          f' {str(value)[:40]!r}: the file is no complete Gemma 3 model'
      )
    return value

  def _read_config(self, vocab: int) -> config_lib.ModelConfig:
    def number(key: str) -> int:
      return self._get(f'gemma3.{key}', int)

    meta = self._file.metadata
    head_dim = number('attention.key_length')
    eps = self._get('gemma3.attention.layer_norm_rms_epsilon', float)
    for what, expected, found in (
        ('attention.value_length', head_dim,
         number('attention.value_length')),
        ('attention.layer_norm_rms_epsilon', '1e-06', f'{eps:.0e}'),
        ('rope.scaling.type', 'linear',
         meta.get('gemma3.rope.scaling.type', 'linear')),
        ('final_logit_softcapping', 'none',
         meta.get('gemma3.final_logit_softcapping') or 'none'),
    ):
      if expected != found:
        raise errors.UsageError(
            f'{self.source}: gemma3.{what} expected {expected}, found {found}:'
            ' this variant is not supported'
        )
    layers = number('block_count')
    kv_heads = number('attention.head_count_kv')
    theta = self._whole('rope.freq_base', meta.get('gemma3.rope.freq_base',
                                                   1e6))
    config = config_lib.ModelConfig(
        name='',
        family='gemma3',
        vocab_size=vocab,
        width=number('embedding_length'),
        hidden=number('feed_forward_length'),
        num_heads=number('attention.head_count'),
        # The file names neither the pattern nor the local rotary base.
        layers=tuple(
            config_lib.SLIDING if (i + 1) % 6 else config_lib.GLOBAL
            for i in range(layers)
        ),
        sliding=config_lib.AttentionSpec(
            kv_heads, head_dim, number('attention.sliding_window'), 10_000
        ),
        full=config_lib.AttentionSpec(kv_heads, head_dim, None, theta),
        query_scale_dim=head_dim,
        max_context=number('context_length'),
    )
    if config.num_heads % kv_heads or head_dim % 2:
      raise errors.UsageError(
          f'{self.source}: {config.num_heads} query heads, {kv_heads} kv heads'
          f' of {head_dim}: expected a multiple and an even size: the file is'
          ' no Gemma 3 model'
      )
    # Nor the query scale, and older converters no rotary scaling: both follow
    # from the published size.
    preset = next(
        (p for p in config_lib.PRESETS.values() if _size(p) == _size(config)),
        None,
    )
    factor = meta.get('gemma3.rope.scaling.factor')
    if factor is not None:
      divisor = self._whole('rope.scaling.factor', factor)
    else:
      divisor = preset.full.rope_divisor if preset else 1
    return dataclasses.replace(
        config,
        name=preset.name if preset else 'gguf',
        query_scale_dim=preset.query_scale_dim if preset else head_dim,
        full=dataclasses.replace(config.full, rope_divisor=divisor),
    )

  def _whole(self, key: str, value: float) -> int:
    if not isinstance(value, (int, float)) or value < 1 or value % 1:
      raise errors.UsageError(
          f'{self.source}: gemma3.{key} expected a whole number, found'
          f' {value!r}: this variant is not supported'
      )
    return int(value)

  def _read_tokenizer(self, vocab: int) -> tokenizer_lib.SpmTokenizer:
    meta = self._file.metadata
    model = self._get('tokenizer.ggml.model', str)
    if model != 'llama':
      raise errors.UsageError(
          f"{self.source}: expected the tokenizer model 'llama'"
          f' (SentencePiece), found {model!r}: this variant is not supported'
      )
    tokens = meta['tokenizer.ggml.tokens'][:vocab]
    kinds = meta['tokenizer.ggml.token_type'][:vocab]

    def token(name: str, default: int = -1) -> int:
      value = meta.get(f'tokenizer.ggml.{name}_token_id', default)
      return value if isinstance(value, int) else -1

    eos = {token('eos'), token('eot')} - {-1}
    # Instruction-tuned files name the end of a turn and leave this one out.
    eos |= {i for i, p in enumerate(tokens[:256]) if p == '<eos>'}
    return tokenizer_lib.SpmTokenizer.from_pieces(
        tokens,
        self._get('tokenizer.ggml.scores', np.ndarray)[:vocab],
        kinds,
        bos_id=token('bos', 2),
        eos_ids=sorted(eos),
        unk_id=token('unknown', 3),
    )

  def _check_tensors(self) -> dict[str, str]:
    """Returns canonical name -> name in the file."""
    names = {'embed_tokens.weight': 'token_embd.weight',
             'norm.weight': 'output_norm.weight'}
    for i in range(len(self.config.layers)):
      for theirs, ours in _LAYER_NAMES.items():
        names[f'layers.{i}.{ours}.weight'] = f'blk.{i}.{theirs}.weight'
    found = self._file.tensors
    missing = [n for n in names.values() if n not in found]
    surplus = sorted(set(found) - set(names.values()))
    for what, these in (('is missing', missing), ('is not expected', surplus)):
      if these:
        raise errors.UsageError(
            f'{self.source}: tensor {these[0]} {what} ({len(these)} in all):'
            f' expected the {len(names)} tensors of a'
            f' {len(self.config.layers)}-layer Gemma 3: use a file of that'
            ' architecture'
        )
    for name, slot in self.slots.items():
      shape = slot.shape
      if name == 'embed_tokens.weight':
        shape = (self._rows,) + shape[1:]
      if found[names[name]].shape != shape:
        raise errors.UsageError(
            f'{self.source}: tensor {names[name]} expected shape'
            f' {list(shape)}, found {list(found[names[name]].shape)}: the file'
            ' contradicts its own header'
        )
    return names

  def pieces(self, name: str) -> Iterator[np.ndarray]:
    """Yields a canonical tensor from its first row to its last.

    Args:
      name: canonical name.

    Yields:
      float32 [rows, in] of a matrix; [D] of a norm, as w.
    """
    slot = self.slots[name]
    if slot.is_norm:
      # These files store 1 + w.
      yield self._file.rows(self._names[name], 0, 1)[0] - np.float32(1)
      return
    rows, width = slot.shape
    step = max(1, _PIECE_VALUES // width)
    for start in range(0, rows, step):
      yield self._file.rows(
          self._names[name], start, min(start + step, rows)
      )
