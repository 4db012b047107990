"""Runs one program in the sandbox from a process of its own; and leftovers.

As a script it takes a JSON object on stdin: source, limits, and optionally
unsafe and no_unshare (a filter forbids namespaces, as many containers do). It
prints the result, or {"refused": message}.
"""

import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import struct
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
_UNSHARE = {'x86_64': 272, 'aarch64': 97}


def descendants(pid=None):
  """Returns the ids of all processes below one; orphans of its own, too."""
  found, todo = [], [pid or os.getpid()]
  while todo:
    parent = todo.pop()
    try:
      tasks = os.listdir(f'/proc/{parent}/task')
    except OSError:
      continue
    for task in tasks:
      try:
        with open(f'/proc/{parent}/task/{task}/children') as f:
          below = [int(word) for word in f.read().split()]
      except OSError:
        continue
      found += below
      todo += below
  return found


def adopt_orphans(yes):
  """Makes orphans of this process's children its own children, or not."""
  libc = ctypes.CDLL(None, use_errno=True)
  assert libc.prctl(36, ctypes.c_long(yes), 0, 0, 0) == 0


def shared_memory():
  """Returns bytes of files in memory and shared memory, of everybody."""
  with open('/proc/meminfo') as f:
    sizes = {line.split(':')[0]: int(line.split()[1]) for line in f}
  return sizes['Shmem'] * 1024


def segments():
  """Returns the System V segments."""
  try:
    with open('/proc/sysvipc/shm') as f:
      return {tuple(line.split()[:2]) for line in f}
  except OSError:
    return set()


def wait_until(condition, seconds=10):
  """Waits until a condition holds; returns whether it does."""
  until = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > until:
      return False
    time.sleep(0.01)
  return True


def forbid_namespaces():
  """Forbids unshare to this process, as the defaults of containers do."""
  from kvgraft_jax import sandbox_child
  steps = [(0x20, 0, 0, 0), (0x15, 0, 1, _UNSHARE[os.uname().machine]),
           (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
  sandbox_child._prctl(38, 1)
  sandbox_child._install(b''.join(struct.pack('<HBBI', *s) for s in steps))


def main():
  sys.path.insert(0, str(ROOT))
  from kvgraft_jax import errors
  from kvgraft_jax import sandbox
  request = json.load(sys.stdin)
  if request.get('no_unshare'):
    forbid_namespaces()
  try:
    result = sandbox.run(
        request['source'], limits=sandbox.Limits(**request['limits']),
        unsafe=request.get('unsafe', False))
  except errors.SandboxError as error:
    print(json.dumps({'refused': str(error)}))
  else:
    print(json.dumps(dataclasses.asdict(result)))


if __name__ == '__main__':
  # A shell that runs the tests in the background has it ignored.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  main()
