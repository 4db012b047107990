"""What a hostile but fair user tries: settings, streams, names, odd values."""

import json
import os
import pathlib
import shutil
import subprocess

import jax
import pytest

import cli_helpers
import command_helpers
from command_helpers import ok
from command_helpers import refusal
from command_helpers import snapshot
from command_helpers import TINY
from kvgraft_jax import artifact
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import paths
from kvgraft_jax import selftest
from kvgraft_jax import store as store_lib
import model_helpers

_IDS = [2, *range(40, 90)]


@pytest.fixture(scope='module', autouse=True)
def models_fixture():
  with command_helpers.kept_models():
    yield


@pytest.fixture(scope='module', name='model')
def model_fixture():
  return engine.load_model('tiny:0')


@pytest.fixture(name='root')
def root_fixture(tmp_path):
  root = tmp_path / 'store'
  ok('deposit', TINY, f'--store={root}', '--prompt=Neap tides.', '--name=doc')
  return root


# Values.


@pytest.mark.parametrize('length', [0, -1, 14, 10**9, 10**24])
def test_a_length_that_is_not_there(root, length):
  before = snapshot(root)
  doc = (TINY, f'--store={root}', '--artifact=doc')
  expected = 'length: expected 1 to 12'
  assert expected in refusal(2, 'graft', *doc, f'--length={length}')
  assert expected in refusal(
      2, 'score', *doc, f'--length={length}', '--prompt=ab')
  assert expected in refusal(
      2, 'deposit', *doc[:2], '--parent=doc', f'--parent_length={length}',
      '--prompt=ab')
  assert snapshot(root) == before


@pytest.mark.parametrize('value', ['"' + 'x' * 5000 + '"', '9' * 4000,
                                   '[' * 300 + ']' * 300])
def test_a_huge_value_is_cut_in_the_message(tmp_path, value):
  path = tmp_path / 'ids'
  path.write_text(f'[{value}]')
  # `refusal` itself bounds the line.
  assert 'tokens[0]: expected' in refusal(
      2, 'generate', TINY, f'--tokens_file={path}')


def test_a_block_is_refused_before_anything_is_printed(root):
  line = refusal(2, 'graft', TINY, f'--store={root}', '--artifact=doc',
                 '--max_new_tokens=2', '--deposit_as=kid', '--block=17')
  assert 'multiple of the page (16), found 17' in line
  line = refusal(2, 'deposit', TINY, f'--store={root}', '--prompt=x',
                 f'--block={2**21}')
  assert f'from 1 to {2**20}' in line


def test_logits_replace_files_only(tmp_path):
  ids = tmp_path / 'ids'
  ids.write_text('[2, 5]')
  args = ('logits', TINY, f'--tokens_file={ids}')
  os.mkfifo(tmp_path / 'fifo')
  assert 'expected a file' in refusal(2, *args, f'--out={tmp_path}/fifo')
  assert (tmp_path / 'fifo').is_fifo()
  (tmp_path / 'target').write_text('old')
  (tmp_path / 'link').symlink_to('target')
  ok(*args, f'--out={tmp_path}/link')
  assert (tmp_path / 'link').is_symlink()
  assert (tmp_path / 'target').read_bytes()[:2] == b'PK'


@pytest.mark.parametrize('url, message', [
    ('{"driver":"file"}', 'has no path'),
    ('{"driver":"file","path":""}', 'has no path'),
    ('caf\udce9', 'surrogates not allowed')])
def test_stores_that_cannot_be(url, message):
  with pytest.raises(errors.UsageError, match=message):
    store_lib.Store(url)


def test_a_config_file_that_exits(tmp_path):
  path = tmp_path / 'config.py'
  path.write_text('raise SystemExit(0)')
  assert 'SystemExit' in refusal(2, 'ls', f'--config={path}')


# Names.


def test_a_damaged_name_is_found_before_the_deposit(root):
  name = root / 'names' / 'doc'
  name.write_bytes(name.read_bytes()[:-3])
  before = snapshot(root)
  for command in (
      ('deposit', '--prompt=Something else.', '--name=doc'),
      ('graft', f'--artifact={_only_key(root)}', '--deposit_as=doc')):
    line = refusal(1, command[0], TINY, f'--store={root}', *command[1:])
    assert 'names/doc' in line
  assert snapshot(root) == before


def test_a_removed_artifact_comes_back_under_its_name(root):
  before = ok('show', f'--store={root}', '--artifact=doc')['id']
  shutil.rmtree(root / 'a' / _only_key(root))
  line = refusal(2, 'deposit', TINY, f'--store={root}', '--prompt=Other.',
                 '--name=doc')
  assert 'is taken' in line
  again = ok('deposit', TINY, f'--store={root}', '--prompt=Neap tides.',
             '--name=doc')
  assert again['artifact'] == before and not again['existed']
  assert ok('show', f'--store={root}', '--artifact=doc')['id'] == before


