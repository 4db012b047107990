import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import cli_helpers
import command_helpers
from command_helpers import call
from command_helpers import ok
from command_helpers import refusal
from command_helpers import TINY
import gguf_writer
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import sampling
from kvgraft_jax import store as store_lib
from kvgraft_jax.apps import common
from kvgraft_jax.apps import inputs
from kvgraft_jax.apps import main
from kvgraft_jax.checkpoints import resolve

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = 'The tide table of Port Ellery lists the heights of the water. ' * 3


@dataclasses.dataclass
class Scene:
  """A store with an artifact named doc."""

  store: pathlib.Path
  deposited: dict
  ids: list[int]

  @property
  def flags(self) -> tuple[str, str]:
    return TINY, f'--store={self.store}'


@pytest.fixture(scope='module', autouse=True)
def models_fixture():
  with command_helpers.kept_models():
    yield


@pytest.fixture(scope='module', name='scene')
def scene_fixture(tmp_path_factory):
  root = tmp_path_factory.mktemp('cli')
  (root / 'doc.txt').write_text(TEXT)
  made = ok('deposit', TINY, f'--store={root / "store"}',
            f'--text_file={root / "doc.txt"}', '--name=doc')
  return Scene(root / 'store', made, [2] + [4 + b for b in TEXT.encode()])


def tokens_file(folder, ids) -> str:
  path = folder / f'{len(ids)}-{hashing.json_sha256("test", ids)[:8]}.json'
  path.write_text(json.dumps(ids))
  return f'--tokens_file={path}'


def test_without_a_model_nothing_imports_jax(scene):
  code = f'''
import contextlib, io, sys
from kvgraft_jax.apps import main
for argv in ([], ['--help'], ['--version'], ['ls', '--store={scene.store}'],
             ['show', '--store={scene.store}', '--artifact=doc'],
             ['tokenize', '--model=tiny:0', '--prompt=x'],
             *([c, '--help'] for c in main.COMMANDS)):
  out = io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
    rc = main.main(argv)
  assert rc == (2 if not argv else 0), (argv, out.getvalue())
assert 'jax' not in sys.modules
'''
  done = subprocess.run([sys.executable, '-c', code], capture_output=True,
                        text=True, timeout=120, check=False)
  assert done.returncode == 0, done.stderr


def test_help_names_every_command_and_its_flags():
  overview = call('--help')
  assert overview.rc == 0
  for name in main.COMMANDS:
    assert f'\n  {name} ' in overview.stdout
    text = call(name, '--help').stdout
    assert f'kvgraft {name} ' in text and '--config=' in text
    assert ('--temperature' in text) == (
        name in ('graft', 'generate', 'flywheel'))
    assert ('--dtype=' in text) == (
        name not in ('ls', 'show', 'tokenize', 'evidence', 'ledger', 'report',
            'library'))
    assert all(len(line) <= 80 for line in text.splitlines()), name
  assert call('--version').stdout.strip()


@pytest.mark.parametrize('action, own, other', [
    ('recheck', '--head=', '--out='), ('preregister', '--out=', '--head='),
    ('replay', '--run_dir=', '--other='), ('diff', '--other=', '--run_dir='),
])
def test_each_action_has_a_help_of_its_own(action, own, other):
  text = call('ledger', action, '--help').stdout
  assert f'usage: kvgraft ledger {action} DIR' in text
  assert f'\n  kvgraft ledger {action} ' in text
  assert own in text and other not in text and '--action' not in text
  assert all(len(line) <= 80 for line in text.splitlines())
  assert ('takes as long as the run' in text) == (action == 'recheck')


@pytest.mark.parametrize('argv, message', [
    ([], 'no command was given'),
    (['grafft'], 'did you mean `kvgraft graft`?'),
    (['replay'], 'did you mean `kvgraft ledger replay`?'),
    (['rechek', 'runs/x'], 'did you mean `kvgraft ledger recheck`?'),
    (['xyz'], 'kvgraft --help'),
])
def test_an_unknown_command_is_usage(argv, message):
  result = call(*argv)
  assert result.rc == 2 and message in result.stderr and not result.stdout


