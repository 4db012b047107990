"""The shipped problems are right, and datasets are read or clearly refused."""

import difflib
import fractions
import itertools
import json
import random
import re

import pytest

from kvgraft_jax import datasets
from kvgraft_jax import errors
from kvgraft_jax import recheck
from kvgraft_jax import statements
import make_problems

PROBLEMS = datasets.load('shipped')
FAMILIES = {
    family['family']: family for family in map(
        json.loads, datasets.FAMILIES_FILE.read_text().splitlines())}
NEAR = [p for p in PROBLEMS if p.split == 'near']


def _same(problem, a, b):
  return recheck.SCORES[problem.rule](a, b, tolerance=problem.tolerance)


def _draw(schema, rng):
  """Returns parameters of a schema, its ends often among them."""
  drawn = {}
  for slot in schema:
    if 'constant' not in slot:
      values = range(slot['min'], slot['max'] + 1, slot.get('multiple_of', 1))
      drawn[slot['name']] = rng.choice(
          [values[0], values[-1], rng.choice(values), rng.choice(values)])
  return drawn


def _fits(schema, numbers, parameters):
  """Returns whether the numbers of a statement are those of its parameters."""
  return len(schema) == len(numbers) and all(
      number == slot['constant'] if 'constant' in slot else (
          number == str(parameters[slot['name']]) and _in_range(slot, number))
      for slot, number in zip(schema, numbers))


def _in_range(slot, number):
  return (re.fullmatch('-?[0-9]+', number) is not None
          and slot['min'] <= int(number) <= slot['max']
          and int(number) % slot.get('multiple_of', 1) == 0)


def test_there_are_enough_problems_of_each_split():
  assert len(PROBLEMS) == 110
  assert len({p.family for p in PROBLEMS}) == len(FAMILIES) == 11
  for family in FAMILIES:
    counts = [sum(p.family == family and p.split == split for p in PROBLEMS)
              for split in datasets.SPLITS]
    assert counts == [4, 2, 2, 2], family
  assert {p.rule for p in PROBLEMS} == {
      'integer', 'decimal', 'rational', 'equal'}
  assert datasets.load('shipped:near') == NEAR


def test_problems_are_complete_and_short():
  for p in PROBLEMS:
    assert len(p.programs) == 2 and len(p.instances) == 5, p.id
    assert len(p.problem) <= 160 and len(p.solution) <= 200, p.id
    assert 0 < len(p.answer) <= 16 and len(p.wrong) == 3, p.id
    assert '{' not in p.problem + p.solution + ''.join(p.wrong), p.id
    known = p.split in ('base', 'parameter')
    assert bool(p.solution) == bool(p.schema) == known, p.id
    if known:
      lines = p.solution.split('\n')
      assert 2 <= len(lines) <= 4, p.id
      # It ends in the computation, and that in the answer.
      assert re.search(rf'(=|is) {re.escape(p.answer)}\Z', lines[-1]), p.id


def test_the_shipped_file_is_what_the_script_writes():
  text = datasets.PROBLEMS_FILE.read_text(encoding='utf-8')
  assert make_problems.render() == text, 'run python scripts/make_problems.py'


def test_both_programs_agree_and_have_the_answer():
  for p in PROBLEMS:
    first, second = p.programs
    assert first != second
    for parameters in [p.parameters, *p.instances]:
      answers = [make_problems.run(s, parameters) for s in p.programs]
      assert answers[0] and _same(p, *answers), (p.id, parameters, answers)
    answers = [make_problems.run(s, p.parameters) for s in p.programs]
    assert answers[0] == p.answer and _same(p, answers[1], p.answer)


def test_programs_agree_in_the_whole_range():
  rng = random.Random(5)
  for p in PROBLEMS:
    if p.id.endswith('base-1') or p.programs != tuple(
        FAMILIES[p.family]['programs']):
      schema = FAMILIES[p.family]['parameters']
      for _ in range(20):
        parameters = _draw(schema, rng)
        answers = [make_problems.run(s, parameters) for s in p.programs]
        assert answers[0] and _same(p, *answers), (p.id, parameters, answers)
        if p.rule == 'integer':
          assert re.fullmatch('-?[0-9]+', answers[0])


def test_instances_are_held_out():
  for p in PROBLEMS:
    shown = [q.parameters for q in PROBLEMS
             if q.family == p.family and q.split in ('base', 'parameter')]
    assert not any(i in shown for i in p.instances), p.id
    assert len({json.dumps(i) for i in p.instances}) == len(p.instances)
    slots = [s for s in FAMILIES[p.family]['parameters'] if 'name' in s]
    for instance in p.instances:
      assert list(instance) == [s['name'] for s in slots]
      assert all(_in_range(s, str(instance[s['name']])) for s in slots)


