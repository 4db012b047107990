import numpy as np
import pytest

import kvgraft_jax as kv
from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import recorder as recorder_lib
from kvgraft_jax import store as store_lib
from kvgraft_jax import verification
import model_helpers

_IDS = model_helpers.tokens(150)


@pytest.fixture(scope='module')
def model():
  return model_helpers.exact()


@pytest.fixture(scope='module')
def store(model, tmp_path_factory):
  store = store_lib.Store(str(tmp_path_factory.mktemp('store')))
  kv.deposit(model, store, _IDS, name='full')
  kv.deposit(model, store, _IDS, sliding='window', name='window')
  parent = kv.deposit(model, store, _IDS[:70])
  kv.deposit(model, store, _IDS[70:], parent=parent, name='child')
  return store


@pytest.mark.parametrize('ref,count,length', [
    ('full', 12, None), ('full', 3, 65), ('window', 5, None),
    ('child', 5, None), ('child', 3, 71)])
def test_verify_reports_only_equal_bits(model, store, ref, count, length):
  seen = []
  report = kv.verify(
      model, store, ref, n_continuations=count, length=length,
      progress=lambda *a: seen.append(a))
  assert report.ok
  assert (report.continuations, report.sha256_equal, report.argmax_agree) == (
      count,) * 3
  assert report.max_kl == 0.0
  assert report.greedy_tokens_equal == report.greedy_tokens == 64
  assert report.end_to_end_equal and report.restored_only
  assert report.length == report.tokens_restored == (length or 150)
  tails = verification.continuations(model, _IDS, count)
  assert report.tail_tokens == sum(map(len, tails))
  assert seen[-1] == (count, count)


def test_continuations_are_fixed_and_various(model):
  found = verification.continuations(model, _IDS, 50)
  assert found == verification.continuations(model, _IDS, 50)
  assert len({tuple(t) for t in found}) >= 45
  assert {len(t) for t in found} == set(range(1, 12))
  assert all(0 <= t < 320 for tail in found for t in tail)


@pytest.mark.parametrize('options,message', [
    ({'n_continuations': 0}, 'continuations: expected at least 1'),
    ({'on_mismatch': 'recompute'}, 'verify compares a graft'),
    ({'length': 151}, 'length: expected 1 to 150'),
])
def test_verify_refuses(model, store, options, message):
  with pytest.raises(errors.UsageError, match=message):
    kv.verify(model, store, 'full', **options)


def test_audit_of_all_blocks(model, store):
  report = kv.audit(model, store, 'full')
  # 150 positions in blocks of 32, both kinds.
  assert report == verification.AuditReport(10, 10, 0, [], True, 150)
  assert report.ok


@pytest.mark.parametrize('blocks,checked,last', [
    (1, 2, None), (2, 4, True), ('3', 6, True), (99, 10, True)])
def test_audit_of_some_blocks(model, store, blocks, checked, last):
  report = kv.audit(model, store, 'full', blocks=blocks)
  assert (report.blocks_checked, report.blocks_equal) == (checked, checked)
  assert report.last_logits_equal is last and report.ok
  assert report.tokens_computed < 150 or checked == 10


@pytest.mark.parametrize('blocks', [0, -1, 'x', '0', '1.5', ''])
def test_audit_refuses(model, store, blocks):
  with pytest.raises(errors.UsageError, match="blocks: expected 'all' or a"):
    kv.audit(model, store, 'full', blocks=blocks)


def test_audit_of_a_window_artifact_says_what_cannot_be_checked(model, store):
  report = kv.audit(model, store, 'window')
  # Only global blocks and what a graft can reach; block 0 needs no graft.
  assert report.ok and report.blocks_equal == report.blocks_checked > 0
  assert report.blocks_not_auditable > 0
  stored = sum(len(g.blocks) for g in store.find('window').geometries.values())
  assert report.blocks_checked + report.blocks_not_auditable == stored


