"""A Ctrl-C takes effect behind what must be whole."""

import signal
import threading

import pytest

from kvgraft_jax import interrupts


@pytest.fixture(autouse=True)
def handler_fixture():
  """Python's own handler, which a background process does not have."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def interrupt():
  signal.raise_signal(signal.SIGINT)


def test_it_waits_for_the_end_of_the_block():
  done, handler = [], signal.getsignal(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    with interrupts.deferred():
      interrupt()
      done.append(1)
  assert done and signal.getsignal(signal.SIGINT) is handler


def test_a_second_one_does_not_wait():
  done, handler = [], signal.getsignal(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    with interrupts.deferred():
      interrupt()
      done.append(1)
      interrupt()
      done.append(2)
  assert done == [1] and signal.getsignal(signal.SIGINT) is handler


def test_blocks_inside_blocks():
  done = []
  with pytest.raises(KeyboardInterrupt):
    with interrupts.deferred():
      with interrupts.deferred():
        interrupt()
        done.append(1)
      done.append(2)
  assert done == [1, 2]


def test_an_error_gives_way_to_the_interrupt():
  with pytest.raises(KeyboardInterrupt) as caught:
    with interrupts.deferred():
      interrupt()
      raise ValueError('in the block')
  assert isinstance(caught.value.__context__, ValueError)
  with pytest.raises(ValueError, match='alone'):
    with interrupts.deferred():
      raise ValueError('alone')


def test_handlers_of_others_stay():
  seen = []
  before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
  try:
    with interrupts.deferred():
      interrupt()
      assert not seen
    assert seen == [1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.deferred():
      interrupt()
      assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
  finally:
    signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone():
  found = []

  def run():
    with interrupts.deferred():
      found.append(signal.getsignal(signal.SIGINT))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert found == [signal.getsignal(signal.SIGINT)]