def test_wrong_answers_are_wrong_and_differ():
  for p in PROBLEMS:
    for a, b in itertools.combinations([p.answer, *p.wrong], 2):
      assert _same(p, a, a) and _same(p, b, b), p.id  # Both can be read.
      assert not _same(p, a, b), p.id


def test_no_two_problems_are_one():
  assert len({p.sha256 for p in PROBLEMS}) == len(PROBLEMS)
  assert PROBLEMS[0].sha256 == statements.address(PROBLEMS[0].problem)


def test_parameter_problems_have_the_template_of_their_family_alone():
  skeletons = {}
  for p in PROBLEMS:
    skeleton, numbers = statements.template(p.problem)
    if p.split == 'base':
      assert skeletons.setdefault(skeleton, p.family) == p.family
    if p.schema:
      assert skeletons[skeleton] == p.family
      assert _fits(p.schema, numbers, p.parameters), p.id
  assert len(skeletons) == len(FAMILIES)


def test_transfer_problems_have_other_words():
  skeletons = [statements.template(p.problem).skeleton for p in PROBLEMS
               if p.split in ('base', 'transfer')]
  for p in PROBLEMS:
    if p.split == 'transfer':
      skeleton, numbers = statements.template(p.problem)
      assert skeletons.count(skeleton) == 1, p.id
      assert sorted(numbers) == sorted(map(str, p.parameters.values())), p.id


@pytest.mark.parametrize('p', NEAR, ids=lambda p: p.id)
def test_near_problems_differ_in_little_and_in_the_answer(p):
  [base] = [q for q in PROBLEMS if q.family == p.family
            and q.split == 'base' and q.parameters == p.parameters]
  a, b = base.problem.split(), p.problem.split()
  changes = [op for op in difflib.SequenceMatcher(
      None, a, b, autojunk=False).get_opcodes() if op[0] != 'equal']
  assert len(changes) == 1
  assert max(changes[0][2] - changes[0][1], changes[0][4] - changes[0][3]) == 1
  assert not _same(p, p.answer, base.answer)
  assert p.wrong[0] == base.answer
  # Neither the address nor the template with fitting numbers leads to it.
  skeleton, numbers = statements.template(p.problem)
  for other in PROBLEMS:
    if other.schema and statements.template(other.problem).skeleton == skeleton:
      assert len(numbers) == len(other.schema)
      assert not all(
          number == slot['constant'] if 'constant' in slot
          else _in_range(slot, number)
          for slot, number in zip(other.schema, numbers))


def test_a_solution_computes_what_it_says():
  checked = 0
  for p in PROBLEMS:
    for left, right in re.findall(
        r'([0-9/ *+-]*[0-9]) = ([0-9./-]+[0-9]|[0-9])', p.solution):
      assert re.fullmatch('[0-9]+ [*/+-] [0-9]+', left.strip()), p.id
      a, sign, b = left.split()
      a, b = fractions.Fraction(a), fractions.Fraction(b)
      value = {'*': a * b, '+': a + b, '-': a - b, '/': a / b}[sign]
      assert value == fractions.Fraction(right), (p.id, left, right)
      checked += 1
  assert checked > 80


def _write(tmp_path, *lines):
  path = tmp_path / 'set.jsonl'
  path.write_text('\n'.join(
      line if isinstance(line, str) else json.dumps(line) for line in lines))
  return path


def test_a_file_needs_id_problem_and_answer_only(tmp_path):
  path = _write(
      tmp_path, {'id': 7, 'problem': 'P?', 'answer': 204}, '',
      {'id': 'b', 'problem': 'Q\u2028?', 'answer': 'x', 'rule': 'equal',
       'family': '', 'parameters': {'a': 3, 'b': '2.5'}, 'wrong': ['y'],
       'tolerance': None})
  first, second = datasets.load(path)
  assert first == datasets.Problem(id='7', problem='P?', answer='204')
  assert second.problem == 'Q\u2028?' and second.rule == 'equal'
  assert second.parameters == {'a': 3, 'b': '2.5'} and second.wrong == ('y',)


_GOOD = {'id': 'a', 'problem': 'P', 'answer': '1'}


