"""A corpus is built once, kept up to date, and asked one passage at a time."""

import gc
import pathlib
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import weakref

import pytest

import cli_helpers
import kvgraft_jax
from kvgraft_jax import corpora
from kvgraft_jax import corpus as corpus_lib
from kvgraft_jax import corpus_routing as routing
from kvgraft_jax import depositing
from kvgraft_jax import errors
from kvgraft_jax import store as store_lib
import model_helpers

pytest.importorskip('bm25s')

TOKENS = 128
TEXTS = {
    'town/boats.md': '# Boats\n\nThe ferry leaves at noon from the old pier'
                     ' by the mill.\n\n'
                     '## Fares\n\nA ticket costs four crowns.\n\n'
                     + 'Boats come and boats go. ' * 6 + '\n',
    'birds.txt': 'Birds\n=====\n\nGulls eat fish near the pier.\n',
    'keys.txt': 'The code of the Harrow vault is 7391.\n',
}


class Scene:
  """A directory, a store and a corpus."""

  def __init__(self, root: pathlib.Path):
    self.root, self.texts = root, root / 'texts'
    for name, text in TEXTS.items():
      self.write(name, text)
    self.model = model_helpers.exact()
    self.store = store_lib.Store(str(root / 'store'))

  def write(self, name, text):
    path = self.texts / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8')

  def open(self):
    return corpora.Corpus(self.root, create=True)

  def build(self, corpus, **more):
    return corpus_lib.build(
        self.model, self.store, corpus, self.texts,
        **{'passage_tokens': TOKENS} | more)

  def ask(self, corpus, question, **more):
    return corpus_lib.ask(
        self.model, self.store, corpus, question,
        **{'max_new_tokens': 4} | more)


@pytest.fixture(scope='module', name='built')
def built_fixture(tmp_path_factory):
  scene = Scene(tmp_path_factory.mktemp('built'))
  with scene.open() as corpus:
    scene.build(corpus)
  return scene


@pytest.fixture(name='scene')
def scene_fixture(built, tmp_path):
  """A copy, to change."""
  shutil.copytree(built.root, tmp_path / 'scene')
  return Scene(tmp_path / 'scene')


@pytest.fixture(name='corpus')
def corpus_fixture(built):
  with built.open() as corpus:
    yield corpus


def test_every_passage_is_bos_and_its_text_from_position_0(built, corpus):
  found = list(corpus.passages())
  assert len(found) == 5
  for passage in found:
    manifest = built.store.get(passage.key)
    assert (manifest.id, manifest.fields.start) == (passage.artifact, 0)
    assert manifest.fields.sliding == 'window'
    tokens = built.model.tokenizer.encode(passage.text, add_bos=True)
    assert built.store.tokens(manifest).tolist() == tokens
    assert passage.tokens == len(tokens) <= TOKENS
    assert manifest.provenance == {
        'source': passage.source, 'passage': passage.ordinal,
        'title': passage.title}
    text = (built.texts / passage.source).read_text()
    assert text[passage.start:passage.stop] == passage.text


def test_a_build_reports_and_a_second_one_computes_nothing(tmp_path):
  scene, seen = Scene(tmp_path), []
  (scene.texts / 'x.bin').write_bytes(b'\0')
  with scene.open() as corpus:
    report = scene.build(
        corpus, progress=lambda done, total: seen.append((done, total)))
    total = sum(len(text) for text in TEXTS.values())
    assert seen[-1] == (total, total) and len(seen) == 5
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert (report.documents, report.added, report.passages) == (3, 3, 5)
    assert report.tokens == report.tokens_computed == total + 5
    assert (report.deposited, report.repaired) == (5, 0)
    assert report.skipped == {'another kind of file': ['x.bin']}
    assert report.bytes == sum(
        scene.store.get(p.key).nbytes for p in corpus.passages())
    again = scene.build(corpus)
    assert (again.unchanged, again.added, again.tokens_computed) == (3, 0, 0)
    assert (again.tokens, again.deposited) == (report.tokens, 0)


