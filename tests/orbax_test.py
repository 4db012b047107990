"""DeepMind's Orbax trees: four layouts, damage, refusals, memory, writing."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
from orbax import checkpoint as ocp
import pytest

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import orbax_names
from kvgraft_jax.checkpoints import orbax_trees
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints import tree
import tokenizer_writer

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TINY = config_lib.TINY_PRESETS
E2B, E4B, MOE, LARGE = (
    TINY[f'tiny-gemma4-{size}'] for size in ('e2b', 'e4b', '26b-a4b', '31b'))


class Canonical:
  """A source in memory."""

  source, tokenizer, template, files = 'memory', None, None, ()

  def __init__(self, config, dtype=BFLOAT16):
    self.config, self.slots = config, tree.slots(config)
    rng = np.random.default_rng(7)
    self.values = {
        name: rng.standard_normal(slot.shape, np.float32).astype(dtype)
        for name, slot in self.slots.items()}

  def value_dtype(self, name):
    return self.values[name].dtype.name

  def pieces(self, name):
    value = self.values[name]
    step = -(-value.shape[0] // 3)
    for start in range(0, value.shape[0], step):
      yield value[start:start + step]


def deepmind(source, bare=True, swapped=False):
  """Returns the nested tree of a model, as google-deepmind/gemma defines it.

  Args:
    source: canonical tensors.
    bare: whether feed-forward leaves stand alone, or below 'w'.
    swapped: whether the gate is stored [D, F], and not [F, D].
  """
  c, values = source.config, source.values
  d, n = c.width, c.num_heads
  under = '_' if c.family == 'gemma3' else ''

  def get(name):
    return values[f'{name}.weight']

  def ffw(value):
    return value if bare else {'w': value}

  def heads(name, count, size):
    return get(name).reshape(count, size, d).swapaxes(1, 2)

  out = {
      'embedder': {'input_embedding': get('embed_tokens')},
      'final_norm': {'scale': get('norm')},
  }
  if c.per_layer_dim:
    layers, p = len(c.layers), c.per_layer_dim
    out['embedder'] |= {
        'per_layer_embeddings':
            get('embed_tokens_per_layer').reshape(-1, layers, p),
        'per_layer_model_projection': {
            'w': get('per_layer_model_projection').T.reshape(d, layers, p)},
        'per_layer_projection_norm': {
            'scale': get('per_layer_projection_norm')},
    }
  for i, kind in enumerate(c.layers):
    at = f'layers.{i}.'
    spec = c.spec(kind)
    h, k = spec.head_dim, spec.kv_heads
    norms = {
        'pre_attention_norm': 'input_layernorm',
        'post_attention_norm': 'post_attention_layernorm',
        'pre_ffw_norm': 'pre_feedforward_layernorm',
        'post_ffw_norm': 'post_feedforward_layernorm',
    }
    if c.num_experts:
      norms |= {
          'pre_ffw2_norm': 'pre_feedforward_layernorm',
          'post_ffw2_norm': 'post_feedforward_layernorm_1',
          'pre_ffw_norm': 'pre_feedforward_layernorm_2',
          'post_ffw1_norm': 'post_feedforward_layernorm_2',
      }
    layer = {theirs: {'scale': get(at + ours)}
             for theirs, ours in norms.items()}
    attn = layer['attn'] = {
        'q_einsum': {'w': heads(f'{at}self_attn.q_proj', n, h)},
        'attn_vec_einsum': {
            'w': get(f'{at}self_attn.o_proj').T.reshape(n, h, d)},
        f'{under}query_norm': {'scale': get(f'{at}self_attn.q_norm')},
    }
    if i >= c.first_shared:
      attn[f'{under}key_norm'] = {'scale': np.zeros(h, BFLOAT16)}
      attn['kv_einsum'] = {'w': np.zeros((2, k, d, h), BFLOAT16)}
    else:
      attn[f'{under}key_norm'] = {'scale': get(f'{at}self_attn.k_norm')}
      keys = heads(f'{at}self_attn.k_proj', k, h)
      if spec.value_from_key:
        attn['k_einsum'] = {'w': keys}
      else:
        attn['kv_einsum'] = {
            'w': np.stack([keys, heads(f'{at}self_attn.v_proj', k, h)])}
    gate = np.stack([get(f'{at}mlp.gate_proj'), get(f'{at}mlp.up_proj')])
    layer['mlp2' if c.num_experts else 'mlp'] = {
        'gating_einsum': ffw(gate.swapaxes(1, 2) if swapped else gate),
        'linear': ffw(get(f'{at}mlp.down_proj').T),
    }
    if c.num_experts:
      layer['mlp'] = {
          'router_logits': {'w': get(f'{at}router.proj').T},
          'router_scale': values[f'{at}router.scale'],
          'per_expert_scale': values[f'{at}router.per_expert_scale'],
          'gating_einsum': {'w': values[f'{at}experts.gate_up_proj'].reshape(
              c.num_experts, 2, c.expert_hidden, d)},
          'linear': {'w': values[f'{at}experts.down_proj'].swapaxes(1, 2)},
      }
    if c.layer_scalar:
      layer['skip_scale'] = values[f'{at}layer_scalar']
    if c.per_layer_dim:
      layer |= {
          'per_layer_input_gate': {'w': get(f'{at}per_layer_input_gate').T},
          'per_layer_projection': {'w': get(f'{at}per_layer_projection').T},
          'post_per_layer_input_norm': {
              'scale': get(f'{at}post_per_layer_input_norm')},
      }
    out[f'layer_{i}'] = layer
  return out


def flat(nested):
  """Returns the tree as {'transformer/a/b': {'w': leaf}}."""
  out = {}
  for path, leaf in tree.flatten(nested):
    if path.endswith(('/mlp/gating_einsum', '/mlp/linear')):
      path += '/w'
    parent, name = f'transformer/{path}'.rsplit('/', 1)
    out.setdefault(parent, {})[name] = leaf
  return out


def stacked(nested, pattern):
  """Returns the flat tree with the layers of one place in the pattern joined.
  """
  out, lists = {}, {}
  for parent, leaves in flat(nested).items():
    _, head, *rest = parent.split('/')
    if not head.startswith('layer_'):
      out[parent] = leaves
      continue
    place = int(head.removeprefix('layer_')) % pattern
    parent = '/'.join(
        [f'transformer/stacked_layers/attention_type_{place}', *rest])
    for name, leaf in leaves.items():
      lists.setdefault(parent, {}).setdefault(name, []).append(leaf)
  for parent, leaves in lists.items():
    out[parent] = {name: np.stack(values) for name, values in leaves.items()}
  return out


def save(path, value, **options):
  with ocp.StandardCheckpointer(**options) as checkpointer:
    checkpointer.save(path, value)
  return path


def check(found, expected):
  """Asserts that all canonical tensors are byte-equal."""
  assert found.config == expected.config
  for name, slot in found.slots.items():
    value = np.concatenate(list(found.pieces(name)))
    assert value.shape == slot.shape, name
    assert found.value_dtype(name) == value.dtype.name == (
        expected.value_dtype(name)), name
    assert value.tobytes() == expected.values[name].tobytes(), name


@pytest.mark.parametrize('config, pattern', [
    # Layers of one place in the pattern need one shape: those of E2B, whose
    # later layers are wider, cannot be stacked.
    (config_lib.TINY, 5), (LARGE, 5), (MOE, 3), (E4B, 3), (E2B, None)])
def test_layouts(tmp_path, config, pattern):
  source = Canonical(config)
  nested = deepmind(source)
  trees = {
      'nested': nested,
      'flat': flat(nested),
      'kauldron': {'params': nested, 'step': np.int32(3), 'collections': {},
                   'opt_state': {'mu': {'layer_0': np.ones(3, np.float32)}}},
  }
  if pattern:
    trees['stacked'] = stacked(nested, pattern)
  prints = set()
  for layout, value in trees.items():
    found = orbax_trees.OrbaxDirectory(save(tmp_path / layout, value))
    check(found, source)
    prints.add(source_lib.load(found, 'bfloat16')[1])
    assert all(os.path.isfile(f) for f in found.files) and found.files
    shared = [s for s in found.skipped if s.endswith('attn/kv_einsum')]
    assert len(shared) == config.shared_layers
    assert ('opt_state/mu/layer_0' in found.skipped) == (layout == 'kauldron')
  assert prints == {source_lib.load(source, 'bfloat16')[1]}


def test_a_pattern_that_the_layers_do_not_fill(tmp_path):
  source = Canonical(config_lib.TINY)
  value = stacked(deepmind(source), 2)
  check(orbax_trees.OrbaxDirectory(save(tmp_path / 'x', value)), source)


@pytest.mark.parametrize('bare', [True, False])
@pytest.mark.parametrize('swapped', [True, False])
def test_forms_of_the_feed_forward(tmp_path, bare, swapped):
  for i, config in enumerate((config_lib.TINY, MOE)):
    source = Canonical(config)
    path = save(tmp_path / str(i), deepmind(source, bare, swapped))
    check(orbax_trees.OrbaxDirectory(path), source)


def test_storage_without_a_database(tmp_path):
  source = Canonical(LARGE)
  path = save(tmp_path / 'x', deepmind(source), use_ocdbt=False)
  check(orbax_trees.OrbaxDirectory(path), source)
  lost = path / 'layer_1.attn.q_einsum.w' / '0.0.0'
  lost.unlink()
  with pytest.raises(errors.DamageError, match='q_einsum.w expected 1 data'):
    orbax_trees.OrbaxDirectory(path)


def test_zarr3(tmp_path):
  source = Canonical(LARGE)
  handler = ocp.PyTreeCheckpointHandler(use_zarr3=True)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(tmp_path / 'x', deepmind(source))
  check(orbax_trees.OrbaxDirectory(tmp_path / 'x'), source)


def test_a_step_of_a_trainer(tmp_path):
  source = Canonical(config_lib.TINY)
  value = {'params': deepmind(source), 'step': np.int32(3), 'collections': {},
           'opt_state': {'mu': np.ones(3, np.float32)}}
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(3, args=ocp.args.StandardSave(value))
  assert orbax_trees.is_orbax(tmp_path / '3')
  check(orbax_trees.OrbaxDirectory(tmp_path / '3'), source)


def test_encoders_are_skipped(tmp_path):
  source = Canonical(E4B)
  one = np.ones(3, np.float32)
  value = deepmind(source)
  value['vision_encoder'] = {'entry': {'w': one}}
  value['audio_encoder'] = {'lora_like': {'w': one}}
  value['embedder'] |= {
      'mm_input_projection': {'w': one}, 'audio_input_embedding': one}
  found = orbax_trees.OrbaxDirectory(save(tmp_path / 'a', value))
  check(found, source)
  assert {'vision_encoder/entry/w', 'embedder/mm_input_projection/w',
          'embedder/audio_input_embedding'} <= set(found.skipped)
  value = flat(deepmind(source))
  value['SigLiPFromPatches_0/head'] = {'kernel': one}
  found = orbax_trees.OrbaxDirectory(save(tmp_path / 'b', value))
  assert 'SigLiPFromPatches_0/head/kernel' in found.skipped


def test_shared_keys_may_be_left_out(tmp_path):
  source = Canonical(E2B)
  value = deepmind(source)
  for i in range(E2B.first_shared, len(E2B.layers)):
    del value[f'layer_{i}']['attn']['kv_einsum']
    del value[f'layer_{i}']['attn']['key_norm']
  check(orbax_trees.OrbaxDirectory(save(tmp_path / 'x', value)), source)


def test_float32_stays(tmp_path):
  source = Canonical(config_lib.TINY, np.float32)
  path = save(tmp_path / 'x', deepmind(source))
  check(orbax_trees.OrbaxDirectory(path), source)


def _wider(leaf):
  return np.concatenate([leaf, leaf], axis=-1)


@pytest.mark.parametrize('config, path, change, expected', [
    (LARGE, 'layer_1/attn/key_norm', None, 'key_norm/scale is missing'),
    (LARGE, 'embedder/input_embedding', None, 'input_embedding expected'),
    (LARGE, 'layer_2/attn/bias', np.ones(3, np.float32), 'bias is not expect'),
    (LARGE, 'layer_1/pre_ffw_norm/scale', _wider,
     r'norm/scale expected shape \[64\], found \[128\]'),
    (LARGE, 'layer_1/mlp/linear', lambda x: x.T, r'expected shape \[128, 64'),
    (LARGE, 'layer_0/attn/q_einsum/_LoRAEinsum_0', {'a': np.ones(3)},
     'is an adapter'),
    (LARGE, 'layer_0/mlp/linear',
     {'_SimulateQuantizedEinsum_linear': {'kernel': np.ones(3)}},
     'is a quantised'),
    (LARGE, 'layer_0/attn/q_einsum/w', lambda x: x.astype(np.int8),
     'expected bfloat16 or float32, found int8'),
    (LARGE, 'layer_4', None, 'of none: family gemma4, layers 4, width 64'),
    (LARGE, 'layer_3', None, 'layer_3/attn/attn_vec_einsum is missing'),
    # Gemma 2 has neither that norm nor a layer's scale.
    (config_lib.TINY, 'layer_0/attn/_query_norm', None, 'Gemma 3 or Gemma 4'),
])
def test_refusals(tmp_path, config, path, change, expected):
  value = deepmind(Canonical(config))
  *parents, last = path.split('/')
  at = value
  for key in parents:
    at = at[key]
  if change is None:
    del at[last]
  else:
    at[last] = change(at[last]) if callable(change) else change
  with pytest.raises(errors.UsageError, match=expected) as caught:
    orbax_trees.OrbaxDirectory(save(tmp_path / 'x', value))
  assert '\n' not in str(caught.value)


def test_sizes_that_two_models_have(tmp_path, monkeypatch):
  path = save(tmp_path / 'x', deepmind(Canonical(config_lib.TINY)))
  twin = dataclasses.replace(config_lib.TINY, name='twin', max_context=64)
  monkeypatch.setitem(config_lib.TINY_PRESETS, 'twin', twin)
  with pytest.raises(errors.UsageError, match='found those of tiny and twin'):
    orbax_trees.OrbaxDirectory(path)


def test_a_leaf_stored_twice(tmp_path):
  value = flat(deepmind(Canonical(config_lib.TINY)))
  value['transformer/layer_0/mlp'] = {
      'linear': value['transformer/layer_0/mlp/linear']['w']}
  with pytest.raises(errors.UsageError, match='stored twice'):
    orbax_trees.OrbaxDirectory(save(tmp_path / 'x', value))


def test_what_is_no_tree(tmp_path):
  for path in (tmp_path, tmp_path / 'gone'):
    assert not orbax_trees.is_orbax(path)
    with pytest.raises(errors.NotFoundError, match='_METADATA'):
      orbax_trees.OrbaxDirectory(path)
  path = save(tmp_path / 'x', {'a': np.ones(3)})
  assert orbax_trees.is_orbax(path)
  with pytest.raises(errors.UsageError, match='no Gemma 3 or 4'):
    orbax_trees.OrbaxDirectory(path)


@pytest.fixture(name='whole', scope='module')
def whole_fixture(tmp_path_factory):
  source = Canonical(config_lib.TINY)
  return save(tmp_path_factory.mktemp('whole') / 'x', deepmind(source))


def _data_files(path):
  return sorted((path / 'ocdbt.process_0' / 'd').iterdir(),
                key=lambda p: p.stat().st_size)


def _drop_metadata_entry(path):
  text = json.loads((path / '_METADATA').read_text())
  del text['tree_metadata']
  (path / '_METADATA').write_text(json.dumps(text))


@pytest.mark.parametrize('damage, expected', [
    (lambda p: _data_files(p)[-1].unlink(), 'found no file'),
    (lambda p: os.truncate(_data_files(p)[-1], 20_000), 'found 20000'),
    (lambda p: next((p / 'd').iterdir()).unlink(), 'cannot be read'),
    (lambda p: (p / 'manifest.ocdbt').unlink(), 'expected the file manifest'),
    (lambda p: os.truncate(p / 'manifest.ocdbt', 50), 'cannot be read'),
    (lambda p: os.truncate(p / '_METADATA', 100), 'found JSONDecodeError'),
    (_drop_metadata_entry, 'found KeyError'),
    (lambda p: (p / '_METADATA').write_text('[' * 100_000),
     'found RecursionError'),
])
def test_damage_is_found_before_reading(tmp_path, whole, damage, expected):
  path = shutil.copytree(whole, tmp_path / 'x')
  damage(path)
  with pytest.raises(errors.DamageError, match=expected) as caught:
    orbax_trees.OrbaxDirectory(path)
  assert '\n' not in str(caught.value)


def test_damage_while_reading(tmp_path, whole):
  path = shutil.copytree(whole, tmp_path / 'x')
  found = orbax_trees.OrbaxDirectory(path)
  for data in _data_files(path):
    data.write_bytes(bytes(data.stat().st_size))
  with pytest.raises(errors.DamageError, match='input_embedding cannot be'):
    list(found.pieces('embed_tokens.weight'))


def test_slices_of_small_chunks_and_large(tmp_path, monkeypatch):
  source = Canonical(MOE)
  orbax_trees.write(source, tmp_path / 'large')
  monkeypatch.setattr(orbax_trees, '_CHUNK_BYTES', 2000)
  orbax_trees.write(source, tmp_path / 'small')
  for kind in ('large', 'small'):
    for size in (1000, 20_000):
      monkeypatch.setattr(source_lib, 'PIECE_BYTES', size)
      found = orbax_trees.OrbaxDirectory(tmp_path / kind)
      for name, slot in found.slots.items():
        if name.startswith('layers.') and not name.startswith('layers.2.'):
          continue
        pieces = list(found.pieces(name))
        assert np.concatenate(pieces).tobytes() == (
            source.values[name].tobytes()), name
        # An expert, or a head of a projection, is the least that is read.
        least = max(math.prod(slot.shape[1:]),
                    64 * 64 if 'self_attn' in name else 0)
        assert all(4 * p.size <= max(size, 4 * least) for p in pieces), name


@pytest.mark.parametrize('config', [config_lib.TINY, E2B, MOE, LARGE])
def test_write(tmp_path, config):
  source = Canonical(config)
  orbax_trees.write(source, tmp_path / 'x')
  check(orbax_trees.OrbaxDirectory(tmp_path / 'x'), source)
  expected = dict(tree.flatten(deepmind(source)))
  with ocp.StandardCheckpointer() as checkpointer:
    found = dict(tree.flatten(checkpointer.restore(
        tmp_path / 'x', jax.tree.map(np.asarray, deepmind(source)))))
  assert set(found) == set(expected)
  for path, value in expected.items():
    assert np.asarray(found[path]).tobytes() == value.tobytes(), path
  with pytest.raises(errors.UsageError, match='does not exist yet'):
    orbax_trees.write(source, tmp_path / 'x')


def test_write_keeps_dtypes(tmp_path):
  source = Canonical(config_lib.TINY)
  wide = {n for n in source.values if 'norm' in n}
  for name in wide:
    source.values[name] = source.values[name].astype(np.float32)
  orbax_trees.write(source, tmp_path / 'x')
  check(orbax_trees.OrbaxDirectory(tmp_path / 'x'), source)


def test_write_needs_orbax_and_a_place(tmp_path, monkeypatch):
  source = Canonical(config_lib.TINY)
  (tmp_path / 'file').write_bytes(b'')
  with pytest.raises(errors.StorageError, match='cannot make'):
    orbax_trees.write(source, tmp_path / 'file' / 'x')
  monkeypatch.setitem(sys.modules, 'orbax', None)
  with pytest.raises(errors.MissingDependencyError, match='orbax-checkpoint'):
    orbax_trees.write(source, tmp_path / 'x')


@pytest.mark.parametrize('place', ['.', 'x'])
def test_tokenizer_inside_and_beside(tmp_path, whole, place):
  path = shutil.copytree(whole, tmp_path / 'x')
  assert orbax_trees.OrbaxDirectory(path).tokenizer is None
  text = json.dumps(tokenizer_writer.gemma4_json())
  (tmp_path / place / 'tokenizer.json').write_text(text)
  found = orbax_trees.OrbaxDirectory(path).tokenizer
  assert found.data == text.encode()
  golden = json.loads(
      (pathlib.Path(__file__).parent / 'testdata/tokenizer_golden.json')
      .read_text(encoding='utf-8'))
  kinds = [2 if i == 3 else kind for i, kind in enumerate(golden['kinds'])]
  model = tokenizer_writer.sentencepiece_model(
      [p.replace(' ', '\u2581') for p in golden['pieces']],
      golden['scores'], kinds)
  # The family's own name goes before a common one; another's does not count.
  (tmp_path / place / 'tokenizer_gemma4.model').write_bytes(b'')
  assert orbax_trees.OrbaxDirectory(path).tokenizer.data == text.encode()
  (tmp_path / place / 'tokenizer_gemma3.model').write_bytes(model)
  assert orbax_trees.OrbaxDirectory(path).tokenizer.data == model


def test_template(tmp_path, whole):
  path = shutil.copytree(whole, tmp_path / 'x')
  assert orbax_trees.OrbaxDirectory(path).template is None
  (path / 'chat_template.jinja').write_text('{{ x }}')
  assert orbax_trees.OrbaxDirectory(path).template == '{{ x }}'


@pytest.mark.parametrize('config', [
    *config_lib.PRESETS.values(), *TINY.values()], ids=lambda c: c.name)
def test_places_of_every_size(config):
  parts = orbax_names.parts(config)
  for name, slot in tree.slots(config).items():
    shape = parts[name].view_shape
    assert math.prod(shape) == math.prod(slot.shape), name
    assert slot.shape[0] % shape[0] == 0, name


def test_published_shapes():
  shapes = {
      (name, part.leaf): part.shape
      for name, config in config_lib.PRESETS.items()
      for part in orbax_names.parts(config).values()
  }
  # Of google-deepmind/gemma's model definitions.
  for name, leaf, shape in (
      ('gemma3-27b', 'layer_5/attn/kv_einsum/w', (2, 16, 5376, 128)),
      ('gemma3-270m', 'layer_0/mlp/gating_einsum', (2, 2048, 640)),
      ('gemma4-31b', 'layer_4/attn/kv_einsum/w', (2, 16, 5376, 256)),
      ('gemma4-31b', 'layer_5/attn/k_einsum/w', (4, 5376, 512)),
      ('gemma4-31b', 'layer_5/attn/attn_vec_einsum/w', (32, 512, 5376)),
      ('gemma4-e2b', 'layer_14/mlp/linear', (6144, 1536)),
      ('gemma4-e2b', 'layer_15/mlp/linear', (12288, 1536)),
      ('gemma4-e2b', 'layer_4/attn/kv_einsum/w', (2, 1, 1536, 512)),
      ('gemma4-e4b', 'embedder/per_layer_embeddings', (262144, 42, 256)),
      ('gemma4-26b-a4b', 'layer_0/mlp/gating_einsum/w', (128, 2, 704, 2816)),
      ('gemma4-26b-a4b', 'layer_0/mlp2/linear', (2112, 2816)),
  ):
    assert shapes[name, leaf] == shape, (name, leaf)


_LOAD = """
import dataclasses, pathlib, sys
import jax
from kvgraft_jax import config
from kvgraft_jax.checkpoints import orbax_trees, source

