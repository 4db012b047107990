import json
import math
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from command_helpers import call
from command_helpers import ok
from command_helpers import refusal
from kvgraft_jax import errors
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import recheck
from kvgraft_jax.apps import ledger as ledger_app

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUN = {'format': 1, 'run': 'test', 'command': ['test'], 'config': {},
       'code': {}, 'model': {}, 'created': '2026-11-29T20:00:00Z'}


def write(folder, notes=3):
  with ledger_lib.Ledger(folder, create=True) as ledger:
    ledger.append('run', RUN)
    for i in range(notes):
      ledger.append('note', {'text': f'tide {i}'})
  return folder


def files(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir()}


def raised(error, match):
  return pytest.raises(error, match=match)


@pytest.fixture(name='run')
def run_fixture(tmp_path):
  return write(tmp_path / 'deep' / 'run')


def test_what_is_written_is_read(run):
  lines = ledger_lib.read(run)
  assert [line['n'] for line in lines] == [0, 1, 2, 3]
  assert lines[0]['body'] == RUN and lines[2]['body'] == {'text': 'tide 1'}
  assert recheck.check(run).problems == []
  assert set(files(run)) == {'ledger.jsonl', 'head.json'}
  with ledger_lib.Ledger(run) as ledger:
    assert ledger.lines == lines and ledger.head == lines[-1]['hash']
    added = ledger.append('end', {'status': 'done'})
    assert ledger.head == added == recheck.check(run).head
  assert len(ledger_lib.read(run)) == 5


def test_what_is_appended_is_a_copy(run):
  body = {'texts': ['a'], 'pair': (1, 2)}
  with ledger_lib.Ledger(run) as ledger:
    ledger.append('x', body)
    body['texts'].append('b')
    assert ledger.lines[-1]['body'] == {'texts': ['a'], 'pair': [1, 2]}
    assert ledger.lines == ledger_lib.read(run)


def test_figures_are_those_that_a_recheck_derives(run):
  with ledger_lib.Ledger(run) as ledger:
    for i in range(5):
      ledger.append('resources', {
          'id': f'r{i}', 'seconds': ledger_lib.number(0.1 * i),
          'group': {'odd': i % 2}, 'energy': {}, 'flops': i})
    over = {'kind': 'resources', 'where': {'group.odd': 0}}
    assert ledger.summary('s', over, 'seconds', 'sum', unit='s') == repr(0.6)
    assert ledger.lines[-1]['body']['unit'] == 's'
    assert ledger.summary('n', over, '', 'count') == 3
    assert ledger.verdict('v', 'c', {'n': 1}, [
        {'summary': 's', 'op': '<', 'value': '0.7'},
        {'summary': 'n', 'op': '==', 'value': 3}]) is True
    assert ledger.verdict(
        'w', 'c', {}, [{'summary': 'n', 'op': '>', 'value': 3}], {'x': 1}
    ) is False
    assert ledger.verdict('u', 'c', {}, [], passed=True) is True
    before = files(run)
    for call_, match in [
        (lambda: ledger.summary('x', over, 'joules', 'sum'), 'no field'),
        (lambda: ledger.summary('x', over, 'flops', 'avg'), 'unknown'),
        (lambda: ledger.verdict('x', 'c', {}, []), 'either'),
        (lambda: ledger.verdict('x', 'c', {}, [
            {'summary': 'n', 'op': '==', 'value': 3}], passed=True), 'either'),
        (lambda: ledger.verdict('x', 'c', {}, [
            {'summary': 'm', 'op': '==', 'value': 3}]), 'no summary "m"'),
    ]:
      with raised(errors.UsageError, match):
        call_()
    assert files(run) == before
  result = recheck.check(run)
  assert result.problems == [] and len(result.not_rederivable) == 1
  assert result.rederived == {'summary': 2, 'verdict': 2}


def test_numbers():
  for value in (0.1, 1e-07, 0.0, -2.5e300, np.float32(0.1), 3):
    assert float(ledger_lib.number(value)) == float(value)
    recheck.fraction(ledger_lib.number(value))
  for value in (math.nan, math.inf, -math.inf, np.float32('nan')):
    with raised(errors.NumericsError, 'finite'):
      ledger_lib.number(value)


def test_the_version_of_the_code_is_that_of_its_sources():
  found = ledger_lib.code_version()
  assert found['version'] == '0.1.0' or found['version']
  assert re.fullmatch('[0-9a-f]{64}', found['sources'])
  assert found['python'] == '.'.join(map(str, sys.version_info[:3]))
  recheck.canonical(found)


