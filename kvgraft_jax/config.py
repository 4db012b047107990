"""Architecture of a Gemma text decoder as frozen values.

Sources: google-deepmind/gemma `gm/nn`, Hugging Face `models/gemma3`, and the
Gemma 3 technical report (arXiv:2503.19786).
"""

import dataclasses

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
  """

  kv_heads: int
  head_dim: int
  window: int | None
  rope_theta: int
  rope_divisor: int = 1
  rope_pairs: int | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A Gemma text decoder.

  Attributes:
    name: preset or source name; not part of any fingerprint.
    family: 'gemma3'.
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

  def spec(self, kind: str) -> AttentionSpec:
    """Returns the attention spec of `kind`."""
    return self.sliding if kind == SLIDING else self.full

  def kind_layers(self, kind: str) -> tuple[int, ...]:
    """Returns the layer numbers of `kind`, ascending: the cache's rows."""
    return tuple(i for i, k in enumerate(self.layers) if k == kind)

  def to_json(self) -> dict:
    """Returns the canonical-JSON form, without the name."""
    value = dataclasses.asdict(self)
    del value['name']
    value['layers'] = list(self.layers)
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
