import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import cli_helpers
import kvgraft_jax as kv
from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import errors
from kvgraft_jax import store as store_lib
import model_helpers

_IDS = model_helpers.tokens(150)
_TAIL = model_helpers.tokens(70, seed=9)
_PAGE, _WINDOW, _BLOCK, _RING = 16, 24, 32, 64
# 1, the whole, and one below, at and above every boundary.
_LENGTHS = sorted({1, 2, 149, 150} | {
    n + d for n in (_PAGE, _WINDOW, _BLOCK, _RING, 96, 128, 2 * _WINDOW)
    for d in (-1, 0, 1)})


@pytest.fixture(scope='module')
def model():
  return model_helpers.exact()


@pytest.fixture(scope='module')
def store(tmp_path_factory):
  return store_lib.Store(str(tmp_path_factory.mktemp('store')))


@pytest.fixture(scope='module')
def whole(model, store):
  """Deposits the prompt; the artifact that most tests graft from."""
  return kv.deposit(model, store, _IDS, name='whole')


@pytest.fixture(scope='module')
def fresh(model):
  """Returns hashes of prefixes with a tail, computed from nothing, once each.
  """
  known = {}

  def hashes(tokens, tail):
    key = tuple(tokens), tuple(tail)
    if key not in known:
      context = model.prefill([*tokens, *tail])
      assert context.tokens_restored == 0
      assert context.tokens_computed == len(tokens) + len(tail)
      known[key] = (context.logits_sha256(),
                    model_helpers.cache_sha256(context))
    return known[key]

  return hashes


def _hashes(context):
  return context.logits_sha256(), model_helpers.cache_sha256(context)


def _check(fresh, context, tokens, tail=_TAIL[:5]):
  """Extends a graft by `tail`; compares with fresh; only the tail was run."""
  assert context.tokens == list(tokens)
  assert (context.tokens_restored, context.tokens_computed) == (len(tokens), 0)
  context.extend(tail)
  assert _hashes(context) == fresh(tokens, tail)
  assert context.tokens_restored == len(tokens)
  assert context.tokens_computed == len(tail)
  assert context.exact


# Lengths, blocks and tails.


@pytest.mark.parametrize('block', [16, 32, 64])
def test_every_length_continues_with_the_bits_of_a_fresh_run(
    model, store, fresh, block):
  made = kv.deposit(model, store, _IDS, block=block)
  assert (made.manifest.fields.block, made.length) == (block, 150)
  for length in _LENGTHS:
    _check(fresh, kv.graft(model, store, made, length), _IDS[:length])


@pytest.mark.parametrize('size', [0, 1, 3, 4, 5, 31, 32, 33])
def test_every_tail_length(model, store, whole, fresh, size):
  tail = _TAIL[:size]
  for length in (90, 150):
    context = kv.graft(model, store, whole, length)
    if size:
      _check(fresh, context, _IDS[:length], tail)
      continue
    # Without a tail the last position is run again, for its logits.
    assert _hashes(context) == fresh(_IDS[:length], [])
    assert context.tokens_restored == length - 1
    assert context.tokens_computed == 1


@pytest.mark.slow  # 35 s on 2 cores without caches: the self-test.
def test_float32_as_well(tmp_path):
  model = model_helpers.exact('float32')
  store = store_lib.Store(str(tmp_path))
  made = kv.deposit(model, store, _IDS)
  for length in (1, 25, 64, 150):
    want = model.prefill(_IDS[:length] + _TAIL)
    context = kv.graft(model, store, made, length)
    context.extend(_TAIL)
    assert context.tokens_computed == len(_TAIL)
    assert context.tokens_restored == length
    assert _hashes(context) == _hashes(want), length


def test_every_row_of_logits_behind_a_graft_equals_fresh(model, store, whole):
  # Scores read these rows; positions inside the graft have none at all.
  ours = kv.graft(model, store, whole, 100).logits_of(_TAIL[:9])
  theirs = model.prefill(_IDS[:100]).logits_of(_TAIL[:9])
  assert ours.tobytes() == theirs.tobytes()


def test_scores_behind_a_graft_equal_fresh(model, store, whole):
  context = kv.graft(model, store, whole, 100)
  assert context.score(_TAIL[:9]) == model.prefill(_IDS[:100]).score(_TAIL[:9])


def test_fresh_twice_graft_twice_another_prompt_graft_again(
    model, store, whole, fresh):
  found = set()
  for step in ('fresh', 'fresh', 'graft', 'graft', 'other', 'graft', 'fresh'):
    if step == 'other':
      model.prefill(model_helpers.tokens(200, seed=4)).generate(3, stop_ids=())
      continue
    context = (model.prefill(_IDS) if step == 'fresh'
               else kv.graft(model, store, whole))
    context.extend(_TAIL[:7])
    found.add(_hashes(context))
    assert context.tokens_computed == (157 if step == 'fresh' else 7)
  assert found == {fresh(_IDS, _TAIL[:7])}


