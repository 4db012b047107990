"""Which passage of a corpus serves a question: routers behind one interface.

    address   the question is an id, a path, a heading or a title
    bm25      words in common, rare ones counting most
    model     the model's own score of the first by BM25 (in `corpus`)

How good a choice is shows in its margin: how far the first candidate leads.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import difflib
import re
from typing import Any
from typing import Protocol
import unicodedata

import numpy as np

from kvgraft_jax import corpora
from kvgraft_jax import errors

CLEAR, CLOSE, DOUBTFUL = 'clear', 'close', 'doubtful'
EXACT, ONLY, NONE = 'exact', 'only', 'none'
_WORD = r'(?u)\w+'
_PREFIX = re.compile(r'[0-9a-f]{4,64}')
_PLACE = re.compile(r'(.*)#([0-9]{1,9})')
_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A passage that may serve a question.

  Attributes:
    passage: the passage.
    score: of the router, in its own unit; more is better.
    why: what the score is of.
  """

  passage: corpora.Passage
  score: float
  why: str


class Router(Protocol):
  """Chooses passages of one corpus.

  Attributes:
    name: of the router.
  """

  name: str

  def route(self, question: str, k: int) -> list[Candidate]:
    """Returns the k best candidates or fewer, best first."""

  def judge(self, candidates: Sequence[Candidate]) -> Judgement:
    """Returns how far the first of them leads."""


@dataclasses.dataclass(frozen=True)
class Judgement:
  """How good a choice is.

  Attributes:
    quality: 'exact' (an address), 'clear', 'close' or 'doubtful' by the
      margin; 'only' where there is no second; 'none' where there is no first.
    margin: by how much the first leads, in the router's unit; None without a
      second.
  """

  quality: str
  margin: float | None


def judge(
    candidates: Sequence[Candidate], margin: float, clear: float, close: float
) -> Judgement:
  """Returns a judgement by a margin between the first two.

  Args:
    candidates: best first.
    margin: by how much the first leads, if there are two.
    clear: least margin of 'clear'.
    close: least margin of 'close'.
  """
  if len(candidates) < 2:
    return Judgement(ONLY if candidates else NONE, None)
  return Judgement(
      CLEAR if margin >= clear else CLOSE if margin >= close else DOUBTFUL,
      margin)


def words(question: str) -> int:
  """Returns how many different words a question has."""
  return len(_different(question))


def words_found(question: str, passage: corpora.Passage) -> int:
  """Returns how many of them a passage has."""
  return len(_different(question) & _different(_words(passage)))


def _different(text: str) -> set[str]:
  return set(re.findall(_WORD, _normal(text)))


def _normal(text: str) -> str:
  """Returns a text whose words are equal however they are written."""
  return unicodedata.normalize('NFKC', text.casefold())


def _words(passage: corpora.Passage) -> str:
  """Returns what a passage is found by."""
  return _normal('\n'.join(
      (passage.source, passage.title, passage.heading, passage.text)))


