"""Routers find the right passage, and say how sure that is."""

import builtins
import os
import pathlib
import subprocess
import sys

import pytest

import corpora_test
import kvgraft_jax
from kvgraft_jax import corpora
from kvgraft_jax import corpus_routing as routing
from kvgraft_jax import errors

BOATS = ('# Boats\n\nThe ferry leaves at noon from the old pier.\n\n'
         '## Fares\n\nA ticket costs four crowns.\n')
BIRDS = '# Birds\n\nGulls eat fish near the pier.\n'


@pytest.fixture
def corpus(tmp_path):
  with corpora.Corpus(tmp_path / 'corpus', create=True) as made:
    corpora_test.put(made, 'town/boats.md', BOATS, limit=70)
    corpora_test.put(made, 'birds.md', BIRDS, limit=70)
    yield made


def places(candidates):
  return [one.passage.place for one in candidates]


@pytest.mark.parametrize('address, place, why', [
    ('town/boats.md#1', 'town/boats.md#1', 'place'),
    ('birds.md', 'birds.md#0', 'path'), ('Fares', 'town/boats.md#1', 'heading'),
    ('  BOATS ', 'town/boats.md#0', 'heading'),
    ('birds', 'birds.md#0', 'heading')])
def test_addresses(corpus, address, place, why):
  router = routing.AddressRouter(corpus)
  one, = router.route(address)
  assert (one.passage.place, one.why, one.score) == (place, why, 1.0)
  assert router.judge([one]) == routing.Judgement('exact', None)


def test_ids_are_addresses(corpus):
  router = routing.AddressRouter(corpus)
  for passage in corpus.passages():
    for address in (passage.id, passage.id[:10], passage.id[:9].upper()):
      one, = router.route(address)
      assert (one.passage, one.why) == (passage, 'id')


def test_wrong_addresses_are_told(corpus):
  router = routing.AddressRouter(corpus)
  with pytest.raises(errors.UsageError, match='2 passages have the path.*'
                     'town/boats.md#0, town/boats.md#1; give one'):
    router.route('town/boats.md')
  for address, hint in (('fare', "mean 'fares'"), ('0123456789', 'give an id'),
                        ('town/boats.md#2', 'give an id|did you mean')):
    with pytest.raises(errors.NotFoundError, match=hint) as caught:
      router.route(address)
    assert '\n' not in str(caught.value)
  corpora_test.put(corpus, 'odd', '# C#1\n\nA heading like a place.')
  assert places(router.route('c#1')) == ['odd#0']
  # A title that is no heading, and a heading of two passages.
  corpora_test.put(corpus, 'plain', 'Just a line\n\nand more')
  assert places(router.route('just a  LINE')) == ['plain#0']
  corpora_test.put(corpus, 'more.md', BIRDS)
  with pytest.raises(errors.UsageError, match='birds.md#0, more.md#0'):
    router.route('Birds')


def test_bm25(corpus):
  pytest.importorskip('bm25s')
  router = routing.Bm25Router(corpus)
  found = router.route('When does the ferry leave the pier?', 4)
  assert places(found)[0] == 'town/boats.md#0' and len(found) > 1
  assert [one.score for one in found] == sorted(
      (one.score for one in found), reverse=True)
  judged = router.judge(found)
  assert judged.quality == 'clear' and judged.margin == pytest.approx(
      1 - found[1].score / found[0].score)
  assert places(router.route('CROWNS?', 4)) == ['town/boats.md#1']
  assert router.judge(router.route('crowns', 4)) == routing.Judgement(
      'only', None)
  # The path and the title count as well.
  assert set(places(router.route('boats', 4))) == {
      'town/boats.md#0', 'town/boats.md#1'}
  assert places(router.route('the pier', 1)) in (
      ['town/boats.md#0'], ['birds.md#0'])
  for question in ('zebra', '', '?!'):
    assert router.route(question, 4) == []
  assert router.judge([]) == routing.Judgement('none', None)


def test_the_index_is_made_once_and_anew_after_changes(corpus, monkeypatch):
  pytest.importorskip('bm25s')
  router = routing.Bm25Router(corpus)
  read = []
  real = corpora.Corpus.passages
  monkeypatch.setattr(
      corpora.Corpus, 'passages', lambda self: read.append(1) or real(self))
  for _ in range(3):
    assert places(router.route('gulls', 4)) == ['birds.md#0']
  assert read == [1]
  corpora_test.put(corpus, 'birds.md', '# Birds\n\nTerns dive.\n')
  assert router.route('gulls', 4) == []
  assert places(router.route('terns', 4)) == ['birds.md#0']
  corpus.remove(['birds.md', 'town/boats.md'])
  assert router.route('terns', 4) == [] and len(read) == 3


@pytest.mark.parametrize('margin, quality', [
    (0.25, 'clear'), (0.24, 'close'), (0.05, 'close'), (0.04, 'doubtful'),
    (0.0, 'doubtful')])
def test_judgements(corpus, margin, quality):
  two = [routing.Candidate(next(corpus.passages()), score, '')
         for score in (1.0, 1 - margin)]
  assert routing.judge(two, margin, 0.25, 0.05) == routing.Judgement(
      quality, margin)
  # A float more or less decides nothing at a rounded edge.
  assert routing.Bm25Router(corpus).judge(two).margin == pytest.approx(margin)


def test_words_of_a_question(corpus):
  passage, = corpus.passages('birds.md')
  assert routing.words('Do gulls, GULLS eat bread?') == 4
  assert routing.words_found('Do gulls, GULLS eat bread?', passage) == 2


def test_words_without_their_package_are_one_line(corpus, monkeypatch):
  real = builtins.__import__

  def missing(name, *args, **kwargs):
    if name == 'bm25s':
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', missing)
  with pytest.raises(errors.MissingDependencyError, match='give the passage'):
    routing.Bm25Router(corpus).route('gulls')
  assert routing.AddressRouter(corpus).route('birds.md')


def test_the_package_has_a_corpus_without_jax():
  assert kvgraft_jax.Corpus is corpora.Corpus
  code = ('import sys, kvgraft_jax as k; k.Corpus;'
          ' import kvgraft_jax.corpus_routing, kvgraft_jax.apps.corpus;'
          ' sys.exit("jax" in sys.modules)')
  done = subprocess.run(
      [sys.executable, '-c', code], check=False, env=os.environ | {
          'PYTHONPATH': str(pathlib.Path(corpora.__file__).parents[1])})
  assert done.returncode == 0


def test_a_corpus_without_any_word(tmp_path):
  with corpora.Corpus(tmp_path, create=True) as corpus:
    corpora_test.put(corpus, '---', '!!! ???\n', limit=70)
    router = routing.Bm25Router(corpus)
    assert router.route('hello') == []
    assert router.judge([]).quality == 'none'


@pytest.mark.parametrize('question', [
    'STRASSE', 'straße', 'cafe\u0301', 'CAFÉ', 'ﬁsh'])
def test_words_are_equal_however_they_are_written(tmp_path, question):
  with corpora.Corpus(tmp_path, create=True) as corpus:
    corpora_test.put(corpus, 'a', 'Die Straße, das Café, fish.', limit=70)
    corpora_test.put(corpus, 'b', 'Nothing of that.', limit=70)
    found = routing.Bm25Router(corpus).route(question)
    assert places(found) == ['a#0']
    assert routing.words_found(question, found[0].passage) == 1


def test_an_address_that_is_no_text(corpus):
  with pytest.raises(errors.UsageError, match='expected Unicode text') as e:
    routing.AddressRouter(corpus).route('\udcff#0')
  assert '\n' not in str(e.value)
