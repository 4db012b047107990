"""Checks: what passes is right, and nothing talks its way through."""

import dataclasses
import re

import pytest

from kvgraft_jax import checkers
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import sandbox

LIMITS = sandbox.Limits(cpu_s=5, wall_s=10)
FORMULA = '''import json, sys
n = json.load(sys.stdin)['n']
print('the sum:')
print(n * (n + 1) // 2)
print()
'''
LOOP = '''import json, sys
print(sum(range(json.loads(sys.stdin.read())['n'] + 1)))
'''
INSTANCES = [{'n': 5}, {'n': 100}, {'n': 0}]


def _refused(function, *args, **kwargs):
  """Tells, where programs cannot be run safely, whether that is said."""
  if not sandbox.unavailable():
    return False
  with pytest.raises(errors.SandboxError, match='--unsafe_exec'):
    function(*args, limits=LIMITS, **kwargs)
  return True


@pytest.mark.parametrize('rule, answer, expected, tolerance, result', [
    ('integer', '1,234', '1234', None, True),
    ('integer', '1234.0', '1234', None, False),
    ('integer', 'none', '1234', None, False),
    ('rational', '2/4', '0.5', None, True),
    ('decimal', '3.14', '3.1', '0.05', True),
    ('decimal', '3.16', '3.1', '0.05', False),
    ('decimal', '3.10', '3.1', None, True),
    ('choice', '(b)', 'B', None, True),
    ('equal', 'a', 'a', None, True),
    ('equal', 'a', 'A', None, False),
    ('regex', 'aaab', 'a+b', None, True),
    ('regex', 'aaab\n', 'a+b', None, False),
    ('regex', 'xaaab', 'a+b', None, False),
])
def test_same(rule, answer, expected, tolerance, result):
  assert checkers.same(rule, answer, expected, tolerance=tolerance) is result
  assert checkers.same(rule, None, expected, tolerance=tolerance) is False
  check = checkers.against_key(rule, answer, expected, tolerance=tolerance)
  assert check.passed is result and check.answer == answer
  assert check.evidence['sees_key'] is True
  assert bool(check.evidence['reason']) is not result
  hashing.canonical_json(check.evidence)


def test_a_pattern_that_takes_for_ever_ends(monkeypatch):
  monkeypatch.setattr(checkers, '_PATTERN_S', 0.5)
  assert not checkers.same('regex', 'a' * 40 + '!', '(a+)+b')


@pytest.mark.parametrize('rule, expected, tolerance', [
    ('integer', 'x', None), ('regex', '(', None),
    ('regex', 'a{99999999999}', None), ('regex', '(' * 3000 + ')' * 3000, None),
    ('decimal', '1', '-1'),
    ('decimal', '1', 'x'), ('choice', '5', None), ('magic', '1', None)])
def test_a_key_that_cannot_be_read_is_refused(rule, expected, tolerance):
  with pytest.raises(errors.UsageError, match=rule):
    checkers.same(rule, '1', expected, tolerance=tolerance)


@pytest.mark.parametrize('answer, expected, result', [
    ('(x + 1)^2', 'x^2 + 2x + 1', True),
    (r'\frac{1}{2}', '0.5', True),
    ('x', 'y', False),
    ('__import__("os").system("id")', 'x', False),
    ('((((', 'x', False),
])
def test_symbolic(answer, expected, result):
  pytest.importorskip('sympy')
  if sandbox.unavailable():
    pytest.raises(errors.SandboxError, checkers.same, 'symbolic', answer,
                  expected)
    return
  assert checkers.same('symbolic', answer, expected) is result


def test_a_key_that_is_no_expression_is_refused():
  pytest.importorskip('sympy')
  with pytest.raises((errors.UsageError, errors.SandboxError)):
    checkers.same('symbolic', 'x', '((((')


# Programs.


def test_two_programs_agree():
  if _refused(checkers.programs_agree, [FORMULA, LOOP], INSTANCES):
    return
  check = checkers.programs_agree([FORMULA, LOOP], INSTANCES, limits=LIMITS)
  assert check.passed and check.answer == '15', check
  assert check.evidence['answers'] == [['15'] * 2, ['5050'] * 2, ['0'] * 2]
  assert check.evidence['sees_key'] is False
  assert check.evidence['sandboxed'] is True
  hashing.canonical_json(check.evidence)
  again = checkers.programs_agree([FORMULA, LOOP], INSTANCES, limits=LIMITS)
  assert again == check
  for other in (
      dict(programs=[LOOP, FORMULA]), dict(instances=INSTANCES[:2]),
      dict(rule='rational'),
      dict(limits=dataclasses.replace(LIMITS, cpu_s=4))):
    args = {'programs': [FORMULA, LOOP], 'instances': INSTANCES,
            'limits': LIMITS, **other}
    assert checkers.programs_agree(**args).ran != check.ran


@pytest.mark.parametrize('second, reason', [
    (LOOP.replace('+ 1', '+ 2'), "says '21', program 0 '15' (instance 0)"),
    ('print(15)', "says '15', program 0 '5050' (instance 1)"),
    ('print(15.0)', "do not agree: program 1 says '15.0'"),
    ('print("1" * 99)', "says '" + '1' * 77 + "...', program 0"),
    ('', 'it printed nothing'),
    ('import json, sys\nprint(15); sys.exit(1)', 'exit code 1'),
    ('print(15)\nwhile True: pass', 'no answer: it ran longer than 1 s of CPU'),
    ('1 / 0', 'ZeroDivisionError'),
    ('this is no Python', 'program 1 is no Python'),
    (FORMULA, 'not independent'),
    ('# Another.\n' + re.sub(r'\bn\b(?!\'|")', 'm', FORMULA).replace(
        '(m + 1)', '( m+1 )'), 'not independent'),
    ('"""Text."""\nimport json as j, sys as s\n' + FORMULA.partition('\n')[2]
     .replace('json.', 'j.').replace('sys.', 's.'), 'not independent'),
])
def test_programs_that_do_not_agree(second, reason):
  args = [FORMULA, second], INSTANCES
  if 'Python' in reason or 'independent' in reason or not _refused(
      checkers.programs_agree, *args):
    check = checkers.programs_agree(
        *args, limits=dataclasses.replace(LIMITS, cpu_s=1))
    assert not check.passed and check.answer is None
    assert reason in check.evidence['reason']


