"""Nothing enters the library unverified, and nothing in it gets lost."""

import dataclasses
import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from kvgraft_jax import datasets
from kvgraft_jax import entry_checks
from kvgraft_jax import errors
from kvgraft_jax import library as library_lib
from kvgraft_jax import records
from kvgraft_jax import sandbox

pytestmark = pytest.mark.skipif(
    bool(sandbox.unavailable()), reason='programs cannot be kept apart here')

READ = 'import json, sys\np = json.load(sys.stdin)\n'
FAST = READ + "print(p['a'] + p['b'])\n"
SLOW = READ + "n = p['a']\nfor _ in range(p['b']):\n  n += 1\nprint(n)\n"
WRONG = READ + "print(p['a'] - p['b'] * 2 + 3 * p['b'] + (p['a'] == 40))\n"
SCHEMA = [{'name': name, 'type': 'integer', 'min': 1, 'max': 50}
          for name in 'ab']
SUM = {'problem': 'What is 3 plus 4?', 'solution': '3 + 4 = 7', 'answer': '7',
       'rule': 'integer', 'checker': 'programs'}
BOTH = {'programs': (FAST, SLOW), 'parameters': SCHEMA, 'instances': (
    {'a': 50, 'b': 50}, {'a': 1, 'b': 50}, {'a': 1, 'b': 1})}
KEY = {'problem': 'How many legs has a spider?', 'solution': 'Eight.',
       'answer': '8', 'rule': 'integer', 'checker': 'key', 'expected': '8'}


@pytest.fixture
def library(tmp_path):
  with library_lib.Library(tmp_path / 'library', create=True) as made:
    yield made


def test_an_entry_says_what_verified_it(library):
  entry = library.add(**SUM, **BOTH, family='sums', provenance={'by': 'test'})
  assert entry == library.get(entry.id[:6]) == library.get(entry.id)
  assert (entry.answer, entry.family, entry.program) == ('7', 'sums', FAST)
  assert entry.programs == (FAST, SLOW) and entry.provenance == {'by': 'test'}
  assert entry.template == 'What is □ plus □?'
  checker = entry.checker
  assert checker['kind'] == 'programs' and checker['passed']
  assert checker['expected'] is None
  assert not checker['unsafe'] and not checker['evidence']['sees_key']
  # The statement's own numbers, then at least three others of the schema.
  assert checker['evidence']['instances'][0] == {'a': 3, 'b': 4}
  assert {'a': 50, 'b': 50} in checker['evidence']['instances']
  assert len(checker['evidence']['instances']) >= 4
  assert len(checker['ran']) == 64
  assert library.by_address(entry.address) == [entry]
  assert library.by_template(entry.template) == [entry]
  # The same again is the same entry, in however many spaces.
  records_before = library.stats()['records']
  assert library.add(**SUM, **BOTH, family='sums',
                     provenance={'by': 'test'}) == entry
  assert library.stats()['records'] == records_before
  assert library.check() == records_before


@pytest.mark.parametrize('change, error, why', [
    ({'answer': '8'}, errors.NotVerifiedError, "agree on '7'"),
    ({'programs': (FAST, WRONG), 'instances': (
        {'a': 1, 'b': 2}, {'a': 40, 'b': 2}, {'a': 5, 'b': 2})},
     errors.NotVerifiedError, 'do not agree'),
    ({'programs': (FAST, FAST + '# other\n')}, errors.NotVerifiedError,
     'added: the programs are not independent'),
    # They do not read what they get.
    ({'programs': ('print(7)', 'print(3 + 4)')}, errors.NotVerifiedError,
     "print '7' for all 4 instances, expected answers that depend"),
    ({'programs': (FAST, 'print(7)')}, errors.NotVerifiedError, 'do not agree'),
    ({'programs': (FAST, 'raise ValueError')}, errors.NotVerifiedError,
     'no answer'),
    ({'programs': (FAST,)}, errors.UsageError, 'two or more'),
    ({'programs': ()}, errors.UsageError, 'two or more'),
    ({'expected': '7'}, errors.UsageError, 'no key'),
    ({'checker': 'passed'}, errors.UsageError, 'unknown'),
    ({'checker': 'key'}, errors.UsageError, 'nothing to check against'),
    ({'checker': 'key', 'expected': '7'}, errors.UsageError, 'only by'),
    ({'rule': 'close'}, errors.UsageError, 'unknown'),
    ({'rule': 'regex'}, errors.UsageError, 'cannot compare'),
    ({'answer': ' '}, errors.UsageError, 'expected text'),
    ({'problem': 'What is 3?'}, errors.UsageError, 'one for each number'),
    ({'problem': 'What is 3 plus 400?'}, errors.UsageError, 'range'),
    ({'instances': ({'a': 1, 'b': 2},)}, errors.UsageError, 'at least 3'),
    ({'instances': ({'a': 1, 'b': 0},)}, errors.UsageError, 'does not fit'),
    ({'parameters': [SCHEMA[0], {'constant': '4'}], 'programs': (
        READ + "print(p['a'] + 4)", READ + "print(7)"),
      'instances': ({'a': 1}, {'a': 2}, {'a': 5})},
     errors.NotVerifiedError, 'do not agree'),
    ({'parameters': []}, errors.UsageError, 'a list'),
    ({'provenance': {'seconds': 0.5}}, errors.UsageError, 'float'),
])
def test_what_does_not_pass_stays_out(library, change, error, why):
  head = library.head
  with pytest.raises(error, match=why) as caught:
    library.add(**{**SUM, **BOTH, **change})
  assert '\n' not in str(caught.value)
  assert library.head == head and library.stats()['entries'] == 0


