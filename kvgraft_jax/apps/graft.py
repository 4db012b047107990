"""Continues from a stored artifact, without computing what it holds.

Without a text behind it, it goes on from the artifact's end.
"""

from __future__ import annotations

from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import continuation
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import inputs

EXAMPLE = "--store=/tmp/store --artifact=manual --prompt=' In short,'"


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.artifact(fv)
  flags.text(fv, what='the text behind the artifact')
  flags.messages(fv)
  flags.sampling(fv)
  absl_flags.DEFINE_boolean(
      'recompute', False, "Compute the artifact's tokens afresh: the fresh path"
      ' of the same request.', flag_values=fv)
  absl_flags.DEFINE_string(
      'deposit_as', None, 'Keep the result as a child with this name.',
      flag_values=fv)
  flags.stream(fv)
  flags.block(fv)
  flags.on_mismatch(fv, ('fail', 'recompute', 'inexact'))
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Grafts and generates; returns exit code and JSON."""
  flags.require(args, 'artifact')
  options = continuation.Options.of(args)
  if args.deposit_as and args.num_samples > 1:
    raise errors.UsageError(
        '--deposit_as keeps one result; leave out --num_samples')
  if args.deposit_as and args.on_mismatch == 'inexact':
    raise errors.UsageError(
        '--deposit_as keeps exact results only; use --on_mismatch=recompute')
  streaming = common.streaming(args)
  what = inputs.read_request(args)
  store = common.open_store(args)
  manifest = store.find(args.artifact)
  length = inputs.graft_length(store, manifest, args.length)
  if args.deposit_as:
    if store.name_target(args.deposit_as) is not None:
      raise errors.UsageError(
          f'name {args.deposit_as!r} is taken; choose another name')
  strict = args.on_mismatch == 'fail' and not args.recompute
  model = common.load_model(args, manifest if strict else None)
  from kvgraft_jax import grafting  # Imports jax; --help does not.
  grafting.check_block(model, args.block)
  ids = [] if what is None else inputs.to_ids(
      args, model, what, length,
      front=lambda: inputs.chain_tokens(store, manifest, length))
  record = bool(args.deposit_as)

  def build() -> kvgraft_jax.Context:
    with common.Progress('recompute') as bar:
      if args.recompute:
        return grafting.recompute(
            model, store, manifest, length, record=record,
            streaming=streaming, progress=bar.callback)
      return kvgraft_jax.graft(
          model, store, manifest, length, args.on_mismatch, record=record,
          streaming=streaming, progress=bar.callback)

  model.warm_up(length + len(ids),
                length if args.recompute else max(len(ids), 1),
                num_samples=args.num_samples,
                max_new_tokens=args.max_new_tokens, streaming=streaming)
  startup_s = common.process_age_s()
  context, result = continuation.answer(options, build, ids)
  if not context.exact:
    common.note('the numerics class differs: this result is not exact')
  front = context.tokens[:length]
  result |= inputs.about(what) | {
      'artifact': manifest.id, 'length': length, 'exact': context.exact,
      'recomputed': result['tokens_restored'] == 0,
      'boundary_merges': inputs.boundary_merges(model, front, what),
      'startup_s': round(startup_s, 3)}
  if args.deposit_as:
    made = kvgraft_jax.deposit(
        model, store, context, name=args.deposit_as, block=args.block)
    result |= {'deposited': made.id, 'deposited_key': made.key,
               'deposited_as': args.deposit_as}
  return 0, result


if __name__ == '__main__':
  cli.start('graft')
