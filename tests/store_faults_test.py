import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import numpy as np
import pytest

from kvgraft_jax import artifact
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import store as store_lib
import store_helpers


class Scene:
  """A store with a good artifact and one that tests damage."""

  def __init__(self, root: pathlib.Path):
    self.root = root
    self.store = store_lib.Store(str(root))
    self.good_case = store_helpers.case(5, 90, seed=1)
    self.good = store_helpers.deposit(self.store, self.good_case)
    self.case = store_helpers.case(37, 100)
    self.made = store_helpers.deposit(self.store, self.case)
    self.store.set_name('victim', self.made)
    self.files = store_helpers.files(root, self.made)
    self.manifest = root / 'a' / self.made.key / 'manifest.json'

  def outcome(self) -> str:
    """Reads all of the victim: 'exact' or the text of the DamageError."""
    try:
      store_helpers.check(self.store, self.store.find('victim'), self.case)
    except errors.DamageError as e:
      text = str(e)
      assert '\n' not in text and 'source locations' not in text
      assert len(text) < 700
      return text
    return 'exact'

  def check_good(self) -> None:
    """Reads all of the other artifact."""
    store_helpers.check(
        self.store, self.store.get(self.good.key), self.good_case)


@pytest.fixture
def scene(tmp_path):
  return Scene(tmp_path / 'store')


@contextlib.contextmanager
def changed(path: pathlib.Path, data: bytes | None):
  """Gives a file other bytes for a while, or removes it."""
  before = path.read_bytes()
  path.unlink()
  if data is not None:
    path.write_bytes(data)
  try:
    yield
  finally:
    path.write_bytes(before)


def flips(data: bytes, count: int):
  """Yields copies of `data` with one bit flipped, spread over all of it."""
  rng = np.random.default_rng(0)
  for i in range(count):
    low, high = i * len(data) // count, (i + 1) * len(data) // count
    where = int(rng.integers(low, max(high, low + 1)))
    copy = bytearray(data)
    copy[where] ^= 1 << int(rng.integers(8))
    yield where, bytes(copy)


def test_flipped_bit_in_any_data_file(scene):
  # First and last block are padded to whole inner chunks: a flip there changes
  # nothing that was deposited.
  harmless = 0
  for name, path in scene.files.items():
    for where, data in flips(path.read_bytes(), 16):
      with changed(path, data):
        text = scene.outcome()
      if text == 'exact':
        harmless += 1
        assert name.split('.')[3] in '02', (name, where)
      elif name == 'tokens':
        assert 'tokens' in text
      else:
        kind, block = name[:name.index('/')], int(name.split('.')[3]) + 1
        assert re.search(
            rf'artifact {scene.made.id[:12]} {kind} layer [-\d]+ [KV] block'
            rf' {block} \(', text), text
  assert harmless < 64
  assert scene.outcome() == 'exact'
  scene.check_good()


def test_unverified_read_is_what_verification_adds(scene):
  path = scene.files['global/c.0.0.1.0.0']
  data = bytearray(path.read_bytes())
  data[100] ^= 1
  with changed(path, bytes(data)):
    found = store_helpers.read(scene.store, scene.made, 'global', verify=False)
    assert (found != scene.case.rows('global')).sum() == 1
    with pytest.raises(errors.DamageError, match='global layer 2 K block 2'):
      store_helpers.read(scene.store, scene.made, 'global', 70, 71)
    # Other blocks of the artifact are still good.
    assert store_helpers.read(
        scene.store, scene.made, 'global', 37, 64).tobytes() == (
            scene.case.rows('global')[:, :, :27].tobytes())


@pytest.mark.parametrize('keep', [0, None, 'flip'])
def test_damage_among_blocks_that_are_read_at_once(scene, keep):
  """The block and layer are named, and reads that avoid it are good."""
  path = scene.files['sliding/c.0.0.1.0.0']
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1  # In the middle one of three layers.
  with changed(path, {0: b'', None: None, 'flip': bytes(data)}[keep]):
    out = np.zeros((2, 3, 59, 2, 16), np.uint16)
    with pytest.raises(errors.DamageError, match=r'block 2 \(') as caught:
      scene.store.read(scene.made, 'sliding', 37, 96, *out)
    assert str(path) in str(caught.value)
    for layer in range(3):
      if keep != 'flip' or layer == 1:
        with pytest.raises(errors.DamageError, match=f'layer {(0, 1, 3)[layer]}'
                           r' [KV] block 2 \('):
          scene.store.read(scene.made, 'sliding', 37, 96, *out[:, :1],
                           layers=slice(layer, layer + 1))
      else:
        scene.store.read(scene.made, 'sliding', 37, 96, *out[:, :1],
                         layers=slice(layer, layer + 1))
        assert out[:, 0].tobytes() == scene.case.rows('sliding')[
            layer, :, :59].tobytes()
  assert scene.outcome() == 'exact'


