"""The parameter tree in memory, and how canonical tensors fill it.

Canonical tensors carry Hugging Face's names behind the model prefix, unfused
and with norm weights as w (not 1 + w): the form that the model fingerprint
covers, whatever file they came from.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Slot:
  """Where a canonical tensor goes.

  Attributes:
    shape: of the canonical tensor.
    path: leaf of the parameter tree, joined by '/'.
    row: first row of the leaf that it fills; all rows of a norm.
    is_norm: the leaf holds the effective multiplier, in float32.
  """

  shape: tuple[int, ...]
  path: str
  row: int = 0
  is_norm: bool = False


def slots(config: config_lib.ModelConfig) -> dict[str, Slot]:
  """Returns canonical name -> Slot for every tensor of a model."""
  d, f, v = config.width, config.hidden, config.vocab_size
  out = {
      'embed_tokens.weight': Slot((v, d), 'embedder/input_embedding'),
      'norm.weight': Slot((d,), 'final_norm/scale', is_norm=True),
  }
  for i, kind in enumerate(config.layers):
    spec = config.spec(kind)
    h = spec.head_dim
    q, kv = config.num_heads * h, spec.kv_heads * h
    here, there = f'layers.{i}.', f'layer_{i}/'
    for leaf, name in _NORMS.items():
      out[f'{here}{name}.weight'] = Slot(
          (d,), f'{there}{leaf}/scale', is_norm=True
      )
    attn, qkv = here + 'self_attn.', there + 'attn/qkv/w'
    out |= {
        attn + 'q_proj.weight': Slot((q, d), qkv),
        attn + 'k_proj.weight': Slot((kv, d), qkv, q),
        attn + 'v_proj.weight': Slot((kv, d), qkv, q + kv),
        attn + 'o_proj.weight': Slot((d, q), there + 'attn/attn_vec/w'),
        attn + 'q_norm.weight': Slot(
            (h,), there + 'attn/query_norm/scale', is_norm=True
        ),
        attn + 'k_norm.weight': Slot(
            (h,), there + 'attn/key_norm/scale', is_norm=True
        ),
        here + 'mlp.gate_proj.weight': Slot((f, d), there + 'mlp/gating/w'),
        here + 'mlp.up_proj.weight': Slot((f, d), there + 'mlp/gating/w', f),
        here + 'mlp.down_proj.weight': Slot((d, f), there + 'mlp/linear/w'),
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