@pytest.mark.parametrize('body, match', [
    ({'a': 1.5}, 'float 1.5 has no canonical form'),
    ({'a': math.nan}, 'no canonical form'),
    ({'a': np.int64(1)}, 'int64'),
    ({1: 2}, 'key 1 is no string'),
    ({'a': '\ud800'}, 'surrogates not allowed'),
    ({'a': 10 ** 5000}, '.'),
])
def test_a_body_without_a_canonical_form_is_refused(run, body, match):
  before = files(run)
  with ledger_lib.Ledger(run) as ledger:
    with raised(errors.UsageError, match):
      ledger.append('x', body)
    ledger.append('note', {'text': 'goes on'})
  assert files(run)['ledger.jsonl'].startswith(before['ledger.jsonl'])
  assert recheck.check(run).problems == []


def test_wrong_use(run, tmp_path):
  before = files(run)
  with raised(errors.UsageError, 'there is a run already'):
    ledger_lib.Ledger(run, create=True)
  for what in (lambda p: ledger_lib.Ledger(p), ledger_lib.read):
    with raised(errors.NotFoundError, 'there is no ledger.jsonl'):
      what(tmp_path / 'none')
  with ledger_lib.Ledger(tmp_path / 'new', create=True) as ledger:
    with raised(errors.UsageError, 'expected kind "run" of format 1'):
      ledger.append('note', {'text': 'x'})
    assert ledger.head == '0' * 64
  with raised(errors.UsageError, 'is closed'):
    ledger.append('run', RUN)
  ledger.close()
  os.mkfifo(tmp_path / 'new' / 'head.json')
  with raised(errors.StorageError, 'no regular file'):
    ledger_lib.Ledger(tmp_path / 'new')
  (tmp_path / 'pipe').mkdir()
  os.mkfifo(tmp_path / 'pipe' / 'ledger.jsonl')
  for what in (ledger_lib.Ledger, ledger_lib.read):
    with raised(errors.StorageError, 'no regular file'):
      what(tmp_path / 'pipe')
  (tmp_path / 'file').write_text('')
  with raised(errors.StorageError, 'file.*exists'):
    ledger_lib.Ledger(tmp_path / 'file', create=True)
  assert files(run) == before


# What a killed writer left.


def test_a_torn_line_is_dropped_and_said(run):
  path = run / 'ledger.jsonl'
  whole = files(run)
  longer = files(write(run.parent / 'longer', 4))['ledger.jsonl']
  row = longer.splitlines(True)[-1]
  zeros = bytes(len(row) - 1) + b'\n'  # Its end reached the disk first.
  for torn in [row[:1], row[:40], row[:-1], zeros, b'\n', b'\xff']:
    path.write_bytes(whole['ledger.jsonl'] + torn)
    (run / 'head.json').write_bytes(whole['head.json'])
    with raised(errors.DamageError, 'line 5'):
      ledger_lib.read(run)
    with ledger_lib.Ledger(run) as ledger:
      assert [line['kind'] for line in ledger.lines] == [
          'run', 'note', 'note', 'note', 'recovered']
      assert ledger.lines[-1]['body'] == {
          'dropped_bytes': len(torn), 'adopted_lines': 0}
      ledger.append('end', {'status': 'done'})
    assert recheck.check(run).problems == []


def test_a_line_that_the_head_does_not_name_yet_is_taken(run):
  head = (run / 'head.json').read_bytes()
  with ledger_lib.Ledger(run) as ledger:
    ledger.append('note', {'text': 'durable'})
  (run / 'head.json').write_bytes(head)
  (run / '.head.json.tmp').write_bytes(b'{"form')
  with raised(errors.DamageError, 'lines were added behind it'):
    ledger_lib.read(run)
  with ledger_lib.Ledger(run) as ledger:
    assert ledger.lines[-2]['body'] == {'text': 'durable'}
    assert ledger.lines[-1]['body'] == {
        'dropped_bytes': 0, 'adopted_lines': 1}
  assert recheck.check(run).problems == []
  assert set(files(run)) == {'ledger.jsonl', 'head.json'}


