"""Registrations of finished runs, and comparisons with them."""

import copy
import hashlib
import json
import os
import shutil

import pytest

import command_helpers
from kvgraft_jax import errors
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import registration
import model_helpers
import run_helpers

_IDS = model_helpers.tokens(70)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  """Returns the lines and the directory of a finished run."""
  directory = tmp_path_factory.mktemp('good')
  lines = run_helpers.lines_of(
      directory, model_helpers.exact().prefill(_IDS))
  return lines, run_helpers.write(directory, lines)


@pytest.fixture
def lines(good):
  """Returns lines of the run, to be changed."""
  return json.loads(json.dumps(good[0]))


@pytest.fixture(scope='module')
def registered(good):
  """Returns the run's registration."""
  return registration.of_run(ledger_lib.read(good[1]))


def _compare(registered, lines, directory):
  return registration.compare(
      registered, ledger_lib.read(run_helpers.write(directory, lines)))


def test_a_registration_says_what_to_run_and_what_to_find(good, registered):
  lines, directory = good
  assert registered['config'] == run_helpers.body(lines, 'run')['config']
  assert registered['model'] == run_helpers.body(lines, 'run')['model']
  assert registered['run']['head'] == ledger_lib.read(directory)[-1]['hash']
  profile = run_helpers.body(lines, 'profile')
  assert registered['profiles'] == {'bfloat16': {
      'profile': profile['profile'], 'class': profile['class']}}
  found = {e['kind']: e['body'] for e in registered['expected']}
  assert set(found) == {
      'input', 'artifact', 'logits', 'digest', 'output', 'score'}
  for kind, body in found.items():
    whole = run_helpers.body(lines, kind)
    assert body and all(whole[k] == v for k, v in body.items())
  assert found['artifact']['digests'] and found['logits']['sha256']
  text = json.dumps(registered)
  assert 'elapsed' not in text and 'created' not in text
  assert 'seconds' not in text and '"text"' not in text.replace(
      '"id": "text"', '').replace('"input": "text"', '')


def test_it_is_written_once_and_read_by_its_hash(good, registered, tmp_path):
  path = tmp_path / 'r.json'
  sha256 = registration.write(good[1], path)
  data = path.read_bytes()
  assert sha256 == hashlib.sha256(data).hexdigest()
  assert registration.read(path) == (registered, sha256)
  assert registration.read(path, sha256.upper())[1] == sha256
  with pytest.raises(errors.UsageError, match='it exists'):
    registration.write(good[1], path)
  assert path.read_bytes() == data
  # Another process writes the same bytes: nothing of it depends on when.
  assert registration.write(good[1], tmp_path / 's.json') == sha256
  path.write_bytes(data.replace(b'"head"', b'"heap"'))
  with pytest.raises(errors.DamageError, match=f'expected {sha256}'):
    registration.read(path, sha256)


@pytest.mark.parametrize('data, message', [
    (None, 'No such file'),
    (b'', 'expected a registration'),
    (b'\xff\xfe', 'expected a registration'),
    (b'[' * 100_000, 'expected a registration'),
    (b'[]\n', 'expected a registration'),
    (b'{"a": 1}\n', 'expected a registration'),  # Not canonical.
    (b'{"a":1.5}\n', 'expected a registration'),
    (b'{"format":2}\n', 'format is 2'),
    (b'{"format":1}\n', 'no code'),
    (b'{"code":{},"config":{},"expected":[{"body":{},"kind":"input"}],'
     b'"format":1,"model":{},"profiles":{},"run":{}}\n', 'input.*id'),
    (b'{"code":{},"config":{},"expected":[3],'
     b'"format":1,"model":{},"profiles":{},"run":{}}\n', 'has not what'),
])
def test_what_is_no_registration_is_refused(tmp_path, data, message):
  path = tmp_path / 'r.json'
  if data is not None:
    path.write_bytes(data)
  with pytest.raises(errors.UsageError, match=message):
    registration.read(path)


@pytest.mark.parametrize('change,message', [
    (lambda value: value.update(expected=[]), 'it expects nothing'),
    (lambda value: value['model'].pop('fingerprint'), 'its model or'),
    (lambda value: value['model'].update(tokenizer=7), 'its model or'),
    (lambda value: value.update(profiles={'bfloat16': 3}), 'or its profiles'),
    (lambda value: value.update(profiles={'bfloat16': {}}), 'or its profiles'),
])
def test_a_registration_changed_by_hand_is_refused(
    registered, tmp_path, change, message):
  value = copy.deepcopy(registered)
  change(value)
  path = tmp_path / 'r.json'
  path.write_bytes(registration.to_bytes(value))
  with pytest.raises(errors.UsageError, match=message):
    registration.read(path)


def test_a_pipe_is_no_registration(tmp_path):
  os.mkfifo(tmp_path / 'r.json')
  with pytest.raises(errors.UsageError, match='no regular file'):
    registration.read(tmp_path / 'r.json')


def test_without_profiles_nothing_is_promised(registered, lines, tmp_path):
  found = _compare(registered | {'profiles': {}}, lines, tmp_path)
  assert found.ok and not found.class_equal


def test_an_unfinished_run_is_refused(lines, tmp_path):
  run_helpers.write(tmp_path / 'a', lines[:-1])
  with pytest.raises(errors.UsageError, match='not finished'):
    registration.write(tmp_path / 'a', tmp_path / 'r.json')
  lines[-1][1]['status'] = 'stopped'
  run_helpers.write(tmp_path / 'b', lines)
  with pytest.raises(errors.UsageError, match='not finished'):
    registration.write(tmp_path / 'b', tmp_path / 'r.json')
  run_helpers.write(tmp_path / 'c', [lines[0], ('end', {'status': 'done'})])
  with pytest.raises(errors.UsageError, match='no hash'):
    registration.write(tmp_path / 'c', tmp_path / 'r.json')
  assert not (tmp_path / 'r.json').exists()


