"""Speculation by lookup: what may come next, guessed from the text so far.

The last two tokens are looked up in the context, grafted text included, and
what followed their newest earlier occurrence is the guess; an occurrence that
is being followed is kept for as long as it agrees. One step runs the pending
token and the guess behind it:

    row       0         1          2          3
    token     pending   guess 1    guess 2    guess 3
    chooses   = guess 1 = guess 2  another    (dropped)

Every row that follows right ones is the row that decoding one by one computes,
because a row's bits depend neither on its slot nor on the other rows; the rest
is padding, which no row sees before it is overwritten. So a guess changes how
much a step yields and never what.
"""

from collections.abc import Mapping
from collections.abc import Sequence

from kvgraft_jax import errors
from kvgraft_jax import numerics

# Most rows of a step unless asked for; at least a tile, whose rows are free.
DEFAULT_ROWS = 16


def row_counts(
    profile: numerics.Profile, invariances: Mapping[str, bool | None]
) -> list[int]:
  """Returns the step sizes, ascending, whose rows equal a tile's bit for bit.

  None at all where the self-test refuted what every promise rests on.

  Args:
    profile: of the programs.
    invariances: name -> True, False or None, from the self-test.
  """
  if not all(invariances.get(name) for name in numerics.REQUIRED):
    return []
  tile, chunk = profile.tile, profile.chunk
  proven = {int(name.removeprefix('rows_'))
            for name, equal in invariances.items()
            if name.startswith('rows_') and equal}
  return sorted({tile} | {n for n in proven if tile < n <= chunk})


def most_rows(
    speculate: int | None, tile: int, counts: Sequence[int]
) -> int:
  """Returns how many rows a decode step may have; 1 is no speculation.

  Args:
    speculate: rows asked for, or None for the default.
    tile: rows of the smallest step.
    counts: from `row_counts`.

  Raises:
    UsageError: if fewer than one row is asked for.
  """
  if speculate is None:
    speculate = max(tile, DEFAULT_ROWS)
  if speculate < 1:
    raise errors.UsageError(
        f'speculate: expected at least 1, no speculation, found {speculate}')
  return min(speculate, counts[-1]) if counts else 1


class Lookup:
  """Guesses the tokens that follow those of one context."""

  def __init__(self, rows: int, tile: int):
    """Creates one that has seen nothing.

    Args:
      rows: most rows of a step, the pending token's included.
      tile: rows that a step has in any case. More are worth their time only
        where the text repeats, so a guess is longer than that where a tile of
        the one in front of it has come true.
    """
    self._rows, self._tile = rows, min(rows, tile)
    self._behind: dict[tuple[int, int], int] = {}
    self._seen = 1
    self._guess: list[int] = []
    self._guess_at = 0
    self._back = 0  # How far back the occurrence stands that is followed.

  def propose(self, tokens: Sequence[int], room: int) -> list[int]:
    """Returns the guess, possibly none.

    Args:
      tokens: the context so far; between calls it only grows.
      room: most tokens to guess.
    """
    rows = self._rows if self._came_true(tokens) else self._tile
    most = min(rows - 1, room)
    self._guess, self._guess_at = [], len(tokens)
    if most < 1 or len(tokens) < 2:
      return []
    self._learn(tokens)
    pair = (tokens[-2], tokens[-1])
    at = len(tokens) - self._back
    if not self._back or (tokens[at - 2], tokens[at - 1]) != pair:
      if pair not in self._behind:
        return []
      at = self._behind[pair]
      self._back = len(tokens) - at
    # Past the end of the text the guess goes on with itself: a loop.
    self._guess = [tokens[at + i % self._back] for i in range(most)]
    return list(self._guess)

  def _came_true(self, tokens: Sequence[int]) -> bool:
    at, count = self._guess_at, self._tile - 1
    return 0 < count <= len(self._guess) and (
        list(tokens[at:at + count]) == self._guess[:count])

  def _learn(self, tokens: Sequence[int]) -> None:
    """Notes where each pair that something follows stands, the newest."""
    for i in range(self._seen, len(tokens) - 1):
      self._behind[tokens[i - 1], tokens[i]] = i + 1
    self._seen = max(self._seen, len(tokens) - 1)