def test_a_first_line_cut_short(tmp_path):
  run = write(tmp_path / 'run', 0)
  row = (run / 'ledger.jsonl').read_bytes()
  (run / 'head.json').unlink()
  with ledger_lib.Ledger(run) as ledger:  # Durable, but without a head.
    assert [line['kind'] for line in ledger.lines] == ['run', 'recovered']
  assert recheck.check(run).problems == []
  (run / 'head.json').unlink()
  for rest in (b'', row[:50], bytes(90) + b'\n'):
    for create in (True, False):
      (run / 'ledger.jsonl').write_bytes(rest)
      with ledger_lib.Ledger(run, create) as ledger:
        assert ledger.lines == []
  write(run, 2)
  assert recheck.check(run).problems == []


def test_a_damaged_ledger_is_not_written_on(run):
  whole = files(run)
  rows = whole['ledger.jsonl'].splitlines(True)
  flipped = rows[1].replace(b'tide', b'tidy')
  head = whole['head.json']
  for data, head_, match in [
      ([rows[0], flipped, *rows[2:]], head, r'line 2 \(n 1\), note: its hash'),
      ([*rows[:3], rows[3].replace(b'tide', b'tidy')], head, 'line 4'),
      (rows[:3], head, 'tail was cut'),
      ([], head, 'tail was cut'),
      ([*rows[:3], rows[3][:-1]], head, 'tail was cut'),
      ([*rows[:2], *rows[3:]], head, r'line 3 \(n 3\)'),
      ([*rows, b'{}\n', b'{}\n'], head, 'line 5'),
      (rows, None, 'head.json: is missing'),
      (rows, b'', 'head.json: '),
      (rows, b'[]\n', 'head.json: '),
      (rows, head.replace(b'"lines":4', b'"lines":3'), 'head is'),
      (rows, head.replace(b'"lines":4', b'"lines":0'), 'head.json: '),
      (rows, head.replace(b'"head":"', b'"head":"0'), 'head is'),
      (rows, head.replace(b'"format":1', b'"format":9'), 'format is 9'),
  ]:
    (run / 'ledger.jsonl').write_bytes(b''.join(data))
    (run / 'head.json').write_bytes(head_ or b'')
    if head_ is None:
      (run / 'head.json').unlink()
    before = files(run)
    for what in (ledger_lib.Ledger, ledger_lib.read):
      if what is ledger_lib.read and not data:
        continue
      with raised(errors.DamageError, 'kvgraft ledger recheck') as caught:
        what(run)
      if what is ledger_lib.Ledger:
        assert re.search(match, str(caught.value)), (match, caught.value)
    assert files(run) == before


# A process that makes a writer for each line it reads: imports take longer.
WRITERS = '''
import json, os, sys
from kvgraft_jax import errors, ledger
folder, run = sys.argv[1], json.loads(sys.argv[2])
for mode in sys.stdin:
  child = os.fork()
  if child:
    os.waitpid(child, 0)
    print('over', flush=True)
    continue
  print(os.getpid(), flush=True)
  try:
    with ledger.Ledger(folder, mode == 'create\\n') as book:
      if not book.lines:
        book.append('run', run)
      print('open', flush=True)
      n = len(book.lines)
      while True:
        book.append('note', {'text': f'{n} ' + 'x' * (n * 7919 % 20_000)})
        n += 1
        print(n, flush=True)
  except errors.KvgraftError as e:
    print(e, flush=True)
  os._exit(1)
'''


def python(code, *args):
  return subprocess.Popen(
      [sys.executable, '-c', code, *args],
      env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
      text=True)


def start(process, mode):
  """Starts a writer; returns its process id."""
  process.stdin.write(f'{mode}\n')
  process.stdin.flush()
  return int(process.stdout.readline())


def until_over(process):
  """Returns the lines that a writer still printed."""
  return list(iter(lambda: process.stdout.readline().rstrip(), 'over'))


def test_kill_9_at_any_moment(tmp_path):
  rng = random.Random(6)
  run = tmp_path / 'run'
  known, recovered = 0, 0
  with python(WRITERS, run, json.dumps(RUN)) as process:
    for i in range(25):
      pid = start(process, 'open' if i else 'create')
      assert process.stdout.readline() == 'open\n'
      time.sleep(rng.uniform(0.002, 0.06))
      os.kill(pid, signal.SIGKILL)
      known = max([known, *map(int, until_over(process))])
      with ledger_lib.Ledger(run) as ledger:
        assert len(ledger.lines) >= known  # What was said to be there is there.
        recovered += ledger.lines[-1]['kind'] == 'recovered'
      result = recheck.check(run)
      assert result.problems == [] and result.lines >= known
    process.stdin.close()
  # Most times the writer was inside an append.
  assert recovered and known > 25


