"""Writes and reads run directories: chained lines that are only appended.

A line is durable before the head record names it, so a process that is killed
at any moment leaves a ledger that opens again. `recheck` has the form of lines
and the rules, LEDGER.md describes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import fcntl
import math
import os
import pathlib
import platform
import sys
from typing import Any

from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import recheck

Path = str | os.PathLike[str]


def number(x: float) -> str:
  """Returns a float as ledgers hold it, such as '0.015' or '1e-07'.

  Raises:
    NumericsError: if it is NaN or infinite.
  """
  value = float(x)
  if not math.isfinite(value):
    raise errors.NumericsError(
        f'the figure is {value}, expected a finite number; a ledger holds no'
        ' other')
  return repr(value)


def code_version() -> dict[str, str]:
  """Returns the package's version, the hash of its sources, and the Python."""
  root = pathlib.Path(__file__).parent
  parts: list[bytes] = []
  for path in sorted(root.rglob('*.py')):
    parts += [path.relative_to(root).as_posix().encode(), path.read_bytes()]
  # Not imported: the package's own module stands above this one.
  package = sys.modules[__name__.partition('.')[0]]
  return {'version': package.__version__,
          'sources': hashing.sha256('kvgraft.sources', *parts),
          'python': platform.python_version()}


def read(path: Path) -> list[recheck.Line]:
  """Returns the lines of a run directory, with chain and head checked.

  Raises:
    NotFoundError: if there is no ledger.
    DamageError: if a line or the head is not what was written.
    StorageError: if a file cannot be read.
  """
  folder = pathlib.Path(path)
  data = _load(folder, recheck.LEDGER)
  if data is None:
    raise errors.NotFoundError(
        f'{folder}: there is no {recheck.LEDGER}; give the directory of a run')
  numbered, problems = recheck.read_lines(data)
  head = _load(folder, recheck.HEAD)
  if head is None:
    problems.append(f'{recheck.HEAD}: is missing')
  elif not problems:
    problems = recheck.check_head(
        head, len(numbered), {numbered[-1][1]['hash']})
  if problems:
    raise _damage(folder, problems)
  return [line for _, line in numbered]


def checked(path: Path) -> list[recheck.Line]:
  """Returns the lines of a run directory that passes its recheck.

  Raises:
    DamageError: naming the first problem.
    KvgraftError: as `read` does.
  """
  lines = read(path)
  found = recheck.check(path)
  if found.problems:
    raise _damage(pathlib.Path(path), found.problems)
  return lines


def _load(folder: pathlib.Path, name: str) -> bytes | None:
  """Returns a file's bytes, None if it is not there."""
  path = folder / name
  try:
    return recheck.read_file(os.fspath(path)) if os.path.lexists(path) else None
  except ValueError as e:
    raise errors.StorageError(
        f'{path}: {e}; check the path and its permissions') from None


def _damage(
    folder: pathlib.Path, problems: Sequence[str],
) -> errors.DamageError:
  more = f' (and {len(problems) - 1} more)' if len(problems) > 1 else ''
  return errors.DamageError(
      f'{folder}: {problems[0]}{more}; `kvgraft ledger recheck {folder}` lists'
      ' all, restore the run from a copy')


def _storage(path: Path, e: OSError) -> errors.StorageError:
  return errors.StorageError(
      f'{path}: {e.strerror}; free space or check the permissions, then try'
      ' again')


