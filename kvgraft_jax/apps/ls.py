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
  found = []
  rows = [('id', 'positions', 'sliding', 'bytes', 'created', 'parent', 'name')]
  for m in manifests:
    fields, named = m.fields, names.get(m.id, [])
    parent = ids.get(fields.parent, fields.parent)
    found.append({
        'id': m.id, 'key': m.key, 'names': named, 'start': fields.start,
        'end': fields.end, 'sliding': fields.sliding, 'bytes': m.nbytes,
        'created': m.created, 'parent': parent or None})
    rows.append((
        m.id[:12], f'{fields.start}..{fields.end}', fields.sliding,
        f'{m.nbytes:,}', m.created, parent[:12] or '-',
        ' '.join(named) or '-'))
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