def test_changed_and_deleted_documents(scene, monkeypatch):
  with scene.open() as corpus:
    scene.write('birds.txt', 'Birds\n=====\n\nTerns dive near the pier.\n')
    scene.write('town/boats.md', TEXTS['town/boats.md'] + 'And more of it.\n')
    scene.write('new.txt', 'Something new.\n')
    (scene.texts / 'keys.txt').unlink()
    seen = []
    deposit = depositing.deposit

    def watched(*args, **more):
      if more['provenance']['source'] == 'birds.txt':
        seen.append(scene.ask(corpus, 'gulls').source)
      return deposit(*args, **more)

    monkeypatch.setattr(depositing, 'deposit', watched)
    report = scene.build(corpus)
    assert seen == ['birds.txt']  # The old one answers until the new one is in.
    assert (report.added, report.changed, report.removed, report.unchanged) == (
        1, 2, 1, 0)
    # Of the long document only the last passage is another.
    last = list(corpus.passages('town/boats.md'))[-1]
    birds, new = (next(corpus.passages(source)) for source in (
        'birds.txt', 'new.txt'))
    assert report.tokens_computed == last.tokens + birds.tokens + new.tokens
    assert scene.ask(corpus, 'gulls').passage is None
    assert scene.ask(corpus, 'Harrow').passage is None
    assert scene.ask(corpus, 'terns').source == 'birds.txt'
    corpus.check()
    stats = corpus.stats()
    assert (stats['documents'], stats['unused'], stats['drafts']) == (3, 3, 0)


def test_a_text_that_is_as_before_again_leaves_no_draft(scene, monkeypatch):
  def full(*args, **more):
    raise errors.StorageError('the disk is full')

  with scene.open() as corpus:
    scene.write('birds.txt', 'Terns dive.\n')
    with monkeypatch.context() as patch:
      patch.setattr(depositing, 'deposit', full)
      with pytest.raises(errors.StorageError, match='full'):
        scene.build(corpus)
    assert corpus.drafts() == ['birds.txt']
    assert scene.ask(corpus, 'gulls').source == 'birds.txt'
    scene.write('birds.txt', TEXTS['birds.txt'])
    report = scene.build(corpus)
    assert (report.unchanged, report.tokens_computed) == (3, 0)
    assert corpus.drafts() == []


def test_a_limit_removes_nothing(scene):
  with scene.open() as corpus:
    (scene.texts / 'keys.txt').unlink()
    scene.write('a.txt', 'First by path.\n')
    report = scene.build(corpus, limit_documents=2)
    assert (report.added, report.removed, report.documents) == (1, 0, 4)
    # One that leaves nothing out is none.
    report = scene.build(corpus, limit_documents=3)
    assert (report.added, report.removed, report.documents) == (0, 1, 3)


def test_lost_artifacts_are_deposited_again(scene):
  with scene.open() as corpus:
    lost = next(corpus.passages('birds.txt'))
    shutil.rmtree(scene.root / 'store' / 'a' / lost.key)
    with pytest.raises(errors.DamageError, match='build it again'):
      scene.ask(corpus, 'gulls')
    report = scene.build(corpus)
    assert (report.repaired, report.tokens_computed) == (1, lost.tokens)
    assert scene.ask(corpus, 'gulls').artifact == lost.artifact


BUILDER = textwrap.dedent('''
    import os, pathlib, signal, sys
    import corpus_test
    from kvgraft_jax import corpora
    where, count, when = sys.argv[1:]
    scene, left = corpus_test.Scene(pathlib.Path(where)), [int(count)]

    def killed(method):
      def call(self, *args, **more):
        left[0] -= 1
        if when == 'before' and not left[0]:
          os.kill(os.getpid(), signal.SIGKILL)
        method(self, *args, **more)
        if not left[0]:
          os.kill(os.getpid(), signal.SIGKILL)
      return call

    corpora.Corpus.add = killed(corpora.Corpus.add)
    with scene.open() as corpus:
      scene.build(corpus)
''')


