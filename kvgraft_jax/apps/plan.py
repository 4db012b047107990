"""What a model needs: weights, cache, artifacts, a corpus; nothing is loaded.

Sizes are exact but for the scratch, which is an estimate. A deposit also keeps
sliding rows on the host, and on CPU that is the device's memory; with --stream
only the last of them. A streamed context needs the same device memory at every
length, and each decode step reads what is not on the device.
"""

import dataclasses
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '--model=gemma4-12b --context=32768'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_string(
      'model', 'all', 'A published size such as gemma4-12b, a checkpoint, or'
      ' all for every published size.', flag_values=fv)
  absl_flags.DEFINE_enum(
      'dtype', 'bfloat16', ['bfloat16', 'float32'],
      'Of weights, operands and cache.', flag_values=fv)
  absl_flags.DEFINE_integer(
      'context', None, 'Positions; what the model was trained for by default.',
      lower_bound=1, flag_values=fv)
  flags.beyond_trained(fv)
  absl_flags.DEFINE_integer(
      'devices', 1, 'Spread the weights by columns over so many devices'
      ' (arithmetic only: running on several is planned).', lower_bound=1,
      flag_values=fv)
  absl_flags.DEFINE_integer(
      'corpus_tokens', None, 'Plan a store of a corpus of so many tokens.',
      lower_bound=1, flag_values=fv)
  absl_flags.DEFINE_integer(
      'passage_tokens', None, 'Tokens of a passage of the corpus, an artifact'
      ' of its own.', lower_bound=1, flag_values=fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Plans; returns exit code and JSON."""
  if (args.corpus_tokens is None) != (args.passage_tokens is None):
    raise errors.UsageError(
        '--corpus_tokens and --passage_tokens belong together; give both')
  if args.model == 'all' and args.corpus_tokens is not None:
    raise errors.UsageError(
        '--corpus_tokens needs one --model, found all; name one')
  from kvgraft_jax import memory  # They import jax, which --help does not need.
  from kvgraft_jax import numerics
  from kvgraft_jax import plan
  available = memory.available_bytes()
  if args.model == 'all':
    sizes = [_describe(plan, c, args, available)
             for c in config_lib.PRESETS.values()]
    _table(memory, sizes)
    if args.context and not args.allow_beyond_trained:
      common.say('a context beyond a size\'s own is cut to it')
    _say_available(memory, available)
    return 0, {'available_bytes': available, 'models': sizes}
  config = plan.config_of(args.model)
  found = _describe(plan, config, args, available, strict=True)
  fitting = None
  if available is not None:
    fitting = [name for name, c in config_lib.PRESETS.items()
               if plan.needed_bytes(c, numerics.profile_for(c, args.dtype), 1)
               <= available]
  corpus = None
  if args.corpus_tokens is not None:
    corpus = plan.corpus(config, numerics.profile_for(config, args.dtype),
                         args.corpus_tokens, args.passage_tokens,
                         beyond=args.allow_beyond_trained)
  _show(memory, found)
  if corpus:
    common.say(f'corpus of {corpus.tokens:,} tokens in {corpus.passages:,}'
               f' passages of {corpus.passage_tokens:,}')
    for mode in plan.MODES:
      common.say(f'  stored {mode:6}  {memory.human(corpus.store[mode]):>9}'
                 f'  ({memory.human(corpus.passage[mode])} a passage)')
  _say_available(memory, available)
  if fitting is not None:
    common.say(f'published sizes that fit: {", ".join(fitting) or "none"}')
  return 0, found | {
      'available_bytes': available, 'sizes_that_fit': fitting,
      'corpus': dataclasses.asdict(corpus) if corpus else None}


def _say_available(memory: Any, available: int | None) -> None:
  common.say('available on this device: ' + (
      'unknown' if available is None else memory.human(available)))


def _describe(
    plan: Any, config: config_lib.ModelConfig, args: Any,
    available: int | None, *, strict: bool = False,
) -> dict[str, Any]:
  """Returns the JSON of one model; its context is cut unless `strict`."""
  from kvgraft_jax import numerics  # Imports jax; --help does not.
  profile = numerics.profile_for(config, args.dtype)
  beyond = args.allow_beyond_trained
  context = args.context or args.passage_tokens
  if context is not None and not strict:
    context = min(context, plan.most_positions(config, beyond))
  made = plan.make(config, profile, context, beyond=beyond)
  result = dataclasses.asdict(made) | {
      'devices': args.devices,
      'weights_per_device': -(-made.weights // args.devices),
      'beyond_trained': made.context > config.max_context, 'fits': None,
      'fits_streamed': None, 'largest_context': None, 'largest_deposit': None}
  if available is not None:
    result |= {
        'fits': made.needed <= available,
        'fits_streamed': made.streamed.needed <= available,
        'largest_context': plan.largest_context(
            config, profile, available, beyond=beyond),
        'largest_deposit': plan.largest_context(
            config, profile, available, deposit=True, beyond=beyond)}
  return result


def _show(memory: Any, found: dict[str, Any]) -> None:
  human, kv = memory.human, found['kv_per_token']
  lines = [
      ('model', f'{found["model"]}, {found["dtype"]}'),
      ('parameters', f'{found["parameters"]:,}'),
      ('weights', human(found['weights'])),
      ('K and V of a token', f'{sum(kv.values()):,} B: sliding'
       f' {kv["sliding"]:,} B, global {kv["global"]:,} B'),
      (f'cache for {found["context"]:,} positions',
       f'{human(found["cache"])} ({found["cache_slots"]:,} global slots)'),
      ('scratch, estimated', human(found['scratch'])),
      ('kept on the host by a full deposit', human(found['recorded'])),
  ]
  lines += [(f'artifact, sliding={mode}', human(nbytes))
            for mode, nbytes in found['artifact'].items()]
  streamed = found['streamed']
  lines += [
      ('K and V on the device, streamed',
       f'{human(streamed["device_kv_default"])} by default,'
       f' {human(streamed["device_kv_least"])} at least, at any length'),
      ('a streamed decode step reads', human(streamed['read_per_step'])
       + ' from host memory or store')]
  if found['devices'] > 1:
    lines.append((f'weights on each of {found["devices"]} devices',
                  f'{human(found["weights_per_device"])} if columns divide'
                  ' evenly; running on several is planned'))
  if found['fits'] is not None:
    lines += [
        (f'{found["context"]:,} positions fit on this device', 'yes'
         if found['fits'] else f'NO: {human(found["needed"])} are needed'),
        ('streamed they fit', 'yes' if found['fits_streamed'] else
         f'NO: {human(streamed["needed"])} are needed,'
         f' {human(streamed["needed_least"])} at least'),
        ('longest context that fits', f'{found["largest_context"]:,}'),
        ('longest deposit that fits', f'{found["largest_deposit"]:,}')]
  if found['beyond_trained']:
    lines.append(('beyond the trained length', 'just as exact, but what the'
                  ' model makes of it is untried'))
  width = max(len(name) for name, _ in lines)
  for name, value in lines:
    common.say(f'{name:{width}}  {value}')


def _table(memory: Any, sizes: list[dict[str, Any]]) -> None:
  rows = [('model', 'weights', 'KV/token', 'context', 'cache', 'full', 'window',
           'runs here to', 'deposits to')]

  def longest(value: int | None) -> str:
    return 'unknown' if value is None else f'{value:,}' if value else 'no'

  for s in sizes:
    rows.append((
        s['model'], memory.human(s['weights']),
        f'{sum(s["kv_per_token"].values()):,} B', f'{s["context"]:,}',
        memory.human(s['cache']), memory.human(s['artifact']['full']),
        memory.human(s['artifact']['window']), longest(s['largest_context']),
        longest(s['largest_deposit'])))
  widths = [max(map(len, column)) for column in zip(*rows)]
  for first, *rest in rows:
    common.say('  '.join(
        [first.ljust(widths[0])]
        + [cell.rjust(w) for cell, w in zip(rest, widths[1:])]))
  common.say('full, window: an artifact of the whole context with that'
             ' --sliding; deposits to: the longest full one')


if __name__ == '__main__':
  cli.start('plan')
