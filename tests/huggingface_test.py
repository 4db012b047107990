"""Hugging Face directories: configs, names, what is refused, what is read."""

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import command_helpers
import hf_helpers
from kvgraft_jax import config
from kvgraft_jax import errors
from kvgraft_jax import numerics
from kvgraft_jax.checkpoints import hf_config
from kvgraft_jax.checkpoints import hf_export
from kvgraft_jax.checkpoints import huggingface
from kvgraft_jax.checkpoints import resolve
from kvgraft_jax.checkpoints import source
from kvgraft_jax.checkpoints import tree
import oracle_weights
import tokenizer_writer

CASES = oracle_weights.names()
OUTER = oracle_weights.names(outer=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path / 'cache'))


def parse(values: dict) -> config.ModelConfig:
  return hf_config.from_json(values, 'mine', 'config.json').config


def text_of(values: dict) -> dict:
  return values.get('text_config', values)


@pytest.fixture(name='folder')
def folder_fixture(tmp_path):
  return oracle_weights.write_case(tmp_path / 'small', 'gemma3-small')


def rewrite(folder: pathlib.Path, change) -> None:
  """Lets `change` edit name -> array of a directory with one file."""
  tensors = hf_helpers.read(folder / 'model.safetensors')
  change(tensors)
  hf_helpers.write(folder / 'model.safetensors', tensors)


def edit_config(folder: pathlib.Path, **values) -> None:
  path = folder / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Configs.


@pytest.mark.parametrize('name', hf_helpers.PUBLISHED)
def test_a_published_config_is_the_preset(name):
  assert parse(hf_helpers.PUBLISHED[name]) == config.PRESETS[name]


@pytest.mark.parametrize('name', hf_helpers.PUBLISHED)
def test_the_text_part_alone_is_the_same_model(name):
  values = text_of(hf_helpers.PUBLISHED[name])
  assert parse(values) == config.PRESETS[name]


def test_every_preset_has_a_published_config():
  assert set(hf_helpers.PUBLISHED) == set(config.PRESETS)


@pytest.mark.parametrize('name', ['gemma3-1b', 'gemma3-4b'])
def test_new_rotary_fields_say_the_same_as_old_ones(name):
  values = copy.deepcopy(hf_helpers.PUBLISHED[name])
  text = text_of(values)
  scaling = text.pop('rope_scaling') or {'rope_type': 'default'}
  for key in ('rope_theta', 'rope_local_base_freq', 'sliding_window_pattern'):
    text.pop(key, None)
  text['rope_parameters'] = {
      'full_attention': scaling | {'rope_theta': 1000000.0},
      'sliding_attention': {'rope_theta': 10000.0, 'rope_type': 'default'}}
  text['layer_types'] = [
      f'{"sliding" if (i + 1) % 6 else "full"}_attention'
      for i in range(text['num_hidden_layers'])]
  assert parse(values) == config.PRESETS[name]


def test_an_old_pattern_and_the_oldest_name_of_the_type():
  values = hf_helpers.PUBLISHED['gemma3-1b'] | {
      'sliding_window_pattern': 2, 'rope_local_base_freq': 5000,
      'rope_theta': 2e6, 'rope_scaling': {'type': 'linear', 'factor': 4}}
  found = parse(values)
  assert found.name == 'mine'
  assert found.layers == (config.SLIDING, config.GLOBAL) * 13
  assert found.sliding.rope_theta == 5000 and found.sliding.rope_divisor == 1
  assert found.full.rope_theta == 2_000_000 and found.full.rope_divisor == 4


@pytest.mark.parametrize(
    'name, heads', [('gemma4-e2b', {}), ('gemma4-12b', {'kv': 1})])
def test_overrides_say_the_same_as_flat_fields(name, heads):
  values = copy.deepcopy(hf_helpers.PUBLISHED[name])
  text = text_of(values)
  override = {'head_dim': text.pop('global_head_dim')}
  if heads:
    override['num_key_value_heads'] = text.pop('num_global_key_value_heads')
  text['per_layer_config'] = {
      str(i): override for i, kind in enumerate(text['layer_types'])
      if kind == 'full_attention'}
  assert parse(values) == config.PRESETS[name]
  text['per_layer_config'] |= {'0': {'head_dim': 128}}
  with pytest.raises(errors.UsageError, match='per_layer_config.1 expected'):
    parse(values)