@pytest.mark.parametrize('count, when', [(4, 'before'), (3, 'after')])
def test_kill_9_costs_no_passage_that_was_deposited(tmp_path, count, when):
  done = subprocess.run(
      [sys.executable, '-c', BUILDER, str(tmp_path), str(count), when],
      check=False,
      env=cli_helpers.environment(PYTHONPATH=cli_helpers.module_path()))
  assert done.returncode == -signal.SIGKILL
  scene = Scene(tmp_path)
  with scene.open() as corpus:
    assert corpus.stats()['drafts'] == 1
    report = scene.build(corpus)
    corpus.check()
    rest = list(corpus.passages())[count:]  # Built in this order.
    assert rest and report.tokens_computed == sum(p.tokens for p in rest)
    # What the killed one wrote to the store alone was found there.
    assert report.deposited == len(rest)
    assert report.passages == 5


def test_settings_cannot_change(scene):
  with scene.open() as corpus:
    for more, what in (({'passage_tokens': 64}, 'passage_tokens differs'),
                       ({'sliding': 'full'}, 'sliding differs'),
                       ({'block': 64}, 'block differs')):
      with pytest.raises(errors.UsageError, match=what):
        scene.build(corpus, **more)
    scene.model = model_helpers.tiny(seed=1)
    with pytest.raises(errors.UsageError, match='model differs'):
      scene.build(corpus)
    with pytest.raises(errors.IncompatibleError, match='model differs'):
      scene.ask(corpus, 'gulls')


@pytest.mark.parametrize('more, what', [
    ({'passage_tokens': 15}, 'expected 16 to'),
    ({'passage_tokens': 64.0}, 'expected 16 to 3968.*found 64.0'),
    ({'passage_tokens': '64'}, "found '64'"),
    ({'passage_tokens': 4000}, 'expected 16 to 3968'),
    ({'sliding': 'half'}, "'full' or 'window'"), ({'block': 5}, 'multiple'),
    ({'limit_documents': 0}, 'at least 1')])
def test_values_that_are_refused(scene, more, what):
  with scene.open() as corpus:
    with pytest.raises(errors.UsageError, match=what):
      scene.build(corpus, **more)


def test_a_directory_without_documents_changes_nothing(scene):
  with scene.open() as corpus:
    before = list(corpus.passages())
    shutil.rmtree(scene.texts)
    with pytest.raises(errors.NotFoundError, match='no such directory'):
      scene.build(corpus)
    (scene.texts / 'a').mkdir(parents=True)
    (scene.texts / 'a' / 'x.png').write_bytes(b'x')
    with pytest.raises(errors.UsageError, match='1 another kind of file'):
      scene.build(corpus)
    assert list(corpus.passages()) == before


def test_an_answer_is_what_the_model_says_behind_that_text(built, corpus):
  question = 'What is the code of the Harrow vault?'
  answer = built.ask(corpus, question, lead=' It is', k=2)
  passage = next(corpus.passages('keys.txt'))
  assert (answer.source, answer.passage, answer.artifact) == (
      'keys.txt', passage.id, passage.artifact)
  assert (answer.start, answer.stop) == (0, len(TEXTS['keys.txt']))
  tail = f'\n\nQuestion: {question}\nAnswer: It is'
  encode = built.model.tokenizer.encode
  ids = encode(passage.text, add_bos=True)
  fresh = built.model.prefill(ids).extend(encode(tail, add_bos=False))
  made = fresh.generate(4)[0]
  assert answer.text == corpus_lib.first_line(made.text)[0]
  assert answer.exact and answer.tokens_restored == passage.tokens == len(ids)
  assert answer.tokens_computed >= len(encode(tail, add_bos=False))
  assert answer.tokens_decoded == len(made.token_ids) <= 4
  assert (answer.router, answer.quality) == ('bm25', 'clear')
  assert (answer.words, answer.words_found) == (7, 6)
  assert len(answer.candidates) == 2
  assert answer.candidates[0]['passage'] == passage.id
  first, second = (one['score'] for one in answer.candidates)
  assert answer.margin == pytest.approx(1 - second / first)
  assert min(answer.route_s, answer.graft_s, answer.answer_s) > 0
  assert kvgraft_jax.Corpus is corpora.Corpus


@pytest.mark.parametrize('text, line, ended', [
    ('', '', False), (' \n', '', False), (' \n one', 'one', False),
    (' \n one two \n', 'one two', True), ('x\r\ny\nz', 'x', True)])
