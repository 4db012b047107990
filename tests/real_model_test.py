"""The real Gemma 3 270M: port parity, schedules, deposits and grafts.

Times were measured on two cores without AVX-512 at a load of 6, compilation
included; two quiet cores need less than half.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

import cli_helpers
import kvgraft_jax as kv
from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import numerics
from kvgraft_jax import selftest
from kvgraft_jax import store as store_lib
import model_helpers

pytestmark = pytest.mark.real

_ROOT = pathlib.Path(kv.__file__).parent
_REFERENCE = os.environ.get('KVGRAFT_REFERENCE_DIR')
_CAPITAL = [2, 818, 5279, 529, 7001, 563]  # The capital of France is
_GREEDY = [506, 5279, 529, 506, 2891, 529, 7001, 236761]
_TAIL = [2364, 1298, 7, 9, 100]


@pytest.fixture(scope='module')
def model():
  return model_helpers.real()


@pytest.fixture(scope='module')
def text(model):
  """About 2,000 tokens of the document that comes with the package."""
  whole = (_ROOT / 'data/document.txt').read_text(encoding='utf-8')
  ids = model.tokenizer.encode(whole, add_bos=True)[:2003]
  assert len(ids) > 1900
  return ids


def _hashes(context):
  return context.logits_sha256(), model_helpers.cache_sha256(context)


def test_smoke(model, tmp_path):
  assert model.tokenizer.encode(
      'The capital of France is', add_bos=True) == _CAPITAL
  context = model.prefill(_CAPITAL)
  first = context.logits_sha256()
  store = store_lib.Store(str(tmp_path))
  made = kv.deposit(model, store, context, name='capital')
  assert made.manifest.last_logits_sha256 == first
  found, = context.generate(8)
  assert found.token_ids == _GREEDY
  assert found.text == model.tokenizer.decode(_GREEDY)
  grafted = kv.graft(model, store, 'capital')
  assert grafted.tokens_restored == 6 and grafted.tokens_computed == 0
  grafted.extend(_GREEDY[:5])
  assert grafted.tokens_restored == 6 and grafted.tokens_computed == 5
  assert _hashes(grafted) == _hashes(model.prefill(_CAPITAL + _GREEDY[:5]))
  again, = kv.graft(model, store, 'capital').generate(8)
  assert again == found


# Port parity with an independent implementation.


if _REFERENCE:

  @pytest.mark.slow  # 50 s in float32, 240 s in bfloat16.
  @pytest.mark.parametrize('dtype', numerics.DTYPES)
  def test_port_parity(dtype):
    data = np.load(pathlib.Path(_REFERENCE, 'gemma3_270m_reference.npz'))
    exact = model_helpers.real('float32')
    model = model_helpers.real(dtype)
    tolerance = {'float32': 1e-4, 'bfloat16': 0.5}[dtype]
    positions = 0
    for name in ('capital', 'long'):
      ids = data[f'{name}.ids'].tolist()
      hidden = model.context().hidden_of(ids)
      want = data[f'{name}.argmax_all']
      rows = data[f'{name}.rows']
      logits = model.context().head(hidden[rows])
      np.testing.assert_allclose(
          np.take_along_axis(logits, data[f'{name}.top_ids'], 1),
          data[f'{name}.top_logits'], rtol=0, atol=tolerance)
      np.testing.assert_allclose(
          logits[:, data[f'{name}.sample_ids']], data[f'{name}.sample_logits'],
          rtol=0, atol=tolerance)
      true = exact.context().hidden_of(ids)
      checked = 0
      for at in range(0, len(ids), 64):
        part = model.context().head(hidden[at:at + 64])
        found, expected = part.argmax(-1), want[at:at + 64]
        if dtype == 'float32':
          np.testing.assert_array_equal(found, expected)
          checked += len(part)
          continue
        top = np.sort(exact.context().head(true[at:at + 64]), axis=-1)[:, -2:]
        clear = top[:, 1] - top[:, 0] > 1.0
        np.testing.assert_array_equal(found[clear], expected[clear])
        checked += int(clear.sum())
      assert checked > len(ids) / 4
      positions += checked
    if dtype == 'float32':
      assert positions == 1106


# Every schedule of the whole model, 700 tokens of real text.


def _run(model, ids, rows, capacity=1024):
  """Returns (logits, K, V) hashes after steps of `rows` rows."""
  cache = model.programs.empty_cache(1, capacity)
  for at in range(0, len(ids), rows):
    part = ids[at:at + rows]
    step = np.zeros((1, rows), np.int32)
    step[0, :len(part)] = part
    hidden, cache = model.programs.run_step(
        model.params, cache, step, np.asarray([at], np.int32))
  return _digest(model, hidden[0, len(part) - 1], cache, len(ids))


def _digest(model, last, cache, done, b=0):
  context = model.context()
  context.restore([0] * done, _sequence(cache, b), None)
  logits = context.head(last[None])[0]
  return hashing.logits_sha256(logits), model_helpers.cache_sha256(context)


def _sequence(cache, b):
  return cache.replace(
      k={n: x[:, b:b + 1] for n, x in cache.k.items()},
      v={n: x[:, b:b + 1] for n, x in cache.v.items()})


def _batch(model, ids, lengths, capacity=1024):
  """Returns the digests of prefixes of `ids` run together, tile by tile."""
  rows = model.profile.tile
  cache = model.programs.empty_cache(4, capacity)
  last, done = [None] * 4, np.zeros(4, np.int32)
  while (done < lengths).any():
    step, valid = np.zeros((4, rows), np.int32), []
    for b, n in enumerate(lengths):
      part = ids[done[b]:min(n, done[b] + rows)]
      step[b, :len(part)] = part
      valid.append(len(part))
    hidden, cache = model.programs.run_step(
        model.params, cache, step, done.copy())
    for b, n in enumerate(valid):
      if n:
        last[b] = hidden[b, n - 1]
    done += np.asarray(valid, np.int32)
  return [_digest(model, last[b], cache, n, b) for b, n in enumerate(lengths)]


@pytest.mark.slow  # 530 s in bfloat16, 650 s in float32.
@pytest.mark.parametrize('dtype', numerics.DTYPES)
def test_the_whole_model_agrees_with_the_self_test(text, dtype):
  model, ids = model_helpers.real(dtype), text[:700]
  table = model.self_test().invariances
  base = _run(model, ids, 512)
  found = {}
  for rows in selftest.row_ladder(model.profile):
    found[f'rows_{rows}'] = _run(model, ids, rows) == base
  found['tile'] = found[f'rows_{model.profile.tile}']
  found['capacity'] = _run(model, ids, 512, 8192) == base
  lengths = [700, 643, 300, model.profile.tile + 1]
  alone = [_run(model, ids[:n], 512) for n in lengths]
  assert alone[0] == base
  found['batch'] = _batch(model, ids, lengths) == alone
  print(dtype, found, base)
  assert found == {name: table[name] for name in found}
  if dtype == 'bfloat16':
    assert all(found.values())


_PREFILL = '''
import os, sys
import model_helpers
from kvgraft_jax import numerics
model = model_helpers.real()
context = model.prefill([int(t) for t in sys.argv[1].split(',')])
print(numerics.threads(), context.logits_sha256(),
      model_helpers.cache_sha256(context))
'''


def _child(code, *args, prefix=(), **env):
  done = subprocess.run(
      [*prefix, sys.executable, '-c', code, *args], check=False,
      env=dict(os.environ, PYTHONPATH=cli_helpers.module_path(), **env),
      capture_output=True, text=True, timeout=900)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout.split()


@pytest.mark.slow  # 160 s.
def test_one_core_and_two_have_one_hash(model, text):
  if numerics.threads() < 2 or not shutil.which('taskset'):
    pytest.skip('needs two cores and taskset')
  ids = text[:700]
  want = list(_hashes(model.prefill(ids)))
  core = str(min(os.sched_getaffinity(0)))
  joined = ','.join(map(str, ids))
  assert _child(_PREFILL, joined, prefix=('taskset', '-c', core)) == [
      '1', *want]
  assert _child(_PREFILL, joined, NPROC='1') == ['1', *want]


# Deposits and grafts.

_DEPOSIT = '''
import sys
import kvgraft_jax as kv
import model_helpers
model = model_helpers.real()
made = kv.deposit(model, kv.Store(sys.argv[1]),
                  [int(t) for t in sys.argv[2].split(',')], name='document')
print(made.id, made.tokens_computed)
'''


@pytest.fixture(scope='module')
def deposited(text, tmp_path_factory):
  """A store with the text, deposited by another process."""
  root = str(tmp_path_factory.mktemp('real'))
  found, computed = _child(_DEPOSIT, root, ','.join(map(str, text)))
  assert int(computed) == len(text)
  return store_lib.Store(root), found


@pytest.mark.slow  # 240 s.
def test_verify_of_another_process_deposit(model, text, deposited):
  store, made = deposited
  report = kv.verify(model, store, 'document', n_continuations=50)
  assert (report.sha256_equal, report.argmax_agree, report.max_kl) == (
      50, 50, 0.0)
  assert report.greedy_tokens_equal == report.greedy_tokens == 64
  assert report.restored_only and report.end_to_end_equal
  assert report.tokens_restored == len(text)
  assert report.ok
  assert kv.deposit(model, store, text).id == made


@pytest.mark.slow  # 30 s.
def test_audit_of_all_blocks(model, text, deposited):
  store, _ = deposited
  report = kv.audit(model, store, 'document', blocks='all')
  assert report.ok and report.blocks_checked == report.blocks_equal == 8
  assert report.last_logits_equal and report.tokens_computed == len(text)


@pytest.mark.slow  # 40 and 65 s.
@pytest.mark.parametrize('block', [512, 256])
def test_every_length_of_a_sweep(model, text, tmp_path, block):
  store, text = store_lib.Store(str(tmp_path)), text[:1100]
  made = kv.deposit(model, store, text, block=block)
  lengths = sorted({1, len(text)} | {
      n + d for n in (128, 256, 512, 1024) for d in (-1, 0, 1)
      if n == block or block == 256})
  fresh = model.context()
  for length in lengths:
    fresh.extend(text[fresh.length:length])
    want = fresh.fork().extend(_TAIL)
    context = kv.graft(model, store, made, length).extend(_TAIL)
    assert (context.tokens_restored, context.tokens_computed) == (
        length, len(_TAIL))
    assert _hashes(context) == _hashes(want), length
  assert _hashes(fresh) == _hashes(model.prefill(text))


@pytest.mark.slow  # 85 s.
def test_window_mode(model, text, tmp_path):
  store = store_lib.Store(str(tmp_path))
  made = kv.deposit(model, store, text[:1100], sliding='window')
  first, _ = artifact_lib.available(made.manifest)['sliding']
  assert first == (1100 - 512 - 1) // 512 * 512
  for length in (1100, 1099, first + 512):
    context = kv.graft(model, store, made, length).extend(_TAIL)
    assert (context.tokens_restored, context.tokens_computed) == (length, 5)
    assert _hashes(context) == _hashes(
        model.prefill(text[:length] + _TAIL)), length
  with pytest.raises(
      errors.UsageError, match=f'lengths from {first + 512} to 1100'):
    kv.graft(model, store, made, first + 511)


@pytest.mark.slow  # 140 s.
def test_a_chain_of_two_parents_and_a_child_of_generated_tokens(
    model, text, tmp_path):
  store = store_lib.Store(str(tmp_path))
  a = kv.deposit(model, store, text[:400])
  b = kv.deposit(model, store, text[400:777], parent=a)
  c = kv.deposit(model, store, text[777:1100], parent=b)
  assert [x.tokens_computed for x in (a, b, c)] == [400, 377, 323]
  for length in (401, 777, 900, 1100):
    context = kv.graft(model, store, c, length).extend(_TAIL)
    assert (context.tokens_restored, context.tokens_computed) == (length, 5)
    assert _hashes(context) == _hashes(
        model.prefill(text[:length] + _TAIL)), length
  context = kv.graft(model, store, b)
  found, = context.generate(24, temperature=1.0, seed=4, stop_ids=())
  child = kv.deposit(model, store, context)
  assert (child.manifest.fields.start, child.length) == (777, 801)
  assert child.tokens_computed == 1  # The token that was pending.
  context = kv.graft(model, store, child).extend(_TAIL)
  assert (context.tokens_restored, context.tokens_computed) == (801, 5)
  assert _hashes(context) == _hashes(
      model.prefill(text[:777] + found.token_ids + _TAIL))