def _only_key(root: pathlib.Path) -> str:
  key, = os.listdir(root / 'a')
  return key


@pytest.mark.parametrize('profile', [
    {}, {'class': None, 'factors': None}, {'class': [], 'factors': []},
    {'class': {'page': 1}, 'factors': {'page': '1'}}])
def test_the_outer_section_decides_nothing(model, root, profile):
  """No id covers it, so another profile there neither admits nor refuses."""
  path = root / 'a' / _only_key(root) / 'manifest.json'
  value = json.loads(path.read_bytes().partition(b'\n')[2])
  value['outer']['profile'] = profile
  path.write_bytes(artifact.sign(json.dumps(
      value, sort_keys=True, separators=(',', ':')).encode()))
  store = store_lib.Store(str(root))
  manifest = store.find('doc')
  grafting.check_early(model, manifest)
  context = grafting.graft(model, store, manifest)
  fresh = model.prefill(context.tokens)
  assert context.logits_sha256() == fresh.logits_sha256()
  other = model_helpers.variant(model, page=32)
  with pytest.raises(errors.ClassMismatchError) as caught:
    grafting.check(other, manifest)
  assert caught.value.factor == 'numerics class'


# The importer's settings.


def test_the_importers_settings_do_not_reach_the_programs(model):
  want = model.prefill(_IDS)
  with jax.enable_x64(True), jax.default_matmul_precision('highest'):
    other = engine.load_model('tiny:0', self_test=False)
    found = other.prefill(_IDS)
    assert found.logits().tobytes() == want.logits().tobytes()
    made = found.generate(3)[0].token_ids
    assert made == want.fork().generate(3)[0].token_ids
  ours = other.programs.hlo_sha256
  assert ours and ours.items() <= model.programs.hlo_sha256.items()


def test_no_device_is_one_line(monkeypatch):
  def fail(*_):
    raise RuntimeError("Unable to initialize backend 'xx'")

  monkeypatch.setattr(jax, 'devices', fail)
  with pytest.raises(errors.UsageError, match='JAX_PLATFORMS'):
    engine.load_model('tiny:0')


# The cache directory.


def test_an_altered_self_test_report_is_not_believed(
    model, monkeypatch, tmp_path):
  """Whole JSON of the right form, but not what was kept under this key."""
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path))
  report = model.self_test()
  calls = []
  monkeypatch.setattr(selftest, 'run', lambda *a: calls.append(a) or report)
  args = model.config, model.profile, model.params
  selftest.load_or_run(*args)
  path, = (tmp_path / 'selftest').iterdir()
  kept = path.read_bytes()
  value = json.loads(kept.partition(b'\n')[2])
  lies = dict(value, report=dict(value['report'], invariances={'tile': 'no'}))
  for data in (
      json.dumps(value).encode(), json.dumps(value['report']).encode(),
      kept.partition(b'\n')[0] + b'\n' + json.dumps(lies).encode(),
      artifact.sign(json.dumps(dict(value, key='0' * 64)).encode())):
    path.write_bytes(data)
    calls.clear()
    assert selftest.load_or_run(*args).to_json() == report.to_json()
    assert len(calls) == 1 and path.read_bytes() == kept
  assert os.listdir(path.parent) == [path.name]


def test_a_user_without_a_home_leaves_nothing_behind(monkeypatch, tmp_path):
  monkeypatch.delenv('KVGRAFT_CACHE_DIR', raising=False)
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  monkeypatch.setattr(os.path, 'expanduser', lambda path: path)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(OSError):
    paths.cache_dir().mkdir(parents=True)
  assert os.listdir(tmp_path) == []


# Streams.


@pytest.mark.parametrize('redirect, rc', [
    ('2>&-', 0), ('2>/dev/full', 0), ('2>/dev/full --nope', 2),
    ('>&-', 2), ('>/dev/full', 1), ('>/dev/full 2>/dev/full', 1)])
def test_closed_and_full_streams(root, redirect, rc):
  (root / 'names' / 'odd').write_text('damaged: gives a note on stderr')
  command = ' '.join(cli_helpers.command('ls', f'--store={root}'))
  done = subprocess.run(
      f'{command} {redirect}', shell=True, capture_output=True, check=False,
      # Buffered, as where the variable is not set: the rest is flushed at exit.
      env=cli_helpers.environment() | {'PYTHONUNBUFFERED': ''})
  assert done.returncode == rc, done
  assert b'Traceback' not in done.stderr and b'Exception' not in done.stderr
  if not rc:
    assert json.loads(done.stdout.splitlines()[-1])['artifacts']
