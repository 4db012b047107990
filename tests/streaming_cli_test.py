"""Streamed contexts on the command line: results, refusals, killed deposits."""

import dataclasses
import json
import pathlib
import subprocess
import time

import pytest

import cli_helpers
import command_helpers
from command_helpers import call
from command_helpers import ok
from command_helpers import refusal
from command_helpers import snapshot
from command_helpers import TINY
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming
import model_helpers
import streaming_helpers

NUMERICS = (TINY, '--chunk=32', '--tile=4', '--page=16')
COMMANDS = ('audit', 'deposit', 'generate', 'graft', 'score', 'verify')
IDS = model_helpers.tokens(900, seed=4)


@pytest.fixture(scope='module', autouse=True)
def models_fixture():
  with command_helpers.kept_models():
    yield


@pytest.fixture(scope='module', name='least')
def least_fixture() -> int:
  model = model_helpers.tiny()
  return streaming.least_bytes(model.config, model.profile)


@dataclasses.dataclass
class Scene:
  """A store with `doc`, 400 tokens, and files with token ids."""

  root: pathlib.Path
  ids: str
  more: str
  doc: dict

  @property
  def store(self) -> str:
    return f'--store={self.root / "store"}'

  def request(self, command: str) -> tuple[str, ...]:
    behind = self.store, '--artifact=doc'
    return (command, *NUMERICS) + {
        'audit': (*behind, '--blocks=4'),
        'deposit': (self.store, f'--tokens_file={self.ids}'),
        'generate': (f'--tokens_file={self.ids}', '--max_new_tokens=5'),
        'graft': (*behind, f'--tokens_file={self.more}',
                  '--max_new_tokens=16'),
        'score': (*behind, f'--tokens_file={self.more}'),
        'verify': (*behind, '--continuations=3'),
    }[command]


def ids_file(path: pathlib.Path, ids: list[int]) -> str:
  path.write_text(json.dumps(ids))
  return str(path)


@pytest.fixture(scope='module', name='scene')
def scene_fixture(tmp_path_factory):
  root = tmp_path_factory.mktemp('streaming_cli')
  ids = ids_file(root / 'ids.json', IDS[:400])
  doc = ok('deposit', *NUMERICS, f'--store={root / "store"}', '--block=32',
           f'--tokens_file={ids}', '--name=doc')
  return Scene(root, ids, ids_file(root / 'more.json', IDS[400:410]), doc)


# Results.


@pytest.mark.parametrize('command', [c for c in COMMANDS if c != 'deposit'])
def test_streamed_results_are_those_without(scene, least, command):
  request = scene.request(command)
  plain = ok(*request)
  if command in ('audit', 'verify'):
    assert plain['ok'] and plain.get('blocks_checked', 8) == 8
  reads = []
  host = 60_000 if command == 'graft' else 200_000
  for flags in ((), (f'--host_kv_bytes={host}',)):
    ours = ok(*request, f'--device_kv_bytes={least}', *flags)
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
      if name != 'kv' and not name.endswith('_s'):
        assert ours[name] == value, name
    if command not in ('generate', 'graft', 'score'):
      continue
    kv = ours['kv']
    assert set(kv) == {f.name for f in dataclasses.fields(streaming.Usage)}
    assert kv['device_kv_bytes'] == least < plain['kv']['device_kv_bytes']
    assert kv['device_kv_source'] == 'buffers'
    assert 0 < kv['host_kv_bytes'] <= (host if flags else 10**9)
    for name in ('tokens_restored', 'tokens_computed'):
      assert kv[name] >= ours[name]
    restores = command != 'generate'
    assert (kv['store_bytes_read'] > 0) == restores
    assert (kv['store_blocks_read'] > 0) == restores
    reads.append(kv['store_bytes_read'])
  if command == 'graft':  # Again and again where there is no room for it.
    assert reads[1] > reads[0] + 200_000


