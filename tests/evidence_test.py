"""An evidence run on the tiny model: what it records and when it fails."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import cli_helpers
from kvgraft_jax import errors
from kvgraft_jax import evidence
from kvgraft_jax import evidence_parts
from kvgraft_jax import findings
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import recheck
from kvgraft_jax import selftest
from kvgraft_jax import study

_SMALL = evidence.default_settings(
    'tiny:0', dtypes=('bfloat16',), tokens=70, continuations=4, lengths=(9, 48),
    tail=4, schedule_tokens=61, block=32, samples=1, offsets=(0, 8, 64),
    cases=('base', 'float32', 'float64', 'slots'))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A run through the command line, in a process of its own."""
  path = tmp_path_factory.mktemp('evidence') / 'run'
  flags = [f'--{name}={_flag(value)}'
           for name, value in _SMALL.to_json().items() if value is not None]
  done = cli_helpers.run('evidence', path, *flags)
  assert done.rc == 0, done.stderr
  last = done.json
  assert last['failed'] == [] and last['verdicts'] == 6
  assert last['head'] == ledger_lib.read(path)[-1]['hash']
  return path


def _flag(value):
  return ','.join(map(str, value)) if isinstance(value, list) else value


@pytest.fixture(scope='module')
def lines(folder):
  return ledger_lib.read(folder)


def _bodies(lines, kind, **group):
  return [line['body'] for line in lines if line['kind'] == kind and all(
      line['body']['group'].get(k) == v for k, v in group.items())]


def _figure(lines, id):
  return next(b['value'] for b in _bodies(lines, 'summary') if b['id'] == id)


def test_the_run_can_be_checked_with_a_bare_python(folder):
  done = subprocess.run(
      [sys.executable, '-I', '-S', recheck.__file__, str(folder)],
      capture_output=True, text=True, check=False, cwd='/')
  assert done.returncode == 0, done.stdout
  found = json.loads(done.stdout.splitlines()[-1])
  assert found['ok'] and found['rederived']['summary'] > 100
  assert found['rederived']['compare'] == len(
      _bodies(ledger_lib.read(folder), 'compare'))


def test_grafts_happened_and_were_equal(lines):
  grafted = _bodies(lines, 'logits', part='fifty', what='grafted')
  assert len(grafted) == 4
  for body in grafted:
    assert body['tokens_restored'] == 70
    assert body['tokens_computed'] == len(body['rows'])
  assert _figure(lines, 'fifty/bfloat16/equal') == sum(
      len(b['rows']) for b in grafted)
  cut = _bodies(lines, 'logits', part='prefix', what='grafted')
  assert [b['tokens_restored'] for b in cut] == [9, 48]
  assert _figure(lines, 'prefix/bfloat16/equal') == 8
  assert _figure(lines, 'fifty/bfloat16/greedy/equal') == 1
  artifact, = _bodies(lines, 'artifact')
  assert (artifact['start'], artifact['end']) == (0, 70)


def test_every_schedule_left_one_result(lines):
  digests = _bodies(lines, 'digest', part='invariance')
  assert len(digests) == 10 and len({b['sha256'] for b in digests}) == 1
  assert {b['tokens_computed'] for b in digests
          if b['group']['schedule'] == 'graft'} == {61 - 29}


def test_own_position_is_exact_and_elsewhere_is_not(lines):
  # float32 is not among the dtypes, so its case is left out and said to be.
  assert any('float32 was left out' in line['body'].get('text', '')
             for line in lines)
  cases = {b['group']['case'] for b in _bodies(lines, 'compare', part='study')}
  assert cases == {'base', 'float64', 'slots'}
  for body in _bodies(lines, 'compare', part='study', what='own'):
    assert body['equal'] == body['rows'] == 4
    assert set(body['kl']) == set(body['max_abs']) == {'0.0'}
  for case in ('base', 'float64'):
    for body in _bodies(lines, 'compare', case=case, what='moved', m=64):
      assert body['equal'] == 0 and min(map(float, body['kl'])) > 0
  restored = _bodies(lines, 'logits', part='study', what='own')
  assert len(restored) == 9
  assert {(b['tokens_restored'], b['tokens_computed']) for b in restored} == {
      (32, 4)}


