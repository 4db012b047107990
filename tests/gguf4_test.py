"""Gemma 4 GGUF files: config and every tensor read back, and refusals."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import gguf_writer
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import gguf_config
from kvgraft_jax.checkpoints import gguf_gemma
from kvgraft_jax.checkpoints import source
from kvgraft_jax.checkpoints import tokenizer_files
from kvgraft_jax.checkpoints import tree
import tokenizer_writer

SIZES = [n for n, c in config_lib.TINY_PRESETS.items() if c.family == 'gemma4']
E2B, MOE = 'tiny-gemma4-e2b', 'tiny-gemma4-26b-a4b'


def parts(size):
  """Returns (config, metadata, canonical tensors, tensors of the file)."""
  config = config_lib.TINY_PRESETS[size]
  rng = np.random.default_rng(4)
  canonical = {
      name: rng.normal(size=slot.shape).astype(ml_dtypes.bfloat16).astype('f4')
      for name, slot in tree.slots(config).items()
  }
  weights = gguf_writer.gemma4_tensors(
      len(config.layers), canonical, config.full.rope_pairs,
      config.full.head_dim // 2 - config.full.rope_pairs,
  )
  return config, gguf_writer.gemma4_metadata(config), canonical, weights


def open_model(path, meta, weights, raw=None):
  gguf_writer.write(path, meta, weights, raw)
  return gguf_gemma.GemmaGguf(gguf.GgufFile([path]))


def read(model, name):
  return np.concatenate(list(model.pieces(name)))


@pytest.mark.parametrize('piece_bytes', [1 << 20, 4 * 700])
@pytest.mark.parametrize('size', SIZES)
def test_config_and_tensors_are_read_as_they_were_written(
    tmp_path, monkeypatch, size, piece_bytes
):
  monkeypatch.setattr(source, 'PIECE_BYTES', piece_bytes)
  config, meta, canonical, weights = parts(size)
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  assert model.config == config
  assert model.files == (tmp_path / 'm.gguf',)
  assert model.skipped == ('rope_freqs.weight',)
  assert set(model.slots) == set(canonical)
  kinds = {id(values): kind for kind, values in weights.values()}
  for name, values in canonical.items():
    found = read(model, name)
    assert found.dtype == np.float32 and found.shape == values.shape, name
    assert model.value_dtype(name) == 'float32'
    expected = gguf_writer.dequantise(values, kinds[id(values)])
    assert np.array_equal(found, expected), name


@pytest.mark.parametrize(
    'size', [n for n, c in config_lib.PRESETS.items() if c.family == 'gemma4']
)
def test_a_published_size_is_recognised(tmp_path, size):
  config = config_lib.PRESETS[size]
  weights = {'rope_freqs.weight': (
      gguf_writer.F32, np.array([1] * 64 + [1e30] * 192, np.float32)
  )}
  if not config.full.value_from_key:
    i = config.layers.index(config_lib.GLOBAL)
    weights[f'blk.{i}.attn_v.weight'] = weights['rope_freqs.weight']
  small = dataclasses.replace(config, vocab_size=320)
  path = tmp_path / 'm.gguf'
  gguf_writer.write(path, gguf_writer.gemma4_metadata(small), weights)
  found = gguf_config.read(gguf.GgufFile([path]), config.vocab_size)
  assert found == config


def test_experts_in_two_tensors_are_joined(tmp_path):
  config, meta, canonical, weights = parts(MOE)
  for i in range(len(config.layers)):
    _, both = weights.pop(f'blk.{i}.ffn_gate_up_exps.weight')
    gate, up = np.split(both, 2, axis=1)
    weights[f'blk.{i}.ffn_gate_exps.weight'] = gguf_writer.F32, gate
    weights[f'blk.{i}.ffn_up_exps.weight'] = gguf_writer.BF16, up
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  name = 'layers.3.experts.gate_up_proj'
  assert np.array_equal(read(model, name), canonical[name])
  del weights['blk.3.ffn_up_exps.weight']
  with pytest.raises(errors.UsageError, match='blk.3.ffn_up_exps.*missing'):
    open_model(tmp_path / 'm.gguf', meta, weights)


def test_keys_of_layers_that_share_them_are_skipped(tmp_path):
  config, meta, _, weights = parts(E2B)
  last = len(config.layers) - 1
  surplus = {
      f'blk.{last}.{n}.weight': (gguf_writer.F32, np.ones((2, 3), np.float32))
      for n in ('attn_k', 'attn_k_norm', 'attn_v')
  }
  model = open_model(tmp_path / 'm.gguf', meta, weights | surplus)
  assert model.skipped == (*surplus, 'rope_freqs.weight')
  assert model.config.shared_layers == config.shared_layers


def test_all_pairs_may_rotate_and_logits_be_uncapped(tmp_path):
  config, meta, _, weights = parts(MOE)
  pairs = config.full.head_dim // 2
  weights['rope_freqs.weight'] = 0, np.ones(pairs, np.float32)
  meta['gemma4.final_logit_softcapping'] = 0.0
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  assert model.config.full.rope_pairs is None
  assert model.config.final_softcap is None


def test_the_template_is_exposed_and_its_turns_end(tmp_path):
  _, meta, _, weights = parts(MOE)
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  assert model.template is None and model.tokenizer.eos_ids == (1,)
  tokens = list(meta['tokenizer.ggml.tokens'])
  tokens[4] = '<turn|>'
  meta['tokenizer.ggml.tokens'] = tokens
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  assert model.tokenizer.eos_ids == (1,)
  meta['tokenizer.chat_template'] = '{{ bos_token }}\n'
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  assert model.template == '{{ bos_token }}\n'
  assert model.tokenizer.eos_ids == (1, 4)


def test_a_vocabulary_with_merges_is_read(tmp_path):
  pytest.importorskip('tokenizers')
  value = tokenizer_writer.gemma4_json()
  vocab, merges = value['model']['vocab'], value['model']['merges']
  special = {entry['content'] for entry in value['added_tokens']}
  config, meta, _, _ = parts(MOE)
  config = dataclasses.replace(config, vocab_size=len(vocab))
  meta = gguf_writer.gemma4_metadata(config) | {
      'tokenizer.ggml.model': 'gemma4',
      'tokenizer.ggml.tokens': list(vocab),
      'tokenizer.ggml.merges': [' '.join(pair) for pair in merges],
      'tokenizer.ggml.token_type': [
          3 if p in special else 6 if p.startswith('<0x') else 1 for p in vocab
      ],
      'tokenizer.chat_template': 'x',
  }
  _, _, _, weights = parts(MOE)
  kind, _ = weights['token_embd.weight']
  weights['token_embd.weight'] = (
      kind, np.ones((len(vocab), config.width), np.float32)
  )
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  tokenizer_writer.write_gemma4(tmp_path)
  expected = tokenizer_files.load(tmp_path)
  assert model.config.vocab_size == model.tokenizer.vocab_size == len(vocab)
  assert model.tokenizer.eos_ids == expected.eos_ids == (1, 50, 106)
  for text in ('The capital of', '<|turn>user\nHello  world<turn|>', 'ß∑'):
    ids = model.tokenizer.encode(text, add_bos=True)
    assert ids == expected.encode(text, add_bos=True) and ids[0] == 2
    assert model.tokenizer.decode(ids) == expected.decode(ids)
  del meta['tokenizer.ggml.merges']
  with pytest.raises(errors.UsageError, match='merges expected list'):
    open_model(tmp_path / 'm.gguf', meta, weights)


@pytest.mark.parametrize(
    'meta, message',
    [
        ({'sliding_window_pattern': 3}, 'pattern expected an array of 6'),
        ({'sliding_window_pattern': [True] * 5}, 'pattern expected an array'),
        ({'sliding_window_pattern': [True] * 6}, 'shared_kv_layers expected'),
        ({'shared_kv_layers': 4}, 'expected sliding and global layers'),
        ({'shared_kv_layers': 1 << 30}, 'expected sliding and global layers'),
        ({'head_count_kv': [2, 2, 1, 2, 1, 1]}, r'kv\[4\] expected 2, found 1'),
        ({'head_count_kv': [2, 2, 0, 2, 2, 0]}, r'kv\[2\] expected at least 1'),
        ({'head_count_kv': 3}, '4 query heads, 3 kv heads'),
        ({'value_length_swa': 16}, 'value_length_swa expected 32, found 16'),
        ({'key_length_swa': 0}, 'key_length_swa expected int'),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, meta, message):
  _, good, _, weights = parts(MOE)
  bad = {f'gemma4.attention.{key}': item for key, item in meta.items()}
  with pytest.raises(errors.UsageError, match=message) as e:
    open_model(tmp_path / 'm.gguf', good | bad, weights)
  assert '\n' not in str(e.value)


@pytest.mark.parametrize(
    'meta, message',
    [
        ({'expert_used_count': 9}, 'expert_used_count expected at most 8'),
        ({'expert_feed_forward_length': 0}, 'feed_forward_length expected int'),
        ({'feed_forward_length': [128] * 5 + [64]}, r'\[5\] expected 128'),
        ({'rope.scaling.factor': 8.0}, 'rope.scaling.factor expected 1'),
        ({'rope.dimension_count': 16}, 'rope.dimension_count expected 64'),
        ({'final_logit_softcapping': 0.5}, 'expected a whole number'),
        ({'embedding_length_per_layer_input': 16}, 'is missing .21 in all'),
        ({'expert_count': 4}, r'expected shape \[4, 64'),
    ],
)
def test_a_header_at_odds_with_the_tensors_is_refused(tmp_path, meta, message):
  _, good, _, weights = parts(MOE)
  bad = {f'gemma4.{key}': item for key, item in meta.items()}
  with pytest.raises(errors.UsageError, match=message) as e:
    open_model(tmp_path / 'm.gguf', good | bad, weights)
  assert '\n' not in str(e.value)


@pytest.mark.parametrize('size, layer', [(E2B, 2), (E2B, 8), (MOE, 1)])
def test_any_tensor_missing_or_misshapen_is_refused(tmp_path, size, layer):
  _, meta, _, weights = parts(size)
  path = tmp_path / 'm.gguf'
  for name in weights:
    if name.startswith('blk.') and not name.startswith(f'blk.{layer}.'):
      continue
    rest = {n: w for n, w in weights.items() if n != name}
    with pytest.raises(errors.UsageError) as e:
      open_model(path, meta, rest)
    assert name in str(e.value) and '\n' not in str(e.value)
    kind, values = weights[name]
    longer = np.concatenate([values, values[:1]])
    with pytest.raises(errors.UsageError) as e:
      open_model(path, meta, rest | {name: (kind, longer)})
    assert name in str(e.value) and 'expected shape' in str(e.value)
  norm = weights['output_norm.weight']
  for name in ('output.weight', 'blk.0.attn_q.bias', 'blk.9999.attn_q.weight'):
    with pytest.raises(errors.UsageError, match=f'{name} is not expected'):
      open_model(path, meta, weights | {name: norm})


def test_divisors_that_are_no_proportional_rotation_are_refused(tmp_path):
  config, meta, _, weights = parts(MOE)
  pairs = config.full.head_dim // 2
  for divisors in ([1] * 8 + [2] * (pairs - 8), [1e30] * 8 + [1] * (pairs - 8)):
    weights['rope_freqs.weight'] = 0, np.array(divisors, np.float32)
    with pytest.raises(errors.UsageError, match='expected ones and, behind'):
      open_model(tmp_path / 'm.gguf', meta, weights)


def test_norms_are_stored_as_they_are_used(tmp_path):
  _, meta, canonical, weights = parts(E2B)
  model = open_model(tmp_path / 'm.gguf', meta, weights)
  params, fingerprint = source.load(model, 'float32')
  assert len(fingerprint) == 64
  for path, name in (
      ('pre_attention_norm/scale', 'input_layernorm.weight'),
      ('layer_scalar', 'layer_scalar'),
  ):
    found = params['layer_1']
    for key in path.split('/'):
      found = found[key]
    assert np.array_equal(found, canonical[f'layers.1.{name}'])
