"""A corpus of passages: build it once, then ask it, one passage at a time.

    with kvgraft_jax.Corpus('/tmp/corpus', create=True) as c:
      corpus.build(model, store, c, '/usr/share/common-licenses')
      answer = corpus.ask(model, store, c, 'What does the licence cover?')
      print(answer.text, answer.source, answer.heading, answer.quality)

Each passage is an artifact of its own, from position 0. A question is routed
to one of them, which is grafted, so that an answer costs as much in a large
corpus as in a small one. The model reads nothing else of the corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from kvgraft_jax import corpora
from kvgraft_jax import corpus_building as building
from kvgraft_jax import corpus_routing as routing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming
from kvgraft_jax import verification

ROUTERS = ('address', 'bm25', 'model')
PASSAGE_TOKENS = building.PASSAGE_TOKENS
BuildReport = building.BuildReport
build = building.build
settings = building.settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
  """The passage that was chosen for a question; none if `passage` is None.

  Attributes:
    question: what was asked.
    router: name of the router that chose.
    quality: how good the choice is, in a word (see `corpus_routing.Judgement`).
    margin: by how much it leads, in the router's unit; None without a second.
    words: different words of the question.
    words_found: those of them that the passage has.
    candidates: the best ones, first the chosen one, each with score and why.
    passage: its id.
    title: of its document.
    heading: of the passage.
    source: path of its document.
    ordinal: place in the document, from 0.
    start: its first character in the document.
    stop: one past its last one.
    artifact: id of its artifact.
    why: what is missing where there is no passage.
    exact: whether what follows is promised to equal a fresh computation.
    tokens_restored: positions that came from the store.
    tokens_computed: positions that were run, those of the answer included.
    route_s: seconds for choosing.
    graft_s: seconds for the graft.
    answer_s: seconds for what was computed behind it.
    kv: memory and store that graft and answer took, a `streaming.Usage`; None
      without a passage.
    route_kv: likewise for choosing, of all candidates; None for a router that
      runs no model.
  """

  question: str
  router: str
  quality: str
  margin: float | None
  words: int
  words_found: int
  candidates: list[dict[str, Any]]
  passage: str | None = None
  title: str | None = None
  heading: str | None = None
  source: str | None = None
  ordinal: int | None = None
  start: int | None = None
  stop: int | None = None
  artifact: str | None = None
  why: str | None = None
  exact: bool | None = None
  tokens_restored: int = 0
  tokens_computed: int = 0
  route_s: float = 0.0
  graft_s: float = 0.0
  answer_s: float = 0.0
  kv: dict[str, Any] | None = None
  route_kv: dict[str, Any] | None = None

  def to_json(self) -> dict[str, Any]:
    """Returns all fields."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Selection):
  """An answer behind one passage.

  Attributes:
    text: the first line that the model wrote; None without a passage.
    tokens_decoded: tokens that it wrote.
  """

  text: str | None = None
  tokens_decoded: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Selection):
  """One of several options, by their likelihoods behind one passage.

  Attributes:
    option: the likeliest; None without a passage.
    logprobs: of each option, in nats, in the order they were given.
    tokens: of each option.
  """

  option: str | None = None
  logprobs: list[float] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)


def _graft(
    model: engine.Model, store: store_lib.Store, passage: corpora.Passage,
    on_mismatch: str = 'fail',
) -> engine.Context:
  try:
    context = grafting.graft(
        model, store, building.manifest_of(store, passage),
        on_mismatch=on_mismatch, record=False)
  except errors.DamageError as e:
    raise errors.DamageError(
        f'passage {passage.place}: {e} (`kvgraft corpus build` deposits what is'
        ' missing)') from None
  jax.block_until_ready(context.cache)  # For the timings.
  return context


class ModelRouter:
  """Lets the model choose among the first of another router.

  The score is the log-likelihood of the question behind each passage, in nats,
  which is also the unit of a margin.

  Attributes:
    usage: what the last call of `route` took, of all candidates.
  """

  name = 'model'

  def __init__(
      self, model: engine.Model, store: store_lib.Store, base: routing.Router,
      top: int = 4, on_mismatch: str = 'fail',
  ):
    """Args: model, store; base, whose `top` first are scored."""
    self._model, self._store, self._base = model, store, base
    self._top, self._on_mismatch = top, on_mismatch
    self.usage: streaming.Usage | None = None

  def route(self, question: str, k: int = 4) -> list[routing.Candidate]:
    """Returns the k best of the base's first ones."""
    ids = building.tokenizer_of(self._model).encode(
        f'\n\nQuestion: {question}', add_bos=False)
    found = []
    self.usage = None
    for one in self._base.route(question, max(k, self._top)):
      context = _graft(
          self._model, self._store, one.passage, self._on_mismatch)
      found.append(routing.Candidate(
          one.passage, context.score(ids).logprob,
          'log-likelihood of the question'))
      usage = context.usage()
      self.usage = self.usage.then(usage) if self.usage else usage
    return sorted(found, key=lambda one: -one.score)[:k]

  def judge(
      self, candidates: Sequence[routing.Candidate]
  ) -> routing.Judgement:
    """Returns 'clear' from 3 nats on (odds of 20 to 1), 'close' from 1 on."""
    margin = 0.0
    if len(candidates) > 1:
      margin = candidates[0].score - candidates[1].score
    return routing.judge(candidates, margin, 3.0, 1.0)


