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


def refused(*args):
  """Runs an `add` that does not pass; returns its JSON and its one line."""
  result = command_helpers.call('library', 'add', *args)
  assert result.rc == 1 and result.json['added'] == 0, result.stderr
  assert result.stdout.count('\n') == 1
  line, = result.stderr.splitlines()
  assert line.startswith('kvgraft library: ')
  assert result.json['refused'][0]['why'] in line
  return result.json, line


def test_an_entry_from_a_key_and_all_that_can_be_done_with_it(tmp_path):
  where = tmp_path / 'library'
  added = ok('library', 'add', where, *KEY, '--family=legs')
  assert added['added'] == 1 and added['refused'] == []
  assert ok('library', 'add', where, *KEY, '--family=legs') == added
  listed = ok('library', 'ls', where)['entries']
  assert listed == [{
      'id': added['id'], 'family': 'legs', 'answer': '8', 'checker': 'key',
      'address': added['address'], 'parameterised': False, 'retracted': None}]
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
  assert (other['added'], other['present'], other['refused']) == (1, 0, [])
  again = command_helpers.call(
      'library', 'import', tmp_path / 'other', tmp_path / 'x.jsonl')
  assert (again.rc, again.json['added'], again.json['present']) == (0, 0, 1)
  assert 'added 0, there already 1, refused 0' in again.stdout
  assert ok('library', 'show', tmp_path / 'other', added['id'])['answer'] == '8'
  gone = ok('library', 'retract', where, added['id'][:8], '--reason=no reason')
  assert gone['reason'] == 'no reason'
  assert ok('library', 'ls', where)['entries'] == []
  listed, = ok('library', 'ls', where, '--retracted')['entries']
  assert listed['retracted'] == 'no reason'
  assert 'already (no reason)' in refusal(
      2, 'library', 'retract', where, added['id'], '--reason=another')
  again = command_helpers.call('library', 'reverify', where, added['id'])
  assert again.json['stays_retracted'] == 'no reason'
  assert f'{added["id"]} stays retracted: no reason' in again.stdout
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
  answer, line = refused(*request[2:], f'--check_program={slow}', '--answer=8')
  assert 'agree on' in line and answer['conflicts'] == []
  assert 'two or more' in refusal(2, *request, '--answer=7')
  assert 'not independent' in refused(
      *request[2:], f'--check_program={fast}',
      f'--check_program={files("same.py", FAST + "# it")}', '--answer=7')[1]
  why = refusal(2, *request, '--answer=7', '--expected=7')
  assert why.endswith(
      'remove --expected, or --program, --parameters, --instances')
  added = ok(*request, f'--check_program={slow}', '--answer=7')
  shown = ok('library', 'show', where, added['id'])
  assert shown['program'] == FAST and shown['programs'] == [FAST, SLOW]
  assert ok('library', 'ls', where)['entries'][0]['parameterised']
  assert '  programs  any  7 ' in command_helpers.call(
      'library', 'ls', where).stdout
  text = command_helpers.call('library', 'show', where, added['id']).stdout
  text = text[:text.rindex('{"id"')]  # The JSON line has all.
  assert text.count("\n  print(p['a'] + p['b'])\n") == 1
  assert 'program 0, for other numbers:\n  import json' in text
  # Asked again, with other numbers, in other words, and about nothing.
  exact = ok('library', 'ask', where, '--problem=What  is 3 plus 4?')
  assert exact.pop('seconds') > 0
  assert exact == {
      'kind': 'exact', 'entry': added['id'], 'address': added['address'],
      'parameters': None, 'answer': '7', 'why': None, 'score': None,
      'nearest': None}
  other = ok('library', 'ask', where, '--problem=What is 30 plus 4?')
  assert (other['kind'], other['entry'], other['parameters'], other['answer']
          ) == ('parameters', added['id'], {'a': 30, 'b': 4}, '34')
  assert other['address'] == ok(
      'library', 'address', '--problem=What is 30 plus 4?')['address']
  pytest.importorskip('bm25s')
  near = ok('library', 'ask', where, '--problem=Is it plus 4?')
  assert (near['kind'], near['answer'], near['nearest']) == (
      'similar', None, 'What is 3 plus 4?')
  assert near['entry'] == added['id'] and near['score'] > 0
  bare = ok('library', 'ask', where, '--problem=Who?')
  assert (bare['kind'], bare['entry'], bare['score']) == ('bare', None, None)


