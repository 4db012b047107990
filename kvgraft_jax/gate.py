"""Which answer is given where samples and the library say different things.

A vote is confident if enough samples of enough agree. What happens where it
contradicts a grafted answer is a policy, and every decision says which.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

from kvgraft_jax import errors

# 'library': a grafted answer always stands; 'vote': a confident vote stands
# against it; 'abstain': where they disagree no answer is given.
POLICIES = ('library', 'vote', 'abstain')


@dataclasses.dataclass(frozen=True)
class Vote:
  """What samples agree on.

  Attributes:
    answer: the most frequent one, of equals the first; None if none has one.
    count: samples that gave it.
    samples: all of them, those without an answer included.
  """

  answer: str | None
  count: int
  samples: int


@dataclasses.dataclass(frozen=True)
class Decision:
  """An answer, and why it is given: of 'grafted', 'vote', 'abstain', 'none'."""

  answer: str | None
  why: str


@dataclasses.dataclass(frozen=True)
class Gate:
  """When a vote is confident, and what it may overrule.

  Attributes:
    policy: of `POLICIES`.
    least: samples that a confident vote has at least.
    share: percent of them that agree at least.
  """

  policy: str = 'vote'
  least: int = 4
  share: int = 75

  def __post_init__(self):
    if self.policy not in POLICIES:
      raise errors.UsageError(
          f'policy: expected one of {", ".join(POLICIES)}, found'
          f' {self.policy!r:.40}')
    if self.least < 1 or not 50 < self.share <= 100:
      raise errors.UsageError(
          'gate: expected at least 1 sample and a share of 51 to 100 percent,'
          f' found {self.least} and {self.share}')

  def confident(self, vote: Vote) -> bool:
    """Tells whether a vote is strong enough to stand by itself."""
    return (vote.answer is not None and vote.samples >= self.least
            and 100 * vote.count >= self.share * vote.samples)

  def decide(
      self, grafted: str | None, vote: Vote,
      same: Callable[[str, str], bool] = str.__eq__,
  ) -> Decision:
    """Returns the answer to give.

    Args:
      grafted: answer behind a graft, None if there is none.
      vote: of samples without the library.
      same: whether two answers are one.
    """
    sure = self.confident(vote)
    if grafted is None:
      return Decision(vote.answer, 'vote') if sure else Decision(None, 'none')
    if not sure or same(grafted, vote.answer or '') or self.policy == 'library':
      return Decision(grafted, 'grafted')
    if self.policy == 'vote':
      return Decision(vote.answer, 'vote')
    return Decision(None, 'abstain')


def count(
    answers: Sequence[str | None],
    same: Callable[[str, str], bool] = str.__eq__,
) -> Vote:
  """Returns what samples agree on.

  Args:
    answers: one a sample, None where it has none.
    same: whether two answers are one.
  """
  found: collections.Counter[str] = collections.Counter()
  for answer in answers:
    if answer is not None:
      known = next((a for a in found if same(answer, a)), answer)
      found[known] += 1
  if not found:
    return Vote(None, 0, len(answers))
  answer, times = found.most_common(1)[0]
  return Vote(answer, times, len(answers))
