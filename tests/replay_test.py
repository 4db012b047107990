"""Registered runs that are repeated, and checkers that run again."""

import hashlib
import json
import re

import pytest

import command_helpers
from kvgraft_jax import errors
from kvgraft_jax import evidence
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import recheck
from kvgraft_jax import registration
from kvgraft_jax import replay
import model_helpers
import run_helpers

_IDS = model_helpers.tokens(70)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  """Returns the lines of a finished run and its registration."""
  directory = tmp_path_factory.mktemp('good')
  lines = run_helpers.lines_of(
      directory, model_helpers.exact().prefill(_IDS))
  run_helpers.write(directory, lines)
  return lines, registration.of_run(ledger_lib.read(directory))


def _concluded(registered, lines, directory):
  """Writes a replayed run as `replay` does; returns what it concluded."""
  sha256 = hashlib.sha256(registration.to_bytes(registered)).hexdigest()
  with ledger_lib.Ledger(directory, create=True) as ledger:
    ledger.append(*lines[0])
    ledger.append('registration', {'sha256': sha256, 'name': 'r.json'})
    for kind, body in lines[1:-1]:
      ledger.append(kind, body)
    found = replay.conclude(ledger, registered, sha256)
    ledger.append(*lines[-1])
  return found


@pytest.mark.parametrize('changed', [False, True])
def test_the_new_ledger_holds_the_verdict(good, tmp_path, changed):
  lines, registered = json.loads(json.dumps(good))
  if changed:
    run_helpers.body(lines, 'digest')['sha256'] = '0' * 64
  found = _concluded(registered, lines, tmp_path)
  assert found.ok is not changed
  written = ledger_lib.read(tmp_path)
  assert recheck.check(tmp_path).problems == []
  verdict = next(x['body'] for x in written if x['kind'] == 'verdict')
  assert verdict['passed'] is found.ok
  assert verdict['evidence'] == found.to_json()
  check = replay.CHECKERS['replay']
  assert check(written, verdict) is found.ok
  for harm in ({'ran': {'registration_sha256': '0' * 64}},
               {'evidence': verdict['evidence'] | {'equal': 58}}):
    with pytest.raises(errors.DamageError, match='evidence'):
      check(written, verdict | harm)
  # A verdict over lines that are not those of the run.
  for line in written:
    if line['kind'] == 'score':
      line['body']['value'] = False
  with pytest.raises(errors.DamageError, match='evidence'):
    check(written, verdict)
  for line in written:
    if line['kind'] == 'expected':
      line['body']['registration']['expected'].pop()
  with pytest.raises(errors.DamageError, match='registration'):
    check(written, verdict)


# A real run of the smallest kind.

_SETTINGS = evidence.default_settings(
    'tiny:0', parts=('fifty',), dtypes=('bfloat16',), tokens=40,
    continuations=2, lengths=(24,), tail=4)


@pytest.fixture(scope='module')
def run_dir(tmp_path_factory):
  """Returns the directory of a finished evidence run."""
  directory = tmp_path_factory.mktemp('evidence')
  return evidence.run(_SETTINGS, directory)


@pytest.fixture(scope='module')
def registered(run_dir, tmp_path_factory):
  """Returns the file of its registration, and the SHA-256."""
  path = tmp_path_factory.mktemp('registered') / 'r.json'
  return path, registration.write(run_dir, path)


def test_a_replay_on_the_command_line(registered, run_dir, tmp_path):
  path, sha256 = registered
  new = tmp_path / 'new'
  found = command_helpers.ok(
      'ledger', 'replay', path, f'--run_dir={new}', f'--sha256={sha256}')
  assert found['differing'] == found['missing'] == 0
  assert found['equal'] > 40 and found['first_differing'] is None
  assert found['class_equal'] is True
  # Sources may be edited while tests run.
  assert all(f['name'] == 'code.sources' for f in found['factors'])
  assert found['registration_sha256'] == sha256
  assert found['run_dir'] == str(new)
  lines = ledger_lib.read(new)
  assert lines[1]['body'] == {'sha256': sha256, 'name': 'r.json'}
  assert lines[-1]['kind'] == 'end'
  assert recheck.check(new).problems == []
  verdict = next(x['body'] for x in lines if x['kind'] == 'verdict'
                 and x['body']['checker'] == 'replay')
  assert verdict['passed'] is True
  assert command_helpers.ok('ledger', 'diff', run_dir, new)['equal'] is True
  line = command_helpers.refusal(
      2, 'ledger', 'replay', path, f'--run_dir={new}')
  assert 'there is a run already' in line


