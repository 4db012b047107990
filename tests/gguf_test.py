"""The GGUF reader: every block type, and what it refuses."""

import json
import pathlib
import struct

import numpy as np
import pytest

import gguf_writer
from kvgraft_jax import config
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import gguf_blocks
from kvgraft_jax.checkpoints import gguf_gemma
from kvgraft_jax.checkpoints import source
from kvgraft_jax.checkpoints import tree

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / 'testdata/gguf_blocks.json').read_text()
)


def open_model(path) -> gguf_gemma.GemmaGguf:
  return gguf_gemma.GemmaGguf(gguf.GgufFile([path]))


def canonical(model: gguf_gemma.GemmaGguf, name: str) -> np.ndarray:
  return np.concatenate(list(model.pieces(name)))


def test_every_type_has_goldens():
  assert set(GOLDEN['blocks']) == set(gguf_blocks.BY_NAME)


@pytest.mark.parametrize('name', GOLDEN['blocks'])
def test_block_values_are_the_golden_bits(tmp_path, name):
  block = GOLDEN['blocks'][name]
  raw = bytes.fromhex(block['raw'])
  expected = np.frombuffer(bytes.fromhex(block['values']), '<f4')
  path = tmp_path / 'one.gguf'
  # Two rows, so that a row is not the whole tensor.
  shape = (2, len(expected))
  gguf_writer.write(path, {}, {}, {'t': (block['code'], shape, raw + raw)})
  file = gguf.GgufFile([path])
  assert file.tensors['t'].dtype == name
  assert file.tensors['t'].shape == shape
  for row in (0, 1):
    found = file.rows('t', row, row + 1)
    assert found.dtype == np.float32
    assert np.array_equal(found[0].view(np.uint32), expected.view(np.uint32))


def test_a_model_is_read_as_it_was_written(tmp_path, monkeypatch):
  # Small pieces, so that tensors come in several.
  monkeypatch.setattr(source, 'PIECE_BYTES', 4 * 700)
  path = tmp_path / 'm.gguf'
  gguf_writer.write_model(path)
  model = open_model(path)
  weights = gguf_writer.tensors()
  for ours, theirs in (
      ('embed_tokens.weight', 'token_embd.weight'),
      ('layers.5.self_attn.q_proj.weight', 'blk.5.attn_q.weight'),
      ('layers.0.self_attn.v_proj.weight', 'blk.0.attn_v.weight'),
      ('layers.2.mlp.down_proj.weight', 'blk.2.ffn_down.weight'),
      ('layers.3.mlp.gate_proj.weight', 'blk.3.ffn_gate.weight'),
  ):
    kind, values = weights[theirs]
    assert np.array_equal(
        canonical(model, ours), gguf_writer.dequantise(values, kind)
    ), ours
  assert np.array_equal(
      canonical(model, 'layers.1.pre_feedforward_layernorm.weight'),
      weights['blk.1.ffn_norm.weight'][1] - 1,
  )
  found = model.config
  assert found.layers == ('sliding',) * 5 + ('global',)
  assert found.sliding == config.AttentionSpec(2, 32, 64, 10_000)
  assert found.full == config.AttentionSpec(2, 32, None, 1_000_000)
  assert (found.vocab_size, found.width, found.hidden, found.num_heads) == (
      len(gguf_writer.PIECES), 64, 96, 4)
  assert (found.query_scale_dim, found.max_context) == (32, 2048)
  assert model.tokenizer.encode('the', add_bos=True) == [
      2, gguf_writer.PIECES.index('the')]
  assert model.template is None


def test_any_block_has_the_bits_of_the_gguf_package():
  package = pytest.importorskip('gguf')
  for code, block in gguf_blocks.TYPES.items():
    raw = np.random.default_rng(code).integers(
        0, 256, (2000, block.nbytes), np.uint8
    )
    with np.errstate(all='ignore'):
      expected = package.quants.dequantize(
          raw, package.GGMLQuantizationType(code)
      ).reshape(-1)
      found = block.unpack(raw).reshape(-1)
    # Random scales are NaN too, whose bits mean nothing.
    finite = ~np.isnan(expected)
    assert np.array_equal(finite, ~np.isnan(found)), block.name
    assert np.array_equal(
        found[finite].view(np.uint32), expected[finite].view(np.uint32)
    ), block.name


def test_parts_are_read_as_the_whole(tmp_path):
  path = tmp_path / 'm.gguf'
  gguf_writer.write_model(path)
  data = path.read_bytes()
  parts = []
  for i, (a, b) in enumerate(((0, 999), (999, 60_000), (60_000, len(data)))):
    parts.append(tmp_path / f'part{i}')
    parts[-1].write_bytes(data[a:b])
  whole, joined = gguf.GgufFile([path]), gguf.GgufFile(parts)
  assert joined.tensors == whole.tensors
  name = 'blk.0.attn_k.weight'
  assert np.array_equal(joined.rows(name, 0, 64), whole.rows(name, 0, 64))


