"""The flywheel in one process: solve, verify, deposit, ask again."""

import dataclasses
import json
import pathlib
import re
import shutil

import pytest

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import datasets
from kvgraft_jax import errors
from kvgraft_jax import flywheel
from kvgraft_jax import flywheel_solve
from kvgraft_jax import flywheel_work
from kvgraft_jax import grafting
from kvgraft_jax import ladder
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import library as library_lib
from kvgraft_jax import prompts
from kvgraft_jax import recheck
from kvgraft_jax import registration
from kvgraft_jax import replay
from kvgraft_jax import report
from kvgraft_jax import routing
from kvgraft_jax import sandbox
from kvgraft_jax import store as store_lib
import model_helpers

_SETTINGS = flywheel.Settings(
    model='tiny:0', limit=2, rounds=1, budget=64, samples=2, answer_tokens=6,
    # Where programs cannot be kept apart: these are the project's own.
    unsafe_exec=bool(sandbox.unavailable()))
# Of a run that was stopped they differ: times, and where the library was.
_APART = ('resources', 'recovered', 'resumed', 'note')


def _of(lines, kind):
  return {line['body']['id']: line['body'] for line in lines
          if line['kind'] == kind}


@pytest.fixture(scope='module')
def done(tmp_path_factory):
  folder = tmp_path_factory.mktemp('flywheel') / 'run'
  flywheel.run(_SETTINGS, folder, command=['kvgraft', 'flywheel'])
  return folder, ledger_lib.read(folder)


def test_a_run_rechecks_and_every_verdict_passes(done):
  folder, lines = done
  found = recheck.check(folder)
  assert found.problems == [] and lines[-1]['kind'] == 'end'
  verdicts = _of(lines, 'verdict')
  assert all(body['passed'] for body in verdicts.values())
  assert {'flywheel/grafts', 'flywheel/wrong_hits', 'flywheel/control',
          'verified/sums-base-1', 'verified/sums-base-2'} <= set(verdicts)


def test_grafts_ran_their_tails_only_and_are_exact(done):
  _, lines = done
  compared, logits = _of(lines, 'compare'), _of(lines, 'logits')
  entries = _of(lines, 'entry')
  assert set(compared) == {f'recurrence/1/{name}' for name in entries}
  for name, body in compared.items():
    assert (body['rows'], body['equal'], body['kl']) == (1, 1, ['0.0'])
    grafted, fresh = logits[f'{name}/grafted'], logits[f'{name}/fresh']
    entry = entries[name.rpartition('/')[2]]
    tokens = fresh['rows'][0] + 1
    assert (fresh['tokens_restored'], fresh['tokens_computed']) == (0, tokens)
    assert grafted['tokens_restored'] == entry['tokens']
    assert grafted['tokens_computed'] == tokens - entry['tokens'] > 0


def test_the_library_answers_without_a_token_what_it_is_sure_of(done):
  _, lines = done
  answers, scores = _of(lines, 'answer'), _of(lines, 'score')
  for name, body in answers.items():
    group = body['group']
    assert body['hit'] == (group['what'] == 'given' and group['route'] in (
        'exact', 'parameters'))
    assert body['wrong_hit'] == (body['hit'] and not scores[name]['value'])
    if group['phase'] == 'parameter':
      assert scores[name]['value'] and group['route'] == 'parameters'
      assert body['tokens_decoded'] == body['tokens_computed'] == 0
    if group['phase'] == 'near':
      assert body['answer'] is None and not body['hit']
    if group['phase'] == 'control':
      assert group['route'] == 'bare' and body['tokens_restored'] > 0
    if name.startswith('recurrence') and group['what'] == 'given':
      assert scores[name]['value'] and group['route'] == 'exact'


def test_phases_and_likelihoods_are_complete(done):
  _, lines = done
  answers = _of(lines, 'answer')
  phases = [body['group']['phase'] for body in answers.values()]
  assert {p: phases.count(p) for p in set(phases)} == {
      'bare': 6, 'recurrence': 6, 'parameter': 2, 'near': 2, 'transfer': 6,
      'control': 6}
  for body in _of(lines, 'likelihood').values():
    values = [float(x) for x in body['logprobs']]
    assert len(values) == 4 and all(v < 0 for v in values)
    assert body['right'] == (values[0] > max(values[1:]))


def test_the_budget_holds(done):
  _, lines = done
  for name, body in _of(lines, 'answer').items():
    if name.startswith('ladder'):
      assert 0 < body['tokens_decoded'] <= _SETTINGS.budget


