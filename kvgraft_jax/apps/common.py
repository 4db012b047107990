"""What commands share: model, store, lines for people, progress."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

import kvgraft_jax
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import tokenizer as tokenizer_lib
from kvgraft_jax.apps import cli

_IMPORTED = time.monotonic()


def process_age_s() -> float:
  """Returns seconds since this process was started."""
  since_import = time.monotonic() - _IMPORTED
  try:
    with open('/proc/self/stat', 'rb') as f:
      ticks = int(f.read().rpartition(b')')[2].split()[19])
    age = (time.clock_gettime(time.CLOCK_BOOTTIME)
           - ticks / os.sysconf('SC_CLK_TCK'))
  except (OSError, ValueError, IndexError, AttributeError):
    return since_import
  # A sandbox may give the process another clock than the kernel's.
  return age if since_import <= age < since_import + 3600 else since_import


def command_line(name: str) -> list[str]:
  """Returns how the command `name` was called, without where it is kept."""
  argv = sys.argv[1:]
  return ['kvgraft', *([] if argv[:1] == [name] else [name]), *argv]


def note(text: str) -> None:
  """Prints a line for people on stderr."""
  cli.warn(f'kvgraft: {text}')


def say(text: str) -> None:
  """Prints a line for people on stdout, above the JSON line."""
  print(printable(text))


def printable(text: str) -> str:
  """Returns `text` as stdout's encoding can write it."""
  encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
  return text.encode(encoding, 'replace').decode(encoding)


class Progress:
  """A bar on stderr; nothing where that is no terminal. A context manager."""

  def __init__(self, label: str):
    self._label = label
    self._on = sys.stderr is not None and sys.stderr.isatty()
    self._began = self._drawn = time.monotonic()
    self._width = 0

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *unused_exc_info) -> None:
    if self._width:
      cli.warn('\r' + ' ' * self._width, '\r')

  @property
  def callback(self):
    """What takes (done, total), or None where nobody would see it."""
    return self.update if self._on else None

  def update(self, done: int, total: int, what: str = '') -> None:
    """Draws `done` of `total`, at most ten times a second.

    Args:
      done: steps behind.
      total: steps in all.
      what: in the label's place; '' for the label.
    """
    now = time.monotonic()
    if now - self._drawn < 0.1 and done < total:
      return
    self._drawn = now
    filled = 24 * done // max(total, 1)
    line = (f'{what or self._label} [{"#" * filled}{"." * (24 - filled)}]'
            f' {done:,}/{total:,} {now - self._began:.0f} s')
    cli.warn('\r' + line.ljust(self._width), '')
    self._width = max(self._width, len(line))


class _Notes(logging.Handler):
  """Passes the package's messages on to people."""

  def emit(self, record: logging.LogRecord) -> None:
    note(record.getMessage())


def _listen() -> None:
  logger = logging.getLogger('kvgraft_jax')
  if not any(isinstance(h, _Notes) for h in logger.handlers):
    logger.addHandler(_Notes())
    logger.setLevel(logging.INFO)


def pin_threads(args: Any) -> None:
  """Sets the CPU threads that --threads asks for; listens to the package."""
  if args.threads:
    # Read by XLA when it makes the CPU client, which no import does.
    os.environ['NPROC'] = str(args.threads)
  _listen()


def load_model(args: Any, manifest: Any = None) -> kvgraft_jax.Model:
  """Returns the model that the flags name, with its self-test done.

  Given a manifest, what cannot match it is refused in front of the self-test.
  """
  pin_threads(args)

  def check(model: kvgraft_jax.Model) -> None:
    from kvgraft_jax import grafting  # Imports jax; --help does not.
    if manifest is not None:
      grafting.check_early(model, manifest)

  with Progress('self-test') as bar:
    update = bar.callback
    return kvgraft_jax.load_model(
        args.model, dtype=args.dtype, chunk=args.chunk, tile=args.tile,
        page=args.page, capacity=args.capacity,
        allow_beyond_trained=args.allow_beyond_trained, check=check,
        progress=update and (lambda case, done, total: update(done, total)))


def streaming(args: Any, wanted: bool = False) -> Any:
  """Returns the `Streaming` that the flags ask for, or None.

  Args:
    args: with `flags.stream`.
    wanted: whether it is asked for by another flag.

  Raises:
    UsageError: if a size cannot be read, or only one for the host is given.
  """
  device, host = args.device_kv_bytes, args.host_kv_bytes
  if device is None and not wanted:
    if host is not None:
      raise errors.UsageError('--host_kv_bytes needs --device_kv_bytes')
    return None
  from kvgraft_jax import memory  # Imports jax; --help does not.
  from kvgraft_jax import streaming as streaming_lib
  return streaming_lib.Streaming(
      *(None if text is None else memory.parse_bytes(text, flag)
        for text, flag in ((device, 'device_kv_bytes'),
                           (host, 'host_kv_bytes'))))


def load_tokenizer(spec: str) -> Any:
  """Returns the tokenizer that `--model` names, without its weights if it can.

  Raises:
    UsageError: if the model has none.
  """
  if spec.partition(':')[0] in config_lib.TINY_PRESETS:
    return tokenizer_lib.ByteTokenizer()
  found = None
  if not spec.startswith('random:'):  # Whose weights would be made for nothing.
    _listen()
    from kvgraft_jax.checkpoints import resolve  # Imports jax; --help does not.
    found = (
        resolve.open_source(spec) if os.path.isdir(spec)
        else resolve.resolve(spec, 'bfloat16')).tokenizer
  if found is None:
    raise errors.UsageError(
        f'model {spec!r} has no tokenizer; choose another --model')
  return found


def open_store(args: Any, *, create: bool = False) -> kvgraft_jax.Store:
  """Returns the store that the flags name."""
  if not args.store:
    raise errors.UsageError(
        '--store is missing; give a directory, or a URL such as'
        ' gs://BUCKET/DIR')
  return kvgraft_jax.Store(args.store, create=create)
