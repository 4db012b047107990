from concurrent import futures
import itertools
import json
import subprocess

import numpy as np
import pytest

from kvgraft_jax import artifact
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import store as store_lib
from kvgraft_jax import writer as writer_lib
import store_helpers

_numbers = itertools.count()
KINDS = ('sliding', 'global')


@pytest.fixture(params=['path', 'memory'])
def store(request, tmp_path):
  if request.param == 'memory':
    return store_lib.Store(f'memory://journal{next(_numbers)}')
  return store_lib.Store(str(tmp_path / 'store'))


@pytest.fixture
def local(tmp_path):
  return store_lib.Store(str(tmp_path / 'store'))


@pytest.fixture
def case():
  """Blocks 1 to 6, the first and the last in part."""
  return store_helpers.case(37, 200)


def expected_id(what: store_helpers.Case) -> str:
  """Returns the id that a deposit without a journal gives."""
  other = store_lib.Store(f'memory://plain{next(_numbers)}')
  return store_helpers.deposit(other, what).id


def args_of(what: store_helpers.Case):
  return what.fields, what.layouts, what.tokens


def write(writer, what, first, stop):
  for index in range(first, stop):
    for kind in KINDS:
      writer.write_block(kind, index, what.blocks[kind, index])


def begin(store, what, stop=5, step=2) -> str:
  """Writes blocks 1 to stop - 1, a checkpoint every `step`, and breaks off."""
  with pytest.raises(KeyboardInterrupt):
    with store.create(*args_of(what), journal=True) as writer:
      for first in range(1, stop, step):
        write(writer, what, first, min(first + step, stop))
        writer.checkpoint(f'behind {min(first + step, stop) - 1}'.encode())
      raise KeyboardInterrupt
  return writer.attempt


def end(store, what, done: int, state: bytes | None) -> None:
  """Resumes behind `done` blocks, commits and compares everything."""
  with store.resume(*args_of(what)) as writer:
    assert [writer.done(k) for k in KINDS] == [done, done]
    assert writer.state == state
    write(writer, what, 1 + done, 7)
    made = writer.commit(last_logits_sha256=store_helpers.LOGITS, outer={})
  assert made.id == expected_id(what)
  store_helpers.check(store, made, what)
  assert store.list() == [made] and store.list_damaged() == []
  assert store.attempts(what.fields.key) == []
  assert not any('/journal/' in name for name in store._kv.list('a/'))


def entries(store, what, attempt) -> list[str]:
  prefix = f'a/{what.fields.key}/{attempt}/journal/'
  return [n for n in store._kv.list(prefix) if 'state' not in n]


def data_path(tmp_path, what, attempt, kind, index):
  return (tmp_path / 'store' / 'a' / what.fields.key / attempt / kind
          / f'c.0.0.{index - 1}.0.0')


def test_journaled_deposit_gives_the_same_artifact(store, case):
  with store.create(*args_of(case), journal=True) as writer:
    assert writer.state is None
    write(writer, case, 1, 7)
    assert store.list() == [] and store.attempts(case.fields.key) == []
    writer.checkpoint()
    assert store.attempts(case.fields.key) == [writer.attempt]
    assert store.list() == [] and store.get(case.fields.key) is None
    made = writer.commit(last_logits_sha256=store_helpers.LOGITS, outer={})
  assert made.id == expected_id(case)
  store_helpers.check(store, made, case)
  assert store.attempts(case.fields.key) == []
  assert store.resume(*args_of(case)) is None


def test_broken_off_deposit_goes_on(store, case):
  attempt = begin(store, case)
  assert store.attempts(case.fields.key) == [attempt]
  assert store.list() == []
  end(store, case, 4, b'behind 4')


def test_what_follows_the_last_checkpoint_is_computed_again(store, case):
  with store.create(*args_of(case), journal=True) as writer:
    write(writer, case, 1, 3)
    writer.checkpoint(b'behind 2')
    write(writer, case, 3, 6)
    assert writer.done('global') == 5
  end(store, case, 2, b'behind 2')


