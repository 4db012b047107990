"""The programs for AIME 2025: format, agreement, and no copied statement."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

_FILE = (pathlib.Path(__file__).parents[1] / 'configs'
         / 'aime2025_programs.jsonl')
_ENTRIES = [json.loads(line)
            for line in _FILE.read_text('utf-8').splitlines()]
_REFERENCE = os.environ.get('KVGRAFT_REFERENCE_DIR', '')


def _run(source):
  done = subprocess.run(
      [sys.executable, '-I', '-S', '-c', source], input='{}', timeout=60,
      capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


def _agreed(entry):
  first, second = (_run(source) for source in entry['programs'])
  assert first == second and len(first) == 1, (entry['id'], first, second)
  return first[0]


def _code(source):
  """Return the syntax tree without docstrings and comments."""
  tree = ast.parse(source)
  for node in ast.walk(tree):
    if (isinstance(node, (ast.Module, ast.FunctionDef))
        and ast.get_docstring(node)):
      node.body = node.body[1:]
  return ast.dump(tree)


def test_the_format():
  assert len(_ENTRIES) == 30
  ids = [entry['id'] for entry in _ENTRIES]
  assert ids == sorted(set(ids))
  assert len({entry['statement_sha256'] for entry in _ENTRIES}) == len(ids)
  for entry in _ENTRIES:
    assert list(entry) == [
        'id', 'statement_sha256', 'programs', 'solution', 'rule']
    assert re.fullmatch(r'2025-(I|II)-(0[1-9]|1[0-5])', entry['id'])
    assert re.fullmatch(r'[0-9a-f]{64}', entry['statement_sha256'])
    assert entry['rule'] == 'integer'
    assert len(entry['programs']) == 2


@pytest.mark.parametrize('entry', _ENTRIES, ids=lambda entry: entry['id'])
def test_two_methods_from_the_standard_library(entry):
  first, second = entry['programs']
  assert _code(first) != _code(second)
  names = [ast.get_docstring(ast.parse(source)) for source in (first, second)]
  assert all(names) and names[0] != names[1]
  for source in (first, second):
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.Import):
        assert {a.name for a in node.names} <= sys.stdlib_module_names
      elif isinstance(node, ast.ImportFrom):
        assert node.module in sys.stdlib_module_names


@pytest.mark.slow
@pytest.mark.parametrize('entry', _ENTRIES, ids=lambda entry: entry['id'])
def test_the_pair_agrees_on_the_answer_of_its_solution(entry):
  answer = _agreed(entry)
  assert 0 <= int(answer) <= 999
  assert re.findall(r'\d+', entry['solution'])[-1] == answer


if _REFERENCE and (pathlib.Path(_REFERENCE) / 'aime2025.jsonl').is_file():
  from kvgraft_jax import statements

  _PROBLEMS = {
      row['id']: row for row in map(
          json.loads,
          (pathlib.Path(_REFERENCE) / 'aime2025.jsonl').read_text(
              'utf-8').splitlines())}

  def _runs(text, pattern, length=8):
    words = re.findall(pattern, text.lower())
    return {tuple(words[i:i + length])
            for i in range(len(words) - length + 1)}

  def test_the_hashes_are_those_of_the_statements():
    assert {entry['id']: entry['statement_sha256'] for entry in _ENTRIES} == {
        key: statements.address(row['problem'])
        for key, row in _PROBLEMS.items()}

  # Words as written, and words whatever stands between them.
  @pytest.mark.parametrize('pattern', [r'\S+', r'\w+'])
  def test_no_statement_is_copied(pattern):
    stated = set()
    for row in _PROBLEMS.values():
      stated |= _runs(row['problem'], pattern)
    assert stated
    for entry in _ENTRIES:
      for text in (*entry['programs'], entry['solution']):
        assert not _runs(text, pattern) & stated, entry['id']

  @pytest.mark.slow
  @pytest.mark.parametrize('entry', _ENTRIES, ids=lambda entry: entry['id'])
  def test_the_agreed_answer_is_the_key(entry):
    assert _agreed(entry) == str(_PROBLEMS[entry['id']]['answer'])
