"""What Hugging Face's config.json says about the architecture.

Published files are sparse: what they leave out is a default of the family's
configuration class (github.com/huggingface/transformers `models/gemma3`,
`models/gemma4` and `models/gemma4_unified`), kept here. Rotary fields come in
an old form (rope_theta, rope_scaling) and a new one (rope_parameters).
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors

# Ids from here on are no text; larger tables have rows for them.
_TEXT_VOCABULARY = 262_144
_TEXT_TYPES = ('gemma3_text', 'gemma4_text', 'gemma4_unified_text')
_OUTER_TYPES = {t.removesuffix('_text'): t for t in _TEXT_TYPES}
_KINDS = {
    'sliding_attention': config_lib.SLIDING,
    'full_attention': config_lib.GLOBAL,
}
KIND_NAMES = {kind: name for name, kind in _KINDS.items()}
_THETA = {config_lib.SLIDING: 10_000, config_lib.GLOBAL: 1_000_000}
EPS = 1e-6  # Of every norm.

_COMMON = {
    'attention_bias': False,
    'attn_logit_softcapping': None,
    'final_logit_softcapping': None,
    'head_dim': 256,
    'hidden_activation': 'gelu_pytorch_tanh',
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'max_position_embeddings': 131_072,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'rms_norm_eps': EPS,
    'tie_word_embeddings': True,
}
_GEMMA4 = _COMMON | {
    'attention_k_eq_v': False,
    'enable_moe_block': False,
    'global_head_dim': 512,
    'hidden_size_per_layer_input': 256,
    'num_global_key_value_heads': None,
    'num_hidden_layers': 30,
    'num_kv_shared_layers': 0,
    'sliding_window': 512,
    'use_bidirectional_attention': None,
    'use_double_wide_mlp': False,
    'vocab_size': 262_144,
    'vocab_size_per_layer_input': 262_144,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    'gemma3_text': _COMMON | {
        'num_hidden_layers': 26,
        'query_pre_attn_scalar': 256,
        'sliding_window': 4096,
        'sliding_window_pattern': 6,
        'use_bidirectional_attention': False,
        'vocab_size': 262_208,
    },
    'gemma4_text': _GEMMA4,
    'gemma4_unified_text': _GEMMA4 | {
        'hidden_size_per_layer_input': 0,
        'max_position_embeddings': 262_144,
        'sliding_window': 1024,
        'use_bidirectional_attention': 'vision',
    },
}
# Of rope_parameters as a whole, where a Gemma 4 file has none.
_GEMMA4_ROPE = {
    'sliding_attention': {'rope_type': 'default'},
    'full_attention': {
        'rope_type': 'proportional', 'partial_rotary_factor': 0.25,
    },
}


@dataclasses.dataclass(frozen=True)
class HfConfig:
  """What a config.json says.

  Attributes:
    config: the architecture.
    rows: canonical name -> rows of each table that has one row an id; they may
      be more than the text vocabulary.
  """

  config: config_lib.ModelConfig
  rows: dict[str, int]


def from_json(
    values: Mapping[str, Any], name: str, source: str
) -> HfConfig:
  """Returns the architecture that a config.json describes.

  Args:
    values: content of the file.
    name: of the config, where it is none of the published sizes.
    source: path, for messages.

  Raises:
    UsageError: if it is no Gemma 3 or 4, or a variant that is not supported.
  """
  if values.get('quantization_config') is not None:
    raise quantised(f'{source}: quantization_config')
  found = values.get('model_type')
  if found in _TEXT_TYPES:
    return _Reader(source, '', values, found).read(name)
  if not isinstance(found, str) or found not in _OUTER_TYPES:
    expected = ', '.join((*_OUTER_TYPES, *_TEXT_TYPES))
    raise errors.UsageError(
        f'{source}: model_type expected one of {expected}, found {found!r}:'
        ' give a Gemma 3 or Gemma 4 checkpoint'
    )
  text = values.get('text_config', {})
  if text is None:
    text = {}
  if not isinstance(text, Mapping):
    raise errors.UsageError(
        f'{source}: text_config expected an object, found {text!r:.40}:'
        ' correct the file'
    )
  kind = _OUTER_TYPES[found]
  # The outer file decides whether the head is tied.
  text = {
      **text, 'tie_word_embeddings': values.get('tie_word_embeddings', True)
  }
  reader = _Reader(source, 'text_config.', text, kind)
  reader.expect('model_type', kind, kind)
  if text.get('quantization_config') is not None:
    raise quantised(f'{source}: text_config.quantization_config')
  return reader.read(name)


def quantised(what: str) -> errors.UsageError:
  """Returns the refusal of quantised weights.

  Args:
    what: where they were seen.
  """
  return errors.UsageError(
      f'{what}: quantised weights at run time are not supported yet: use the'
      ' unquantised checkpoint or a GGUF file'
  )


class _Reader:
  """Reads the text part of a config.json."""

  def __init__(
      self, source: str, where: str, values: Mapping[str, Any], kind: str
  ):
    self._source, self._where, self._kind = source, where, kind
    self._values = values
    self._defaults = _DEFAULTS[kind]

  def read(self, name: str) -> HfConfig:
    """Returns everything, named as the preset that it equals, or `name`."""
    self.expect('attention_bias', False)
    self.expect('attn_logit_softcapping', None)
    self.expect('hidden_activation', 'gelu_pytorch_tanh')
    self.expect('rms_norm_eps', EPS)
    self.expect('tie_word_embeddings', True)
    table = self._whole('vocab_size')
    config = self._gemma3() if self._kind == 'gemma3_text' else self._gemma4()
    config = dataclasses.replace(
        config, name=name, vocab_size=min(table, _TEXT_VOCABULARY)
    )
    self._check(config)
    rows = {'embed_tokens.weight': table}
    if config.per_layer_dim:
      per_layer = self._whole('vocab_size_per_layer_input')
      if per_layer < config.vocab_size:
        raise self.refusal(
            'vocab_size_per_layer_input', f'at least {config.vocab_size}',
            per_layer,
        )
      rows['embed_tokens_per_layer.weight'] = per_layer
    return HfConfig(config_lib.known(config), rows)

  def expect(self, key: str, expected: Any, default: Any = None) -> None:
    """Refuses any other value of a key."""
    found = self._get(key, default)
    if found != expected or isinstance(found, bool) != isinstance(
        expected, bool):
      raise self.refusal(key, expected, found)

  def refusal(
      self, key: str, expected: Any, found: Any
  ) -> errors.UsageError:
    """Returns what to raise for a value that cannot be used."""
    return errors.UsageError(
        f'{self._source}: {self._where}{key} expected {expected}, found'
        f' {str(found)[:60]}: this variant is not supported'
    )

  def _get(self, key: str, default: Any = None) -> Any:
    return self._values.get(key, self._defaults.get(key, default))

  def _whole(self, key: str, least: int = 1) -> int:
    return self._as_whole(key, self._get(key), least)

  def _as_whole(self, key: str, found: Any, least: int = 1) -> int:
    """Returns an integer, which some files write as 8.0."""
    if (type(found) not in (int, float) or found % 1 or found < least
        or found > 1 << 40):
      raise self.refusal(key, f'a whole number of at least {least}', found)
    return int(found)

  def _flag(self, key: str) -> bool:
    found = self._get(key)
    if found is not None and type(found) is not bool:
      raise self.refusal(key, 'true or false', found)
    return bool(found)

  def _gemma3(self) -> config_lib.ModelConfig:
    self.expect('use_bidirectional_attention', False)
    heads = self._whole('num_key_value_heads'), self._whole('head_dim')
    return self._config(
        self._layers(self._get('sliding_window_pattern')),
        dict.fromkeys(config_lib.KINDS, heads),
        family='gemma3',
        query_scale_dim=self._whole('query_pre_attn_scalar'),
    )

  def _gemma4(self) -> config_lib.ModelConfig:
    # 'vision' changes what image tokens see and nothing for text.
    if self._get('use_bidirectional_attention') not in (None, False, 'vision'):
      raise self.refusal(
          'use_bidirectional_attention', "null or 'vision'",
          self._get('use_bidirectional_attention'),
      )
    layers = self._layers(6)
    if layers[-1] != config_lib.GLOBAL:
      raise self.refusal(
          f'layer_types[{len(layers) - 1}]', 'full_attention',
          KIND_NAMES[layers[-1]],
      )
    shared = self._whole('num_kv_shared_layers', 0)
    if set(layers[:max(0, len(layers) - shared)]) != set(layers):
      raise self.refusal(
          'num_kv_shared_layers', 'each kind of layer in front of the shared'
          ' ones', shared,
      )
    experts: dict[str, int] = {}
    if self._flag('enable_moe_block'):
      # Early files have the one name, later files the other.
      width = 'moe_intermediate_size'
      if self._get(width) is None:
        width = 'expert_intermediate_size'
      experts = {
          'num_experts': self._whole('num_experts'),
          'top_k_experts': self._whole('top_k_experts'),
          'expert_hidden': self._whole(width),
      }
      if experts['top_k_experts'] > experts['num_experts']:
        raise self.refusal(
            'top_k_experts', f"at most {experts['num_experts']}",
            experts['top_k_experts'],
        )
    per_layer = self._get('hidden_size_per_layer_input')
    wide = shared and self._flag('use_double_wide_mlp')
    return self._config(
        layers,
        self._heads(layers),
        family='gemma4',
        query_scale_dim=1,
        norm_offset=0,
        value_norm=True,
        layer_scalar=True,
        shared_layers=shared,
        shared_hidden=2 * self._whole('intermediate_size') if wide else 0,
        per_layer_dim=(
            self._whole('hidden_size_per_layer_input') if per_layer else 0
        ),
        **experts,
    )

  def _config(
      self, layers: tuple[str, ...], heads: dict[str, tuple[int, int]],
      **rest: Any,
  ) -> config_lib.ModelConfig:
    """Returns the config, with what both families read alike."""
    specs = {}
    for kind, (kv_heads, head_dim) in heads.items():
      theta, divisor, pairs = self._rope(kind, head_dim)
      is_sliding = kind == config_lib.SLIDING
      specs[kind] = config_lib.AttentionSpec(
          kv_heads, head_dim,
          self._whole('sliding_window') if is_sliding else None,
          theta, divisor, pairs,
          value_from_key=not is_sliding and self._flag('attention_k_eq_v'),
      )
    softcap = self._get('final_logit_softcapping')
    return config_lib.ModelConfig(
        name='',
        vocab_size=0,
        width=self._whole('hidden_size'),
        hidden=self._whole('intermediate_size'),
        num_heads=self._whole('num_attention_heads'),
        layers=layers,
        sliding=specs[config_lib.SLIDING],
        full=specs[config_lib.GLOBAL],
        max_context=self._whole('max_position_embeddings'),
        final_softcap=(
            None if softcap is None
            else self._as_whole('final_logit_softcapping', softcap)
        ),
        **rest,
    )

  def _layers(self, pattern: Any) -> tuple[str, ...]:
    """Returns the kinds; where they are not listed, one in `pattern`."""
    count = self._whole('num_hidden_layers')
    if count > 1024:
      raise self.refusal('num_hidden_layers', 'at most 1024', count)
    names = self._get('layer_types')
    if names is None:
      every = self._as_whole('sliding_window_pattern', pattern)
      return tuple(
          config_lib.SLIDING if (i + 1) % every else config_lib.GLOBAL
          for i in range(count)
      )
    if not isinstance(names, Sequence) or len(names) != count:
      raise self.refusal('layer_types', f'a list of {count} names', names)
    for i, name in enumerate(names):
      if name not in list(_KINDS):
        raise self.refusal(f'layer_types[{i}]', ' or '.join(_KINDS), name)
    return tuple(_KINDS[name] for name in names)

  def _heads(self, layers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns kind -> (kv heads, head dim) of a Gemma 4."""
    both = self._whole('num_key_value_heads'), self._whole('head_dim')
    if 'per_layer_config' in self._values:
      return self._overridden(layers, *both)
    kv_heads = self._get('num_global_key_value_heads')
    if kv_heads is None or not self._flag('attention_k_eq_v'):
      kv_heads = both[0]  # As the configuration class has it.
    return {
        config_lib.SLIDING: both,
        config_lib.GLOBAL: (
            self._as_whole('num_global_key_value_heads', kv_heads),
            self._whole('global_head_dim'),
        ),
    }

  def _overridden(
      self, layers: Sequence[str], kv_heads: int, head_dim: int
  ) -> dict[str, tuple[int, int]]:
    """Returns the same from per_layer_config, which must agree in a kind."""
    overrides = self._get('per_layer_config')
    if overrides is None:
      overrides = {}
    if not isinstance(overrides, Mapping):
      raise self.refusal('per_layer_config', 'an object', overrides)
    for layer, values in overrides.items():
      key = f'per_layer_config.{layer}'
      if layer not in list(map(str, range(len(layers)))):
        raise self.refusal(key, f'a layer below {len(layers)}', layer)
      if not isinstance(values, Mapping):
        raise self.refusal(key, 'an object', values)
      for name in values:
        if name not in ('head_dim', 'num_key_value_heads'):
          raise self.refusal(
              f'{key}.{name}', 'only head_dim and num_key_value_heads there',
              values[name],
          )
    out = dict.fromkeys(config_lib.KINDS, (kv_heads, head_dim))
    seen: set[str] = set()
    for i, kind in enumerate(layers):
      values, key = overrides.get(str(i), {}), f'per_layer_config.{i}'
      heads = (
          self._as_whole(f'{key}.num_key_value_heads',
                         values.get('num_key_value_heads', kv_heads)),
          self._as_whole(f'{key}.head_dim', values.get('head_dim', head_dim)),
      )
      if kind in seen and out[kind] != heads:
        raise self.refusal(
            key, f'(kv heads, head dim) {out[kind]} of the other'
            f' {KIND_NAMES[kind]} layers', heads,
        )
      seen.add(kind)
      out[kind] = heads
    return out

  def _rope(self, kind: str, head_dim: int) -> tuple[int, int, int | None]:
    """Returns base, divisor of the angle, and pairs that rotate."""
    name = KIND_NAMES[kind]
    params, key = self._rope_fields(name), f'rope_parameters.{name}'
    theta = self._as_whole(
        f'{key}.rope_theta', params.get('rope_theta', _THETA[kind])
    )
    form = params.get('rope_type', params.get('type', 'default'))
    factor = params.get('factor', 1)
    part = params.get('partial_rotary_factor', 1)
    if form == 'default':
      expected = {'factor': 1, 'partial_rotary_factor': 1}
    elif form == 'linear':
      expected = {'partial_rotary_factor': 1}
    elif form == 'proportional':
      expected = {}
    else:
      raise self.refusal(
          f'{key}.rope_type', 'default, linear or proportional', form
      )
    for field, value in expected.items():
      if params.get(field) not in (None, value):
        raise self.refusal(f'{key}.{field}', f'{value} ({form})', params[field])
    divisor = self._as_whole(f'{key}.factor', 1 if factor is None else factor)
    if part is None:
      part = 1
    if type(part) not in (int, float) or not 0 < part <= 1:
      raise self.refusal(
          f'{key}.partial_rotary_factor', 'more than 0, at most 1', part
      )
    pairs = int(part * head_dim // 2)
    return theta, divisor, pairs if pairs < head_dim // 2 else None

  def _rope_fields(self, name: str) -> Mapping[str, Any]:
    """Returns the rotary fields of a kind of layer, old or new."""
    gemma3 = self._kind == 'gemma3_text'
    nested = self._values.get('rope_parameters')
    if nested is None:
      nested = {} if gemma3 else _GEMMA4_ROPE
    if not isinstance(nested, Mapping) or not set(nested) <= set(_KINDS):
      raise self.refusal(
          'rope_parameters', f'an object with {" and ".join(_KINDS)}', nested
      )
    fields = nested.get(name)
    if fields is None:
      if not gemma3:
        raise self.refusal(f'rope_parameters.{name}', 'an object', fields)
      fields = {}
    if not isinstance(fields, Mapping):
      raise self.refusal(f'rope_parameters.{name}', 'an object', fields)
    if not gemma3:
      return fields
    is_full = name == 'full_attention'
    scaling = self._values.get('rope_scaling') if is_full else None
    if scaling is not None:
      if not isinstance(scaling, Mapping):
        raise self.refusal('rope_scaling', 'an object', scaling)
      # Its 'type' is the older name of 'rope_type'.
      fields = {
          **{k: v for k, v in fields.items() if k != 'rope_type'}, **scaling
      }
    theta = self._values.get(
        'rope_theta' if is_full else 'rope_local_base_freq'
    )
    return fields if theta is None else {'rope_theta': theta, **fields}

  def _check(self, config: config_lib.ModelConfig) -> None:
    for kind in config_lib.KINDS:
      spec = config.spec(kind)
      if config.num_heads % spec.kv_heads or spec.head_dim % 2:
        raise self.refusal(
            'num_attention_heads', 'a multiple of the kv heads and an even'
            ' head dim', f'{config.num_heads} heads, {spec.kv_heads} kv heads'
            f' of {spec.head_dim} ({KIND_NAMES[kind]})',
        )