class AddressRouter:
  """Takes the question as an address: one passage, or none.

  In this order: a passage's id or its first digits, 4 or more; PATH#N, the
  N-th passage of a document from 0; PATH alone, of a document with one passage;
  a heading; a title. Headings and titles count after folding case and white
  space.
  """

  name = 'address'

  def __init__(self, corpus: corpora.Corpus):
    """Args: corpus, which may change meanwhile."""
    self._corpus = corpus
    self._version = -1
    self._names: list[dict[str, list[tuple[str, int]]]] = []

  def route(self, question: str, k: int = 1) -> list[Candidate]:
    """Returns the passage at an address.

    Raises:
      NotFoundError: if there is none.
      UsageError: if there are several.
    """
    del k
    address = question.strip()
    if _PREFIX.fullmatch(address.lower()):
      found = self._corpus.by_id(address.lower())
      if found:
        return self._one(
            address, [(p.source, p.ordinal) for p in found], 'id')
    place = _PLACE.fullmatch(address)
    if place:
      with contextlib.suppress(errors.NotFoundError):
        return self._one(address, [(place[1], int(place[2]))], 'place')
    self._read()
    names = self._names
    for places, key, why in (
        (names[0], address, 'path'), (names[1], _folded(address), 'heading'),
        (names[2], _folded(address), 'title')):
      if key in places:
        return self._one(address, places[key], why)
    close = difflib.get_close_matches(
        _folded(address), [*names[1], *names[2], *names[0]], 1)
    raise errors.NotFoundError(
        f'{self._corpus.path}: no passage has the address'
        f' {errors.quoted(address)}'
        + (f'; did you mean {errors.quoted(close[0])}?' if close else
           '; give an id, a path, a heading or a title'))

  def judge(self, candidates: Sequence[Candidate]) -> Judgement:
    """Returns 'exact', without a margin."""
    return Judgement(EXACT if candidates else NONE, None)

  def _one(
      self, address: str, places: Sequence[tuple[str, int]], why: str
  ) -> list[Candidate]:
    if len(places) > 1:
      listed = ', '.join(f'{path}#{n}' for path, n in places[:_LISTED])
      raise errors.UsageError(
          f'{len(places)} passages have the {why} {errors.quoted(address)}:'
          f' {listed}{", ..." if len(places) > _LISTED else ""}; give one of'
          ' these')
    return [Candidate(self._corpus.at(*places[0]), 1.0, why)]

  def _read(self) -> None:
    """Reads all addresses anew where the corpus has changed."""
    version = self._corpus.version
    if version == self._version:
      return
    self._names = [{}, {}, {}]
    for source, ordinal, title, headings in self._corpus.names():
      place = source, ordinal
      for names, keys in zip(self._names, (
          [source], set(map(_folded, headings)), [_folded(title)])):
        for key in keys:
          names.setdefault(key, []).append(place)
    self._version = version


def _folded(text: str) -> str:
  return ' '.join(text.casefold().split())


class Bm25Router:
  """Chooses by BM25, words folded to one case and form.

  The index is kept in memory, and made anew after changes.

  A margin is the part of the first score by which the second is less. Scores
  depend on the corpus and cannot be compared between questions.
  """

  name = 'bm25'

  def __init__(self, corpus: corpora.Corpus):
    """Args: corpus, which may change meanwhile."""
    self._corpus = corpus
    self._version = -1
    self._places: list[tuple[str, int]] = []
    self._index: Any = None

  def route(self, question: str, k: int = 4) -> list[Candidate]:
    """Returns the k best passages that have a word in common.

    Raises:
      MissingDependencyError: if bm25s is missing.
    """
    bm25s = _bm25s()
    self.prepare()
    if self._index is None:
      return []
    words = bm25s.tokenize(
        [_normal(question)], stopwords=[], token_pattern=_WORD,
        show_progress=False, return_ids=False)[0]
    if not words:
      return []
    scores = self._index.get_scores(words)
    best = np.argsort(-scores, kind='stable')[:k]
    return [
        Candidate(self._corpus.at(*self._places[i]), float(scores[i]), 'BM25')
        for i in best if scores[i] > 0]

  def judge(self, candidates: Sequence[Candidate]) -> Judgement:
    """Returns 'clear' from a lead of a quarter on, 'close' from a twentieth."""
    margin = 0.0
    if len(candidates) > 1:
      margin = 1 - candidates[1].score / candidates[0].score
    return judge(candidates, margin, 0.25, 0.05)

  def prepare(self) -> None:
    """Indexes the passages anew where the corpus has changed."""
    version = self._corpus.version
    if version == self._version:
      return
    bm25s = _bm25s()
    self._places, texts = [], []
    for passage in self._corpus.passages():
      self._places.append((passage.source, passage.ordinal))
      texts.append(_words(passage))
    self._index = None
    words = bm25s.tokenize(texts, stopwords=[], token_pattern=_WORD,
                           show_progress=False)
    if any(words.ids):
      self._index = bm25s.BM25()
      self._index.index(words, show_progress=False)
    self._version = version


def _bm25s() -> Any:
  try:
    import bm25s  # An extra.
  except ImportError:
    raise errors.MissingDependencyError(
        'routing by words needs the package bm25s, which is not installed; pip'
        ' install "kvgraft_jax[flywheel]", or give the passage') from None
  return bm25s
