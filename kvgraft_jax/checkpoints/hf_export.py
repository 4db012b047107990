"""What a Hugging Face directory has beside weights: config and tokenizer."""

import struct
from typing import Any

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.checkpoints import hf_config
from kvgraft_jax.checkpoints import tokenizer_files

_BLANK = '\u2581'
_BPE = 2
# SentencePiece reads user-defined pieces in a text and no control pieces, so
# only these remain control pieces.
_NEVER_TEXT = ('<pad>', '<eos>', '<bos>')


def config_json(config: config_lib.ModelConfig, dtype: str) -> dict[str, Any]:
  """Returns the content of a config.json of the text model.

  Args:
    config: the architecture.
    dtype: 'bfloat16' or 'float32', in which the weights are stored.

  Raises:
    UsageError: if transformers' classes cannot express the architecture.
  """
  sliding, full = config.sliding, config.full
  out: dict[str, Any] = {
      'attention_bias': False,
      'final_logit_softcapping': (
          config.final_softcap and float(config.final_softcap)
      ),
      'head_dim': sliding.head_dim,
      'hidden_activation': 'gelu_pytorch_tanh',
      'hidden_size': config.width,
      'intermediate_size': config.hidden,
      'layer_types': [hf_config.KIND_NAMES[kind] for kind in config.layers],
      'max_position_embeddings': config.max_context,
      'num_attention_heads': config.num_heads,
      'num_hidden_layers': len(config.layers),
      'num_key_value_heads': sliding.kv_heads,
      'rms_norm_eps': hf_config.EPS,
      'sliding_window': sliding.window,
      'tie_word_embeddings': True,
      'torch_dtype': dtype,
      'vocab_size': config.vocab_size,
  }
  if config.family == 'gemma3':
    # The old rotary fields are read by every release.
    out |= {
        'architectures': ['Gemma3ForCausalLM'],
        'model_type': 'gemma3_text',
        'query_pre_attn_scalar': config.query_scale_dim,
        'rope_local_base_freq': float(sliding.rope_theta),
        'rope_scaling': None if full.rope_divisor == 1 else {
            'factor': float(full.rope_divisor), 'rope_type': 'linear',
        },
        'rope_theta': float(full.rope_theta),
    }
  else:
    out |= {
        'architectures': ['Gemma4ForCausalLM'],
        'attention_k_eq_v': full.value_from_key,
        'enable_moe_block': config.num_experts > 0,
        'global_head_dim': full.head_dim,
        'hidden_size_per_layer_input': config.per_layer_dim,
        'model_type': 'gemma4_text',
        'moe_intermediate_size': config.expert_hidden or None,
        'num_experts': config.num_experts or None,
        'num_global_key_value_heads': (
            full.kv_heads if full.value_from_key else None
        ),
        'num_kv_shared_layers': config.shared_layers,
        'rope_parameters': {
            'full_attention': _rope_json(full),
            'sliding_attention': _rope_json(sliding),
        },
        'top_k_experts': config.top_k_experts or None,
        'use_bidirectional_attention': None,
        'use_double_wide_mlp': config.shared_hidden > 0,
        'vocab_size_per_layer_input': config.vocab_size,
    }
  read = hf_config.from_json(out, config.name, config.name).config
  if read.to_json() != config.to_json():
    differing = [
        k for k, v in config.to_json().items() if read.to_json().get(k) != v
    ]
    raise errors.UsageError(
        f'model {config.name}: {", ".join(differing)}: expected what a'
        " transformers configuration can say, found another value: such a"
        ' model cannot be written as a Hugging Face directory'
    )
  return out


def _rope_json(spec: config_lib.AttentionSpec) -> dict[str, Any]:
  """Returns one entry of rope_parameters."""
  out: dict[str, Any] = {
      'rope_theta': float(spec.rope_theta), 'rope_type': 'default'
  }
  if spec.rope_pairs is not None or spec.rope_divisor != 1:
    out['rope_type'] = 'proportional'
    pairs = spec.head_dim // 2 if spec.rope_pairs is None else spec.rope_pairs
    out['partial_rotary_factor'] = 2 * pairs / spec.head_dim
  if spec.rope_divisor != 1:
    out['factor'] = float(spec.rope_divisor)
  return out


def tokenizer_model(tokenizer: tokenizer_lib.SpmTokenizer) -> bytes | None:
  """Returns a vocabulary as a SentencePiece `tokenizer.model`.

  Format: github.com/google/sentencepiece `src/sentencepiece_model.proto`.

  Args:
    tokenizer: from a GGUF file.

  Returns:
    The file's bytes; None if its pieces would not be the same, or the package
    sentencepiece, which tells, is missing.
  """
  kinds = tokenizer.arrays['kinds'].tolist()
  scores = tokenizer.arrays['scores'].tolist()
  out = []
  for i, (kind, score) in enumerate(zip(kinds, scores)):
    piece = tokenizer.piece(i)
    if i == tokenizer.values['unk_id']:
      kind = tokenizer_lib.UNKNOWN
    elif kind == tokenizer_lib.CONTROL and piece not in _NEVER_TEXT:
      kind = tokenizer_lib.USER_DEFINED
    elif kind == tokenizer_lib.USER_DEFINED:
      piece = piece.replace(' ', _BLANK)
    out.append(_field(1, _field(1, piece.encode('utf-8')) + b'\x15'
                      + struct.pack('<f', score) + _field(3, kind)))
  model_type, vocab_size, byte_fallback, unk_id, unk_piece = 3, 4, 35, 40, 45
  trainer = (_field(model_type, _BPE) + _field(vocab_size, len(kinds))
             + _field(byte_fallback, 1))
  ids = (tokenizer.values['unk_id'], tokenizer.bos_id)
  for number, token in enumerate(ids):  # Then eos and pad, by their defaults.
    trainer += _field(unk_id + number, token)
    trainer += _field(
        unk_piece + number, tokenizer.piece(token).encode('utf-8'))
  # Text as it is: no blank in front, none removed.
  normalizer = _field(1, b'identity') + _field(3, 0) + _field(4, 0)
  data = b''.join(out) + _field(2, trainer) + _field(3, normalizer)
  try:
    made = tokenizer_files.SentencePieceTokenizer(
        data, bos=tokenizer.bos_id, eos_ids=tokenizer.eos_ids)
  except errors.KvgraftError:
    return None
  # Which pieces a text hides is each reader's own matter: image markers differ.
  same = made.vocab_size == tokenizer.vocab_size and all(
      made.token_bytes(i, show_special=True)
      == tokenizer.token_bytes(i, show_special=True)
      for i in range(made.vocab_size))
  return data if same else None


def _field(number: int, value: bytes | int) -> bytes:
  """Returns one protobuf field."""
  if isinstance(value, int):
    return _varint(number << 3) + _varint(value)
  return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
  out = bytearray()
  while value > 127:
    out.append(value & 127 | 128)
    value >>= 7
  return bytes((*out, value))