def test_a_damaged_run_is_refused(good, lines, tmp_path):
  shutil.copytree(good[1], tmp_path / 'a')
  path = tmp_path / 'a' / 'ledger.jsonl'
  path.write_bytes(path.read_bytes().replace(b'"answer":"7"', b'"answer":"8"'))
  with pytest.raises(errors.DamageError, match='line 8'):
    registration.write(tmp_path / 'a', tmp_path / 'r.json')
  # Well chained, but the score does not follow from the answer.
  run_helpers.body(lines, 'score')['answer'] = '8'
  run_helpers.write(tmp_path / 'b', lines)
  with pytest.raises(errors.DamageError, match='score'):
    registration.write(tmp_path / 'b', tmp_path / 'r.json')
  assert not (tmp_path / 'r.json').exists()


# Comparing.


def test_an_equal_run(registered, lines, tmp_path):
  found = _compare(registered, lines[:-1], tmp_path)
  assert found.ok and found.class_equal and found.first is None
  assert found.factors == []
  # Input, tokens, blocks of 5 layers in 5 ranges, logits, id, state, output,
  # score.
  assert found.total('equal') == 50 + 7
  assert found.total('differing') == found.total('missing') == 0
  assert str(found) == 'classes equal; 57 of 57 hashes equal'


@pytest.mark.parametrize('kind, change, first, differing', [
    ('input', {'tokens_sha256': '0' * 64}, 'tokens', 1),
    ('logits', {'sha256': ['0' * 64]}, 'logits', 1),
    ('artifact', {'artifact': '0' * 64}, 'artifact', 1),
    ('digest', {'sha256': '0' * 64}, 'digest', 1),
    ('output', {'token_ids': [7]}, 'output', 1),
    ('score', {'value': False}, 'score', 1),
])
def test_each_differing_hash_is_found(
    registered, lines, tmp_path, kind, change, first, differing):
  run_helpers.body(lines, kind).update(change)
  if kind == 'input':
    del run_helpers.body(lines, kind)['token_ids']
  found = _compare(registered, lines, tmp_path)
  assert not found.ok and found.first['kind'] == first
  assert found.total('differing') == differing
  assert found.counts[first] == {'equal': 0, 'differing': 1, 'missing': 0}
  assert found.first['theirs'] != found.first['ours']


def test_the_first_differing_block_is_of_the_lowest_layer(
    registered, lines, tmp_path):
  for block in run_helpers.body(lines, 'artifact')['digests']:
    for part in block['parts']:
      if part[0] >= 3 or (part[0] == 2 and block['start'] >= 48):
        part[2] = '0' * 64
  found = _compare(registered, lines, tmp_path)
  assert found.first['part'] == 'layer 2 (global) K positions 48 to 63'
  assert found.counts['block']['differing'] == 2 * (5 + 5 + 2)
  assert 'first that differs: block context, layer 2' in str(found)


def test_what_is_missing_is_not_equal(registered, lines, tmp_path):
  kept = [(kind, body) for kind, body in lines if kind != 'digest']
  found = _compare(registered, kept, tmp_path)
  assert not found.ok and found.total('missing') == 1
  assert found.first['kind'] == 'digest'
  assert found.first['ours'] == 'not listed'


def test_more_than_was_registered_does_no_harm(registered, lines, tmp_path):
  lines.insert(-1, ('digest', {'id': 'new', 'group': {}, 'sha256': '0' * 64}))
  assert _compare(registered, lines, tmp_path).ok


def test_every_differing_factor_is_named(registered, lines, tmp_path):
  profile = run_helpers.body(lines, 'profile')
  for name in ('profile', 'class'):
    profile[name] |= {'jax': '0.0.1', 'a new one': 'x'}
  profile['profile']['chunk'] = '64'
  profile['class']['tile'] = '4'
  run_helpers.body(lines, 'run')['code']['python'] = '4'
  found = _compare(registered, lines, tmp_path)
  jax = run_helpers.body(lines, 'profile')  # As it was before the change.
  assert jax['profile']['jax'] == '0.0.1'
  theirs = registered['profiles']['bfloat16']['profile']
  assert [tuple(f) for f in found.factors] == [
      ('a new one', 'not listed', 'x', ['bfloat16'], True),
      ('chunk', theirs['chunk'], '64', ['bfloat16'], False),
      ('jax', theirs['jax'], '0.0.1', ['bfloat16'], True),
      ('tile', 'not listed', '4', ['bfloat16'], True),
      ('code.python', '3', '4', [], False)]
  assert found.ok and not found.class_equal
  assert str(found) == (
      'classes differ: equality was not promised; 57 of 57 hashes equal anyway')


def test_an_argmax_is_told_but_is_no_hash(registered, lines, tmp_path):
  run_helpers.body(lines, 'logits')['argmax'] = [1]
  found = _compare(registered, lines, tmp_path)
  assert found.ok and found.total('differing') == 0
  assert found.counts['argmax'] == {'equal': 0, 'differing': 1, 'missing': 0}


def test_preregister_on_the_command_line(good, tmp_path):
  out = tmp_path / 'r.json'
  found = command_helpers.ok('ledger', 'preregister', good[1], f'--out={out}')
  sha256 = hashlib.sha256(out.read_bytes()).hexdigest()
  assert found['sha256'] == sha256 and found['expected'] == 6
  line = command_helpers.refusal(
      2, 'ledger', 'preregister', good[1], f'--out={out}')
  assert 'it exists' in line
  line = command_helpers.refusal(2, 'ledger', 'preregister', good[1])
  assert '--out is missing' in line
