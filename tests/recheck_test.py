import ast
import fractions
import hashlib
import json
import math
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys

import numpy as np
import pytest

from kvgraft_jax import hashing
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import recheck

FILE = pathlib.Path(recheck.__file__)
RUN = ('run', {
    'format': 1, 'run': 'test', 'command': ['test'], 'config': {}, 'code': {},
    'model': {}, 'created': '2026-11-29T20:00:00Z'})
TEXT = 'Flood tide at 04:10, ebb at 10:25, é.\n'


def logits(name, rows, argmax):
  return 'logits', {
      'id': name, 'profile': 'p', 'group': {}, 'rows': list(range(len(rows))),
      'sha256': rows, 'argmax': argmax, 'tokens_computed': 3,
      'tokens_restored': 0}


def compare(**changes):
  return 'compare', {
      'id': 'a-b', 'a': 'a', 'b': 'b', 'group': {'case': 'base', 'm': 8},
      'rows': 3, 'equal': 1, 'argmax_agree': 2, 'kl': ['0.0', '0.25', '1e-07'],
      'max_abs': ['0.0', '0.5', '0.125'], **changes}


def score(name, rule, answer, expected, value, **extra):
  return 'score', {'id': name, 'rule': rule, 'answer': answer,
                   'expected': expected, 'group': {}, 'value': value, **extra}


def summary(name, kind, field, rule, value, **where):
  return 'summary', {
      'id': name, 'over': {'kind': kind, 'where': where}, 'field': field,
      'rule': rule, 'value': value}


def verdict(name, passed, *because):
  return 'verdict', {
      'id': name, 'checker': 'c', 'ran': {}, 'passed': passed, 'evidence': {},
      'because': [dict(zip(('summary', 'op', 'value'), b)) for b in because]}


BODIES = [
    RUN,
    ('input', {
        'id': 'text', 'text': TEXT, 'token_ids': [2, 70000, 5], 'tokens': 3,
        'sha256': hashlib.sha256(TEXT.encode()).hexdigest(),
        'tokens_sha256': hashing.tokens_sha256([2, 70000, 5])}),
    logits('a', ['11', '22', '33'], [1, 2, 3]),
    logits('b', ['11', '23', '34'], [1, 2, 4]),
    compare(),
    score('s0', 'equal', 'ebb', 'ebb', True),
    score('s1', 'integer', ' 1,024', '1024', True),
    score('s2', 'decimal', '3.1', '3.14', False, tolerance='0.01'),
    summary('right', 'score', 'value', 'count_true', 2),
    summary('kl', 'compare', 'kl', 'median', '1e-07', **{'group.case': 'base'}),
    summary('all', 'score', '', 'count', 3),
    verdict('good', True, ('right', '>=', 2), ('kl', '<', '0.001'),
            ('all', '==', '3.0')),
    verdict('unfounded', True),
    ('energy', {'anything': [None, True, 'x']}),
    ('end', {'status': 'done'}),
]


def forge(folder, bodies):
  """Writes a ledger without the project's writer, whatever the bodies say."""
  folder.mkdir(exist_ok=True)
  prev, rows = '0' * 64, []
  for n, (kind, body) in enumerate(bodies):
    line = {'body': body, 'kind': kind, 'n': n, 'prev': prev}
    prev = hashlib.sha256(dump(line)).hexdigest()
    rows.append(dump(line | {'hash': prev}) + b'\n')
  (folder / 'ledger.jsonl').write_bytes(b''.join(rows))
  (folder / 'head.json').write_bytes(
      dump({'format': 1, 'head': prev, 'lines': len(rows)}) + b'\n')
  return folder


def dump(value):
  return json.dumps(value, sort_keys=True, ensure_ascii=False,
                    separators=(',', ':')).encode()


def problems(folder, head=None):
  found = recheck.check(folder, head).problems
  assert all('\n' not in p and len(p) < 700 and p.isascii() for p in found)
  return found


@pytest.fixture(name='run')
def run_fixture(tmp_path):
  return forge(tmp_path / 'run', BODIES)


def test_a_whole_ledger_agrees(run):
  result = recheck.check(run)
  assert result.problems == []
  assert result.lines == len(BODIES)
  assert result.head == json.loads((run / 'head.json').read_text())['head']
  assert result.rederived == {
      'input': 1, 'compare': 1, 'score': 3, 'summary': 3, 'verdict': 1}
  assert (result.not_rederivable, result.texts) == (['unfounded'], 0)
  assert problems(run, result.head) == []


def test_the_writer_makes_the_same_bytes(run, tmp_path):
  with ledger_lib.Ledger(tmp_path / 'other', create=True) as ledger:
    for kind, body in BODIES:
      ledger.append(kind, body)
  for name in ('ledger.jsonl', 'head.json'):
    assert (tmp_path / 'other' / name).read_bytes() == (run / name).read_bytes()