def test_global_kv_heads_count_only_where_keys_are_values():
  values = copy.deepcopy(hf_helpers.PUBLISHED['gemma4-e4b'])
  text_of(values)['num_global_key_value_heads'] = 1
  assert parse(values) == config.PRESETS['gemma4-e4b']


@pytest.mark.parametrize('case', CASES)
def test_configs_that_transformers_wrote(case):
  golden = oracle_weights.load(case)
  found = parse(golden['config'])
  given = golden['config_arguments']
  assert (found.width, found.hidden, found.vocab_size) == (32, 64, 128)
  assert found.sliding.window == 4
  assert found.shared_layers == given.get('num_kv_shared_layers', 0)
  assert found.per_layer_dim == given.get('hidden_size_per_layer_input', 0)
  assert found.num_experts == given.get('num_experts', 0)
  assert found.full.value_from_key == given.get('attention_k_eq_v', False)
  assert found.full.head_dim == given.get('global_head_dim', 16)
  assert found.full.rope_divisor == (8 if 'linear' in case else 1)
  assert found.full.kv_heads == given.get(
      'num_global_key_value_heads', given['num_key_value_heads'])


@pytest.mark.parametrize('base, change, message', [
    ('gemma3-1b', {'model_type': 'gemma2'}, 'model_type expected one of gemma'),
    ('gemma3-1b', {'model_type': None}, 'found None'),
    ('gemma3-4b', {'tie_word_embeddings': False},
     'tie_word_embeddings expected True, found False'),
    ('gemma3-1b', {'attn_logit_softcapping': 50.0},
     'attn_logit_softcapping expected None, found 50.0'),
    ('gemma3-1b', {'final_logit_softcapping': 0.5}, 'final_logit_softcapping'),
    ('gemma3-1b', {'hidden_activation': 'silu'},
     'hidden_activation expected gelu_pytorch_tanh, found silu'),
    ('gemma3-1b', {'rms_norm_eps': 1e-5}, 'rms_norm_eps expected 1e-06'),
    ('gemma3-1b', {'attention_bias': True}, 'attention_bias'),
    ('gemma3-1b', {'use_bidirectional_attention': True},
     'use_bidirectional_attention expected False, found True'),
    ('gemma3-1b', {'num_hidden_layers': '26'}, 'expected a whole number'),
    ('gemma3-1b', {'num_hidden_layers': True}, 'found True'),
    ('gemma3-1b', {'num_hidden_layers': 10**9}, 'at most 1024'),
    ('gemma3-1b', {'head_dim': None}, 'head_dim expected a whole number'),
    ('gemma3-1b', {'hidden_size': float('nan')}, 'found nan'),
    ('gemma3-1b', {'num_key_value_heads': 3}, 'expected a multiple of'),
    ('gemma3-1b', {'rope_scaling': {'rope_type': 'yarn', 'factor': 8}},
     'rope_parameters.full_attention.rope_type expected default, linear'),
    ('gemma3-1b', {'rope_scaling': {'rope_type': 'linear', 'factor': 1.5}},
     'full_attention.factor expected a whole number'),
    ('gemma3-1b', {'rope_scaling': 8}, 'rope_scaling expected an object'),
    ('gemma3-1b', {'rope_parameters': {'rope_theta': 1e6}},
     'rope_parameters expected an object with sliding_attention and full'),
    ('gemma3-1b', {'layer_types': ['full_attention']}, 'a list of 26 names'),
    ('gemma3-1b', {'layer_types': ['chunked_attention'] * 26},
     r'layer_types\[0\] expected sliding_attention or full_attention'),
    ('gemma3-1b', {'quantization_config': {'bits': 4}},
     'quantised weights at run time are not supported yet: use the'
     ' unquantised checkpoint or a GGUF'),
    ('gemma4-31b', {'use_bidirectional_attention': 'all'},
     "use_bidirectional_attention expected null or 'vision', found all"),
    ('gemma4-31b', {'num_kv_shared_layers': 56}, 'num_kv_shared_layers'),
    ('gemma4-31b', {'layer_types': ['full_attention'] * 59
                    + ['sliding_attention']}, r'layer_types\[59\]'),
    ('gemma4-31b', {'rope_parameters': {'full_attention': {}}},
     'rope_parameters.sliding_attention expected an object'),
    ('gemma4-31b', {'rope_parameters': hf_helpers._ROPE | {
        'sliding_attention': {'partial_rotary_factor': 0.5}}},
     'sliding_attention.partial_rotary_factor expected 1'),
    ('gemma4-31b', {'per_layer_config': {'60': {}}}, 'a layer below 60'),
    ('gemma4-31b', {'per_layer_config': {'5': {'intermediate_size': 4}}},
     'only head_dim and num_key_value_heads'),
    ('gemma4-31b', {'enable_moe_block': 1}, 'expected true or false'),
    ('gemma4-26b-a4b', {'num_experts': None}, 'num_experts expected'),
    ('gemma4-26b-a4b', {'top_k_experts': 129}, 'top_k_experts expected at'),
    ('gemma4-e2b', {'vocab_size_per_layer_input': 1000},
     'vocab_size_per_layer_input expected at least 262144, found 1000'),
])
def test_a_config_that_computes_something_else_is_refused(
    base, change, message
):
  values = copy.deepcopy(hf_helpers.PUBLISHED[base])
  outer = {'model_type', 'tie_word_embeddings', 'quantization_config'}
  (values if set(change) <= outer else text_of(values)).update(change)
  with pytest.raises(errors.UsageError, match=message) as e:
    parse(values)
  assert str(e.value).startswith('config.json: ')
  assert '\n' not in str(e.value)