@pytest.mark.parametrize('keep', [0, 1, 0.5, -1, None, 'longer'])
def test_truncated_lost_or_grown_file(scene, keep):
  for name, path in scene.files.items():
    data = path.read_bytes()
    if keep == 'longer':
      data += b'\0'
    elif keep is None:
      data = None
    else:
      data = data[:keep if isinstance(keep, int) else int(len(data) * keep)]
    with changed(path, data):
      text = scene.outcome()
      assert text != 'exact', name
      assert ('tokens' if name == 'tokens' else 'block') in text
    assert scene.outcome() == 'exact'
    scene.check_good()


def test_swapped_files(scene):
  data = {n: p.read_bytes() for n, p in scene.files.items() if n != 'tokens'}
  swaps = 0
  for one in data:
    for two in data:
      if one < two and len(data[one]) == len(data[two]):
        with changed(scene.files[one], data[two]):
          with changed(scene.files[two], data[one]):
            assert 'digest is' in scene.outcome()
        swaps += 1
  assert swaps >= 2
  assert scene.outcome() == 'exact'


def test_files_of_another_artifact(scene):
  case = store_helpers.case(37, 100, seed=2)
  other = store_helpers.files(
      scene.root, store_helpers.deposit(scene.store, case))
  for name, path in scene.files.items():
    with changed(path, other[name].read_bytes()):
      assert ('tokens' if name == 'tokens' else 'digest is') in scene.outcome()
  assert scene.outcome() == 'exact'


def test_manifest_of_another_artifact(scene):
  with changed(scene.manifest, scene.good.to_bytes()):
    assert 'it is the manifest of key' in scene.outcome()
  scene.check_good()


