"""Writes small GGUF files for tests, independently of the reader."""

import struct

import ml_dtypes
import numpy as np

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 6, 64, 96, 4, 2, 32
PIECES = [
    '<pad>', '<eos>', '<bos>', '<unk>', '\n', '  ',
    *[f'<0x{b:02X}>' for b in range(256)],
    *'abcdefghijklmnopqrstuvwxyz\u2581', 'th', 'he', 'the', '\u2581the',
]
KINDS = [3] * 4 + [4] * 2 + [6] * 256 + [1] * (len(PIECES) - 262)

F32, F16, Q8_0, BF16 = 0, 1, 8, 30


def value(item) -> bytes:
  """Returns a typed metadata value."""
  if isinstance(item, bool):
    return struct.pack('<I?', 7, item)
  if isinstance(item, int):
    return struct.pack('<II', 4, item)
  if isinstance(item, float):
    return struct.pack('<If', 6, item)
  if isinstance(item, str):
    return struct.pack('<I', 8) + string(item)
  if isinstance(item[0], bool):
    return struct.pack(f'<IIQ{len(item)}?', 9, 7, len(item), *item)
  if isinstance(item[0], str):
    return struct.pack('<IIQ', 9, 8, len(item)) + b''.join(map(string, item))
  kind, form = (6, 'f') if isinstance(item[0], float) else (5, 'i')
  return struct.pack(f'<IIQ{len(item)}{form}', 9, kind, len(item), *item)


def string(text: str) -> bytes:
  """Returns a length-framed string."""
  raw = text.encode('utf-8')
  return struct.pack('<Q', len(raw)) + raw


def quantise(values: np.ndarray, kind: int) -> bytes:
  """Returns float32 values in a storage type."""
  if kind == F32:
    return values.astype('<f4').tobytes()
  if kind == F16:
    return values.astype('<f2').tobytes()
  if kind == BF16:
    return values.astype(ml_dtypes.bfloat16).tobytes()
  assert kind == Q8_0
  blocks = values.reshape(-1, 32)
  scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype('<f2')
  q = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
  return np.concatenate([scale.view(np.int8), q], axis=1).tobytes()


def dequantise(values: np.ndarray, kind: int) -> np.ndarray:
  """Returns what a reader has to find, one block at a time."""
  raw = quantise(values, kind)
  if kind == Q8_0:
    out = []
    for at in range(0, len(raw), 34):
      scale = np.frombuffer(raw, '<f2', 1, at)[0].astype(np.float32)
      out.append(scale * np.frombuffer(raw, np.int8, 32, at + 2))
    return np.concatenate(out).reshape(values.shape)
  dtype = {F32: '<f4', F16: '<f2', BF16: ml_dtypes.bfloat16}[kind]
  return np.frombuffer(raw, dtype).astype(np.float32).reshape(values.shape)


def metadata() -> dict:
  """Returns the metadata of a small Gemma 3."""
  return {
      'general.architecture': 'gemma3',
      'gemma3.context_length': 2048,
      'gemma3.embedding_length': WIDTH,
      'gemma3.block_count': LAYERS,
      'gemma3.feed_forward_length': HIDDEN,
      'gemma3.attention.head_count': HEADS,
      'gemma3.attention.head_count_kv': KV_HEADS,
      'gemma3.attention.key_length': HEAD_DIM,
      'gemma3.attention.value_length': HEAD_DIM,
      'gemma3.attention.layer_norm_rms_epsilon': 1e-6,
      'gemma3.attention.sliding_window': 64,
      'gemma3.rope.freq_base': 1e6,
      'tokenizer.ggml.model': 'llama',
      'tokenizer.ggml.tokens': PIECES,
      'tokenizer.ggml.scores': [-float(i) for i in range(len(PIECES))],
      'tokenizer.ggml.token_type': KINDS,
      'tokenizer.ggml.bos_token_id': 2,
      'tokenizer.ggml.eos_token_id': 1,
      'tokenizer.ggml.unknown_token_id': 3,
  }


