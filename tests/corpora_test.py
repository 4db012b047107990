"""The index of a corpus: drafts, settings, kills, damage."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading

import pytest

import cli_helpers
from kvgraft_jax import corpora
from kvgraft_jax import database
from kvgraft_jax import errors
from kvgraft_jax import passages


def document(path, text):
  return passages.Document(
      path, passages.title_of(text), text, corpora._text_sha256(text))


def put(corpus, path, text, *, publish=True, limit=40):
  """Adds a document as a build does, with made-up artifacts."""
  number = corpus.begin(document(path, text))
  for ordinal, piece in enumerate(passages.split(
      text, tokens=len, limit=limit)):
    if ordinal not in corpus.deposited(number):
      key = corpora._text_sha256(piece.text)
      corpus.add(number, ordinal, piece, tokens=1 + len(piece.text), key=key,
                 artifact=key[::-1], nbytes=10)
  if publish:
    corpus.publish(number)
  return number


@pytest.fixture
def corpus(tmp_path):
  with corpora.Corpus(tmp_path / 'corpus', create=True) as made:
    yield made


def texts(corpus):
  found = {}
  for passage in corpus.passages():
    found[passage.source] = found.get(passage.source, '') + passage.text
  return found


LONG = '# One\n\n' + 'a' * 30 + '\n\n# Two\n\n' + 'b' * 30 + '\n'


def test_what_is_written_is_read(corpus):
  put(corpus, 'b.txt', 'Short.')
  put(corpus, 'a/long.md', LONG)
  found = list(corpus.passages())
  assert [(p.place, p.heading, p.headings, p.start, p.stop) for p in found] == [
      ('a/long.md#0', 'One', ('One',), 0, 39),
      ('a/long.md#1', 'Two', ('Two',), 39, 77), ('b.txt#0', '', (), 0, 6)]
  assert [p.title for p in found] == ['One', 'One', 'Short.']
  assert texts(corpus) == {'a/long.md': LONG, 'b.txt': 'Short.'}
  assert list(corpus.passages('b.txt')) == found[2:]
  assert corpus.places() == [(p.source, p.ordinal) for p in found]
  assert corpus.at('a/long.md', 1) == found[1]
  with pytest.raises(errors.NotFoundError, match='ask again'):
    corpus.at('a/long.md', 2)
  assert corpus.by_id(found[0].id[:8]) == corpus.by_id(found[0].id) == [
      found[0]]
  assert len(corpus.by_id('')) == 3 and corpus.by_id('0' * 64) == []
  key = corpora._text_sha256(found[0].text)
  assert (found[0].key, found[0].artifact) == (key, key[::-1])
  about = found[0].about()
  assert about['artifact'] == key[::-1] and 'text' not in about
  corpus.check()
  stats = corpus.stats()
  assert stats.pop('settings') == {}
  assert stats == {
      'documents': 2, 'text_bytes': 83, 'passages': 3, 'tokens': 86,
      'shortest': 7, 'longest': 40, 'artifacts': 3, 'artifact_bytes': 30,
      'unused': 0, 'unused_bytes': 0, 'drafts': 0}


def test_many_passages_are_read_some_at_a_time(corpus, monkeypatch):
  monkeypatch.setattr(corpora, '_PAGE', 3)
  text = ''.join(f'{n:4} is a number\n\n' for n in range(20))
  put(corpus, 'a', text, limit=20)
  put(corpus, 'b', text, limit=20)
  assert len(list(corpus.passages())) == 40
  assert texts(corpus) == {'a': text, 'b': text}


def test_readers_see_the_old_document_until_the_new_one_is_whole(corpus):
  put(corpus, 'a.md', LONG)
  version, before = corpus.version, list(corpus.passages())
  changed = LONG.replace('b', 'c')
  put(corpus, 'a.md', changed, publish=False)
  assert list(corpus.passages()) == before and corpus.version == version
  assert corpus.documents() == {'a.md': document('a.md', LONG).sha256}
  assert corpus.drafts() == ['a.md'] and corpus.stats()['drafts'] == 1
  put(corpus, 'a.md', changed)
  assert texts(corpus) == {'a.md': changed} and corpus.version > version
  # The first passage is the same, and keeps its id and its artifact.
  assert next(corpus.passages()) == before[0]
  stats = corpus.stats()
  assert (stats['artifacts'], stats['unused'], stats['drafts']) == (2, 1, 0)
  corpus.check()


def test_a_draft_goes_on_and_another_takes_its_place(corpus):
  number = put(corpus, 'a.md', LONG, publish=False)
  assert corpus.begin(document('a.md', LONG)) == number
  assert corpus.deposited(number) == {0, 1}
  other = put(corpus, 'a.md', 'Other.', publish=False)
  assert other != number and corpus.deposited(number) == set()
  piece, = passages.split('Other.', tokens=len, limit=40)
  with pytest.raises(errors.StorageError, match='another build'):
    corpus.add(number, 0, piece, tokens=1, key='k', artifact='a', nbytes=1)
  with pytest.raises(errors.StorageError, match='another build'):
    corpus.publish(number)
  assert texts(corpus) == {} and corpus.places() == []
  corpus.publish(other)
  assert texts(corpus) == {'a.md': 'Other.'}


def test_removing(corpus):
  put(corpus, 'a', 'One.')
  put(corpus, 'b', 'Two.')
  put(corpus, 'b', 'Three.', publish=False)
  version = corpus.version
  corpus.remove(['b', 'c'])
  assert texts(corpus) == {'a': 'One.'} and corpus.drafts() == []
  assert corpus.version > version and corpus.stats()['unused'] == 2


def test_settings_are_one_for_all(corpus, tmp_path):
  corpus.settle({'model': 'abc', 'block': '32'})
  corpus.settle({'model': 'abc', 'block': '32'})
  with pytest.raises(errors.UsageError, match="block differs.*'?32'?.*64"):
    corpus.settle({'model': 'abc', 'block': '64'})
  with corpora.Corpus(tmp_path / 'corpus') as other:
    assert other.settings == {'model': 'abc', 'block': '32'}


WRITER = textwrap.dedent('''
    import sys
    import corpora_test
    from kvgraft_jax import corpora
    from kvgraft_jax import errors
    with corpora.Corpus(sys.argv[1], create=True) as corpus:
      for n in range(10_000):
        try:
          corpora_test.put(
              corpus, f'{n % 7}.md', corpora_test.LONG + str(n // 7))
        except errors.StorageError as e:
          assert 'another build' in str(e)  # They are not at the same n.
        print(n, flush=True)
''')


def _writer(path):
  return subprocess.Popen(
      [sys.executable, '-c', WRITER, str(path)], stdout=subprocess.PIPE,
      text=True,
      env=cli_helpers.environment(PYTHONPATH=cli_helpers.module_path()))


def test_two_writers_and_kill_9_leave_whole_documents(tmp_path):
  for _ in range(2):
    writers = [_writer(tmp_path) for _ in range(2)]
    for writer in writers:
      for _ in range(9):
        assert writer.stdout.readline()
      os.kill(writer.pid, signal.SIGKILL)
    for writer in writers:
      writer.communicate()
      assert writer.returncode == -signal.SIGKILL
    with corpora.Corpus(tmp_path) as corpus:
      corpus.check()
      found = texts(corpus)
      assert sorted(found) == [f'{n}.md' for n in range(7)]
      for text in found.values():
        assert re.fullmatch(re.escape(LONG) + r'\d+', text)


def test_what_is_no_corpus_is_said(tmp_path):
  with pytest.raises(errors.NotFoundError, match='corpus build'):
    corpora.Corpus(tmp_path)
  (tmp_path / 'corpus.sqlite').write_bytes(b'')
  with pytest.raises(errors.NotFoundError, match='holds nothing yet'):
    corpora.Corpus(tmp_path)
  (tmp_path / 'corpus.sqlite').write_bytes(b'x' * 4096)
  with pytest.raises(errors.DamageError, match='not a database'):
    corpora.Corpus(tmp_path, create=True)
  (tmp_path / 'corpus.sqlite').unlink()
  with sqlite3.connect(tmp_path / 'corpus.sqlite') as db:
    db.execute('CREATE TABLE other (x)')
  db.close()
  with pytest.raises(errors.UsageError, match='another program'):
    corpora.Corpus(tmp_path)
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.StorageError, match='check the path'):
    corpora.Corpus(tmp_path / 'file', create=True)
  with corpora.Corpus(tmp_path / 'new', create=True) as corpus:
    pass
  with pytest.raises(errors.UsageError, match='closed'):
    corpus.documents()


def test_another_process_that_holds_it_is_said(corpus, tmp_path, monkeypatch):
  monkeypatch.setattr(database, '_WAIT_S', 0.1)
  other = sqlite3.connect(tmp_path / 'corpus' / 'corpus.sqlite')
  other.execute('BEGIN IMMEDIATE')
  with corpora.Corpus(tmp_path / 'corpus') as second:
    with pytest.raises(errors.StorageError, match='another process'):
      second.remove(['a'])
  other.close()


@pytest.mark.parametrize('sql, what', [
    ("UPDATE passages SET text = 'x' WHERE ordinal = 1", 'a.md#1 is not'),
    ('DELETE FROM passages WHERE ordinal = 0', 'in front of a.md#1'),
    ('DELETE FROM passages WHERE ordinal = 1', 'last passage of a.md'),
    ('DELETE FROM passages', 'last passage of a.md'),
    ("UPDATE passages SET headings = '['", 'a.md#0 is not'),
    ("UPDATE passages SET headings = '{}'", 'a.md#0 is not'),
    ("UPDATE passages SET text = X'ff00'", 'a.md#0 is not'),
    ("UPDATE passages SET heading = CAST(X'ff' AS TEXT)", 'UTF-8'),
])
def test_damage_is_found(corpus, tmp_path, sql, what):
  put(corpus, 'a.md', LONG)
  db = sqlite3.connect(tmp_path / 'corpus' / 'corpus.sqlite')
  with db:
    db.execute(sql)
  db.close()
  with pytest.raises(errors.DamageError, match=what) as caught:
    corpus.check()
  assert '\n' not in str(caught.value)


def test_a_check_sees_one_state(corpus, tmp_path, monkeypatch):
  """What another process publishes or removes in the middle has to wait."""
  put(corpus, 'a.md', LONG)
  put(corpus, 'b.md', LONG)
  read, tried = corpora.Corpus.passages, []

  def passages_(self, *args):
    monkeypatch.undo()
    monkeypatch.setattr(database, '_WAIT_S', 0.1)
    with corpora.Corpus(tmp_path / 'corpus') as other:
      with pytest.raises(errors.StorageError, match='another process holds'):
        other.remove(['a.md'])
      tried.append(1)
    return read(self, *args)

  monkeypatch.setattr(corpora.Corpus, 'passages', passages_)
  corpus.check()
  assert tried
  with corpora.Corpus(tmp_path / 'corpus') as other:
    other.remove(['a.md'])
  corpus.check()
  assert list(texts(corpus)) == ['b.md']


def test_another_thread_is_told_so(corpus):
  found = []

  def run():
    try:
      corpus.documents()
    except errors.UsageError as e:
      found.append(str(e))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert 'opened by another thread' in found[0]


def test_a_directory_whose_name_is_not_utf8(tmp_path):
  folder = os.fsdecode(os.fsencode(tmp_path) + b'/\xff')
  with corpora.Corpus(folder, create=True) as corpus:
    put(corpus, 'a.md', LONG)
  with corpora.Corpus(folder) as corpus:
    corpus.check()
    assert list(texts(corpus)) == ['a.md']


def test_flipped_bytes_are_found(corpus, tmp_path):
  put(corpus, 'a.md', LONG)
  corpus.close()
  path = tmp_path / 'corpus' / 'corpus.sqlite'
  path.write_bytes(path.read_bytes().replace(b'a' * 30, b'a' * 29 + b'A'))
  with corpora.Corpus(tmp_path / 'corpus') as again:
    with pytest.raises(errors.DamageError, match='a.md#0 is not'):
      list(again.passages())