def test_nothing_is_kept_without_a_checkpoint_or_after_discard(store, case):
  with store.create(*args_of(case), journal=True) as writer:
    write(writer, case, 1, 3)
  with store.create(*args_of(case), journal=True) as writer:
    write(writer, case, 1, 3)
    writer.checkpoint(b'x')
    writer.discard()
  assert store._kv.list('a/') == []
  with store.create(*args_of(case)) as writer:
    with pytest.raises(errors.UsageError, match='journal=True'):
      writer.checkpoint()
    assert writer.state is None


def test_furthest_attempt_is_resumed(store, case):
  found = {begin(store, case, stop) for stop in (3, 6, 4)}
  assert set(store.attempts(case.fields.key)) == found and len(found) == 3
  with store.resume(*args_of(case)) as writer:
    assert writer.done('global') == 5
  for attempt in found - {writer.attempt}:
    store.delete_attempt(case.fields.key, attempt)
  end(store, case, 5, b'behind 5')
  with pytest.raises(errors.UsageError, match='64 hex digits'):
    store.attempts('x')


def test_blocks_in_any_order(store, case):
  """Only blocks without a gap count as done; the others may come again."""
  with store.create(*args_of(case), journal=True) as writer:
    for index in (6, 1, 4):
      write(writer, case, index, index + 1)
      writer.checkpoint()
  with store.resume(*args_of(case)) as writer:
    assert writer.done('global') == 1
  end(store, case, 1, None)


def test_only_the_last_states_are_kept(store, case):
  with store.create(*args_of(case), journal=True) as writer:
    for index in range(1, 7):
      write(writer, case, index, index + 1)
      writer.checkpoint(b'x' * index)
      assert writer.state == b'x' * index
    writer.checkpoint()
    assert writer.state == b'x' * 6
  states = [n for n in store._kv.list('a/') if 'journal/state-' in n]
  assert len(states) == 2
  digests = [hashing.blake3_hex('kvgraft.state', b'x' * n) for n in (5, 6)]
  assert sorted(states) == sorted(
      n.rpartition('-')[0] + '-' + d for n, d in zip(states, digests))
  for digest, left in zip(reversed(digests), (b'x' * 5, None)):
    [name] = [n for n in states if digest in n]
    store._kv.put(name, b'damaged')
    with store.resume(*args_of(case)) as writer:
      assert writer.state == left
  end(store, case, 6, None)


def test_reads_of_an_attempt(store, case):
  def check(writer, lo, hi, layers):
    rows = case.rows('global')[layers, :, lo - 37:hi - 37]
    out = np.zeros((2,) + rows[:, 0].shape, rows.dtype)
    count = writer.read('global', lo, hi, *out, layers=layers)
    assert out.swapaxes(0, 1).tobytes() == rows.tobytes() and count > 0

  def check_all(writer):
    for layers in (slice(None), slice(0, 1), slice(1, None), slice(-1, None)):
      for lo, hi in ((37, 96), (37, 38), (60, 70), (64, 96), (70, 90)):
        check(writer, lo, hi, layers)
    out = np.zeros((2, 2, 40, 2, 16), np.uint16)
    for verify in (True, False):
      with pytest.raises(errors.UsageError, match='block 3 is not written'):
        writer.read('global', 70, 110, *out, verify=verify)
    with pytest.raises(errors.UsageError, match='are not stored'):
      writer.read('global', 20, 60, *out)
    with pytest.raises(errors.UsageError, match='no .ring. layers'):
      writer.read('ring', 40, 80, *out)

  with store.create(*args_of(case), journal=True) as writer:
    for index in (1, 2):
      write(writer, case, index, index + 1)
      check(writer, *case_range(case, index), slice(None))  # Maybe pending.
    check_all(writer)
    writer.checkpoint()
  with store.resume(*args_of(case)) as writer:
    check_all(writer)
    write(writer, case, 3, 4)
    check(writer, 37, 128, slice(None))


def test_reads_beside_writes(local):
  """Another thread reads what has been written so far."""
  what = store_helpers.case(end=3000)
  rows = what.rows('global')
  written, ended = [0], [False]

  def read_all() -> int:
    count = 0
    while not ended[0] or not count:
      stop = 32 * written[0]
      if stop:
        out = np.zeros((2, 2, stop, 2, 16), np.uint16)
        writer.read('global', 0, stop, *out)
        assert out.swapaxes(0, 1).tobytes() == rows[:, :, :stop].tobytes()
        count += 1
    return count

  with local.create(*args_of(what), journal=True) as writer:
    with futures.ThreadPoolExecutor(1) as pool:
      reader = pool.submit(read_all)
      for index in range(90):
        for kind in KINDS:
          writer.write_block(kind, index, what.blocks[kind, index])
        written[0] = index + 1
        if index % 7 == 0:
          writer.checkpoint()
      ended[0] = True
      assert reader.result() > 1