@pytest.mark.parametrize('temperature', [0.0, 1.5])
def test_seventy_tokens_after_a_graft(model, store, whole, temperature):
  options = {'temperature': temperature, 'seed': 5, 'stop_ids': ()}
  a = kv.graft(model, store, whole, 70)
  b = model.prefill(_IDS[:70])
  assert a.generate(70, **options) == b.generate(70, **options)
  assert _hashes(a) == _hashes(b)
  assert a.tokens_restored == 69 and a.tokens_computed == 71


def test_samples_of_a_graft_equal_samples_of_a_fresh_context(
    model, store, whole):
  options = {'temperature': 1.5, 'seed': 2, 'num_samples': 5, 'stop_ids': ()}
  a = kv.graft(model, store, whole, 65).generate(6, **options)
  b = model.prefill(_IDS[:65]).generate(6, **options)
  assert a == b and len({tuple(g.token_ids) for g in a}) > 1


# The restored cache itself.


@pytest.mark.parametrize('length', [1, 23, 24, 33, 63, 64, 65, 100, 150])
def test_every_leaf_of_a_restored_cache(model, store, whole, length):
  restored = kv.graft(model, store, whole, length).cache
  fresh = model.prefill(_IDS[:length]).cache
  assert restored.capacity == fresh.capacity
  for name, value in fresh.scalars.items():
    np.testing.assert_array_equal(restored.scalars[name], value)
  assert set(restored.scalars) == set(fresh.scalars)
  for (a, slots), (b, _) in zip(
      model_helpers.visible_rows(model, restored, length),
      model_helpers.visible_rows(model, fresh, length)):
    assert a[:, slots].any()
    np.testing.assert_array_equal(a[:, slots], b[:, slots])
  margin = model.profile.chunk
  for side in (restored.k, restored.v):
    assert not np.asarray(side['global'])[:, :, length:].any()
    ring = np.asarray(side['sliding'])
    # A sliding slot holds a position in front of the length, or zero.
    held = margin + np.arange(max(0, length - _RING), length) % _RING
    empty = np.setdiff1d(np.arange(ring.shape[2]), held)
    assert not ring[:, :, empty].any()


def test_graft_never_touches_a_live_cache(model, store, whole):
  live = model.prefill(_IDS[:40])
  before = _hashes(live)
  leaf = live.cache.k['global']
  kv.graft(model, store, whole).extend(_TAIL)
  assert live.cache.k['global'] is leaf and not leaf.is_deleted()
  assert _hashes(live) == before


def test_two_grafts_of_one_artifact_are_independent(
    model, store, whole, fresh):
  a = kv.graft(model, store, whole)
  b = kv.graft(model, store, whole)
  b.extend(_TAIL)
  _check(fresh, a, _IDS)


# Deposits.


def test_deposit_of_a_known_key_computes_nothing(model, store, whole):
  again = kv.deposit(model, store, _IDS, name='whole')
  assert (again.id, again.existed, again.tokens_computed) == (
      whole.id, True, 0)


def test_deposit_of_a_context_equals_deposit_of_its_tokens(
    model, store, whole, tmp_path):
  other = store_lib.Store(str(tmp_path))
  context = model.prefill(_IDS[:37])
  context.extend(_IDS[37:])
  made = kv.deposit(model, other, context)
  assert not made.existed
  assert (made.key, made.id) == (whole.key, whole.id)
  assert made.tokens_computed == 0
  assert made.manifest.last_logits_sha256 == context.logits_sha256()
  context.extend(_TAIL[:3])  # The deposit left the context usable.
  assert context.logits_sha256() == model.prefill(
      _IDS + _TAIL[:3]).logits_sha256()


def test_a_deposit_under_another_schedule_has_the_same_id(
    model, store, whole, tmp_path):
  other = model_helpers.variant(model, chunk=64, tile=8)
  made = kv.deposit(
      other, store_lib.Store(str(tmp_path)), _IDS, block=_BLOCK)
  assert (made.tokens_computed, made.id) == (150, whole.id)
  context = kv.graft(other, store, whole).extend(_TAIL[:3])
  assert (context.tokens_restored, context.tokens_computed) == (150, 3)
  assert context.logits_sha256() == kv.graft(
      model, store, whole).extend(_TAIL[:3]).logits_sha256()


def test_a_taken_name_is_refused(model, store, whole):
  before = len(store.list())
  with pytest.raises(errors.UsageError, match="name 'whole' is taken"):
    kv.deposit(model, store, _IDS[:20], name='whole')
  assert len(store.list()) == before


