"""Documents are found and split as promised, whatever they hold."""

import gzip
import os
import random

import pytest

from kvgraft_jax import errors
from kvgraft_jax import passages


def _bytes(text):
  return len(text.encode())


def _split(text, limit, tokens=_bytes):
  found = passages.split(text, tokens=tokens, limit=limit)
  assert ''.join(p.text for p in found) == text
  for p in found:
    assert text[p.start:p.stop] == p.text and 0 < tokens(p.text) <= limit
  return found


@pytest.mark.parametrize('seed', range(8))
def test_the_pieces_are_the_document(seed):
  draw = random.Random(seed)
  parts = ('a', 'b ', 'C. ', '\n', '\n\n', '# x\n', '\r\n', ' ', '====\n', 'é',
           'zzzzzzzzzzzz', 'ABCD\n', '\f', '1. Two\n\n', '\u2028', '\t')
  for _ in range(300):
    text = ''.join(draw.choice(parts) for _ in range(draw.randrange(60)))
    _split(text, draw.choice((3, 5, 8, 20)))
    # Tokens that join or part where pieces meet: a sum is only an estimate.
    _split(text, draw.choice((3, 8)), lambda t: 1 + t.count('\n\n') + len(
        t.encode()) // 2)


def test_paragraphs_are_whole_where_they_fit():
  words = 'one two three. '
  text = '\n\n'.join(words * n for n in (2, 3, 1, 4, 2))
  found = _split(text, 64)
  assert len(found) > 2
  for p in found[:-1]:
    assert p.text.endswith('\n\n')
  assert all('\n\n' not in p.text.rstrip('\n') or _bytes(p.text) <= 64
             for p in found)
  # As many as fit are together.
  assert found[0].text == (words * 2 + '\n\n') and _bytes(
      found[0].text + words * 3) > 64


@pytest.mark.parametrize('text, limit, cuts', [
    ('one line\nanother one\nthird', 20, ['one line\n', 'another one\nthird']),
    ('A first one. Then more! And?', 24, ['A first one. Then more!', ' And?']),
    ('some words alone here', 11, ['some words', ' alone here']),
    ('abcdefgh', 3, ['ab', 'cd', 'ef', 'gh']),
])
def test_a_long_paragraph_is_cut_at_lines_sentences_words(text, limit, cuts):
  assert [p.text for p in _split(text, limit)] == cuts


def test_headings_begin_passages_that_are_half_full():
  body = 'x' * 30 + '\n\n'
  text = f'# One\n\n{body}## Two\n\n{body}Three\n=====\n\n{body}'
  found = _split(text, 50)
  assert [p.heading for p in found] == ['One', 'Two', 'Three']
  assert [p.headings for p in found] == [('One',), ('Two',), ('Three',)]
  # Below half they stay together, and a passage without one is of the last.
  one, two = _split(f'# One\n\na\n\n# Two\n\n{body}{body}', 55)
  assert (one.heading, one.headings) == ('One', ('One', 'Two'))
  assert (two.heading, two.headings) == ('Two', ())
  first, _ = _split(f'{body}# One\n\n{body}', 40)
  assert first.heading == ''


@pytest.mark.parametrize('lines, heading', [
    ('# A title #', 'A title'), ('###### Six', 'Six'), ('####### Seven', ''),
    ('#hash', ''), ('Title\n=====', 'Title'), ('Title\n---\nmore', 'Title'),
    ('=====\nTitle\n=====', 'Title'), ('=====', ''), ('Title\nmore', ''),
    ('Section 3. Terms\nmore', 'Section 3. Terms'),
    ('Chapter IV', 'Chapter IV'), ('3. Terms', '3. Terms'),
    ('3.1. Terms of use', '3.1. Terms of use'), ('3. Terms\nmore', ''),
    ('2. You may copy this program as you have received it.', ''),
    ('NO WARRANTY', 'NO WARRANTY'), ('ABC', ''), ('NO WARRANTY\nmore',
                                                  'NO WARRANTY'),
    ('THERE IS NO WARRANTY FOR\nTHIS PROGRAM', ''), ('A' * 90, ''),
    ('No warranty', ''), ('100%', ''),
])
def test_what_a_heading_is(lines, heading):
  found = _split(f'{lines}\n\ntext', 400)
  assert found[0].heading == heading


def test_a_token_too_large_is_said():
  with pytest.raises(errors.UsageError, match='allow more tokens'):
    passages.split('aé', tokens=_bytes, limit=1)
  assert passages.split('', tokens=_bytes, limit=5) == []


@pytest.fixture
def folder(tmp_path):
  root = tmp_path / 'texts'
  (root / 'b').mkdir(parents=True)
  for name, data in {
      'z.txt': b'last', 'README': b'# Read me\n\nNow.', 'a.md': b'\n\n*A*\n',
      'b/c.rst': b'=====\nTitle\n=====\n\nText.', 'b/PAGE.TEXT': b'\xc3\xa9',
      'b/d.txt.gz': gzip.compress(b'packed\r\nline'),
      'copyright.gz': gzip.compress(b'Copyright 2020'),
      'bad.txt': b'\xff\xfe', 'nul.txt': b'a\0b', 'empty.txt': b' \n',
      'half.gz': gzip.compress(bytes(range(99)))[:14], 'no.gz': b'plain',
      'page.html': b'<p>', 'image.png': b'x', '.hidden.txt': b'hidden',
      '.git/notes.txt': b'hidden', 'bom.txt': b'\xef\xbb\xbf# Marked\n',
  }.items():
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(data)
  (tmp_path / 'outside.txt').write_text('outside')
  (root / 'out.txt').symlink_to(tmp_path / 'outside.txt')
  (root / 'in.txt').symlink_to('z.txt')
  (root / 'gone.txt').symlink_to('nothing')
  (root / 'loop').symlink_to(root)
  (root / 'itself.txt').symlink_to('itself.txt')
  os.mkfifo(root / 'pipe')
  return root


def test_documents_of_a_directory(folder, monkeypatch):
  skipped = {}
  found = list(passages.documents(folder, skipped))
  assert [(d.path, d.title) for d in found] == [
      ('README', 'Read me'), ('a.md', 'A'), ('b/PAGE.TEXT', 'é'),
      ('b/c.rst', 'Title'), ('b/d.txt.gz', 'packed'), ('bom.txt', 'Marked'),
      ('copyright.gz', 'Copyright 2020'), ('in.txt', 'last'),
      ('z.txt', 'last')]
  assert found[4].text == 'packed\r\nline'
  assert found[-1].sha256 == found[-2].sha256 != found[0].sha256
  assert found[5].text == '# Marked\n'
  looping = skipped['cannot be read'] + skipped['no regular file']
  assert sorted(looping) == [
      'gone.txt', 'half.gz', 'itself.txt', 'no.gz', 'pipe']
  assert skipped == skipped | {
      'another kind of file': ['image.png', 'page.html'],
      'a link out of the directory': ['out.txt'], 'binary': ['nul.txt'],
      'not UTF-8': ['bad.txt'], 'empty': ['empty.txt']}
  assert passages.read(folder, 'README') == found[0]
  assert passages.read(folder, 'gone.txt') is None
  monkeypatch.setattr(passages, 'MOST_BYTES', 8)
  skipped = {}
  found = list(passages.documents(folder, skipped))
  assert [d.path for d in found] == ['a.md', 'b/PAGE.TEXT', 'in.txt', 'z.txt']
  assert len(skipped['more than 0 MiB']) == 5


def test_a_name_that_is_not_utf8_is_skipped(tmp_path):
  (tmp_path / 'ok.txt').write_text('ok')
  with open(os.fsencode(tmp_path) + b'/\xff.txt', 'wb') as f:
    f.write(b'text')
  skipped = {}
  assert [d.path for d in passages.documents(tmp_path, skipped)] == ['ok.txt']
  assert list(skipped) == ['a name that is not UTF-8']


@pytest.mark.parametrize('text, title', [
    ('\n \n--- \nA *bold* start: of it\nmore', 'A *bold* start: of it'),
    ('word ' * 40, ('word ' * 20)[:97] + '...'), ('?!\n', ''),
])
def test_titles(text, title):
  assert passages.title_of(text) == title


def test_a_missing_directory_is_said(tmp_path):
  with pytest.raises(errors.NotFoundError, match='no such directory'):
    list(passages.documents(tmp_path / 'none'))