@pytest.mark.parametrize('programs, instances, rule', [
    ([LOOP], INSTANCES, 'integer'), ([LOOP, FORMULA], [], 'integer'),
    ([LOOP, FORMULA], INSTANCES, 'regex'), ([LOOP, FORMULA], INSTANCES, 'x')])
def test_a_request_that_checks_nothing_is_refused(programs, instances, rule):
  with pytest.raises(errors.UsageError):
    checkers.programs_agree(programs, instances, rule)


@pytest.mark.parametrize('limit, source, reason', [
    ({'wall_s': 1}, 'import time; time.sleep(9)', '1 s of wall time'),
    ({'output_bytes': 1024}, 'print("x" * 99999)', 'more than 1 KiB')])
def test_a_limit_that_was_broken_is_said(limit, source, reason):
  args = [LOOP, source], INSTANCES
  if not _refused(checkers.programs_agree, *args):
    check = checkers.programs_agree(
        *args, limits=dataclasses.replace(LIMITS, **limit))
    assert reason in check.evidence['reason']


def test_a_program_reads_numbers_and_texts():
  source = ('import json, sys\np = json.load(sys.stdin)\n'
            'print(p["a"] + 1, p["b"])')
  parameters = {'a': 10 ** 40, 'b': '1/3 \u00e9'}
  if _refused(checkers.run_program, source, parameters):
    return
  answer, result = checkers.run_program(source, parameters, limits=LIMITS)
  assert answer == f'{10 ** 40 + 1} 1/3 \u00e9' and result.ok


# Unit tests.

TESTS = '''
assert twice(2) == 4
assert twice('a') == 'aa', 'texts'
for n in range(3):
  assert twice([n]) == [n, n] and NAME == 'twice'
try:
  twice(None)
except TypeError:
  pass
else:
  raise AssertionError('no error')
assert abs(-1) == 1
'''
GOOD = '''
import sys
NAME = 'twice'
print('noise')
def twice(x):
  print('more noise', file=sys.stderr)
  return x + x if isinstance(x, str) else x * 2
'''


def test_code_that_is_right_passes():
  if _refused(checkers.unit_tests, GOOD, TESTS):
    return
  check = checkers.unit_tests(GOOD, TESTS, limits=LIMITS)
  assert check.passed and check.evidence['asserts'] == 6, check
  assert check.evidence['sandboxed'] is True
  hashing.canonical_json(check.evidence)
  again = checkers.unit_tests(GOOD, TESTS, limits=LIMITS)
  assert again.ran == check.ran
  assert checkers.unit_tests(GOOD + '#', TESTS, limits=LIMITS).ran != check.ran


@pytest.mark.parametrize('code', [
    'def twice(x): return x + 1',
    '',
    'not Python',
    'while True: pass',
    # Ends early, and says that all is well.
    'print("ok"); print("passed"); raise SystemExit',
    'import os; print("ok"); os._exit(0)',
    'def twice(x):\n  import os; os._exit(0)',
    'import os, sys\nfor fd in range(64):\n  try: os.write(fd, b"ok 1\\n")\n'
    '  except OSError: pass\nos._exit(0)',
    # Claims to be equal to everything.
    'class Yes:\n  def __eq__(self, other): return True\n'
    '  def __bool__(self): return True\n'
    'def twice(x): return Yes()',
    'class Yes(int):\n  def __eq__(self, other): return True\n'
    'def twice(x): return Yes(1)',
    # Changes the tests, or what they use.
    'open("tests.py", "w").write("assert True")\n'
    'open("main.py", "w").write("print(1)")\n'
    'def twice(x): return 0',
    'import builtins\nbuiltins.AssertionError = Exception\n'
    'def abs(x): return 0\ndef range(x): return []\n'
    'def twice(x): return 0',
    # Ends the tests' process.
    'import os, signal; os.kill(os.getppid(), signal.SIGKILL)',
    'import os, signal\ndef twice(x): os.kill(-1, signal.SIGKILL)',
    # Answers for itself in the place of the protocol.
    'import sys\nsys.modules["__main__"].say("value", "4")\n'
    'def twice(x): return 0',
    'def twice(x): raise SystemExit(0)',
])
def test_code_that_is_wrong_does_not_pass(code):
  limits = dataclasses.replace(LIMITS, cpu_s=1, wall_s=3)
  if _refused(checkers.unit_tests, code, TESTS):
    return
  check = checkers.unit_tests(code, TESTS, limits=limits)
  assert not check.passed and check.evidence['reason'], check


def test_tests_that_reach_no_assert_do_not_pass():
  tests = 'def unused():\n  assert twice(2) == 4'
  if _refused(checkers.unit_tests, GOOD, tests):
    return
  check = checkers.unit_tests(GOOD, tests, limits=LIMITS)
  assert not check.passed
  assert check.evidence['reason'] == 'no assert was reached'


@pytest.mark.parametrize('tests', ['twice(2) == 4', 'not Python'])
def test_tests_that_assert_nothing_are_refused(tests):
  with pytest.raises(errors.UsageError, match='tests'):
    checkers.unit_tests(GOOD, tests)