@pytest.mark.parametrize('name', ['gemma3-1b', 'gemma4-26b-a4b', 'gemma4-e2b'])
def test_any_value_is_read_or_refused(name):
  values = hf_helpers.PUBLISHED[name]
  keys = {*hf_config._DEFAULTS[text_of(values)['model_type']], *text_of(values),
          'rope_parameters', 'rope_scaling', 'rope_theta', 'per_layer_config',
          'layer_types'}
  refused = 0
  for key in sorted(keys):
    for wrong in (None, -1, 0, 1.5, 10**30, 1e400, '', 'x', [], [[]], ['x'],
                  {}, {'0': 1}, {'0': {'head_dim': None}}, True,
                  {'full_attention': 1}, {'rope_type': []}):
      changed = copy.deepcopy(values)
      text_of(changed)[key] = wrong
      try:
        parse(changed)
      except errors.UsageError as e:
        refused += '\n' not in str(e)
  assert refused > 10 * len(keys) // 2


@pytest.mark.parametrize('text', [None, 'x', {'model_type': 'gemma4_text'}])
def test_an_outer_config_of_another_text_model_is_refused(text):
  with pytest.raises(errors.UsageError) as e:
    parse({'model_type': 'gemma3', 'text_config': text,
           'quantization_config': {} if text is None else None})
  assert 'text_config' in str(e.value) or 'quantization' in str(e.value)


@pytest.mark.parametrize('name', config.TINY_PRESETS)
def test_a_tiny_size_is_known_by_its_sizes_not_by_its_folder(name):
  values = hf_export.config_json(config.TINY_PRESETS[name], 'bfloat16')
  found = hf_config.from_json(values, 'mine', 'x').config
  assert found == config.TINY_PRESETS[name]
  assert numerics.profile_for(found, 'bfloat16').page == 16
  other = hf_config.from_json(values | {'sliding_window': 25}, name, 'x').config
  assert other.name == name  # As its folder is called.
  assert numerics.profile_for(other, 'bfloat16').page == 128


# Names and shapes.


@pytest.mark.parametrize('name', hf_helpers.PUBLISHED)
def test_every_published_name_is_used_once_or_skipped(tmp_path, name):
  values = hf_helpers.PUBLISHED[name]
  shapes = hf_helpers.tensor_shapes(values)
  hf_helpers.write_config(tmp_path, values)
  # The real sizes, all of them holes: opening must not read what it refuses.
  hf_helpers.write_shards(tmp_path, shapes, 5_000_000_000)
  found = huggingface.HfDirectory(tmp_path)
  assert found.config == config.PRESETS[name]
  used = list(found._names.values())
  assert len(used) == len(set(used)) == len(found.slots)
  assert set(used) | set(found.skipped) == set(shapes)
  assert not set(used) & set(found.skipped)
  c = found.config
  kept = [n for n in found.skipped if '.self_attn.' in n and 'tower' not in n]
  assert len(kept) == 3 * c.shared_layers
  assert all(int(n.split('.')[3]) >= c.first_shared for n in kept)
  towers = [n for n in shapes if not n.startswith(
      hf_helpers.PREFIX[values['model_type']])]
  assert set(found.skipped) - set(kept) == set(towers)
  assert len(found.files) >= 2 and all(os.path.exists(p) for p in found.files)


