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
  return b''.join(s.tobytes() + b.tobytes() for s, b in zip(scale, q))


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
