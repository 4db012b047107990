"""Every bad input: one line, the right exit code, nothing changed.

After each refusal the same process, with the same loaded model, generates
exactly what it did before.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

import cli_helpers
import command_helpers
from command_helpers import call
from command_helpers import ok
from command_helpers import refusal
from command_helpers import snapshot
from command_helpers import TINY
from kvgraft_jax import artifact
from kvgraft_jax import hashing
from kvgraft_jax import store as store_lib
import store_helpers

# With bos 192 tokens: six whole blocks, so that no stored byte is padding.
TEXT = ('Spring tides come at new and full Moon. ' * 5)[:191]
OTHER = TEXT[::-1]


@dataclasses.dataclass
class Scene:
  """A store with `doc` and `other`, of equal size, and what doc answers."""

  root: pathlib.Path
  reference: dict

  @property
  def store(self) -> str:
    return f'--store={self.root}'


def answer(store: str, name: str = 'doc') -> dict:
  got = ok('graft', TINY, store, f'--artifact={name}', '--prompt= So',
           '--max_new_tokens=4')
  return {k: got[k] for k in (
      'logits_sha256', 'token_ids', 'tokens_restored', 'tokens_computed')}


@pytest.fixture(scope='module', autouse=True)
def models_fixture():
  with command_helpers.kept_models():
    yield


@pytest.fixture(scope='module', name='whole')
def whole_fixture(tmp_path_factory):
  root = tmp_path_factory.mktemp('bad') / 'store'
  for name, text in (('doc', TEXT), ('other', OTHER)):
    ok('deposit', TINY, f'--store={root}', f'--prompt={text}',
       f'--name={name}')
  return Scene(root, answer(f'--store={root}'))


@pytest.fixture(name='scene')
def scene_fixture(whole):
  """Checks afterwards that neither store nor process has changed."""
  before = snapshot(whole.root)
  yield whole
  assert snapshot(whole.root) == before
  assert answer(whole.store) == whole.reference


@pytest.fixture(name='copy')
def copy_fixture(whole, tmp_path):
  """A store to damage; the process must stay exact on the whole one."""
  shutil.copytree(whole.root, tmp_path / 'store')
  yield Scene(tmp_path / 'store', whole.reference)
  assert answer(whole.store) == whole.reference


# Requests.


def request(command: str, scene: Scene) -> tuple[str, ...]:
  """Returns a command that is complete but for the text."""
  return {
      'generate': ('generate', TINY),
      'deposit': ('deposit', TINY, scene.store),
      'graft': ('graft', TINY, scene.store, '--artifact=doc'),
      'score': ('score', TINY, scene.store, '--artifact=doc'),
  }[command]


@pytest.mark.parametrize('command', ['generate', 'deposit', 'graft', 'score'])
def test_texts_that_cannot_be_used(scene, tmp_path, command):
  args = request(command, scene)
  file_flag = '--text_file=' if command == 'deposit' else '--prompt_file='
  path = tmp_path / 'text'

  def file(data: bytes) -> str:
    path.write_bytes(data)
    return f'{file_flag}{path}'

  assert 'empty' in refusal(2, *args, '--prompt=')
  assert 'empty' in refusal(2, *args, file(b''))
  assert 'not valid UTF-8 at byte 1' in refusal(2, *args, file(b'a\xff'))
  assert 'No such file' in refusal(2, *args, f'{file_flag}{tmp_path}/no')
  assert 'directory' in refusal(2, *args, f'{file_flag}{tmp_path}')
  # A text of 5,000 tokens is beyond the model's context of 4,096.
  line = refusal(2, *args, file(b'x' * 5000))
  assert 'capacity of 4096' in line
  assert 'capacity of 4096' in refusal(2, *args, file(b'x' * (2 << 20)))
  line = refusal(2, *args, '--capacity=256', f'--prompt={TEXT}{TEXT}')
  assert 'capacity of 256' in line
  with open(path, 'wb') as f:
    f.truncate(300 << 20)
  assert '256 MiB' in refusal(2, *args, f'{file_flag}{path}')


@pytest.mark.parametrize('ids, message', [
    ('[]', 'empty list'), ('{}', 'found dict'), ('', 'no JSON'),
    ('[1', 'no JSON'), ('[' * 100000, 'no JSON'), ('[5, 320]', 'found 320'),
    ('[5, -1]', 'found -1'), ('[5, 1.5]', 'found 1.5'),
    ('[5, true]', 'found True'), ('[5, "6"]', "found '6'"),
    ('[5, null]', 'found None'), ('[1e99]', 'found 1e+99'),
    (f'[{2**70}]', str(2**70)), ('[5, [6]]', 'found [6]'),
])
def test_token_ids_that_cannot_be_used(scene, tmp_path, ids, message):
  path = tmp_path / 'ids.json'
  path.write_text(ids)
  for command in ('generate', 'deposit', 'graft'):
    line = refusal(
        2, *request(command, scene), f'--tokens_file={path}')
    assert message in line
  out = tmp_path / 'x.npz'
  assert message in refusal(
      2, 'logits', TINY, f'--tokens_file={path}', f'--out={out}')
  assert not out.exists()


def test_a_doubled_bos(scene, tmp_path):
  path = tmp_path / 'ids.json'
  path.write_text('[2, 2, 50]')
  for args in (request('generate', scene), request('deposit', scene),
               ('logits', TINY, f'--out={tmp_path / "x.npz"}')):
    line = refusal(2, *args, f'--tokens_file={path}')
    assert 'second bos (id 2) at position 1' in line
  path.write_text('[2, 50]')
  for args in (request('graft', scene), request('score', scene),
               (*request('deposit', scene), '--parent=doc')):
    line = refusal(2, *args, f'--tokens_file={path}')
    assert 'second bos (id 2) at position 192' in line
    assert '--allow_double_bos' in line
  got = ok(*request('graft', scene), f'--tokens_file={path}',
           '--allow_double_bos', '--max_new_tokens=1')
  assert got['tokens_computed'] == 2


def test_references_and_names(scene):
  for ref, rc, message in (
      ('nothing', 2, "no artifact 'nothing'"), ('doch', 2, 'did you mean doc'),
      ('../doc', 2, 'is no reference'), ('a/b', 2, 'is no reference'),
      ('..', 2, 'is no reference'), ('abc', 2, "no artifact 'abc'"),
      ('0' * 64, 2, 'no artifact'), ('x' * 200, 2, 'is no reference'),
      ('d\u00f6c', 2, 'is no reference')):
    for args in (('graft', TINY), ('verify', TINY), ('audit', TINY),
                 ('show',)):
      assert message in refusal(
          rc, *args, scene.store, f'--artifact={ref}'), ref
    assert message in refusal(
        2, *request('deposit', scene), '--prompt=x', f'--parent={ref}')
  for name, message in (
      ('../x', 'is no reference'), ('a/b', 'is no reference'),
      ('..', 'is no reference'), ('/x', 'is no reference'), ('', 'reference'),
      ('beef', 'mistaken for an id'), ('other', 'taken')):
    assert message in refusal(
        2, *request('deposit', scene), '--prompt=new text', f'--name={name}')
    if name:
      assert message in refusal(
          2, *request('graft', scene), f'--deposit_as={name}')


def test_an_ambiguous_prefix(scene, tmp_path):
  cases = [store_helpers.case(end=4, seed=i) for i in range(2)]
  store = store_lib.Store(str(tmp_path / 'draft'))
  made = [store_helpers.deposit(store, what) for what in cases]
  ids: list[dict[str, str]] = [{}, {}]
  for one, known in zip(made, ids):
    for i in range(1000):
      logits = hashing.sha256('test', str(i).encode())
      changed = dataclasses.replace(one, last_logits_sha256=logits)
      known[changed.id[:4]] = logits
  prefix = min(set(ids[0]) & set(ids[1]))
  store = store_lib.Store(str(tmp_path / 'store'))
  for what, known in zip(cases, ids):
    store_helpers.deposit(store, what, known[prefix])
  for args in (('graft', TINY), ('show',)):
    line = refusal(2, *args, f'--store={tmp_path / "store"}',
                   f'--artifact={prefix}')
    assert '2 artifacts begin with' in line and 'give more digits' in line


def test_other_weights_under_the_same_name(scene, tmp_path):
  there = f'--store={tmp_path / "store"}'
  made = ok('deposit', '--model=tiny:1', there, f'--prompt={TEXT}',
            '--name=doc')
  before = snapshot(tmp_path)
  for command in ('graft', 'verify', 'audit'):
    line = refusal(2, command, TINY, there, '--artifact=doc')
    assert 'model differs' in line and made['artifact'][:12] in line
  line = refusal(2, 'graft', TINY, there, '--artifact=doc', '--recompute')
  assert 'model differs' in line
  line = refusal(2, 'deposit', TINY, there, '--prompt=x', '--parent=doc')
  assert 'model differs' in line
  line = refusal(2, 'deposit', TINY, there, f'--prompt={TEXT}', '--name=doc')
  assert 'taken' in line
  assert snapshot(tmp_path) == before


def test_other_dtype(scene):
  for command in ('graft', 'verify', 'audit'):
    line = refusal(
        2, command, TINY, scene.store, '--artifact=doc', '--dtype=float32',
        '--tile=32')
    assert 'differ in dtype, expected bfloat16, found float32' in line


# Damage.


def paths_of(scene: Scene, name: str = 'doc') -> dict[str, pathlib.Path]:
  """Returns kind of file -> one file of that kind that a graft reads."""
  manifest = store_lib.Store(str(scene.root)).find(name)
  files = store_helpers.files(scene.root, manifest)
  base = scene.root / 'a' / manifest.key
  return {
      'manifest': base / 'manifest.json',
      'name': scene.root / 'names' / name,
      'tokens': files['tokens'],
      'sliding': files['sliding/c.0.0.5.0.0'],
      'global': files['global/c.0.0.2.0.0'],
      'global 3': files['global/c.0.0.3.0.0'],
      'zarr': base / manifest.attempt / 'global' / 'zarr.json',
  }


def check_damage(scene: Scene, rc: int, message: str) -> None:
  """Checks that doc is refused, other is served, and nothing is written."""
  before = snapshot(scene.root)
  for command in ('graft', 'verify', 'audit'):
    line = refusal(rc, command, TINY, scene.store, '--artifact=doc')
    assert message in line, line
  assert snapshot(scene.root) == before
  assert answer(scene.store, 'other')['tokens_restored'] == 192
  listed = call('ls', scene.store)
  assert listed.rc == 0 and listed.json['artifacts']


KINDS = {'manifest': 'line 1', 'name': 'line 1', 'tokens': 'tokens',
         'sliding': 'sliding layer', 'global': 'global layer'}


@pytest.mark.parametrize('kind', KINDS)
def test_a_flipped_byte(copy, kind):
  path = paths_of(copy)[kind]
  data = bytearray(path.read_bytes())
  data[len(data) // 3] ^= 0x20
  path.write_bytes(bytes(data))
  check_damage(copy, 1, KINDS[kind])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('keep', [0, 0.5])
def test_a_truncated_file(copy, kind, keep):
  path = paths_of(copy)[kind]
  path.write_bytes(path.read_bytes()[:int(keep * path.stat().st_size)])
  check_damage(copy, 1, KINDS[kind])


@pytest.mark.parametrize('kind, rc, message', [
    ('manifest', 2, 'no longer in'), ('name', 2, "no artifact 'doc'"),
    ('tokens', 1, 'tokens are lost'), ('sliding', 1, 'sliding layer'),
    ('global', 1, 'global layer')])
def test_a_lost_file(copy, kind, rc, message):
  paths_of(copy)[kind].unlink()
  check_damage(copy, rc, message)


def test_two_files_swapped(copy):
  paths = paths_of(copy)
  one, two = paths['global'], paths['global 3']
  a, b = one.read_bytes(), two.read_bytes()
  assert len(a) == len(b) and a != b
  one.write_bytes(b)
  two.write_bytes(a)
  check_damage(copy, 1, 'global layer')


@pytest.mark.parametrize('kind, message', [
    ('manifest', 'it is the manifest of key'), ('tokens', 'tokens are lost'),
    ('sliding', 'sliding layer'), ('global', 'global layer'),
    ('name', 'not a name as it was set')])
def test_the_file_of_another_artifact(copy, kind, message):
  ours, theirs = paths_of(copy)[kind], paths_of(copy, 'other')[kind]
  if kind in ('tokens', 'sliding', 'global'):
    assert ours.stat().st_size == theirs.stat().st_size
  ours.write_bytes(theirs.read_bytes())
  check_damage(copy, 1, message)


@pytest.mark.parametrize('old, new, sign, rc, message', [
    (b'"end":192', b'"end":191', False, 1, 'line 1'),
    (b'"end":192', b'"end":191', True, 1, 'not as a deposit wrote it'),
    (b'"sliding":"full"', b'"sliding":"window"', True, 1, 'not as a deposit'),
    (b'"format":1,"id"', b'"format":2,"id"', True, 2, 'format is 2'),
])
def test_an_edited_manifest(copy, old, new, sign, rc, message):
  path = paths_of(copy)['manifest']
  head, _, body = path.read_bytes().partition(b'\n')
  edited = body.replace(old, new)
  assert edited != body
  path.write_bytes(artifact.sign(edited) if sign else head + b'\n' + edited)
  check_damage(copy, rc, message)
  assert ok('ls', copy.store)['damaged']


def test_what_is_never_read_changes_nothing(copy):
  path = paths_of(copy)['zarr']
  path.write_bytes(b'{}')
  assert answer(copy.store) == copy.reference


def test_a_lost_parent(copy):
  ok('deposit', TINY, copy.store, '--prompt= more', '--parent=doc',
     '--name=child')
  shutil.rmtree(paths_of(copy)['manifest'].parent)
  before = snapshot(copy.root)
  for command in ('graft', 'verify', 'audit'):
    assert 'its parent' in refusal(
        1, command, TINY, copy.store, '--artifact=child')
  assert snapshot(copy.root) == before
  shown = call('show', copy.store, '--artifact=child')
  assert shown.rc == 0 and shown.json['lengths'] == []


# The world.


def child(body: str, *args: object) -> list:
  """Runs Python in a process of its own; returns the JSON lines it printed.

  What it needs is imported, loaded and compiled before `body` takes rights
  away: an unprivileged user may not be able to read this interpreter's files.
  """
  code = f'''
import json, os, resource, sys
import command_helpers
from command_helpers import TINY, call, ok
with command_helpers.kept_models():
  root, warm, text = sys.argv[1:]
  ok('deposit', TINY, '--store=' + warm, '--prompt=' + text)
  graft = ('graft', TINY, '--store=' + root, '--artifact=doc',
           '--prompt= So', '--max_new_tokens=4')
  ok(*graft)
  def tell(*args):
    result = call(*args)
    print(json.dumps([result.rc, result.stdout, result.stderr, result.json]))
{body}
'''
  path = [str(pathlib.Path(__file__).parent), *sys.path]
  done = subprocess.run(
      [sys.executable, '-c', code, *map(str, args)], capture_output=True,
      text=True, timeout=300, check=False,
      env=cli_helpers.environment(PYTHONPATH=os.pathsep.join(path)))
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


def check_refused_by_the_world(results: list, reference: dict, message: str):
  """Checks a refused deposit, and that the process then still is exact."""
  (rc, out, err, _), (graft_rc, _, graft_err, got) = results
  assert rc == 1 and out == '', (rc, err)
  assert err.startswith('kvgraft deposit: ') and err.count('\n') == 1
  assert message in err
  assert graft_rc == 0, graft_err
  assert {k: got[k] for k in reference} == reference


def test_a_read_only_store(whole, tmp_path):
  # Where other users can reach it, unlike tmp_path.
  public = pathlib.Path(tempfile.mkdtemp(prefix='kvgraft_test_'))
  try:
    public.chmod(0o755)
    root = public / 'store'
    shutil.copytree(whole.root, root)
    folders = [p for p in (root, *root.rglob('*')) if p.is_dir()]
    for path in folders:
      path.chmod(0o555)
    before = snapshot(root)
    results = child('''
  if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
  tell('deposit', TINY, '--store=' + root, '--prompt=' + text, '--name=new')
  tell(*graft)
''', root, tmp_path / 'warm', TEXT[:100])
    check_refused_by_the_world(
        results, whole.reference, 'check the permissions')
    assert snapshot(root) == before
    for path in folders:
      path.chmod(0o755)
    ok('deposit', TINY, f'--store={root}', f'--prompt={TEXT[:100]}')
  finally:
    shutil.rmtree(public)


def test_a_full_disk_by_file_size_limit(copy, tmp_path):
  before = snapshot(copy.root)
  results = child('''
  hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
  resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
  tell('deposit', TINY, '--store=' + root, '--prompt=' + text, '--name=new')
  tell(*graft)
''', copy.root, tmp_path / 'warm', TEXT[:100])
  check_refused_by_the_world(results, copy.reference, 'free space')
  after = {k: v for k, v in snapshot(copy.root).items() if k in before}
  assert after == before
  listed = ok('ls', copy.store)
  assert len(listed['artifacts']) == 2 and listed['damaged'] == []
  ok('deposit', TINY, copy.store, f'--prompt={TEXT[:100]}', '--name=new')


def test_a_full_disk_on_a_small_tmpfs(whole, tmp_path):
  mounted = subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=1536k', 'tmpfs', str(tmp_path)],
      capture_output=True, check=False)
  if mounted.returncode:
    pytest.skip('mounting a tmpfs is not permitted; see the file size limit')
  try:
    store = f'--store={tmp_path / "store"}'
    ok('deposit', TINY, store, f'--prompt={TEXT}', '--name=doc')
    for _ in range(2):
      line = refusal(1, 'deposit', TINY, store, f'--prompt={"x" * 1500}',
                     '--name=large')
      assert 'free space' in line and str(tmp_path) in line
      listed = ok('ls', store)
      assert [a['names'] for a in listed['artifacts']] == [['doc']]
      assert listed['damaged'] == []
      assert answer(store) == whole.reference
    ok('deposit', TINY, store, f'--prompt={TEXT[:90]}', '--name=small')
  finally:
    subprocess.run(['umount', '-l', str(tmp_path)], check=True)


def test_kill_in_the_middle_of_a_deposit(copy):
  before = snapshot(copy.root)
  known = set(os.listdir(copy.root / 'a'))
  env = cli_helpers.environment(PYTHONPATH=os.pathsep.join(sys.path))
  for attempt in range(6):
    text = f'{attempt} {TEXT}' * 8
    process = subprocess.Popen(
        cli_helpers.command('deposit', TINY, copy.store, f'--prompt={text}',
                            '--name=new'),
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and (
        set(os.listdir(copy.root / 'a')) <= known):
      time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    if process.wait() == -signal.SIGKILL and not list(
        (copy.root / 'names').glob('new')):
      break  # Else it was faster than the signal: try another text.
    known = set(os.listdir(copy.root / 'a'))
  else:
    pytest.fail('no deposit was killed before its end')
  listed = ok('ls', copy.store)
  assert listed['damaged'] == []
  for one in listed['artifacts']:
    checked = ok('audit', TINY, copy.store, f'--artifact={one["id"]}')
    assert checked['blocks_checked'] == checked['blocks_equal'] > 0
  after = snapshot(copy.root)
  assert {k: after.get(k) for k in before} == before
  assert answer(copy.store) == copy.reference
  made = ok('deposit', TINY, copy.store, f'--prompt={text}', '--name=new')
  assert ok('verify', TINY, copy.store, '--artifact=new',
            '--continuations=2')['ok']
  assert made['artifact'] in [a['id'] for a in ok(
      'ls', copy.store)['artifacts']]