@pytest.mark.parametrize('sliding', ['full', 'window'])
def test_streamed_deposit(scene, least, tmp_path, sliding):
  args = ('deposit', *NUMERICS, '--block=32', f'--tokens_file={scene.ids}',
          f'--sliding={sliding}')
  plain = ok(*args, f'--store={tmp_path}/a')
  ours = ok(*args, f'--store={tmp_path}/b', '--stream', '--name=doc',
            f'--device_kv_bytes={least}', '--host_kv_bytes=100kB')
  assert ours['artifact'] == plain['artifact']
  assert (ours['tokens_computed'], ours['tokens_resumed']) == (400, 0)
  assert ours['kv']['device_kv_bytes'] == least
  # Rows that wait to be written as sliding blocks come on top.
  assert ours['kv']['host_kv_bytes'] <= 100_000 + 768 * (24 + 1 + 32 + 4 * 32)
  # Another budget is no other artifact, and nothing is computed again.
  again = ok(*args, f'--store={tmp_path}/b', '--stream', '--name=doc')
  assert again['existed'] and again['tokens_computed'] == 0
  assert again['artifact'] == plain['artifact'] and again['kv'] is None
  child = ('deposit', *NUMERICS, '--block=32', f'--tokens_file={scene.more}',
           f'--parent={plain["artifact"]}')
  made = [ok(*child, f'--store={tmp_path}/{store}', *flags)
          for store, flags in (('a', ()), ('b', ('--stream',)))]
  assert made[0]['artifact'] == made[1]['artifact']
  assert made[1]['tokens_computed'] == 10 and made[1]['start'] == 400
  for command in ('deposit', 'graft'):
    assert 'is taken' in refusal(
        2, command, *NUMERICS, f'--store={tmp_path}/b',
        f'--tokens_file={scene.more}', *(
            ('--stream', '--name=doc') if command == 'deposit' else
            ('--artifact=doc', '--deposit_as=doc', '--device_kv_bytes=1MB')))


# Refusals.


@pytest.mark.parametrize('value', [
    '', '0', '-1', 'x', '48XB', '1e6', 'nan', 'inf', '1 2', '0.1', '1,5MB'])
def test_sizes_that_are_none(scene, least, value):
  before = snapshot(scene.root)
  for flag, front in (('device_kv_bytes', ()),
                      ('host_kv_bytes', (f'--device_kv_bytes={least}',))):
    for command in ('generate', 'deposit'):
      stream = ('--stream',) if command == 'deposit' else ()
      line = refusal(2, *scene.request(command), *stream, *front,
                     f'--{flag}={value}')
      assert (f'--{flag}: expected a size such as 48MB, 1.5GiB or 786432, found'
              f' {value!r}') in line
  assert snapshot(scene.root) == before


@pytest.mark.parametrize('command', COMMANDS)
def test_too_little_device_memory_names_the_least(scene, least, command):
  before = snapshot(scene.root)
  request = scene.request(command)
  if command == 'deposit':
    request = ('deposit', *NUMERICS, f'--store={scene.root}/new', '--stream',
               f'--tokens_file={scene.ids}')
  line = refusal(2, *request, '--device_kv_bytes=10kB')
  assert line == (
      f'kvgraft {command}: device_kv_bytes: expected at least {least} for tiny'
      ' in bfloat16 (its sliding windows, 48 positions of its global layers and'
      ' two buffers of 16), found 10000; raise it, or use a smaller --chunk')
  assert snapshot(scene.root) == before


@pytest.mark.parametrize('command', COMMANDS)
def test_flags_that_lack_another_one(scene, command):
  before = snapshot(scene.root)
  request = scene.request(command)
  line = refusal(2, *request, '--host_kv_bytes=1MB')
  if command == 'deposit':
    assert line.endswith('--host_kv_bytes needs --stream here')
    line = refusal(2, *request, '--device_kv_bytes=1MB')
    assert line.endswith('--device_kv_bytes needs --stream here')
  else:
    assert line.endswith('--host_kv_bytes needs --device_kv_bytes')
  assert snapshot(scene.root) == before


