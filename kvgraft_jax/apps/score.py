"""Log-likelihood of a continuation, behind an artifact or alone.

What is scored is the continuation behind the artifact and the prompt. Without
a continuation it is the prompt itself: behind the artifact, or behind bos.
"""

import dataclasses
import time
from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import inputs

EXAMPLE = "--store=/tmp/store --artifact=manual --continuation=' In 1893.'"


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.artifact(fv)
  flags.text(fv, what='the text in front, behind the artifact')
  flags.text(fv, 'continuation_file', 'continuation', 'the text that is scored')
  flags.on_mismatch(fv, ('fail', 'recompute', 'inexact'))
  flags.stream(fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Scores; returns exit code and JSON."""
  streaming = common.streaming(args)
  prompt = inputs.read_input(args)
  scored = inputs.read_input(args, 'continuation_file', 'continuation')
  if prompt is None and scored is None:
    raise errors.UsageError(
        'nothing to score: give --continuation, --continuation_file,'
        ' --continuation_tokens_file or a prompt')
  if not args.artifact and prompt is None:
    raise errors.UsageError(
        'a continuation is scored behind something: give --artifact or'
        ' --prompt')
  if args.artifact is None and args.length is not None:
    raise errors.UsageError('--length needs --artifact')
  store = common.open_store(args) if args.artifact else None
  manifest = store.find(args.artifact) if store else None
  start = 0
  if store is not None and manifest is not None:
    start = inputs.graft_length(store, manifest, args.length)
  model = common.load_model(
      args, manifest if args.on_mismatch == 'fail' else None)
  # Without a continuation the prompt is it, behind bos or the artifact.
  front: list[int] = []
  last = prompt
  if scored is not None:
    if prompt is not None:
      front = inputs.to_ids(args, model, prompt, start)
    last = scored
  assert last is not None
  ids = inputs.to_ids(args, model, last, start + len(front))
  if not start and not front:
    front, ids = ids[:1], ids[1:]
    if not ids:
      raise errors.UsageError(
          'the first token alone cannot be scored; give at least two')
  startup_s = common.process_age_s()
  began = time.perf_counter()
  with common.Progress('prefill') as bar:
    if store is not None and manifest is not None:
      context = kvgraft_jax.graft(
          model, store, manifest, start, args.on_mismatch, record=False,
          streaming=streaming, progress=bar.callback)
      merges = inputs.boundary_merges(
          model, context.tokens, prompt if front else last)
      if front:
        context.extend(front)
    else:
      context = model.prefill(front, record=False, streaming=streaming,
                              progress=bar.callback)
      merges = scored is not None and inputs.boundary_merges(
          model, front, last)
  score = context.score(ids)
  if not context.exact:
    common.note('the numerics class differs: this result is not exact')
  common.note(f'{score.logprob:.4f} nats for {len(ids)} tokens')
  return 0, {
      'logprob': score.logprob, 'tokens': len(ids),
      'logprobs': score.logprobs, 'token_ids': ids,
      'tokens_restored': context.tokens_restored,
      'tokens_computed': context.tokens_computed,
      'exact': context.exact if manifest is not None else None,
      'boundary_merges': merges,
      'kv': dataclasses.asdict(context.usage()),
      'score_s': round(time.perf_counter() - began, 4),
      'startup_s': round(startup_s, 3),
  }


if __name__ == '__main__':
  cli.start('score')