def test_no_call_takes_a_verdict(library):
  for name in ('passed', 'evidence', 'ran', 'verified'):
    with pytest.raises(TypeError):
      library.add(**KEY, **{name: True})
  assert not {'passed', 'evidence', 'ran'} & {
      field.name for field in dataclasses.fields(library_lib.Candidate)}


def test_a_key_and_unit_tests_are_checkers_too(library):
  entry = library.add(**KEY)
  assert entry.program is None and entry.checker['evidence']['sees_key']
  with pytest.raises(errors.NotVerifiedError, match='not the expected'):
    library.add(**{**KEY, 'answer': '6'})
  code = 'def twice(x):\n  return 2 * x\n'
  request = {'problem': 'Write twice.', 'solution': code, 'answer': code,
             'rule': 'equal', 'checker': 'tests'}
  assert library.add(**request, expected='assert twice(4) == 8').checker[
      'passed']
  with pytest.raises(errors.NotVerifiedError, match='the code fails'):
    library.add(**request, expected='assert twice(4) == 9')
  assert library.stats()['entries'] == 2


def _candidates(count, **change):
  return [
      library_lib.Candidate(
          f'What is {a} plus {b}?', f'{a} + {b}', str(a + b), 'integer',
          'programs', 'sums', SCHEMA, (FAST, SLOW), **change)
      for a, b in [(1 + n % 50, 1 + n // 50) for n in range(count)]]


def test_many_are_verified_together_and_each_for_itself(library):
  good = _candidates(60)
  bad = [dataclasses.replace(good[7], answer='99'),
         dataclasses.replace(good[8], problem='What is 9 plus?'),
         dataclasses.replace(good[9], programs=(FAST, WRONG),
                             problem='What is 40 plus 1?', answer='41'),
         dataclasses.replace(good[0], checker='none')]
  count, refused = library.add_all([bad[0], *good, *bad[1:], good[0]])
  assert count == 61
  assert [c for c, _ in refused] == [bad[3], bad[0], bad[1], bad[2]]
  assert all(why for _, why in refused)
  assert library.stats()['entries'] == 60
  for entry in library.entries():
    answers = entry.checker['evidence']['answers']
    assert len(answers) == 2 and answers[0] == answers[1]
    assert answers[0][0] == entry.answer
  # Verified alone, an entry has the same name.
  one = good[30]
  alone = library.add(**vars(one))
  assert alone.checker['evidence']['together'] and library.check() == 122


@pytest.mark.parametrize('source', [
    READ + "import os\nprint(p['a'] + p['b'], flush=True)\nos._exit(0)\n",
    READ + "if p['a'] == 20:\n  while True:\n    pass\nprint(p['a'] + p['b'])",
    READ + "import builtins\nbuiltins.print = None\n"
    "sys.stdout.write(str(p['a'] + p['b']))\n",
    "import os, json\np = json.loads(os.read(0, 999))\nprint(p['a'] + p['b'])",
    READ + "sys.stdout = None\nsys.__stdout__.write('[]')\nprint(1)",
])
def test_a_program_that_disturbs_the_others_is_run_alone(
    library, source, monkeypatch
):
  monkeypatch.setattr(entry_checks, '_TOGETHER', 2)
  given = {'instances': ({'a': 1, 'b': 7}, {'a': 2, 'b': 7}, {'a': 3, 'b': 7})}
  candidates = [
      dataclasses.replace(c, programs=(source, SLOW),
                          limits=sandbox.Limits(cpu_s=1))
      for c in _candidates(20, **given)[18:]]
  wrong = dataclasses.replace(candidates[0], answer='77')
  count, refused = library.add_all([*candidates, wrong])
  # Of 19 + 1 and 20 + 1 the second loops for ever in one of the programs.
  good = {'[]': 0, 'while': 1}.get(
      next((word for word in ('[]', 'while') if word in source), ''), 2)
  assert count == good and wrong in [c for c, _ in refused]
  assert [e.answer for e in library.entries()] == ['20', '21'][:good]


def test_answers_of_many_runs_are_those_of_single_runs():
  values = [{'a': a, 'b': b} for a in range(5) for b in range(300)]
  assert entry_checks.run_many(FAST, values) == [
      str(v['a'] + v['b']) for v in values]
  fails = READ + "if p['b'] == 7:\n  raise ValueError\nprint('x\\n', p['b'])"
  found = entry_checks.run_many(fails, values[:20])
  assert found == [None if n == 7 else str(n) for n in range(20)]


def test_a_retracted_entry_is_out_for_good(library):
  entry = library.add(**KEY)
  with pytest.raises(errors.UsageError, match='reason'):
    library.retract(entry.id, ' ')
  library.retract(entry.id, 'misread')
  library.retract(entry.id, 'misread')
  with pytest.raises(errors.UsageError, match=r'already \(misread\)'):
    library.retract(entry.id, 'again')
  assert library.retraction(entry.id) == 'misread'
  assert library.by_address(entry.address) == []
  assert library.by_template(entry.template) == []
  assert list(library.entries()) == list(library.canonicals()) == []
  assert list(library.entries(retracted=True)) == [entry]
  assert library.get(entry.id) == entry
  with pytest.raises(errors.UsageError, match='stays so'):
    library.add(**KEY)
  assert library.add_all([library_lib.Candidate(**KEY)])[1][0][1] == (
      'was retracted: misread')
  other = library.add(**KEY, provenance={'checked': 'twice'})
  assert library.by_address(entry.address) == [other]
  assert library.stats()['retracted'] == 1
  library.check()


def test_programs_without_parameters_need_no_input(library):
  entry = library.add(
      **SUM, programs=('print(7)', 'print(3 + 4)'))
  assert entry.parameters is None and entry.answer == '7'


def test_programs_that_ignore_their_input_are_refused_together(library):
  good = [c for c in _candidates(600) if c.answer == '12'][:9]
  assert len(good) == 9
  constant = [dataclasses.replace(c, programs=('print(12)', 'print(6 + 6)'))
              for c in good]
  count, refused = library.add_all([*good, *constant])
  assert count == 9 and [c for c, _ in refused] == constant
  assert all('depend on the parameters' in why for _, why in refused)


def test_answers_of_one_statement_that_differ_are_known(library):
  request = KEY | {'rule': 'rational'}
  first = library.add(**request)
  library.add(**{**request, 'answer': '16/2'})
  assert library.conflicts(first.address) == []
  other = library.add(**{**request, 'answer': '9', 'expected': '9'})
  assert [e.id for e in library.conflicts(first.address)][0] == other.id
  assert len(library.conflicts(first.address)) == 3
  library.retract(other.id, 'miscounted')
  assert library.conflicts(first.address) == []
  assert library.conflicts('0' * 64) == []


def test_reverification_runs_again_and_retracts_what_fails(
    library, monkeypatch
):
  kept = library.add(**KEY)
  lost = library.add(**{**KEY, 'problem': 'Other?'})
  ran = []
  real = entry_checks.verify

  def verify(candidate, **more):
    ran.append(candidate.problem)
    return real(dataclasses.replace(candidate, expected='9')
                if candidate.problem == 'Other?' else candidate, **more)

  monkeypatch.setattr(entry_checks, 'verify', verify)
  outcomes = dict(library.reverify())
  assert ran == [kept.problem, lost.problem]
  assert outcomes[kept.id].passed and not outcomes[lost.id].passed
  assert 'verified again' in library.retraction(lost.id)
  assert [e.id for e in library.entries()] == [kept.id]
  assert not library.get(lost.id).checker['passed']
  assert [name for name, _ in library.reverify(kept.id)] == [kept.id]
  library.check()


def test_artifacts_are_kept_by_model_and_class(library):
  entry = library.add(**KEY)
  assert library.artifact(entry.id, 'm', 'c') is None
  for artifact in ('one', 'two'):
    library.attach(entry.id, model='m', numerics_class='c', artifact=artifact,
                   store='/s')
  assert library.artifact(entry.id, 'm', 'c') == 'two'
  assert library.artifact(entry.id, 'm', 'd') is None
  with pytest.raises(errors.NotFoundError):
    library.attach('ab', model='m', numerics_class='c', artifact='x', store='')


@pytest.mark.parametrize('ref', ['', 'zz', 'A', '%', "' OR 1=1 --", '0' * 64])
def test_a_reference_to_nothing(library, ref):
  library.add(**KEY)
  with pytest.raises(errors.NotFoundError, match='no entry'):
    library.get(ref)


# Exchange.


def test_import_runs_every_checker_again(library, tmp_path):
  library.add(**SUM, **BOTH)
  key = library.add(**KEY)
  gone = library.add(**{**KEY, 'problem': 'How many legs has an ant?',
                        'answer': '6', 'expected': '6'})
  library.attach(key.id, model='m', numerics_class='c', artifact='x', store='s')
  library.retract(gone.id, 'ants')
  assert library.export(tmp_path / 'x.jsonl') == library.stats()['records']
  with pytest.raises(errors.UsageError, match='exists already'):
    library.export(tmp_path / 'x.jsonl')
  before = library.stats()['records']
  with library_lib.Library(tmp_path / 'other', create=True) as other:
    again = other.add(**{**KEY, 'problem': 'How many legs has an ant?',
                         'answer': '6', 'expected': '6'})
    assert other.import_(tmp_path / 'x.jsonl') == (2, 0, [])
    assert [e.id for e in other.entries()] == [
        e.id for e in library.entries()]
    assert other.artifact(key.id, 'm', 'c') == 'x'
    assert again.id == gone.id  # What is known to be wrong there is so here.
    assert other.retraction(again.id) == 'ants'
    head = other.head
    assert other.import_(tmp_path / 'x.jsonl') == (0, 2, [])
    assert other.head == head
    other.check()
  assert library.stats()['records'] == before


def test_retractions_travel(library, tmp_path):
  gone = library.add(**KEY)
  library.retract(gone.id, 'misread')
  library.export(tmp_path / 'x.jsonl')
  with library_lib.Library(tmp_path / 'other', create=True) as other:
    assert other.import_(tmp_path / 'x.jsonl') == (0, 0, [])
    assert other.get(gone.id).candidate == gone.candidate
    assert other.retraction(gone.id) == 'misread'
    assert list(other.entries()) == []
    assert [e.id for e in other.entries(retracted=True)] == [gone.id]
    assert other.stats()['retracted'] == 1
    with pytest.raises(errors.UsageError, match='stays so'):
      other.add(**KEY)
    other.check()
    other.export(tmp_path / 'y.jsonl')

  def wrong(lines):  # An entry that passes no more.
    entry = next(line for line in lines if line['kind'] == 'entry')
    entry['answer'] = '9'
    lines[-1]['entry'] = records.name_of(records.canonical(entry))

  _forge(tmp_path / 'x.jsonl', wrong)
  with library_lib.Library(tmp_path / 'third', create=True) as third:
    assert third.import_(tmp_path / 'x.jsonl') == (0, 0, [])
    assert third.stats()['entries'] == third.stats()['retracted'] == 0
    assert third.stats()['kinds'] == {'retraction': 1}
    assert third.import_(tmp_path / 'y.jsonl') == (0, 0, [])
    third.check()
    third.export(tmp_path / 'z.jsonl')  # It travels on without its entry.
  with library_lib.Library(tmp_path / 'fourth', create=True) as fourth:
    fourth.import_(tmp_path / 'z.jsonl')
    assert fourth.stats()['kinds']['retraction'] == 2


def _forge(path, change):
  """Writes an export again, changed, with a chain that fits."""
  first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
  change(lines)
  data = [records.canonical(line) for line in lines]
  head = records.NO_HEAD
  for one in data:
    head = records._link(head, records.name_of(one))
  first['head'] = head
  path.write_bytes(b'\n'.join([records.canonical(first), *data]) + b'\n')


def test_a_forged_export_brings_no_wrong_entry(library, tmp_path):
  library.add(**KEY)
  library.add(**{**KEY, 'problem': 'Other?'})

  def lie(lines):
    for line in lines:
      if line['kind'] == 'entry':
        line['answer'] = '1000'

  library.export(tmp_path / 'x.jsonl')
  _forge(tmp_path / 'x.jsonl', lie)
  with library_lib.Library(tmp_path / 'other', create=True) as other:
    count, _, refused = other.import_(tmp_path / 'x.jsonl')
    assert count == 0 and len(refused) == 2
    assert other.stats()['entries'] == 0

  def greedy(lines):
    for line in lines:
      if line['kind'] == 'entry':
        line['answer'] = line['checker']['expected']
        line['checker']['limits']['cpu_s'] = 10 ** 6

  _forge(tmp_path / 'x.jsonl', greedy)
  with library_lib.Library(tmp_path / 'other') as other:
    count, _, refused = other.import_(tmp_path / 'x.jsonl')
    assert count == 0 and 'limits' in refused[0][1]


@pytest.mark.parametrize('record', [
    {'kind': 'source'}, {'kind': 'source', 'text': 1},
    {'kind': 'retraction'}, {'kind': 'retraction', 'entry': 'ENTRY'},
    {'kind': 'retraction', 'entry': [], 'reason': 'x'},
    {'kind': 'retraction', 'entry': 'ENTRY', 'reason': {}},
    {'kind': 'artifact', 'entry': 'ENTRY'},
    {'kind': 'artifact', 'entry': 'ENTRY', 'model': 'm', 'class': 'c',
     'artifact': 'x', 'store': 's', 'more': 1}])
def test_a_forged_record_of_another_form_is_refused(
    library, tmp_path, record):
  entry = library.add(**KEY)
  library.export(tmp_path / 'x.jsonl')
  if record.get('entry') == 'ENTRY':
    record = record | {'entry': entry.id}
  _forge(tmp_path / 'x.jsonl', lambda lines: lines.append(record))
  head = library.head
  with pytest.raises(errors.DamageError, match='malformed, expected'):
    library.import_(tmp_path / 'x.jsonl')
  assert library.head == head


@pytest.mark.parametrize('field, value', [
    ('rule', []), ('provenance', 'abc'), ('provenance', [1]),
    ('provenance', None), ('rule', None), ('answer', 8)])
def test_a_forged_entry_of_another_form_does_not_stop_others(
    library, tmp_path, field, value):
  library.add(**KEY)
  library.add(**{**KEY, 'problem': 'Other?'})
  library.export(tmp_path / 'x.jsonl')
  _forge(tmp_path / 'x.jsonl', lambda lines: lines[0].update({field: value}))
  with library_lib.Library(tmp_path / 'other', create=True) as other:
    count, _, refused = other.import_(tmp_path / 'x.jsonl')
    assert count == 1 and field in refused[0][1]
    assert [e.problem for e in other.entries()] == ['Other?']


@pytest.mark.parametrize('fields', [
    {'provenance': {'x': 1.5}}, {'problem': 'half \ud800'},
    {'rule': 'regex', 'expected': 'a{99999999999}'}, {'limits': None},
    {'checker': 'programs', 'expected': None, 'programs': ('1', '2'),
     'instances': ({'a': float('nan')},)}])
def test_a_candidate_that_cannot_be_written_does_not_stop_others(
    library, fields):
  bad = library_lib.Candidate(**{**KEY, **fields})
  count, refused = library.add_all([library_lib.Candidate(**KEY), bad])
  assert count == 1 and refused[0][0] is bad
  with pytest.raises(errors.UsageError):
    library.add(**vars(bad))


# Right where it sees that others run beside it, wrong alone.
_TWO_FACED = '''\
import json, sys
try:
  together = 'task' in sys._getframe({}).f_globals
except ValueError:
  together = False
'''


def test_programs_that_are_right_only_together_verify_nothing(library):
  programs = (
      _TWO_FACED.format(1) + READ
      + "print(p['a'] + p['b'] if together else 1000 * p['a'])\n",
      "def main():\n" + textwrap.indent(
          _TWO_FACED.format(2) + READ
          + "print(sum(p.values()) if together else p['a'] * 1000)\n", '  ')
      + "main()\n")
  count, refused = library.add_all([
      library_lib.Candidate(**{
          **SUM, **BOTH, 'problem': f'What is {n} plus 4?',
          'answer': str(n + 4), 'programs': programs}) for n in range(1, 11)])
  assert count == 0 and len(refused) == 10
  assert 'agree on' in refused[0][1]


@pytest.mark.parametrize('damage', [
    lambda data: data[:-20], lambda data: data.replace(b'"8"', b'"9"'),
    lambda data: data + b'[' * 100_000,
    lambda data: b'\n'.join(data.split(b'\n')[:-2]) + b'\n',
    lambda data: data + b'[]\n'])
def test_a_damaged_export_is_refused(library, tmp_path, damage):
  library.add(**KEY)
  path = tmp_path / 'x.jsonl'
  library.export(path)
  path.write_bytes(damage(path.read_bytes()))
  head = library.head
  with pytest.raises(errors.DamageError, match='no whole export') as caught:
    library.import_(path)
  assert '\n' not in str(caught.value) and library.head == head


@pytest.mark.parametrize('data', [
    b'', b'{}\n', b'[]', b'\xff', b'[' * 100_000, b'text\n',
    b'{"id": "a", "problem": "P", "answer": "1"}\n'])
def test_a_file_that_is_no_export_is_refused(library, tmp_path, data):
  (tmp_path / 'x').write_bytes(data)
  with pytest.raises(errors.UsageError, match='no export of a library'):
    library.import_(tmp_path / 'x')


# The file.


def test_records_are_never_changed(library):
  library.add(**KEY)
  for sql in ('UPDATE records SET head = 1', 'DELETE FROM records'):
    with sqlite3.connect(library.path / library_lib.FILE) as db:
      with pytest.raises(sqlite3.IntegrityError, match='never'):
        db.execute(sql)
    db.close()
  library.check()


def _tamper(path, sql, *values):
  with sqlite3.connect(path / library_lib.FILE) as db:
    db.execute('DROP TRIGGER no_update')
    db.execute('DROP TRIGGER no_delete')
    db.execute(sql, values)
  db.close()


@pytest.mark.parametrize('sql', [
    "UPDATE records SET record = replace(record, 'Eight', 'Seven')",
    "UPDATE records SET address = 'x' WHERE kind = 'entry'",
    "UPDATE records SET method = 'x' WHERE kind = 'entry'",
    "UPDATE records SET head = 'x' WHERE seq = 1",
    "DELETE FROM records WHERE kind = 'verification'",
    'DELETE FROM records WHERE seq = 1',
])
def test_what_was_tampered_with_is_found(library, sql):
  library.add(**KEY)
  library.add(**{**KEY, 'problem': 'Other?'})
  library.close()
  _tamper(library.path, sql)
  with library_lib.Library(library.path) as again:
    with pytest.raises(errors.DamageError) as caught:
      again.check()
    assert '\n' not in str(caught.value)


def test_a_changed_record_gives_no_answer(library):
  entry = library.add(**KEY)
  library.close()
  _tamper(library.path, 'UPDATE records SET record = CAST(replace(CAST(record'
          " AS TEXT), '\"answer\":\"8\"', '\"answer\":\"9\"') AS BLOB)")
  with library_lib.Library(library.path) as again:
    with pytest.raises(errors.DamageError, match='not what its name'):
      again.by_address(entry.address)


def test_a_file_with_bad_bytes_is_damage(library):
  for n in range(30):
    library.add(**{**KEY, 'problem': f'Number {n}?', 'solution': 'x' * 2000})
  library.close()
  path = library.path / library_lib.FILE
  data = bytearray(path.read_bytes())
  data[4096:len(data) // 2] = b'\xa5' * (len(data) // 2 - 4096)
  path.write_bytes(data)
  with pytest.raises(errors.DamageError) as caught:
    with library_lib.Library(library.path) as again:
      again.check()
  assert '\n' not in str(caught.value) and 'restore' in str(caught.value)


@pytest.mark.parametrize('content, error', [
    (b'This is no database, whatever its name says.' * 30, errors.DamageError),
    (None, errors.UsageError), ('folder', errors.StorageError)])
def test_a_file_of_another_kind_is_left_alone(tmp_path, content, error):
  path = tmp_path / library_lib.FILE
  if content == 'folder':
    path.mkdir()
  elif content:
    path.write_bytes(content)
  else:
    db = sqlite3.connect(path)
    db.execute('CREATE TABLE mine (x)')
    db.commit()
    db.close()
  before = path.read_bytes() if path.is_file() else None
  for create in (True, False):
    with pytest.raises(error) as caught:
      library_lib.Library(tmp_path, create=create)
    assert '\n' not in str(caught.value)
  assert before == (path.read_bytes() if path.is_file() else None)


def test_nothing_there_is_said(tmp_path):
  with pytest.raises(errors.NotFoundError, match='there is no'):
    library_lib.Library(tmp_path / 'x')
  (tmp_path / library_lib.FILE).touch()
  with pytest.raises(errors.NotFoundError, match='nothing yet'):
    library_lib.Library(tmp_path)
  with library_lib.Library(tmp_path, create=True) as made:
    assert made.head == '0' * 64
  (tmp_path / 'file').touch()
  with pytest.raises(errors.StorageError):
    library_lib.Library(tmp_path / 'file' / 'x', create=True)
  made.close()
  with pytest.raises(errors.UsageError, match='closed'):
    made.stats()


WRITER = textwrap.dedent('''
    import itertools, sys
    from kvgraft_jax import library
    with library.Library(sys.argv[1], create=True) as made:
      for n in itertools.count():
        made.add(f'{sys.argv[2]} {n}?', 'x' * 3000, '8', 'integer', 'key',
                 expected='8')
        print(n, flush=True)
''')


def _writer(path, name):
  return subprocess.Popen(
      [sys.executable, '-c', WRITER, str(path), name], stdout=subprocess.PIPE,
      text=True, env=os.environ | {
          'PYTHONPATH': str(pathlib.Path(library_lib.__file__).parents[1])})


def test_two_writers_and_kill_9_lose_nothing(tmp_path):
  said = {}
  for n in range(2):
    writers = [_writer(tmp_path, f'{name}{n}') for name in 'ab']
    for name, writer in zip('ab', writers):
      lines = [writer.stdout.readline() for _ in range(5)]
      assert lines[-1] == '4\n'
      os.kill(writer.pid, signal.SIGKILL)
      said[f'{name}{n}'] = [*lines, *writer.stdout.read().split('\n')]
      writer.stdout.close()
      writer.wait()
    with library_lib.Library(tmp_path) as library:
      library.check()
      kept = {entry.problem for entry in library.entries()}
    for name, lines in said.items():
      for line in lines:
        if line.strip():
          assert f'{name} {int(line)}?' in kept


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_library_that_cannot_be_written_can_be_read(library):
  library.add(**KEY)
  library.close()
  os.chmod(library.path / library_lib.FILE, 0o444)
  os.chmod(library.path, 0o555)
  try:
    with library_lib.Library(library.path) as again:
      assert again.check() == 2
      with pytest.raises(errors.StorageError, match='nothing was changed'):
        again.add(**{**KEY, 'problem': 'Other?'})
  finally:
    os.chmod(library.path, 0o755)


def test_no_space_left_loses_nothing(library):
  library.add(**KEY)
  head = library.head
  pages = library._records.value('PRAGMA page_count')
  library._records.value(f'PRAGMA max_page_count = {pages + 2}')  # As a disk.
  with pytest.raises(errors.StorageError, match='full') as caught:
    library.add(**{**KEY, 'problem': 'Other?', 'solution': 'x' * 100_000})
  assert '\n' not in str(caught.value)
  assert library.head == head and library.check() == 2
  library._records.value('PRAGMA max_page_count = 1000000')
  library.add(**{**KEY, 'problem': 'Other?', 'solution': 'x' * 100_000})
  assert library.check() == 4


def test_an_export_that_cannot_be_written_leaves_nothing(
    library, monkeypatch, tmp_path
):
  library.add(**KEY)
  with pytest.raises(errors.StorageError):
    library.export(tmp_path / 'no' / 'folder.jsonl')

  def full(unused_fd):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(errors.StorageError, match='No space left'):
    library.export(tmp_path / 'x.jsonl')
  assert not (tmp_path / 'x.jsonl').exists()


def test_the_shipped_problems_enter(library):
  problems = [p for p in datasets.load('shipped:base')][:2]
  count, refused = library.add_all(map(library_lib.from_problem, problems))
  assert (count, refused) == (2, [])
  bare = dataclasses.replace(problems[0], programs=())
  with pytest.raises(errors.UsageError, match='two or more'):
    library_lib.from_problem(bare)