def test_too_little_host_memory(scene, least, tmp_path):
  budget = f'--device_kv_bytes={least}', '--host_kv_bytes=30kB'
  line = refusal(
      2, 'deposit', *NUMERICS, f'--store={tmp_path}/s', '--stream',
      f'--tokens_file={scene.ids}', *budget)
  assert 'host_kv_bytes: expected at least 40960 for a deposit' in line
  assert not (tmp_path / 's').exists() or not snapshot(tmp_path / 's')
  line = refusal(2, *scene.request('generate'), *budget)
  assert 'raise --host_kv_bytes, or deposit with --stream' in line


def test_lost_block_is_one_line(scene, least):
  """Found when it streams by, in the middle of the command."""
  data = scene.root / 'store' / 'a' / scene.doc['key']
  path = next(data.glob('*/global/c.0.0.5.0.0'))
  whole = path.read_bytes()
  request = *scene.request('graft'), f'--device_kv_bytes={least}'
  expected = ok(*request)['logits_sha256']
  path.unlink()
  try:
    line = refusal(1, *request)
  finally:
    path.write_bytes(whole)
  assert 'global layer' in line and f'block 5 ({path})' in line
  assert ok(*request)['logits_sha256'] == expected


@pytest.mark.parametrize('command', COMMANDS)
def test_help_tells_of_streaming(command):
  result = call(command, '--help')
  assert result.rc == 0
  text = ' '.join(result.stdout.split())
  assert '--device_kv_bytes=' in text and '--host_kv_bytes=' in text
  assert 'such as 48MB or 1.5GiB' in text
  assert ('--[no]stream' in text) == (command == 'deposit')
  if command == 'deposit':
    assert 'the same command goes on where it was' in text


# Deposits that are killed.


@pytest.fixture(name='long_deposit')
def long_deposit_fixture(least, tmp_path):
  """Returns the arguments of a streamed deposit of 900 tokens, less a store."""
  return ['deposit', *NUMERICS, '--block=32', '--stream',
          f'--device_kv_bytes={least}', '--host_kv_bytes=100kB',
          f'--tokens_file={ids_file(tmp_path / "long.json", IDS)}']


def plain_id(args: list[str], store: pathlib.Path, *flags: str) -> str:
  plain = [a for a in args if a != '--stream' and 'kv_bytes' not in a]
  return ok(*plain, f'--store={store}', *flags)['artifact']


def kill(where: str, number: int, args: list[str]) -> None:
  done = streaming_helpers.spawn('killed', where, number, args)
  assert done.returncode == -9, (done.returncode, done.stderr)
  assert done.stdout == ''


def finish(args: list[str], store: pathlib.Path, expected: str) -> dict:
  """Ends a deposit; checks that nothing but the artifact is left."""
  made = ok(*args)
  assert made['artifact'] == expected
  assert made['tokens_computed'] + made['tokens_resumed'] == 900
  found = store_lib.Store(str(store))
  assert found.list_damaged() == []
  assert found.attempts(made['key']) == []
  assert len(list((store / 'a' / made['key']).iterdir())) == 2
  assert ok('audit', *NUMERICS, f'--store={store}', '--blocks=3',
            f'--artifact={expected}')['ok']
  return made


def test_killed_twice_and_ended(long_deposit, tmp_path):
  store = tmp_path / 'store'
  args = [*long_deposit, f'--store={store}']
  kill('data', 3, args)  # Behind 2 checkpoints of 128 positions each.
  assert store_lib.Store(str(store)).list() == []
  kill('entry', 2, args)
  made = finish(args, store, plain_id(long_deposit, tmp_path / 'plain'))
  assert made['tokens_resumed'] >= 4 * 128 - 32


@pytest.mark.slow
@pytest.mark.parametrize('sliding, where, number, least_resumed', [
    ('full', 'data', 1, 0), ('full', 'entry', 1, 96), ('full', 'state', 4, 352),
    ('full', 'commit', 0, 768), ('window', 'state', 1, 0),
    ('window', 'data', 4, 352), ('window', 'state', 4, 352),
    ('window', 'entry', 4, 480), ('window', 'commit', 0, 768)])
