"""`kvgraft library`: every action, and every refusal in one line."""

import json

import pytest

import command_helpers
from command_helpers import ok
from command_helpers import refusal
from kvgraft_jax import sandbox

READ = 'import json, sys\np = json.load(sys.stdin)\n'
FAST = READ + "print(p['a'] + p['b'])\n"
SLOW = READ + "n = p['a']\nfor _ in range(p['b']):\n  n += 1\nprint(n)\n"
SCHEMA = [{'name': name, 'type': 'integer', 'min': 1, 'max': 50}
          for name in 'ab']
KEY = ('--problem=How many legs has a spider?', '--answer=8', '--expected=8',
       '--solution=Eight.')

needs_sandbox = pytest.mark.skipif(
    bool(sandbox.unavailable()), reason='programs cannot be kept apart here')


@pytest.fixture
def files(tmp_path):
  def write(name, text):
    path = tmp_path / name
    path.write_text(text)
    return path

  return write


def test_an_entry_from_a_key_and_all_that_can_be_done_with_it(tmp_path):
  where = tmp_path / 'library'
  added = ok('library', 'add', where, *KEY, '--family=legs')
  assert added['added'] == 1 and added['refused'] == []
  assert ok('library', 'add', where, *KEY, '--family=legs') == added
  listed = ok('library', 'ls', where)['entries']
  assert [(e['id'], e['answer'], e['checker']) for e in listed] == [
      (added['id'], '8', 'key')]
  assert ok('library', 'ls', where, '--family=other')['entries'] == []
  shown = ok('library', 'show', where, added['id'][:8])
  assert shown['solution'] == 'Eight.' and shown['retracted'] is None
  assert shown['checker']['evidence']['sees_key']
  assert shown['artifacts'] == []
  stats = ok('library', 'stats', where)
  assert (stats['entries'], stats['records'], stats['head']) == (
      1, 2, added['head'])
  assert ok('library', 'reverify', where)['verified'] == 1
  assert ok('library', 'reverify', where, added['id'][:8])['failed'] == []
  exported = ok('library', 'export', where, tmp_path / 'x.jsonl')
  assert exported['records'] == 4
  other = ok('library', 'import', tmp_path / 'other', tmp_path / 'x.jsonl')
  assert (other['added'], other['refused']) == (1, [])
  assert ok('library', 'show', tmp_path / 'other', added['id'])['answer'] == '8'
  gone = ok('library', 'retract', where, added['id'][:8], '--reason=no reason')
  assert gone['reason'] == 'no reason'
  assert ok('library', 'ls', where)['entries'] == []
  listed, = ok('library', 'ls', where, '--retracted')['entries']
  assert listed['retracted'] == 'no reason'
  assert 'stays so' in refusal(2, 'library', 'add', where, *KEY,
                               '--family=legs')


@needs_sandbox
def test_an_entry_from_programs(tmp_path, files):
  fast, slow = files('fast.py', FAST), files('slow.py', SLOW)
  schema = files('schema.json', json.dumps(SCHEMA))
  instances = files('instances.json', json.dumps(
      [{'a': 1, 'b': 50}, {'a': 50, 'b': 1}, {'a': 50, 'b': 50}]))
  where = tmp_path / 'library'
  request = ('library', 'add', where, '--problem=What is 3 plus 4?',
             f'--program={fast}', f'--parameters={schema}',
             f'--instances={instances}')
  assert 'agree on' in refusal(
      1, *request, f'--check_program={slow}', '--answer=8')
  assert 'two or more' in refusal(2, *request, '--answer=7')
  assert 'independent' in refusal(
      1, *request, f'--check_program={fast}',
      f'--check_program={files("same.py", FAST + "# it")}', '--answer=7')
  added = ok(*request, f'--check_program={slow}', '--answer=7')
  shown = ok('library', 'show', where, added['id'])
  assert shown['program'] == FAST and shown['programs'] == [FAST, SLOW]
  assert ok('library', 'ls', where)['entries'][0]['parameterised']


@needs_sandbox
def test_code_that_passes_its_tests(tmp_path, files):
  code = files('code.py', 'def twice(x):\n  return 2 * x\n')
  request = ('library', 'add', tmp_path / 'library', '--problem=Write twice.',
             f'--program={code}')
  assert 'the code fails' in refusal(
      1, *request, f'--tests={files("bad.py", "assert twice(2) == 5")}')
  tests = f'--tests={files("good.py", "assert twice(2) == 4")}'
  assert ok(*request, tests)['added'] == 1
  assert 'remove' in refusal(2, *request, tests, '--answer=x')