@pytest.mark.parametrize('case', CASES)
def test_the_names_above_are_those_of_transformers(case):
  golden = oracle_weights.load(case)
  shapes = hf_helpers.tensor_shapes(golden['config'], shared=False)
  assert {n: list(s) for n, s in shapes.items()} == golden['recipe']['tensors']


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('case', CASES)
def test_weights_arrive_where_they_belong(tmp_path, case, dtype):
  folder = oracle_weights.write_case(tmp_path / case, case, dtype)
  found = resolve.resolve(str(folder), dtype)
  assert found.config.name == case and found.source == str(folder)
  weights = oracle_weights.tensors(oracle_weights.load(case)['recipe'])
  params = dict(tree.flatten(found.params))
  for name, slot in tree.slots(found.config).items():
    leaf = np.asarray(params[slot.path])
    expected = weights['model.' + name]
    if slot.is_norm:
      assert leaf.dtype == np.float32
      expected = expected + np.float32(found.config.norm_offset)
    else:
      assert leaf.dtype.name == dtype
    part = leaf[slot.row:slot.row + slot.shape[0]].astype(np.float32)
    assert np.array_equal(part, expected), name


@pytest.mark.parametrize('case', OUTER)
def test_a_multimodal_directory_is_its_text_model(tmp_path, case):
  golden = oracle_weights.load(case)
  text = oracle_weights.load(golden['text_case'])
  oracle_weights.write_directory(
      tmp_path / 'outer', golden['config'],
      oracle_weights.outer_tensors(golden, text), 'bfloat16')
  inner = oracle_weights.write_case(
      tmp_path / 'inner', golden['text_case'], 'bfloat16')
  outer = resolve.resolve(str(tmp_path / 'outer'), 'bfloat16')
  found = huggingface.HfDirectory(tmp_path / 'outer')
  assert outer.model_fingerprint == resolve.resolve(
      str(inner), 'bfloat16').model_fingerprint
  assert set(found.skipped) == {
      n for n in golden['tensors'] if not n.startswith(golden['text_prefix'])}


@pytest.mark.parametrize('prefix', huggingface.PREFIXES)
def test_each_prefix_is_read(folder, prefix):
  before = resolve.resolve(str(folder), 'float32').model_fingerprint
  def rename(tensors):
    for name in list(tensors):
      tensors[prefix + name.removeprefix('model.')] = tensors.pop(name)
    tensors['lm_head.weight'] = tensors[f'{prefix}embed_tokens.weight']
  rewrite(folder, rename)
  assert huggingface.HfDirectory(folder).skipped == ('lm_head.weight',)
  after = resolve.resolve(str(folder), 'float32').model_fingerprint
  assert after == before


def test_shards_and_links_are_the_same_model(tmp_path, folder):
  whole = resolve.resolve(str(folder), 'float32')
  hf_helpers.split(folder, 3)
  # As a hub's cache has it: relative links into a folder of blobs.
  links = tmp_path / 'snapshots' / 'abc'
  links.mkdir(parents=True)
  for path in folder.iterdir():
    (links / path.name).symlink_to(
        os.path.relpath(path, links), target_is_directory=False)
  for place in (folder, links):
    found = resolve.resolve(str(place), 'float32')
    assert found.model_fingerprint == whole.model_fingerprint
    assert len(huggingface.HfDirectory(place).files) == 5


def test_rows_behind_the_text_vocabulary_are_dropped(folder, monkeypatch):
  before = resolve.resolve(str(folder), 'float32')
  def pad(tensors):
    table = tensors['model.embed_tokens.weight']
    more = np.full((16, table.shape[1]), np.nan, np.float32)
    tensors['model.embed_tokens.weight'] = np.concatenate([table, more])
  rewrite(folder, pad)
  edit_config(folder, vocab_size=144)
  monkeypatch.setattr(hf_config, '_TEXT_VOCABULARY', 128)
  after = resolve.resolve(str(folder), 'float32')
  assert after.config == before.config and after.config.vocab_size == 128
  assert after.model_fingerprint == before.model_fingerprint