def tensors(seed: int = 0) -> dict[str, tuple[int, np.ndarray]]:
  """Returns name -> (storage type, float32 values) of a small Gemma 3."""
  rng = np.random.default_rng(seed)
  q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
  out = {}

  def add(name: str, kind: int, *shape: int) -> None:
    values = rng.normal(size=shape).astype(np.float32)
    if len(shape) == 1:
      # w in bfloat16, stored as 1 + w.
      w = (0.3 * values).astype(ml_dtypes.bfloat16).astype(np.float32)
      values = 1 + w
    out[f'{name}.weight'] = kind, values

  add('token_embd', Q8_0, len(PIECES), WIDTH)
  add('output_norm', F32, WIDTH)
  for i in range(LAYERS):
    here = f'blk.{i}.'
    for name in ('attn_norm', 'post_attention_norm', 'ffn_norm',
                 'post_ffw_norm'):
      add(here + name, F32, WIDTH)
    add(here + 'attn_q_norm', F32, HEAD_DIM)
    add(here + 'attn_k_norm', F32, HEAD_DIM)
    add(here + 'attn_q', F16, q, WIDTH)
    add(here + 'attn_k', Q8_0, kv, WIDTH)
    add(here + 'attn_v', BF16, kv, WIDTH)
    add(here + 'attn_output', Q8_0, WIDTH, q)
    add(here + 'ffn_gate', F32, HIDDEN, WIDTH)
    add(here + 'ffn_up', Q8_0, HIDDEN, WIDTH)
    add(here + 'ffn_down', Q8_0, WIDTH, HIDDEN)
  return out


def write(path, meta: dict, weights: dict, raw: dict | None = None) -> None:
  """Writes a file.

  Args:
    path: file to write.
    meta: key -> value.
    weights: name -> (storage type, float32 values).
    raw: name -> (storage type number, shape, bytes), written as given.
  """
  entries = {n: (k, v.shape, quantise(v, k)) for n, (k, v) in weights.items()}
  entries |= raw or {}
  head = b'GGUF' + struct.pack('<IQQ', 3, len(entries), len(meta))
  for key, item in meta.items():
    head += string(key) + value(item)
  data = bytearray()
  for name, (kind, shape, payload) in entries.items():
    data += bytes(-len(data) % 32)
    head += string(name) + struct.pack(
        f'<I{len(shape)}QIQ', len(shape), *shape[::-1], kind, len(data)
    )
    data += payload
  head += bytes(-len(head) % 32)
  path.write_bytes(head + data)


def write_model(path, seed: int = 0) -> None:
  """Writes a small Gemma 3."""
  write(path, metadata(), tensors(seed))


# Of one Gemma 4 layer: name in the file -> canonical name.
GEMMA4_LAYER = {
    'attn_norm.weight': 'input_layernorm.weight',
    'attn_q.weight': 'self_attn.q_proj.weight',
    'attn_q_norm.weight': 'self_attn.q_norm.weight',
    'attn_k.weight': 'self_attn.k_proj.weight',
    'attn_k_norm.weight': 'self_attn.k_norm.weight',
    'attn_v.weight': 'self_attn.v_proj.weight',
    'attn_output.weight': 'self_attn.o_proj.weight',
    'post_attention_norm.weight': 'post_attention_layernorm.weight',
    'ffn_norm.weight': 'pre_feedforward_layernorm.weight',
    'ffn_gate.weight': 'mlp.gate_proj.weight',
    'ffn_up.weight': 'mlp.up_proj.weight',
    'ffn_down.weight': 'mlp.down_proj.weight',
    'post_ffw_norm.weight': 'post_feedforward_layernorm.weight',
    'layer_output_scale.weight': 'layer_scalar',
    'inp_gate.weight': 'per_layer_input_gate.weight',
    'proj.weight': 'per_layer_projection.weight',
    'post_norm.weight': 'post_per_layer_input_norm.weight',
    'ffn_gate_inp.weight': 'router.proj.weight',
    'ffn_gate_inp.scale': 'router.scale',
    'ffn_gate_up_exps.weight': 'experts.gate_up_proj',
    'ffn_down_exps.weight': 'experts.down_proj',
    'ffn_down_exps.scale': 'router.per_expert_scale',
    'post_ffw_norm_1.weight': 'post_feedforward_layernorm_1.weight',
    'pre_ffw_norm_2.weight': 'pre_feedforward_layernorm_2.weight',
    'post_ffw_norm_2.weight': 'post_feedforward_layernorm_2.weight',
}
GEMMA4_MODEL = {
    'token_embd.weight': 'embed_tokens.weight',
    'output_norm.weight': 'norm.weight',
    'per_layer_token_embd.weight': 'embed_tokens_per_layer.weight',
    'per_layer_model_proj.weight': 'per_layer_model_projection.weight',
    'per_layer_proj_norm.weight': 'per_layer_projection_norm.weight',
}


