"""The oracle's weights are those that its goldens were made with."""

import json

import ml_dtypes
import numpy as np
import pytest

import oracle_weights


@pytest.mark.parametrize('name', oracle_weights.names())
def test_weights_and_logits_are_the_oracles(name):
  golden = oracle_weights.load(name)
  arrays = oracle_weights.tensors(golden['recipe'])
  assert oracle_weights.sha256(arrays) == golden['weights_sha256']
  for key, shape in golden['recipe']['tensors'].items():
    assert arrays[key].shape == tuple(shape)
    rounded = arrays[key].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(arrays[key], rounded)
  logits = oracle_weights.logits(golden)
  assert logits.shape == (2, 13, 128)
  # A wrong byte order or shape would not look like this.
  assert 3 < logits.std() < 12 and np.abs(logits).max() < 40


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
@pytest.mark.parametrize('name', oracle_weights.names(outer=True))
def test_outer_directory(tmp_path, name, dtype):
  outer = oracle_weights.load(name)
  text = oracle_weights.load(outer['text_case'])
  arrays = oracle_weights.outer_tensors(outer, text)
  oracle_weights.write_directory(tmp_path, outer['config'], arrays, dtype)
  config = json.loads((tmp_path / 'config.json').read_text(encoding='utf-8'))
  assert config == outer['config'] | {'dtype': dtype}
  raw = (tmp_path / 'model.safetensors').read_bytes()
  size = int.from_bytes(raw[:8], 'little')
  header = json.loads(raw[8:8 + size])
  header.pop('__metadata__')
  assert {k: v['shape'] for k, v in header.items()} == outer['tensors']
  inner = 0
  for key, entry in header.items():
    start, end = entry['data_offsets']
    found = np.frombuffer(raw[8 + size:][start:end], dtype)
    if key.startswith(outer['text_prefix']):
      inner += 1
      name = 'model.' + key.removeprefix(outer['text_prefix'])
      expected = oracle_weights.tensor(text['recipe'], name)
      np.testing.assert_array_equal(
          found.astype(np.float32), expected.reshape(-1))
    else:
      assert not found.astype(np.float32).any()
  assert inner == len(text['recipe']['tensors'])
