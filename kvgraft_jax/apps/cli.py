"""Runs one command: flags in; text, one JSON line and an exit code out.

A command is a module of this package with `EXAMPLE`, `define(flag_values)` and
`run(flag_values)`, which returns (exit code, JSON object). It may have
`POSITIONAL`, names of its flags that arguments without a flag fill in order,
and `ACTIONS`, each of them an `Action`, of which the first argument names one.
"""

from collections.abc import Callable
from collections.abc import Sequence
import importlib
import inspect
import json
import os
import re
import sys
import textwrap
import traceback
from typing import Any
from typing import NamedTuple

from absl import flags as absl_flags

from kvgraft_jax import errors
from kvgraft_jax.apps import flags

_HELP = ('-h', '-help', '--help', '--helpshort', '--helpfull')


class Action(NamedTuple):
  """One of several things that a command does.

  Attributes:
    run: as a command's; its docstring is the help.
    arguments: names of the flags that arguments behind the action fill.
    flags: names of the other flags that it takes.
    example: arguments behind the action.
  """

  run: Callable[[Any], tuple[int, dict[str, Any]]]
  arguments: tuple[str, ...]
  flags: tuple[str, ...]
  example: str


def start(name: str) -> None:
  """Runs a command with this process's arguments, then exits."""
  open_streams()
  sys.exit(execute(name, sys.argv[1:]))


def open_streams() -> None:
  """Keeps files from taking a closed stream's number, where libraries log."""
  for fd in range(3):
    try:
      os.fstat(fd)
    except OSError:
      os.open(os.devnull, os.O_RDWR)


def warn(text: str, end: str = '\n') -> None:
  """Writes to stderr; that nobody can read it is no error."""
  try:
    sys.stderr.write(text + end)
    sys.stderr.flush()
  except (AttributeError, OSError, ValueError):
    # Closed or full: else the last flush would fail once more.
    sys.stderr = open(os.devnull, 'w', encoding='utf-8')


def show(text: str) -> int:
  """Writes a text to stdout; returns the exit code."""
  try:
    _write(text)
  except BrokenPipeError:
    _silence_stdout()  # Nobody reads any more; nothing to say.
    return 1
  except OSError as e:
    _silence_stdout()
    warn(f'kvgraft: cannot write to stdout: {e.strerror}; check its space')
    return 1
  return 0


def execute(name: str, argv: Sequence[str]) -> int:
  """Runs a command; every error becomes one line on stderr.

  Args:
    name: of the command, a module of this package.
    argv: its flags.

  Returns:
    The exit code: 0 done, 1 a check failed or the world did, 2 wrong usage or
    incompatible input, 130 interrupted.
  """
  shown = '--traceback' in argv or os.environ.get(
      'KVGRAFT_TRACEBACK', '0') not in ('', '0')
  try:
    command = importlib.import_module(f'kvgraft_jax.apps.{name}')
    values = absl_flags.FlagValues()
    command.define(values)
    flags.common(values)
    if any(a in _HELP for a in argv):
      return show(_help(name, command, values, argv))
    flags.parse(values, argv, _positional(command))
    if sys.stdout is None:
      raise errors.UsageError(
          'stdout is closed, expected somewhere to write the result')
    code, result = command.run(values)
    return max(code, show(json.dumps(result, allow_nan=False) + '\n'))
  except BrokenPipeError:
    _silence_stdout()
    return 1
  except KeyboardInterrupt:
    line, code = 'interrupted', 130
  except Exception as e:
    if shown:
      traceback.print_exc()
    line, code = _describe(e)
  try:
    if sys.stdout is not None:
      sys.stdout.flush()
  except (OSError, ValueError):
    _silence_stdout()  # It may be what failed: what is left cannot be written.
  warn(f'kvgraft {name}: {" ".join(line.split())}')
  return code


def _describe(e: Exception) -> tuple[str, int]:
  """Returns the line and the exit code of an error."""
  if isinstance(e, errors.KvgraftError):
    return str(e), e.exit_code
  if isinstance(e, MemoryError) or 'RESOURCE_EXHAUSTED' in str(e)[:200]:
    return ('out of memory; use a smaller --capacity, a shorter text, fewer'
            ' samples, or --device_kv_bytes where the command has it'), 1
  if isinstance(e, OSError) and e.strerror:
    name = f'{e.filename}: ' if e.filename else ''
    return f'{name}{e.strerror}; check the path, its permissions and space', 1
  first = (str(e).splitlines() or [''])[0][:300]
  return (f'unexpected {type(e).__name__}: {first}; pass --traceback or set'
          ' KVGRAFT_TRACEBACK=1 to see where'), 1


def _write(text: str) -> None:
  sys.stdout.write(text)
  sys.stdout.flush()


def _silence_stdout() -> None:
  """Keeps the interpreter's last flush from complaining."""
  try:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except (OSError, ValueError):
    pass  # A stdout without a descriptor has no last flush.


def _positional(command: Any) -> tuple[str, ...]:
  return getattr(command, 'POSITIONAL', ())


def _help(
    name: str, command: Any, values: absl_flags.FlagValues, argv: Sequence[str]
) -> str:
  actions = getattr(command, 'ACTIONS', {})
  named = [a for a in argv if a in actions][:1]
  doc, example, shown = command.__doc__, command.EXAMPLE, set(values)
  places, usage = _positional(command), []
  if named:
    action = actions[named[0]]
    name, doc = f'{name} {named[0]}', action.run.__doc__
    example, places = action.example, action.arguments
    other = {f for a in actions.values() for f in (*a.arguments, *a.flags)}
    usage = ['', 'usage: ' + ' '.join(
        ['kvgraft', name, *map(str.upper, places), '--flags'])]
    shown -= (other | {'action'}) - {*action.arguments, *action.flags}
  lines = [inspect.cleandoc(doc or ''), *usage, '', 'Example:',
           f'  kvgraft {name} {example}', '']
  if places:
    lines += textwrap.wrap(
        'Arguments without a flag are, in this order: '
        + ', '.join(f'--{place}' for place in places) + '.', 80) + ['']
  lines.append('Flags:')
  for flag in dict.fromkeys(values[n] for n in values):  # Short names too.
    if flag.name in ('flagfile', 'undefok') or flag.name not in shown:
      continue
    kind = (f'--[no]{flag.name}' if flag.flag_type() == 'bool'
            else f'--{flag.name}=')
    if flag.short_name:
      kind = f'-{flag.short_name}, {kind}'
    text = flag.help
    if named:  # A line may be for one action alone.
      own = [part for part in re.split(r'\n(?=\w+: )', text)
             if part.startswith(f'{named[0]}: ')]
      text = (own or [text])[0].removeprefix(f'{named[0]}: ')
    choices = getattr(flag.parser, 'enum_values', None)
    if choices:
      kind += '|'.join(choices)
      text = text.partition('>: ')[2]  # absl repeats the choices in front.
    if flag.default is not None and flag.default is not False:
      kind += f' [{flag.default}]'
    lines.append(f'  {kind}')
    lines += textwrap.wrap(
        text, 78, initial_indent=' ' * 6, subsequent_indent=' ' * 6)
  return '\n'.join(lines) + '\n'
