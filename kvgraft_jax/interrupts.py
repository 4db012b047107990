"""Ctrl-C that waits until something that must be whole is whole."""

from collections.abc import Iterator
import contextlib
import signal
import threading
from types import FrameType


@contextlib.contextmanager
def deferred() -> Iterator[None]:
  """Lets a Ctrl-C in the block take effect behind it; a second one at once.

  A program that takes over (donates) an array and the assignment of what it
  returns belong together: in between nothing holds the data. Does nothing
  outside the main thread, which alone is interrupted.
  """
  number = signal.SIGINT
  before = signal.getsignal(number)
  if threading.current_thread() is not threading.main_thread() or not callable(
      before):
    yield
    return
  frames: list[FrameType | None] = []

  def note(number: int, frame: FrameType | None) -> None:
    frames.append(frame)
    if len(frames) > 1:
      before(number, frame)

  signal.signal(number, note)
  try:
    yield
  finally:
    signal.signal(number, before)
    if len(frames) == 1:
      before(number, frames[0])