def _edited(path, tmp_path, change):
  value = json.loads(path.read_bytes())
  change(value)
  new = tmp_path / 'edited.json'
  new.write_bytes(registration.to_bytes(value))
  return new


@pytest.mark.slow
def test_a_replay_that_differs(registered, tmp_path):
  def change(value):
    for p in value['profiles'].values():
      p['profile']['jax'] = p['class']['jax'] = '0.0.1'
    body = next(e['body'] for e in value['expected'] if e['kind'] == 'artifact')
    body['digests'][0]['parts'][0][2] = '0' * 64

  path = _edited(registered[0], tmp_path, change)
  new = tmp_path / 'new'
  result = command_helpers.call('ledger', 'replay', path, f'--run_dir={new}')
  assert result.rc == 1
  assert result.json['differing'] == 1 and result.json['missing'] == 0
  assert result.json['class_equal'] is False
  names = [f['name'] for f in result.json['factors']]
  assert [n for n in names if not n.startswith('code.')] == ['jax']
  assert result.json['first_differing']['kind'] == 'block'
  equal = result.json['equal']
  assert (f'classes differ: equality was not promised; {equal} of {equal + 1}'
          ' hashes equal anyway') in result.stdout
  assert recheck.check(new).problems == []
  assert not replay.CHECKERS['replay'](ledger_lib.read(new), next(
      x['body'] for x in ledger_lib.read(new) if x['kind'] == 'verdict'
      and x['body']['checker'] == 'replay'))


@pytest.mark.parametrize('args, rc, message', [
    (['--model=tiny:1'], 2, 'model differs.*the weights are not the same'),
    (['--sha256=12'], 2, 'no hash'),
    ([f'--sha256={"0" * 64}'], 1, 'get the file that was published'),
])
def test_nothing_runs_with_other_weights_or_another_file(
    registered, tmp_path, args, rc, message):
  new = tmp_path / 'new'
  line = command_helpers.refusal(
      rc, 'ledger', 'replay', registered[0], f'--run_dir={new}', *args)
  assert re.search(message, line), line
  assert not new.exists()


def test_settings_that_are_none_are_refused(registered, tmp_path):
  path = _edited(registered[0], tmp_path,
                 lambda value: value['config'].pop('tokens'))
  line = command_helpers.refusal(
      2, 'ledger', 'replay', path, f'--run_dir={tmp_path}/new')
  assert 'tokens' in line


@pytest.mark.slow
def test_checkers_run_again(run_dir):
  found = command_helpers.ok('ledger', 'recheck', run_dir, '--full')
  assert found['checkers_run'] == 2  # `self_test` and `fifty`.


def _verdict(lines, checker):
  return next(x['body'] for x in lines if x['kind'] == 'verdict'
              and x['body']['checker'] == checker)


@pytest.mark.slow
def test_a_part_that_shows_other_hashes_is_named(run_dir):
  lines = ledger_lib.read(run_dir)
  lines[-1]['hash'] = 'another ledger'
  body = next(x['body'] for x in lines if x['kind'] == 'logits')
  body['sha256'][0] = '0' * 64
  with pytest.raises(errors.DamageError, match=body['id']):
    replay.CHECKERS['fifty'](lines, _verdict(lines, 'fifty'))


def test_a_self_test_that_shows_another_digest_is_named(run_dir):
  lines = ledger_lib.read(run_dir)
  profile = next(x['body'] for x in lines if x['kind'] == 'profile')
  profile['self_test']['digests']['slot'] = '0' * 64
  with pytest.raises(errors.DamageError, match='slot'):
    replay.CHECKERS['self_test'](lines, _verdict(lines, 'self_test'))


def test_a_self_test_recorded_when_it_tested_less_agrees(run_dir):
  lines = ledger_lib.read(run_dir)
  profile = next(x['body'] for x in lines if x['kind'] == 'profile')
  assert profile['self_test']['invariances']['stream'] is True
  del profile['self_test']['digests']['stream']
  profile['self_test']['invariances']['stream'] = None
  assert replay.CHECKERS['self_test'](lines, _verdict(lines, 'self_test'))


@pytest.mark.parametrize('checker', ['fifty', 'self_test'])
def test_checkers_do_not_run_under_other_numerics(run_dir, checker):
  lines = ledger_lib.read(run_dir)
  profile = next(x['body'] for x in lines if x['kind'] == 'profile')
  profile['class']['jaxlib'] = '0.0.1'
  lines[-1]['hash'] = 'yet another ledger'
  with pytest.raises(errors.ClassMismatchError, match='jaxlib'):
    replay.CHECKERS[checker](lines, _verdict(lines, checker))