@pytest.mark.parametrize('name', ['manifest', 'name'])
def test_damaged_manifest_or_name(scene, name):
  path = scene.manifest if name == 'manifest' else (
      scene.root / 'names' / 'victim')
  data = path.read_bytes()
  copies = [d for _, d in flips(data, 60)]
  copies += [data[:n] for n in (0, 1, len(data) // 2, len(data) - 1)]
  for copy in copies:
    with changed(path, copy):
      assert 'line 1' in scene.outcome()
      damaged = scene.store.list_damaged()
      assert len(damaged) == 1 and str(path) in damaged[0]
      if name == 'manifest':
        assert scene.store.list() == [scene.good]
        with pytest.raises(errors.DamageError, match='line 1'):
          scene.store.get(scene.made.key)
        with pytest.raises(errors.DamageError, match='line 1'):
          store_helpers.deposit(scene.store, scene.case)
      else:
        assert scene.store.names() == {}
        with pytest.raises(errors.DamageError, match='line 1'):
          scene.store.set_name('victim', scene.made)
  scene.check_good()
  assert scene.outcome() == 'exact'
  # No refused deposit left anything.
  assert len(list(scene.manifest.parent.iterdir())) == 2


def test_damaged_artifact_is_counted_when_nothing_is_found(scene):
  data = scene.manifest.read_bytes().replace(
      scene.made.id.encode(), b'f' * 64)
  with changed(scene.manifest, data):
    with pytest.raises(errors.NotFoundError, match='1 manifests are damaged'):
      scene.store.find(scene.made.id)


def test_name_of_a_lost_or_replaced_artifact(scene):
  with changed(scene.manifest, None):
    with pytest.raises(errors.NotFoundError, match='no longer in'):
      scene.store.find('victim')
  (scene.root / 'names' / 'other').write_bytes(
      (scene.root / 'names' / 'victim').read_bytes())
  with pytest.raises(errors.DamageError, match='not a name as it was set'):
    scene.store.find('other')
  (scene.root / 'names' / 'victim').write_bytes(artifact.sign(
      hashing.canonical_json({
          'format': 1, 'id': scene.good.id, 'key': scene.made.key,
          'name': 'victim'})))
  assert 'but its key holds' in scene.outcome()


def test_hand_edited_manifest(scene):
  body = scene.manifest.read_bytes().split(b'\n', 1)[1]
  edited = body.replace(b'"end":100', b'"end":101')
  assert edited != body
  with changed(scene.manifest, artifact.sign(edited)):
    assert 'not as a deposit wrote it' in scene.outcome()
    assert scene.store.list() == [scene.good]


def test_manifest_of_a_future_version(scene):
  body = scene.manifest.read_bytes().split(b'\n', 1)[1]
  edited = body.replace(b'"format":1,"id"', b'"format":2,"id"')
  with changed(scene.manifest, artifact.sign(edited)):
    with pytest.raises(errors.IncompatibleError, match='format is 2'):
      scene.store.get(scene.made.key)
    assert scene.store.list() == [scene.good]
    assert 'upgrade' in scene.store.list_damaged()[0]


def test_zarr_json_is_never_trusted(scene):
  for kind in scene.case.layouts:
    path = scene.files['tokens'].parent / kind / 'zarr.json'
    for _, data in flips(path.read_bytes(), 40):
      with changed(path, data):
        assert scene.outcome() == 'exact'
    with changed(path, None):
      assert scene.outcome() == 'exact'


def test_directory_in_place_of_a_file(scene):
  path = scene.files['sliding/c.0.0.1.0.0']
  path.unlink()
  path.mkdir()
  assert 'sliding' in scene.outcome()
  scene.check_good()


def test_foreign_files_are_ignored(scene):
  for name in ('a/x', 'a/manifest.json', f'a/{"0" * 64}/manifest.json.__lock',
               f'a/{"0" * 64}/{"1" * 32}/tokens', 'names/a/b', 'names/.x',
               'names/y.__lock', 'README'):
    path = scene.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('junk')
  assert len(scene.store.list()) == 2 and scene.store.list_damaged() == []
  assert list(scene.store.names()) == ['victim']


@pytest.fixture
def public_root():
  """A directory that other users can reach, unlike tmp_path."""
  root = pathlib.Path(tempfile.mkdtemp(prefix='kvgraft_test_'))
  root.chmod(0o755)
  yield root
  for path in root.rglob('*'):
    if path.is_dir():
      path.chmod(0o755)
  shutil.rmtree(root)


def test_read_only_store_as_an_unprivileged_user(public_root):
  store = store_lib.Store(str(public_root))
  made = [store_helpers.deposit(store, store_helpers.case(seed=i))
          for i in range(3)]
  store_helpers.files(public_root, made[1])['global/c.0.0.2.0.0'].chmod(0)
  (public_root / 'a' / made[2].key / 'manifest.json').chmod(0)
  for path in (public_root, *public_root.rglob('*')):
    if path.is_dir():
      path.chmod(0o555)
  good, unreadable, hidden, new, name, listed = store_helpers.child(
      'unprivileged', str(public_root), [m.key for m in made])
  assert good == {'value': None}
  for failed, path in ((unreadable, 'c.0.0.2'), (hidden, 'manifest.json'),
                       (new, str(public_root)), (name, 'names/x')):
    assert failed['error'] == 'StorageError'
    assert path in failed['text'] and '\n' not in failed['text']
    assert 'check the permissions' in failed['text']
  assert listed[0] == 2 and len(listed[1]) == 1
  assert 'check the permissions' in listed[1][0]
  assert len(store.list()) == 3
  assert {p.name for p in public_root.iterdir()} == {'a'}


@pytest.mark.parametrize('limit', [0, 100, 3000, 12000])
def test_no_space_by_file_size_limit(tmp_path, limit):
  store = store_lib.Store(str(tmp_path))
  first = store_helpers.case()
  made = store_helpers.deposit(store, first)
  [result] = store_helpers.child('small_files', str(tmp_path), limit)
  assert result['error'] == 'StorageError', result
  assert 'free space' in result['text'] and '\n' not in result['text']
  assert store.list() == [made] and store.list_damaged() == []
  store_helpers.check(store, made, first)
  # The failed attempt gave its space back.
  assert [n for n in store._kv.list('a/') if made.key not in n] == []
  second = store_helpers.case(seed=1)
  store_helpers.check(store, store_helpers.deposit(store, second), second)


def test_full_disk(tmp_path):
  mounted = subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', str(tmp_path)],
      capture_output=True, check=False)
  if mounted.returncode:
    pytest.skip('mounting a tmpfs is not permitted; see the file size limit')
  try:
    store = store_lib.Store(str(tmp_path))
    first = store_helpers.case(end=64)
    made = store_helpers.deposit(store, first)
    large = store_helpers.case(end=2000, seed=1)
    for _ in range(2):
      with pytest.raises(errors.StorageError, match='free space') as caught:
        store_helpers.deposit(store, large)
      assert str(tmp_path) in str(caught.value)
      assert store.list() == [made] and store.list_damaged() == []
      store_helpers.check(store, made, first)
    second = store_helpers.case(end=64, seed=2)
    store_helpers.check(store, store_helpers.deposit(store, second), second)
  finally:
    subprocess.run(['umount', '-l', str(tmp_path)], check=True)


def test_full_disk_at_the_manifest(tmp_path, monkeypatch):
  """The data fits and the manifest does not: nothing remains."""
  what = store_helpers.case()
  store = store_lib.Store(str(tmp_path))
  with pytest.raises(errors.StorageError, match='manifest'):
    with store.create(what.fields, what.layouts, what.tokens) as writer:
      for (kind, index), array in what.blocks.items():
        writer.write_block(kind, index, array)
      # A directory of that name stops the rename.
      base = tmp_path / 'a' / what.fields.key / 'manifest.json'
      (base / 'x').mkdir(parents=True)
      writer.commit(last_logits_sha256='0' * 64, outer={})
  assert [p.name for p in base.parent.iterdir()
          if not p.name.startswith('manifest.json')] == []
  shutil.rmtree(base)
  store_helpers.check(store, store_helpers.deposit(store, what), what)


def test_killed_deposits_leave_only_complete_artifacts(tmp_path):
  rounds = 40
  ended = store_helpers.child('kill_rounds', str(tmp_path), rounds)
  store = store_lib.Store(str(tmp_path))
  assert store.list_damaged() == []
  listed = {m.id: m for m in store.list()}
  assert set(ended) <= set(listed)
  assert 2 <= len(ended) < rounds
  for i in range(rounds):
    what = store_helpers.case(seed=i, end=60 + i)
    found = store.get(what.fields.key)
    assert (found is None) or found == listed[found.id]
    made = store_helpers.deposit(store, what)
    assert found is None or made == found
    store_helpers.check(store, made, what)
  assert len(store.list()) == rounds


def test_race_of_four_processes_has_one_winner(tmp_path):
  rounds, writers = 8, 4
  results = store_helpers.child('race', str(tmp_path), rounds, writers)
  store = store_lib.Store(str(tmp_path))
  assert len(results) == rounds * writers
  for i in range(rounds):
    what = store_helpers.case(seed=i)
    made = store.get(what.fields.key)
    assert [r for n, r in results if n == i] == [{'value': made.id}] * writers
    left = {p.name for p in (tmp_path / 'a' / made.key).iterdir()}
    assert left == {made.attempt, 'manifest.json'}
    store_helpers.check(store, made, what)
  assert len(store.list()) == rounds


def test_reader_in_the_middle_of_a_deposit_sees_nothing(tmp_path):
  what = store_helpers.case()
  store = store_lib.Store(str(tmp_path))
  with store.create(what.fields, what.layouts, what.tokens) as writer:
    for (kind, index), array in what.blocks.items():
      assert store.get(what.fields.key) is None and store.list() == []
      writer.write_block(kind, index, array)
    writer.commit(last_logits_sha256='0' * 64, outer={})
  assert len(store.list()) == 1


def test_failed_read_leaves_the_same_process_exact(scene):
  """Damage in many places, one after another, beside reads of a good one."""
  paths = [scene.files[f'{kind}/c.0.0.1.0.0'] for kind in scene.case.layouts]
  for i in range(20):
    path = paths[i % 2]
    data = bytearray(path.read_bytes())
    data[-200 - 37 * i] ^= 0x10
    with changed(path, bytes(data)):
      assert scene.outcome() != 'exact'
      scene.check_good()
  assert scene.outcome() == 'exact'
  assert os.listdir(scene.root) and scene.store.list_damaged() == []