def test_ledger_md_names_every_kind_and_its_fields(done):
  text = (pathlib.Path(recheck.__file__).parent / 'LEDGER.md').read_text()
  text = text[text.index('## 3. Kinds'):text.index('## 4.')]
  rows = dict(re.findall(r'^\| `(\w+)` \| (.*?) \|', text, re.M))
  for line in done[1]:
    told = set(re.findall(r'`(\w+)`', rows[line['kind']]))
    if line['kind'] != 'resources':
      assert set(line['body']) <= told, line['kind']


def test_the_report_shows_it(done):
  folder, _ = done
  page = report.render(folder)
  for text in ('Seen again: answer read out of the graft', 'Flywheel',
               'Control: library emptied', 'programs of the dataset'):
    assert text in page


def test_run_again_it_says_the_same(done):
  _, lines = done
  verdicts = _of(lines, 'verdict')
  for name in ('flywheel/grafts', 'verified/sums-base-1'):
    body = verdicts[name]
    assert replay.CHECKERS[body['checker']](lines, body) is True
  changed = json.loads(json.dumps(lines))
  line = next(l for l in changed if l['kind'] == 'likelihood')
  line['body']['logprobs'][0] = '-1.5'
  changed[-1]['hash'] = 'of another ledger'
  with pytest.raises(errors.DamageError, match='logprobs'):
    replay.CHECKERS['flywheel'](changed, verdicts['flywheel/grafts'])


def test_a_run_can_be_registered_and_replayed(done, tmp_path):
  folder, _ = done
  expected = tmp_path / 'expected.json'
  sha256 = registration.write(folder, expected)
  found, _ = replay.replay(
      expected, tmp_path / 'again', command=['kvgraft'], sha256=sha256)
  assert found.ok and found.total('equal') > 100
  assert recheck.check(tmp_path / 'again').problems == []


class _StopError(Exception):
  pass


@pytest.mark.parametrize('after', [11])
def test_a_stopped_run_goes_on_and_ends_alike(done, tmp_path, after):
  calls = []

  def stop(what, *unused):
    calls.append(what)
    if len(calls) > after and 'self-test' not in what:
      raise _StopError

  with pytest.raises(_StopError):
    flywheel.run(_SETTINGS, tmp_path, progress=stop)
  before = ledger_lib.read(tmp_path)
  with pytest.raises(errors.UsageError, match='samples'):
    flywheel.run(dataclasses.replace(_SETTINGS, samples=3), tmp_path,
                 resume=True)
  assert ledger_lib.read(tmp_path) == before
  flywheel.run(_SETTINGS, tmp_path, resume=True)
  lines = ledger_lib.read(tmp_path)
  assert lines[:len(before)] == before and len(before) < len(lines)

  def bodies(lines):
    return {(line['kind'], line['body'].get('id')): line['body']
            for line in lines[1:] if line['kind'] not in _APART}

  assert bodies(lines) == bodies(done[1])
  assert recheck.check(tmp_path).problems == []
  with pytest.raises(errors.UsageError, match='end already'):
    flywheel.run(_SETTINGS, tmp_path, resume=True)


def _again(lines, count, folder):
  """Writes the first lines of a run as a killed writer left them."""
  with ledger_lib.Ledger(folder, create=True) as ledger:
    for line in lines[:count]:
      ledger.append(line['kind'], line['body'])


@pytest.mark.parametrize('what', ['greedy/0', 'vote/1', 'program/0'])
def test_a_kill_within_the_ladder_loses_nothing(done, tmp_path, what):
  # The second problem: of the first the entry is there, of this one nothing.
  folder, lines = done
  at = next(i for i, line in enumerate(lines)
            if line['body'].get('id') == f'1/sums-base-2/{what}')
  shutil.copytree(folder / 'store', tmp_path / 'store')
  shutil.copytree(folder / 'library', tmp_path / 'library')
  _again(lines, at + 1, tmp_path)
  flywheel.run(_SETTINGS, tmp_path, resume=True)

  def bodies(lines):
    return {(line['kind'], line['body'].get('id')): {
        k: v for k, v in line['body'].items() if k != 'library_head'}
            for line in lines[1:] if line['kind'] not in _APART}

  assert bodies(ledger_lib.read(tmp_path)) == bodies(lines)


def _dataset(path, *problems):
  path.write_text(''.join(json.dumps(p) + '\n' for p in problems))
  return dataclasses.replace(
      _SETTINGS, dataset=str(path), rungs=('greedy',), budget=32)


_MINE = {'id': 'a', 'problem': 'What is 30 plus 4?', 'answer': '34'}


