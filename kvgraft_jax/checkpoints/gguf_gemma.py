"""A Gemma GGUF file as a source: config, tokenizer, canonical tensors.

Names: github.com/ggml-org/llama.cpp `gguf-py/gguf/constants.py`. Gemma 3 files
store norm weights as 1 + w, Gemma 4 files as they are used.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import os
from typing import Any

import numpy as np

from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import gguf_config
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints import tokenizer_files
from kvgraft_jax.checkpoints import tree

# Canonical name, without the layer and '.weight', -> name in the file.
_NAMES = {
    'embed_tokens': 'token_embd',
    'norm': 'output_norm',
    'embed_tokens_per_layer': 'per_layer_token_embd',
    'per_layer_model_projection': 'per_layer_model_proj',
    'per_layer_projection_norm': 'per_layer_proj_norm',
    'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output',
    'self_attn.q_norm': 'attn_q_norm',
    'self_attn.k_norm': 'attn_k_norm',
    'post_attention_layernorm': 'post_attention_norm',
    'pre_feedforward_layernorm': 'ffn_norm',
    'pre_feedforward_layernorm_2': 'pre_ffw_norm_2',
    'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
    'post_feedforward_layernorm': 'post_ffw_norm',
    'post_feedforward_layernorm_1': 'post_ffw_norm_1',
    'post_feedforward_layernorm_2': 'post_ffw_norm_2',
    'per_layer_input_gate': 'inp_gate',
    'per_layer_projection': 'proj',
    'post_per_layer_input_norm': 'post_norm',
    'router.proj': 'ffn_gate_inp',
    'experts.gate_up_proj': 'ffn_gate_up_exps',
    'experts.down_proj': 'ffn_down_exps',
    'layer_scalar': 'layer_output_scale',
}
_SCALES = {
    'router.scale': 'ffn_gate_inp.scale',
    'router.per_expert_scale': 'ffn_down_exps.scale',
}
# Tables with a row for each entry of the file's vocabulary.
_BY_TOKEN = ('embed_tokens.weight', 'embed_tokens_per_layer.weight')
# What ends the model's part of a conversation.
_TURN_ENDS = ('<end_of_turn>', '<turn|>', '<|tool_response>')


def _name_in_file(name: str) -> str:
  """Returns what a canonical tensor is called in a file."""
  prefix = ''
  if name.startswith('layers.'):
    _, layer, name = name.split('.', 2)
    prefix = f'blk.{layer}.'
  scale = _SCALES.get(name)
  return prefix + (scale or _NAMES[name.removesuffix('.weight')] + '.weight')


class GemmaGguf:
  """A GGUF file whose header has been accepted as a Gemma 3 or 4 model.

  Attributes:
    source: name for messages.
    config: the architecture.
    tokenizer: from the file's vocabulary.
    slots: canonical name -> where it goes in the parameter tree.
    template: text of the file's chat template, or None.
    files: paths of the file, or of its parts.
    skipped: tensors of the file that the model has no use for.
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
    self.files: Sequence[str | os.PathLike[str]] = file.files
    self._file = file
    tokens = gguf_config.value(file, 'tokenizer.ggml.tokens', list)
    kinds = gguf_config.value(file, 'tokenizer.ggml.token_type', np.ndarray)
    self._rows = len(tokens)
    # Larger models pad the vocabulary with rows that are never text.
    used = np.flatnonzero(kinds != tokenizer_lib.UNUSED)
    vocab = int(used[-1]) + 1 if used.size else self._rows
    self.config = gguf_config.read(file, vocab)
    template = file.metadata.get('tokenizer.chat_template')
    self.template: str | None = template if isinstance(template, str) else None
    self.tokenizer: Any = self._read_tokenizer(vocab)
    self.slots = tree.slots(self.config)
    self._parts = {name: self._find(name) for name in self.slots}
    self.skipped = self._check_tensors()

  def _read_tokenizer(self, vocab: int) -> Any:
    meta = self._file.metadata
    model = gguf_config.value(self._file, 'tokenizer.ggml.model', str)
    if model not in ('llama', 'gemma4'):
      raise errors.UsageError(
          f"{self.source}: expected the tokenizer model 'llama'"
          f" (SentencePiece) or 'gemma4' (merges), found {model!r}: this"
          ' variant is not supported'
      )
    tokens = meta['tokenizer.ggml.tokens'][:vocab]
    kinds = meta['tokenizer.ggml.token_type'][:vocab]

    def token(name: str, default: int = -1) -> int:
      value = meta.get(f'tokenizer.ggml.{name}_token_id', default)
      return value if isinstance(value, int) else -1

    # Files name one or the other end and leave the rest out.
    ends = ('<eos>', *(_TURN_ENDS if self.template else ()))
    eos = {token('eos'), token('eot')} - {-1}
    eos |= {i for i, p in enumerate(tokens[:256]) if p in ends}
    ids: dict[str, Any] = {
        'bos_id': token('bos', 2), 'eos_ids': sorted(eos),
        'unk_id': token('unknown', 3),
    }
    if model == 'gemma4':
      merges = gguf_config.value(self._file, 'tokenizer.ggml.merges', list)
      return tokenizer_files.from_gguf_merges(
          tokens, merges, kinds, source=self.source, **ids
      )
    scores = gguf_config.value(
        self._file, 'tokenizer.ggml.scores', np.ndarray
    )
    return tokenizer_lib.SpmTokenizer.from_pieces(
        tokens, scores[:vocab], kinds, **ids
    )

  def _find(self, name: str) -> tuple[str, ...]:
    """Returns the tensors of the file that make a canonical one."""
    theirs = _name_in_file(name)
    if name.endswith('experts.gate_up_proj'):
      apart = tuple(
          theirs.replace('gate_up', part) for part in ('gate', 'up')
      )
      if theirs not in self._file.tensors and apart[0] in self._file.tensors:
        return apart
    return (theirs,)

  def _check_tensors(self) -> tuple[str, ...]:
    """Returns the tensors that the model has no use for."""
    found = self._file.tensors
    needed = [theirs for parts in self._parts.values() for theirs in parts]
    unused = set()
    if self.config.family == 'gemma4':
      unused.add(gguf_config.ROPE_FREQS)  # It is in the config.
    for i in range(self.config.first_shared, len(self.config.layers)):
      unused |= {
          f'blk.{i}.{n}.weight' for n in ('attn_k', 'attn_v', 'attn_k_norm')
      }
    missing = [theirs for theirs in needed if theirs not in found]
    surplus = sorted(set(found) - set(needed) - unused)
    for what, these in (('is missing', missing), ('is not expected', surplus)):
      if these:
        raise errors.UsageError(
            f'{self.source}: tensor {these[0]} {what} ({len(these)} in all):'
            f' expected the {len(needed)} tensors of a'
            f' {len(self.config.layers)}-layer {self.config.family} model: use'
            ' a file of that architecture'
        )
    for name, parts in self._parts.items():
      shape = self.slots[name].shape
      if name in _BY_TOKEN:
        shape = (self._rows,) + shape[1:]
      if len(parts) > 1:
        shape = (shape[0], shape[1] // len(parts)) + shape[2:]
      for theirs in parts:
        if found[theirs].shape != shape:
          raise errors.UsageError(
              f'{self.source}: tensor {theirs} expected shape {list(shape)},'
              f' found {list(found[theirs].shape)}: the file contradicts its'
              ' own header'
          )
    return tuple(sorted(unused & set(found)))

  def value_dtype(self, name: str) -> str:
    """Returns 'float32': what dequantisation gives, whatever is stored."""
    del name
    return 'float32'

  def pieces(self, name: str) -> Iterator[np.ndarray]:
    """Yields a canonical tensor in slices of its first axis, in order.

    Args:
      name: canonical name.

    Yields:
      float32 [rows, ...]; norm weights as w, not as 1 + w.
    """
    slot, parts = self.slots[name], self._parts[name]
    if len(slot.shape) == 1:
      values = self._file.rows(parts[0], 0, 1)[0]
      if slot.is_norm and self.config.norm_offset:
        values = values - np.float32(self.config.norm_offset)
      yield values
      return
    *inner, width = slot.shape[1:]
    rows = inner[0] // len(parts) if inner else 1  # Of one slice, in one part.
    step = source_lib.piece_rows(slot.shape)
    for start in range(0, slot.shape[0], step):
      stop = min(start + step, slot.shape[0])
      values = [
          self._file.rows(theirs, start * rows, stop * rows)
          for theirs in parts
      ]
      if inner:
        values = [v.reshape(stop - start, rows, width) for v in values]
      yield values[0] if len(parts) == 1 else np.concatenate(values, axis=1)
