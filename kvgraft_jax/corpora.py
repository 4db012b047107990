"""The index of a corpus: documents and passages, in one SQLite file.

A passage's text is kept here, its KV state in a store, where its key finds it.
A document that is being added or changed is a draft until all of its passages
are deposited; until then, readers see what was there before.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

from kvgraft_jax import database
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import passages as passages_lib

FILE = 'corpus.sqlite'
FORMAT = 1
Path = database.Path

_APPLICATION = 0x6B766370  # 'kvcp'.
_PAGE = 200  # Passages that are read at once.

_SCHEMA = (
    'CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)',
    'CREATE TABLE documents (number INTEGER PRIMARY KEY AUTOINCREMENT,'
    ' path TEXT NOT NULL, sha256 TEXT NOT NULL, title TEXT NOT NULL,'
    ' bytes INTEGER NOT NULL, live INTEGER NOT NULL, UNIQUE (path, sha256))',
    'CREATE UNIQUE INDEX one_live ON documents (path) WHERE live',
    'CREATE TABLE passages (document INTEGER NOT NULL REFERENCES documents'
    ' ON DELETE CASCADE, ordinal INTEGER NOT NULL, id TEXT NOT NULL,'
    ' heading TEXT NOT NULL, headings TEXT NOT NULL, start INTEGER NOT NULL,'
    ' stop INTEGER NOT NULL, text TEXT NOT NULL, text_sha256 TEXT NOT NULL,'
    ' tokens INTEGER NOT NULL, key TEXT NOT NULL REFERENCES artifacts,'
    ' PRIMARY KEY (document, ordinal))',
    'CREATE INDEX by_id ON passages (id)',
    'CREATE INDEX by_key ON passages (key)',
    'CREATE TABLE artifacts (key TEXT PRIMARY KEY, id TEXT NOT NULL,'
    ' bytes INTEGER NOT NULL)',
    # Counts changes of what readers see.
    "INSERT INTO settings VALUES ('version', '0')",
    f'PRAGMA application_id = {_APPLICATION}',
    f'PRAGMA user_version = {FORMAT}',
)
_BUMP = ("UPDATE settings SET value = CAST(value AS INTEGER) + 1 WHERE name ="
         " 'version'")
_COLUMNS = ('p.id, d.path, p.ordinal, d.title, p.heading, p.headings, p.start,'
            ' p.stop, p.text, p.text_sha256, p.tokens, p.key, a.id')
_FROM = ('FROM passages p JOIN documents d ON d.number = p.document'
         ' JOIN artifacts a ON a.key = p.key')
_KIND = database.Kind(
    file=FILE, noun='corpus', application=_APPLICATION, version=FORMAT,
    schema=_SCHEMA,
    missing='give the directory of a corpus, or build one with `kvgraft corpus'
    ' build`',
    empty='build the corpus',
    repair='restore it from a copy, or remove it and build again: what is in'
    ' the store is not computed again')


@dataclasses.dataclass(frozen=True)
class Passage:
  """A passage that is deposited.

  Attributes:
    id: hash of source, ordinal and text.
    source: path of its document.
    ordinal: place in the document, from 0.
    title: of the document.
    heading: the last one at or in front of its start; '' without one.
    headings: those that stand in it.
    start: its first character in the document.
    stop: one past its last one.
    text: of the passage.
    tokens: ids of the context, bos included.
    key: of the artifact.
    artifact: id of the artifact.
  """

  id: str
  source: str
  ordinal: int
  title: str
  heading: str
  headings: tuple[str, ...]
  start: int
  stop: int
  text: str
  tokens: int
  key: str
  artifact: str

  @property
  def place(self) -> str:
    """Source and ordinal, which are an address."""
    return f'{self.source}#{self.ordinal}'

  def about(self) -> dict[str, Any]:
    """Returns what a result says of a passage."""
    return {'passage': self.id, 'title': self.title, 'heading': self.heading,
            'source': self.source, 'ordinal': self.ordinal,
            'start': self.start, 'stop': self.stop, 'tokens': self.tokens,
            'artifact': self.artifact}


def passage_id(source: str, ordinal: int, text: str) -> str:
  """Returns the id of a passage."""
  return hashing.json_sha256('kvgraft.passage', [source, ordinal, text])


class Corpus:
  """A corpus in a directory. A context manager; one thread uses it.

  Two processes may build at the same time, and one that is killed at any moment
  leaves what was there before its last transaction, or after it.

  Attributes:
    index: of its words, once it is made (see `corpus.bm25`).
  """

  def __init__(self, path: Path, create: bool = False):
    """Opens a corpus.

    Args:
      path: of its directory.
      create: begin one where there is none.

    Raises:
      NotFoundError: if there is none.
      UsageError: if the file is another program's.
      DamageError: if it is no database.
      StorageError: if it cannot be opened.
    """
    self._file = database.Database(_KIND, path, create)
    self.index: Any = None

  def __enter__(self) -> Corpus:
    return self

  def __exit__(self, *unused_exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Closes the file; calling it again does nothing."""
    self._file.close()

  @property
  def path(self) -> pathlib.Path:
    """The corpus's directory."""
    return self._file.path

  # Settings.

  @property
  def version(self) -> int:
    """Changes whenever what readers see does."""
    with self._file.guard():
      return int(self._file.value(
          "SELECT value FROM settings WHERE name = 'version'"))

  @property
  def settings(self) -> dict[str, str]:
    """What the corpus was built with; empty before the first build."""
    return dict(self._file.rows(
        "SELECT name, value FROM settings WHERE name != 'version'"))

  def settle(self, settings: Mapping[str, str]) -> None:
    """Sets the settings of a new corpus, or compares those of an old one.

    Raises:
      UsageError: naming the first setting that differs.
    """
    with self._file.transaction():
      if not self.settings:
        self._file.db.executemany(
            'INSERT INTO settings VALUES (?, ?)', list(settings.items()))
    found = self.settings
    for name, value in settings.items():
      if found.get(name) != value:
        raise errors.UsageError(
            f'{self.path}: {name} differs, the corpus was built with'
            f' {found.get(name)!s:.80}, found {value:.80}; use the same, or'
            ' build another corpus in a new directory')

  # Building.

  def documents(self) -> dict[str, str]:
    """Returns path -> sha256 of the documents that readers see."""
    return dict(
        self._file.rows('SELECT path, sha256 FROM documents WHERE live'))

  def begin(self, document: passages_lib.Document) -> int:
    """Begins, or goes on with, a draft; drops other drafts of its path.

    Returns:
      The number of the draft.
    """
    with self._file.transaction():
      self._file.db.execute(
          'DELETE FROM documents WHERE path = ? AND sha256 != ? AND NOT live',
          (document.path, document.sha256))
      self._file.db.execute(
          'INSERT OR IGNORE INTO documents (path, sha256, title, bytes, live)'
          ' VALUES (?, ?, ?, ?, 0)',
          (document.path, document.sha256, document.title,
           len(document.text.encode())))
      return self._file.value(
          'SELECT number FROM documents WHERE path = ? AND sha256 = ?',
          document.path, document.sha256)

  def deposited(self, number: int) -> set[int]:
    """Returns the ordinals of the passages that a draft has."""
    return {ordinal for ordinal, in self._file.rows(
        'SELECT ordinal FROM passages WHERE document = ?', number)}

  def add(
      self, number: int, ordinal: int, passage: passages_lib.Passage, *,
      tokens: int, key: str, artifact: str, nbytes: int,
  ) -> None:
    """Adds a passage that was deposited to a draft.

    Args:
      number: of the draft.
      ordinal: place in the document, from 0.
      passage: the piece.
      tokens: of its context.
      key: of the artifact.
      artifact: its id.
      nbytes: of its data files.

    Raises:
      StorageError: if another process dropped the draft.
    """
    with self._file.transaction():
      path = self._path_of(number)
      self._file.db.execute('INSERT OR IGNORE INTO artifacts VALUES (?, ?, ?)',
                       (key, artifact, nbytes))
      self._file.db.execute(
          'INSERT OR IGNORE INTO passages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?,'
          ' ?)',
          (number, ordinal, passage_id(path, ordinal, passage.text),
           passage.heading, json.dumps(passage.headings), passage.start,
           passage.stop, passage.text, _text_sha256(passage.text), tokens, key))

  def publish(self, number: int) -> None:
    """Shows a whole draft to readers, in the place of what was there.

    Raises:
      StorageError: if another process dropped the draft.
    """
    with self._file.transaction():
      self._file.db.execute(
          'DELETE FROM documents WHERE number != ? AND path = ?',
          (number, self._path_of(number)))
      self._file.db.execute(
          'UPDATE documents SET live = 1 WHERE number = ?', (number,))
      self._file.db.execute(_BUMP)

  def _path_of(self, number: int) -> str:
    path = self._file.value(
        'SELECT path FROM documents WHERE number = ?', number)
    if path is None:
      raise errors.StorageError(
          f'{self._file.file}: another build has replaced this document'
          ' meanwhile; build again')
    return path

  def remove(self, paths: Iterable[str]) -> None:
    """Removes documents, drafts included; their artifacts stay in the store."""
    with self._file.transaction():
      self._file.db.executemany('DELETE FROM documents WHERE path = ?',
                           [(path,) for path in paths])
      self._file.db.execute(_BUMP)

  def drop_drafts(self, paths: Iterable[str]) -> None:
    """Removes what is not finished of documents."""
    with self._file.transaction():
      self._file.db.executemany(
          'DELETE FROM documents WHERE path = ? AND NOT live',
          [(path,) for path in paths])

  def drafts(self) -> list[str]:
    """Returns the paths of all drafts."""
    return [path for path, in self._file.rows(
        'SELECT path FROM documents WHERE NOT live')]

  # Reading.

  def passages(self, source: str | None = None) -> Iterator[Passage]:
    """Yields the passages in order, all or those of one document.

    Raises:
      DamageError: if a text is not what was written.
    """
    after: tuple[str, int] = ('', -1)
    where = 'd.live AND (d.path, p.ordinal) > (?, ?)'
    given = [] if source is None else [source]
    if given:
      where += ' AND d.path = ?'
    while found := self._find(
        f'{where} ORDER BY d.path, p.ordinal LIMIT {_PAGE}', *after, *given):
      yield from found
      after = found[-1].source, found[-1].ordinal

  def places(self) -> list[tuple[str, int]]:
    """Returns source and ordinal of all passages, in order."""
    return self._file.rows(
        f'SELECT d.path, p.ordinal {_FROM} WHERE d.live'
        ' ORDER BY d.path, p.ordinal')

  def at(self, source: str, ordinal: int) -> Passage:
    """Returns one passage.

    Raises:
      NotFoundError: if there is none.
    """
    found = self._find(
        'd.live AND d.path = ? AND p.ordinal = ?', source, ordinal)
    if not found:
      raise errors.NotFoundError(
          f'{self.path}: there is no passage {source}#{ordinal} any more;'
          ' ask again')
    return found[0]

  def by_id(self, prefix: str) -> list[Passage]:
    """Returns the passages whose ids begin with these hex digits."""
    return self._find('d.live AND p.id >= ? AND p.id < ?',
                      prefix, prefix + 'g')

  def names(self) -> list[tuple[str, int, str, tuple[str, ...]]]:
    """Returns source, ordinal, title, headings of all passages, in order."""
    return [(path, ordinal, title, self._headings(path, ordinal, headings))
            for path, ordinal, title, headings in self._file.rows(
                f'SELECT d.path, p.ordinal, d.title, p.headings {_FROM}'
                ' WHERE d.live ORDER BY d.path, p.ordinal')]

  def _find(self, where: str, *values: Any) -> list[Passage]:
    return [self._passage(*row) for row in self._file.rows(
        f'SELECT {_COLUMNS} {_FROM} WHERE {where}', *values)]

  def _passage(
      self, name: str, source: str, ordinal: int, title: str, heading: str,
      headings: str, start: int, stop: int, text: str, text_sha256: str,
      *rest: Any,
  ) -> Passage:
    if (not isinstance(text, str) or _text_sha256(text) != text_sha256
        or passage_id(source, ordinal, text) != name):
      raise self._damaged(source, ordinal)
    return Passage(name, source, ordinal, title, heading,
                   self._headings(source, ordinal, headings), start, stop, text,
                   *rest)

  def _headings(
      self, source: str, ordinal: int, headings: str
  ) -> tuple[str, ...]:
    try:
      found = json.loads(headings)
    except ValueError:
      found = None
    if not isinstance(found, list):
      raise self._damaged(source, ordinal)
    return tuple(found)

  def _damaged(self, source: str, ordinal: int) -> errors.DamageError:
    return self._file.damage(
        f'passage {source}#{ordinal} is not what was written')

  # Checking.

  def check(self) -> None:
    """Checks the file and every passage.

    Raises:
      DamageError: naming what is not as it was written.
    """
    with self._file.snapshot():
      said = self._file.value('PRAGMA integrity_check(1)')
      if said != 'ok':
        raise self._file.damage(' '.join(str(said).split())[:200])
      sizes = dict(
          self._file.rows('SELECT path, bytes FROM documents WHERE live'))
      end = dict.fromkeys(sizes, 0)
      for passage in self.passages():
        if passage.start != end[passage.source]:
          raise self._file.damage(
              f'a passage in front of {passage.place} is missing')
        end[passage.source] = passage.stop
        sizes[passage.source] -= len(passage.text.encode())
    for source, left in sizes.items():
      if left:
        raise self._file.damage(f'the last passage of {source} is missing')

  def stats(self) -> dict[str, Any]:
    """Returns counts, sizes and settings.

    `unused` are artifacts in the store that no passage needs any more, as
    far as this corpus deposited them; `drafts` are documents that a build
    has not finished.
    """
    def one(sql: str) -> Sequence[Any]:
      return self._file.rows(sql)[0]

    documents, text_bytes = one(
        'SELECT count(*), coalesce(sum(bytes), 0) FROM documents WHERE live')
    count, tokens, least, most = one(
        'SELECT count(*), coalesce(sum(p.tokens), 0), coalesce(min(p.tokens),'
        f' 0), coalesce(max(p.tokens), 0) {_FROM} WHERE d.live')
    used = 'SELECT key FROM passages'
    sizes = 'SELECT count(*), coalesce(sum(bytes), 0) FROM artifacts WHERE key'
    artifacts, artifact_bytes = one(f'{sizes} IN ({used})')
    unused, unused_bytes = one(f'{sizes} NOT IN ({used})')
    return {
        'documents': documents, 'text_bytes': text_bytes, 'passages': count,
        'tokens': tokens, 'shortest': least, 'longest': most,
        'artifacts': artifacts, 'artifact_bytes': artifact_bytes,
        'unused': unused, 'unused_bytes': unused_bytes,
        'drafts': len(self.drafts()), 'settings': self.settings}


def _text_sha256(text: str) -> str:
  return hashing.sha256('kvgraft.text', text.encode())