def test_an_answer_ends_with_its_line(text, line, ended):
  assert corpus_lib.first_line(text) == (line, ended)


def test_a_passage_that_is_named(built, corpus):
  answer = built.ask(corpus, 'Who knows?', passage='fares')
  assert (answer.router, answer.quality, answer.margin) == (
      'address', 'exact', None)
  assert (answer.source, answer.heading, answer.words_found) == (
      'town/boats.md', 'Fares', 0)
  with pytest.raises(errors.NotFoundError, match='no passage has'):
    built.ask(corpus, 'Who knows?', passage='nothing like it')


def test_the_model_chooses_among_the_first(built, corpus):
  question = 'pier'
  base = corpus_lib.bm25(corpus)
  assert base is corpus_lib.bm25(corpus)
  router = corpus_lib.ModelRouter(built.model, built.store, base, top=2)
  found = router.route(question, 2)
  assert len(found) == 2
  encode = built.model.tokenizer.encode
  for one in found:
    fresh = built.model.prefill(encode(one.passage.text, add_bos=True))
    assert one.score == fresh.score(
        encode('\n\nQuestion: pier', add_bos=False)).logprob
  assert found[0].score > found[1].score
  judged = router.judge(found)
  assert judged.margin == found[0].score - found[1].score
  answer = built.ask(corpus, question, router='model')
  assert answer.router == 'model' and answer.passage == found[0].passage.id
  assert answer.quality == judged.quality
  ids = encode('\n\nQuestion: pier', add_bos=False)
  used = router.usage
  # Its last position for the logits, then the question but its last token.
  assert used.tokens_computed == 2 * len(ids)
  assert used.tokens_restored == sum(one.passage.tokens - 1 for one in found)
  assert answer.route_kv['tokens_restored'] == used.tokens_restored
  assert built.ask(corpus, question).route_kv is None
  assert built.ask(corpus, question, router=router).margin == judged.margin


def test_options_are_weighed_by_likelihood(built, corpus):
  options = ['7391', '1234', 'a longer one']
  chosen = corpus_lib.choose(
      built.model, built.store, corpus, 'What is the code?', options,
      passage='keys.txt')
  encode = built.model.tokenizer.encode
  fresh = built.model.prefill(encode(
      TEXTS['keys.txt'], add_bos=True)).extend(encode(
          '\n\nQuestion: What is the code?\nAnswer:', add_bos=False))
  scores = [fresh.score(encode(f' {one}', add_bos=False)).logprob
            for one in options]
  assert chosen.logprobs == scores and chosen.tokens == [5, 5, 13]
  assert chosen.option == options[scores.index(max(scores))]
  # One step of each option but its last token, on a fork.
  assert chosen.kv['tokens_computed'] == chosen.tokens_computed == (
      chosen.tokens_restored and fresh.tokens_computed
      - chosen.tokens_restored + 4 + 4 + 12)
  for options in (['a', ''], 'yes', [], ['a', 1]):
    with pytest.raises(errors.UsageError, match='options'):
      corpus_lib.choose(built.model, built.store, corpus, 'What?', options)


def test_no_answer_is_said(built, corpus, tmp_path):
  answer = built.ask(corpus, 'zebra crossing')
  assert (answer.passage, answer.text, answer.quality) == (None, None, 'none')
  assert 'no passage has a word' in answer.why and answer.words == 2
  with corpora.Corpus(tmp_path, create=True) as empty:
    assert built.ask(empty, 'gulls').why == 'the corpus is empty'
    chosen = corpus_lib.choose(
        built.model, built.store, empty, 'gulls', ['a'])
    assert (chosen.option, chosen.passage) == (None, None)
    with pytest.raises(errors.UsageError, match='0'):
      corpus_lib.verify(built.model, built.store, empty)


@pytest.mark.parametrize('more, what', [
    ({'question': ' '}, 'question'), ({'question': None}, 'question: expected'),
     ({'k': 0}, 'k: expected'),
    ({'router': 'oracle'}, "address, bm25, model, found 'oracle'"),
    ({'router': None}, 'with name, route and judge.*found None'),
    ({'router': 'address'}, 'needs the passage')])