def high():
  lines = pathlib.Path('/proc/self/status').read_text().splitlines()
  return [int(l.split()[1]) << 10 for l in lines if l.startswith('VmHWM')][0]

wide = dataclasses.replace(
    config.TINY, name='wide', vocab_size=262144, width=2048, hidden=8192,
    layers=config.TINY.layers[:2])
config.TINY_PRESETS['wide'] = wide
if sys.argv[1] == 'write':
  sys.path.insert(0, sys.argv[3])
  import orbax_test
  orbax_trees.write(orbax_test.Canonical(wide), sys.argv[2])
else:
  jax.block_until_ready(jax.numpy.zeros(8) + 1)
  found = orbax_trees.OrbaxDirectory(sys.argv[2])
  before = high()
  params, _ = source.load(found, 'bfloat16')
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  print(size, high() - before - size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path('/proc/self/status').exists(),
                    reason='reads the peak memory from /proc')
def test_memory_above_the_final_weights(tmp_path):
  def run(what):
    return subprocess.run(
        [sys.executable, '-c', _LOAD, what, tmp_path / 'x',
         pathlib.Path(__file__).parent],
        check=True, capture_output=True, text=True).stdout

  run('write')
  size, above = map(int, run('load').split())
  assert size > 1 << 30
  assert above < 256 << 20, above
