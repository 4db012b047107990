"""Where google-deepmind/gemma keeps each canonical tensor.

Names and shapes: its `gm/nn` for Gemma 3 and `gm/nn/gemma4` for Gemma 4; paths
are those of the nested layout.
"""

import dataclasses

from kvgraft_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Part:
  """Where a canonical tensor lies in the tree.

  It is transpose(leaf[index], axes), reshaped.

  Attributes:
    leaf: path in the nested layout.
    shape: of the whole leaf.
    index: leading axes that are picked.
    axes: order of the others.
  """

  leaf: str
  shape: tuple[int, ...]
  index: tuple[int, ...] = ()
  axes: tuple[int, ...] | None = None

  @property
  def order(self) -> tuple[int, ...]:
    """Order of the axes behind the picked ones."""
    return self.axes or tuple(range(len(self.shape) - len(self.index)))

  @property
  def view_shape(self) -> tuple[int, ...]:
    """Shape of the canonical tensor before it is reshaped."""
    rest = self.shape[len(self.index):]
    return tuple(rest[a] for a in self.order)


def key(path: str) -> str:
  """Returns the form in which leaves with and without /w are the same."""
  return path.removesuffix('/w')


def parts(config: config_lib.ModelConfig) -> dict[str, Part]:
  """Returns canonical name -> its place, as the published models have it."""
  d, v = config.width, config.vocab_size
  out = {
      'embed_tokens.weight': Part('embedder/input_embedding', (v, d)),
      'norm.weight': Part('final_norm/scale', (d,)),
  }
  if config.per_layer_dim:
    p, layers = config.per_layer_dim, len(config.layers)
    out |= {
        'embed_tokens_per_layer.weight': Part(
            'embedder/per_layer_embeddings', (v, layers, p)),
        'per_layer_model_projection.weight': Part(
            'embedder/per_layer_model_projection/w', (d, layers, p),
            axes=(1, 2, 0)),
        'per_layer_projection_norm.weight': Part(
            'embedder/per_layer_projection_norm/scale', (p,)),
    }
  for i in range(len(config.layers)):
    for name, part in _layer_parts(config, i).items():
      out[f'layers.{i}.{name}'] = dataclasses.replace(
          part, leaf=f'layer_{i}/{part.leaf}')
  return out


def _layer_parts(
    config: config_lib.ModelConfig, layer: int
) -> dict[str, Part]:
  """Returns the places of one layer's tensors, shared keys included."""
  d, f, n = config.width, config.layer_hidden(layer), config.num_heads
  spec = config.spec(config.layers[layer])
  h, k = spec.head_dim, spec.kv_heads
  under = '_' if config.family == 'gemma3' else ''
  norms = {'input_layernorm': 'pre_attention_norm',
           'post_attention_layernorm': 'post_attention_norm',
           'pre_feedforward_layernorm': 'pre_ffw_norm',
           'post_feedforward_layernorm': 'post_ffw_norm'}
  dense = 'mlp'
  if config.num_experts:
    # Their first branch is the experts, their second the dense one.
    dense = 'mlp2'
    norms |= {'pre_feedforward_layernorm': 'pre_ffw2_norm',
              'post_feedforward_layernorm_1': 'post_ffw2_norm',
              'pre_feedforward_layernorm_2': 'pre_ffw_norm',
              'post_feedforward_layernorm_2': 'post_ffw1_norm'}
  out = {f'{ours}.weight': Part(f'{theirs}/scale', (d,))
         for ours, theirs in norms.items()}
  heads = (0, 2, 1)  # [heads, D, H] to [heads, H, D].
  out |= {
      'self_attn.q_proj.weight': Part(
          'attn/q_einsum/w', (n, d, h), axes=heads),
      'self_attn.o_proj.weight': Part(
          'attn/attn_vec_einsum/w', (n, h, d), axes=(2, 0, 1)),
      'self_attn.q_norm.weight': Part(f'attn/{under}query_norm/scale', (h,)),
      'self_attn.k_norm.weight': Part(f'attn/{under}key_norm/scale', (h,)),
      'mlp.gate_proj.weight': Part(
          f'{dense}/gating_einsum', (2, f, d), (0,)),
      'mlp.up_proj.weight': Part(f'{dense}/gating_einsum', (2, f, d), (1,)),
      'mlp.down_proj.weight': Part(f'{dense}/linear', (f, d), axes=(1, 0)),
  }
  if spec.value_from_key:
    out['self_attn.k_proj.weight'] = Part(
        'attn/k_einsum/w', (k, d, h), axes=heads)
  else:
    for i, name in enumerate(('k_proj', 'v_proj')):
      out[f'self_attn.{name}.weight'] = Part(
          'attn/kv_einsum/w', (2, k, d, h), (i,), heads)
  if config.layer_scalar:
    out['layer_scalar'] = Part('skip_scale', (1,))
  if config.per_layer_dim:
    p = config.per_layer_dim
    out |= {
        'per_layer_input_gate.weight': Part(
            'per_layer_input_gate/w', (d, p), axes=(1, 0)),
        'per_layer_projection.weight': Part(
            'per_layer_projection/w', (p, d), axes=(1, 0)),
        'post_per_layer_input_norm.weight': Part(
            'post_per_layer_input_norm/scale', (d,)),
    }
  if config.num_experts:
    e, fe = config.num_experts, config.expert_hidden
    out |= {
        'router.proj.weight': Part(
            'mlp/router_logits/w', (d, e), axes=(1, 0)),
        'router.scale': Part('mlp/router_scale', (d,)),
        'router.per_expert_scale': Part('mlp/per_expert_scale', (e,)),
        'experts.gate_up_proj': Part(
            'mlp/gating_einsum/w', (e, 2, fe, d)),
        'experts.down_proj': Part(
            'mlp/linear/w', (e, fe, d), axes=(0, 2, 1)),
    }
  return out
