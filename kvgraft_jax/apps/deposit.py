"""Computes a text once and stores its KV state as an artifact."""

import dataclasses
import os
import time
from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags
from kvgraft_jax.apps import inputs

EXAMPLE = '--store=/tmp/store --text_file=manual.txt --name=manual'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.store(fv)
  flags.text(fv, 'text_file')
  flags.messages(fv)
  absl_flags.DEFINE_string(
      'name', None, 'Name to give the artifact.', flag_values=fv)
  absl_flags.DEFINE_string(
      'parent', None, 'Artifact that stands in front: id, prefix or name.',
      flag_values=fv)
  absl_flags.DEFINE_integer(
      'parent_length', None, 'Positions of the parent in front; all by'
      ' default.', flag_values=fv)
  absl_flags.DEFINE_enum(
      'sliding', 'full', ['full', 'window'], 'Sliding layers: keep every'
      ' block, or what a continuation at the end can see.', flag_values=fv)
  absl_flags.DEFINE_boolean(
      'stream', False, 'Write each block as soon as it is computed, in constant'
      ' device memory; after an interruption the same command goes on where it'
      ' was. The artifact is the same.', flag_values=fv)
  flags.stream(fv)
  flags.block(fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Deposits; returns exit code and JSON."""
  if args.parent_length is not None and not args.parent:
    raise errors.UsageError('--parent_length needs --parent')
  for name in ('device_kv_bytes', 'host_kv_bytes'):
    if getattr(args, name) is not None and not args.stream:
      raise errors.UsageError(f'--{name} needs --stream here')
  streaming = common.streaming(args, args.stream)
  what = inputs.require_request(args, 'text_file')
  store = common.open_store(args, create=True)
  parent = store.find(args.parent) if args.parent else None
  start = (inputs.graft_length(store, parent, args.parent_length)
           if parent else 0)
  model = common.load_model(args, parent)
  # Token ids need no look at what stands in front of them.
  front = (inputs.chain_tokens(store, parent, start)
           if parent and not isinstance(what, list) else [])
  ids = inputs.to_ids(args, model, what, start, front=lambda: front,
                      answer=False, length_flag='--parent_length')
  if not ids:
    raise errors.UsageError(
        'the parent holds the whole conversation already; give one that goes'
        ' on, or leave out --parent')
  merges = bool(parent) and inputs.boundary_merges(model, front, what)
  startup_s = common.process_age_s()
  began = time.perf_counter()
  with common.Progress('prefill') as bar:
    made = kvgraft_jax.deposit(
        model, store, ids, parent, sliding=args.sliding, name=args.name,
        parent_length=args.parent_length, block=args.block,
        provenance=_provenance(args), streaming=streaming,
        progress=bar.callback)
  seconds = time.perf_counter() - began
  common.note(
      f'{made.id[:12]}: '
      + ('is in the store already' if made.existed else
         f'{made.tokens_computed:,} tokens computed'
         + (f' behind {made.tokens_resumed:,} of an earlier run'
            if made.tokens_resumed else '')
         + f' and stored as {made.manifest.nbytes:,} bytes in'
         f' {seconds:.1f} s'))
  return 0, {
      'artifact': made.id, 'key': made.key, 'name': made.name,
      'tokens': len(ids), 'tokens_computed': made.tokens_computed,
      'tokens_resumed': made.tokens_resumed,
      'bytes': made.manifest.nbytes, 'start': made.manifest.fields.start,
      'end': made.manifest.fields.end, 'sliding': args.sliding,
      'block': made.manifest.fields.block, 'existed': made.existed,
      'boundary_merges': merges, 'deposit_s': round(seconds, 4),
      'kv': made.usage and dataclasses.asdict(made.usage),
      'startup_s': round(startup_s, 3), **inputs.about(what),
  }


def _provenance(args: Any) -> dict[str, str]:
  found = {'model': args.model, 'version': kvgraft_jax.__version__}
  source = args.text_file or args.tokens_file or args.messages
  if source:
    found['source'] = os.path.basename(source)
  return found


if __name__ == '__main__':
  cli.start('deposit')