def test_killed_at(
    long_deposit, tmp_path, sliding, where, number, least_resumed):
  store = tmp_path / 'store'
  args = [*long_deposit, f'--store={store}', f'--sliding={sliding}']
  kill(where, number, args)
  assert store_lib.Store(str(store)).list() == []
  expected = plain_id(
      long_deposit, tmp_path / 'plain', f'--sliding={sliding}')
  made = finish(args, store, expected) if least_resumed else ok(*args)
  assert made['artifact'] == expected
  assert made['tokens_resumed'] >= least_resumed
  if not least_resumed:
    assert made['tokens_resumed'] == 0


@pytest.mark.slow
def test_killed_behind_the_manifest(long_deposit, tmp_path):
  store = tmp_path / 'store'
  args = [*long_deposit, f'--store={store}']
  kill('published', 0, args)
  again = ok(*args)
  assert again['existed'] and again['tokens_computed'] == 0
  assert again['artifact'] == plain_id(long_deposit, tmp_path / 'plain')
  assert store_lib.Store(str(store)).attempts(again['key']) == []


@pytest.mark.slow
def test_two_processes_at_once(long_deposit, tmp_path):
  """Both go on from what a killed one left; then both begin at nothing."""
  expected = plain_id(long_deposit, tmp_path / 'plain')
  for number in (2, 0):
    store = tmp_path / f'store{number}'
    args = [*long_deposit, f'--store={store}']
    if number:
      kill('data', number, args)
    running = [subprocess.Popen(
        cli_helpers.command(*args), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=cli_helpers.environment())
               for _ in range(2)]
    for process in running:
      out, err = process.communicate(timeout=300)
      assert process.returncode == 0, err
      made = json.loads(out.splitlines()[-1])
      assert made['artifact'] == expected
      assert bool(made['tokens_resumed']) == bool(number) or made['existed']
    again = ok(*args)
    assert again['existed'] and again['artifact'] == expected
    assert ok('verify', *NUMERICS, f'--store={store}', '--continuations=2',
              f'--artifact={expected}')['ok']


@pytest.mark.slow
def test_killed_by_the_clock(long_deposit, tmp_path):
  """A signal from outside, whatever the process is doing."""
  store = tmp_path / 'store'
  args = [*long_deposit, f'--store={store}']

  def checkpoints() -> int:
    return sum(p.name.isdigit() for p in store.glob('a/*/*/journal/*'))

  for wanted in (1, 3):
    process = subprocess.Popen(
        cli_helpers.command(*args), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=cli_helpers.environment())
    deadline = time.monotonic() + 300
    while (checkpoints() < wanted and process.poll() is None
           and time.monotonic() < deadline):
      time.sleep(0.001)
    process.kill()
    assert process.wait() == -9
  made = finish(args, store, plain_id(long_deposit, tmp_path / 'plain'))
  assert made['tokens_resumed'] >= 3 * 128 - 32


def test_full_disk_and_then_space(long_deposit, tmp_path):
  store = tmp_path / 'store'
  store.mkdir()
  mounted = subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=512k', 'tmpfs', str(store)],
      capture_output=True, check=False)
  if mounted.returncode:
    pytest.skip('mounting a tmpfs is not permitted')
  try:
    args = [*long_deposit, f'--store={store}']
    for _ in range(2):
      line = refusal(1, *args)
      assert 'free space or use another store' in line and str(store) in line
      assert store_lib.Store(str(store)).list() == []
    subprocess.run(['mount', '-o', 'remount,size=16m', str(store)], check=True)
    made = finish(args, store, plain_id(long_deposit, tmp_path / 'plain'))
    assert made['tokens_resumed'] > 0
  finally:
    subprocess.run(['umount', '-l', str(store)], check=True)
