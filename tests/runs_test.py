"""Runs that are committed: they re-check, and the README says what they found.

The battery of changed bytes, lines and tails is run on the real ledgers.
"""

import json
import pathlib
import random
import subprocess
import sys

import pytest

import kvgraft_jax
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import recheck

_PACKAGE = pathlib.Path(kvgraft_jax.__file__).parent
_RUNS = sorted((_PACKAGE / 'data' / 'runs').iterdir())
_README = pathlib.Path(__file__).parent.parent / 'README.md'


@pytest.fixture(params=_RUNS, ids=lambda path: path.name)
def run(request):
  return request.param


def _bare(folder):
  done = subprocess.run(
      [sys.executable, '-I', '-S', recheck.__file__, str(folder)],
      capture_output=True, text=True, check=False)
  return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_bare_python_derives_everything_anew(run):
  code, found = _bare(run)
  assert code == 0 and found['ok'], found['problem_list']
  lines = ledger_lib.read(run)
  assert found['lines'] == len(lines) and lines[-1]['kind'] == 'end'
  for kind in ('compare', 'summary'):
    assert found['rederived'][kind] == sum(l['kind'] == kind for l in lines)
  assert all(l['body']['passed'] for l in lines if l['kind'] == 'verdict')


def test_the_report_is_of_this_ledger(run):
  page = (run / 'report.html').read_text(encoding='utf-8')
  assert ledger_lib.read(run)[-1]['hash'] in page


def test_the_readme_says_what_was_found(run):
  text = ' '.join(_README.read_text(encoding='utf-8').split())
  findings = [line['body']['text'] for line in ledger_lib.read(run)
              if line['body'].get('role') == 'finding']
  assert findings
  for finding in findings:
    assert ' '.join(finding.split()) in text


def _chain(ledger, head):
  """Returns the problems of the chain alone: what finds a changed byte."""
  lines, problems = recheck.read_lines(ledger)
  return problems or recheck.check_head(
      head, ledger.count(b'\n'), {lines[-1][1]['hash']})


def _found(folder, ledger, head):
  """Returns the problems of changed files, by the whole re-check."""
  (folder / 'ledger.jsonl').write_bytes(ledger)
  (folder / 'head.json').write_bytes(head)
  return recheck.check(folder).problems


@pytest.mark.slow  # A second for each of 100 changes, three for ten others.
def test_every_change_is_found_and_its_place_named(run, tmp_path):
  ledger, head = ((run / name).read_bytes()
                  for name in ('ledger.jsonl', 'head.json'))
  assert _found(tmp_path, ledger, head) == []
  rng, rows = random.Random(20261129), ledger.splitlines(keepends=True)
  for i in range(100):
    at = rng.randrange(len(ledger))
    changed = bytearray(ledger)
    changed[at] = rng.choice([b for b in range(256) if b != ledger[at]])
    number = ledger.count(b'\n', 0, at) + 1
    problems = _chain(bytes(changed), head)
    if not i % 25:
      assert _found(tmp_path, bytes(changed), head)[:len(problems)] == problems
    assert problems and problems[0].startswith(f'line {number}'), problems[:1]
  for at in (1, len(rows) // 2, len(rows) - 2):
    less = b''.join(rows[:at] + rows[at + 1:])
    swapped = b''.join(rows[:at] + [rows[at + 1], rows[at]] + rows[at + 2:])
    for changed in (less, swapped):
      problems = _found(tmp_path, changed, head)
      assert problems[0].startswith(f'line {at + 1} (n {at + 1})'), problems[:1]
  for cut in (b''.join(rows[:-1]), b''.join(rows[:-7])):
    problems = _found(tmp_path, cut, head)
    assert problems == [p for p in problems if 'the tail was cut' in p] != []
  problems = _found(tmp_path, ledger[:-5], head)
  assert problems[0].startswith(f'line {len(rows)}: ')