@pytest.mark.parametrize(
    'line, message',
    [
        ('{"id":', 'line 2: no JSON'),
        ('[' * 100_000, 'line 2: no JSON'),
        ('["a"]', 'line 2: found list, expected an object'),
        ({'problem': 'P'}, 'line 2: has no id, answer, found problem'),
        ({}, 'line 2: has no id, problem, answer, found nothing'),
        (_GOOD | {'source': 1, 'anwser': 2}, "line 2: has unknown 'source',"
         " 'anwser', known are id, problem, answer, rule, tolerance"),
        (_GOOD | {'id': 'b', 'answer': '1/2'}, "line 2: problem 'b' has the"
         " answer '1/2' and the rule 'integer': rule integer cannot compare"),
        (_GOOD | {'answer': '1/2'}, 'set "rule" on its line to one that reads'
         ' it, of integer, rational, decimal'),
        (_GOOD | {'rule': 'magic'}, "rule 'magic' is unknown"),
        (_GOOD | {'rule': 'regex', 'answer': '('}, 'rule regex: pattern'),
        (_GOOD | {'rule': 'decimal', 'tolerance': '-1'}, 'rule decimal'),
        (_GOOD | {'id': ''}, 'line 2: has no id'),
        (_GOOD | {'answer': 0.5}, 'line 2: answer is 0.5, expected a string'),
        (_GOOD | {'answer': True}, 'line 2: answer is true, expected a str'),
        (_GOOD | {'wrong': 'x'}, 'line 2: wrong is "x", expected a list of st'),
        (_GOOD | {'parameters': {'a': [1]}}, 'expected an object of integers'),
        (_GOOD | {'schema': {'a': 1}}, 'expected a list of objects'),
        (_GOOD, "line 2: the id 'a' occurs twice"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
  path = _write(tmp_path, _GOOD, line)
  with pytest.raises(errors.UsageError, match=re.escape(message)) as e:
    datasets.load(path)
  assert '\n' not in str(e.value) and str(path) in str(e.value)


def test_what_is_not_there_is_named(tmp_path):
  with pytest.raises(errors.NotFoundError, match='no split .far., expected on'):
    datasets.load('shipped:far')
  with pytest.raises(errors.NotFoundError, match='"shipped:SPLIT" or the path'):
    datasets.load(tmp_path / 'none.jsonl')
  (tmp_path / 'binary').write_bytes(b'\xff\xfe\x00')
  with pytest.raises(errors.NotFoundError, match='cannot be read as a dataset'):
    datasets.load(tmp_path / 'binary')
  with pytest.raises(errors.NotFoundError, match='as programs') as caught:
    datasets.load_programs(tmp_path / 'none.jsonl')
  assert 'shipped' not in str(caught.value)
  with pytest.raises(errors.UsageError, match='no problem, expected one'):
    datasets.load(_write(tmp_path, '', ' '))
  with pytest.raises(errors.UsageError, match='no programs, expected one'):
    datasets.load_programs(_write(tmp_path))


def test_an_answer_of_every_rule_is_read(tmp_path):
  answers = {'integer': '1,000', 'rational': '1/2', 'decimal': '0.5',
             'choice': 'B', 'equal': 'any', 'regex': 'a+',
             'symbolic': 'x^2 + 1'}
  path = _write(tmp_path, *(
      _GOOD | {'id': rule, 'rule': rule, 'answer': answer}
      for rule, answer in answers.items()))
  assert [p.rule for p in datasets.load(path)] == list(answers)


def test_programs_are_joined_by_id_and_statement(tmp_path):
  problem = datasets.Problem(id='a', problem='What is 1+1?', answer='2')
  line = {'id': 'a', 'statement_sha256': problem.sha256,
          'programs': ['print(2)', 'print(1 + 1)'], 'solution': 'Add.',
          'rule': 'integer'}
  programs = datasets.load_programs(_write(tmp_path, line))
  assert list(programs) == ['a']
  joined = programs['a'].join(problem)
  assert joined.programs == ('print(2)', 'print(1 + 1)')
  assert (joined.solution, joined.answer) == ('Add.', '2')
  other = datasets.Problem(id='a', problem='What is 1+2?', answer='3')
  with pytest.raises(errors.UsageError, match=(
      f'sha256 is {problem.sha256}, expected {other.sha256}, the address of'
      '.*kvgraft library address')):
    programs['a'].join(other)
  with pytest.raises(errors.UsageError, match="to problem 'b'"):
    programs['a'].join(
        datasets.Problem(id='b', problem='What is 1+1?', answer='2'))
  with pytest.raises(errors.UsageError, match='has no programs'):
    datasets.load_programs(_write(tmp_path, line | {'programs': []}))
  with pytest.raises(errors.UsageError, match="unknown 'family', known are id"):
    datasets.load_programs(_write(tmp_path, line | {'family': 'f'}))
  fraction = datasets.Problem(
      id='a', problem='What is 1+1?', answer='4/2', rule='rational')
  with pytest.raises(errors.UsageError, match="'4/2' and the rule 'choice'"):
    datasets.Programs(**{**line, 'rule': 'choice'}).join(fraction)
  del line['rule']
  line['parameters'] = {'a': 1, 'b': '1'}
  joined = datasets.load_programs(_write(tmp_path, line))['a'].join(fraction)
  assert joined.parameters == {'a': 1, 'b': '1'} and joined.rule == 'rational'