def bm25(corpus: corpora.Corpus) -> routing.Bm25Router:
  """Returns the BM25 router of an open corpus, always the same one."""
  if corpus.index is None:
    corpus.index = routing.Bm25Router(corpus)
  return corpus.index


def _router(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus,
    router: str | routing.Router, passage: str | None, on_mismatch: str,
) -> routing.Router:
  if passage is not None:
    return routing.AddressRouter(corpus)
  if router == 'bm25':
    return bm25(corpus)
  if router == 'model':
    return ModelRouter(model, store, bm25(corpus), on_mismatch=on_mismatch)
  if router == 'address':
    raise errors.UsageError(
        'router: address needs the passage to be given; give its id, path or'
        ' heading, or another router')
  if isinstance(router, str):
    raise errors.UsageError(
        f'router: expected one of {", ".join(ROUTERS)}, found {router!r:.80}')
  if not all(callable(getattr(router, what, None))
             for what in ('route', 'judge')):
    raise errors.UsageError(
        'router: expected an object with name, route and judge (see'
        f' corpus_routing.Router), found {router!r:.80}')
  return router


def _select(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus,
    question: str, passage: str | None, router: str | routing.Router, k: int,
    on_mismatch: str,
) -> tuple[dict[str, Any], corpora.Passage | None]:
  """Returns the fields of a Selection, and the chosen passage."""
  building.tokenizer_of(model)
  if not isinstance(question, str) or not question.strip():
    raise errors.UsageError(
        f'question: expected a text, found {question or "none"!r:.80}')
  if k < 1:
    raise errors.UsageError(f'k: expected at least 1, found {k}')
  chosen = _router(model, store, corpus, router, passage, on_mismatch)
  began = time.perf_counter()
  # A margin needs the second one.
  found = chosen.route(question if passage is None else passage, max(k, 2))
  seconds = time.perf_counter() - began
  judgement = chosen.judge(found)
  usage = getattr(chosen, 'usage', None)
  fields: dict[str, Any] = {
      'question': question, 'router': chosen.name,
      'quality': judgement.quality, 'margin': judgement.margin,
      'words': routing.words(question), 'words_found': 0,
      'route_s': round(seconds, 6),
      'route_kv': usage and dataclasses.asdict(usage),
      'candidates': [
          one.passage.about() | {'score': one.score, 'why': one.why}
          for one in found[:k]]}
  if not found:
    return fields | {
        'why': 'no passage has a word of the question' if corpus.places() else
               'the corpus is empty'}, None
  best = found[0].passage
  about = best.about()
  del about['tokens']
  return fields | about | {
      'words_found': routing.words_found(question, best)}, best


def prompt(question: str, lead: str = '') -> str:
  """Returns what stands behind a passage: a question, and the answer begun."""
  return f'\n\nQuestion: {question}\nAnswer:{lead}'


def first_line(text: str) -> tuple[str, bool]:
  """Returns the first line with something in it, and whether it has ended."""
  line, end, _ = text.lstrip().partition('\n')
  return line.rstrip(), bool(end)


def warm_up(
    model: engine.Model, corpus: corpora.Corpus, question: str, lead: str = ''
) -> None:
  """Compiles what asking runs, so that an answer's time is its own.

  The first question makes the index of words beside it (`bm25(corpus).prepare`
  does so earlier).

  Args:
    model: that built the corpus.
    corpus: to ask.
    question: one as long as those to come.
    lead: as in `ask`.
  """
  ids = building.tokenizer_of(model).encode(
      prompt(question, lead), add_bos=False)
  longest = corpus.stats()['longest']
  model.warm_up(min(longest + len(ids), model.capacity), len(ids))


def _asked(
    model: engine.Model, store: store_lib.Store, passage: corpora.Passage,
    question: str, lead: str, on_mismatch: str,
) -> tuple[engine.Context, float]:
  """Returns a passage with a question behind it, and seconds of the graft."""
  began = time.perf_counter()
  context = _graft(model, store, passage, on_mismatch)
  seconds = time.perf_counter() - began
  context.extend(
      model.tokenizer.encode(prompt(question, lead), add_bos=False))
  return context, seconds


