"""Builds a corpus: splits, deposits, and keeps up with a directory."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import time
from typing import Any

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import corpora
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import numerics
from kvgraft_jax import passages as passages_lib
from kvgraft_jax import store as store_lib

PASSAGE_TOKENS = 2048
ROOM = 128  # Positions kept free behind a passage, at least.
_LEAST_TOKENS = 16
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class BuildReport:
  """What a build did, and what there is now.

  Attributes:
    documents: in the corpus now.
    added: of them, those that are new.
    changed: of them, those whose text is another.
    unchanged: of them, those that were there.
    removed: documents that are gone.
    skipped: reason -> paths of the files that are no documents.
    passages: in the corpus now.
    tokens: of them, each with its bos.
    bytes: of their artifacts' data files.
    deposited: passages that this build computed and stored.
    repaired: passages whose artifact was lost, deposited again.
    tokens_computed: positions that this build ran.
    seconds: that it took.
  """

  documents: int
  added: int
  changed: int
  unchanged: int
  removed: int
  skipped: dict[str, list[str]]
  passages: int
  tokens: int
  bytes: int
  deposited: int
  repaired: int
  tokens_computed: int
  seconds: float


def build(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus,
    text_dir: corpora.Path, *, passage_tokens: int = PASSAGE_TOKENS,
    sliding: str = artifact_lib.WINDOW, block: int | None = None,
    limit_documents: int | None = None, progress: Progress | None = None,
) -> BuildReport:
  """Makes a corpus hold what a directory holds now.

  A document whose text is in the corpus already is not computed again, nor is
  a passage that an interrupted build deposited. A changed document replaces
  the old one when all of its passages are deposited; one that is gone is
  removed. Artifacts that no passage needs any more stay in the store.

  Args:
    model: computes the passages.
    store: where their artifacts are.
    corpus: to build, or to bring up to date with the same settings.
    text_dir: the directory (see `passages.documents`).
    passage_tokens: most tokens of a passage, its bos included.
    sliding: 'window' or 'full', as in `depositing.deposit`.
    block: positions of a stored block; None for the default.
    limit_documents: most documents, the first by path; nothing is removed
      where it leaves out some.
    progress: called with (bytes of text done, in all) behind each passage.

  Raises:
    UsageError: if a value is not accepted, a setting is not the corpus's, or
      there is no document.
    StorageError: if store or corpus cannot be written; what is deposited is
      kept, and another build goes on from there.
  """
  began = time.perf_counter()
  common = settings(
      model, passage_tokens=passage_tokens, sliding=sliding, block=block)
  if limit_documents is not None and limit_documents < 1:
    raise errors.UsageError(
        f'limit_documents: expected at least 1, found {limit_documents}')
  there: dict[str, tuple[str, int]] = {}
  skipped: dict[str, list[str]] = {}
  cut = False
  for document in passages_lib.documents(text_dir, skipped):
    cut = len(there) == limit_documents
    if cut:
      break
    there[document.path] = document.sha256, len(document.text.encode())
  if not there:
    found = ', '.join(
        f'{len(paths)} {why}' for why, paths in skipped.items()) or 'no file'
    raise errors.UsageError(
        f'{text_dir}: there is no document, found {found}; give a directory'
        f' with UTF-8 text in files {", ".join(passages_lib.SUFFIXES[1:])} or'
        ' without an ending')
  corpus.settle(common)
  before, drafts = corpus.documents(), {*corpus.drafts()}
  gone = set() if cut else (before.keys() | drafts) - there.keys()
  if gone:
    corpus.remove(gone)
  todo = [path for path, (sha256, _) in there.items()
          if before.get(path) != sha256]
  # A text that was changed and is as before again.
  corpus.drop_drafts(drafts & there.keys() - {*todo})
  work = _Building(model, store, corpus, passage_tokens, sliding, block)
  built: set[str] = set()
  done, total = 0, sum(there[path][1] for path in todo)
  for path in todo:
    # Not kept from the first look: all texts together may be large.
    current = passages_lib.read(text_dir, path)
    if current is not None:
      work.document(
          current, progress and (lambda n, at=done: progress(at + n, total)))
      built.add(path)
    done += there[path][1]
  # Last: a damaged one ends the build.
  work.repair(there.keys() & before.keys() - {*todo})
  stats = corpus.stats()
  return BuildReport(
      documents=stats['documents'], added=len(built - {*before}),
      changed=len(built & {*before}), unchanged=len(there) - len(todo),
      removed=len(gone & before.keys()), skipped=skipped,
      passages=stats['passages'], tokens=stats['tokens'],
      bytes=stats['artifact_bytes'], deposited=work.deposited,
      repaired=work.repaired, tokens_computed=work.tokens_computed,
      seconds=round(time.perf_counter() - began, 3))


def settings(
    model: engine.Model, *, passage_tokens: int = PASSAGE_TOKENS,
    sliding: str = artifact_lib.WINDOW, block: int | None = None,
) -> dict[str, str]:
  """Returns what all passages of a corpus have in common.

  Args:
    model: as in `build`.
    passage_tokens: as in `build`.
    sliding: as in `build`.
    block: as in `build`.

  Raises:
    UsageError: if a value is not accepted.
  """
  tokenizer_of(model)
  most = model.capacity - ROOM
  if type(passage_tokens) is not int or not (
      _LEAST_TOKENS <= passage_tokens <= most):
    raise errors.UsageError(
        f'passage_tokens: expected {_LEAST_TOKENS} to {most}, the capacity less'
        f' {ROOM} for question and answer, found {passage_tokens!r}')
  if sliding not in (artifact_lib.FULL, artifact_lib.WINDOW):
    raise errors.UsageError(
        f"sliding: expected 'full' or 'window', found {sliding!r}")
  return {
      'model': model.fingerprint, 'tokenizer': model.tokenizer_fingerprint,
      'template': model.template_fingerprint, 'dtype': model.profile.dtype,
      'numerics class': numerics.class_fingerprint(model.numerics_class),
      'passage_tokens': str(passage_tokens), 'sliding': sliding,
      'block': str(grafting.check_block(model, block)),
      'splitting': str(passages_lib.RULES)}


def tokenizer_of(model: engine.Model) -> Any:
  """Returns the tokenizer of a model.

  Raises:
    UsageError: if it has none.
  """
  if model.tokenizer is None:
    raise errors.UsageError(
        f'model {model.source!r} has no tokenizer, which passages need; choose'
        ' another')
  return model.tokenizer


class _Building:
  """Deposits passages and counts."""

  def __init__(
      self, model: engine.Model, store: store_lib.Store,
      corpus: corpora.Corpus, passage_tokens: int, sliding: str,
      block: int | None,
  ):
    self._model, self._store, self._corpus = model, store, corpus
    self._limit, self._sliding, self._block = passage_tokens, sliding, block
    self.deposited = self.repaired = self.tokens_computed = 0

  def document(
      self, document: passages_lib.Document,
      progress: Callable[[int], None] | None,
  ) -> None:
    """Deposits the passages of a new or changed document, then shows it."""
    encode = self._model.tokenizer.encode
    number = self._corpus.begin(document)
    there = self._corpus.deposited(number)
    done = 0
    for ordinal, piece in enumerate(passages_lib.split(
        document.text, limit=self._limit - 1,
        tokens=lambda text: len(encode(text, add_bos=False)))):
      if ordinal not in there:
        made = self._deposit(piece.text, {
            'source': document.path, 'passage': ordinal,
            'title': document.title})
        self.deposited += not made.existed
        self._corpus.add(
            number, ordinal, piece, tokens=made.length, key=made.key,
            artifact=made.id, nbytes=made.manifest.nbytes)
      done += len(piece.text.encode())
      if progress:
        progress(done)
    self._corpus.publish(number)

  def repair(self, paths: set[str]) -> None:
    """Deposits again what the store has lost of unchanged documents."""
    for passage in self._corpus.passages():
      if passage.source in paths and self._store.get(passage.key) is None:
        made = self._deposit(passage.text, {
            'source': passage.source, 'passage': passage.ordinal,
            'title': passage.title})
        _same(passage, made.manifest)
        self.repaired += 1

  def _deposit(
      self, text: str, provenance: dict[str, Any]
  ) -> grafting.Artifact:
    made = depositing.deposit(
        self._model, self._store,
        self._model.tokenizer.encode(text, add_bos=True),
        sliding=self._sliding, block=self._block, provenance=provenance)
    self.tokens_computed += made.tokens_computed
    return made


def _same(
    passage: corpora.Passage, manifest: artifact_lib.Manifest
) -> artifact_lib.Manifest:
  """Returns the manifest, or raises if it is not the passage's."""
  if manifest.id != passage.artifact:
    raise errors.ConflictError(
        f'passage {passage.place}: its key holds artifact {manifest.id[:12]},'
        f' expected {passage.artifact[:12]}; run `kvgraft audit` on both, then'
        ' build the corpus anew in another directory')
  return manifest


def manifest_of(
    store: store_lib.Store, passage: corpora.Passage
) -> artifact_lib.Manifest:
  """Returns the manifest of a passage; by its key, so nothing is searched.

  Raises:
    DamageError: if the store has none.
    ConflictError: if it is another artifact's than the corpus names.
  """
  manifest = store.get(passage.key)
  if manifest is None:
    raise errors.DamageError(
        f'passage {passage.place}: artifact {passage.artifact[:12]} is not in'
        f' {store.url}; give the store of this corpus, or build it again')
  return _same(passage, manifest)