def test_unused_rows_behind_the_vocabulary_are_dropped(tmp_path):
  meta, weights = gguf_writer.metadata(), gguf_writer.tensors()
  count = len(gguf_writer.PIECES)
  meta['tokenizer.ggml.tokens'] = gguf_writer.PIECES + ['[PAD1]', '[PAD2]']
  meta['tokenizer.ggml.scores'] = [-float(i) for i in range(count + 2)]
  meta['tokenizer.ggml.token_type'] = gguf_writer.KINDS + [5, 5]
  kind, values = weights['token_embd.weight']
  weights['token_embd.weight'] = kind, np.concatenate([values, values[:2]])
  gguf_writer.write(tmp_path / 'm.gguf', meta, weights)
  model = open_model(tmp_path / 'm.gguf')
  assert model.config.vocab_size == model.tokenizer.vocab_size == count
  assert np.array_equal(
      canonical(model, 'embed_tokens.weight'),
      gguf_writer.dequantise(values, kind),
  )


def test_large_sizes_take_what_the_file_leaves_out_from_the_preset(tmp_path):
  preset = config.PRESETS['gemma3-27b']
  meta = gguf_writer.metadata() | {
      'gemma3.context_length': preset.max_context,
      'gemma3.embedding_length': preset.width,
      'gemma3.block_count': len(preset.layers),
      'gemma3.feed_forward_length': preset.hidden,
      'gemma3.attention.head_count': preset.num_heads,
      'gemma3.attention.head_count_kv': preset.full.kv_heads,
      'gemma3.attention.key_length': preset.full.head_dim,
      'gemma3.attention.value_length': preset.full.head_dim,
      'gemma3.attention.sliding_window': 1024,
  }
  file = tmp_path / 'm.gguf'
  for extra, divisor in (({}, 8), ({'gemma3.rope.scaling.factor': 4.0}, 4)):
    gguf_writer.write(file, meta | extra, {})
    model = object.__new__(gguf_gemma.GemmaGguf)
    with pytest.raises(errors.UsageError, match='token_embd.*missing'):
      model.__init__(gguf.GgufFile([file]))
    assert model.config.query_scale_dim == 168
    assert model.config.full.rope_divisor == divisor
    assert model.config.sliding.rope_divisor == 1


def test_what_newer_converters_write_is_read(tmp_path):
  path = tmp_path / 'm.gguf'
  gguf_writer.write(path, gguf_writer.metadata() | {
      'gemma3.attention.sliding_window_pattern': 2,
      'gemma3.rope.freq_base_swa': 20_000.0,
      'gemma3.final_logit_softcapping': 0.0,
  }, gguf_writer.tensors())
  model = open_model(path)
  assert model.config.layers == ('sliding', 'global') * 3
  assert model.config.sliding.rope_theta == 20_000
  assert model.config.full.rope_theta == 1_000_000
  assert model.config.final_softcap is None


@pytest.mark.parametrize('keep', [0, 3, 4, 11, 24, 100, 5_000, -1])
def test_a_truncated_file_is_one_clear_line(tmp_path, keep):
  path = tmp_path / 'm.gguf'
  gguf_writer.write_model(path)
  path.write_bytes(path.read_bytes()[:keep])
  kind = errors.UsageError if keep == 3 else errors.DamageError
  with pytest.raises(kind) as e:
    gguf.GgufFile([path])
  assert str(path) in str(e.value) and '\n' not in str(e.value)


