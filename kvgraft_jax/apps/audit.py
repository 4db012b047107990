"""Recomputes stored blocks from the blocks in front of them.

Sliding and global layers are stored, and counted, as blocks of their own.

Any block can be checked alone; all of them together prove the artifact.
"""

import dataclasses
import time
from typing import Any

from absl import flags as absl_flags

import kvgraft_jax
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '--store=/tmp/store --artifact=manual --blocks=all'


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  flags.artifact(fv, length=False)
  absl_flags.DEFINE_string(
      'blocks', 'all', "'all', or how many, spread over the artifact.",
      flag_values=fv)
  flags.stream(fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Audits; returns exit code and JSON."""
  flags.require(args, 'artifact')
  streaming = common.streaming(args)
  store = common.open_store(args)
  manifest = store.find(args.artifact)
  model = common.load_model(args, manifest)
  began = time.perf_counter()
  with common.Progress('audit') as bar:
    report = kvgraft_jax.audit(
        model, store, manifest, blocks=args.blocks, streaming=streaming,
        progress=bar.callback)
  for line in report.differing:
    common.note(line)
  common.note(
      f'{manifest.id[:12]}: {report.blocks_equal} of {report.blocks_checked}'
      f' blocks equal, {report.blocks_not_auditable} cannot be checked alone')
  return int(not report.ok), dataclasses.asdict(report) | {
      'ok': report.ok, 'artifact': manifest.id,
      'audit_s': round(time.perf_counter() - began, 3)}


if __name__ == '__main__':
  cli.start('audit')
