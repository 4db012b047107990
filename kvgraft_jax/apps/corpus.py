"""A corpus of passages that is built once and asked one passage at a time.

build CORPUS --text_dir=DIR: makes the corpus hold what a directory holds now.
ask CORPUS --question=...: routes a question to a passage, and answers.
verify CORPUS: compares grafts of passages with fresh computations.
stats CORPUS: counts; checks every passage's text.

Artifacts are in --store, which is the directory `store` in the corpus unless
given. `kvgraft corpus ACTION --help` tells more of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax import corpora
from kvgraft_jax import corpus_routing
from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = 'ask /tmp/corpus --question="What does the licence cover?"'
POSITIONAL = ('action', 'corpus')

_MODEL = ('store', 'model', 'dtype', 'capacity', 'allow_beyond_trained',
          'chunk', 'tile', 'page', 'threads')
_DEFAULTS = {'on_mismatch': 'fail'}  # Of the flags of some actions, else None.
_NAMED = 3  # Of the files that are skipped.


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  def text(name: str, what: str) -> None:
    absl_flags.DEFINE_string(name, None, what, flag_values=fv)

  def number(name: str, what: str, least: int = 1) -> None:
    absl_flags.DEFINE_integer(
        name, None, what, lower_bound=least, flag_values=fv)

  absl_flags.DEFINE_enum(
      'action', None, list(ACTIONS), 'What to do.', flag_values=fv)
  text('corpus', 'Directory of the corpus.')
  flags.store(fv)
  text('text_dir', 'build: directory with UTF-8 texts (.txt, .text, .md, .rst,'
       ' no ending, or those and .gz), taken with all directories below it.')
  number('passage_tokens', 'build: most tokens of a passage; 2048 by default.')
  absl_flags.DEFINE_enum(
      'sliding', None, ['window', 'full'], 'build: keep of sliding layers what'
      ' a continuation at the end can see (the default), or every block.',
      flag_values=fv)
  flags.block(fv)
  number('limit_documents', 'build: most documents, the first by path.')
  text('question', 'ask: the question.')
  text('passage', 'ask: take this one: its id or the first digits, PATH#N (the'
       ' N-th passage of a document, from 0), PATH, a heading or a title.')
  absl_flags.DEFINE_enum(
      'router', None, ['address', 'bm25', 'model'], 'What chooses the'
      " passage: --passage, words in common (the default), or the model's score"
      ' of the first by words.', flag_values=fv)
  number('k', 'ask: candidates to report; 4 by default.')
  number('max_new_tokens', 'ask: most tokens of the answer; 32 by default.')
  text('lead', "ask: how the answer begins, behind 'Answer:'.")
  number('passages', 'verify: how many, spread over the corpus; 5 by default.')
  number('continuations',
         'verify: tails to compare behind each; 10 by default.')
  flags.on_mismatch(fv, ('fail', 'recompute', 'inexact'))
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs an action; returns exit code and JSON."""
  flags.require(args, 'action')
  action = ACTIONS[args.action]
  own = (*action.arguments, *action.flags, *_MODEL)
  for other in ACTIONS.values():
    for name in other.flags:
      if name not in own and getattr(args, name) != _DEFAULTS.get(name):
        raise errors.UsageError(
            f'{args.action} takes no --{name}, found'
            f' {getattr(args, name)!r:.80}; remove it')
  flags.require(args, *action.arguments)
  return action.run(args)


def _store(args: Any, create: bool = False) -> kvgraft_jax.Store:
  return kvgraft_jax.Store(
      args.store or os.path.join(args.corpus, 'store'), create=create)


def _given(args: Any, *names: str) -> dict[str, Any]:
  """Returns the flags that were given, by name."""
  return {name: getattr(args, name) for name in names
          if getattr(args, name) is not None}


def _load(
    args: Any, store: kvgraft_jax.Store, corpus: corpora.Corpus
) -> kvgraft_jax.Model:
  """Returns the model; another one than the corpus's is refused early."""
  first = next(corpus.passages(), None)
  manifest = None
  if first is not None and args.on_mismatch == 'fail':
    with contextlib.suppress(errors.DamageError):  # Another one may be whole.
      manifest = store.get(first.key)
  return common.load_model(args, manifest)


def _build(args: Any) -> tuple[int, dict[str, Any]]:
  """Splits the texts of a directory into passages and deposits them.

  Documents are split at paragraphs, and at headings where that fits. A
  document whose text is in the corpus already is not computed again; a changed
  one replaces the old one when it is whole; one that is gone is removed. A
  build that was interrupted goes on where it was.
  """
  flags.require(args, 'text_dir')
  if not os.path.isdir(args.text_dir):
    raise errors.NotFoundError(
        f'--text_dir={args.text_dir}: there is no such directory')
  model = common.load_model(args)
  from kvgraft_jax import corpus as corpus_lib  # Imports jax; --help does not.
  given = _given(args, 'passage_tokens', 'sliding', 'block')
  corpus_lib.settings(model, **given)  # Before a directory is made for it.
  store = _store(args, create=True)
  with corpora.Corpus(args.corpus, create=True) as corpus:
    with common.Progress('build') as bar:
      report = corpus_lib.build(
          model, store, corpus, args.text_dir, progress=bar.callback,
          limit_documents=args.limit_documents, **given)
  common.note(
      f'{report.documents:,} documents in {report.passages:,} passages,'
      f' {report.tokens:,} tokens in all: {report.added:,} added,'
      f' {report.changed:,} changed, {report.removed:,} removed,'
      f' {report.unchanged:,} unchanged; {report.tokens_computed:,} tokens'
      f' computed in {report.seconds:.1f} s')
  for why, paths in report.skipped.items():
    named = ', '.join(map(repr, paths[:_NAMED]))
    common.note(
        f'skipped {len(paths):,}, {why}: {named}'
        + (', ...' if len(paths) > _NAMED else ''))
  return 0, dataclasses.asdict(report)


