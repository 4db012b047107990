"""One SQLite file in a directory, every error of it one clear line."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import pathlib
import sqlite3
from typing import Any
from typing import Self
import urllib.parse

from kvgraft_jax import errors

Path = str | os.PathLike[str]

_WAIT_S = 60


@dataclasses.dataclass(frozen=True)
class Kind:
  """What a file is, and what messages say of it.

  Attributes:
    file: its name in the directory.
    noun: what the directory is called.
    application: SQLite's application id.
    version: of the schema.
    schema: the statements that make it.
    missing: what to do where there is none.
    empty: what to do where it holds nothing.
    repair: what to do when it is damaged.
  """

  file: str
  noun: str
  application: int
  version: int
  schema: tuple[str, ...]
  missing: str
  empty: str
  repair: str


class Database:
  """The file in a directory. A context manager; one thread uses it.

  Two processes may write at the same time, and one that is killed at any
  moment leaves what was there before its last transaction, or after it.

  Attributes:
    file: its path.
    db: the connection, in autocommit; write within `transaction`.
  """

  def __init__(self, kind: Kind, path: Path, create: bool = False):
    """Opens a file.

    Args:
      kind: what it is.
      path: of its directory.
      create: begin one where there is none.

    Raises:
      NotFoundError: if there is none.
      UsageError: if the file is another program's.
      DamageError: if it is no database.
      StorageError: if it cannot be opened.
    """
    self._kind = kind
    self._folder = pathlib.Path(path)
    self.file = self._folder / kind.file
    if create:
      try:
        self._folder.mkdir(parents=True, exist_ok=True)
      except OSError as e:
        raise errors.StorageError(
            f'{self._folder}: {e.strerror}; check the path and its permissions'
        ) from None
    elif not os.path.lexists(self.file):
      raise errors.NotFoundError(
          f'{self._folder}: there is no {kind.file}; {kind.missing}')
    quoted = urllib.parse.quote(os.fsencode(self.file.absolute()))
    mode = 'rwc' if create else 'rw'
    with self.guard():
      self.db = sqlite3.connect(
          f'file:{quoted}?mode={mode}', uri=True, timeout=_WAIT_S,
          isolation_level=None)
    try:
      self._open(create)
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused_exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Closes the file; calling it again does nothing."""
    self.db.close()

  @property
  def path(self) -> pathlib.Path:
    """The directory."""
    return self._folder

  def _open(self, create: bool) -> None:
    kind = self._kind
    with self.guard():
      self.db.execute('PRAGMA synchronous = EXTRA')
      self.db.execute('PRAGMA foreign_keys = ON')
      found = self.value('PRAGMA application_id')
      if not found and not self.value('SELECT count(*) FROM sqlite_master'):
        if not create:
          raise errors.NotFoundError(
              f'{self.file}: holds nothing yet; {kind.empty}')
        with self.transaction():
          if not self.value('SELECT count(*) FROM sqlite_master'):
            for statement in kind.schema:
              self.db.execute(statement)
        found = self.value('PRAGMA application_id')
      version = self.value('PRAGMA user_version')
    if (found, version) != (kind.application, kind.version):
      raise errors.UsageError(
          f'{self.file}: is a database of another program or version (kind'
          f' {found}, version {version}), expected a {kind.noun} of version'
          f' {kind.version}; choose another directory')

  def value(self, sql: str, *values: Any) -> Any:
    """Returns the first column of the first row, None without any."""
    row = self.db.execute(sql, values).fetchone()
    return row and row[0]

  def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Returns the rows of a query."""
    with self.guard():
      return self.db.execute(sql, values).fetchall()

  @contextlib.contextmanager
  def guard(self) -> Iterator[None]:
    """Makes one line of what SQLite raises."""
    try:
      yield
    except UnicodeEncodeError as e:
      raise errors.UsageError(
          f'expected Unicode text, found {e.object[e.start:e.end]!r:.40} in'
          f' {e.object!r:.80}; give it in UTF-8') from None
    except UnicodeDecodeError:
      raise self.damage('holds text that is not UTF-8') from None
    except sqlite3.Error as e:
      text = str(e)
      if 'thread' in text:
        raise errors.UsageError(
            f'{self._folder}: the {self._kind.noun} was opened by another'
            ' thread; open it in each that uses it') from None
      if isinstance(e, sqlite3.ProgrammingError):
        raise errors.UsageError(
            f'{self._folder}: the {self._kind.noun} is closed ({text}); open it'
        ) from None
      if isinstance(e, sqlite3.OperationalError) and not any(
          word in text for word in ('no such', 'malformed', 'UTF-8')):
        raise errors.StorageError(
            f'{self.file}: {text}; nothing was changed: check its'
            ' permissions, the space, and whether another process holds it'
        ) from None
      raise self.damage(text) from None

  def damage(self, what: str) -> errors.DamageError:
    """Returns what to raise for a file that is not as it was written."""
    return errors.DamageError(f'{self.file}: {what}; {self._kind.repair}')

  def snapshot(self) -> contextlib.AbstractContextManager[None]:
    """Reads one state of the file, whatever others write meanwhile."""
    return self._between('BEGIN')

  def transaction(self) -> contextlib.AbstractContextManager[None]:
    """Writes all or nothing."""
    return self._between('BEGIN IMMEDIATE')

  @contextlib.contextmanager
  def _between(self, begin: str) -> Iterator[None]:
    with self.guard():
      self.db.execute(begin)
      try:
        yield
        self.db.execute('COMMIT')
      except BaseException:
        if self.db.in_transaction:
          self.db.execute('ROLLBACK')
        raise