def case_range(what, index):
  return max(what.fields.start, index * 32), min(
      what.fields.end, index * 32 + 32)


def test_block_of_an_earlier_process_may_come_again(store, case):
  begin(store, case)
  with store.resume(*args_of(case)) as writer:
    writer.write_block('global', 2, case.blocks['global', 2])
    with pytest.raises(errors.UsageError, match='already written'):
      writer.write_block('global', 2, case.blocks['global', 2])
    other = case.blocks['global', 3].copy()
    other[1, 0, 5] ^= 1
    with pytest.raises(errors.ConflictError, match='layer 4 K block 3') as e:
      writer.write_block('global', 3, other)
    assert '\n' not in str(e.value)
  end(store, case, 4, b'behind 4')


def signed_changes(body: bytes, case):
  """Yields entries that are signed and do not fit."""
  value = json.loads(body)
  kind, number, digests = value['blocks'][0]
  for change in (
      {'key': 'f' * 64}, {'attempt': 'f' * 32}, {'number': 7}, {'format': 2},
      {'extra': 1}, {'state': 'x'}, {'done': {}}, {'done': [*KINDS]},
      {'done': {'global': 9, 'sliding': 4}}, {'blocks': None},
      {'blocks': [[kind, 0, digests]]}, {'blocks': [[kind, 7, digests]]},
      {'blocks': [[kind, '3', digests]]}, {'blocks': [['ring', 3, digests]]},
      {'blocks': [[[], 3, digests]]}, {'blocks': [[kind, number]]},
      {'blocks': [[kind, number, digests[1:]]]},
      {'blocks': [[kind, number, ['x', *digests[1:]]]]},
      {'blocks': [[kind, 1, digests]]}):
    yield artifact.sign(hashing.canonical_json({**value, **change}))
  yield artifact.sign(b'[]')


