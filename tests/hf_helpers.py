"""Hugging Face directories for tests: published headers, and small files."""

import json
import math
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

Shapes = dict[str, tuple[int, ...]]

_GEMMA3 = {'model_type': 'gemma3_text', 'vocab_size': 262144, 'head_dim': 256,
           'num_attention_heads': 4, 'num_key_value_heads': 1,
           'sliding_window': 512, 'sliding_window_pattern': 6,
           'max_position_embeddings': 32768, 'query_pre_attn_scalar': 256,
           'rope_theta': 1e6, 'rope_local_base_freq': 1e4, 'rope_scaling': None,
           'attn_logit_softcapping': None, 'final_logit_softcapping': None,
           'hidden_activation': 'gelu_pytorch_tanh', 'rms_norm_eps': 1e-6,
           'attention_bias': False, 'torch_dtype': 'bfloat16'}
_ROPE = {
    'full_attention': {'partial_rotary_factor': 0.25, 'rope_theta': 1e6,
                       'rope_type': 'proportional'},
    'sliding_attention': {'rope_theta': 1e4, 'rope_type': 'default'},
}


def _outer3(**text: Any) -> dict[str, Any]:
  text = {'model_type': 'gemma3_text', 'sliding_window': 1024,
          'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}, **text}
  return {'architectures': ['Gemma3ForConditionalGeneration'],
          'model_type': 'gemma3', 'eos_token_id': [1, 106],
          'text_config': text, 'torch_dtype': 'bfloat16',
          'vision_config': {'hidden_size': 1152}}


def _outer4(
    layers: int, every: int = 6, outer: str = 'gemma4', **text: Any
) -> dict[str, Any]:
  kinds = ['sliding_attention' if (i + 1) % every else 'full_attention'
           for i in range(layers)]
  text = {'model_type': f'{outer}_text', 'num_hidden_layers': layers,
          'layer_types': kinds, 'head_dim': 256, 'global_head_dim': 512,
          'rope_parameters': _ROPE, 'final_logit_softcapping': 30.0,
          'vocab_size': 262144, 'rms_norm_eps': 1e-6, 'hidden_activation':
          'gelu_pytorch_tanh', 'tie_word_embeddings': True, **text}
  return {'model_type': outer, 'tie_word_embeddings': True, 'dtype': 'bfloat16',
          'text_config': text, 'eos_token_id': [1, 106]}


_LARGE = {'attention_k_eq_v': True, 'sliding_window': 1024,
          'max_position_embeddings': 262144, 'num_kv_shared_layers': 0,
          'use_bidirectional_attention': 'vision', 'use_double_wide_mlp': False}
_DENSE = {'hidden_size_per_layer_input': 0, 'enable_moe_block': False,
          'num_experts': None, 'top_k_experts': None,
          'moe_intermediate_size': None}
_SMALL = {'hidden_size_per_layer_input': 256, 'sliding_window': 512,
          'vocab_size_per_layer_input': 262144, 'attention_k_eq_v': False,
          'max_position_embeddings': 131072, 'num_attention_heads': 8,
          'num_global_key_value_heads': None, 'enable_moe_block': False,
          'use_bidirectional_attention': None}

# Preset -> config.json as published: those of Gemma 3 4B and larger leave most
# values to the defaults of transformers' class.
PUBLISHED = {
    'gemma3-270m': _GEMMA3 | {
        'hidden_size': 640, 'intermediate_size': 2048, 'num_hidden_layers': 18},
    'gemma3-1b': _GEMMA3 | {
        'hidden_size': 1152, 'intermediate_size': 6912,
        'num_hidden_layers': 26},
    'gemma3-4b': _outer3(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    'gemma3-12b': _outer3(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=48,
        num_attention_heads=16, num_key_value_heads=8),
    'gemma3-27b': _outer3(
        hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=168),
    'gemma4-e2b': _outer4(
        35, 5, **_SMALL, hidden_size=1536, intermediate_size=6144,
        num_key_value_heads=1, num_kv_shared_layers=20,
        use_double_wide_mlp=True),
    'gemma4-e4b': _outer4(
        42, **_SMALL, hidden_size=2560, intermediate_size=10240,
        num_key_value_heads=2, num_kv_shared_layers=18),
    'gemma4-12b': _outer4(
        48, outer='gemma4_unified', **_LARGE, hidden_size=3840,
        intermediate_size=15360, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=1),
    'gemma4-26b-a4b': _outer4(
        30, **(_LARGE | _DENSE), hidden_size=2816, intermediate_size=2112,
        num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2),
    'gemma4-31b': _outer4(
        60, **_LARGE, **_DENSE, hidden_size=5376, intermediate_size=21504,
        num_attention_heads=32, num_key_value_heads=16,
        num_global_key_value_heads=4),
}
PUBLISHED['gemma4-26b-a4b']['text_config'] |= {
    'enable_moe_block': True, 'num_experts': 128, 'top_k_experts': 8,
    'moe_intermediate_size': None, 'expert_intermediate_size': 704}

PREFIX = {'gemma3_text': 'model.', 'gemma3': 'language_model.model.',
          'gemma4': 'model.language_model.',
          'gemma4_unified': 'model.language_model.',
          'gemma4_text': 'model.', 'gemma4_unified_text': 'model.'}
# Some of what stands beside the text model.
_TOWERS: dict[str, Shapes] = {
    'gemma3': {
        'multi_modal_projector.mm_input_projection_weight': (1152, 2560),
        'vision_tower.vision_model.post_layernorm.bias': (1152,)},
    'gemma4': {
        'model.embed_vision.embedding_projection.weight': (2560, 768),
        'model.embed_audio.embedding_projection.weight': (2560, 1536),
        'model.audio_tower.layers.0.self_attn.q_proj.input_max': (),
        'model.vision_tower.std_bias': (768,)},
    'gemma4_unified': {
        'model.embed_vision.embedding_projection.weight': (3840, 3840),
        'model.vision_embedder.pos_embedding': (1120, 2, 3840)},
}


def tensor_shapes(config: dict[str, Any], shared: bool = True) -> Shapes:
  """Returns every tensor of a checkpoint by its Hugging Face name.

  Args:
    config: a config.json with all sizes, or one of Gemma 3's sparse ones.
    shared: with the keys and values that layers without their own have in
      published files.
  """
  outer = config['model_type']
  text = config.get('text_config', config)
  defaults = {'num_attention_heads': 8, 'num_key_value_heads': 4,
              'head_dim': 256, 'vocab_size': 262208}
  c = defaults | {k: v for k, v in text.items() if v is not None}
  count, d = c['num_hidden_layers'], c['hidden_size']
  gemma4 = outer.startswith('gemma4')
  kinds = c.get('layer_types') or [
      'sliding_attention' if (i + 1) % 6 else 'full_attention'
      for i in range(count)]
  per_layer = c.get('hidden_size_per_layer_input', 0)
  p = PREFIX[outer]
  out: Shapes = {p + 'embed_tokens.weight': (c['vocab_size'], d),
                 p + 'norm.weight': (d,)}
  if per_layer:
    out[p + 'embed_tokens_per_layer.weight'] = (
        c['vocab_size_per_layer_input'], count * per_layer)
    out[p + 'per_layer_model_projection.weight'] = (count * per_layer, d)
    out[p + 'per_layer_projection_norm.weight'] = (per_layer,)
  for i, kind in enumerate(kinds):
    layer: Shapes = {}
    is_full = gemma4 and kind == 'full_attention'
    own = c.get('per_layer_config', {}).get(str(i), {})
    h = own.get('head_dim', c.get('global_head_dim', c['head_dim'])
                if is_full else c['head_dim'])
    kv = c['num_key_value_heads']
    if is_full and c.get('attention_k_eq_v'):
      kv = c.get('num_global_key_value_heads', kv)
    kv = own.get('num_key_value_heads', kv)
    is_shared = i >= count - c.get('num_kv_shared_layers', 0)
    f = c['intermediate_size'] * (
        2 if is_shared and c.get('use_double_wide_mlp') else 1)
    for n in ('input', 'post_attention', 'pre_feedforward', 'post_feedforward'):
      layer[f'{n}_layernorm.weight'] = (d,)
    layer['self_attn.q_proj.weight'] = (c['num_attention_heads'] * h, d)
    layer['self_attn.o_proj.weight'] = (d, c['num_attention_heads'] * h)
    layer['self_attn.q_norm.weight'] = (h,)
    if shared or not is_shared:
      layer['self_attn.k_proj.weight'] = (kv * h, d)
      layer['self_attn.k_norm.weight'] = (h,)
      if not (is_full and c.get('attention_k_eq_v')):
        layer['self_attn.v_proj.weight'] = (kv * h, d)
    layer['mlp.gate_proj.weight'] = layer['mlp.up_proj.weight'] = (f, d)
    layer['mlp.down_proj.weight'] = (d, f)
    if gemma4:
      layer['layer_scalar'] = (1,)
    if per_layer:
      layer['per_layer_input_gate.weight'] = (per_layer, d)
      layer['per_layer_projection.weight'] = (d, per_layer)
      layer['post_per_layer_input_norm.weight'] = (d,)
    if c.get('enable_moe_block'):
      e = c['num_experts']
      fe = c.get('moe_intermediate_size') or c['expert_intermediate_size']
      layer['router.proj.weight'] = (e, d)
      layer['router.scale'] = (d,)
      layer['router.per_expert_scale'] = (e,)
      layer['experts.gate_up_proj'] = (e, 2 * fe, d)
      layer['experts.down_proj'] = (e, d, fe)
      layer['pre_feedforward_layernorm_2.weight'] = (d,)
      layer['post_feedforward_layernorm_1.weight'] = (d,)
      layer['post_feedforward_layernorm_2.weight'] = (d,)
    out |= {f'{p}layers.{i}.{n}': s for n, s in layer.items()}
  return out | _TOWERS.get(outer, {})


def header(
    shapes: dict[str, tuple[int, ...]], code: str = 'BF16', itemsize: int = 2
) -> dict[str, Any]:
  """Returns the header of a file with these tensors one behind another."""
  out, end = {}, 0
  for name, shape in shapes.items():
    start, end = end, end + itemsize * math.prod(shape)
    out[name] = {'dtype': code, 'shape': list(shape),
                 'data_offsets': [start, end]}
  return out


def write_header(
    path: pathlib.Path, value: Any, nbytes: int | None = None
) -> None:
  """Writes a file with this header and zeros that take no room on disk.

  Args:
    path: of the file.
    value: the header, or its bytes.
    nbytes: of the data; None for what the header asks for.
  """
  text = value if isinstance(value, bytes) else json.dumps(value).encode()
  if nbytes is None:
    nbytes = max(v['data_offsets'][1] for v in value.values())
  with open(path, 'wb') as f:
    f.write(len(text).to_bytes(8, 'little') + text)
    f.truncate(8 + len(text) + nbytes)


def write_config(folder: pathlib.Path, config: Any) -> None:
  """Writes config.json."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config), encoding='utf-8')


def write_shards(
    folder: pathlib.Path, shapes: Shapes, most: int, **kwargs: Any
) -> None:
  """Writes an index and headers of files of at most `most` bytes, of zeros."""
  shards: list[Shapes] = [{}]
  for name, shape in shapes.items():
    used = sum(2 * math.prod(s) for s in shards[-1].values())
    if shards[-1] and used + 2 * math.prod(shape) > most:
      shards.append({})
    shards[-1][name] = shape
  files = {}
  for i, shard in enumerate(shards):
    name = f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
    write_header(folder / name, header(shard, **kwargs))
    files |= dict.fromkeys(shard, name)
  write_index(folder, files)


def write_index(folder: pathlib.Path, files: dict[str, str]) -> None:
  """Writes the index of shards: tensor -> file."""
  (folder / 'model.safetensors.index.json').write_text(
      json.dumps({'metadata': {'total_size': 0}, 'weight_map': files}))


def split(folder: pathlib.Path, parts: int) -> None:
  """Replaces model.safetensors by shards with the same tensors."""
  path = folder / 'model.safetensors'
  tensors = read(path)
  names = sorted(tensors)
  files = {}
  for i in range(parts):
    name = f'model-{i + 1:05}-of-{parts:05}.safetensors'
    write(folder / name, {n: tensors[n] for n in names[i::parts]})
    files |= dict.fromkeys(names[i::parts], name)
  path.unlink()
  write_index(folder, files)


_NUMPY = {'BF16': ml_dtypes.bfloat16, 'F16': np.float16, 'F32': np.float32,
          'F64': np.float64, 'I8': np.int8, 'F8_E4M3': ml_dtypes.float8_e4m3fn}
_CODES = {np.dtype(v): k for k, v in _NUMPY.items()}


def write(
    path: str | os.PathLike[str], tensors: dict[str, np.ndarray]
) -> None:
  """Writes a small safetensors file."""
  out, blobs, end = {}, [], 0
  for name, array in tensors.items():
    blobs.append(np.ascontiguousarray(array).tobytes())
    start, end = end, end + len(blobs[-1])
    out[name] = {'dtype': _CODES[array.dtype], 'shape': list(array.shape),
                 'data_offsets': [start, end]}
  text = json.dumps(out).encode()
  pathlib.Path(path).write_bytes(
      len(text).to_bytes(8, 'little') + text + b''.join(blobs))


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Returns the tensors of a small safetensors file."""
  data = pathlib.Path(path).read_bytes()
  base = 8 + int.from_bytes(data[:8], 'little')
  entries = json.loads(data[8:base])
  entries.pop('__metadata__', None)
  return {
      name: np.frombuffer(
          data, _NUMPY[e['dtype']], math.prod(e['shape']),
          base + e['data_offsets'][0]).reshape(e['shape'])
      for name, e in entries.items()
  }


def read_all(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the tensors of every safetensors file in a directory."""
  out: dict[str, np.ndarray] = {}
  for path in sorted(folder.glob('*.safetensors')):
    out |= read(path)
  return out