def test_nothing_solved_is_a_result_too(tmp_path):
  flywheel.run(_dataset(tmp_path / 'd.jsonl', _MINE), tmp_path / 'run')
  lines = ledger_lib.read(tmp_path / 'run')
  assert recheck.check(tmp_path / 'run').problems == []
  figures = {k: v['value'] for k, v in _of(lines, 'summary').items()}
  assert figures['entries'] == figures['hits'] == 0
  assert 'grafts/rows' not in figures and 'bare/1/vote/count' not in figures
  assert 'vote' not in lines[-7]['body'].get('text', '')
  assert lines[-1]['kind'] == 'end' and report.render(tmp_path / 'run')


def test_a_problem_that_cannot_be_added_does_not_end_the_run(tmp_path):
  settings = _dataset(tmp_path / 'd.jsonl', _MINE, _MINE | {
      'id': 'b', 'problem': 'What is 30 plus 5?', 'answer': '35'})
  rows = []
  for problem, sources in (('a', ['print(34)', 'print(33 + 2)']),
                           ('b', ['print(35)', 'print(30 + 5)'])):
    text = next(p for p in datasets.load(settings.dataset) if p.id == problem)
    rows.append({'id': problem, 'statement_sha256': text.sha256,
                 'programs': sources, 'solution': 'Add.', 'rule': 'integer'})
  (tmp_path / 'p.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
  flywheel.run(dataclasses.replace(
      settings, limit=None, programs=str(tmp_path / 'p.jsonl')),
               tmp_path / 'run')
  lines = ledger_lib.read(tmp_path / 'run')
  assert set(_of(lines, 'entry')) == {'b'}
  refused = _of(lines, 'refused')
  assert set(refused) == {'1/a'}
  assert refused['1/a']['reason'] == 'NotVerifiedError'
  assert _of(lines, 'score')['recurrence/1/b/given']['value']


def test_a_problem_without_room_is_refused_in_front(tmp_path):
  settings = _dataset(tmp_path / 'd.jsonl', _MINE | {'problem': 'Word ' * 500})
  with pytest.raises(errors.CapacityError, match="'a' needs 5.* 4096"):
    flywheel.run(settings, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_library_of_another_run_serves_without_its_store(done, tmp_path):
  folder, lines = done
  shutil.copytree(folder / 'library', tmp_path / 'library')
  flywheel.run(
      dataclasses.replace(_SETTINGS, rungs=('greedy',), rounds=2),
      tmp_path / 'run', library=tmp_path / 'library')
  again = ledger_lib.read(tmp_path / 'run')
  given = [b for n, b in _of(again, 'score').items()
           if n.startswith('recurrence/1') and n.endswith('given')]
  assert len(given) == 2 and all(b['value'] for b in given)
  assert all(v['passed'] for v in _of(again, 'verdict').values())


def test_an_unsolved_problem_is_not_shown_its_own_answer(done):
  folder, _ = done
  problem, other = datasets.load('shipped:base')[:2]
  work = flywheel_work.Work(
      _SETTINGS, None, model_helpers.tiny_of('tiny:0'),
      prompts.Prompts(model_helpers.tiny_of('tiny:0')),
      store_lib.Store(str(folder / 'store')), [], keep_texts=True, place='',
      progress=None)
  with library_lib.Library(folder / 'library') as library:
    nearest = routing.Router(library).similar(problem.problem, 1)[0][0]
    assert nearest.address == problem.sha256
    _, front, worked = flywheel_solve._nearest(
        work, library, routing.Router(library), problem)
    assert worked.problem == other.problem and front


def test_entries_that_disagree_give_no_answer(done, tmp_path):
  problem = datasets.load('shipped:base')[0]
  with library_lib.Library(tmp_path / 'library', create=True) as library:
    library.add(problem.problem, 'By ear.', '99', 'integer', 'key',
                expected='99')
  flywheel.run(
      dataclasses.replace(_SETTINGS, limit=1, rungs=('greedy',)),
      tmp_path / 'run', library=tmp_path / 'library')
  answers = _of(ledger_lib.read(tmp_path / 'run'), 'answer')
  given = answers[f'recurrence/1/{problem.id}/given']
  assert given['answer'] is None and 'none' in given['decision']
  assert not given['hit']


def test_a_split_of_the_shipped_set_keeps_its_texts(tmp_path):
  flywheel.run(
      dataclasses.replace(_SETTINGS, dataset='shipped:base', limit=1,
                          rungs=('greedy',)), tmp_path / 'run')
  lines = ledger_lib.read(tmp_path / 'run')
  assert all(body['text'] for body in _of(lines, 'problem').values())
  assert lines[-1]['kind'] == 'end'
  with pytest.raises(errors.UsageError, match='no problem of the split'):
    flywheel.run(dataclasses.replace(_SETTINGS, dataset='shipped:near'),
                 tmp_path / 'other')


def test_a_rule_that_a_ledger_cannot_derive_is_refused(tmp_path):
  settings = _dataset(tmp_path / 'd.jsonl', _MINE | {'rule': 'symbolic'})
  with pytest.raises(errors.UsageError, match="'a' has the rule 'symbolic'"):
    flywheel.run(settings, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_what_the_model_solved_is_deposited_as_it_was_generated(tmp_path):
  model = model_helpers.tiny_of('tiny:0')
  asked = prompts.Prompts(model)
  settings = dataclasses.replace(_SETTINGS, dataset=str(tmp_path / 'd.jsonl'))
  climbing = ladder.Ladder(
      asked, settings.limits, lambda: model.prefill(asked.preamble()))
  for problem in ('Say something.', 'Say more.', 'Go on.', 'And then?', 'Why?'):
    (attempt, context), = climbing.climb(problem, 'equal', ['greedy'])
    if attempt.answer and asked.generated(problem, 'solution', attempt.text):
      break
  # The key is what this model says: that its check passes is the point here.
  (tmp_path / 'd.jsonl').write_text(json.dumps(
      {'id': 'own', 'problem': problem, 'answer': attempt.answer,
       'rule': 'equal'}) + '\n')
  flywheel.run(settings, tmp_path / 'run')
  lines = ledger_lib.read(tmp_path / 'run')
  entry = _of(lines, 'entry')['own']
  assert entry['generated'] and entry['group']['source'] == 'model'
  assert entry['group']['checker'] == 'key'
  # A child behind the preamble: prompt and reply, bit for bit as generated.
  store = store_lib.Store(str(tmp_path / 'run/store'))
  chain = grafting.chain(store, entry['artifact'])
  assert [s.stop for s in chain] == [len(asked.preamble()), entry['tokens']]
  assert chain[0].manifest.key == chain[1].manifest.fields.parent
  assert grafting.chain_tokens(store, chain) == context.tokens
  assert artifact_lib.is_hash(chain[1].manifest.id)
  compared = _of(lines, 'compare')['recurrence/1/own']
  grafted = _of(lines, 'logits')['recurrence/1/own/grafted']
  assert compared['equal'] == 1
  assert grafted['tokens_restored'] == context.length
  # Nothing of the dataset's text is in the ledger.
  text = (tmp_path / 'run/ledger.jsonl').read_text()
  assert problem not in text
  assert not any('text' in line['body'] for line in lines
                 if line['kind'] in ('problem', 'attempt', 'input'))


def test_programs_are_refused_where_they_cannot_be_kept_apart(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(sandbox, 'unavailable', lambda: 'no namespaces')
  settings = dataclasses.replace(_SETTINGS, unsafe_exec=False)
  with pytest.raises(errors.SandboxError, match='no namespaces.*unsafe_exec'):
    flywheel.run(settings, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_settings_are_what_they_were():
  settings = dataclasses.replace(_SETTINGS, temperature=0.7, programs='p')
  value = json.loads(json.dumps(settings.to_json()))
  assert flywheel.Settings.from_json(value) == settings
  for change, word in (({'limit': 'x'}, 'limit'), ({'rungs': 3}, 'settings'),
                       ({'temperature': 'hot'}, 'settings'),
                       ({'extra': 1}, 'extra')):
    with pytest.raises(errors.UsageError, match=word):
      flywheel.Settings.from_json(value | change)


@pytest.mark.parametrize('values, word', [
    ({'rungs': ('greedy', 'guess')}, 'guess'),
    ({'rungs': ('vote', 'greedy')}, 'order'), ({'rungs': ()}, 'budget'),
    ({'budget': 8}, 'budget'), ({'samples': 0}, 'samples'),
    ({'style': 'verse'}, 'plain, chat'), ({'policy': 'guess'}, 'policy'),
    ({'temperature': 0.0}, 'temperature'), ({'rounds': 0}, 'rounds')])
def test_senseless_settings_are_refused(values, word):
  with pytest.raises(errors.UsageError, match=word):
    dataclasses.replace(_SETTINGS, **values)


def test_a_dataset_that_is_not_there_is_refused(tmp_path):
  for name in ('dataset', 'programs'):
    with pytest.raises(errors.UsageError, match='nowhere'):
      flywheel.run(dataclasses.replace(
          _SETTINGS, **{name: str(tmp_path / 'nowhere')}), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
