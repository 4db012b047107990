"""What fixes the bits here: the profile, its class and the self-test.

More is measured, for information: other numbers of threads, in processes of
their own, and slices of every matmul's columns. The class does not change by it
(threads stay a factor of the class).
"""

import os
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '--dtype=float32'

_WORDS = {True: 'equal', False: 'DIFFERS', None: 'not tested'}


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_boolean(
      'quick', False, 'The self-test alone, without further measurements.',
      flag_values=fv)
  flags.model(fv)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Measures and reports; returns exit code and JSON."""
  model = common.load_model(args)
  from kvgraft_jax import numerics  # Imports jax, which --help does not need.
  report = model.self_test()
  factors = model.numerics_class
  fingerprint = numerics.class_fingerprint(factors)
  profile = model.profile.factors()
  width = max(map(len, profile))
  common.say('profile (- marks what the self-test proved irrelevant)')
  for name, value in profile.items():
    common.say(f'  {" " if name in factors else "-"} {name:{width}}  {value}')
  common.say(f'class {fingerprint}')
  common.say(f'self-test {report.version}: {report.tokens} tokens, two layers,'
             f' {report.elapsed_s:.1f} s')
  for name, proved in report.invariances.items():
    needed = ' (exactness needs it)' if name in numerics.REQUIRED else ''
    common.say(f'    {name:{width}}  {_WORDS[proved]}{needed}')
  common.say('equal bits are promised' if report.exact
             else 'NO equal bits are promised here')
  measured = {} if args.quick else _measure(model, report)
  return 0, {
      'fingerprint': fingerprint, 'invariances': report.invariances,
      'class': factors, 'profile': profile,
      'profile_fingerprint': model.profile.fingerprint, 'exact': report.exact,
      'self_test': report.to_json(), 'measured': measured,
      'model': args.model, 'model_fingerprint': model.fingerprint,
  }


def _measure(model: Any, report: Any) -> dict[str, Any]:
  """Measures threads and column slices; prints and returns them."""
  from kvgraft_jax import measure  # Imports jax, which --help does not need.
  base = report.digests[f'rows_{model.profile.chunk}']
  threads: dict[str, bool] = {}
  if model.profile.factors()['backend'] == 'cpu':
    counts = sorted({1, min(2, os.cpu_count() or 1)})
    for count in counts:
      digest = measure.thread_digests(model, [count])[count]
      threads[str(count)] = digest == base
      common.say(f'threads {count}: {_WORDS[digest == base]}')
  with common.Progress('columns') as bar:
    columns = measure.columns(model, bar.callback)
  common.say('columns of each matmul shape, cut into 2, 4 and 8 parts')
  for c in columns:
    common.say(f'  [{c.out}, {c.inner}] at {c.rows} rows: '
               + ', '.join(_WORDS[v] for v in c.equal.values()))
  return {
      'threads': threads,
      'columns': [{
          'name': c.name, 'out': c.out, 'in': c.inner, 'rows': c.rows,
          'equal': {f'1/{n}': v for n, v in c.equal.items()},
      } for c in columns],
  }


if __name__ == '__main__':
  cli.start('numerics')