def _findings(lines):
  return [line['body']['text'] for line in lines
          if line['body'].get('role') == findings.ROLE]


def test_findings_say_what_the_figures_say(lines):
  text = '\n'.join(_findings(lines))
  rows = _figure(lines, 'fifty/bfloat16/rows')
  assert 'weights of tiny:0 are random' in text and 'arXiv' not in text
  assert f'of 4 continuations grafted here {rows} of {rows} rows' in text
  assert '36 of 36 rows of logits behind it are equal, in 3 cases' in text
  assert ('every row is equal at 64 and rows differ at 8: an offset that is no'
          ' whole number of pages of 16') in text
  assert 'leave the same keys, values and logits, bit for bit' in text
  assert 'flat' not in text  # Two offsets are too few to say so.


def test_findings_follow_from_the_lines(lines):
  assert findings.sentences(lines) == _findings(lines)
  number = next(i for i, line in enumerate(lines)
                if line['body'].get('id') == 'fifty/bfloat16/equal')
  changed = [*lines[:number], {
      'kind': 'summary', 'body': {**lines[number]['body'], 'value': 3}},
             *lines[number + 1:]]
  assert findings.sentences(changed) != _findings(lines)


def _study_of(sizes, what_own=8):
  """Returns the lines of a made-up study: case -> median KL at each offset."""
  offsets = (8, 128, 1024)
  lines = [{'kind': 'run', 'body': {
      'config': _SMALL.to_json() | {'offsets': [0, *offsets]},
      'model': {'source': 'gemma3-270m'}}}]
  figures = {}
  for case, kls in sizes.items():
    lines.append({'kind': 'case', 'body': {
        'id': case, **dataclasses.asdict(study.CASES[case])}})
    figures |= {f'study/{case}/own/rows': 8,
                f'study/{case}/own/equal': what_own}
    for what in study.WHATS:
      for m, kl in zip(offsets, kls):
        p = f'study/{case}/{what}/{m}'
        figures |= {f'{p}/{name}': repr(kl) for name in (
            'kl_median', 'kl_p99', 'max_abs_median', 'max_abs_max')}
        figures |= {f'{p}/rows': 4, f'{p}/argmax_agree': 3, f'{p}/keys': 100,
                    f'{p}/keys_equal': 60, f'{p}/equal': 4 * (kl == 0)}
  return [*lines, *(
      {'kind': 'summary', 'body': {'id': k, 'value': v}}
      for k, v in figures.items())]


def test_findings_of_a_run_that_failed_say_so():
  text = '\n'.join(findings.sentences(_study_of({
      'base': (0.001,) * 3, 'float32': (0.002,) * 3, 'window': (0.003,) * 3,
      'slots': (0.5,) * 3}, what_own=7)))
  assert 'NOT always exact: 28 of 32 rows' in text
  assert '9 of 12 rows' in text and '60 % have the bits' in text
  assert 'wider formats do not simply differ by less' in text
  assert 'what is stored of the window matters' in text
  assert 'rows differ at 8, 128, 1,024.' in text
  assert 'the physical slot matters' in text
  assert 'only what the tail can see is stored: 3.00' in text


def test_findings_of_large_angles_and_flatness():
  text = '\n'.join(findings.sentences(_study_of({
      'base': (0.01, 0.012, 0.011), 'float32': (1e-8,) * 3,
      'float32_both': (1e-8, 2e-8, 9e-8)})))
  assert 'median KL in nats of 0.01 to 0.012, flat over M (largest over' in text
  assert '1e-08 to 9e-08, not flat over M (largest over smallest 9.0)' in text
  assert 'large angles matter in float32, where bfloat16 hides them' in text
  assert 'wider formats still differ, but sets the size' in text
  none = '\n'.join(findings.sentences(_study_of({
      'float32': (1e-8,) * 3, 'float32_both': (1e-8, 1.1e-8, 1.2e-8),
      'base': (0.01, 0.02, 0.05)})))
  assert 'large angles have no influence' in none
  assert '0.01 to 0.05, not flat' in none