def test_float16_is_handed_out_as_float32(folder):
  before = resolve.resolve(str(folder), 'float32').model_fingerprint
  rewrite(folder, lambda t: t.update(
      {n: a.astype(np.float16) for n, a in t.items()}))
  found = huggingface.HfDirectory(folder)
  assert {found.value_dtype(n) for n in found.slots} == {'float32'}
  after = resolve.resolve(str(folder), 'float32').model_fingerprint
  assert after == before


def test_large_tensors_come_in_slices(folder, monkeypatch):
  whole = huggingface.HfDirectory(folder)
  name = 'layers.3.mlp.gate_proj.weight'
  expected = np.concatenate(list(whole.pieces(name)))
  monkeypatch.setattr(source, 'PIECE_BYTES', 5 * 4 * 32)
  pieces = list(whole.pieces(name))
  assert [p.shape for p in pieces] == [(5, 32)] * 12 + [(4, 32)]
  assert np.array_equal(np.concatenate(pieces), expected)


# What is refused, from headers alone.


def drop(tensors):
  del tensors['model.layers.2.mlp.up_proj.weight']


def double(tensors):
  tensors['model.layers.6.mlp.up_proj.weight'] = np.zeros((4, 4), np.float32)


def turn(tensors):
  name = 'model.layers.1.mlp.down_proj.weight'
  tensors[name] = tensors[name].T.copy()


def cast(dtype):
  def change(tensors):
    tensors['model.norm.weight'] = tensors['model.norm.weight'].astype(dtype)
  return change


def unnamed(tensors):
  tensors['embed.weight'] = tensors.pop('model.embed_tokens.weight')


@pytest.mark.parametrize('change, message', [
    (drop, r'tensor model.layers.2.mlp.up_proj.weight is missing \(1 in all\):'
     ' expected the 80 tensors of a 6-layer gemma3 model'),
    (double, 'tensor model.layers.6.mlp.up_proj.weight is not expected'),
    (turn, r'model.layers.1.mlp.down_proj.weight expected shape \[32, 64\],'
     r' found \[64, 32\]'),
    (cast(np.float64), 'model.norm.weight expected BF16, F16, F32, found F64'),
    (cast(np.int8), 'is I8: quantised weights at run time are not supported'),
    (cast(ml_dtypes.float8_e4m3fn), 'is F8_E4M3: quantised weights at run'),
    (unnamed, 'embed_tokens.weight expected once behind model. or'),
])
def test_tensors_that_do_not_fit_are_refused(folder, change, message):
  rewrite(folder, change)
  with pytest.raises(errors.UsageError, match=message) as e:
    huggingface.HfDirectory(folder)
  assert '\n' not in str(e.value) and str(folder) in str(e.value)


def test_values_that_keys_replace_are_refused_and_shared_ones_skipped(tmp_path):
  folder = oracle_weights.write_case(tmp_path / 'a', 'gemma4-31b')
  more = {'model.layers.5.self_attn.v_proj.weight': np.zeros(
      (32, 32), np.float32)}
  rewrite(folder, lambda t: t.update(more))
  with pytest.raises(errors.UsageError, match='layers.5.self_attn.v_proj'):
    huggingface.HfDirectory(folder)
  folder = oracle_weights.write_case(tmp_path / 'b', 'gemma4-e2b')
  rewrite(folder, lambda t: t.update(more))
  assert huggingface.HfDirectory(folder).skipped == tuple(more)


def entries(**change) -> dict:
  """A header with two tensors of 8 bytes, the second one changed."""
  a = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
  b = {'dtype': 'F32', 'shape': [2], 'data_offsets': [8, 16]}
  return {'a': a, 'b': b | change}


@pytest.mark.parametrize('header, nbytes, message', [
    (entries(), 15, 'the file is truncated'),
    (entries(), 17, 'longer than it should be'),
    (entries(data_offsets=[4, 12]), 12, 'a tensor b that overlaps a'),
    (entries(data_offsets=[12, 20]), 20, 'b that leaves a hole behind a'),
    (entries(data_offsets=[8, 12]), 12, r'a tensor b of 4 bytes for F32 \[2\]'),
    (entries(data_offsets=[16, 8]), 16, 'a tensor b'),
    (entries(dtype='Q4'), 16, 'that the format does not know'),
    (entries(shape=[-2]), 16, 'that the format does not know'),
    (entries(shape='2'), 16, 'that the format does not know'),
    (entries(shape=[2.0]), 16, 'that the format does not know'),
    ({'a': []}, 0, 'that the format does not know'),
    ([1], 0, 'a header that is no object'),
    (b'{"a": 1, "a": 2}', 0, "key 'a' occurs twice"),
    (b'{"a": ', 0, 'a header that is no JSON'),
    (b'\xff\xfe{}', 0, 'a header that is no JSON'),
    (b'[' * 100_000, 0, 'a header that is no JSON'),
])
def test_a_damaged_file_is_found_in_its_header(folder, header, nbytes, message):
  path = folder / 'model.safetensors'
  hf_helpers.write_header(
      path, header if isinstance(header, bytes) else json.dumps(
          header).encode(), nbytes)
  with pytest.raises(errors.DamageError, match=message) as e:
    huggingface.HfDirectory(folder)
  assert str(e.value).startswith(f'{path}: expected a whole safetensors file')


