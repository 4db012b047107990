"""`kvgraft corpus`: every action, and every refusal in one line."""

import pathlib
import shutil
import sqlite3

import pytest

import command_helpers
from command_helpers import call
from command_helpers import ok
from command_helpers import refusal
from command_helpers import snapshot
from command_helpers import TINY
from kvgraft_jax.apps import common

pytest.importorskip('bm25s')

TEXTS = {
    'boats.md': '# Boats\n\nThe ferry leaves at noon.\n',
    'sub/birds': 'Gulls eat fish near the old pier.\n' * 5,
    'photo.jpg': 'x'}
BUILD = (TINY, '--passage_tokens=128')


@pytest.fixture(scope='module', autouse=True)
def models_fixture():
  with command_helpers.kept_models():
    yield


@pytest.fixture(scope='module', name='built')
def built_fixture(tmp_path_factory) -> pathlib.Path:
  root = tmp_path_factory.mktemp('built')
  for name, text in TEXTS.items():
    (root / 'texts' / name).parent.mkdir(parents=True, exist_ok=True)
    (root / 'texts' / name).write_text(text)
  result = call('corpus', 'build', root / 'c', f'--text_dir={root / "texts"}',
                *BUILD)
  assert result.rc == 0, result.stderr
  assert '2 documents in 3 passages' in result.stderr
  assert 'skipped 1, another kind of file: ' in result.stderr
  assert result.json['added'] == 2 and result.json['passages'] == 3
  assert result.json['tokens'] == result.json['tokens_computed']
  assert (root / 'c' / 'store').is_dir()
  return root


def test_building_again_computes_what_is_new(built, tmp_path):
  shutil.copytree(built, tmp_path / 'copy')
  where, texts = tmp_path / 'copy' / 'c', tmp_path / 'copy' / 'texts'
  request = ('corpus', 'build', where, f'--text_dir={texts}', *BUILD)
  again = ok(*request)
  assert (again['unchanged'], again['tokens_computed']) == (2, 0)
  (texts / 'boats.md').unlink()
  (texts / 'new.txt').write_text('Brand new.')
  changed = ok(*request)
  assert (changed['added'], changed['removed']) == (1, 1)
  assert changed['tokens_computed'] == 11
  # The corpus has its settings, and another one has others.
  assert 'passage_tokens differs' in refusal(
      2, *request[:-1], '--passage_tokens=64')
  assert 'sliding differs' in refusal(2, *request, '--sliding=full')
  other = ok('corpus', 'build', tmp_path / 'other', f'--text_dir={texts}', TINY,
             '--passage_tokens=64', '--sliding=full', '--limit_documents=1',
             f'--store={tmp_path / "elsewhere"}')
  assert other['documents'] == 1 and (tmp_path / 'elsewhere' / 'a').is_dir()
  assert not (tmp_path / 'other' / 'store').exists()


def test_an_answer_with_its_source(built):
  before = snapshot(built)
  result = call('corpus', 'ask', built / 'c', TINY, '--max_new_tokens=3',
                '--question=When does the ferry leave?', '--lead= At')
  assert result.rc == 0, result.stderr
  said = result.json
  assert (said['source'], said['title'], said['router']) == (
      'boats.md', 'Boats', 'bm25')
  assert result.stdout.splitlines()[0] == common.printable(said['text'])
  line, = result.stderr.splitlines()
  assert 'from boats.md#0 (Boats): ' in line
  assert f'{said["quality"]} choice by bm25, 2 of 5 words' in line
  assert said['exact'] and said['tokens_restored'] == len(TEXTS['boats.md']) + 1
  assert said['tokens_decoded'] <= 3 and said['startup_s'] > 0
  assert said['candidates'][0]['passage'] == said['passage']
  assert snapshot(built) == before


def test_routers_and_addresses(built):
  request = ('corpus', 'ask', built / 'c', TINY, '--question=Who eats fish?',
             '--max_new_tokens=1')
  by_model = ok(*request, '--router=model', '--k=1')
  assert by_model['router'] == 'model' and len(by_model['candidates']) == 1
  assert by_model['source'] == 'sub/birds' and by_model['margin'] > 0
  named = ok(*request, '--passage=boats.md')
  assert (named['router'], named['quality'], named['source']) == (
      'address', 'exact', 'boats.md')
  same = ok(*request, f'--passage={named["passage"][:12]}', '--router=address')
  assert same['artifact'] == named['artifact']
  assert 'sub/birds#0, sub/birds#1' in refusal(
      2, *request, '--passage=sub/birds')
  assert "did you mean 'boats.md'" in refusal(2, *request, '--passage=boat.md')