def test_unusable_entry_ends_the_journal(store, case, caplog):
  attempt = begin(store, case, stop=7)
  names = entries(store, case, attempt)
  assert len(names) == 3
  good = store._kv.load(names[1])
  bad = [good[:-1], good[:len(good) // 2], b'', good + b' ']
  for i in range(0, len(good), 97):
    bad.append(good[:i] + bytes([good[i] ^ 4]) + good[i + 1:])
  bad += signed_changes(good.split(b'\n', 1)[1], case)
  saved = [store._kv.load(n) for n in names]
  for data in bad:
    store._kv.put(names[1], data)
    caplog.clear()
    with store.resume(*args_of(case)) as writer:
      assert [writer.done(k) for k in KINDS] == [2, 2], data
    [record] = caplog.records
    assert record.levelname == 'WARNING' and names[1] in record.message
    assert '\n' not in record.message
    # What cannot be used was removed; for the next round it comes back.
    assert entries(store, case, attempt) == names[:1]
    for name, value in zip(names, saved):
      store._kv.put(name, value)
  store._kv.put(names[1], bad[0])
  with store.resume(*args_of(case)) as writer:
    # The state behind block 2 is gone: only the last two are kept.
    assert writer.state is None
    write(writer, case, 3, 5)
    writer.checkpoint(b'again')
  end(store, case, 4, b'again')


def test_damaged_last_entry_leaves_the_state_before_it(store, case):
  attempt = begin(store, case, stop=5)
  store._kv.put(entries(store, case, attempt)[-1], b'')
  end(store, case, 2, b'behind 2')


def test_lost_entry_ends_the_journal(store, case, caplog):
  attempt = begin(store, case, stop=7)
  store._kv.delete(entries(store, case, attempt)[1])
  end(store, case, 2, None)
  assert 'the entry before it is missing' in caplog.records[0].message


def test_journal_without_any_usable_entry(store, case):
  attempt = begin(store, case)
  store._kv.put(entries(store, case, attempt)[0], b'')
  end(store, case, 0, None)


@pytest.mark.parametrize('index', [1, 3, 6])
@pytest.mark.parametrize('keep', [None, 0, 100, -1, 'longer'])
def test_lost_or_cut_data_file(local, case, tmp_path, index, keep, caplog):
  attempt = begin(local, case, stop=7, step=1)
  path = data_path(tmp_path, case, attempt, 'global', index)
  data = path.read_bytes()
  path.unlink()
  if keep is not None:
    path.write_bytes(data + b'\0' if keep == 'longer' else data[:keep])
  done = index - 1
  end(local, case, done, b'behind 5' if done == 5 else None)
  assert str(path) in caplog.records[0].message


def test_flipped_byte_in_a_journaled_file(local, case, tmp_path):
  path = data_path(
      tmp_path, case, begin(local, case, stop=5), 'global', 3)
  data = bytearray(path.read_bytes())
  data[100] ^= 1
  path.unlink()
  path.write_bytes(bytes(data))
  out = np.zeros((2, 2, 64, 2, 16), np.uint16)
  with local.resume(*args_of(case)) as writer:
    assert writer.done('global') == 4
    writer.read('global', 37, 96, *out[:, :, :59])
    with pytest.raises(errors.DamageError, match='layer 2 K block 3') as e:
      writer.read('global', 64, 128, *out)
    assert str(path) in str(e.value)
    # Computed again it is written again.
    writer.write_block('global', 3, case.blocks['global', 3])
    writer.read('global', 64, 128, *out)
  end(local, case, 4, b'behind 4')


def test_file_lost_during_the_deposit(local, case, tmp_path):
  with local.create(*args_of(case), journal=True) as writer:
    write(writer, case, 1, 7)
    writer.checkpoint(b'all')
    path = data_path(tmp_path, case, writer.attempt, 'sliding', 1)
    path.unlink()
    out = np.zeros((2, 3, 10, 2, 16), np.uint16)
    with pytest.raises(errors.DamageError, match='sliding layer 0-3 K block 1'):
      writer.read('sliding', 40, 50, *out)
    with pytest.raises(errors.DamageError, match='deposit again') as caught:
      writer.commit(last_logits_sha256=store_helpers.LOGITS, outer={})
    assert str(path) in str(caught.value)
  assert local.list() == []
  end(local, case, 0, None)


def test_other_writer_was_first(store, case):
  begin(store, case)
  with store.resume(*args_of(case)) as writer:
    made = store_helpers.deposit(store, case)
    write(writer, case, 5, 7)
    assert writer.commit(
        last_logits_sha256=store_helpers.LOGITS, outer={}) == made
  assert not any(writer.attempt in n for n in store._kv.list('a/'))


def test_two_writers_of_one_attempt_that_disagree(store, case):
  begin(store, case)
  with store.resume(*args_of(case)) as one, store.resume(
      *args_of(case)) as two:
    write(one, case, 5, 7)
    write(two, case, 5, 7)
    made = one.commit(last_logits_sha256=store_helpers.LOGITS, outer={})
    with pytest.raises(errors.ConflictError, match='the last logits'):
      two.commit(last_logits_sha256='0' * 64, outer={})
  assert store.list() == [made]
  store_helpers.check(store, made, case)


def test_what_another_writes_meanwhile_is_not_taken_for_damage(
    local, case, monkeypatch):
  attempt = begin(local, case, stop=3)
  other = local.resume(*args_of(case))
  list_files = writer_lib._data_files

  def slowly(*args):
    found = list_files(*args)
    write(other, case, 3, 5)  # Behind this list.
    other.checkpoint(b'behind 4')
    return found

  before = entries(local, case, attempt)
  with other:
    with monkeypatch.context() as patch:
      patch.setattr(writer_lib, '_data_files', slowly)
      with local.resume(*args_of(case)) as writer:
        assert [writer.done(k) for k in KINDS] == [2, 2]
    assert set(entries(local, case, attempt)) > set(before)
  end(local, case, 4, b'behind 4')


def test_two_processes_go_on_with_one_attempt(tmp_path):
  what = store_helpers.case(end=2000)
  root = str(tmp_path / 'store')
  store = store_lib.Store(root)
  with store.create(*args_of(what), journal=True) as writer:
    for index in range(3):
      for kind in KINDS:
        writer.write_block(kind, index, what.blocks[kind, index])
    writer.checkpoint(b'behind 2')
  outcomes = store_helpers.child('resume_twice', root, 2000)
  assert outcomes == [{'value': expected_id(what)}] * 2
  [made] = store.list()
  assert made.attempt == writer.attempt
  store_helpers.check(store, made, what)


def test_killed_again_and_again(tmp_path):
  what = store_helpers.case(end=3000)
  root = tmp_path / 'store'
  *done, made_id = store_helpers.child('kill_journaled', str(root), 6)
  assert made_id == expected_id(what)
  assert done[0] == 0 and len(done) == 7
  assert all(b > a for a, b in itertools.pairwise(done))
  store = store_lib.Store(str(root))
  [made] = store.list()
  assert made.id == made_id and store.list_damaged() == []
  store_helpers.check(store, made, what)
  assert store.attempts(what.fields.key) == []
  # Every process went on with the first one's attempt.
  assert {p.name for p in (root / 'a' / what.fields.key).iterdir()} == {
      made.attempt, 'manifest.json'}


def test_full_disk_in_the_middle(tmp_path):
  mounted = subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', str(tmp_path)],
      capture_output=True, check=False)
  if mounted.returncode:
    pytest.skip('mounting a tmpfs is not permitted; see the file size limit')
  try:
    what = store_helpers.case(end=2000)
    store = store_lib.Store(str(tmp_path))
    for _ in range(2):
      with pytest.raises(errors.StorageError, match='free space'):
        store_helpers.journaled(str(tmp_path), what)
      [attempt] = store.attempts(what.fields.key)
      assert store.list() == []
    subprocess.run(['mount', '-o', 'remount,size=8m', str(tmp_path)],
                   check=True)
    with store.resume(*args_of(what)) as writer:
      assert writer.done('global') > 0 and writer.attempt == attempt
      assert writer.state is not None
    made = store_helpers.journaled(str(tmp_path), what)
    assert made.id == expected_id(what)
    store_helpers.check(store, made, what)
  finally:
    subprocess.run(['umount', '-l', str(tmp_path)], check=True)


def test_failed_block_may_be_written_again(tmp_path):
  """A file that may not grow ends the process's deposit, not the attempt."""
  what = store_helpers.case(end=300)
  store = store_lib.Store(str(tmp_path))
  with store.create(*args_of(what), journal=True) as writer:
    for kind in KINDS:
      writer.write_block(kind, 0, what.blocks[kind, 0])
    writer.checkpoint(b'behind 0')
  [result] = store_helpers.child('small_journaled', str(tmp_path), 5000)
  assert result['error'] == 'StorageError' and 'free space' in result['text']
  with store.resume(*args_of(what)) as again:
    assert again.attempt == writer.attempt and again.done('sliding') == 1
  made = store_helpers.journaled(str(tmp_path), what)
  assert made.id == expected_id(what)
  store_helpers.check(store, made, what)


def test_block_that_could_not_be_written_is_not_done(local, case, tmp_path):
  with local.create(*args_of(case), journal=True) as writer:
    write(writer, case, 1, 2)
    writer.checkpoint(b'behind 1')
    # A directory of its name stops the rename.
    blocked = data_path(tmp_path, case, writer.attempt, 'global', 2)
    (blocked / 'x').mkdir(parents=True)
    writer.write_block('sliding', 2, case.blocks['sliding', 2])
    with pytest.raises(errors.StorageError, match=str(blocked)):
      writer.write_block('global', 2, case.blocks['global', 2])
      writer.checkpoint(b'behind 2')
    assert writer.done('global') == 1
    (blocked / 'x').rmdir()
    blocked.rmdir()
    writer.write_block('global', 2, case.blocks['global', 2])
    writer.checkpoint(b'behind 2')
  end(local, case, 2, b'behind 2')


def test_two_slashes_in_front_of_a_path_are_one(tmp_path, case):
  """To TensorStore they would begin the name of a host."""
  double = store_lib.Store('/' + str(tmp_path / 'store'))
  made = store_helpers.deposit(double, case)
  assert store_lib.Store(str(tmp_path / 'store')).get(made.key) == made
