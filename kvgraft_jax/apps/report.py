"""Writes the ledger of a run as one HTML page, with tables and plots.

The page is made from the ledger alone and loads nothing. A damaged ledger is
refused.
"""

import os
import pathlib
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax import errors
from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '/tmp/run -o /tmp/report.html'
POSITIONAL = ('run',)


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_string(
      'run', None, 'Directory with the ledger.', flag_values=fv)
  absl_flags.DEFINE_string(
      'out', None, 'HTML file to write; one that is there is replaced.',
      short_name='o', flag_values=fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Writes the page; returns exit code and JSON."""
  flags.require(args, 'run', 'out')
  from kvgraft_jax import ledger
  from kvgraft_jax import recheck
  from kvgraft_jax import report
  lines = ledger.read(args.run)
  for name in (recheck.LEDGER, recheck.HEAD):
    path = pathlib.Path(args.run, name)
    if os.path.exists(args.out) and os.path.samefile(args.out, path):
      raise errors.UsageError(
          f'--out={args.out} is {path} itself; give another file')
  data = report.render_lines(lines).encode('utf-8')
  pathlib.Path(args.out).write_bytes(data)
  passed = [line['body'].get('passed') is True for line in lines
            if line['kind'] == 'verdict']
  common.say(f'{args.out}: lines: {len(lines):,}, verdicts passed:'
             f' {sum(passed):,} of {len(passed):,}')
  return 0, {
      'out': args.out, 'bytes': len(data), 'lines': len(lines),
      'head': lines[-1]['hash'], 'verdicts': len(passed),
      'verdicts_passed': sum(passed)}


if __name__ == '__main__':
  cli.start('report')