@pytest.mark.parametrize('data', [
    b'', b'\x02', (2**63).to_bytes(8, 'little') + b'{}',
    (100_000_001).to_bytes(8, 'little') + b'{}', (9).to_bytes(8, 'little')])
def test_a_header_of_an_impossible_length_is_not_read(folder, data):
  (folder / 'model.safetensors').write_bytes(data)
  with pytest.raises(errors.DamageError, match=r'a header of \d+ bytes in'):
    huggingface.HfDirectory(folder)


def test_a_truncated_shard_is_refused(folder):
  hf_helpers.split(folder, 2)
  path = folder / 'model-00002-of-00002.safetensors'
  os.truncate(path, path.stat().st_size - 1)
  with pytest.raises(errors.DamageError, match='00002.*is truncated'):
    resolve.resolve(str(folder), 'float32')


def edit_index(folder, change):
  path = folder / 'model.safetensors.index.json'
  value = json.loads(path.read_text())
  change(value['weight_map'])
  path.write_text(json.dumps(value))


ONE, TWO = (f'model-0000{i}-of-00002.safetensors' for i in (1, 2))
NORM = 'model.norm.weight'


@pytest.mark.parametrize('change, error, message', [
    (lambda m: m.update(x='gone.safetensors'), errors.NotFoundError,
     'names gone.safetensors, found no such file'),
    (lambda m: m.update({NORM: ONE if m[NORM] == TWO else TWO}),
     errors.DamageError, 'tensor model.norm.weight expected in model-0000'),
    (lambda m: m.pop(NORM), errors.DamageError, 'in no file, found in'),
    (lambda m: m.update(x=ONE), errors.DamageError,
     'tensor x expected in model-00001.*found in no file'),
    (lambda m: m.update(x='../small/' + ONE), errors.DamageError, 'weight_map'),
    (lambda m: m.update(x=3), errors.DamageError, 'weight_map'),
])
def test_an_index_that_does_not_fit_is_refused(folder, change, error, message):
  hf_helpers.split(folder, 2)
  edit_index(folder, change)
  with pytest.raises(error, match=message):
    huggingface.HfDirectory(folder)


@pytest.mark.parametrize('name', ['..', '.', 'x' * 300])
def test_an_index_that_names_no_file_is_refused(folder, name):
  (folder / 'model.safetensors').unlink()
  hf_helpers.write_index(folder, {'model.norm.weight': name})
  with pytest.raises(errors.NotFoundError, match='no such file beside it'):
    huggingface.HfDirectory(folder)


@pytest.mark.parametrize('name', ['model.safetensors', 'chat_template.jinja'])
def test_a_directory_in_place_of_a_file_is_refused(folder, name):
  (folder / name).unlink(missing_ok=True)
  (folder / name).mkdir()
  with pytest.raises(errors.NotFoundError, match=f'{name}: cannot read the'):
    huggingface.HfDirectory(folder)


@pytest.mark.parametrize('value', ['x', [1], 5, True, {}])
def test_a_text_config_of_a_text_model_is_not_read(folder, value):
  edit_config(folder, text_config=value, eos_token_id=[1, 106])
  assert huggingface.HfDirectory(folder).token_ids['eos_token_id'] == [1, 106]


@pytest.mark.parametrize('layer', ['\xb2', '9' * 5000, '05', '-1'])
def test_a_layer_that_is_no_number_is_refused(folder, layer):
  rewrite(folder, lambda t: t.update({
      f'model.layers.{layer}.self_attn.k_proj.weight': np.zeros(1, 'f4')}))
  with pytest.raises(errors.UsageError, match='is not expected .1 in all'):
    huggingface.HfDirectory(folder)