def test_the_hash_of_a_line_is_fixed():
  line = {'body': {'text': 'é 1e-07'}, 'hash': 'x', 'kind': 'note', 'n': 3,
          'prev': 'ab'}
  # printf '%s' '{"body":{"text":"é 1e-07"},...,"prev":"ab"}' | sha256sum
  assert recheck.line_hash(line) == (
      '8ec23defa1da243168de460b6d6aefea36394ddac9337c71a9a25df46063a187')


def random_value(rng, depth=0):
  kind = rng.randrange(8 if depth < 4 else 6)
  if kind == 0:
    return rng.choice([None, True, False])
  if kind in (1, 2):
    return rng.randrange(-10 ** rng.randrange(1, 40), 10 ** 20)
  if kind < 6:
    return ''.join(chr(rng.choice([
        rng.randrange(128), rng.randrange(0xd800),
        rng.randrange(0xe000, 0x11000), 0x1f600]))
                   for _ in range(rng.randrange(12)))
  values = [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
  return values if kind == 6 else {
      f'{rng.random()}{i}é': v for i, v in enumerate(values)}


def test_canonical_is_the_package_s_form_and_comes_back():
  rng = random.Random(1)
  for _ in range(500):
    value = random_value(rng)
    data = recheck.canonical(value)
    assert data == hashing.canonical_json(value)
    assert recheck.parse(data) == value
  for bad in (1.0, {'a': [math.nan]}, {1: 2}, b'x', {'a': {2.5}}, '\ud800'):
    with pytest.raises(ValueError):
      recheck.canonical(bad)


# Damage, found and placed.


def line_at(data, offset):
  """Returns the number from 1 of the line that holds the byte at `offset`."""
  return data.count(b'\n', 0, offset) + 1


def test_one_changed_byte_anywhere_is_found_and_its_line_named(run):
  rng = random.Random(2)
  for name, times in (('ledger.jsonl', 100), ('head.json', 100)):
    path = run / name
    whole = path.read_bytes()
    for _ in range(times):
      at = rng.randrange(len(whole))
      new = rng.choice([b for b in range(256) if b != whole[at]])
      path.write_bytes(whole[:at] + bytes([new]) + whole[at + 1:])
      found = problems(run)
      place = 'head.json:' if name == 'head.json' else (
          f'line {line_at(whole, at)}')
      assert found and re_place(found[0]) == place, (at, new, found)
    path.write_bytes(whole)
  assert problems(run) == []


def re_place(problem):
  return problem.split(' (')[0] if problem.startswith('line') and (
      ' (n' in problem[:16]) else problem.split(':')[0] + (
          ':' if problem.startswith('head') else '')


def edited(run, change):
  """Changes the list of rows; returns the problems."""
  path = run / 'ledger.jsonl'
  rows = path.read_bytes().splitlines(True)
  change(rows)
  path.write_bytes(b''.join(rows))
  return problems(run)


def test_removed_swapped_duplicated_and_inserted_lines(tmp_path):
  for i in range(len(BODIES)):
    run = forge(tmp_path / f'removed{i}', BODIES)
    found = edited(run, lambda rows, i=i: rows.pop(i))
    if i < len(BODIES) - 1:
      assert found[0].startswith(f'line {i + 1} (n {i + 1})')
      assert f'n is {i + 1}, expected {i}' in found[0]
    assert any(p.startswith('head.json: says 15 lines, ledger.jsonl has 14: the'
                            ' tail was cut') for p in found)
  for i in range(len(BODIES) - 1):
    def swap(rows, i=i):
      rows[i], rows[i + 1] = rows[i + 1], rows[i]
    found = edited(forge(tmp_path / f'swapped{i}', BODIES), swap)
    assert found[0].startswith(f'line {i + 1} (n {i + 1})')
    found = edited(forge(tmp_path / f'twice{i}', BODIES),
                   lambda rows, i=i: rows.insert(i, rows[i]))
    assert found[0].startswith(f'line {i + 2} (n {i})')

  # A line that is consistent with the one in front of it.
  other = forge(tmp_path / 'other', [*BODIES[:6], BODIES[-1]])
  row = (other / 'ledger.jsonl').read_bytes().splitlines(True)[6]
  found = edited(forge(tmp_path / 'inserted', BODIES),
                 lambda rows: rows.insert(6, row))
  assert found[0] == ('line 8 (n 6), score "s1": n is 6, expected 7: lines were'
                      ' removed, inserted or swapped here; prev is not the hash'
                      ' of the line in front')
  found = edited(forge(tmp_path / 'replaced', BODIES),
                 lambda rows: rows.__setitem__(6, row))
  assert found[0] == ('line 8 (n 7), score "s2": prev is not the hash of the'
                      ' line in front')


def test_a_cut_tail(run):
  path = run / 'ledger.jsonl'
  whole = path.read_bytes()
  rows = whole.splitlines(True)
  for keep in range(1, len(rows)):
    path.write_bytes(b''.join(rows[:keep]))
    assert problems(run)[0].startswith(
        f'head.json: says 15 lines, ledger.jsonl has {keep}: the tail was cut')
  for cut in (1, 2, len(rows[-1]) - 1, len(rows[-1]) + 1, len(whole) - 1):
    path.write_bytes(whole[:-cut])
    line = line_at(whole, len(whole) - cut)
    found = problems(run)
    assert found[0].startswith(f'line {line}') and 'it was cut' in found[0]
  path.write_bytes(b'')
  assert problems(run)[0] == (
      'ledger.jsonl: is empty, expected at least one line')


def test_a_consistent_rewrite_is_found_by_the_kept_head_only(run, tmp_path):
  kept = recheck.check(run).head
  bodies = list(BODIES)
  bodies[5] = score('s0', 'equal', 'flood', 'flood', True)
  other = forge(tmp_path / 'other', bodies)
  assert problems(other) == []
  found, = problems(other, kept)
  assert 'another history' in found and kept in found
  grown = forge(tmp_path / 'grown', [*BODIES, ('note', {'text': 'later'})])
  found, = problems(grown, kept)
  assert 'that of line 15: lines were added behind it' in found


def row_of(body, **changes):
  line = {'body': body, 'kind': 'note', 'n': 1, 'prev': '0' * 64} | changes
  return dump(line | {'hash': recheck.line_hash(line)})


BAD_ROWS = {
    'not UTF-8': (b'{"body":{"a":"\xff"}}', 'no UTF-8 at byte 14'),
    'huge integer': (b'{"body":{"a":' + b'9' * 5000 + b'}}',
                     'integer of 5000 characters, at most 4300'),
    'huge n': (b'{"body":{},"hash":"x","kind":"note","n":' + b'9' * 4299
               + b',"prev":"y"}', 'expected a small number'),
    'NaN': (b'{"body":{"a":NaN}}', 'number NaN'),
    'infinity': (b'[-Infinity]', 'number -Infinity'),
    'float': (b'{"body":{"a":1.5}}', 'number 1.5, expected an integer or'),
    'exponent': (b'[1e999999999]', 'number 1e999999999'),
    'twice': (b'{"n":1,"n":2}', 'key "n" occurs twice'),
    'deep': (b'[' * 200_000 + b']' * 200_000, 'nested deeper than 100'),
    'deep objects': (b'{"a":' * 90_000 + b'1' + b'}' * 90_000,
                     'nested deeper than 100'),
    'a little deep': (b'[' * 102 + b']' * 102, 'nested deeper than 100'),
    'surrogate': (b'["\\ud800"]', 'surrogates not allowed'),
    'spaces': (b'{"a": 1}', 'not canonical JSON'),
    'order': (b'{"b":1,"a":1}', 'not canonical JSON'),
    'escapes': (b'"\\u0041"', 'not canonical JSON'),
    'minus zero': (b'[-0]', 'not canonical JSON'),
    'mark': (b'\xef\xbb\xbf{}', 'no JSON at character 0'),
    'zeros': (bytes(300), 'no JSON at character 0'),
    'empty line': (b'', 'no JSON at character 0'),
    'list': (b'[1]', 'expected an object with the keys'),
    'number': (b'7', 'expected an object with the keys'),
    'null': (b'null', 'expected an object with the keys'),
    'missing key': (b'{"body":{}}', 'expected an object with the keys'),
    'body': (row_of([]), 'body is [], expected an object'),
    'kind': (row_of({}, kind=['x']), 'kind is ["x"], expected a string'),
    'kind that looks like another': (
        row_of({}, kind='\u0441ompare'), 'kind is "\\u0441ompare", expected'
        ' lower-case letters'),
    'n is true': (row_of({}, n=True), 'n is true, expected an integer'),
    'negative n': (row_of({}, n=-1), 'n is -1, expected a small number'),
    'prev': (row_of({}, prev=None), 'prev is null, expected a string'),
}


@pytest.mark.parametrize('name', BAD_ROWS)
def test_a_line_of_any_bytes(run, name):
  row, message = BAD_ROWS[name]
  for at in (0, 3, len(BODIES) - 1):
    forge(run, BODIES)
    found = edited(run, lambda rows, at=at: rows.__setitem__(at, row + b'\n'))
    assert found[0].startswith(f'line {at + 1}: ') and message in found[0]
    # The next line cannot be compared with what is unreadable.
    assert not any(
        p.startswith(f'line {at + 2}') and 'prev' in p for p in found)


@pytest.mark.parametrize('data, message', [
    (b'', 'the line feed at its end is missing'),
    (b'\n', 'no JSON'),
    (b'[]\n', 'expected an object with format, head and lines'),
    (b'{"format":1,"head":"x","lines":"15"}\n', 'expected an integer as lines'),
    (b'{"format":1,"head":{},"lines":15}\n', 'a string as head'),
    (b'{"format":true,"head":"x","lines":15}\n', 'format is true, expected 1'),
    (b'{"format":2,"head":"x","lines":15}\n', 'format is 2, expected 1'),
    (b'{"format":1,"head":"x","lines":15}\n', 'head is "x", the last line'),
    (b'{"format":1,"head":"x","lines":14}\n', 'lines were added behind it'),
    (b'{"format":1,"head":"x","lines":' + b'9' * 4300 + b'}\n', 'tail was cut'),
    (b'{"format":1,"head":"x","lines":' + b'9' * 4301 + b'}\n', 'integer of'),
    (b'{"format":1, "head":"x","lines":15}\n', 'not canonical'),
    (b'\xff\n', 'no UTF-8'),
    (b'[' * 100_000 + b'\n', 'nested deeper'),
])
def test_a_head_of_any_bytes(run, data, message):
  (run / 'head.json').write_bytes(data)
  found, = problems(run)
  assert found.startswith('head.json: ') and message in found


def test_files_that_are_none(run, tmp_path):
  found, = problems(tmp_path / 'none')
  assert found.endswith('none": is no directory')
  for name in ('head.json', 'ledger.jsonl'):
    forge(run, BODIES)
    (run / name).unlink()
    assert problems(run) == [
        f'{name}: cannot be read: No such file or directory']
    os.mkfifo(run / name)
    assert problems(run) == [f'{name}: is no regular file']
    (run / name).unlink()
    (run / name).mkdir()
    assert problems(run) == [f'{name}: is no regular file']
    (run / name).rmdir()
    (run / name).symlink_to('/dev/zero')
    assert problems(run) == [f'{name}: is no regular file']
    (run / name).unlink()
  assert problems('a\0b')[0].endswith('is no directory')


# What lines say.


def replaced(tmp_path, *lines):
  """Returns the problems of a forged ledger: the run, then `lines`."""
  return problems(forge(tmp_path / 'x', [RUN, *lines]))


A, B = BODIES[2], BODIES[3]
REGISTRATION = hashlib.sha256(b'{"format":1}\n').hexdigest()


@pytest.mark.parametrize('lines, place, message', [
    ([BODIES[1][:1] + (BODIES[1][1] | {'text': TEXT[:-1]},)], 2,
     'input "text": sha256 is "'),
    ([BODIES[1][:1] + (BODIES[1][1] | {'token_ids': [2, 70001, 5]},)], 2,
     'tokens_sha256 is "'),
    ([BODIES[1][:1] + (BODIES[1][1] | {'tokens': 4},)], 2,
     'tokens is 4, re-derived 3'),
    ([BODIES[1][:1] + (BODIES[1][1] | {'token_ids': [True, 2 ** 31, 'x']},)], 2,
     'no list of 32-bit integers'),
    ([BODIES[1][:1] + (BODIES[1][1] | {'token_ids': {}},)], 2,
     'no list of 32-bit integers'),
    ([A, B, compare(equal=2)], 4, 'compare "a-b": equal is 2, re-derived 1'),
    ([A, B, compare(argmax_agree=3)], 4, 'argmax_agree is 3, re-derived 2'),
    ([A, B, compare(rows=4)], 4, 'rows is 4, re-derived 3'),
    ([A, B, compare(max_abs=['0.5', '0.5', '0.5'])], 4,
     'row 0: hashes are equal, but max_abs is "0.5"'),
    ([A, B, compare(kl=['1e-09', '0.25', '1e-07'])], 4,
     'row 0: hashes are equal, but max_abs is "0.0" and kl "1e-09"'),
    ([A, B, compare(max_abs=['0.0', '0.0', '0.125'])], 4,
     'row 1: hashes differ, but max_abs is "0.0"'),
    ([A, B, compare(kl=['0.0', 'nan', '1e-07'])], 4, '"nan" is no number'),
    ([A, B, compare(kl=['0.0', [], '1e-07'])], 4, '[] is no number'),
    ([A, B, compare(kl=['0.0'])], 4, 'differ in their number of rows'),
    ([A, B, compare(a='c')], 4, 'there is no logits line "c" in front'),
    ([A, compare(), B], 3, 'there is no logits line "b" in front'),
    ([A, B, compare(a=['a'])], 4, 'a is ["a"], expected a string'),
    ([('logits', {'id': 'a'}), B, compare()], 4,
     'logits line "a" is malformed'),
    ([logits('a', ['11'], [1, 2])], 2, 'differ in length'),
    ([logits('a', ['11', None], [1, 2])], 2, 'sha256 has null, expected a'),
    ([logits('a', ['11'], ['1'])], 2, 'argmax has "1", expected an integer'),
    ([A[:1] + (A[1] | {'rows': [0, 1, 1]},)], 2, 'rows do not ascend'),
    ([A[:1] + (A[1] | {'tokens_computed': -3},)], 2,
     'tokens_computed is -3, expected 0 or more'),
    ([A, B, compare(b='a')], 4, 'a and b are one logits line, "a"'),
    ([A, B[:1] + (B[1] | {'rows': [5, 6, 7]},), compare()], 4,
     'a and b have rows of other positions'),
    ([A, B, compare(kl=['0.0', '-0.25', '1e-07'])], 4,
     'row 1: kl "-0.25" or max_abs "0.5" is negative'),
    ([A, B, compare(max_abs=['0.0', '-0.5', '0.125'])], 4,
     'row 1: kl "0.25" or max_abs "-0.5" is negative'),
    ([A, A], 3, 'its id occurs twice'),
    ([score('s', 'equal', 'a', 'b', True)], 2,
     'score "s": value is true, re-derived false'),
    ([score('s', 'guess', 'a', 'b', True)], 2,
     'cannot be re-derived: rule "guess" is unknown'),
    ([score('s', 'equal', 'a', 7, True)], 2, 'cannot be re-derived: 7 is no'),
    ([score('s', 'equal', 'a', 'a', 1)], 2, 'value is 1, expected true or'),
    ([score('s', 'equal', 'a', 'a', True, got=1)], None, ''),
    ([('score', {'id': 's', 'rule': 'equal', 'group': {}, 'value': True})], 2,
     'answer is missing'),
    ([('score', {'id': ['s'], 'rule': {}})], 2, 'id is ["s"], expected'),
    ([score('s', 'rational', '1/2', '1/0', False)], 2, 'divides by zero'),
    ([score('s', 'decimal', '1', '1', True)], 2, 'null is no number'),
    ([score('s', 'decimal', '1', '1', True, tolerance='-1')], 2, 'negative'),
    ([score('s', 'decimal', '1', '1e999999999', True, tolerance='1')], 2,
     'beyond 1e1000'),
    ([score('s', 'sha256', 'x', 'sha256:abc', True)], 2, 'with 64 hex digits'),
    ([summary('s', 'score', '', 'count', 1)], 2, 'value is 1, re-derived 0'),
    ([summary('s', 'score', '', 'count', False)], 2, 're-derived 0'),
    ([summary('s', 'score', '', 'average', 1)], 2, 'rule "average" is unknown'),
    ([summary('s', 'score', '', 'mean', '0.0')], 2, 'nothing is selected'),
    ([BODIES[5], summary('s', 'score', 'value', 'sum', 1)], 3,
     'true is no number'),
    ([BODIES[5], summary('s', 'score', 'rule', 'count_true', 1)], 3,
     '"equal" is neither true nor false'),
    ([BODIES[5], summary('s', 'score', 'group.m', 'count', 1)], 3,
     'n 1 has no field "group.m"'),
    ([('summary', {'id': 's', 'over': {'kind': 1}, 'field': '',
                   'rule': 'count', 'value': 0})], 2, 'over is not'),
    ([('summary', {'id': 's', 'over': {'kind': 'x', 'where': {'a': []}},
                   'field': '', 'rule': 'count', 'value': 0})], 2,
     'where compares'),
    ([('summary', {'id': 's', 'over': {'kind': 'x', 'were': {}},
                   'field': '', 'rule': 'count', 'value': 0})], 2,
     'over is not'),
    ([('summary', {'id': 's', 'over': {'kind': 'x'}, 'field': '',
                   'rule': 'count'})], 2, 'value is null, re-derived 0'),
    ([('x', {'v': 10 ** 400}), summary('s', 'x', 'v', 'mean', '1.0')], 3,
     'beyond float64'),
    ([('x', {'v': '1e999999999'}), summary('s', 'x', 'v', 'max', '1.0')], 3,
     'beyond 1e1000'),
    ([summary('s', 'x', '', 'count', 0), verdict('v', True, ('s', '>', 0))], 3,
     'verdict "v": passed is true, re-derived false'),
    ([verdict('v', True, ('s', '>', 0))], 2,
     'there is no summary "s" in front'),
    ([summary('s', 'x', '', 'count', 0), verdict('v', True, ('s', '~', 0))], 3,
     'op "~" is unknown'),
    ([summary('s', 'x', '', 'count', 0), verdict('v', True, ('s', '<', 'a'))],
     3, '"a" is no number'),
    ([('registration', {'sha256': REGISTRATION}),
      ('expected', {'id': 'replay', 'registration': {'format': 1}})], None,
     ''),
    ([('registration', {'sha256': REGISTRATION}),
      ('expected', {'id': 'replay', 'registration': {'format': 2}})], 3,
     'expected "replay": its SHA-256 is '),
    ([('expected', {'id': 'replay', 'registration': {'format': 1}})], 2,
     f'its SHA-256 is {REGISTRATION}, the registration lines in front name []'),
    ([('replayed', {'id': 'logits', 'group': {}, 'equal': 3, 'differing': -1,
                    'missing': 1})], 2, 'differing is -1, expected 0 or more'),
    ([verdict('v', True, ('s', []))], 2, 'because has'),
    ([verdict('v', True, (['s'], '==', 0))], 2, 'because has'),
    ([('end', {})], 2, 'status is missing'),
    ([('resources', {'id': 'r', 'group': {}, 'seconds': 1, 'energy': {}})], 2,
     'seconds is 1, expected a string'),
])
def test_what_a_line_says_wrongly(tmp_path, lines, place, message):
  found = replaced(tmp_path, *lines)
  if place is None:
    assert found == []
    return
  assert any(p.startswith(f'line {place} (n {place - 1})') and message in p
             for p in found), found


def test_a_ledger_begins_with_its_run(tmp_path):
  for first in (BODIES[-1], ('run', RUN[1] | {'format': 2}),
                ('run', RUN[1] | {'format': [1]})):
    assert 'expected kind "run" of format 1' in problems(
        forge(tmp_path / 'x', [first, *BODIES[1:]]))[0]


def random_body(rng):
  """Returns a body with fields of the kinds, their values anything."""
  names = sorted({n for fields in recheck._FIELDS.values() for n in fields})
  return {name: rng.choice([
      random_value(rng), [], {}, 'a', '1/0', [['x']], {'summary': 's'}, 0, True,
      [{'summary': [], 'op': {}, 'value': None}], '1e99999', 'equal', 'sum',
      {'kind': 'score', 'where': {'': ''}}])
          for name in [*names, 'answer', 'expected', 'tolerance', 'text']
          if rng.random() < 0.8}


def test_nothing_in_a_body_raises(tmp_path):
  rng = random.Random(3)
  kinds = sorted(recheck._FIELDS)
  found = replaced(tmp_path, *[
      (rng.choice(kinds), random_body(rng)) for _ in range(300)])
  assert len(found) > 300
  # Fields of the right types, each in turn something else.
  seen = set()
  for at, (kind, body) in enumerate(BODIES):
    for name in body:
      for value in (None, 1, [[]], {'a': {}}, '1e999999999'):
        bodies = list(BODIES)
        bodies[at] = kind, body | {name: value}
        seen.update(problems(forge(tmp_path / 'y', bodies)))
  assert len(seen) > 100


# Rules against independent ones.


def test_scores_against_independent_ones():
  rng = random.Random(4)
  integer, rational = recheck.SCORES['integer'], recheck.SCORES['rational']
  decimal = recheck.SCORES['decimal']
  seen = {True: 0, False: 0}
  for _ in range(2000):
    a, b = rng.randrange(-2000, 2000), rng.randrange(1, 30)
    c = a if rng.random() < 0.5 else rng.randrange(-2000, 2000)
    assert integer(f' {a:,}\n', f'{c:+d}') == (a == c)
    assert integer(a, str(c)) == (a == c)
    k = rng.randrange(1, 5)
    d = rng.choice([b * k, b, 7])
    same = fractions.Fraction(a, b) == fractions.Fraction(c * k, d)
    assert rational(f'{a} / {b}', f'{c * k}/{d}') == same
    seen[same] += 1
    x, y, t = (rng.randrange(-500, 500) for _ in range(3))
    near = abs(x - y) <= abs(t)
    texts = [f'{v / 100:.2f}' for v in (x, y, abs(t))]
    assert decimal(texts[0], texts[1], tolerance=texts[2]) == near
    # The same values with exponents.
    assert decimal(f'{x}e-2', f'{y * 1000}E-5', tolerance=texts[2]) == near
    seen[near] += 1
  assert min(seen.values()) > 200
  assert rational('.75', '3/4') and rational('6', '12/2')
  assert rational('1,000/4', '250.')


@pytest.mark.parametrize('rule, answer, expected, value', [
    ('equal', 'a', 'a', True), ('equal', 'a ', 'a', False),
    ('equal', None, 'a', False), ('equal', 7, '7', False),
    ('integer', '0' * 900 + '7', '7', True), ('integer', '7.0', '7', False),
    ('integer', '1,23', '123', False), ('integer', '', '0', False),
    ('integer', '-0', '0', True), ('integer', None, '0', False),
    ('integer', '\u0667', '7', False), ('integer', '1' * 5000, '1', False),
    ('rational', '1/0', '1', False), ('rational', '1/2/3', '1', False),
    ('rational', '0/5', '0', True), ('rational', 'e5', '1', False),
    ('rational', '1e999999999', '1', False), ('rational', '.', '0', False),
    ('choice', ' (b)\n', 'B', True), ('choice', 'B.', 'b', True),
    ('choice', 'B) because', 'B', False), ('choice', 'A', 'B', False),
    ('choice', 'BB', 'B', False), ('choice', True, 'B', False),
])
def test_scores_at_their_edges(rule, answer, expected, value):
  assert recheck.SCORES[rule](answer, expected) is value


def test_a_hashed_answer_key_needs_no_text():
  key = 'sha256:' + hashlib.sha256('high water é'.encode()).hexdigest()
  rule = recheck.SCORES['sha256']
  assert rule('  high \t water\né ', key) is True
  assert rule('High water é', key) is False
  assert rule(None, key) is False


def summarise(values, rule, field='v'):
  lines = [{'kind': 'x', 'n': i, 'body': {'v': v, 'group': {'i': i % 2}}}
           for i, v in enumerate(values)]
  return recheck.summarise(lines, {'kind': 'x', 'where': {}}, field, rule)


def test_summaries_against_independent_ones():
  rng = random.Random(5)
  for count in [*range(1, 30), 99, 100, 101, 200, 250]:
    values = [math.ldexp(rng.uniform(-1, 1), rng.randrange(-40, 20))
              for _ in range(count)]
    texts = [repr(v) for v in values]
    assert summarise(texts, 'mean') == repr(
        float(statistics.mean([fractions.Fraction(t) for t in texts])))
    assert summarise(texts, 'median') == repr(float(
        statistics.median([fractions.Fraction(t) for t in texts])))
    # Exact in binary too: each value is a float.
    assert float(summarise(texts, 'sum')) == pytest.approx(
        math.fsum(values), rel=1e-13)
    assert summarise(texts, 'min') == repr(min(values))
    assert summarise(texts, 'max') == repr(max(values))
    assert summarise(texts, 'p99') == repr(float(np.percentile(
        values, 99, method='inverted_cdf')))
    assert summarise(texts, 'count') == count
    numbers = [rng.randrange(-5, 5) for _ in range(count)]
    assert summarise(numbers, 'sum') == sum(numbers)
    assert summarise(numbers, 'min') == min(numbers)
    assert summarise(numbers, 'max') == max(numbers)
    assert summarise(numbers, 'mean') == repr(sum(numbers) / count)
    assert summarise(numbers, 'median') == repr(
        float(statistics.median(numbers)))
    assert summarise(numbers, 'distinct') == len(set(numbers))
    flags = [rng.random() < 0.5 for _ in range(count)]
    assert summarise(flags, 'count_true') == sum(flags)
    nested = [[t, [t]] for t in texts]
    assert summarise(nested, 'count') == 2 * count
    assert summarise(nested, 'median') == summarise(texts + texts, 'median')
  assert summarise(['0.1', '0.2'], 'sum') == '0.3'  # Decimals, not binary.
  assert summarise([1, '2.0'], 'sum') == '3.0'
  assert summarise([1, True, '1', '1.0', {'a': 1}, {'a': 1}], 'distinct') == 5
  assert summarise(['-0.0'], 'max') == '0.0'


def test_selections():
  lines = [{'kind': k, 'n': n, 'body': {
      'group': {'case': case, 'm': m}, 'v': [n, [n + 10]]}}
           for n, (k, case, m) in enumerate([
               ('x', 'a', 1), ('y', 'a', 1), ('x', 'b', 1), ('x', 'a', True),
               ('x', 'a', '1'), ('x', 'a', 1)])]
  def select(field='v', **where):
    return recheck.select(lines, {'kind': 'x', 'where': {
        f'group.{k}': v for k, v in where.items()}}, field)
  assert select(case='a', m=1) == [0, 10, 5, 15]
  assert select(case='a', m=True) == [3, 13]
  assert select(m='1') == [4, 14]
  assert select(nothing='a') == []
  assert select('group.case') == ['a', 'b', 'a', 'a', 'a']
  assert len(select('')) == 5
  assert recheck.select(lines, {'kind': 'y'}, 'group.m') == [1]
  for value, op, other, expected in [
      ('1e-3', '<', '0.01', True), ('10', '>', '9', True),
      (3, '==', '3.0', True), ('a', '==', 'a', True),
      ('a', '!=', 'b', True), (True, '==', 1, False),
      (None, '==', None, True), ('0.0', '!=', '-0.0', False)]:
    assert recheck.holds(value, op, other) is expected


def test_a_summary_sees_the_lines_in_front_of_it(tmp_path):
  assert replaced(
      tmp_path, BODIES[5], summary('s1', 'score', '', 'count', 1), BODIES[6],
      summary('s2', 'score', '', 'count', 2)) == []


# As a file of its own.


def standalone(*args, **kwargs):
  done = subprocess.run(
      [sys.executable, '-I', '-S', FILE, *args], capture_output=True, text=True,
      timeout=60, check=False, **kwargs)
  assert 'Traceback' not in done.stderr
  return done


def test_it_runs_alone(run, tmp_path):
  copy = tmp_path / 'elsewhere.py'
  shutil.copy(FILE, copy)
  code = (f'import runpy, sys\nsys.argv = ["recheck.py", {str(run)!r}]\n'
          f'try:\n  runpy.run_path({str(copy)!r}, run_name="__main__")\n'
          'except SystemExit as e:\n  assert not e.code\n'
          'known = sys.stdlib_module_names | set(sys.builtin_module_names)\n'
          'assert not [m for m in sys.modules if m.split(".")[0] not in known'
          ' and m != "__main__"], sorted(sys.modules)\n')
  done = subprocess.run([sys.executable, '-I', '-S', '-c', code],
                        capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result == {
      'ok': True, 'lines': 15, 'head': recheck.check(run).head,
      'rederived': {'input': 1, 'compare': 1, 'score': 3, 'summary': 3,
                    'verdict': 1},
      'not_rederivable': ['unfounded'], 'texts': 0, 'problems': 0,
      'problem_list': []}
  assert standalone(run).stdout == done.stdout
  # Without -I its folder comes first in the path: no module there may disturb.
  plain = subprocess.run([sys.executable, FILE, run], capture_output=True,
                         text=True, timeout=60, check=False)
  assert (plain.returncode, plain.stdout) == (0, done.stdout), plain.stderr


def test_its_syntax_is_that_of_python_3_9():
  tree = ast.parse(FILE.read_text(encoding='utf-8'), feature_version=(3, 9))
  imported = {alias.name.split('.')[0] for node in ast.walk(tree)
              if isinstance(node, ast.Import) for alias in node.names}
  assert imported <= sys.stdlib_module_names


def test_it_says_what_it_cannot_derive(tmp_path):
  texts = [('note', {'text': str(i)}) for i in range(2)]
  for more, expected in (([], '1 line, head'), (texts[:1], '1 note'),
                         (texts, '2 notes'),
                         ([verdict('a', True), verdict('b', False)],
                          '--full` can check: a, b')):
    lines, _ = recheck.report(recheck.check(forge(tmp_path, [RUN, *more])))
    assert any(expected in line for line in lines), lines
    assert lines[-1] == 'everything that can be derived agrees'
  edited(tmp_path, lambda rows: rows.append(b'x\n'))
  lines, _ = recheck.report(recheck.check(tmp_path))
  assert lines[-1] == 'FAILED: 2 problems'


def test_its_exit_codes_and_output(run):
  head = recheck.check(run).head
  assert standalone(run, f'--head={head}').returncode == 0
  done = standalone(f'--head={"0" * 64}', run)
  assert done.returncode == 1 and 'another history' in done.stdout
  for args in ([], [run, run], [run, '--hed=1'], [run, '--head=12'], ['-x'],
               [run, f'--head={head}', f'--head={head}']):
    done = standalone(*args)
    assert done.returncode == 2 and done.stdout == ''
    assert len(done.stderr.splitlines()) == 1
  for path in (run / 'none', run.parent):
    done = standalone(path)
    assert done.returncode == 2 and done.stdout == ''
    assert len(done.stderr.splitlines()) == 1
  # More problems than the object lists, in a locale that knows ASCII only.
  edited(run, lambda rows: rows.extend([b'\xff\n'] * 150))
  done = standalone(run, env={'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0'})
  *lines, last = done.stdout.splitlines()
  result = json.loads(last)
  assert done.returncode == 1 and not result['ok']
  assert result['problems'] == 151 and len(result['problem_list']) == 100
  assert lines[:100] == result['problem_list'] and len(lines) == 151 + 4
  with open('/dev/full', 'w') as full:
    done = subprocess.run(
        [sys.executable, '-I', '-S', FILE, run], stdout=full, text=True,
        stderr=subprocess.PIPE, timeout=60, check=False)
  assert done.returncode == 1
  assert done.stderr == 'cannot write the result: No space left on device\n'