@pytest.mark.parametrize('tokens,error,message', [
    ([], errors.UsageError, 'at least one token'),
    ([5, 320], errors.UsageError, r'tokens\[1\].*0 to 319, found 320'),
    ([-1], errors.UsageError, 'found -1'),
    ([True], errors.UsageError, 'found True'),
    ([5] * 4097, errors.CapacityError, '4097 tokens'),
])
def test_bad_tokens_are_refused(model, store, whole, tokens, error, message):
  before = len(store.list())
  with pytest.raises(error, match=message):
    kv.deposit(model, store, tokens)
  assert len(store.list()) == before


@pytest.mark.parametrize('options,message', [
    ({'block': 24}, 'block: expected a multiple of the page'),
    ({'block': 0}, 'block'),
    ({'sliding': 'half'}, 'sliding'),
    ({'name': '../up'}, 'no reference'),
    ({'name': 'a/b'}, 'no reference'),
])
def test_bad_options_are_refused(model, tmp_path, options, message):
  store = store_lib.Store(str(tmp_path))
  with pytest.raises(errors.UsageError, match=message):
    kv.deposit(model, store, _IDS[:20], **options)
  assert store.names() == {}


@pytest.mark.parametrize('length', [0, -1, 151])
def test_lengths_beyond_the_artifact_are_refused(model, store, whole, length):
  with pytest.raises(errors.UsageError, match='length: expected 1 to 150'):
    kv.graft(model, store, whole, length)


def test_unknown_references_and_policies_are_refused(model, store, whole):
  with pytest.raises(errors.NotFoundError, match='nobody'):
    kv.graft(model, store, 'nobody')
  with pytest.raises(errors.UsageError, match='on_mismatch'):
    kv.graft(model, store, 'whole', on_mismatch='maybe')


@pytest.mark.parametrize('ref', ['name', 'id', 'prefix', 'key'])
def test_references(model, store, whole, fresh, ref):
  text = {'name': 'whole', 'id': whole.id, 'prefix': whole.id[:16],
          'key': whole.key}[ref]
  _check(fresh, kv.graft(model, store, text), _IDS)


def test_an_artifact_beyond_the_capacity_is_refused(store, whole):
  small = model_helpers.tiny(capacity=100)
  with pytest.raises(errors.CapacityError, match='150 tokens .* 100'):
    kv.graft(small, store, whole)
  context = kv.graft(small, store, whole, 99)
  assert context.tokens_restored == 99


# Sliding mode 'window'.


@pytest.mark.parametrize('block', [16, 32])
def test_window_mode_serves_the_end_and_says_what_else(
    model, tmp_path, fresh, block):
  store = store_lib.Store(str(tmp_path))
  made = kv.deposit(model, store, _IDS, sliding='window', block=block)
  first, _ = artifact_lib.available(made.manifest)['sliding']
  assert first == (150 - _WINDOW - 1) // block * block > 0
  for length in (first + _WINDOW, 149, 150):
    _check(fresh, kv.graft(model, store, made, length), _IDS[:length])
  with pytest.raises(
      errors.UsageError,
      match=f'available are lengths from {first + _WINDOW} to 150'):
    kv.graft(model, store, made, first + _WINDOW - 1)
  empty = kv.graft(model, store, made)
  assert _hashes(empty) == fresh(_IDS, [])


def test_window_mode_of_a_short_text_keeps_all(model, tmp_path, fresh):
  store = store_lib.Store(str(tmp_path))
  made = kv.deposit(model, store, _IDS[:20], sliding='window')
  for length in (1, 19, 20):
    _check(fresh, kv.graft(model, store, made, length), _IDS[:length])


def test_without_a_record_only_the_window_can_be_deposited(
    model, tmp_path, fresh):
  store = store_lib.Store(str(tmp_path))
  context = model.prefill(_IDS, record=False)
  with pytest.raises(errors.UsageError, match='record=True.*window'):
    kv.deposit(model, store, context)
  assert store.list() == []
  assert context.logits_sha256() == fresh(_IDS, [])[0]
  grafted = kv.deposit(model, store, _IDS[:100], name='part')
  assert grafted.tokens_computed == 100
  with pytest.raises(errors.UsageError, match='record'):
    # Its own rows have left the ring.
    child = kv.graft(model, store, 'part', record=False)
    kv.deposit(model, store, child.extend(_TAIL))


# Chains.


