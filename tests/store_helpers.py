"""Small artifacts with known content, and what children of store tests run.

Children are forked from a fresh interpreter that has not used TensorStore yet:
its threads do not survive a fork.
"""

import dataclasses
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np

import cli_helpers
from kvgraft_jax import artifact
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import store as store_lib

LOGITS = 'ab' * 32
NOBODY = 65534


@dataclasses.dataclass
class Case:
  """What a deposit is given, and its bit patterns by (kind, block)."""

  fields: artifact.KeyFields
  layouts: dict[str, artifact.KindLayout]
  tokens: np.ndarray
  blocks: dict[tuple[str, int], np.ndarray]

  def rows(self, kind: str) -> np.ndarray:
    """Returns all stored positions, [layers, 2, T, kv_heads, head_dim]."""
    return np.concatenate(
        [a for (k, _), a in self.blocks.items() if k == kind], axis=2)


def case(
    start: int = 0, end: int = 100, *, block: int = 32, sliding: str = 'full',
    dtype: str = 'bfloat16', seed: int = 0, window: int = 24, heads: int = 2,
    dim: int = 16, fill: int | None = None, layers=((0, 1, 3), (2, 4)),
) -> Case:
  """Returns a case with random patterns, or with `fill` everywhere."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 320, end - start).astype(np.int32)
  fields = artifact.KeyFields(
      model='m', tokenizer='t', template='none', numerics_class='c',
      parent='a' * 64 if start else '', start=start, end=end,
      tokens_sha256=hashing.tokens_sha256(tokens), block=block,
      sliding=sliding)
  layouts = {
      'sliding': artifact.KindLayout(layers[0], heads, dim, dtype, window),
      'global': artifact.KindLayout(layers[1], heads, dim, dtype, None),
  }
  blocks = {}
  for kind, layout in layouts.items():
    top = np.iinfo(layout.element).max
    for index, lo, hi in artifact.geometry(fields, layout).blocks:
      shape = (len(layout.layers), 2, hi - lo, heads, dim)
      blocks[kind, index] = (
          rng.integers(0, top, shape, layout.element, endpoint=True)
          if fill is None else np.full(shape, fill, layout.element))
  return Case(fields, layouts, tokens, blocks)


def deposit(
    store: store_lib.Store, what: Case, logits: str = LOGITS, **outer
) -> artifact.Manifest:
  """Deposits a case, last blocks first."""
  with store.create(what.fields, what.layouts, what.tokens) as writer:
    for (kind, index), array in reversed(what.blocks.items()):
      writer.write_block(kind, index, array)
    return writer.commit(last_logits_sha256=logits, outer=outer)


def read(
    store: store_lib.Store, manifest: artifact.Manifest, kind: str,
    start: int | None = None, stop: int | None = None, verify: bool = True,
) -> np.ndarray:
  """Returns positions [start, stop), [layers, 2, n, kv_heads, head_dim]."""
  lo, hi = artifact.available(manifest)[kind]
  start, stop = lo if start is None else start, hi if stop is None else stop
  layout = manifest.layouts[kind]
  out = np.full((2, len(layout.layers), stop - start, layout.kv_heads,
                 layout.head_dim), 0x5a5a, layout.element)
  store.read(manifest, kind, start, stop, out[0], out[1], verify=verify)
  return out.swapaxes(0, 1)


def check(
    store: store_lib.Store, manifest: artifact.Manifest, what: Case
) -> None:
  """Reads everything back and compares every byte."""
  assert store.tokens(manifest).tobytes() == what.tokens.tobytes()
  for kind in what.layouts:
    found = read(store, manifest, kind)
    assert found.tobytes() == what.rows(kind).tobytes(), kind


def files(root: str | pathlib.Path, manifest: artifact.Manifest):
  """Returns name -> path of the data files of an artifact."""
  base = pathlib.Path(root, 'a', manifest.key, manifest.attempt)
  return {name: base / name for name in
          artifact.data_files(manifest.fields, manifest.layouts)}


def child(function: str, *args: object) -> list:
  """Runs a function of this module in a fresh interpreter; its JSON lines."""
  env = dict(os.environ, PYTHONPATH=cli_helpers.module_path())
  done = subprocess.run(
      [sys.executable, '-c',
       f'import store_helpers; store_helpers.{function}(*{args!r})'],
      env=env, capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


def _fork(function) -> int:
  """Runs `function` in a forked process and prints what it returns."""
  sys.stdout.flush()
  pid = os.fork()
  if pid:
    return pid
  status = 1
  try:
    line = json.dumps(function()) + '\n'
    os.write(1, line.encode())
    status = 0
  finally:
    os._exit(status)


def _outcome(function) -> dict:
  """Returns what `function` returned, or the error it raised."""
  try:
    return {'value': function()}
  except errors.KvgraftError as e:
    return {'error': type(e).__name__, 'text': str(e)}


def kill_rounds(root: str, rounds: int) -> None:
  """Kills deposits at random moments; prints how many ended before that."""
  chance = random.Random(0)
  longest = 0.0
  for i in range(rounds):
    began = time.monotonic()
    pid = _fork(lambda i=i: deposit(
        store_lib.Store(root), case(seed=i, end=60 + i)).id)
    if i < 2:
      os.waitpid(pid, 0)
      longest = time.monotonic() - began
    else:
      time.sleep(chance.uniform(0, longest))
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)


def race(root: str, rounds: int, writers: int) -> None:
  """Lets several processes deposit one key at once; prints their ids."""
  for i in range(rounds):
    gate, opener = os.pipe()
    def enter(i=i, gate=gate):
      os.read(gate, 1)
      return [i, _outcome(
          lambda: deposit(store_lib.Store(root), case(seed=i)).id)]
    pids = [_fork(enter) for _ in range(writers)]
    os.write(opener, b'x' * writers)
    for pid in pids:
      os.waitpid(pid, 0)
    os.close(gate)
    os.close(opener)


def unprivileged(root: str, keys: list[str]) -> None:
  """As nobody: gets and reads each key, then deposits."""
  cases = [case(seed=i) for i in range(len(keys))]
  new = case(seed=99)
  # Imports what is imported late: nobody may not be able to read the files.
  warm = store_lib.Store('memory://warm')
  check(warm, deposit(warm, new), new)
  if os.getuid() == 0:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
  store = store_lib.Store(root)
  for what, key in zip(cases, keys):
    print(json.dumps(_outcome(
        lambda w=what, k=key: check(store, store.get(k), w))))
  print(json.dumps(_outcome(lambda: deposit(store, new).id)))
  print(json.dumps(_outcome(lambda: store.set_name('x', keys[0]))))
  print(json.dumps([len(store.list()), store.list_damaged()]))


def small_files(root: str, limit: int) -> None:
  """Deposits while no file may grow beyond `limit` bytes."""
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
  store = store_lib.Store(root)
  print(json.dumps(_outcome(lambda: deposit(store, case(seed=1)).id)))


def journaled(root: str, what: Case, every: int = 2) -> artifact.Manifest:
  """Deposits a case with a journal, going on where an earlier one ended."""
  store = store_lib.Store(root)
  args = what.fields, what.layouts, what.tokens
  with store.resume(*args) or store.create(*args, journal=True) as writer:
    last = {k: artifact.geometry(what.fields, v).blocks[-1].number + 1
            for k, v in what.layouts.items()}
    first = {k: artifact.geometry(what.fields, v).blocks[0].number
             + writer.done(k) for k, v in what.layouts.items()}
    for index in range(min(first.values()), max(last.values())):
      for kind in what.layouts:
        if index >= first[kind] and (kind, index) in what.blocks:
          writer.write_block(kind, index, what.blocks[kind, index])
      if index % every == 0:
        writer.checkpoint(f'state {index}'.encode())
    return writer.commit(last_logits_sha256=LOGITS, outer={})


def kill_journaled(root: str, rounds: int) -> None:
  """Kills a deposit `rounds` times, each time after a few more checkpoints.

  Prints how many blocks each process found done, and the id in the end.
  """
  chance = random.Random(0)
  what = case(end=3000)
  base = pathlib.Path(root, 'a', what.fields.key)

  def checkpoints() -> int:
    return len([p for p in base.glob('*/journal/*') if p.name.isdigit()])

  def process():
    writer = store_lib.Store(root).resume(
        what.fields, what.layouts, what.tokens)
    os.write(1, f'{writer.done("global") if writer else 0}\n'.encode())
    return journaled(root, what).id

  for _ in range(rounds):
    wanted = checkpoints() + chance.randint(1, 5)
    pid = _fork(process)
    while checkpoints() < wanted:
      time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.01))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
  os.waitpid(_fork(process), 0)


def resume_twice(root: str, end: int) -> None:
  """Two processes go on with one attempt at once; prints both outcomes."""
  what = case(end=end)
  gate, opener = os.pipe()

  def enter(every):
    os.read(gate, 1)
    return _outcome(lambda: journaled(root, what, every).id)

  pids = [_fork(lambda e=e: enter(e)) for e in (2, 3)]
  os.write(opener, b'xx')
  for pid in pids:
    os.waitpid(pid, 0)


def small_journaled(root: str, limit: int) -> None:
  """Deposits with a journal while no file may grow beyond `limit` bytes."""
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
  print(json.dumps(_outcome(lambda: journaled(root, case(end=300)).id)))
