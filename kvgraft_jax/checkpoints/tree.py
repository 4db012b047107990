"""The parameter tree in memory, and how canonical tensors fill it.

Canonical tensors carry Hugging Face's names behind the model prefix, unfused
and with norm weights as w (not 1 + w): the form that the model fingerprint
covers, whatever file they came from.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from kvgraft_jax import config as config_lib
from kvgraft_jax import hashing

Shapes = dict[str, Any]  # Nested; leaves are (shape, is_matrix).

_NORMS = {
    'pre_attention_norm': 'input_layernorm',
    'post_attention_norm': 'post_attention_layernorm',
    'pre_ffw_norm': 'pre_feedforward_layernorm',
    'post_ffw_norm': 'post_feedforward_layernorm',
}
# The dense branch keeps the first two names of a layer without experts; the
# fourth is then the norm of the sum of both branches.
_EXPERT_NORMS = {
    'post_ffw_norm_1': 'post_feedforward_layernorm_1',
    'pre_ffw_norm_2': 'pre_feedforward_layernorm_2',
    'post_ffw_norm_2': 'post_feedforward_layernorm_2',
}


@dataclasses.dataclass(frozen=True)
class Slot:
  """Where a canonical tensor goes.

  Attributes:
    shape: of the canonical tensor.
    path: leaf of the parameter tree, joined by '/'.
    row: first row of the leaf that it fills; all rows of a norm.
    is_norm: a multiplier (of a norm, a layer or an expert): the leaf holds its
      effective value, `norm_offset` added, in float32.
  """

  shape: tuple[int, ...]
  path: str
  row: int = 0
  is_norm: bool = False


def slots(config: config_lib.ModelConfig) -> dict[str, Slot]:
  """Returns canonical name -> Slot for every tensor of a model."""
  d, v = config.width, config.vocab_size
  out = {
      'embed_tokens.weight': Slot((v, d), 'embedder/input_embedding'),
      'norm.weight': Slot((d,), 'final_norm/scale', is_norm=True),
  }
  if config.per_layer_dim:
    p = config.per_layer_dim
    all_layers = len(config.layers) * p
    out |= {
        'embed_tokens_per_layer.weight': Slot(
            (v, all_layers), 'embedder/per_layer_embedding'
        ),
        'per_layer_model_projection.weight': Slot(
            (all_layers, d), 'embedder/per_layer_model_projection/w'
        ),
        'per_layer_projection_norm.weight': Slot(
            (p,), 'embedder/per_layer_projection_norm/scale', is_norm=True
        ),
    }
  for i in range(len(config.layers)):
    here, there = f'layers.{i}.', f'layer_{i}/'
    for name, slot in _layer_slots(config, i).items():
      out[here + name] = dataclasses.replace(slot, path=there + slot.path)
  return out


def _layer_slots(
    config: config_lib.ModelConfig, layer: int
) -> dict[str, Slot]:
  """Returns the slots of one layer, without its number."""
  d, f = config.width, config.layer_hidden(layer)
  spec = config.spec(config.layers[layer])
  h = spec.head_dim
  q, kv = config.num_heads * h, spec.kv_heads * h
  norms = dict(_NORMS, **(_EXPERT_NORMS if config.num_experts else {}))
  out = {
      f'{name}.weight': Slot((d,), f'{leaf}/scale', is_norm=True)
      for leaf, name in norms.items()
  }
  qkv = 'attn/qkv/w'
  out |= {
      'self_attn.q_proj.weight': Slot((q, d), qkv),
      'self_attn.o_proj.weight': Slot((d, q), 'attn/attn_vec/w'),
      'self_attn.q_norm.weight': Slot(
          (h,), 'attn/query_norm/scale', is_norm=True
      ),
      'mlp.gate_proj.weight': Slot((f, d), 'mlp/gating/w'),
      'mlp.up_proj.weight': Slot((f, d), 'mlp/gating/w', f),
      'mlp.down_proj.weight': Slot((d, f), 'mlp/linear/w'),
  }
  if layer < config.first_shared:
    out['self_attn.k_proj.weight'] = Slot((kv, d), qkv, q)
    out['self_attn.k_norm.weight'] = Slot(
        (h,), 'attn/key_norm/scale', is_norm=True
    )
    if not spec.value_from_key:
      out['self_attn.v_proj.weight'] = Slot((kv, d), qkv, q + kv)
  if config.layer_scalar:
    out['layer_scalar'] = Slot((1,), 'layer_scalar', is_norm=True)
  if config.per_layer_dim:
    p = config.per_layer_dim
    out |= {
        'per_layer_input_gate.weight': Slot(
            (p, d), 'per_layer_input_gate/w'
        ),
        'per_layer_projection.weight': Slot(
            (d, p), 'per_layer_projection/w'
        ),
        'post_per_layer_input_norm.weight': Slot(
            (d,), 'post_per_layer_input_norm/scale', is_norm=True
        ),
    }
  if config.num_experts:
    e, fe = config.num_experts, config.expert_hidden
    out |= {
        'router.proj.weight': Slot((e, d), 'router/w'),
        'router.scale': Slot((d,), 'router/scale', is_norm=True),
        'router.per_expert_scale': Slot(
            (e,), 'router/expert_scale', is_norm=True
        ),
        'experts.gate_up_proj': Slot((e, 2 * fe, d), 'experts/gating/w'),
        'experts.down_proj': Slot((e, d, fe), 'experts/linear/w'),
    }
  return out


def param_shapes(config: config_lib.ModelConfig) -> Shapes:
  """Returns the parameter tree with (shape, is_matrix) for leaves.

  Matrices are [out, in] and take the model's dtype; the others are norm
  multipliers in float32.
  """
  flat: dict[str, tuple[tuple[int, ...], bool]] = {}
  for slot in slots(config).values():
    # The last part of a fused leaf decides its row count.
    shape = (slot.row + slot.shape[0],) + slot.shape[1:]
    if slot.path not in flat or shape > flat[slot.path][0]:
      flat[slot.path] = shape, not slot.is_norm
  return nest(flat)


def weight_bytes(config: config_lib.ModelConfig, dtype: str) -> int:
  """Returns bytes of the parameter tree of a model in `dtype`."""
  sizes = {'bfloat16': 2, 'float32': 4}
  return sum(
      math.prod(shape) * sizes[dtype if is_matrix else 'float32']
      for _, (shape, is_matrix) in flatten(param_shapes(config)))


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns nested dicts from 'a/b/c' -> leaf."""
  out: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, last = path.split('/')
    at = out
    for key in parents:
      at = at.setdefault(key, {})
    at[last] = leaf
  return out