def test_a_module_runs_as_a_command_in_a_process_of_its_own(scene):
  env = cli_helpers.environment(PYTHONPATH=os.pathsep.join(sys.path))
  done = subprocess.run(
      [sys.executable, '-m', 'kvgraft_jax.apps.ls', f'--store={scene.store}'],
      env=env, capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == 0
  assert json.loads(done.stdout.splitlines()[-1])['damaged'] == []


def test_a_closed_pipe_is_no_news(scene):
  read, write = os.pipe()
  os.close(read)
  with os.fdopen(write, 'wb') as pipe:
    done = subprocess.run(
        cli_helpers.command('ls', f'--store={scene.store}'), stdout=pipe,
        env=cli_helpers.environment(PYTHONPATH=os.pathsep.join(sys.path)),
        stderr=subprocess.PIPE, timeout=60, check=False)
  assert done.returncode == 1 and done.stderr == b''


def test_deposit_computes_once(scene):
  made = scene.deposited
  assert made['tokens'] == made['tokens_computed'] == len(scene.ids)
  assert made['end'] == len(scene.ids) and made['start'] == 0
  assert made['bytes'] > 0 and not made['existed']
  again = ok('deposit', *scene.flags, f'--prompt={TEXT}', '--name=doc')
  assert again['tokens_computed'] == 0 and again['existed']
  assert (again['artifact'], again['key']) == (made['artifact'], made['key'])


def test_grafted_recomputed_and_generated_are_one_computation(scene, tmp_path):
  request = ('--prompt= Hello', '--max_new_tokens=6')
  grafted = ok('graft', *scene.flags, '--artifact=doc', *request)
  fresh = ok('graft', *scene.flags, '--artifact=doc', *request, '--recompute')
  ids = scene.ids + [4 + b for b in b' Hello']
  alone = ok('generate', TINY, tokens_file(tmp_path, ids), request[1])
  assert grafted['tokens_restored'] == len(scene.ids)
  assert grafted['tokens_computed'] == 6
  for other in (fresh, alone):
    assert other['tokens_restored'] == 0
    assert other['tokens_computed'] == len(ids)
    for name in ('logits_sha256', 'token_ids', 'text', 'tokens_decoded',
                 'prompt_tokens'):
      assert other[name] == grafted[name], name
  assert grafted['exact'] is True and fresh['exact'] is True
  assert alone['exact'] is None
  assert len(grafted['token_ids']) == grafted['tokens_decoded'] <= 6
  assert 0 < grafted['ttft_s'] and 0 < grafted['startup_s']
  assert set(alone) <= set(grafted) | {'exact'}


def test_another_process_says_the_same(scene):
  args = ('graft', *scene.flags, '--artifact=doc', '--prompt=x',
          '--max_new_tokens=3')
  here = ok(*args)
  there = cli_helpers.run(
      *args, env={'PYTHONPATH': os.pathsep.join(sys.path)})
  assert there.rc == 0, there.stderr
  assert there.json['logits_sha256'] == here['logits_sha256']
  assert there.json['token_ids'] == here['token_ids']
  assert there.json['text'] == here['text']
  # The text for people stands above the JSON line.
  assert there.stdout.count('\n') >= 2


def test_an_empty_continuation_runs_the_last_position(scene, tmp_path):
  for ref in (scene.deposited['artifact'], scene.deposited['artifact'][:12],
              scene.deposited['key']):
    got = ok('graft', *scene.flags, f'--artifact={ref}', '--max_new_tokens=0')
    assert got['tokens_restored'] == len(scene.ids) - 1
    assert got['tokens_computed'] == 1 and got['token_ids'] == []
  out = tmp_path / 'x.npz'
  row = ok('logits', TINY, tokens_file(tmp_path, scene.ids), f'--out={out}')
  assert row['sha256'] == [got['logits_sha256']]


def test_any_length_of_it(scene, tmp_path):
  for length in (1, 33):
    got = ok('graft', *scene.flags, '--artifact=doc', f'--length={length}',
             '--prompt=abc', '--max_new_tokens=2')
    ids = scene.ids[:length] + [4 + b for b in b'abc']
    alone = ok('generate', TINY, tokens_file(tmp_path, ids),
               '--max_new_tokens=2')
    assert got['tokens_restored'] == got['length'] == length
    assert got['logits_sha256'] == alone['logits_sha256']
  for length in (0, len(scene.ids) + 1):
    assert 'length' in refusal(
        2, 'graft', *scene.flags, '--artifact=doc', f'--length={length}')


def test_a_child_is_kept_checked_and_listed(scene):
  grown = ok('graft', *scene.flags, '--artifact=doc', '--length=50',
             '--prompt= and', '--max_new_tokens=5', '--deposit_as=child')
  child = ok('show', f'--store={scene.store}', '--artifact=child')
  assert child['id'] == grown['deposited']
  assert [c['id'] for c in child['chain']] == [
      scene.deposited['artifact'], child['id']]
  assert child['start'] == 50
  assert child['end'] == 54 + grown['tokens_decoded']
  assert child['lengths'] == [[1, child['end']]]
  checked = ok('verify', *scene.flags, '--artifact=child', '--continuations=3')
  assert checked['sha256_equal'] == checked['argmax_agree'] == 3
  assert checked['continuations'] == 3 and checked['max_kl'] == 0.0
  assert checked['greedy_tokens_equal'] == 64 and checked['ok']
  blocks = ok('audit', *scene.flags, '--artifact=child', '--blocks=all')
  assert blocks['blocks_checked'] == blocks['blocks_equal'] > 0
  assert blocks['blocks_not_auditable'] == 0
  listed = ok('ls', f'--store={scene.store}')
  by_name = {n: a for a in listed['artifacts'] for n in a['names']}
  assert by_name['child']['parent'] == by_name['doc']['id']
  line = refusal(2, 'graft', *scene.flags, '--artifact=doc',
                 '--deposit_as=child')
  assert 'taken' in line


def test_a_child_by_parent_and_a_window(scene):
  made = ok('deposit', *scene.flags, '--prompt= more of it', '--parent=doc',
            '--parent_length=40', '--sliding=window', '--block=64')
  assert (made['start'], made['end']) == (40, 51)
  assert made['tokens'] == made['tokens_computed'] == 11
  assert made['block'] == 64 and made['sliding'] == 'window'
  long = ok('deposit', *scene.flags, f'--prompt=x{TEXT}', '--sliding=window')
  shown = call('show', f'--store={scene.store}',
               f'--artifact={long["artifact"]}')
  [[first, last]] = shown.json['lengths']
  assert last == len(scene.ids) + 1 and 1 < first < last
  for length in (first, last):
    ok('graft', *scene.flags, f'--artifact={long["artifact"]}',
       f'--length={length}', '--max_new_tokens=1')
  line = refusal(2, 'graft', *scene.flags, f'--artifact={long["artifact"]}',
                 f'--length={first - 1}', '--max_new_tokens=1')
  assert f'{first} to {last}' in line


def test_score_behind_an_artifact_and_alone(scene, tmp_path):
  behind = ok('score', *scene.flags, '--artifact=doc', '--prompt= So',
              '--continuation= far')
  assert behind['tokens'] == 4 == len(behind['logprobs'])
  assert behind['tokens_restored'] == len(scene.ids)
  assert behind['exact'] is True
  ids = scene.ids + [4 + b for b in b' So']
  (tmp_path / 'c.json').write_text(json.dumps([4 + b for b in b' far']))
  alone = ok('score', TINY, tokens_file(tmp_path, ids),
             f'--continuation_tokens_file={tmp_path / "c.json"}')
  assert alone['logprobs'] == behind['logprobs']
  assert alone['exact'] is None
  # The same from the logits themselves.
  whole = ids + [4 + b for b in b' far']
  out = tmp_path / 'l.npz'
  ok('logits', TINY, tokens_file(tmp_path, whole), f'--out={out}', '--rows='
     + ','.join(str(len(ids) - 1 + i) for i in range(4)))
  with np.load(out) as f:
    expected = [sampling.log_softmax_at(row, token)
                for row, token in zip(f['logits'], whole[len(ids):])]
  assert behind['logprobs'] == expected
  assert behind['logprob'] == pytest.approx(sum(expected), abs=1e-12)


def test_score_of_a_text_behind_bos():
  got = ok('score', TINY, '--prompt=abc')
  assert got['token_ids'] == [4 + b for b in b'abc']
  split = ok('score', TINY, '--prompt=a', '--continuation=bc')
  assert split['logprobs'] == got['logprobs'][1:]
  assert 'behind something' in refusal(
      2, 'score', TINY, '--continuation=x')
  assert 'nothing to score' in refusal(2, 'score', TINY)


def test_logits_file(tmp_path):
  out = tmp_path / 'x.npz'
  args = ('logits', TINY, tokens_file(tmp_path, [2, 50, 60, 70, 80, 90]))
  got = ok(*args, '--rows=0,5,2', f'--out={out}')
  with np.load(out) as f:
    assert sorted(f) == ['logits', 'rows']
    assert f['rows'].tolist() == [0, 5, 2]
    assert f['logits'].dtype == np.float32 and f['logits'].shape == (3, 320)
    assert got['sha256'] == [hashing.logits_sha256(r) for r in f['logits']]
    rows = f['logits']
  ok(*args, '--rows=all', f'--out={out}')
  with np.load(out) as f:
    assert f['logits'][[0, 5, 2]].tobytes() == rows.tobytes()
  before = command_helpers.snapshot(tmp_path)
  for bad, message in (('--rows=6', '0 to 5'), ('--rows=-1', '0 to 5'),
                       ('--rows=a', 'numbers such as')):
    assert message in refusal(2, *args, bad, f'--out={out}')
  assert 'existing directory' in refusal(
      2, *args, f'--out={tmp_path / "no" / "x.npz"}')
  assert 'existing directory' in refusal(2, *args, f'--out={tmp_path}')
  assert '--out is missing' in refusal(2, *args)
  assert command_helpers.snapshot(tmp_path) == before


def test_tokenize_there_and_back(tmp_path):
  got = ok('tokenize', TINY, '--prompt=h\u00e9!')
  assert got['token_ids'] == [2, 108, 199, 173, 37]
  assert got['text'] == 'h\u00e9!' and got['round_trip'] is True
  assert ok('tokenize', TINY, '--prompt=h', '--nobos')['token_ids'] == [108]
  back = ok('tokenize', TINY, tokens_file(tmp_path, got['token_ids']))
  assert back['text'] == 'h\u00e9!'
  assert '0 to 319' in refusal(
      2, 'tokenize', TINY, tokens_file(tmp_path, [320]))
  assert 'no tokenizer' in refusal(
      2, 'tokenize', '--model=random:gemma3-27b:0', '--prompt=x')


def test_samples_are_those_drawn_alone():
  args = ('generate', TINY, '--prompt=ab', '--max_new_tokens=5',
          '--temperature=1', '--top_k=50', '--seed=3')
  result = call(*args, '--num_samples=2')
  assert result.rc == 0
  samples = result.json['samples']
  assert len(samples) == 2 and '--- sample 1' in result.stdout
  assert samples[0]['token_ids'] != samples[1]['token_ids']
  assert result.json['tokens_decoded'] == sum(
      len(s['token_ids']) for s in samples)
  assert ok(*args)['token_ids'] == samples[0]['token_ids']
  assert 'num_samples' in refusal(2, *args, '--num_samples=0')
  assert 'temperature' in refusal(2, *args, '--temperature=-1')
  assert 'top_p' in refusal(2, *args, '--top_p=0')


def test_speculation_changes_the_steps_alone(tmp_path):
  store = f'--store={tmp_path}'
  ok('deposit', TINY, store, '--prompt=' + 'ab cd ' * 9, '--name=a')
  for command in (('generate', '--prompt=' + 'ab cd ' * 9),
                  ('graft', store, '--artifact=a', '--prompt=ab')):
    args = (*command, TINY, '--max_new_tokens=40')
    plain, fast, most = (
        ok(*args, *more) for more in (['--speculate=1'], [], ['--speculate=7']))
    assert plain['decode_steps'] == 40 and plain['tokens_per_step'] == 1
    assert plain['speculate'] == 1
    assert fast['speculate'] == 16 and most['speculate'] == 7
    for other in (fast, most):
      assert other['decode_steps'] < 40
      assert other['tokens_per_step'] == round(40 / other['decode_steps'], 3)
      for key in ('token_ids', 'text', 'logits_sha256', 'finish_reason'):
        assert other[key] == plain[key]
  several = ok(*args, '--num_samples=2', '--speculate=7')
  assert several['speculate'] == several['tokens_per_step'] == 1
  logits = ok(*args[:-1], '--max_new_tokens=0')
  assert logits['decode_steps'] == 0 and logits['tokens_per_step'] is None
  assert 'speculate' in refusal(2, *args, '--speculate=0')


def test_numerics_shows_the_self_test():
  result = call('numerics', TINY, '--quick')
  got = result.json
  assert result.rc == 0 and got['exact'] is True and got['measured'] == {}
  assert len(got['fingerprint']) == 64
  assert {'run', 'chunk', 'tile', 'slot', 'batch', 'capacity'} <= set(
      got['invariances'])
  assert set(got['invariances'].values()) <= {True, False, None}
  assert set(got['profile']) - set(got['class']) == {'chunk', 'tile'}
  assert 'self-test' in result.stdout


@pytest.mark.slow
def test_numerics_measures_threads_and_columns():
  got = ok('numerics', TINY)
  quick = ok('numerics', TINY, '--quick')
  assert got['fingerprint'] == quick['fingerprint']
  assert '1' in got['measured']['threads']
  assert set(got['measured']['threads'].values()) <= {True, False}
  heads = [c for c in got['measured']['columns'] if c['out'] == 320]
  assert [c['rows'] for c in heads] == [4]
  assert set(heads[0]['equal']) == {'1/2', '1/4', '1/8'}


def test_another_class_is_named_recomputed_or_inexact(scene, tmp_path):
  """An artifact from a machine with another CPU."""
  here = engine.load_model('tiny:0')
  other = engine.Model(
      resolve.resolve('tiny:0', 'bfloat16'),
      dataclasses.replace(here.profile, environment=tuple(sorted(
          (dict(here.profile.environment) | {'cpu': 'Other 1'}).items()))))
  other._report = here.self_test()
  depositing.deposit(
      other, store_lib.Store(str(tmp_path)), scene.ids, name='doc')
  artifact = (TINY, f'--store={tmp_path}', '--artifact=doc')
  args = ('graft', *artifact, '--prompt=x', '--max_new_tokens=2')
  line = refusal(2, *args)
  assert 'differ in cpu, expected Other 1, found' in line
  assert '--on_mismatch=recompute' in line
  again = ok(*args, '--on_mismatch=recompute')
  assert again['exact'] is True and again['recomputed'] is True
  assert again['tokens_restored'] == 0
  fresh = ok(*args, '--recompute')
  assert again['logits_sha256'] == fresh['logits_sha256']
  inexact = call(*args, '--on_mismatch=inexact')
  assert inexact.json['exact'] is False and 'not exact' in inexact.stderr
  assert inexact.json['tokens_restored'] == len(scene.ids)
  score = ok('score', *artifact, '--continuation=x', '--on_mismatch=inexact')
  assert score['exact'] is False
  for name in ('verify', 'audit'):
    assert 'differ in cpu' in refusal(2, name, *artifact)
  assert 'exact' in refusal(2, *args, '--on_mismatch=inexact',
                            '--deposit_as=child')


def test_a_false_deposit_fails_verify_and_audit(scene, tmp_path):
  """An artifact with sound digests that is not what the model computes."""
  model = engine.load_model('tiny:0')
  norm = model.params['layer_0']['pre_attention_norm']
  norm['scale'] = norm['scale'] * 1.5
  store = store_lib.Store(str(tmp_path))
  depositing.deposit(model, store, scene.ids, name='doc')
  flags = (TINY, f'--store={tmp_path}', '--artifact=doc')
  checked = call('verify', *flags, '--continuations=3')
  assert checked.rc == 1 and checked.json['ok'] is False
  assert checked.json['sha256_equal'] == 0 and checked.json['max_kl'] > 0
  blocks = call('audit', *flags, '--blocks=2')
  assert blocks.rc == 1 and blocks.json['blocks_checked'] == 4
  assert blocks.json['blocks_equal'] < 4
  assert 'positions 0 to 31' in blocks.stderr
  assert "expected 'all'" in refusal(2, 'audit', *flags, '--blocks=none')


def test_config_file_sets_flags_and_the_command_line_wins(tmp_path):
  path = tmp_path / 'c.py'

  def config(body):
    path.write_text(f'def get_config():\n  {body}\n')
    return f'--config={path}'

  args = ('generate', '--prompt=a')
  both = config("return {'model': 'tiny:0', 'max_new_tokens': 3, 'seed': 1}")
  assert ok(*args, both)['tokens_decoded'] == 3
  assert ok(*args, both, '--max_new_tokens=2')['tokens_decoded'] == 2
  # One file serves several commands: other commands' flags are no error.
  more = config("return {'model': 'tiny:0', 'seed': 1, 'capacity': 64}")
  assert ok('plan', more)['model'] == 'tiny'
  both = config("return {'model': 'tiny:0', 'max_new_tokens': 3, 'seed': 1}")
  for body, message in (
      ("return {'modle': 'tiny:0'}", "'modle' is not a flag"),
      ("return {'max_new_tokens': 'x'}", 'max_new_tokens'),
      ("return {'dtype': 'float16'}", 'bfloat16|float32'),
      ('return 3', 'returns a dict'), ('return {', 'SyntaxError'),
      ('raise OSError(5)', 'OSError'), ("return {3: 4}", 'is not a flag')):
    assert message in refusal(2, *args, config(body)), body
  path.write_text('x = 1\n')
  assert 'get_config()' in refusal(2, *args, f'--config={path}')
  assert 'no such file' in refusal(2, *args, f'--config={tmp_path / "no"}')


@pytest.mark.parametrize('name', ['tiny', 'gemma3_270m'])
def test_configs_of_the_project_are_accepted(name):
  path = ROOT / 'configs' / f'{name}.py'
  text = call('numerics', f'--config={path}', '--nope').stderr
  assert 'nope' in text
  values = {}
  exec(path.read_text(), values)  # What --config does.
  assert values['get_config']()['model'] in ('tiny:0', 'gemma3-270m')
  assert 'Expected' in values['__doc__'] and 'kvgraft' in values['__doc__']


@pytest.mark.parametrize('argv, message', [
    (['generate', '--nope=1'], 'nope'),
    (['generate', '--promt=1'], 'prompt'),
    (['generate', '--max_new_tokens=x', '--prompt=a'], 'max_new_tokens'),
    (['generate', '--max_new_tokens=-1', '--prompt=a'], 'max_new_tokens'),
    (['generate', '--chunk=0', '--prompt=a'], 'chunk'),
    (['generate', '--dtype=float16', '--prompt=a'], 'bfloat16|float32'),
    (['generate', '--prompt=a', 'b'], "unexpected argument 'b'"),
    (['generate'], 'no text'),
    (['generate', '--prompt=a', '--prompt_file=b'], 'exclude each other'),
    (['generate', '--model=gemma9', '--prompt=a'], 'no such model'),
    (['generate', TINY, '--chunk=24', '--prompt=a'], 'power of two'),
    (['generate', TINY, '--capacity=4097', '--prompt=a'], '1 to 4096'),
    (['generate', TINY, '--capacity=4097', '--prompt=a'],
     'allow_beyond_trained'),
    (['generate', TINY, '--capacity=16777217', '--allow_beyond_trained',
      '--prompt=a'], '1 to 16777216'),
    (['flywheel', TINY, '--allow_beyond_trained'], 'allow_beyond_trained'),
    (['deposit', TINY, '--prompt=a'], '--store is missing'),
    (['ls', '--store=/nonexistent/x'], 'no store'),
    (['ls', '--store=ftp://x/y'], 'ftp://x/y'),
    (['graft', '--store=.', '--prompt=a'], '--artifact is missing'),
    (['verify', '--store=.', '--artifact=a1', '--continuations=0'],
     'continuations'),
    (['deposit', '--store=.', '--prompt=a', '--parent_length=3'],
     'needs --parent'),
])
def test_wrong_usage_is_one_line(argv, message):
  assert message in refusal(2, *argv)


def test_a_flag_lets_a_context_be_longer_than_trained(tmp_path):
  ids = tmp_path / 'ids'
  ids.write_text(json.dumps([5] * 4097))
  args = ('generate', TINY, f'--tokens_file={ids}', '--max_new_tokens=0')
  assert 'allow_beyond_trained' in refusal(2, *args)
  done = call(*args, '--allow_beyond_trained')
  assert done.rc == 0 and done.json['tokens_computed'] == 4097
  assert done.stderr.count('beyond the 4096 that tiny was trained for') == 1


def test_errors_without_a_name_are_one_line_too(monkeypatch):
  def fails(error):
    def fail(*unused_args, **unused_kwargs):
      raise error
    monkeypatch.setattr(common, 'open_store', fail)
    return call('ls', '--store=x')

  for error, rc, message in (
      (RuntimeError('strange\nthing'), 1, 'unexpected RuntimeError: strange;'),
      (MemoryError(), 1, 'out of memory'),
      (RuntimeError('RESOURCE_EXHAUSTED: Out of memory'), 1, 'out of memory'),
      (PermissionError(13, 'Permission denied', '/x'), 1, '/x: Permission'),
      (KeyboardInterrupt(), 130, 'interrupted')):
    result = fails(error)
    assert result.rc == rc and result.stdout == ''
    assert message in result.stderr and result.stderr.count('\n') == 1
  fails(RuntimeError('strange'))
  shown = call('ls', '--store=x', '--traceback')
  assert shown.rc == 1 and 'Traceback' in shown.stderr
  monkeypatch.setenv('KVGRAFT_TRACEBACK', '1')
  assert 'Traceback' in call('ls', '--store=x').stderr


def test_demo_on_the_tiny_model(tmp_path, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join(sys.path))
  for name in ('JAX_NUMPY_DTYPE_PROMOTION', 'JAX_NUMPY_RANK_PROMOTION'):
    monkeypatch.delenv(name, raising=False)
  store = tmp_path / 'store'
  result = call('demo', TINY, '--max_new_tokens=4', f'--store={store}')
  got = result.json
  assert result.rc == 0, result.stderr
  assert got['sha256_equal'] is True and got['text_equal'] is True
  assert got['ttft_cold_s'] > 0 and got['ttft_graft_s'] > 0
  assert got['tokens_restored'] == got['tokens_deposited']
  assert got['tokens_computed_fresh'] == (
      got['tokens_restored'] + got['tokens_computed'])
  assert 'EQUAL, byte for byte' in result.stdout
  assert len(ok('ls', f'--store={store}')['artifacts']) == 1


def test_bos_and_boundaries_with_a_subword_vocabulary(
    tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('KVGRAFT_CACHE_DIR', str(tmp_path / 'cache'))
  path = tmp_path / 'm.gguf'
  gguf_writer.write_model(path)
  model = engine.load_model(
      str(path), chunk=32, tile=4, page=16, self_test=False)
  args = argparse.Namespace(allow_double_bos=False)
  allowed = argparse.Namespace(allow_double_bos=True)
  encode = model.tokenizer.encode
  # Exactly at position 0.
  assert inputs.to_ids(args, model, 'the', 0) == encode('the', add_bos=True)
  assert inputs.to_ids(args, model, 'the', 7) == encode('the', add_bos=False)
  for what, start in (('<bos>the', 0), ('<bos>the', 7), ([2, 2, 9], 0),
                      ([2, 9], 7)):
    with pytest.raises(errors.UsageError, match='second bos'):
      inputs.to_ids(args, model, what, start)
    assert inputs.to_ids(allowed, model, what, start)
  for what, start in (([2, 9, 2], 0), ([9, 2, 2], 7), ([9], 0)):
    assert inputs.to_ids(args, model, what, start) == what
  # 't' and 'he' would be one piece.
  before = encode('a t', add_bos=True)
  assert inputs.boundary_merges(model, before, 'he')
  assert "'a t' and 'he'" in capsys.readouterr().err
  assert not inputs.boundary_merges(model, before, ' he')
  assert not inputs.boundary_merges(model, before, [9])
  assert not inputs.boundary_merges(model, [2], 'he')
  assert capsys.readouterr().err == ''
  got = ok('tokenize', f'--model={path}', '--prompt=the')
  assert got['token_ids'] == encode('the', add_bos=True)
  assert 'second bos' in refusal(
      2, 'tokenize', f'--model={path}', '--prompt=<bos>a')


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_points_out_a_boundary(tmp_path):
  ok('deposit', f'--store={tmp_path}', '--prompt=The quick br', '--name=doc')
  result = call('graft', f'--store={tmp_path}', '--artifact=doc',
                '--prompt=own fox', '--max_new_tokens=4')
  assert result.rc == 0 and result.json['boundary_merges'] is True
  assert 'would be tokenized otherwise' in result.stderr
  assert result.json['text'] in result.stdout
  assert 'second bos' in refusal(
      2, 'generate', '--prompt=<bos>The', '--max_new_tokens=1')