def test_a_tensor_in_two_shards_is_refused(folder):
  hf_helpers.split(folder, 2)
  tensors = [hf_helpers.read(folder / n) for n in (ONE, TWO)]
  name = next(iter(tensors[0]))
  hf_helpers.write(folder / TWO, tensors[1] | {name: tensors[0][name]})
  with pytest.raises(errors.DamageError, match='in one file, found it in'):
    huggingface.HfDirectory(folder)


@pytest.mark.parametrize('name, text, error, message', [
    ('config.json', '{"a": 1, "a": 2}', errors.DamageError, 'occurs twice'),
    ('config.json', '[]', errors.DamageError, 'list instead of an object'),
    ('config.json', '{', errors.DamageError, 'expected a JSON object'),
    ('adapter_config.json', '{}', errors.UsageError,
     r'adapters \(LoRA\) are not supported yet: merge it'),
    ('adapter_model.safetensors', '', errors.UsageError, 'adapters'),
])
def test_other_files_that_are_refused(folder, name, text, error, message):
  (folder / name).write_text(text)
  with pytest.raises(error, match=message):
    resolve.resolve(str(folder), 'float32')


@pytest.mark.parametrize('files, message', [
    (['config.json', 'pytorch_model.bin'],
     'pytorch_model.bin: expected model.safetensors .*pickled weights'),
    (['config.json'], 'expected model.safetensors or model.safetensors.index'),
    (['model.safetensors'], 'config.json: cannot read the file'),
    (['adapter_config.json'], 'adapters'),
    (['model.gguf', 'README'],
     r'expected a directory with config.json and model.safetensors \(Hugging'
     r' Face\) or with _METADATA \(Orbax\), found README, model.gguf: give'),
    ([], 'found nothing: give the directory'),
])
def test_a_directory_that_is_no_checkpoint(tmp_path, files, message):
  folder = tmp_path / 'x'
  hf_helpers.write_config(folder, hf_helpers.PUBLISHED['gemma3-1b'])
  (folder / 'config.json').rename(tmp_path / 'config')
  for name in files:
    (folder / name).write_bytes(
        (tmp_path / 'config').read_bytes() if name == 'config.json' else b'')
  with pytest.raises(errors.UsageError, match=message) as e:
    resolve.resolve(str(folder), 'float32')
  assert '\n' not in str(e.value) and str(folder) in str(e.value)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_value_that_is_not_finite_stops_the_load(tmp_path, value, dtype):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small', dtype)
  name = 'layers.4.self_attn.k_norm.weight'
  def spoil(tensors):
    array = tensors['model.' + name].copy()
    array[-1] = value
    tensors['model.' + name] = array
  rewrite(folder, spoil)
  with pytest.raises(errors.DamageError, match=f'{name} holds NaN or infinity'):
    resolve.resolve(str(folder), dtype)


def test_a_file_that_becomes_shorter_is_found(folder):
  found = huggingface.HfDirectory(folder)
  os.truncate(folder / 'model.safetensors', 20_000)
  with pytest.raises(errors.DamageError, match='bytes more, found the end'):
    source.load(found, 'float32')


def test_a_file_that_has_gone_is_found(folder):
  found = huggingface.HfDirectory(folder)
  (folder / 'model.safetensors').unlink()
  with pytest.raises(errors.NotFoundError, match='model.safetensors: cannot'):
    next(found.pieces('norm.weight'))


