"""Faults of the store, and interrupts, in the middle of a stream.

Each is one clear error. Then the context is as it was, no thread reads any
more, and once the store is whole again the same call has the bits of a context
that never failed.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import gc
import itertools
import pathlib
import queue
import shutil
import signal
import tempfile
import threading
import time

import numpy as np
import pytest

from kvgraft_jax import cold as cold_lib
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming as streaming_lib
import model_helpers
import streaming_helpers

# The last block that is cold as a whole.
BLOCK = 5
LAYER = r'global layer (2|4|2-4) [KV] block 5 \('
TAIL = model_helpers.tokens(70, seed=9)


@pytest.fixture(autouse=True)
def alarm_fixture():
  """Fails a test that hangs; a background process is interrupted as well."""
  def hangs(*_):
    raise AssertionError('it hangs')
  before = signal.signal(signal.SIGALRM, hangs)
  interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.alarm(120)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)
  signal.signal(signal.SIGINT, interrupts)


@dataclasses.dataclass
class Scene:
  """A deposit of 203 tokens, 192 of them cold, in a directory or a memory."""

  model: engine.Model
  store: store_lib.Store
  made: grafting.Artifact
  ids: list[int]

  def name(self, block: int = BLOCK) -> str:
    made = self.made.manifest
    return f'a/{made.key}/{made.attempt}/global/c.0.0.{block}.0.0'

  def path(self, block: int = BLOCK) -> pathlib.Path:
    return pathlib.Path(self.store._kv.where(self.name(block)))

  def graft(self, extra: int = 0, host: int = 70_000) -> engine.Context:
    """Returns a streamed context with room on the device, and the host."""
    return grafting.graft(
        self.model, self.store, self.made, streaming=streaming_lib.Streaming(
            streaming_lib.least_bytes(self.model.config, self.model.profile)
            + extra, host))

  def memory(self) -> engine.Context:
    """Returns a context that cannot fail."""
    return self.model.prefill(self.ids)

  @contextlib.contextmanager
  def broken(self, how: str, block: int = BLOCK):
    """Breaks a block for a while."""
    kv, name = self.store._kv, self.name(block)
    before = kv.load(name)
    data = bytearray(before)
    for at in range(100, len(data), 512):  # In every layer, K and V.
      data[at] ^= 1
    kv.delete(name)
    if how != 'removed':
      kv.put(name, {'truncated': before[:1000], 'empty': b'',
                    'flipped': bytes(data)}[how])
    try:
      yield
    finally:
      kv.put(name, before)


def scene_of(url: str) -> Scene:
  model = model_helpers.exact()
  model.self_test()
  store = store_lib.Store(url)
  ids = model_helpers.tokens(203)
  return Scene(model, store, depositing.deposit(model, store, ids), ids)


@pytest.fixture(scope='module', name='scene')
def scene_fixture(tmp_path_factory):
  return scene_of(str(tmp_path_factory.mktemp('faults')))


@pytest.fixture(scope='module', name='objects')
def objects_fixture():
  return scene_of('memory://streaming_faults')


class Fills:
  """Watches all reads of cold pages, and acts in the middle of some."""

  def __init__(self, monkeypatch):
    self.running, self.begun = 0, 0
    self.act: Callable[[int], None] = lambda start: None
    fill = cold_lib.Cold.fill
    lock = threading.Lock()

    def watched(cold, row, start, stop, k, v):
      with lock:
        self.running += 1
        self.begun += 1
      try:
        self.act(start)
        fill(cold, row, start, stop, k, v)
      finally:
        with lock:
          self.running -= 1

    monkeypatch.setattr(cold_lib.Cold, 'fill', watched)


@pytest.fixture(name='fills')
def fills_fixture(monkeypatch):
  return Fills(monkeypatch)


def state(context: engine.Context) -> dict:
  """Returns all that a context is, without running anything."""
  first = max(0, context.length - model_helpers.WINDOW)
  rows = [*context.global_rows(0, context.length),
          *context.sliding_rows(first, context.length)]
  return {
      'tokens': list(context.tokens), 'restored': context.tokens_restored,
      'computed': context.tokens_computed, 'exact': context.exact,
      'rows': [np.ascontiguousarray(r).tobytes() for r in rows]}


def same(ours: engine.Context, theirs: engine.Context) -> None:
  """Compares K, V and logits of a streamed context and one in memory."""
  assert ours.tokens == theirs.tokens
  assert ours.logits().tobytes() == theirs.logits().tobytes()
  assert state(ours)['rows'] == state(theirs)['rows']


def fails(call, fills: Fills, match: str = LAYER, error=errors.DamageError):
  """Runs a call that must fail, and leave nothing that runs."""
  with pytest.raises(error, match=match) as caught:
    call()
  assert fills.running == 0
  assert '\n' not in str(caught.value) and len(str(caught.value)) < 700
  return str(caught.value)


ACTIONS = {
    'logits': lambda c: c.logits().tobytes(),
    'step': lambda c: c.extend(TAIL[:1]).length,
    'chunk': lambda c: c.extend(TAIL[:32]).length,
    'score': lambda c: c.score(TAIL[:9]),
    'logits_of': lambda c: c.logits_of(TAIL[:4], [0, 3]).tobytes(),
    'generate': lambda c: c.generate(3, stop_ids=(), speculate=1),
    'samples': lambda c: c.generate(
        3, temperature=1.0, num_samples=2, stop_ids=()),
    'speculate': lambda c: c.generate(3, stop_ids=(), speculate=4),
    'ahead': lambda c: [x.tobytes() for x in c.ahead([7, 8])],
}


@pytest.mark.parametrize('action, how', [
    *((action, 'flipped') for action in ACTIONS),
    *(('step', how) for how in ('truncated', 'removed', 'empty')),
    ('score', 'removed')])
def test_failed_call_changes_nothing_and_can_be_made_again(
    scene, fills, action, how):
  act = ACTIONS[action]
  ours, theirs = scene.graft(), scene.memory()
  fork = ours.fork()
  before = state(ours)
  for _ in range(2):
    with scene.broken(how):
      text = fails(lambda: act(ours), fills)
    assert str(scene.path()) in text
    assert state(ours) == state(fork) == before
  assert act(ours) == act(theirs)
  same(ours, theirs)
  # What the failure left behind is no part of a fork, before or after.
  same(fork, scene.memory())
  again = ours.fork()
  again.extend(TAIL)
  same(again, theirs.extend(TAIL))


@pytest.mark.parametrize('how', ['removed', 'flipped', 'truncated'])
def test_objects_that_are_lost_or_changed(objects, fills, how):
  ours, theirs = objects.graft(), objects.memory()
  before = state(ours)
  with objects.broken(how):
    assert 'memory://' in fails(lambda: ours.extend(TAIL[:2]), fills)
  assert state(ours) == before
  same(ours.extend(TAIL[:2]), theirs.extend(TAIL[:2]))


@pytest.mark.parametrize('guess', [[], [7], [7, 8, 9]])
def test_pending_token_stays_pending(scene, fills, guess):
  """A chosen token whose step fails runs when the store is back."""
  ours, theirs = scene.graft(), scene.memory()
  for context in (ours, theirs):
    context.logits()
    context.append(11)
  with scene.broken('removed'):
    fails(lambda: list(ours.ahead(guess)), fills)
    assert ours.length == 204
    fails(lambda: ours.extend([5]), fills)
    assert ours.length == 204
    fails(lambda: ours.score([5, 6]), fills)
  ours.append(7)
  theirs.append(7)
  same(ours, theirs)


def test_generate_keeps_what_it_chose(scene, fills):
  ours, theirs = scene.graft(), scene.memory()
  chosen, stack = [], contextlib.ExitStack()

  def on_token(_, token):
    chosen.append(token)
    if len(chosen) == 2:
      stack.enter_context(scene.broken('flipped'))

  with stack:
    fails(lambda: ours.generate(
        8, temperature=1.0, seed=5, stop_ids=(), speculate=1,
        on_token=on_token), fills)
  assert ours.tokens == scene.ids + chosen and len(chosen) == 2
  rest = ours.generate(
      6, temperature=1.0, seed=5, stop_ids=(), speculate=1)[0].token_ids
  [whole] = theirs.generate(
      8, temperature=1.0, seed=5, stop_ids=(), speculate=1)
  assert chosen + rest == whole.token_ids
  same(ours, theirs)


@pytest.mark.parametrize('extend', ['extend', 'hidden_of'])
@pytest.mark.parametrize('host', [70_000, 10**9])
@pytest.mark.parametrize('steps', [1, 2])
def test_long_extension_ends_behind_the_last_whole_step(
    scene, fills, monkeypatch, steps, host, extend):
  """32, 32 and 6 tokens; the fault comes behind `steps` chunks."""
  ours, theirs = scene.graft(host=host), scene.memory()
  ours.extend(TAIL[:3])
  theirs.extend(TAIL[:3])
  stack, ends = contextlib.ExitStack(), 206 + 32 * steps
  run_step = streaming_lib.Streamed.run_step

  def break_behind(streamed, params, tokens, starts, wanted=None):
    if int(starts[0]) == ends:  # Else all could be in host memory by now.
      ours.streamed.cold._drop(1 << 60)
      stack.enter_context(scene.broken('removed'))
    return run_step(streamed, params, tokens, starts, wanted)

  monkeypatch.setattr(streaming_lib.Streamed, 'run_step', break_behind)
  with stack:
    fails(lambda: getattr(ours, extend)(TAIL), fills)
  monkeypatch.undo()
  assert ours.length == ends and ours.tokens_computed == 3 + 32 * steps
  assert ours.tokens == scene.ids + TAIL[:3] + TAIL[:32 * steps]
  same(ours.fork(), theirs.fork().extend(TAIL[:32 * steps]))
  same(ours.extend(TAIL[32 * steps:]), theirs.extend(TAIL))


def test_fork_fails_alone(scene, fills):
  ours = scene.graft()
  fork = ours.fork()
  with scene.broken('removed'):
    fails(lambda: fork.extend(TAIL), fills)
  same(ours.extend(TAIL), scene.memory().extend(TAIL))
  same(fork.extend(TAIL[:5]), scene.memory().extend(TAIL[:5]))


def test_graft_of_a_broken_store(scene, fills):
  """What it needs at once fails the graft, what is cold the first step."""
  with scene.broken('removed', 6):
    with pytest.raises(errors.DamageError, match='global layer .* block 6'):
      scene.graft()
  with scene.broken('removed'):
    ours = scene.graft()
    fails(ours.logits, fills)
  same(ours, scene.memory())


def test_failure_while_the_next_pages_are_being_read(scene, fills):
  """Two threads read ahead; none is left when the error arrives."""
  ours, theirs = scene.graft(20_000), scene.memory()
  assert ours.streamed.layout.buffers == 3
  group = ours.streamed.layout.group
  broken_at = 32 * BLOCK // group * group
  late = []

  def act(start):
    if start != broken_at:
      time.sleep(0.05)
      late.append(start)

  fills.act = act
  with scene.broken('flipped'):
    fails(lambda: ours.extend(TAIL[:2]), fills)
  # The next layer's first pages were being read, and that was waited for.
  assert late[-1] == 0
  begun = fills.begun
  time.sleep(0.1)
  assert fills.begun == begun
  fills.act = lambda start: None
  same(ours.extend(TAIL[:2]), theirs.extend(TAIL[:2]))


def interrupt_main() -> None:
  signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def interrupt_in_a_thread(start: int) -> None:
  if start >= 96:
    raise KeyboardInterrupt


class OneInterrupt:
  """Interrupts the main thread while it waits for this fill, once."""

  def __init__(self):
    self._numbers = itertools.count()

  def __call__(self, start: int) -> None:
    if start >= 96 and not next(self._numbers):
      interrupt_main()
      time.sleep(0.3)  # Goes on filling behind the interrupt.


@pytest.mark.parametrize('extra', [0, 20_000])
@pytest.mark.parametrize('where', ['fill', 'waiting', 'consumer', 'segment'])
def test_interrupt_in_the_middle(scene, fills, monkeypatch, where, extra):
  ours, theirs = scene.graft(extra), scene.memory()
  before = state(ours)
  run = streaming_lib.Streamed._program
  if where == 'fill':
    fills.act = interrupt_in_a_thread
  elif where == 'waiting':
    fills.act = OneInterrupt()
  else:
    name, counts = ('fold' if where == 'consumer' else where), [0]

    def program(self, name_, *args, **kwargs):
      counts[0] += name_ == name
      if name_ == name and counts[0] == 2:
        raise KeyboardInterrupt
      return run(self, name_, *args, **kwargs)

    monkeypatch.setattr(streaming_lib.Streamed, '_program', program)
  with pytest.raises(KeyboardInterrupt):
    ours.extend(TAIL[:5])
  assert fills.running == 0 and not ours.streamed._ring.lock.locked()
  fills.act = lambda start: None
  assert state(ours) == before
  same(ours.extend(TAIL), theirs.extend(TAIL))


def test_interrupted_twice(scene, fills):
  """The second one ends the wait for a thread: its buffer is not used."""
  ours, theirs = scene.graft(), scene.memory()
  numbers = itertools.count()

  def act(start):
    if start >= 96 and not next(numbers):
      interrupt_main()
      time.sleep(0.2)
      interrupt_main()
      time.sleep(0.5)

  fills.act = act
  with pytest.raises(KeyboardInterrupt):
    ours.extend(TAIL[:5])
  assert fills.running == 1  # Really the case that is meant.
  same(ours.extend(TAIL), theirs.extend(TAIL))


def test_interrupted_compilation_of_a_move(scene, monkeypatch):
  model = model_helpers.variant(scene.model)
  context = model.prefill(TAIL[:40], streaming=streaming_lib.Streaming(
      streaming_lib.least_bytes(model.config, model.profile)))
  compiled = model.programs.compiled

  def interrupted(name, *args):
    if name[0] == 'move':
      raise KeyboardInterrupt
    return compiled(name, *args)

  with monkeypatch.context() as patch:
    patch.setattr(model.programs, 'compiled', interrupted)
    with pytest.raises(KeyboardInterrupt):
      context.extend(TAIL[40:])
  assert context.length == 40
  same(context.extend(TAIL[40:]), scene.model.prefill(TAIL))


def test_no_thread_outlives_its_context(scene):
  def readers():
    return [t for t in threading.enumerate()
            if t.name.startswith('kvgraft-read-ahead')]

  gc.collect()
  before = len(readers())
  context = scene.graft(20_000)
  with scene.broken('removed'):
    with pytest.raises(errors.DamageError):
      context.extend(TAIL)
  assert len(readers()) > before
  del context
  gc.collect()
  deadline = time.monotonic() + 10
  while len(readers()) > before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert len(readers()) == before


def test_error_of_a_program_frees_the_ring(scene, fills, monkeypatch):
  """Two contexts share a ring; the other one must still get it."""
  ours, theirs = scene.graft(), scene.memory()
  fork = ours.fork()
  with monkeypatch.context() as patch:
    patch.setattr(streaming_lib.Streamed, '_fold', lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
      ours.extend(TAIL[:1])
  assert fills.running == 0
  same(fork.extend(TAIL), theirs.extend(TAIL))


def test_two_threads_share_a_ring(scene):
  """A context and its fork run at once, one of them fails in between."""
  ours = scene.graft()
  fork, found = ours.fork(), []

  def run():
    with contextlib.suppress(errors.DamageError):
      for token in TAIL[:20]:
        fork.extend([token])
    found.append(fork.length)

  thread = threading.Thread(target=run)
  thread.start()
  with scene.broken('removed'):
    while True:
      try:
        ours.extend(TAIL[:1])
      except errors.DamageError:
        break
  thread.join(60)
  assert not thread.is_alive() and len(found) == 1
  same(fork, scene.model.prefill(scene.ids + TAIL[:found[0] - 203]))
  more = TAIL[:1] * (ours.length - 203)
  same(ours, scene.model.prefill(scene.ids + more))


@pytest.fixture
def public_root():
  """A directory that other users can reach, unlike tmp_path."""
  root = pathlib.Path(tempfile.mkdtemp(prefix='kvgraft_test_'))
  root.chmod(0o755)
  yield root
  for path in root.rglob('*'):
    path.chmod(0o755)
  shutil.rmtree(root)


def test_permission_lost_as_an_unprivileged_user(public_root):
  """A file that may no longer be read is no damage, and names itself."""
  denied, equal, after = streaming_helpers.child(
      'permission_lost', str(public_root))
  assert denied['error'] == 'StorageError'
  assert 'global layer' in denied['text'] and 'block 5 (' in denied['text']
  assert 'check the permissions' in denied['text']
  assert '\n' not in denied['text']
  assert equal is True and after is True


@pytest.mark.parametrize('streamed', [True, False])
def test_interrupts_at_any_moment_leave_a_whole_context(scene, streamed):
  """A program takes the cache over; until its result is there none has it."""
  goal = TAIL + TAIL[::-1]
  theirs = scene.memory().extend(goal)

  def interrupt(after: float, begun: queue.SimpleQueue, over: list):
    begun.get()
    time.sleep(after)
    if not over:
      interrupt_main()

  ours = scene.graft() if streamed else grafting.graft(
      scene.model, scene.store, scene.made)
  warm = ours.fork().extend(goal)  # Compiles.
  began = time.monotonic()
  warm = scene.graft() if streamed else scene.memory()
  warm.extend(TAIL[:5])
  step, caught = time.monotonic() - began, 0
  rng = np.random.Generator(np.random.PCG64(0))
  while ours.length < len(scene.ids) + len(goal):
    done = ours.length - len(scene.ids)
    begun: queue.SimpleQueue = queue.SimpleQueue()
    over: list = []
    thread = threading.Thread(
        target=interrupt, args=(rng.uniform(0, 1.2 * step), begun, over))
    thread.start()
    try:
      try:
        begun.put(None)
        ours.extend(goal[done:done + 5])
      finally:
        over.append(True)
        thread.join()
    except KeyboardInterrupt:
      caught += 1
      assert caught < 500
    over.append(True)
    thread.join()  # One of the two may have been what was interrupted.
  assert caught > 0
  same(ours, theirs)


def test_a_context_that_lost_its_state_says_so(scene):
  context = scene.graft()
  for array in context.cache.k.values():
    array.delete()
  with pytest.raises(errors.UsageError, match='lost its keys and values'):
    context.extend(TAIL[:3])
  context = scene.memory()
  context.cache.k['global'].delete()
  with pytest.raises(errors.UsageError, match='graft or compute it again'):
    context.logits_of(TAIL[:3])