def test_a_restored_bit_that_changed_fails_the_verdict(tmp_path, monkeypatch):
  restored = study._Steps._restored

  def changed(self, rows):
    rows.content['global'][1][0, 20, 0, 3] ^= 1
    return restored(self, rows)

  monkeypatch.setattr(study._Steps, '_restored', changed)
  settings = dataclasses.replace(
      _SMALL, parts=('study',), cases=('base',), offsets=(0,))
  evidence.run(settings, tmp_path / 'run')
  verdict = {b['id']: b['passed'] for b in _bodies(
      ledger_lib.read(tmp_path / 'run'), 'verdict')}
  assert verdict == {'self_test/bfloat16': True, 'study/base': False}
  assert not recheck.check(tmp_path / 'run').problems


def test_a_graft_that_differs_is_recorded_with_figures(tmp_path, monkeypatch):
  graft = evidence_parts._graft

  def changed(model, store, manifest, length=None):
    context = graft(model, store, manifest, length)
    k = {kind: x.at[0, 0, 3].set(0) for kind, x in context.cache.k.items()}
    context._cache = context.cache.replace(k=k)
    return context

  monkeypatch.setattr(evidence_parts, '_graft', changed)
  settings = dataclasses.replace(_SMALL, parts=('fifty',), lengths=())
  evidence.run(settings, tmp_path / 'run')
  lines = ledger_lib.read(tmp_path / 'run')
  assert {b['id']: b['passed'] for b in _bodies(lines, 'verdict')} == {
      'self_test/bfloat16': True, 'fifty/bfloat16': False}
  assert _figure(lines, 'fifty/bfloat16/equal') == 0
  assert float(_figure(lines, 'fifty/bfloat16/kl_max')) > 0
  assert not recheck.check(tmp_path / 'run').problems


def test_a_machine_without_exactness_still_reports(tmp_path, monkeypatch):
  load = selftest.load_or_run

  def refuted(*args):
    report = load(*args)
    return dataclasses.replace(
        report, invariances=report.invariances | {'slot': False})

  monkeypatch.setattr(selftest, 'load_or_run', refuted)
  settings = dataclasses.replace(_SMALL, parts=('invariance',))
  evidence.run(settings, tmp_path / 'run')
  lines = ledger_lib.read(tmp_path / 'run')
  assert [b['passed'] for b in _bodies(lines, 'verdict')] == [False, True]
  promised = {b['group']['schedule']: b['group']['promised']
              for b in _bodies(lines, 'digest')}
  assert promised['graft'] == promised['split'] == 'no'
  assert promised['rows_16'] == 'yes'


@pytest.mark.parametrize('changes,expected', [
    ({'parts': ('sixty',)}, "parts: .*found 'sixty'"),
    ({'parts': ()}, 'parts: .*found none'),
    ({'dtypes': ('bfloat16', 'bfloat16')}, 'dtypes: .*different ones'),
    ({'cases': ('bas',)}, "cases: .*found 'bas'"),
    ({'lengths': (0,)}, 'lengths: expected 1 to 70'),
    ({'lengths': (71,)}, 'lengths: expected 1 to 70.*found 71'),
    ({'lengths': (9, 9)}, 'lengths: expected different numbers, found 9, 9'),
    ({'offsets': (8, 0, 8)}, 'offsets: expected different numbers'),
    ({'offsets': ()}, 'offsets: .*found none'),
    ({'offsets': (-1, 8)}, 'offsets: .*found -1, 8'),
    ({'continuations': 0}, 'continuations: expected at least 1'),
    ({'schedule_tokens': 31}, 'schedule_tokens: expected at least 32'),
])
def test_settings_are_checked(changes, expected):
  with pytest.raises(errors.UsageError, match=expected):
    dataclasses.replace(_SMALL, **changes)


def test_help_says_the_defaults():
  text = cli_helpers.run('evidence', '--help').stdout
  text = ' '.join(text.split())
  settings = evidence.default_settings('gemma3-270m').to_json()
  for name in ('parts', 'dtypes', 'cases', 'lengths', 'offsets', 'tokens',
               'continuations', 'tail', 'schedule_tokens', 'block', 'samples'):
    value = re.search(rf'--{name}= .*?By default (.*?)\.(?: |$)', text)[1]
    assert value.replace(' ', '') == str(_flag(settings[name])), name