def test_no_passage_is_exit_code_1(built):
  result = call('corpus', 'ask', built / 'c', TINY, '--question=zebra')
  assert result.rc == 1 and result.json['passage'] is None
  line, = result.stderr.splitlines()
  assert line.startswith('kvgraft corpus: no passage has a word')
  assert result.json['why'] in line


def test_verify_and_stats(built):
  verified = ok('corpus', 'verify', built / 'c', TINY, '--passages=2',
                '--continuations=2')
  assert (verified['passages'], verified['equal'], verified['ok'],
          verified['sha256_equal'], verified['continuations']) == (
              2, 2, True, 4, 4)
  result = call('corpus', 'stats', built / 'c')
  assert result.rc == 0 and result.json['passages'] == 3
  assert result.json['unused'] == 0
  assert result.json['settings']['passage_tokens'] == '128'
  assert 'passages: 3\n' in result.stdout and 'block: ' in result.stdout


def test_another_model_is_refused_before_its_self_test(built):
  assert 'model differs' in refusal(
      2, 'corpus', 'ask', built / 'c', '--model=tiny:1', '--question=gulls')
  assert 'model differs' in refusal(
      2, 'corpus', 'verify', built / 'c', '--model=tiny:1')


def test_damage_is_said(built, tmp_path):
  shutil.copytree(built / 'c', tmp_path / 'c')
  db = sqlite3.connect(tmp_path / 'c' / 'corpus.sqlite')
  with db:
    db.execute("UPDATE passages SET text = 'Other.' WHERE ordinal = 1")
  db.close()
  assert 'sub/birds#1 is not what' in refusal(
      1, 'corpus', 'stats', tmp_path / 'c')
  shutil.copytree(built / 'c', tmp_path / 'd')
  shutil.rmtree(tmp_path / 'd' / 'store' / 'a')
  for more in ((), ('--on_mismatch=inexact',)):
    assert 'build it again' in refusal(
        1, 'corpus', 'ask', tmp_path / 'd', TINY, '--question=ferry', *more)


@pytest.mark.parametrize('args, rc, why', [
    ((), 2, '--action is missing'),
    (('ask',), 2, '--corpus is missing'),
    (('ask', 'none'), 2, '--question is missing'),
    (('ask', 'none', '--question=x'), 2, 'there is no corpus.sqlite'),
    (('ask', 'none', '--question=x', '--router=address'), 2,
     '--passage is missing'),
    (('ask', 'none', '--question=x', '--router=bm25', '--passage=y'), 2,
     'give one of them'),
    (('ask', 'none', '--question=x', '--text_dir=y'), 2,
     'ask takes no --text_dir'),
    (('ask', 'none', '--question=x', '--k=0'), 2, '--k'),
    (('ask', 'none', '--question=x', '--router=oracle'), 2, 'oracle'),
    (('build', 'NEW'), 2, '--text_dir is missing'),
    (('build', 'NEW', '--text_dir=none'), 2, 'no such directory'),
    (('build', 'NEW', '--text_dir=.', TINY, '--passage_tokens=8'), 2,
     'expected 16'),
    (('verify', 'none'), 2, 'there is no corpus.sqlite'),
    (('verify', 'none', '--question=x'), 2, 'verify takes no --question'),
    (('verify', 'none', '--on_mismatch=inexact'), 2,
     "verify takes no --on_mismatch, found 'inexact'; remove it"),
    (('stats', 'none'), 2, 'there is no corpus.sqlite'),
    (('stats', 'none', 'more'), 2, 'unexpected argument'),
    (('mend', 'none'), 2, 'mend'),
])
def test_refusals(tmp_path, monkeypatch, args, rc, why):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'texts').mkdir()
  assert why in refusal(rc, 'corpus', *args)
  assert not (tmp_path / 'none').exists() and not (tmp_path / 'NEW').exists()


def test_help_and_hints():
  result = call('corpus', '--help')
  assert result.rc == 0 and 'build CORPUS' in result.stdout
  build = call('corpus', 'build', '--help').stdout
  assert '--text_dir=' in build and '--question=' not in build
  assert '--model=' in build
  stats = call('corpus', 'stats', '--help').stdout
  assert '--model=' not in stats and '--passage_tokens=' not in stats
  assert '`kvgraft corpus' in call('buidl').stderr
