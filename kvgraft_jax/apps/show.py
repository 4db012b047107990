"""Shows everything about one artifact."""

from typing import Any

from absl import flags as absl_flags

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '--store=/tmp/store --artifact=manual'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.artifact(fv, length=False)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Shows; returns exit code and JSON."""
  flags.require(args, 'artifact')
  store = common.open_store(args)
  manifest = store.find(args.artifact)
  chain = [manifest]
  while chain[0].fields.start:
    parent = store.get(chain[0].fields.parent)
    if parent is None:
      common.note(f'the parent of {chain[0].id[:12]} is not in the store')
      break
    chain.insert(0, parent)
  complete = not chain[0].fields.start
  fields = manifest.fields
  result = {
      'id': manifest.id, 'key': manifest.key,
      'names': [n for n, i in store.names().items() if i == manifest.id],
      'start': fields.start, 'end': fields.end,
      'tokens': fields.end - fields.start, 'block': fields.block,
      'sliding': fields.sliding, 'bytes': manifest.nbytes,
      'files': artifact_lib.data_files(fields, manifest.layouts),
      'created': manifest.created, 'provenance': manifest.provenance,
      'chain': [{'id': m.id, 'start': m.fields.start, 'end': m.fields.end}
                for m in chain],
      'lengths': lengths(chain) if complete else [],
      'stored': {k: list(v) for k, v in
                 artifact_lib.available(manifest).items()},
      'layouts': {k: v.to_json() for k, v in manifest.layouts.items()},
      'model': fields.model, 'tokenizer': fields.tokenizer,
      'template': fields.template, 'numerics_class': fields.numerics_class,
      'class': manifest.profile.get('class', {}),
      'invariances': manifest.self_test.get('invariances', {}),
      'last_logits_sha256': manifest.last_logits_sha256,
  }
  for name in ('id', 'key', 'names', 'created', 'sliding', 'block', 'model',
               'tokenizer', 'template', 'numerics_class', 'provenance',
               'last_logits_sha256'):
    common.say(f'{name:18}  {result[name]}')
  common.say(f'{"bytes":18}  {manifest.nbytes:,} in'
             f' {len(result["files"])} files')
  for m in chain:
    common.say(f'{"chain":18}  {m.id[:12]}  positions {m.fields.start} to'
               f' {m.fields.end - 1}')
  for first, last in result['lengths']:
    common.say(f'{"lengths":18}  {first} to {last}')
  return 0, result


def lengths(chain: list[artifact_lib.Manifest]) -> list[list[int]]:
  """Returns the ranges [first, last] of lengths that a graft can have.

  Args:
    chain: root first, the artifact last.
  """
  stops = [m.fields.start for m in chain[1:]] + [chain[-1].fields.end]
  found: list[list[int]] = []
  for length in range(1, stops[-1] + 1):
    if not all(_sees(m, stop, length) for m, stop in zip(chain, stops)):
      continue
    if found and found[-1][1] == length - 1:
      found[-1][1] = length
    else:
      found.append([length, length])
  return found


def _sees(manifest: artifact_lib.Manifest, stop: int, length: int) -> bool:
  """Tells whether an artifact has the sliding rows that a length needs."""
  layout = manifest.layouts.get(config_lib.SLIDING)
  start = manifest.fields.start
  if layout is None or layout.window is None or start >= length:
    return True
  visible = max(start, length - layout.window)
  first = artifact_lib.available(manifest)[config_lib.SLIDING][0]
  return visible >= min(stop, length) or first <= visible


if __name__ == '__main__':
  cli.start('show')