def test_audit_of_a_child_checks_its_own_blocks(model, store):
  report = kv.audit(model, store, 'child')
  assert report == verification.AuditReport(6, 6, 0, [], True, 80)


def _lie(model, store, root, change, **options):
  """Deposits _IDS under its true key with altered bytes and fitting digests."""
  true = store.find('full')
  context = model.prefill(_IDS)
  logits = options.get('logits', true.last_logits_sha256)
  lies = store_lib.Store(str(root))
  layouts = grafting.layouts(model.config, model.profile.dtype)
  outer = {'profile': true.profile, 'self_test': true.self_test}
  with lies.create(true.fields, layouts, np.asarray(_IDS, np.int32)) as writer:
    for kind, geometry in true.geometries.items():
      for block in geometry.blocks:
        k, v = (recorder_lib.read_global(context.cache, *block[1:], 16)
                if kind == 'global' else context.sliding_rows(*block[1:]))
        rows = np.stack([k, v], axis=1)
        change(kind, block.number, rows)
        writer.write_block(kind, block.number, rows)
    manifest = writer.commit(last_logits_sha256=logits, outer=outer)
  return lies, manifest


def test_the_crafting_of_a_lie_changes_nothing_by_itself(
    model, store, tmp_path):
  lies, manifest = _lie(model, store, tmp_path, lambda *_: None)
  assert manifest.id == store.find('full').id
  assert kv.verify(model, lies, manifest, n_continuations=2).ok


@pytest.mark.parametrize('kind,row,layer', [
    ('global', 1, 4), ('sliding', 2, 3)])
def test_a_consistent_lie_is_found(model, store, tmp_path, kind, row, layer):
  def change(k, index, rows):
    if (k, index) == (kind, 4):
      rows[row, 0] ^= 0x8000  # The sign of every K value.

  lies, manifest = _lie(model, store, tmp_path, change)
  assert manifest.key == store.find('full').key
  assert manifest.id != store.find('full').id
  assert artifact_lib.first_difference(manifest, store.find('full')).startswith(
      f'{kind} layer {layer} K block 4')
  kv.graft(model, lies, manifest)  # Digests fit: a graft cannot notice.
  report = kv.verify(model, lies, manifest, n_continuations=6)
  assert not report.ok
  assert report.sha256_equal == 0 and report.max_kl > 0
  assert not report.end_to_end_equal
  report = kv.audit(model, lies, manifest)
  assert not report.ok
  assert (report.blocks_checked, report.blocks_equal) == (10, 9)
  line, = report.differing
  assert line.startswith(
      f'{kind} block 4, positions 128 to 149: layer {layer}')


def test_a_lie_in_front_is_named_first(model, store, tmp_path):
  def change(kind, index, rows):
    if (kind, index) == ('global', 1):
      rows[0, 1, 3] ^= 0x8000  # Signs of one position's V.

  lies, manifest = _lie(model, store, tmp_path, change)
  assert not kv.verify(model, lies, manifest, n_continuations=2).ok
  report = kv.audit(model, lies, manifest)
  assert not report.ok
  assert any(line.startswith('global block 1,') for line in report.differing)
  assert not any('block 0,' in line for line in report.differing)


def test_a_lie_about_the_last_logits_is_found(model, store, tmp_path):
  lies, manifest = _lie(
      model, store, tmp_path, lambda *_: None, logits='0' * 64)
  report = kv.audit(model, lies, manifest)
  assert report.blocks_equal == report.blocks_checked
  assert report.last_logits_equal is False and not report.ok


def test_a_second_deposit_that_disagrees_is_a_conflict(
    model, store, tmp_path):
  def change(kind, index, rows):
    if (kind, index) == ('sliding', 2):
      rows[1, 0, 0, 0, 0] ^= 1

  lies, _ = _lie(model, store, tmp_path, change)
  with pytest.raises(
      errors.ConflictError, match='first difference is sliding layer 1 K block'
      ' 2'):
    _lie(model, store, tmp_path, lambda *_: None)
  assert len(lies.list()) == 1
