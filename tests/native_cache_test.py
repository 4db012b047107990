"""The cache of converted models: whole or absent, whatever happens."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import gguf_writer
from kvgraft_jax import errors
from kvgraft_jax import numerics
from kvgraft_jax import paths
from kvgraft_jax.checkpoints import gguf
from kvgraft_jax.checkpoints import gguf_gemma
from kvgraft_jax.checkpoints import native
from kvgraft_jax.checkpoints import resolve
from kvgraft_jax.checkpoints import safetensors
from kvgraft_jax.checkpoints import tree

ROOT = pathlib.Path(native.__file__).parents[2]

# Prints the fingerprint and how many conversions this process made.
CHILD = """
import json, os, signal, sys, time
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import native, resolve
count = 0
convert, write = native._convert, native._write_tensor
def counting(*args):
  global count
  count += 1
  convert(*args)
def slow(f, source, name, *args):
  if name == 'norm.weight':  # The last of them.
    f.flush()
    print('half-way', flush=True)
    {action}
  return write(f, source, name, *args)
native._convert, native._write_tensor = counting, slow
{before}
try:
  got = resolve.resolve(sys.argv[1], 'bfloat16')
except errors.KvgraftError as e:
  print(json.dumps([type(e).__name__, str(e)]))
else:
  print(json.dumps([got.model_fingerprint, count]))