def test_no_flip_in_the_header_crashes_the_reader(tmp_path):
  path = tmp_path / 'm.gguf'
  gguf_writer.write_model(path)
  data = path.read_bytes()
  end = min(i.start for i in gguf.GgufFile([path]).tensors.values())
  rng = np.random.default_rng(0)
  refused = 0
  for at in [*range(40), *rng.integers(40, end, 150).tolist()]:
    bad = bytearray(data)
    bad[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(bad)
    try:
      open_model(path)
    except errors.KvgraftError as e:
      refused += 1
      assert '\n' not in str(e)
  assert refused > 40


@pytest.mark.parametrize(
    'meta, message',
    [
        ({'general.architecture': 'llama'}, "'gemma4', found 'llama'"),
        ({'split.count': 3}, 'whole GGUF file, found one of 3 split ones'),
        ({'gemma3.attention.value_length': 16}, 'value_length expected 32'),
        ({'gemma3.block_count': 'six'}, 'block_count expected int'),
        ({'gemma3.embedding_length': 0}, 'embedding_length expected int'),
        ({'gemma3.rope.scaling.type': 'yarn'}, 'expected linear, found yarn'),
        ({'gemma3.rope.freq_base': 0.5}, 'expected a whole number'),
        ({'gemma3.final_logit_softcapping': 30.0}, 'expected 0, found 30'),
        ({'gemma3.attn_logit_softcapping': 50.0}, 'expected 0, found 50'),
        ({'gemma3.block_count': 1 << 30}, 'block_count expected at most'),
        ({'gemma3.attention.head_count': 3}, 'expected a multiple'),
        ({'tokenizer.ggml.model': 'gpt2'}, "'llama' .* found 'gpt2'"),
        ({'tokenizer.ggml.scores': [0.5]}, '293 pieces, 1 scores'),
        ({'tokenizer.ggml.bos_token_id': 9999}, 'found 9999'),
        ({'tokenizer.ggml.tokens': ['a'] * 293}, "'a' occurs twice"),
    ],
)
def test_a_foreign_header_is_refused(tmp_path, meta, message):
  path = tmp_path / 'm.gguf'
  gguf_writer.write(path, gguf_writer.metadata() | meta, gguf_writer.tensors())
  with pytest.raises(errors.UsageError, match=message):
    open_model(path)


def test_tensors_are_refused_from_the_header(tmp_path):
  path = tmp_path / 'm.gguf'
  meta = gguf_writer.metadata()

  def refuse(weights, message, raw=None):
    gguf_writer.write(path, meta, weights, raw)
    with pytest.raises(errors.UsageError, match=message) as e:
      open_model(path)
    assert '\n' not in str(e.value)

  weights = gguf_writer.tensors()
  norm = weights.pop('blk.3.attn_norm.weight')
  refuse(weights, 'blk.3.attn_norm.weight is missing')
  weights['blk.3.attn_norm.weight'] = norm
  refuse(weights | {'output.weight': norm}, 'output.weight is not expected')
  kind, values = weights['blk.0.ffn_up.weight']
  refuse(weights | {'blk.0.ffn_up.weight': (kind, values[:-1])},
         r'ffn_up.weight expected shape \[96, 64\], found \[95, 64\]')
  raw = {'blk.0.ffn_up.weight': (19, (96, 64), b'')}
  refuse(weights, 'ffn_up.weight has the type IQ1_S, expected one of F32', raw)


def test_tensors_that_overlap_are_damage(tmp_path):
  path = tmp_path / 'm.gguf'
  a = np.ones((2, 32), np.float32)
  gguf_writer.write(path, {}, {'aa': (0, a), 'bb': (0, a)})
  data = path.read_bytes()
  entry = gguf_writer.string('bb') + struct.pack('<IQQIQ', 2, 32, 2, 0, 256)
  assert data.count(entry) == 1
  path.write_bytes(data.replace(entry, entry[:-8] + struct.pack('<Q', 32)))
  with pytest.raises(errors.DamageError, match='bb: .*overlapping'):
    gguf.GgufFile([path])


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_an_error(tmp_path, bad):
  path = tmp_path / 'm.gguf'
  values = np.ones((4, 32), np.float32)
  values[2, 7] = bad
  gguf_writer.write(path, {}, {'t': (0, values)})
  file = gguf.GgufFile([path])
  assert file.rows('t', 0, 2).shape == (2, 32)
  with pytest.raises(errors.NumericsError, match='t row 2 column 7'):
    file.rows('t', 1, 4)


def test_large_finite_weights_are_accepted(tmp_path):
  path = tmp_path / 'm.gguf'
  values = np.full((4, 32), 3e38, np.float32)
  gguf_writer.write(path, {}, {'t': (0, values)})
  assert np.array_equal(gguf.GgufFile([path]).rows('t', 0, 4), values)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(errors.NotFoundError, match='gone.gguf.*No such file'):
    gguf.GgufFile([tmp_path / 'gone.gguf'])


def test_slots_fill_the_parameter_tree():
  filled = {}
  for slot in tree.slots(config.TINY).values():
    filled[slot.path] = filled.get(slot.path, 0) + slot.shape[0]
  flat = dict(tree.flatten(tree.param_shapes(config.TINY)))
  assert filled == {path: shape[0] for path, (shape, _) in flat.items()}
  assert flat['layer_2/attn/qkv/w'] == ((256, 64), True)
  assert flat['layer_0/mlp/gating/w'] == ((256, 64), True)
  assert flat['layer_0/attn/key_norm/scale'] == ((32,), False)
