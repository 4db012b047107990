"""Lists the artifacts of a store, oldest first."""

from typing import Any

from absl import flags as absl_flags

from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '--store=/tmp/store'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.store(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Lists; returns exit code and JSON."""
  store = common.open_store(args)
  manifests = store.list()
  ids = {m.key: m.id for m in manifests}
  names: dict[str, list[str]] = {}
  for name, artifact_id in store.names().items():
    names.setdefault(artifact_id, []).append(name)
  found = [{
      'id': m.id, 'key': m.key, 'names': names.get(m.id, []),
      'start': m.fields.start, 'end': m.fields.end,
      'sliding': m.fields.sliding, 'bytes': m.nbytes, 'created': m.created,
      'parent': ids.get(m.fields.parent, m.fields.parent) or None,
  } for m in manifests]
  rows = [('id', 'positions', 'sliding', 'bytes', 'created', 'parent', 'name')]
  rows += [
      (a['id'][:12], f'{a["start"]}..{a["end"]}', a['sliding'],
       f'{a["bytes"]:,}', a['created'], (a['parent'] or '-')[:12],
       ' '.join(a['names']) or '-') for a in found]
  widths = [max(map(len, column)) for column in zip(*rows)]
  for row in rows:
    common.say('  '.join(
        cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
  damaged = store.list_damaged()
  for line in damaged:
    common.note(line)
  return 0, {'artifacts': found, 'damaged': damaged}


if __name__ == '__main__':
  cli.start('ls')