def test_two_writers(tmp_path):
  run = tmp_path / 'run'
  with python(WRITERS, run, json.dumps(RUN)) as process:
    first = start(process, 'create')
    assert process.stdout.readline() == 'open\n'
    for create in (True, False):
      with raised(errors.UsageError, 'another process writes this ledger'):
        ledger_lib.Ledger(run, create)
    os.kill(first, signal.SIGKILL)
    until_over(process)
    with ledger_lib.Ledger(run):
      start(process, 'open')
      line, = until_over(process)
      assert 'another process writes this ledger' in line
    process.stdin.close()
  with ledger_lib.Ledger(run):  # Its lock went with it.
    with raised(errors.UsageError, 'another process'):
      ledger_lib.Ledger(run)
  assert recheck.check(run).problems == []


LIMITED = '''
import resource, sys
from kvgraft_jax import errors, ledger
def limit(n):
  hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
  resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
with ledger.Ledger(sys.argv[1]) as book:
  size, lines = book._size, len(book.lines)
  limit(size + 100)
  for _ in range(2):
    try:
      book.append('note', {'text': 'x' * 5000})
    except errors.StorageError as e:
      print(e, flush=True)
  limit(60)
  try:
    book.append('note', {'text': 'the head does not fit'})
  except errors.StorageError as e:
    print(e, flush=True)
  limit(1 << 20)
  assert len(book.lines) == lines
  book.append('note', {'text': 'goes on'})
'''


def test_a_full_disk_leaves_the_ledger_as_it_was(run):
  before = files(run)
  with python(LIMITED, run) as process:
    out, err = process.communicate()
  assert process.returncode == 0, err
  lines = out.splitlines()
  assert len(lines) == 3
  for line in lines:
    assert 'File too large; free space' in line and str(run) in line
  assert recheck.check(run).problems == []
  assert [line['body'] for line in ledger_lib.read(run)][4:] == [
      {'text': 'goes on'}]
  assert (run / 'ledger.jsonl').read_bytes().startswith(before['ledger.jsonl'])


@pytest.fixture(name='small_disk')
def small_disk_fixture(tmp_path):
  """A file system of 64 KiB; skips where none can be mounted."""
  disk = tmp_path / 'disk'
  disk.mkdir()
  mount = subprocess.run(
      ['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs', disk],
      capture_output=True, check=False)
  if mount.returncode:
    pytest.skip('a file system cannot be mounted here')
  yield disk
  subprocess.run(['umount', disk], check=True)


def test_a_disk_that_is_really_full(small_disk):
  run = small_disk / 'run'
  with ledger_lib.Ledger(run, create=True) as ledger:
    ledger.append('run', RUN)
    with raised(errors.StorageError, 'No space left on device; free space'):
      for _ in range(100):
        ledger.append('note', {'text': 'x' * 3000})
    whole = list(ledger.lines)
    assert len(whole) > 5
    assert recheck.check(run).problems == []
    with raised(errors.StorageError, 'No space'):
      ledger.append('note', {'text': 'x' * 70_000})
  assert ledger_lib.read(run) == whole


def test_an_append_that_was_interrupted_needs_opening_again(run, monkeypatch):
  with ledger_lib.Ledger(run) as ledger:
    def interrupt(*unused_args):
      raise KeyboardInterrupt
    with monkeypatch.context() as patch:
      patch.setattr(os, 'replace', interrupt)
      with pytest.raises(KeyboardInterrupt):
        ledger.append('note', {'text': 'durable'})
    with raised(errors.StorageError, 'open the ledger again'):
      ledger.append('note', {'text': 'would be a second n'})
  with ledger_lib.Ledger(run) as ledger:
    assert ledger.lines[-1]['body'] == {'dropped_bytes': 0, 'adopted_lines': 1}
  assert recheck.check(run).problems == []


# The command.