@needs_sandbox
def test_a_file_of_problems(tmp_path, files):
  problems = [
      {'id': 'one', 'problem': 'What is 3 plus 4?', 'answer': '7',
       'programs': ['print(3 + 4)', 'n = 3\nfor _ in range(4):\n  n += 1\n'
                    'print(n)']},
      {'id': 'two', 'problem': 'What is 3 plus 5?', 'answer': '9',
       'programs': ['print(3 + 5)', 'n = 3\nfor _ in range(5):\n  n += 1\n'
                    'print(n)']},
      {'id': 'three', 'problem': 'Who knows?', 'answer': '1'}]
  path = files('problems.jsonl', '\n'.join(map(json.dumps, problems)))
  result = command_helpers.call(
      'library', 'add', tmp_path / 'library', f'--problems_file={path}')
  assert result.rc == 1 and result.json['added'] == 1
  assert result.json['without_programs'] == 1
  assert [r['problem'] for r in result.json['refused']] == [
      'What is 3 plus 5?']
  assert 'refused: What is 3 plus 5?' in result.stdout
  assert 'give either' in refusal(
      2, 'library', 'add', tmp_path / 'library', f'--problems_file={path}',
      '--answer=3')


@pytest.mark.parametrize('args, rc, why', [
    ((), 2, '--action is missing'),
    (('add',), 2, '--library is missing'),
    (('add', 'LIB'), 2, '--problem is missing'),
    (('add', 'LIB', '--problem=x'), 2, '--answer is missing'),
    (('add', 'LIB', '--problem=x', '--answer=1'), 2, 'two or more'),
    (('add', 'LIB', '--problem=x', '--answer=1', '--expected=2'), 1,
     'not the expected'),
    (('add', 'LIB', '--problem=x', '--answer=1', '--expected=one'), 2,
     'cannot compare'),
    (('add', 'LIB', '--problem=x', '--answer=1', '--program=none.py'), 2,
     'No such file'),
    (('add', 'LIB', '--problem=x', '--answer=1', '--parameters=LIB/bad.json'),
     2, 'is no JSON'),
    (('add', 'LIB', '--problem=x', '--answer=1', '--parameters=LIB/one.json'),
     2, 'list of objects'),
    (('add', 'LIB', '--programs_file=x'), 2, '--problems_file is missing'),
    (('add', 'LIB', '--problems_file=none'), 2, 'none'),
    (('add', 'LIB', '--reason=x'), 2, 'takes no --reason'),
    (('ls', 'none'), 2, 'there is no library.sqlite'),
    (('ls', 'LIB', 'more'), 2, 'takes no --item'),
    (('show', 'LIB'), 2, '--item is missing'),
    (('show', 'LIB', 'ffff'), 2, 'there is no library.sqlite'),
    (('retract', 'LIB', 'ab'), 2, '--reason is missing'),
    (('import', 'LIB', 'none'), 2, 'No such file'),
    (('import', 'LIB', 'LIB/one.json'), 1, 'no whole export'),
    (('mend', 'LIB'), 2, 'mend'),
])
def test_refusals(tmp_path, monkeypatch, args, rc, why):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'LIB').mkdir()
  (tmp_path / 'LIB' / 'bad.json').write_text('{')
  (tmp_path / 'LIB' / 'one.json').write_text('{}')
  assert why in refusal(rc, 'library', *args)


def test_damage_is_said(tmp_path):
  ok('library', 'add', tmp_path, *KEY)
  path = tmp_path / 'library.sqlite'
  data = path.read_bytes()
  path.write_bytes(data.replace(b'Eight.', b'Seven.'))
  assert 'restore' in refusal(1, 'library', 'stats', tmp_path)
  path.write_bytes(b'x' * len(data))
  assert 'restore' in refusal(1, 'library', 'ls', tmp_path)


def test_programs_that_cannot_be_kept_apart_are_refused(
    tmp_path, files, monkeypatch
):
  monkeypatch.setattr(sandbox, 'unavailable', lambda: 'no namespaces here')
  request = ('library', 'add', tmp_path / 'library', '--problem=What is 1?',
             '--answer=1', f'--program={files("a.py", "print(1)")}',
             f'--check_program={files("b.py", "print(2 - 1)")}')
  assert '--unsafe_exec' in refusal(1, *request)
  added = ok(*request, '--unsafe_exec')
  assert ok('library', 'show', tmp_path / 'library', added['id'])['checker'][
      'unsafe']


def test_help_and_hints():
  result = command_helpers.call('library', '--help')
  assert result.rc == 0 and 'retract LIBRARY ID' in result.stdout
  result = command_helpers.call('library', 'retract', '--help')
  assert '--reason' in result.stdout and '--problem=' not in result.stdout
  assert 'kvgraft library retract' in command_helpers.call('retrakt').stderr
  assert '`kvgraft show`' in command_helpers.call('shwo').stderr