"""


def start(source, action='pass', before=''):
  return subprocess.Popen(
      [sys.executable, '-c', CHILD.format(action=action, before=before),
       str(source)],
      stdout=subprocess.PIPE, text=True,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
  )


def finish(child):
  out = child.communicate(timeout=60)[0].splitlines()
  return child.returncode, json.loads(out[-1])


@pytest.fixture(name='source')
def source_fixture(tmp_path, monkeypatch):
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path / 'cache'))
  path = tmp_path / 'm.gguf'
  gguf_writer.write_model(path)
  return path


@pytest.fixture(name='conversions')
def conversions_fixture(monkeypatch):
  """A list that grows by one dtype with every conversion."""
  made = []
  convert = native._convert

  def counting(*args):
    made.append(args[-1])
    convert(*args)

  monkeypatch.setattr(native, '_convert', counting)
  return made


def folder_of(tmp_path):
  (folder,) = (tmp_path / 'cache' / 'models').iterdir()
  return folder


def same(a, b):
  left, right = dict(tree.flatten(a.params)), dict(tree.flatten(b.params))
  return (
      a.model_fingerprint == b.model_fingerprint
      and list(left) == list(right)
      and all(np.array_equal(left[k], right[k]) for k in left)
  )


def test_one_conversion_for_each_dtype(source, conversions, tmp_path):
  first = {d: resolve.resolve(str(source), d) for d in numerics.DTYPES}
  again = {d: resolve.resolve(str(source), d) for d in numerics.DTYPES}
  assert conversions == ['bfloat16', 'float32']
  assert len({c.model_fingerprint for c in first.values()}) == 1
  for dtype, checkpoint in first.items():
    assert same(checkpoint, again[dtype])
    for path, value in tree.flatten(checkpoint.params):
      is_norm = path.endswith('scale')
      assert value.dtype.name == ('float32' if is_norm else dtype)
  wide = dict(tree.flatten(first['float32'].params))
  for path, value in tree.flatten(first['bfloat16'].params):
    assert np.array_equal(value, wide[path].astype(value.dtype)), path
  assert not list(folder_of(tmp_path).glob('tmp-*'))


def test_arrays_are_mapped_aligned_and_read_only(source):
  got = resolve.resolve(str(source), 'float32')
  for path, value in tree.flatten(got.params):
    assert value.ctypes.data % 64 == 0, path
    assert not value.flags.writeable and not value.flags.owndata, path
  weight = got.params['layer_0']['attn']['qkv']['w']
  on_device = jax.device_put(weight, may_alias=True)
  assert on_device.unsafe_buffer_pointer() == weight.ctypes.data


def test_a_moved_source_is_not_converted_again(
    source, conversions, tmp_path):
  resolve.resolve(str(source), 'float32')
  moved = source.rename(tmp_path / 'other.gguf')
  resolve.resolve(str(moved), 'float32')
  assert conversions == ['float32']


def test_a_changed_source_is_another_model(source, conversions):
  first = resolve.resolve(str(source), 'float32')
  gguf_writer.write_model(source, seed=1)
  second = resolve.resolve(str(source), 'float32')
  assert conversions == ['float32'] * 2
  assert first.model_fingerprint != second.model_fingerprint
  assert first.tokenizer_fingerprint == second.tokenizer_fingerprint


def test_the_fingerprint_covers_every_tensor(source, tmp_path):
  def fingerprint(weights, meta=None):
    gguf_writer.write(source, meta or gguf_writer.metadata(), weights)
    return resolve.resolve(str(source), 'float32').model_fingerprint

  weights = gguf_writer.tensors()
  base = fingerprint(weights)
  seen = {base}
  names = ['token_embd', 'output_norm'] + [
      n.removesuffix('.weight') for n in weights if n.startswith('blk.4.')
  ]
  for name in names:
    kind, values = weights[f'{name}.weight']
    changed = values.copy()
    changed.flat[5] = -changed.flat[5]
    seen.add(fingerprint(weights | {f'{name}.weight': (kind, changed)}))
  a, b = 'blk.0.ffn_norm.weight', 'blk.1.ffn_norm.weight'
  seen.add(fingerprint(weights | {a: weights[b], b: weights[a]}))
  window = gguf_writer.metadata() | {'gemma3.attention.sliding_window': 128}
  seen.add(fingerprint(weights, window))
  assert len(seen) == len(names) + 3
  # How values are stored, and in which order, does not matter.
  order = dict(sorted(weights.items(), reverse=True))
  half = weights['blk.0.attn_q.weight'][1].astype(np.float16)
  order['blk.0.attn_q.weight'] = gguf_writer.F32, half.astype(np.float32)
  assert fingerprint(order) == base


@pytest.mark.parametrize(
    'name, damage',
    [
        (name, damage)
        for name in ('bfloat16.json', 'bfloat16.safetensors',
                     'tokenizer.safetensors')
        for damage in ('flip', 'truncate', 'empty', 'remove')
    ],
)
def test_damage_is_found_and_the_entry_made_again(
    source, conversions, tmp_path, name, damage):
  before = resolve.resolve(str(source), 'bfloat16')
  values = {k: np.array(v) for k, v in tree.flatten(before.params)}
  path = folder_of(tmp_path) / name
  data = bytearray(path.read_bytes())
  if damage == 'remove':
    path.unlink()
  else:
    data[len(data) // 2] ^= 4
    keep = {'flip': len(data), 'truncate': len(data) - 1, 'empty': 0}[damage]
    # A new file: the arrays of `before` are views of the old one.
    path.unlink()
    path.write_bytes(data[:keep])
  after = resolve.resolve(str(source), 'bfloat16')
  assert conversions == ['bfloat16'] * 2
  assert after.model_fingerprint == before.model_fingerprint
  for key, value in tree.flatten(after.params):
    assert np.array_equal(value, values[key])
  resolve.resolve(str(source), 'bfloat16')
  assert len(conversions) == 2


def test_a_touched_but_whole_file_is_kept(source, conversions, tmp_path):
  resolve.resolve(str(source), 'bfloat16')
  os.utime(folder_of(tmp_path) / 'bfloat16.safetensors', (1, 1))
  resolve.resolve(str(source), 'bfloat16')
  assert conversions == ['bfloat16']


def test_a_damaged_memo_is_no_trust(source, tmp_path):
  good = native.content_sha256([source])
  (memo,) = (tmp_path / 'cache' / 'sources').glob('*.json')
  text = memo.read_text()
  assert good in text
  memo.write_text(text.replace(good, '0' * 64))
  assert native.content_sha256([source]) == good
  assert memo.read_text() == text


def test_parts_hash_as_the_whole(source, tmp_path):
  data = source.read_bytes()
  parts = [tmp_path / 'a', tmp_path / 'b']
  parts[0].write_bytes(data[:1000])
  parts[1].write_bytes(data[1000:])
  assert native.content_sha256(parts) == native.content_sha256([source])


def test_two_processes_at_once_convert_once(source, tmp_path):
  # The first one waits in the middle until the second has come to the lock.
  first = start(source, action='time.sleep(2)')
  assert first.stdout.readline() == 'half-way\n'
  second = start(source)
  results = [finish(second), finish(first)]
  assert [rc for rc, _ in results] == [0, 0]
  (print_a, count_a), (print_b, count_b) = [value for _, value in results]
  assert print_a == print_b and count_a + count_b == 1
  assert not list(folder_of(tmp_path).glob('tmp-*'))


def test_without_a_lock_two_writers_do_no_harm(source, tmp_path, conversions):
  first = start(source, action='time.sleep(2)',
                before='native.fcntl.flock = lambda *_: None')
  assert first.stdout.readline() == 'half-way\n'
  flock = native.fcntl.flock
  try:
    native.fcntl.flock = _no_locks
    mine = resolve.resolve(str(source), 'bfloat16')
  finally:
    native.fcntl.flock = flock
  rc, (theirs, count) = finish(first)
  assert (rc, count, conversions) == (0, 1, ['bfloat16'])
  assert theirs == mine.model_fingerprint
  assert same(mine, resolve.resolve(str(source), 'bfloat16'))
  assert len(conversions) == 1


def _no_locks(*_):
  raise OSError(native.errno.ENOLCK, 'No locks available')


def test_kill_half_way_leaves_nothing_that_counts(
    source, tmp_path, conversions):
  child = start(source, action='time.sleep(60)')
  assert child.stdout.readline() == 'half-way\n'
  folder = folder_of(tmp_path)
  (left,) = folder.glob('tmp-*')
  assert left.stat().st_size > 4096
  os.kill(child.pid, signal.SIGKILL)
  assert child.wait(timeout=60) == -signal.SIGKILL
  child.stdout.close()
  assert left.exists()
  resolve.resolve(str(source), 'bfloat16')
  assert conversions == ['bfloat16']
  assert not list(folder.glob('tmp-*'))


def test_a_full_disk_is_one_clear_line(source, tmp_path, conversions):
  limit = (
      'import resource;'
      ' resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))'
  )
  rc, (kind, message) = finish(start(source, before=limit))
  assert rc == 0 and kind == 'StorageError'
  folder = folder_of(tmp_path)
  assert str(folder) in message and 'KVGRAFT_CACHE_DIR' in message
  assert 'File too large' in message and '\n' not in message
  assert [p.name for p in folder.iterdir()] == ['lock']
  resolve.resolve(str(source), 'bfloat16')
  assert conversions == ['bfloat16']


def test_a_cache_that_cannot_be_written_is_one_clear_line(
    source, tmp_path, monkeypatch):
  blocker = tmp_path / 'file'
  blocker.write_text('')
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(blocker / 'cache'))
  with pytest.raises(
      errors.StorageError, match='cannot write the model cache: Not a dir'
  ) as e:
    resolve.resolve(str(source), 'float32')
  assert '\n' not in str(e.value) and 'KVGRAFT_CACHE_DIR' in str(e.value)


def test_a_weight_that_is_not_finite_leaves_no_entry(source, tmp_path):
  weights = gguf_writer.tensors()
  kind, values = weights['blk.5.ffn_gate.weight']
  values[3, 3] = np.nan
  gguf_writer.write(source, gguf_writer.metadata(), weights)
  with pytest.raises(errors.NumericsError, match='ffn_gate.weight row 3'):
    resolve.resolve(str(source), 'float32')
  assert kind == gguf_writer.F32
  assert [p.name for p in folder_of(tmp_path).iterdir()] == ['lock']


def test_a_refused_source_touches_no_cache(source, tmp_path):
  meta = gguf_writer.metadata() | {'general.architecture': 'llama'}
  gguf_writer.write(source, meta, {})
  with pytest.raises(errors.UsageError):
    resolve.resolve(str(source), 'float32')
  assert not (tmp_path / 'cache' / 'models').exists()


def test_where_the_cache_is(monkeypatch):
  monkeypatch.setenv('HOME', '/home/h')
  monkeypatch.delenv('KVGRAFT_CACHE_DIR', raising=False)
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  assert str(paths.cache_dir()) == '/home/h/.cache/kvgraft_jax'
  monkeypatch.setenv('XDG_CACHE_HOME', '/x')
  assert str(paths.cache_dir()) == '/x/kvgraft_jax'
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', '/k')
  assert str(paths.cache_dir()) == '/k'


def test_safetensors_layout_has_no_holes():
  shapes = {'a': ((3,), np.float32), 'b': ((5, 7), np.uint8),
            'c': ((2, 2), 'bfloat16'), 'd': ((0, 4), np.int32)}
  plan = safetensors.layout(shapes, {'k': 'v'})
  header = json.loads(plan.header[8:])
  assert header.pop('__metadata__') == {'k': 'v'}
  at = 0
  for entry in header.values():
    assert entry['data_offsets'][0] == at
    at = entry['data_offsets'][1]
  assert plan.nbytes == len(plan.header) + at
  assert len(plan.header) % 4096 == 0 and list(plan.starts) == list(shapes)
  assert all(start % 64 == 0 for start in plan.starts.values())


def test_safetensors_come_back_and_damage_is_named():
  arrays = {'x': np.arange(12, dtype=np.float32).reshape(3, 4),
            'y': np.arange(5, dtype=np.uint8)}
  data = safetensors.pack(arrays, {'k': 'v'})
  back, metadata = safetensors.unpack(data, 's')
  assert metadata == {'k': 'v'} and list(back) == ['x', 'y']
  assert all(np.array_equal(back[k], v) for k, v in arrays.items())
  for bad in (b'', data[:4], data[:100], data[:-1],
              data.replace(b'"F32"', b'"F99"'),
              data.replace(b'[3,4]', b'[3,5]'),
              data.replace(b'{"__m', b'["__m')):
    with pytest.raises(errors.DamageError, match='^s: '):
      safetensors.unpack(bad, 's')


def test_load_does_not_open_the_source(source):
  content = native.content_sha256([source])
  native.load_or_convert(
      content, 'float32',
      lambda: gguf_gemma.GemmaGguf(gguf.GgufFile([source])),
  )
  begin = time.perf_counter()
  native.load_or_convert(content, 'float32', pytest.fail)
  assert time.perf_counter() - begin < 1


def test_a_source_that_changes_while_it_is_converted_is_refused(
    source, monkeypatch
):
  content, write = native.content_sha256([source]), native._write_tensor
  def write_and_change(*args):
    os.utime(source, ns=(1, 1))
    source.write_bytes(source.read_bytes()[:-1] + b'x')
    return write(*args)
  def open_it():
    return gguf_gemma.GemmaGguf(gguf.GgufFile([source]))
  before = source.read_bytes()
  with monkeypatch.context() as patch:
    patch.setattr(native, '_write_tensor', write_and_change)
    with pytest.raises(errors.DamageError, match='found one changed'):
      native.load_or_convert(content, 'float32', open_it)
  # What was written does not count as the content asked for.
  source.write_bytes(before)
  opened = []
  native.load_or_convert(
      content, 'float32', lambda: opened.append(1) or open_it())
  assert opened