class Ledger:
  """A run directory that this process alone appends to. A context manager.

  Attributes:
    lines: all lines, parsed; not to be changed.
  """

  def __init__(self, path: Path, create: bool = False):
    """Opens a ledger for writing; what a killed writer left is put in order.

    Args:
      path: the run directory.
      create: True begins a ledger where there is none yet, False continues one.

    Raises:
      UsageError: if there is a ledger already, or another writer.
      NotFoundError: if there is none to continue.
      DamageError: if what is there is not what was written.
      StorageError: if it cannot be read or written.
    """
    self._folder = pathlib.Path(path)
    self._path = self._folder / recheck.LEDGER
    self.lines: list[recheck.Line] = []
    self._size = 0
    self._whole = True  # Whether the files are what `lines` says.
    self._fd = self._lock(create)
    try:
      self._open(create)
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> Ledger:
    return self

  def __exit__(self, *unused_exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Lets others write; calling it again does nothing."""
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1

  @property
  def path(self) -> pathlib.Path:
    """The run directory."""
    return self._folder

  @property
  def head(self) -> str:
    """The hash of the last line; 64 zeros before the first."""
    return self.lines[-1]['hash'] if self.lines else recheck.NO_HASH

  # Opening.

  def _lock(self, create: bool) -> int:
    if not create and not os.path.lexists(self._path):
      raise errors.NotFoundError(
          f'{self._folder}: there is no {recheck.LEDGER}; give the directory of'
          ' a run')
    try:
      if create:
        self._folder.mkdir(parents=True, exist_ok=True)
      # Not blocking: the name may be taken by a pipe.
      fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK
                   | (os.O_CREAT if create else 0), 0o666)
    except OSError as e:
      raise _storage(e.filename or self._path, e) from None
    try:
      fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      os.close(fd)
      raise errors.UsageError(
          f'{self._folder}: another process writes this ledger; wait for its'
          ' end or use another directory') from None
    except OSError as e:
      os.close(fd)
      raise _storage(self._path, e) from None
    return fd

  def _open(self, create: bool) -> None:
    data = _load(self._folder, recheck.LEDGER) or b''
    head = _load(self._folder, recheck.HEAD)
    whole = data[:data.rfind(b'\n') + 1]
    covered = self._covered(head)
    numbered, problems = recheck.read_lines(whole) if whole else ([], [])
    count = whole.count(b'\n')
    if problems and covered == count - 1:
      # The last line may not have been durable yet, although its end was.
      shorter = whole[:whole.rfind(b'\n', 0, -1) + 1]
      rest, wrong = recheck.read_lines(shorter) if shorter else ([], [])
      if not wrong:
        whole, numbered, problems, count = shorter, rest, [], count - 1
    if not problems and head is None and count > 1:
      problems = [f'{recheck.HEAD}: is missing']
    if not problems and covered:
      problems = recheck.check_head(
          head or b'', min(count, covered),
          {numbered[min(count, covered) - 1][1]['hash']} if count else set())
    if create and (whole or head is not None):
      raise errors.UsageError(
          f'{self._folder}: there is a run already; choose another directory')
    if problems:
      raise _damage(self._folder, problems)
    self.lines = [line for _, line in numbered]
    self._size = len(whole)
    dropped, adopted = len(data) - len(whole), count - covered
    try:
      if dropped:
        os.ftruncate(self._fd, len(whole))
        os.fsync(self._fd)
    except OSError as e:
      raise _storage(self._path, e) from None
    if self.lines and (dropped or adopted):
      self.append('recovered',
                  {'dropped_bytes': dropped, 'adopted_lines': adopted})

  def _covered(self, head: bytes | None) -> int:
    """Returns how many lines the head record names."""
    if head is None:
      return 0
    try:
      lines = recheck.parse(head[:-1])['lines']
      return lines if isinstance(lines, int) and lines > 0 else 1
    except (ValueError, TypeError, KeyError):
      return 1  # Damaged: checked, and refused, as a whole.

  # Appending.

  def append(self, kind: str, body: Mapping[str, Any]) -> str:
    """Appends a line; it is durable when this returns.

    Args:
      kind: of the line; the first is 'run'.
      body: objects, lists, strings, integers, booleans, None; see `number`.

    Returns:
      The line's hash.

    Raises:
      UsageError: if the body has no canonical form, or the ledger is closed.
      StorageError: if it cannot be written; the ledger is as it was before.
    """
    if self._fd < 0:
      raise errors.UsageError(f'{self._folder}: the ledger is closed; open it')
    if not self._whole:
      raise errors.StorageError(
          f'{self._folder}: an earlier line was not written; open the ledger'
          ' again')
    if not self.lines and (kind, body.get('format')) != ('run', recheck.FORMAT):
      raise errors.UsageError(
          f'{self._folder}: the first line is {kind!r}, expected kind "run" of'
          f' format {recheck.FORMAT}')
    line: recheck.Line = {'body': dict(body), 'kind': kind,
                          'n': len(self.lines), 'prev': self.head}
    try:
      line['hash'] = recheck.line_hash(line)
      data = recheck.canonical(line)
      line = recheck.parse_line(data)  # As a reader gets it, and a copy.
    except ValueError as e:
      raise errors.UsageError(f'line of kind {kind!r}: {e}') from None
    self._write(data + b'\n', line)
    return line['hash']

  def _write(self, data: bytes, line: recheck.Line) -> None:
    head = self._folder / recheck.HEAD
    temporary = self._folder / f'.{recheck.HEAD}.tmp'
    self._whole = False
    at: Path = self._path
    try:
      _write_all(self._fd, data)
      at = temporary
      fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
      try:
        _write_all(fd, recheck.head_bytes(line['hash'], line['n'] + 1))
      finally:
        os.close(fd)
      os.replace(temporary, head)
    except OSError as e:
      try:
        os.ftruncate(self._fd, self._size)
        self._whole = True
      except OSError:
        pass  # Opening it again takes the line or drops what is torn.
      raise _storage(at, e) from None
    self._sync_folder()
    self.lines.append(line)
    self._size += len(data)
    self._whole = True

  def _sync_folder(self) -> None:
    """Makes names durable; without it a reader still finds the line before."""
    try:
      fd = os.open(self._folder, os.O_RDONLY)
    except OSError:
      return
    try:
      os.fsync(fd)
    except OSError:
      pass  # Some file systems cannot.
    finally:
      os.close(fd)

  # Figures.

  def summary(
      self, id: str, over: Mapping[str, Any], field: str, rule: str,
      unit: str | None = None,
  ) -> int | str:
    """Computes a figure over the lines so far, appends and returns it.

    Args:
      id: of the summary.
      over: {'kind': KIND, 'where': {dotted path: value}}.
      field: dotted path in the body; '' counts lines.
      rule: a name in recheck.SUMMARIES.
      unit: of the figure, None for none.

    Raises:
      UsageError: if it cannot be computed.
    """
    try:
      value = recheck.summarise(self.lines, dict(over), field, rule)
    except ValueError as e:
      raise errors.UsageError(f'summary {id!r}: {e}') from None
    self.append('summary', {
        'id': id, 'over': dict(over), 'field': field, 'rule': rule,
        'value': value, **({} if unit is None else {'unit': unit})})
    return value

  def verdict(
      self, id: str, checker: str, ran: Mapping[str, Any],
      because: Sequence[Mapping[str, Any]],
      evidence: Mapping[str, Any] | None = None, *,
      passed: bool | None = None,
  ) -> bool:
    """Appends a verdict and returns it.

    Args:
      id: of the verdict.
      checker: name of what decided.
      ran: what it ran: names, parameters, hashes.
      because: comparisons {'summary': id, 'op': '<=', 'value': scalar}; the
        verdict is that all hold.
      evidence: what else explains it.
      passed: the verdict where `because` is empty, and nowhere else.

    Raises:
      UsageError: if a comparison cannot be made, or `passed` is missing.
    """
    if bool(because) == (passed is not None):
      raise errors.UsageError(
          f'verdict {id!r}: give either `because` or `passed`')
    if passed is None:
      try:
        passed = recheck.passes([dict(item) for item in because], self.lines)
      except ValueError as e:
        raise errors.UsageError(f'verdict {id!r}: {e}') from None
    self.append('verdict', {
        'id': id, 'checker': checker, 'ran': dict(ran), 'passed': passed,
        'because': [dict(item) for item in because],
        'evidence': dict(evidence or {})})
    return passed


def _write_all(fd: int, data: bytes) -> None:
  """Writes all of `data` and waits until it is durable."""
  while data:
    data = data[os.write(fd, data):]
  os.fsync(fd)