def _ask(args: Any) -> tuple[int, dict[str, Any]]:
  """Routes a question to one passage, grafts it and answers behind it.

  The model reads that passage and nothing else. Beside the answer stand its
  source and how clear the choice was: exact (an address), clear, close or
  doubtful, by how far the passage leads; only, without a second. Exits 1 if
  there is no passage.
  """
  flags.require(args, 'question')
  if args.router == 'address':
    flags.require(args, 'passage')
  elif args.router and args.passage:
    raise errors.UsageError(
        f'--passage names the passage, which --router={args.router} would'
        ' choose; give one of them')
  with corpora.Corpus(args.corpus) as corpus:
    if args.passage:  # A wrong one is told before the model is loaded.
      corpus_routing.AddressRouter(corpus).route(args.passage)
    store = _store(args)
    model = _load(args, store, corpus)
    from kvgraft_jax import corpus as corpus_lib  # As above.
    corpus_lib.warm_up(model, corpus, args.question, args.lead or '')
    startup_s = common.process_age_s()
    answer = corpus_lib.ask(
        model, store, corpus, args.question, **_given(
            args, 'passage', 'router', 'k', 'max_new_tokens', 'lead',
            'on_mismatch'))
  result = answer.to_json() | {'startup_s': round(startup_s, 3)}
  if answer.passage is None:
    cli.warn(f'kvgraft corpus: {answer.why}; ask with other words, or give'
             ' --passage')
    return 1, result
  common.say(answer.text or '')
  common.note(
      f'from {answer.source}#{answer.ordinal}'
      + (f' ({answer.heading})' if answer.heading else '')
      + f': {answer.quality} choice by {answer.router}, {answer.words_found} of'
      f' {answer.words} words; {answer.tokens_restored:,} tokens restored,'
      f' {answer.tokens_computed:,} computed')
  if not answer.exact:
    common.note('the numerics class differs: this result is not exact')
  return 0, result


def _verify(args: Any) -> tuple[int, dict[str, Any]]:
  """Compares grafts of passages with fresh computations, byte for byte.

  The passages are spread over the corpus, and the tokens of each are compared
  with those of its text. Exits 1 if anything differs.
  """
  with corpora.Corpus(args.corpus) as corpus:
    store = _store(args)
    model = _load(args, store, corpus)
    from kvgraft_jax import corpus as corpus_lib  # As above.
    given = _given(args, 'passages')
    if args.continuations is not None:
      given['n_continuations'] = args.continuations
    with common.Progress('verify') as bar:
      report = corpus_lib.verify(
          model, store, corpus, progress=bar.callback, **given)
  common.note(
      f'{report.equal} of {report.passages} passages equal; SHA-256 equal'
      f' {report.sha256_equal} of {report.continuations}, largest KL'
      f' {report.max_kl}')
  return int(not report.ok), dataclasses.asdict(report) | {'ok': report.ok}


def _stats(args: Any) -> tuple[int, dict[str, Any]]:
  """Counts, and checks the text of every passage; needs no model.

  Artifacts that no passage needs any more are `unused`; documents whose build
  is not finished are `drafts`.
  """
  with corpora.Corpus(args.corpus) as corpus:
    corpus.check()
    result = corpus.stats()
  for name, value in result.items():
    if name == 'settings':
      for key, setting in value.items():
        common.say(f'{key}: {setting}')
    else:
      common.say(f'{name}: {value:,}')
  return 0, result


ACTIONS = {
    'build': cli.Action(
        _build, ('corpus',), ('text_dir', 'passage_tokens', 'sliding', 'block',
                              'limit_documents', *_MODEL),
        '/tmp/corpus --text_dir=/usr/share/common-licenses'),
    'ask': cli.Action(
        _ask, ('corpus',), ('question', 'passage', 'router', 'k',
                            'max_new_tokens', 'lead', 'on_mismatch', *_MODEL),
        '/tmp/corpus --question="What does the licence cover?"'),
    'verify': cli.Action(
        _verify, ('corpus',), ('passages', 'continuations', *_MODEL),
        '/tmp/corpus --passages=5'),
    'stats': cli.Action(_stats, ('corpus',), (), '/tmp/corpus'),
}


if __name__ == '__main__':
  cli.start('corpus')
