"""What children of the tests of streamed contexts run, each a fresh process."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import cli_helpers
from kvgraft_jax import depositing
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import journal
from kvgraft_jax import kvstore
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming as streaming_lib
from kvgraft_jax.apps import main
import model_helpers

_NOBODY = 65534


def child(function: str, *args: object) -> list:
  """Runs a function of this module in a process of its own; its JSON lines."""
  done = spawn(function, *args)
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


def spawn(function: str, *args: object) -> subprocess.CompletedProcess:
  """Runs a function of this module in a process of its own, to its end."""
  return subprocess.run(
      [sys.executable, '-c',
       f'import streaming_helpers; streaming_helpers.{function}(*{args!r})'],
      env=cli_helpers.environment(PYTHONPATH=cli_helpers.module_path()),
      capture_output=True, text=True, timeout=300, check=False)


def permission_lost(root: str) -> None:
  """As nobody: steps of a context, one of whose files loses its permission.

  Prints the error; whether nothing has changed; and whether the same call has
  the right bits once the file may be read again.
  """
  model = model_helpers.exact()
  model.self_test()
  store = store_lib.Store(root)
  ids = model_helpers.tokens(203)
  made = depositing.deposit(model, store, ids).manifest
  path = pathlib.Path(
      root, 'a', made.key, made.attempt, 'global', 'c.0.0.5.0.0')
  expected = model.prefill(ids + ids[:3]).logits_sha256()
  # Imports what is imported late: nobody may not be able to read the files.
  _streamed(model, store, made).extend(ids[:3]).logits()
  if os.getuid() == 0:
    for file in pathlib.Path(root).rglob('*'):
      os.chown(file, _NOBODY, _NOBODY)
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)
  context = _streamed(model, store, made)
  path.chmod(0)
  try:
    context.extend(ids[:3])
    print(json.dumps({'error': None}))
  except errors.KvgraftError as e:
    print(json.dumps({'error': type(e).__name__, 'text': str(e)}))
  print(json.dumps(context.tokens == ids and context.tokens_computed == 0))
  path.chmod(0o644)
  print(json.dumps(context.extend(ids[:3]).logits_sha256() == expected))


def _streamed(model, store, made):
  return grafting.graft(model, store, made, streaming=streaming_lib.Streaming(
      streaming_lib.least_bytes(model.config, model.profile), 1000))


def killed(where: str, number: int, argv: list[str]) -> None:
  """Runs `kvgraft ARGV` and kills this process at a moment.

  Args:
    where: 'data': a checkpoint's blocks are written and not in the journal;
      'state': its state is written and not its entry; 'entry': the entry is,
      and what it replaces still there; 'commit': all data is written and no
      manifest; 'published': the manifest is, and the journal still there.
    number: of the checkpoint, from 1.
    argv: arguments.
  """
  def die(*unused_args, **unused_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

  append, calls = journal.Journal.append, [0]

  def counted(self, *args, **kwargs):
    calls[0] += 1
    if calls[0] < number:
      return append(self, *args, **kwargs)
    if where == 'data':
      die()
    if where == 'state':
      kvstore.KvStore.put_new = die
    else:
      kvstore.KvStore.delete = die
    append(self, *args, **kwargs)
    die()  # Where there was nothing to replace.

  if where in ('data', 'state', 'entry'):
    journal.Journal.append = counted
  elif where == 'commit':
    put_new = kvstore.KvStore.put_new
    kvstore.KvStore.put_new = lambda kv, name, data: (
        die if name.endswith('manifest.json') else put_new)(kv, name, data)
  else:
    assert where == 'published', where
    journal.Journal.remove = die
  sys.exit(main.main(argv))