def test_the_command_says_what_the_file_says(run):
  head = recheck.check(run).head
  alone = subprocess.run(
      [sys.executable, '-I', '-S', recheck.__file__, run], capture_output=True,
      text=True, timeout=60, check=False)
  for args in ([run], [f'--dir={run}'], [run, f'--head={head}'],
               [f'--head={head}', run]):
    got = call('ledger', 'recheck', *args)
    assert got.rc == alone.returncode == 0 and got.stdout == alone.stdout
  assert ok('ledger', '--action=recheck', f'--dir={run}')['head'] == head
  path = run / 'ledger.jsonl'
  path.write_bytes(path.read_bytes().replace(b'tide 1', b'tide 7'))
  got = call('ledger', 'recheck', run)
  assert got.rc == 1 and got.stderr == ''
  assert got.stdout.startswith('line 3 (n 2), note: its hash is')
  assert got.json['problems'] == 1 and not got.json['ok']
  last = got.stdout.splitlines()[-2]
  assert last == 'FAILED: 1 problem'
  (run.parent / 'empty').mkdir()
  for name, message in (('none', 'is no directory'), ('empty', 'holds no')):
    assert message in refusal(2, 'ledger', 'recheck', run.parent / name)
  (run / 'ledger.jsonl').unlink()  # Its head is there: damage, not a mistake.
  assert call('ledger', 'recheck', run).rc == 1


def test_the_command_s_arguments(run, tmp_path):
  for args, message in [
      ([], '--action is missing'),
      (['recheck'], '--dir is missing'),
      (['rechek', run], 'value should be one of <recheck'),
      (['recheck', run, '--head=abc'], '--head=abc is no hash'),
      (['recheck', run, '--action=recheck'], 'were given; give one of them'),
      (['recheck', run, '--dir=x'], "argument '"),
      (['recheck', *[run] * len(ledger_app.POSITIONAL)], 'unexpected argument'),
      (['recheck', run, run], 'recheck takes no --other'),
      (['recheck', run, '--out=x'], "recheck takes no --out, found 'x'"),
      (['diff', run, run, '--full'], 'diff takes no --full'),
      (['preregister', run, '--model=x'], 'preregister takes no --model'),
      (['recheck', run, '--ful'], "'ful'. Did you mean: full"),
  ]:
    assert message in refusal(2, 'ledger', *args), args
  assert 'unexpected argument' in refusal(2, 'ls', run)
  text = call('ledger', '--help').stdout
  assert 'without a flag are, in this order: --action, --dir' in text
  # A config file gives what the command line leaves out.
  config = tmp_path / 'config.py'
  config.write_text(
      f"def get_config():\n  return {{'action': 'recheck', 'dir': '{run}'}}\n")
  assert ok('ledger', f'--config={config}')['ok']
  write(tmp_path / 'other', 1)
  assert ok('ledger', f'--config={config}', 'recheck', tmp_path / 'other')[
      'lines'] == 2


def test_the_command_needs_no_jax(run):
  code = f'''
import sys
from kvgraft_jax.apps import main
assert main.main(['ledger', 'recheck', {str(run)!r}]) == 0
assert not {{'jax', 'flax', 'tensorstore'}} & set(sys.modules)
'''
  done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, timeout=60,
      env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}, check=False)
  assert done.returncode == 0, done.stderr


def test_full_runs_the_checkers_again(run, monkeypatch):
  from kvgraft_jax import replay
  with ledger_lib.Ledger(run) as ledger:
    ledger.verdict('notes', 'notes', {'at_least': 3}, [], passed=True)
  text = refuse_or_json(run)
  assert text['problems'] == 1
  assert "checker 'notes' is unknown" in text['problem_list'][0]

  def notes(lines, body):
    return sum(line['kind'] == 'note' for line in lines) >= (
        body['ran']['at_least'])

  monkeypatch.setitem(replay.CHECKERS, 'notes', notes)
  assert refuse_or_json(run)['checkers_run'] == 1
  with ledger_lib.Ledger(run) as ledger:
    ledger.verdict('more', 'notes', {'at_least': 4}, [], passed=True)
  found = refuse_or_json(run)
  assert found['checkers_run'] == 2 and found['problem_list'] == [
      'line 6 (n 5), verdict "more": passed is True, the checker now says'
      ' False']
  assert ok('ledger', 'recheck', run)['ok']  # Without --full none runs.

  def fails(unused_lines, unused_body):
    raise errors.NotFoundError('there is no store; give one')

  monkeypatch.setitem(replay.CHECKERS, 'notes', fails)
  assert 'cannot run: there is no store' in refuse_or_json(run)[
      'problem_list'][0]


def refuse_or_json(run):
  """Returns the JSON of a full recheck, whatever its verdict."""
  got = call('ledger', 'recheck', run, '--full')
  assert got.rc == int(not got.json['ok']), got.stderr
  return got.json