# A study of two cases, one on the plain forward.


@pytest.fixture(scope='module')
def study_dir(tmp_path_factory):
  return evidence.run(evidence.default_settings(
      'tiny:0', parts=('study',), dtypes=('bfloat16',), tokens=40, lengths=(8,),
      tail=2, schedule_tokens=32, block=16, samples=1, offsets=(0, 8),
      cases=('base', 'float64')), tmp_path_factory.mktemp('study') / 'run')


def _rewritten(lines, directory, change):
  """Writes lines that `change` was called with, their figures derived again."""
  with ledger_lib.Ledger(directory, create=True) as ledger:
    for line in json.loads(json.dumps(lines)):
      kind, body = line['kind'], line['body']
      change(kind, body)
      if kind == 'summary':
        ledger.summary(body['id'], body['over'], body['field'], body['rule'],
                       body.get('unit'))
      elif kind != 'note':
        ledger.append(kind, body)
  return ledger_lib.read(directory)


def _forge(kind, body):
  if kind == 'compare':
    body['kl'] = [x if x == '0.0' else '0.015' for x in body['kl']]


def test_a_forged_figure_passes_until_it_is_run_again(study_dir, tmp_path):
  lines = ledger_lib.read(study_dir)
  verdict = _verdict(lines, 'study')
  check = replay.CHECKERS['study']
  assert check(lines, verdict)  # On float64 too.
  body = next(x['body'] for x in lines if x['kind'] == 'compare'
              and set(x['body']['kl']) != {'0.0'})
  forged = _rewritten(lines, tmp_path / 'kl', _forge)
  assert recheck.check(tmp_path / 'kl').problems == []
  kept = [(forged, f'{body["id"]}.*kl of row 0 is 0.015, run again'
           f' {body["kl"][0]}$')]
  for name, value in (('max_abs', ['9.5'] * len(body['kl'])),
                      ('keys', 7), ('keys_equal', 7), ('keys_max_abs', '7.0')):
    changed = json.loads(json.dumps(lines))
    for line in changed:
      if line['body'].get('id') == body['id'] and line['kind'] == 'compare':
        line['body'][name] = value
    kept.append((changed, f'{body["id"]}.*{name}.* is .*, run again '))
  without = [x for x in lines if x['body'].get('id') != body['id']]
  kept.append((without, f'no compare .*{body["id"]}|compare.*{body["id"]}'))
  extra = json.loads(json.dumps(lines))
  extra.insert(-1, {'kind': 'compare', 'n': 0, 'body': body | {
      'id': 'study/base/0/9/fresh'}})
  kept.append((extra, 'writes no line.*study/base/0/9/fresh'))
  for changed, message in kept:
    changed[-1]['hash'] = lines[-1]['hash']  # Run once for all of them.
    with pytest.raises(errors.DamageError, match=message):
      check(changed, verdict)


def test_findings_are_derived_from_the_figures(study_dir, tmp_path):
  found = command_helpers.ok('ledger', 'recheck', study_dir)
  assert found['rederived']['note'] > 1 and found['texts'] == 0
  assert recheck.check(study_dir).texts == found['rederived']['note']
  with ledger_lib.Ledger(tmp_path / 'a', create=True) as ledger:
    for line in ledger_lib.read(study_dir):
      body = line['body']
      if line['kind'] == 'note':
        body['text'] = body['text'].replace('exact', 'wrong')
      ledger.append(line['kind'], body)
    ledger.append('note', {'text': 'Of no figure.'})
  result = command_helpers.call('ledger', 'recheck', tmp_path / 'a')
  assert result.rc == 1 and 'text that was not derived: 1 note' in result.stdout
  assert result.json['problems'] > 0
  assert all('the figures do not say' in p and 'wrong' in p
             for p in result.json['problem_list'])
  assert recheck.check(tmp_path / 'a').problems == []
  lines = ledger_lib.read(study_dir)
  with ledger_lib.Ledger(tmp_path / 'b', create=True) as ledger:
    for line in (lines[0], *[x for x in lines if x['kind'] == 'note']):
      ledger.append(line['kind'], line['body'] | (
          {'config': {}} if line['kind'] == 'run' else {}))
  result = command_helpers.call('ledger', 'recheck', tmp_path / 'b')
  assert result.json['problems'] == 1
  assert 'findings cannot be derived' in result.json['problem_list'][0]