@needs_sandbox
def test_programs_that_disagree_on_new_numbers_are_said(tmp_path, files):
  odd = READ + "print(p['a'] + p['b'] + (p['a'] == 30))\n"
  where = tmp_path / 'library'
  ok('library', 'add', where, '--problem=What is 3 plus 4?', '--answer=7',
     f'--program={files("fast.py", FAST)}',
     f'--check_program={files("odd.py", odd)}',
     f'--parameters={files("schema.json", json.dumps(SCHEMA))}')
  result = command_helpers.call(
      'library', 'ask', where, '--problem=What is 30 plus 4?')
  assert result.rc == 1 and result.json['answer'] is None
  assert 'do not agree' in result.json['why']
  assert result.json['why'] in result.stderr


def test_another_answer_to_one_statement_is_warned_of(tmp_path, files):
  first = ok('library', 'add', tmp_path / 'library', *KEY)
  assert first['conflicts'] == []
  result = command_helpers.call(
      'library', 'add', tmp_path / 'library', KEY[0], '--answer=6',
      '--expected=6')
  assert result.rc == 0 and result.json['conflicts'] == [first['id']]
  line, = result.stderr.splitlines()
  assert "says '8'" in line and 'retract the wrong one' in line


def test_long_texts_are_cut(tmp_path, files):
  word = 'How many legs has ' + 'a very ' * 20 + 'old spider?'
  request = (tmp_path / 'library', f'--problem={word}', '--expected=8')
  line = refused(*request, '--answer=7')[1]
  assert "a very a v...' was not added: the answer '7'" in line
  ok('library', 'add', *request, '--answer=8', '--family=legs')
  listed = command_helpers.call('library', 'ls', request[0]).stdout
  assert listed.splitlines()[0].endswith('...') and word not in listed
  stats = command_helpers.call('library', 'stats', request[0]).stdout
  assert 'families:\n  legs: 1\n' in stats
  code = files('code.py', 'def twice(x):\n' + '  # Why?\n' * 20 + '  return x')
  result = command_helpers.call(
      'library', 'add', request[0], '--problem=Code?', '--rule=equal',
      f'--answer={code.read_text()}', f'--expected={code.read_text()}')
  assert result.rc == 0 and result.stdout.count('\n') == 2
  assert len(result.stdout.splitlines()[0]) < 160


@needs_sandbox
def test_code_that_passes_its_tests(tmp_path, files):
  code = files('code.py', 'def twice(x):\n  return 2 * x\n')
  request = ('library', 'add', tmp_path / 'library', '--problem=Write twice.',
             f'--program={code}')
  assert 'the code fails' in refused(
      *request[2:], f'--tests={files("bad.py", "assert twice(2) == 5")}')[1]
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
    (('add', 'LIB', '--problem=x', '--answer=1', '--expected=1',
      '--program=none.py'), 2, 'remove --expected, or --program'),
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
    (('import', 'NEW', 'LIB/one.json'), 2, 'no export of a library'),
    (('ask', 'LIB'), 2, '--problem is missing'),
    (('ask', 'none', '--problem=x'), 2, 'there is no library.sqlite'),
    (('address',), 2, '--problem is missing'),
    (('address', 'LIB', '--problem=x'), 2, 'takes no --library'),
    (('mend', 'LIB'), 2, 'mend'),
])
def test_refusals(tmp_path, monkeypatch, args, rc, why):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'LIB').mkdir()
  (tmp_path / 'LIB' / 'bad.json').write_text('{')
  (tmp_path / 'LIB' / 'one.json').write_text('{}')
  assert why in refusal(rc, 'library', *args)
  assert not (tmp_path / 'NEW').exists()


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
  for action, what in (('retract', 'id of an entry, or its first digits.'),
                       ('export', 'file to write, which must not exist.'),
                       ('import', 'file that `export` wrote.')):
    text = command_helpers.call('library', action, '--help').stdout
    assert f'--item=\n      {what}\n' in text
  text = command_helpers.call('library', 'ls', '--help').stdout
  assert '--family=\n      only the entries of this family.\n' in text
  assert 'kvgraft library retract' in command_helpers.call('retrakt').stderr
  assert '`kvgraft show`' in command_helpers.call('shwo').stderr