@pytest.mark.parametrize('is_known', [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused(
    folder, monkeypatch, is_known
):
  if is_known:
    resolve.resolve(str(folder), 'float32')
  load = source.load
  def load_and_change(*args):
    found = load(*args)
    rewrite(folder, lambda t: t.update({
        'model.norm.weight': t['model.norm.weight'] + 1}))
    return found
  with monkeypatch.context() as patch:
    patch.setattr(source, 'load', load_and_change)
    with pytest.raises(errors.DamageError, match='found one changed'):
      resolve.resolve(str(folder), 'float32')
  resolve.resolve(str(folder), 'float32')


# Beside the weights.


def test_the_fingerprint_is_computed_once(folder, monkeypatch):
  known = []
  load = source.load
  def spy(opened, dtype, fingerprint=None):
    known.append(fingerprint)
    return load(opened, dtype, fingerprint)
  monkeypatch.setattr(source, 'load', spy)
  first, second = (resolve.resolve(str(folder), 'float32') for _ in range(2))
  assert known == [None, first.model_fingerprint]
  assert second.model_fingerprint == first.model_fingerprint
  def change(tensors):
    tensors[NORM] = tensors[NORM] + np.float32(1)
  rewrite(folder, change)
  third = resolve.resolve(str(folder), 'float32')
  assert known[2] is None
  assert third.model_fingerprint != first.model_fingerprint
  # Another reading of the same files is another model.
  edit_config(folder, query_pre_attn_scalar=17)
  fourth = resolve.resolve(str(folder), 'float32')
  assert known[3] is None
  assert fourth.model_fingerprint != third.model_fingerprint


def test_chat_templates_are_found_in_their_order(folder):
  assert huggingface.HfDirectory(folder).template is None
  (folder / 'tokenizer_config.json').write_text(json.dumps({
      'chat_template': [{'name': 'tool_use', 'template': 'no'},
                        {'name': 'default', 'template': 'c'}]}))
  assert huggingface.HfDirectory(folder).template == 'c'
  (folder / 'tokenizer_config.json').write_text('{"chat_template": "d"}')
  assert huggingface.HfDirectory(folder).template == 'd'
  (folder / 'chat_template.json').write_text('{"chat_template": "b"}')
  assert huggingface.HfDirectory(folder).template == 'b'
  (folder / 'chat_template.jinja').write_text('{{ ä }}\n')
  found = resolve.resolve(str(folder), 'float32')
  assert found.template == '{{ ä }}\n'
  assert found.template_fingerprint == source.template_fingerprint('{{ ä }}\n')
  (folder / 'chat_template.jinja').write_bytes(b'\xff')
  with pytest.raises(errors.DamageError, match='expected UTF-8'):
    huggingface.HfDirectory(folder)


def test_the_tokenizer_is_read_without_weights(folder):
  pytest.importorskip('tokenizers')
  line = command_helpers.refusal(2, 'tokenize', f'--model={folder}',
                                 '--prompt=Hello')
  assert 'has no tokenizer' in line
  tokenizer_writer.write_gemma4(folder)
  rewrite(folder, lambda t: t.update({NORM: t[NORM] * np.float32(np.nan)}))
  found = command_helpers.ok('tokenize', f'--model={folder}', '--prompt=Hello')
  assert found['text'].endswith('Hello') and found['token_ids'][0] == 2
  with pytest.raises(errors.DamageError, match='NaN'):
    resolve.resolve(str(folder), 'float32')


_MEASURE = '''
import sys
import jax
from kvgraft_jax.checkpoints import resolve
def kilobytes(name):
  with open('/proc/self/status') as f:
    return int(next(l for l in f if l.startswith(name)).split()[1])
jax.block_until_ready(jax.numpy.zeros(8) + 1)
before = kilobytes('VmHWM:')
found = resolve.resolve(sys.argv[1], sys.argv[2])
weights = sum(x.nbytes for x in jax.tree.leaves(found.params))
print(kilobytes('VmHWM:') - before, weights // 1024)
'''


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_loading_needs_little_beside_the_weights(tmp_path, dtype):
  # 2 GB in bfloat16, most of it in the tables.
  values = copy.deepcopy(hf_helpers.PUBLISHED['gemma4-e4b'])
  text = text_of(values)
  text |= {'num_hidden_layers': 2, 'num_kv_shared_layers': 0,
           'layer_types': text['layer_types'][4:6]}
  hf_helpers.write_config(tmp_path / 'x', values)
  shapes = hf_helpers.tensor_shapes(values)
  hf_helpers.write_shards(tmp_path / 'x', shapes, 800_000_000)
  size = sum(p.stat().st_size for p in (tmp_path / 'x').iterdir())
  assert size > 1.99e9
  done = subprocess.run(
      [sys.executable, '-c', _MEASURE, tmp_path / 'x', dtype],
      capture_output=True, text=True, check=True)
  grown, weights = map(int, done.stdout.split())
  print(f'{dtype}: weights {weights / 1e6:.2f} GB,'
        f' {(grown - weights) / 1e3:.0f} MB above')
  assert weights * 1024 > size * (0.99 if dtype == 'bfloat16' else 1.98)
  assert grown - weights < (2 * 256 + 200) * 1e3
  shutil.rmtree(tmp_path / 'x')