def test_questions_that_are_refused(built, corpus, more, what):
  with pytest.raises(errors.UsageError, match=what):
    built.ask(corpus, **{'question': 'gulls'} | more)


def test_a_model_without_a_tokenizer_is_refused(built, corpus, monkeypatch):
  monkeypatch.setattr(built.model, 'tokenizer', None)
  with pytest.raises(errors.UsageError, match='no tokenizer'):
    built.ask(corpus, 'gulls')
  with pytest.raises(errors.UsageError, match='no tokenizer'):
    built.build(corpus)


def test_verify_takes_passages_from_end_to_end(built, corpus):
  seen = []
  report = corpus_lib.verify(
      built.model, built.store, corpus, passages=2, n_continuations=2,
      progress=lambda *at: seen.append(at))
  assert report.ok and seen == [(1, 2), (2, 2)]
  assert (report.passages, report.equal, report.continuations,
          report.sha256_equal, report.max_kl) == (2, 2, 4, 4, 0.0)
  assert [d['source'] for d in report.details] == [
      'birds.txt', 'town/boats.md']
  assert all(d['restored_only'] and d['ok'] for d in report.details)
  with pytest.raises(errors.UsageError, match='at least 1'):
    corpus_lib.verify(built.model, built.store, corpus, passages=0)


def test_artifacts_of_another_text_are_found(scene):
  with scene.open() as corpus:
    passage = next(corpus.passages('birds.txt'))
    other = next(corpus.passages('keys.txt'))
  db = sqlite3.connect(scene.root / corpora.FILE)
  with db:
    db.execute('UPDATE passages SET key = ? WHERE key = ?',
               (other.key, passage.key))
  db.close()
  with scene.open() as corpus:
    with pytest.raises(errors.DamageError, match='other tokens than its text'):
      corpus_lib.verify(scene.model, scene.store, corpus, passages=1)
  db = sqlite3.connect(scene.root / corpora.FILE)
  with db:
    db.execute("UPDATE artifacts SET id = 'f' || id")
  db.close()
  with scene.open() as corpus:
    with pytest.raises(errors.ConflictError, match='its key holds artifact'):
      scene.ask(corpus, 'vault')


def test_a_router_of_ones_own(built, corpus):
  class Last:
    name = 'last'

    def route(self, question, k):
      found = list(corpus.passages())[-1:]
      return [routing.Candidate(one, 0.5, 'it is the last') for one in found]

    def judge(self, candidates):
      return routing.judge(candidates, 0.0, 1.0, 1.0)

  answer = built.ask(corpus, 'Who?', router=Last())
  assert (answer.router, answer.quality, answer.source) == (
      'last', 'only', 'town/boats.md')
  assert answer.candidates[0]['why'] == 'it is the last'


def test_the_index_goes_with_its_corpus(built):
  with built.open() as corpus:
    assert built.ask(corpus, 'gulls').passage
    gone = weakref.ref(corpus)
  del corpus
  gc.collect()
  assert gone() is None


def test_damage_of_one_passage_stops_no_other(scene):
  scene.write('new.txt', 'Herons wait in the reeds.\n')
  with scene.open() as corpus:
    first, second = list(corpus.passages())[:2]
    manifest = scene.store.get(first.key)
    path = scene.root / 'store' / 'a' / first.key / manifest.attempt
    path = path.parent / 'manifest.json'
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    assert scene.ask(corpus, 'x', passage=second.place).passage == second.id
    with pytest.raises(errors.DamageError, match='corpus build'):
      scene.ask(corpus, 'x', passage=first.place)
    with pytest.raises(errors.DamageError):
      scene.build(corpus)
    assert scene.ask(corpus, 'herons').source == 'new.txt'
    path.unlink()
    assert scene.build(corpus).repaired == 1
    assert scene.ask(corpus, 'x', passage=first.place).passage == first.id


def test_a_document_that_goes_while_it_is_built_is_not_counted(tmp_path):
  scene = Scene(tmp_path)
  with scene.open() as corpus:
    report = scene.build(
        corpus, progress=lambda *_: (scene.texts / 'keys.txt').unlink(True))
    assert (report.documents, report.added, report.changed) == (2, 2, 0)
