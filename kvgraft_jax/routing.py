"""Which entry of a library serves a statement, and how.

In this order: the very statement was answered before; a verified program
answers its template for other numbers; the nearest method is shown as an
example; nothing. The first two give an answer without a token, so they only
take what is certain: a doubt is a miss.

    with kvgraft_jax.Library('/tmp/library') as library:
      router = kvgraft_jax.Router(library)
      route = router.route('What is 3 + 4?')
      if route.kind == 'exact':
        print(route.entry.answer)
      elif route.kind == 'parameters':
        print(router.answer(route))  # Runs the entry's programs.
      elif route.kind == 'similar':
        print(route.entry.problem, route.score)  # An example, no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import logging
import time
from typing import Any

from kvgraft_jax import checkers
from kvgraft_jax import entry_checks
from kvgraft_jax import errors
from kvgraft_jax import library as library_lib
from kvgraft_jax import parameters as parameters_lib
from kvgraft_jax import sandbox
from kvgraft_jax import statements

KINDS = ('exact', 'parameters', 'similar', 'bare')

_LOG = logging.getLogger(__name__)


Others = tuple[tuple[library_lib.Entry, parameters_lib.Values], ...]


@dataclasses.dataclass(frozen=True)
class Match:
  """An entry whose program answers a statement.

  Attributes:
    entry: has the statement's template, and a program.
    parameters: what the program reads.
    others: older entries with other programs that fit as well, each with what
      they read: all must give the same answer.
  """

  entry: library_lib.Entry
  parameters: parameters_lib.Values
  others: Others = ()


@dataclasses.dataclass(frozen=True)
class Route:
  """How a statement is served.

  Attributes:
    kind: one of KINDS.
    entry: what serves it; None for 'bare'.
    parameters: for 'parameters', what the program reads.
    score: for 'similar', of BM25; 0 otherwise.
    seconds: that the decision took.
    others: of `Match`.
  """

  kind: str
  entry: library_lib.Entry | None
  parameters: parameters_lib.Values | None
  score: float
  seconds: float
  others: Others = ()


class Router:
  """Routes statements to the entries of a library."""

  def __init__(self, library: library_lib.Library):
    """Args: library, which may grow meanwhile."""
    self._library = library
    self._indexed = ''  # Head of the library that the index is of.
    self._ids: list[str] = []
    self._index: Any = None

  def exact(self, statement: str) -> library_lib.Entry | None:
    """Returns the newest entry of this very statement.

    None if there is none, or if entries of it have different answers.
    """
    found = self._exact(statement)
    return found[0] if found and not _ambiguous(found) else None

  def _exact(self, statement: str) -> list[library_lib.Entry]:
    text = statements.canonical(statement)
    return [entry for entry in self._library.by_address(
        statements.address(statement)) if entry.canonical == text]

  def parameters(self, statement: str) -> Match | None:
    """Returns the newest entry whose schema all numbers of a statement fit."""
    template = statements.template(statement)
    if not template.numbers:
      return None
    found = []
    for entry in self._library.methods(template.skeleton):
      values = entry.parameters and parameters_lib.read(
          template, entry.parameters)
      if values:
        found.append((entry, values))
    return Match(*found[0], tuple(found[1:])) if found else None

  def answer(
      self, match: Match | Route, *, limits: sandbox.Limits | None = None,
      unsafe: bool = False,
  ) -> str:
    """Returns what the programs of an entry say for other numbers.

    Args:
      match: of `parameters`, or a route of that kind.
      limits: of a run; None for those of the entry.
      unsafe: run programs although they cannot be kept apart here.

    Raises:
      NotVerifiedError: if they give no answer, or not one.
      SandboxError: if they cannot be kept apart here, and not `unsafe`.
    """
    entry = match.entry
    if entry is None or match.parameters is None:
      raise errors.UsageError(
          'the route has no parameters; give one of kind "parameters"')
    answer = self._run(entry, match.parameters, limits, unsafe)
    for other, values in match.others:
      second = self._run(other, values, limits, unsafe)
      if other.rule != entry.rule or not checkers.same(
          entry.rule, second, answer, tolerance=entry.tolerance,
          unsafe=unsafe):
        raise errors.NotVerifiedError(
            f'entries {entry.id} and {other.id} answer this statement with'
            f' {errors.quoted(answer, 80)} and {errors.quoted(second, 80)};'
            ' retract the wrong one')
    return answer

  def _run(
      self, entry: library_lib.Entry, values: parameters_lib.Values,
      limits: sandbox.Limits | None, unsafe: bool,
  ) -> str:
    """Returns what the programs of one entry say, all of them."""
    check = checkers.programs_agree(
        list(entry.programs), [values], entry.rule,
        tolerance=entry.tolerance, limits=limits or entry.candidate.limits,
        unsafe=unsafe)
    if not check.passed or check.answer is None:
      raise errors.NotVerifiedError(
          f'entry {entry.id} gives no answer for'
          f' {errors.quoted(values, 120)}:'
          f' {check.evidence["reason"]}; solve the problem without it')
    return check.answer

  def answers(
      self, matches: Sequence[Match], *, unsafe: bool = False
  ) -> list[str | None]:
    """Returns `answer` of many matches, programs run together.

    Args:
      matches: of `parameters`.
      unsafe: as in `answer`.

    Returns:
      The answers; None where `answer` raises NotVerifiedError.
    """
    groups: dict[Any, list[int]] = {}
    for n, match in enumerate(matches):
      groups.setdefault(match.entry.programs, []).append(n)
    found: list[str | None] = [None] * len(matches)
    for programs, members in groups.items():
      first = matches[members[0]].entry
      columns = [entry_checks.run_many(
          source, [matches[n].parameters for n in members],
          limits=first.candidate.limits, unsafe=unsafe) for source in programs]
      for n, answers in zip(members, zip(*columns)):
        if not matches[n].others and entry_checks.agree(
            matches[n].entry.candidate, answers, unsafe=unsafe):
          found[n] = answers[0]
          continue
        try:
          found[n] = self.answer(matches[n], unsafe=unsafe)
        except errors.NotVerifiedError:
          pass
    return found

  def similar(
      self, statement: str, k: int = 1
  ) -> list[tuple[library_lib.Entry, float]]:
    """Returns the k nearest entries by BM25, best first, with their scores.

    An entry without a word in common is not near.

    Raises:
      MissingDependencyError: if bm25s is missing.
    """
    bm25s = _bm25s()
    self._build(bm25s)
    if self._index is None:
      return []
    tokens = bm25s.tokenize(
        [statement], stopwords=[], token_pattern=_TOKEN, show_progress=False,
        return_ids=False)
    if not tokens[0]:
      return []
    places, scores = self._index.retrieve(
        tokens, k=min(k, len(self._ids)), show_progress=False)
    return [(self._library.get(self._ids[place]), float(score))
            for place, score in zip(places[0], scores[0]) if score > 0]

  def _build(self, bm25s: Any) -> None:
    """Indexes the statements anew where the library has grown."""
    head = self._library.head
    if head == self._indexed:
      return
    self._ids, texts = [], []
    for name, text in self._library.canonicals():
      self._ids.append(name)
      texts.append(text)
    self._index = None
    if texts:
      self._index = bm25s.BM25()
      self._index.index(
          bm25s.tokenize(texts, stopwords=[], token_pattern=_TOKEN,
                         show_progress=False), show_progress=False)
    self._indexed = head

  def route(self, statement: str) -> Route:
    """Returns how a statement is served.

    Raises:
      MissingDependencyError: if it takes similarity, and bm25s is missing.
    """
    began = time.perf_counter()

    def made(kind: str, entry: library_lib.Entry | None = None,
             parameters: parameters_lib.Values | None = None,
             score: float = 0.0, others: Others = ()) -> Route:
      return Route(kind, entry, parameters, score,
                   time.perf_counter() - began, others)

    found = self._exact(statement)
    if found and not _ambiguous(found):
      return made('exact', found[0])
    match = None if found else self.parameters(statement)
    if match:
      return made('parameters', match.entry, match.parameters,
                  others=match.others)
    for entry, score in self.similar(statement):
      return made('similar', entry, score=score)
    return made('bare')


# Single digits and units count, which the package's own pattern drops.
_TOKEN = r'(?u)-?\w+(?:[.]\w+)*[%°]?'


def _ambiguous(entries: Sequence[library_lib.Entry]) -> bool:
  """Tells whether entries of one statement have different answers; logs it."""
  first, *others = entries
  for other in others:
    if not library_lib.same_answer(first, other):
      _LOG.warning(
          'entries %s and %s answer one statement with %.80r and %.80r; none'
          ' is used, retract the wrong one', first.id, other.id, first.answer,
          other.answer)
      return True
  return False


def _bm25s() -> Any:
  try:
    import bm25s  # An extra.
  except ImportError:
    raise errors.MissingDependencyError(
        'similarity needs the package bm25s, which is not installed; pip'
        ' install "kvgraft_jax[flywheel]"') from None
  return bm25s