def gemma4_tensors(
    layers: int, canonical: dict[str, np.ndarray], pairs: int, still: int
) -> dict[str, tuple[int, np.ndarray]]:
  """Returns name -> (storage type, float32 values) of a Gemma 4.

  Args:
    layers: their number.
    canonical: Hugging Face's name behind the prefix -> values; vectors are
      stored as they are, matrices in several types.
    pairs: leading rotary pairs of a global layer that rotate.
    still: pairs behind them.
  """
  names = dict(GEMMA4_MODEL)
  for i in range(layers):
    names |= {
        f'blk.{i}.{a}': f'layers.{i}.{b}' for a, b in GEMMA4_LAYER.items()
    }
  out = {'rope_freqs.weight': (
      F32, np.array([1] * pairs + [1e30] * still, np.float32)
  )}
  for at, (theirs, ours) in enumerate(names.items()):
    if ours not in canonical:
      continue
    values = canonical[ours]
    kind = (Q8_0, BF16, F16)[at % 3] if values.ndim > 1 else F32
    if kind == Q8_0 and values.shape[-1] % 32:
      kind = F16
    out[theirs] = kind, values
  assert len(out) == 1 + len(canonical)
  return out


def gemma4_metadata(config) -> dict:
  """Returns the metadata that a converter writes for a `ModelConfig`."""
  count, shared = len(config.layers), config.shared_layers
  is_sliding = [kind == 'sliding' for kind in config.layers]
  sliding, full = config.sliding, config.full
  out = {
      'general.architecture': 'gemma4',
      'gemma4.context_length': config.max_context,
      'gemma4.embedding_length': config.width,
      'gemma4.block_count': count,
      'gemma4.feed_forward_length': config.hidden,
      'gemma4.attention.head_count': config.num_heads,
      'gemma4.attention.head_count_kv': sliding.kv_heads,
      'gemma4.attention.key_length': full.head_dim,
      'gemma4.attention.value_length': full.head_dim,
      'gemma4.attention.key_length_swa': sliding.head_dim,
      'gemma4.attention.value_length_swa': sliding.head_dim,
      'gemma4.attention.layer_norm_rms_epsilon': 1e-6,
      'gemma4.attention.sliding_window': sliding.window,
      'gemma4.attention.sliding_window_pattern': is_sliding,
      'gemma4.attention.shared_kv_layers': shared,
      'gemma4.embedding_length_per_layer_input': config.per_layer_dim,
      'gemma4.rope.freq_base': float(full.rope_theta),
      'gemma4.rope.freq_base_swa': float(sliding.rope_theta),
      'gemma4.rope.dimension_count': full.head_dim,
      'gemma4.rope.dimension_count_swa': sliding.head_dim,
      'gemma4.final_logit_softcapping': float(config.final_softcap),
  }
  if sliding.kv_heads != full.kv_heads:
    out['gemma4.attention.head_count_kv'] = [
        sliding.kv_heads if s else full.kv_heads for s in is_sliding
    ]
  if config.shared_hidden:
    out['gemma4.feed_forward_length'] = (
        [config.hidden] * (count - shared) + [config.shared_hidden] * shared
    )
  if config.num_experts:
    out |= {
        'gemma4.expert_count': config.num_experts,
        'gemma4.expert_used_count': config.top_k_experts,
        'gemma4.expert_feed_forward_length': config.expert_hidden,
    }
  unused = [f'x{i}' for i in range(config.vocab_size - len(PIECES))]
  return out | {
      key: item for key, item in metadata().items() if 'tokenizer' in key
  } | {
      'tokenizer.ggml.tokens': PIECES + unused,
      'tokenizer.ggml.scores': [
          -float(i) for i in range(config.vocab_size)
      ],
      'tokenizer.ggml.token_type': KINDS + [1] * len(unused),
  }
