"""Solving a problem with more and more effort, under a budget of tokens.

The rungs, from below: one greedy solution, samples that vote, a program that
is run and repaired, and longer thinking. Nothing here knows the right answer:
who climbs verifies each attempt and stops when one passes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses

from kvgraft_jax import checkers
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import prompts as prompts_lib

RUNGS = ('greedy', 'vote', 'program', 'think')
# Share of the budget, in percent, that a rung may decode, all samples together.
_SHARES = {'greedy': 15, 'vote': 35, 'program': 25, 'think': 25}
_REPAIRS = 1


@dataclasses.dataclass(frozen=True)
class Limits:
  """How hard to try.

  Attributes:
    budget: most tokens to decode for one problem.
    samples: that vote.
    temperature: of the samples.
    rungs: of `RUNGS`, from below.
  """

  budget: int = 512
  samples: int = 4
  temperature: float = 0.8
  rungs: tuple[str, ...] = RUNGS

  def __post_init__(self):
    for rung in self.rungs:
      if rung not in RUNGS:
        raise errors.UsageError(
            f'rungs: expected some of {", ".join(RUNGS)}, found {rung!r:.40}')
    if list(self.rungs) != [r for r in RUNGS if r in self.rungs]:
      raise errors.UsageError(
          f'rungs: expected each once and in the order {", ".join(RUNGS)},'
          f' found {", ".join(self.rungs)}')
    if self.samples < 1:
      raise errors.UsageError(
          f'samples: expected at least 1, found {self.samples}')
    if not self.rungs or self.budget < 16 * self.samples:
      raise errors.UsageError(
          f'budget: expected a rung and at least {16 * self.samples} tokens for'
          f' {self.samples} samples, found {self.budget}')

  def tokens(self, rung: str) -> int:
    """Returns tokens that one sample of a rung may decode."""
    share = sum(_SHARES[r] for r in self.rungs)
    most = self.budget * _SHARES[rung] // share
    return max(1, most // (self.samples if rung == 'vote' else 1))


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One reply to a problem.

  Attributes:
    rung: of `RUNGS`.
    sample: its number within the rung.
    mode: of `prompts.MODES`.
    token_ids: of the reply.
    text: of the reply.
    answer: read from it, None if there is none.
    tokens_restored: positions that came from a store.
    tokens_computed: positions of the question that were run; 0 for samples
      that share them with the first.
    tokens_decoded: tokens of the reply.
    steps: decode steps that it took.
    ran: hash of the program that was run, '' if none.
  """

  rung: str
  sample: int
  mode: str
  token_ids: tuple[int, ...]
  text: str
  answer: str | None
  tokens_restored: int
  tokens_computed: int
  tokens_decoded: int
  steps: int
  ran: str = ''


Recall = Callable[[str, int], Attempt | None]


@dataclasses.dataclass(frozen=True)
class Ladder:
  """Climbs for one problem after another.

  Attributes:
    prompts: how to ask.
    limits: how hard to try.
    begin: returns a new context of what stands in front of the question.
    front: ids of that context where a worked problem is in it, else None.
    worked: the worked problem, or None.
    seed: of the samples.
    unsafe: run programs where they cannot be kept apart.
  """

  prompts: prompts_lib.Prompts
  limits: Limits
  begin: Callable[[], engine.Context]
  front: Sequence[int] | None = None
  worked: prompts_lib.Worked | None = None
  seed: int = 0
  unsafe: bool = False

  def climb(
      self, problem: str, rule: str, rungs: Sequence[str],
      recall: Recall = lambda rung, sample: None,
  ) -> Iterator[tuple[Attempt, engine.Context | None]]:
    """Yields attempts, and the context that each left; None where several are.

    Args:
      problem: the statement.
      rule: of the answer.
      rungs: to climb, of those that the limits name; others are left out.
      recall: returns what an earlier process made of (rung, sample), or None.
    """
    for rung in self.limits.rungs:
      if rung not in rungs:
        continue
      if rung == 'program':
        yield from self._programs(problem, recall)
      else:
        yield from self._replies(problem, rule, rung, recall)

  def after(self, problem: str, attempt: Attempt) -> engine.Context:
    """Returns the context that an attempt left, computed anew."""
    return self._ask(problem, attempt.mode).extend(attempt.token_ids)

  def _ask(self, problem: str, mode: str) -> engine.Context:
    return self.begin().extend(
        self.prompts.ask(problem, mode, self.front, self.worked))

  def _generate(self, context, mode, tokens, **how):
    stop_ids, stop_when = self.prompts.stops(mode)
    return context.generate(
        tokens, stop_ids=stop_ids, stop_when=stop_when, **how)

  def _replies(self, problem, rule, rung, recall):
    count = self.limits.samples if rung == 'vote' else 1
    known = [recall(rung, i) for i in range(count)]
    if None not in known:
      yield from ((attempt, None) for attempt in known)
      return
    mode = 'think' if rung == 'think' else 'solution'
    context = self._ask(problem, mode)
    restored, computed = context.tokens_restored, context.tokens_computed
    how = {}
    if rung == 'vote':
      how = {'num_samples': count, 'temperature': self.limits.temperature,
             'seed': self.seed}
    made = self._generate(context, mode, self.limits.tokens(rung), **how)
    for i, one in enumerate(made):
      yield Attempt(
          rung, i, mode, tuple(one.token_ids), one.text,
          self.prompts.read(mode, one.text, rule), restored,
          0 if i else computed, len(one.token_ids), one.steps,
      ), context if count == 1 else None

  def _programs(self, problem, recall):
    limit = max(1, self.limits.tokens('program') // (1 + _REPAIRS))
    context, said = None, ''
    for i in range(1 + _REPAIRS):
      attempt = recall('program', i)
      if attempt is None:
        if context is None:
          context = self._ask(problem, 'program')
          before = 0
        else:
          before = context.tokens_computed
          context.extend(self.prompts.repair(said))
        computed = context.tokens_computed - before
        one, = self._generate(context, 'program', limit)
        answer, said, ran = self._run(one.text)
        attempt = Attempt(
            'program', i, 'program', tuple(one.token_ids), one.text, answer,
            context.tokens_restored, computed, len(one.token_ids), one.steps,
            ran)
      elif attempt.answer is None and i < _REPAIRS:
        # An earlier process had the context: it is made as that one left it.
        if context is None:
          context = self._ask(problem, 'program')
        else:
          context.extend(self.prompts.repair(said))
        self._repeat(context, attempt, limit)
        said = self._run(attempt.text)[1]
      yield attempt, None
      if attempt.answer is not None:
        return

  def _repeat(self, context, attempt, limit) -> None:
    """Appends a reply; the token that ended it has not been run."""
    ids = list(attempt.token_ids)
    _, stop_when = self.prompts.stops(attempt.mode)
    pending = len(ids) >= limit or bool(stop_when and stop_when(ids))
    context.extend(ids[:-1] if pending else ids)
    if pending:
      context.append(ids[-1])

  def _run(self, text):
    """Runs the program of a reply; returns answer, what it said, hash."""
    source = self.prompts.program(text)
    answer, result = checkers.run_program(source, {}, unsafe=self.unsafe)
    return (answer, result.stderr or result.stdout or result.ended,
            hashing.sha256('kvgraft.program', source.encode()))