def ask(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus,
    question: str, *, passage: str | None = None,
    router: str | routing.Router = 'bm25', k: int = 4,
    max_new_tokens: int = 32, lead: str = '', on_mismatch: str = 'fail',
) -> Answer:
  """Answers a question behind one passage.

  Args:
    model: that built the corpus.
    store: of the corpus.
    corpus: to ask.
    question: one.
    passage: address of the passage to take (see `AddressRouter`); no other
      router is used then.
    router: 'bm25', 'model', or a router of the corpus.
    k: candidates to report.
    max_new_tokens: most tokens of the answer, which ends with its line.
    lead: how the answer begins, behind 'Answer:'.
    on_mismatch: as in `grafting.graft`.

  Raises:
    KvgraftError: as `grafting.graft` does; if the passage is not there.
  """
  fields, chosen = _select(
      model, store, corpus, question, passage, router, k, on_mismatch)
  if chosen is None:
    return Answer(**fields)
  began = time.perf_counter()
  context, graft_s = _asked(
      model, store, chosen, question, lead, on_mismatch)
  decode = model.tokenizer.decode
  made = context.generate(
      max_new_tokens, stop_when=lambda ids: first_line(decode(ids))[1])[0]
  return Answer(
      **fields, text=first_line(made.text)[0],
      tokens_decoded=len(made.token_ids), exact=context.exact,
      tokens_restored=context.tokens_restored,
      tokens_computed=context.tokens_computed, graft_s=round(graft_s, 6),
      answer_s=round(time.perf_counter() - began - graft_s, 6),
      kv=dataclasses.asdict(context.usage()))


def choose(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus,
    question: str, options: Sequence[str], *, passage: str | None = None,
    router: str | routing.Router = 'bm25', k: int = 4, lead: str = '',
    on_mismatch: str = 'fail',
) -> Choice:
  """Chooses the likeliest of several answers behind one passage.

  Args:
    model: that built the corpus.
    store: of the corpus.
    corpus: to ask.
    question: one.
    options: the answers, each scored as it is behind 'Answer:' and a blank.
    passage: as in `ask`.
    router: as in `ask`.
    k: as in `ask`.
    lead: as in `ask`.
    on_mismatch: as in `grafting.graft`.

  Raises:
    KvgraftError: as `ask` does; if there is no option.
  """
  if isinstance(options, str) or not options or not all(
      isinstance(one, str) and one for one in options):
    raise errors.UsageError(
        f'options: expected texts, found {options!r:.80}')
  fields, chosen = _select(
      model, store, corpus, question, passage, router, k, on_mismatch)
  if chosen is None:
    return Choice(**fields)
  began = time.perf_counter()
  context, graft_s = _asked(
      model, store, chosen, question, lead, on_mismatch)
  ids = [model.tokenizer.encode(f' {option}', add_bos=False)
         for option in options]
  scores = [context.score(one).logprob for one in ids]
  usage = context.usage()
  return Choice(
      **fields, option=options[int(np.argmax(scores))], logprobs=scores,
      tokens=[len(one) for one in ids], exact=context.exact,
      tokens_restored=usage.tokens_restored,
      tokens_computed=usage.tokens_computed, graft_s=round(graft_s, 6),
      answer_s=round(time.perf_counter() - began - graft_s, 6),
      kv=dataclasses.asdict(usage))


@dataclasses.dataclass(frozen=True)
class CorpusReport:
  """What `verify` found.

  Attributes:
    passages: how many were verified.
    equal: those of which everything agreed.
    continuations: compared, over all of them.
    sha256_equal: those whose last logits have the same SHA-256.
    max_kl: largest KL(fresh || grafted), in nats.
    details: of each passage, with its `VerifyReport`.
  """

  passages: int
  equal: int
  continuations: int
  sha256_equal: int
  max_kl: float
  details: list[dict[str, Any]]

  @property
  def ok(self) -> bool:
    """Whether everything agreed."""
    return self.equal == self.passages


def verify(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus, *,
    passages: int = 5, n_continuations: int = 10,
    progress: building.Progress | None = None,
) -> CorpusReport:
  """Compares grafts of passages with fresh computations of their texts.

  Args:
    model: that built the corpus.
    store: of the corpus.
    corpus: to verify.
    passages: how many, spread over the corpus.
    n_continuations: of each passage.
    progress: called with (passages done, in all).

  Raises:
    UsageError: if the corpus is empty or a number is not accepted.
    DamageError: if an artifact is lost, or is not of the passage's text.
  """
  places = corpus.places()
  if passages < 1 or not places:
    raise errors.UsageError(
        f'passages: expected at least 1 to verify, found {passages} of'
        f' {len(places)}')
  picks = np.linspace(0, len(places) - 1, min(passages, len(places)))
  details = []
  for done, pick in enumerate(picks, 1):
    passage = corpus.at(*places[round(float(pick))])
    manifest = building.manifest_of(store, passage)
    text = building.tokenizer_of(model).encode(passage.text, add_bos=True)
    if store.tokens(manifest).tolist() != text:
      raise errors.DamageError(
          f'passage {passage.place}: artifact {manifest.id[:12]} holds other'
          ' tokens than its text has; build the corpus anew in another'
          ' directory')
    report = verification.verify(
        model, store, manifest, n_continuations=n_continuations)
    details.append(
        passage.about() | dataclasses.asdict(report) | {'ok': report.ok})
    if progress:
      progress(done, len(picks))
  return CorpusReport(
      passages=len(details), equal=sum(d['ok'] for d in details),
      continuations=sum(d['continuations'] for d in details),
      sha256_equal=sum(d['sha256_equal'] for d in details),
      max_kl=max(d['max_kl'] for d in details), details=details)