def test_a_chain_of_two_parents(model, tmp_path, fresh):
  store = store_lib.Store(str(tmp_path))
  a = kv.deposit(model, store, _IDS[:50])
  b = kv.deposit(model, store, _IDS[50:99], parent=a)
  c = kv.deposit(model, store, _IDS[99:], parent=b, name='leaf')
  assert [m.tokens_computed for m in (a, b, c)] == [50, 49, 51]
  assert (c.manifest.fields.start, c.length) == (99, 150)
  assert c.manifest.fields.parent == b.key
  for length in (1, 49, 50, 51, 75, 98, 99, 100, 128, 150):
    _check(fresh, kv.graft(model, store, 'leaf', length), _IDS[:length])


def test_a_child_may_start_in_front_of_its_parents_end(
    model, store, whole, tmp_path, fresh):
  for start in (40, 64, 149):
    child = kv.deposit(
        model, store, _TAIL[:20], parent=whole, parent_length=start)
    assert child.tokens_computed == 20
    assert (child.manifest.fields.start, child.length) == (start, start + 20)
    tokens = _IDS[:start] + _TAIL[:20]
    for length in (start - 1, start, start + 1, start + 20):
      _check(fresh, kv.graft(model, store, child, length),
             tokens[:length])


def test_children_of_window_parents(model, tmp_path, fresh):
  store = store_lib.Store(str(tmp_path))
  a = kv.deposit(model, store, _IDS[:100], sliding='window')
  b = kv.deposit(model, store, _IDS[100:], parent=a, sliding='window')
  assert (a.tokens_computed, b.tokens_computed) == (100, 50)
  for length in (100, 101, 149, 150):
    _check(fresh, kv.graft(model, store, b, length), _IDS[:length])


def test_a_child_of_generated_tokens_with_a_pending_one(
    model, store, whole, fresh):
  context = kv.graft(model, store, whole, 90)
  found, = context.generate(40, temperature=1.5, seed=8, stop_ids=())
  assert context.length == 130
  assert context._done == 129  # The last token has not been run yet.
  made = kv.deposit(model, store, context)
  assert (made.manifest.fields.start, made.length) == (90, 130)
  assert made.tokens_computed == 1
  tokens = _IDS[:90] + found.token_ids
  assert made.manifest.last_logits_sha256 == fresh(tokens, [])[0]
  for length in (89, 91, 129, 130):
    _check(fresh, kv.graft(model, store, made, length), tokens[:length])
  # A grandchild, from a graft of the child that was continued in turn.
  context = kv.graft(model, store, made)
  more = context.generate(30, temperature=1.5, seed=9, stop_ids=())[0].token_ids
  last = kv.deposit(model, store, context, sliding='window')
  assert last.manifest.fields.parent == made.key
  _check(fresh, kv.graft(model, store, last), tokens + more)


def test_a_context_that_was_not_continued_has_nothing_to_deposit(
    model, store, whole):
  with pytest.raises(errors.UsageError, match='behind the parent, found none'):
    kv.deposit(model, store, kv.graft(model, store, whole))


def test_a_context_takes_no_other_parent(model, store, whole):
  context = kv.graft(model, store, whole).extend([5])
  with pytest.raises(errors.UsageError, match='parent'):
    kv.deposit(model, store, context, parent=whole)


def test_a_lost_parent_is_damage(model, tmp_path):
  store = store_lib.Store(str(tmp_path))
  a = kv.deposit(model, store, _IDS[:50])
  b = kv.deposit(model, store, _IDS[50:80], parent=a)
  shutil.rmtree(tmp_path / 'a' / a.key)
  with pytest.raises(errors.DamageError, match=f'parent.*{a.key[:12]}'):
    kv.graft(model, store, b)


# Two processes.

_CHILD = '''
import json, sys
import model_helpers
import kvgraft_jax as kv
model = model_helpers.exact()
ids = model_helpers.tokens(int(sys.argv[2]))
store = kv.Store(sys.argv[1])
print('ready', flush=True)
sys.stdin.readline()
made = kv.deposit(model, store, ids)
context = kv.graft(model, store, made, 100).extend([5, 6, 7])
print(json.dumps([made.id, context.logits_sha256(), context.tokens_computed]))
'''


@pytest.mark.slow  # 20 s on 2 cores: two processes compile the tiny model.
def test_two_processes_deposit_one_key_at_once(model, store, whole, tmp_path):
  env = dict(os.environ, PYTHONPATH=cli_helpers.module_path())
  children = [
      subprocess.Popen(
          [sys.executable, '-c', _CHILD, str(tmp_path), '150'], env=env,
          text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
      for _ in range(2)]
  for child in children:
    assert child.stdout.readline() == 'ready\n'
  results = []
  for child in children:
    child.stdin.write('go\n')
    child.stdin.flush()
  for child in children:
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    results.append(json.loads(out))
  want = kv.graft(model, store, whole, 100).extend([5, 6, 7])
  assert results == [[whole.id, want.logits_sha256(), 3]] * 2
  assert len(store_lib.Store(str(tmp_path)).list()) == 1
