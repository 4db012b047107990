"""What the phases of a flywheel run share: its lines, model, store, prompts.

Every unit of work has an id, and a line that is there already is not made
again: so a run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import logging
from typing import Any

from kvgraft_jax import checkers
from kvgraft_jax import datasets
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import library as library_lib
from kvgraft_jax import numerics
from kvgraft_jax import prompts as prompts_lib
from kvgraft_jax import recheck
from kvgraft_jax import resources
from kvgraft_jax import store as store_lib

_LOG = logging.getLogger(__name__)
Body = dict[str, Any]


class Work:
  """What the phases work with.

  Attributes:
    settings: of the run (`flywheel.Settings`).
    ledger: open.
    model: its self-test done.
    prompts: how it is asked.
    store: of the artifacts.
    problems: of the dataset.
    keep_texts: whether statements and replies may stand in the ledger.
    place: of the store below the run, '' if elsewhere.
  """

  def __init__(
      self, settings: Any, ledger: ledger_lib.Ledger, model: engine.Model,
      prompts: prompts_lib.Prompts, store: store_lib.Store,
      problems: list[datasets.Problem], *, keep_texts: bool, place: str,
      progress: Callable[[str, int, int], None] | None,
  ):
    self.settings, self.ledger, self.model = settings, ledger, model
    self.prompts, self.store, self.problems = prompts, store, problems
    self.keep_texts, self.place, self._progress = keep_texts, place, progress
    self.numerics_class = numerics.class_fingerprint(model.numerics_class)
    self._lines: dict[tuple[str, str], Body] = {}
    self._read = 0  # Lines of the ledger that are in it.
    self._front: grafting.Artifact | None = None

  def recorded(self, kind: str, id: str) -> Body | None:
    """Returns the body of a line that is there, or None."""
    for line in self.ledger.lines[self._read:]:
      self._lines[line['kind'], line['body'].get('id', '')] = line['body']
    self._read = len(self.ledger.lines)
    return self._lines.get((kind, id))

  def once(self, kind: str, id: str, make: Callable[[], Body]) -> Body:
    """Returns the body of a line; it is made and written if it is not there."""
    found = self.recorded(kind, id)
    if found is None:
      self.ledger.append(kind, {**make(), 'id': id})
      found = self.ledger.lines[-1]['body']
    return found

  def split(self, *names: str) -> list[datasets.Problem]:
    """Returns the problems of splits."""
    return [p for p in self.problems if p.split in names]

  def each(
      self, what: str, problems: list[datasets.Problem]
  ) -> Iterator[datasets.Problem]:
    """Yields problems, and tells people how far it is."""
    _LOG.info('flywheel, %s', what)
    for i, problem in enumerate(problems):
      if self._progress:
        self._progress(what, i, len(problems))
      yield problem

  @contextlib.contextmanager
  def meter(self, phase: str, number: int) -> Iterator[resources.Meter]:
    """Measures a phase of a round and writes its resources."""
    group: dict[str, str | int] = {'phase': phase, 'round': number}
    with resources.Meter(self.model.config, group) as meter:
      yield meter
    self.once('resources', f'{phase}/{number}', meter.body)

  def begin(self) -> engine.Context:
    """Returns a new context of what stands in front of every question."""
    ids = self.prompts.preamble()
    if not ids:
      return self.model.context()
    if self._front is None:
      self._front = depositing.deposit(self.model, self.store, ids)
    return grafting.graft(self.model, self.store, self._front)

  def shown(
      self, library: library_lib.Library, entry: library_lib.Entry
  ) -> tuple[engine.Context, prompts_lib.Worked]:
    """Returns a context of an entry, and what it holds.

    It is grafted where the store has an artifact with this very text, else
    computed: an entry may come from another store, model or style.
    """
    mode = entry.provenance.get('mode')
    worked = self.prompts.written(entry.problem, entry.solution, entry.answer)
    if mode in prompts_lib.MODES:  # The model wrote it.
      worked = prompts_lib.Worked(entry.problem, entry.solution, mode)
    ids = self.prompts.front(worked)
    artifact = library.artifact(
        entry.id, self.model.fingerprint, self.numerics_class)
    if artifact is not None:
      try:
        context = grafting.graft(self.model, self.store, artifact)
        decode = self.prompts.text
        if decode(context.tokens) == decode(ids):
          return context, worked
      except errors.NotFoundError:
        pass
    return self.model.prefill(ids), worked

  def same(
      self, rule: str, tolerance: str | None = None
  ) -> Callable[[str, str], bool]:
    """Returns what tells whether two answers are one; either may be odd."""
    def same(a: str, b: str) -> bool:
      try:
        return checkers.same(
            rule, a, b, tolerance=tolerance, unsafe=self.settings.unsafe_exec)
      except errors.UsageError:
        return a == b
    return same

  def answer(
      self, name: str, problem: datasets.Problem, answer: str | None, *,
      phase: str, number: int, what: str, route: str = 'bare',
      restored: int = 0, computed: int = 0, decoded: int = 0, steps: int = 0,
      **more: Any,
  ) -> bool:
    """Writes an answer that was given, and its score; returns whether right.

    Args:
      name: of the lines.
      problem: that was asked.
      answer: None if none was given.
      phase: of the run.
      number: of the round.
      what: 'given', or whose answer it is.
      route: of the library, 'bare' without it.
      restored: positions that came from the store.
      computed: positions that were run.
      decoded: tokens of the reply.
      steps: decode steps that it took.
      **more: further fields.
    """
    group = {'phase': phase, 'round': number, 'what': what, 'route': route,
             'split': problem.split}
    hit = (what == 'given' and route in ('exact', 'parameters')
           and answer is not None)
    extra = {'tolerance': problem.tolerance} if problem.tolerance else {}
    score = self.once('score', name, lambda: {
        'group': group, 'rule': problem.rule, 'answer': answer,
        'expected': problem.answer,
        'value': recheck.SCORES[problem.rule](answer, problem.answer, **extra),
        **extra})
    self.once('answer', name, lambda: {
        'group': group, 'problem': problem.id, 'answer': answer,
        'hit': hit, 'wrong_hit': hit and not score['value'],
        'tokens_restored': restored, 'tokens_computed': computed,
        'tokens_decoded': decoded, 'steps': steps, **more})
    return score['value']