def flatten(
    nested: Mapping[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  """Yields ('a/b/c', leaf) of nested dicts, in their order."""
  for key, value in nested.items():
    if isinstance(value, Mapping):
      yield from flatten(value, f'{prefix}{key}/')
    else:
      yield prefix + key, value


def model_fingerprint(
    config: config_lib.ModelConfig, tensors: Mapping[str, str]
) -> str:
  """Returns the hex root over config, adapters and every tensor's digest.

  Args:
    config: the architecture.
    tensors: canonical name -> hex digest, as `tensor_digest` makes them.
  """
  return hashing.json_sha256('kvgraft.model', {
      'adapters': 'none', 'config': config.to_json(), 'tensors': dict(tensors),
  })


def tensor_digest(
    name: str, shape: tuple[int, ...], dtype: str, data_sha256: str
) -> str:
  """Returns one leaf of the Merkle tree.

  Args:
    name: canonical name.
    shape: of the canonical tensor.
    dtype: of the values hashed: 'float32' or 'bfloat16', as the source gives
      them, whatever the dtype they are used in.
    data_sha256: plain hex SHA-256 of the values, little-endian, C order.
  """
  return hashing.json_sha256('kvgraft.tensor', {
      'data': data_sha256, 'dtype': dtype, 'name': name, 'shape': list(shape),
  })
