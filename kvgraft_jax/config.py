"""Architecture of a Gemma text decoder as frozen values.

Sources: google-deepmind/gemma `gm/nn`, Hugging Face `models/gemma3`,
`models/gemma4` and `models/gemma4_unified`, and the Gemma 3 technical report
(arXiv:2503.19786).
"""

import dataclasses
from typing import Any

SLIDING = 'sliding'
GLOBAL = 'global'
KINDS = (SLIDING, GLOBAL)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
  """What the attention layers of one kind share.

  Attributes:
    kv_heads: key/value heads K; query head n reads kv head n // (N / K).
    head_dim: H.
    window: positions a query sees, itself included; None sees all.
    rope_theta: rotary base, an integer.
    rope_divisor: divides the angle (linear rope scaling); 1 for none.
    rope_pairs: leading frequency pairs that rotate; None rotates all H / 2.
    value_from_key: values are the key projection before norm and rotary; there
      is no value projection.
  """

  kv_heads: int
  head_dim: int
  window: int | None
  rope_theta: int
  rope_divisor: int = 1
  rope_pairs: int | None = None
  value_from_key: bool = False


_SINCE_GEMMA4 = (
    'value_norm', 'layer_scalar', 'shared_layers', 'shared_hidden',
    'per_layer_dim', 'num_experts', 'top_k_experts', 'expert_hidden',
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Gemma text decoder.

  Attributes:
    name: preset or source name; not part of any fingerprint.
    family: 'gemma3' or 'gemma4'.
    vocab_size: text vocabulary V; embedding rows beyond it are dropped.
    width: D.
    hidden: feed-forward width F.
    num_heads: query heads N.
    layers: kind of each layer, first to last.
    sliding: spec of the sliding layers.
    full: spec of the global layers.
    query_scale_dim: attention scale is query_scale_dim ** -0.5.
    norm_offset: 1 where the norm weight is stored as w and used as 1 + w.
    max_context: positions the model was made for.
    final_softcap: logits become c * tanh(logits / c); None leaves them.
    value_norm: values are normed per head, without a weight.
    layer_scalar: a layer's output is multiplied by one learnt number.
    shared_layers: the last layers that have no keys and values of their own
      and read those of the last layer of their kind in front of them.
    shared_hidden: F of these layers; 0 for `hidden`.
    per_layer_dim: size of the per-layer embeddings; 0 for none.
    num_experts: experts beside the dense feed-forward; 0 for none.
    top_k_experts: experts that a token is sent to.
    expert_hidden: F of an expert.
  """

  name: str
  family: str
  vocab_size: int
  width: int
  hidden: int
  num_heads: int
  layers: tuple[str, ...]
  sliding: AttentionSpec
  full: AttentionSpec
  query_scale_dim: int
  max_context: int
  norm_offset: int = 1
  final_softcap: int | None = None
  value_norm: bool = False
  layer_scalar: bool = False
  shared_layers: int = 0
  shared_hidden: int = 0
  per_layer_dim: int = 0
  num_experts: int = 0
  top_k_experts: int = 0
  expert_hidden: int = 0

  def spec(self, kind: str) -> AttentionSpec:
    """Returns the attention spec of `kind`."""
    return self.sliding if kind == SLIDING else self.full

  @property
  def first_shared(self) -> int:
    """Number of the first layer without keys and values of its own."""
    return len(self.layers) - self.shared_layers

  def kind_layers(self, kind: str) -> tuple[int, ...]:
    """Returns the layers of `kind` that own keys and values, ascending.

    These are the rows of the cache and of an artifact.
    """
    owners = self.layers[:self.first_shared]
    return tuple(i for i, k in enumerate(owners) if k == kind)

  def cache_row(self, layer: int) -> int:
    """Returns the row of its kind's cache that a layer reads.

    A shared layer reads what the last owner of its kind wrote.
    """
    rows = self.kind_layers(self.layers[layer])
    return rows.index(layer) if layer < self.first_shared else len(rows) - 1

  def layer_hidden(self, layer: int) -> int:
    """Returns the dense feed-forward width of a layer."""
    shared = layer >= self.first_shared and self.shared_hidden
    return self.shared_hidden if shared else self.hidden

  def to_json(self) -> dict:
    """Returns the canonical-JSON form, without the name.

    What Gemma 3 lacks is left out where it is off, so that the fingerprints of
    its models stay what they were.
    """
    value = dataclasses.asdict(self)
    del value['name']
    value['layers'] = list(self.layers)
    for spec in (value['sliding'], value['full']):
      if not spec['value_from_key']:
        del spec['value_from_key']
    for name in _SINCE_GEMMA4:
      if not value[name]:
        del value[name]
    return value

  @classmethod
  def from_json(cls, value: dict, name: str) -> 'ModelConfig':
    """Returns the config that `to_json` wrote."""
    value = dict(value, name=name, layers=tuple(value['layers']))
    for field in ('sliding', 'full'):
      value[field] = AttentionSpec(**value[field])
    return cls(**value)


def _gemma3(
    name: str, *, layers: int, width: int, hidden: int, heads: int,
    kv_heads: int, window: int, head_dim: int = 256,
    query_scale_dim: int | None = None, max_context: int = 131072,
    rope_divisor: int = 8,
) -> ModelConfig:
  """Five sliding layers, then one global, cut off at `layers`."""
  return ModelConfig(
      name=name,
      family='gemma3',
      vocab_size=262144,
      width=width,
      hidden=hidden,
      num_heads=heads,
      layers=tuple(
          GLOBAL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)
      ),
      sliding=AttentionSpec(kv_heads, head_dim, window, 10_000),
      full=AttentionSpec(kv_heads, head_dim, None, 1_000_000, rope_divisor),
      query_scale_dim=query_scale_dim or head_dim,
      max_context=max_context,
  )


# What every Gemma 4 has.
_GEMMA4: dict[str, Any] = {
    'family': 'gemma4', 'query_scale_dim': 1, 'norm_offset': 0,
    'final_softcap': 30, 'value_norm': True, 'layer_scalar': True,
}


def _gemma4(
    name: str, *, layers: int, width: int, hidden: int, heads: int,
    kv_heads: int, global_kv_heads: int, window: int, max_context: int,
    global_every: int = 6, value_from_key: bool = True, **rest: Any,
) -> ModelConfig:
  """`global_every` - 1 sliding layers, then one global, repeated."""
  return ModelConfig(
      name=name,
      vocab_size=262144,
      width=width,
      hidden=hidden,
      num_heads=heads,
      layers=tuple(
          SLIDING if (i + 1) % global_every else GLOBAL for i in range(layers)
      ),
      sliding=AttentionSpec(kv_heads, 256, window, 10_000),
      # A quarter of 512 rotates: 64 pairs of 256.
      full=AttentionSpec(global_kv_heads, 512, None, 1_000_000, rope_pairs=64,
                         value_from_key=value_from_key),
      max_context=max_context,
      **_GEMMA4,
      **rest,
  )


PRESETS = {
    c.name: c
    for c in (
        _gemma3('gemma3-270m', layers=18, width=640, hidden=2048, heads=4,
                kv_heads=1, window=512, max_context=32768, rope_divisor=1),
        _gemma3('gemma3-1b', layers=26, width=1152, hidden=6912, heads=4,
                kv_heads=1, window=512, max_context=32768, rope_divisor=1),
        _gemma3('gemma3-4b', layers=34, width=2560, hidden=10240, heads=8,
                kv_heads=4, window=1024),
        _gemma3('gemma3-12b', layers=48, width=3840, hidden=15360, heads=16,
                kv_heads=8, window=1024),
        _gemma3('gemma3-27b', layers=62, width=5376, hidden=21504, heads=32,
                kv_heads=16, window=1024, head_dim=128, query_scale_dim=168),
        _gemma4('gemma4-e2b', layers=35, width=1536, hidden=6144, heads=8,
                kv_heads=1, global_kv_heads=1, window=512, max_context=131072,
                global_every=5, value_from_key=False, shared_layers=20,
                shared_hidden=12288, per_layer_dim=256),
        _gemma4('gemma4-e4b', layers=42, width=2560, hidden=10240, heads=8,
                kv_heads=2, global_kv_heads=2, window=512, max_context=131072,
                value_from_key=False, shared_layers=18, per_layer_dim=256),
        _gemma4('gemma4-12b', layers=48, width=3840, hidden=15360, heads=16,
                kv_heads=8, global_kv_heads=1, window=1024,
                max_context=262144),
        _gemma4('gemma4-26b-a4b', layers=30, width=2816, hidden=2112, heads=16,
                kv_heads=8, global_kv_heads=2, window=1024, max_context=262144,
                num_experts=128, top_k_experts=8, expert_hidden=704),
        _gemma4('gemma4-31b', layers=60, width=5376, hidden=21504, heads=32,
                kv_heads=16, global_kv_heads=4, window=1024,
                max_context=262144),
    )
}

# Random weights, byte tokenizer: 256 bytes behind the four special ids.
TINY = ModelConfig(
    name='tiny',
    family='gemma3',
    vocab_size=320,
    width=64,
    hidden=128,
    num_heads=4,
    layers=(SLIDING, SLIDING, GLOBAL, SLIDING, GLOBAL),
    sliding=AttentionSpec(2, 32, 24, 10_000),
    full=AttentionSpec(2, 32, None, 1_000_000, 8),
    query_scale_dim=48,
    max_context=4096,
)


def _tiny_gemma4(
    size: str, layers: tuple[str, ...], *, kv_heads: int = 2,
    global_kv_heads: int = 1, value_from_key: bool = True, **rest: Any,
) -> ModelConfig:
  """Returns what a published size has, made small."""
  return ModelConfig(
      name=f'tiny-gemma4-{size}',
      vocab_size=320,
      width=64,
      hidden=128,
      num_heads=4,
      layers=layers,
      sliding=AttentionSpec(kv_heads, 32, 24, 10_000),
      full=AttentionSpec(global_kv_heads, 64, None, 1_000_000, rope_pairs=8,
                         value_from_key=value_from_key),
      max_context=4096,
      **_GEMMA4,
      **rest,
  )


TINY_PRESETS = {
    c.name: c
    for c in (
        TINY,
        _tiny_gemma4('e2b', (SLIDING, SLIDING, GLOBAL, SLIDING, GLOBAL) * 2,
                     kv_heads=1, value_from_key=False, shared_layers=5,
                     shared_hidden=256, per_layer_dim=16),
        _tiny_gemma4('e4b', (SLIDING, SLIDING, GLOBAL) * 3, global_kv_heads=2,
                     value_from_key=False, shared_layers=3, per_layer_dim=16),
        _tiny_gemma4('12b', (SLIDING, SLIDING, GLOBAL) * 2),
        _tiny_gemma4('26b-a4b', (SLIDING, SLIDING, GLOBAL) * 2, num_experts=8,
                     top_k_experts=2, expert_hidden=48),
        _tiny_gemma4('31b', (SLIDING, SLIDING, GLOBAL, SLIDING, GLOBAL),
                     global_kv_heads=2),
    )
}


def known(config: ModelConfig) -> ModelConfig:
  """Returns the preset that computes the same; `config` if there is none."""
  for preset in (*PRESETS.values(), *TINY_PRESETS.values()):
    if dataclasses.replace(config, name=preset.name) == preset:
      return preset
  return config


def is_tiny(config: ModelConfig) -> bool:
  """Returns whether it is a tiny preset, whatever its files are called."""
  return config in TINY_PRESETS.values()
