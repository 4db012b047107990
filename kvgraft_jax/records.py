"""The records of a library: one SQLite file, only ever appended to.

A record is canonical JSON, named by its hash; each row holds a hash over all
records so far. The columns beside a record only find it.
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
import pathlib
from typing import Any

from kvgraft_jax import database
from kvgraft_jax import errors
from kvgraft_jax import hashing

FILE = 'library.sqlite'
FORMAT = 1
NO_HEAD = '0' * 64
Path = database.Path
Record = dict[str, Any]

_APPLICATION = 0x6B766C62  # 'kvlb'.
_PAGE = 500  # Records that are read at once: an open query holds up writers.

_SCHEMA = (
    # `subject` is the entry that a record is about; an entry has its own id.
    'CREATE TABLE records (seq INTEGER PRIMARY KEY, id TEXT NOT NULL,'
    ' kind TEXT NOT NULL, subject TEXT, address TEXT, template TEXT,'
    ' method TEXT, family TEXT, head TEXT NOT NULL, record BLOB NOT NULL)',
    'CREATE INDEX by_id ON records (id)',
    'CREATE INDEX by_subject ON records (subject, kind)',
    'CREATE INDEX by_address ON records (address) WHERE address IS NOT NULL',
    'CREATE INDEX by_template ON records (template, seq, method)'
    ' WHERE template IS NOT NULL',
    "CREATE TRIGGER no_update BEFORE UPDATE ON records BEGIN SELECT"
    " RAISE(ABORT, 'records are never changed'); END",
    "CREATE TRIGGER no_delete BEFORE DELETE ON records BEGIN SELECT"
    " RAISE(ABORT, 'records are never removed'); END",
    f'PRAGMA application_id = {_APPLICATION}',
    f'PRAGMA user_version = {FORMAT}',
)
KEPT = "NOT EXISTS (SELECT 1 FROM records r WHERE r.subject = e.id AND" \
    " r.kind = 'retraction')"


def name_of(record: bytes) -> str:
  """Returns the name of a record from its canonical JSON."""
  return hashing.sha256('kvgraft.record', record)


def template_id(skeleton: str) -> str:
  """Returns what a template is found by."""
  return hashing.sha256('kvgraft.template', skeleton.encode('utf-8'))


_KIND = database.Kind(
    file=FILE, noun='library', application=_APPLICATION, version=FORMAT,
    schema=_SCHEMA, missing='give the directory of a library',
    empty='add an entry',
    repair='expected the library as it was written, restore it from a copy or'
    ' import an export')


class Records(database.Database):
  """The file of a library, which two processes may append to."""

  def __init__(self, path: Path, create: bool = False):
    """Opens a library; see `Database`."""
    super().__init__(_KIND, path, create)

  def append(self, record: Record) -> str:
    """Appends a record within a transaction; returns its id."""
    data = hashing.canonical_json(record)
    name = name_of(data)
    self.db.execute(
        'INSERT INTO records (id, kind, subject, address, template, method,'
        ' family, head, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)',
        (name, *_columns(name, record), _link(self._head(), name), data))
    return name

  def _head(self) -> str:
    return self.value(
        'SELECT head FROM records ORDER BY seq DESC LIMIT 1') or NO_HEAD

  @property
  def head(self) -> str:
    """Hash over all records in their order; 64 zeros without any."""
    with self.guard():
      return self._head()

  def find(self, where: str, *values: Any) -> list[
      tuple[int, str, Record]]:
    """Returns place, id and content of records, each checked."""
    rows = self.rows(
        f'SELECT seq, id, record FROM records e WHERE {where}', *values)
    return [(place, name, self._parse(place, name, data))
            for place, name, data in rows]

  def every(self, where: str, *values: Any) -> Iterator[
      tuple[int, str, Record]]:
    """Yields what `find` returns, in order, some at a time."""
    place = 0
    while found := self.find(
        f'{where} AND seq > ? ORDER BY seq LIMIT {_PAGE}', *values, place):
      yield from found
      place = found[-1][0]

  def _parse(self, place: int, name: str, data: Any) -> Record:
    if not isinstance(data, bytes) or name_of(data) != name:
      raise errors.DamageError(
          f'{self.file}: record {place} is not what its name {name!a:.80}'
          ' says; restore the library from a copy or import an export')
    return json.loads(data)

  def once(self, record: Record) -> str:
    """Appends a record unless it is there; returns its id."""
    name = name_of(canonical(record))
    if not self.has(name):
      self.append(record)
    return name

  def has(self, name: str, kind: str | None = None) -> bool:
    """Tells whether there is a record with an id, of a kind."""
    found = self.value('SELECT kind FROM records WHERE id = ?', name)
    return found is not None and kind in (None, found)

  def check(self) -> int:
    """Checks every record, the chain and the indices; returns the count.

    Raises:
      DamageError: naming what is not as it was written.
    """
    head, count, verified, entries = NO_HEAD, 0, set(), set()
    with self.guard():
      said = self.value('PRAGMA integrity_check(1)')
      if said != 'ok':
        raise errors.DamageError(
            f'{self.file}: {" ".join(said.split())[:200]}; restore the library'
            ' from a copy or import an export')
      rows = self.db.execute(
          'SELECT seq, id, record, head, kind, subject, address, template,'
          ' method, family FROM records ORDER BY seq')
      for place, name, data, linked, *columns in rows:
        count += 1
        record = self._parse(place, name, data)
        head = _link(head, name)
        if (place, linked, columns) != (count, head, _columns(name, record)):
          raise errors.DamageError(
              f'{self.file}: record {place} is not in its place or its columns'
              ' are not its own; restore the library from a copy or import an'
              ' export')
        if record['kind'] == 'entry':
          entries.add(name)
        elif record['kind'] == 'verification' and record['passed']:
          verified.add(record['entry'])
    if entries - verified:
      raise errors.DamageError(
          f'{self.file}: entry {min(entries - verified)} was never verified;'
          ' restore the library from a copy')
    return count

  def export(self, path: Path) -> int:
    """Writes all records to a new JSONL file; returns how many.

    Raises:
      UsageError: if the file exists.
      StorageError: if it cannot be written.
    """
    target = pathlib.Path(path)
    count = 0
    try:
      with open(target, 'xb') as f:
        try:
          f.write(hashing.canonical_json(
              {'format': FORMAT, 'kind': 'library', 'head': self.head}) + b'\n')
          for _, _, record in self.every('1'):
            f.write(hashing.canonical_json(record) + b'\n')
            count += 1
          f.flush()
          os.fsync(f.fileno())
        except BaseException:
          target.unlink(missing_ok=True)
          raise
    except FileExistsError:
      raise errors.UsageError(
          f'{target}: exists already; choose another name') from None
    except OSError as e:
      raise errors.StorageError(
          f'{target}: {e.strerror}; check the path, its permissions and space'
      ) from None
    return count


def _columns(name: str, record: Record) -> list[str | None]:
  """Returns kind, subject, address, template, method, family of a record."""
  if record['kind'] != 'entry':
    return [record['kind'], record.get('entry'), None, None, None, None]
  return ['entry', name, record['address'], template_id(record['template']),
          None if record['parameters'] is None else method_id(record),
          record['family']]


def method_id(record: Record) -> str:
  """Returns what the programs and the schema of an entry are found by."""
  return hashing.json_sha256(
      'kvgraft.method', [record['programs'], record['parameters']])


def _link(head: str, name: str) -> str:
  return hashing.sha256('kvgraft.chain', head.encode(), name.encode())


def canonical(record: Record) -> bytes:
  """Returns the canonical JSON of a record.

  Raises:
    UsageError: if it has none.
  """
  try:
    return hashing.canonical_json(record)
  except (TypeError, UnicodeEncodeError) as e:
    raise errors.UsageError(
        f'the entry cannot be written: {e}; give text and integers') from None


def read_export(path: pathlib.Path) -> list[tuple[str, Record]]:
  """Returns id and content of the records of an export, its chain checked.

  Raises:
    NotFoundError: if it cannot be read.
    UsageError: if it is no export, or of another version.
    DamageError: if it is no whole export.
  """
  try:
    lines = path.read_bytes().splitlines()
  except OSError as e:
    raise errors.NotFoundError(
        f'{path}: {e.strerror}; give a file that `kvgraft library export` wrote'
    ) from None
  try:
    first = json.loads(lines[0])
    found = first['kind'], first['format']
  except (ValueError, LookupError, TypeError, RecursionError):
    found = None
  if found != ('library', FORMAT):
    raise errors.UsageError(
        f'{path}: is no export of a library of version {FORMAT}; give a file'
        ' that `kvgraft library export` wrote')
  try:
    rest = [json.loads(line) for line in lines[1:]]
    records = [(name_of(line), record)
               for line, record in zip(lines[1:], rest)]
    head = NO_HEAD
    for name, record in records:
      head = _link(head, name)
      if not isinstance(record['kind'], str):
        raise ValueError('a record has no kind')
    if head != first['head']:
      raise ValueError('its records are not those that its head names')
  except (ValueError, LookupError, TypeError, RecursionError) as e:
    raise errors.DamageError(
        f'{path}: is no whole export of a library ({e!s:.120}); export it'
        ' again') from None
  return records