def test_settings_survive_json():
  value = json.loads(json.dumps(_SMALL.to_json()))
  assert evidence.Settings.from_json(value) == _SMALL
  with pytest.raises(errors.UsageError, match='other ones: more'):
    evidence.Settings.from_json(value | {'more': 1})
  for change, message in (
      ({'tokens': 'many'}, "tokens is 'many', expected int;"),
      ({'tokens': True}, 'tokens is True, expected int;'),
      ({'model': 7}, 'model is 7, expected str;'),
      ({'chunk': 'x'}, r"chunk is 'x', expected int \| None"),
      ({'text_file': 7}, r'text_file is 7, expected str \| None'),
      ({'offsets': 8}, 'offsets is 8, expected'),
      ({'cases': ['base', 1]}, 'cases is .*, expected')):
    with pytest.raises(errors.UsageError, match=message):
      evidence.Settings.from_json(value | change)


@pytest.mark.parametrize('flags,code,expected', [
    ((), 2, '--run_dir is missing'),
    (('--offsets=8,x',), 2, "--offsets: .*found 'x'"),
    (('--dtypes=int8',), 2, "dtypes: .*found 'int8'"),
    (('--tokens=5000',), 2, 'needs 50[0-9]+ positions, found a model of 4096'),
    (('--text_file=/no/such/file',), 2, 'text_file /no/such/file'),
])
def test_bad_input_leaves_nothing(tmp_path, flags, code, expected):
  path = tmp_path / 'run'
  flags = [*flags, f'--run_dir={path}'] if flags else []
  done = cli_helpers.run('evidence', '--model=tiny:0', *flags)
  assert done.rc == code
  assert len(done.stderr.strip().splitlines()) == 1
  assert re.search(expected, done.stderr), done.stderr
  assert not path.exists()


def test_a_text_is_a_regular_file(tmp_path):
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)  # Nobody writes: reading it would wait forever.
  settings = dataclasses.replace(_SMALL, text_file=str(pipe))
  with pytest.raises(errors.UsageError, match='no regular file'):
    evidence.run(settings, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_case_that_does_not_fit_the_chunk_is_left_out(tmp_path):
  settings = dataclasses.replace(
      _SMALL, parts=('study',), cases=('base', 'small_chunk'), chunk=8, tile=4,
      page=16, offsets=(8,), tail=2)
  lines = ledger_lib.read(evidence.run(settings, tmp_path / 'run'))
  assert any('small_chunk was left out: chunk' in line['body'].get('text', '')
             for line in lines)
  assert {b['group']['case'] for b in _bodies(lines, 'compare')} == {'base'}
  assert lines[-1]['kind'] == 'end'


def test_a_directory_with_a_run_is_refused(folder):
  before = (folder / 'ledger.jsonl').read_bytes()
  with pytest.raises(errors.UsageError, match='there is a run already'):
    evidence.run(_SMALL, folder)
  assert (folder / 'ledger.jsonl').read_bytes() == before


def _kinds():
  """Returns kind -> names of fields that LEDGER.md gives it."""
  path = pathlib.Path(recheck.__file__).parent / 'LEDGER.md'
  text = path.read_text(encoding='utf-8').split('## 3. Kinds')[1]
  rows = [row.split(' | ') for row in text.split('## 4.')[0].splitlines()
          if row.startswith('| `')]
  return {row[0].strip('| `'): set(re.findall('`([a-z0-9_]+)`', row[1]))
          for row in rows}


# Kinds that another sort of run writes; flywheel_test looks at them.
_FLYWHEEL = ('dataset', 'problem', 'attempt', 'answer', 'likelihood', 'entry',
             'refused', 'resumed')


def test_ledger_md_names_every_kind_and_its_fields(lines):
  told = _kinds()
  for kind, fields in recheck._FIELDS.items():
    assert set(fields) <= told[kind], kind
  written = {kind: set() for kind in told}
  for line in lines:
    written[line['kind']] |= set(line['body'])
  free = {'resources', 'case'}  # More in the text below; the factors.
  for kind in set(written) - free:
    assert written[kind] <= told[kind], kind
  assert {kind for kind in written if written[kind]} == set(told) - {
      'registration', 'expected', 'replayed', 'recovered', *_FLYWHEEL}
  text = (pathlib.Path(recheck.__file__).parent / 'LEDGER.md').read_text()
  assert all(f'`{name}`' in text for name in written['resources'])
