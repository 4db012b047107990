"""Measures what is exact here, what is not and why, into a ledger.

Three parts: a text that another process deposits is grafted with fifty tails
and at several lengths and compared with a fresh computation; one text is
computed by every schedule; and blocks are put back at their own position and
elsewhere, with one factor changed at a time. `kvgraft report DIR -o FILE.html`
shows the result, `kvgraft ledger recheck DIR` derives it anew. The default
settings take about an hour on two cores with the embedded model.
"""

import os
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '/tmp/run --model=gemma3-270m'
POSITIONAL = ('run_dir',)

_DEFAULT = ' Left out: what fits the model.'

_NAMES = {
    'parts': 'What to do, of fifty, invariance and study.',
    'dtypes': 'Of weights, operands and cache: bfloat16, float32.',
    'cases': 'Cases of the study; float64 takes the weights of float32.',
}
_LISTS = {
    'lengths': 'fifty: lengths at which the artifact is grafted as well.',
    'offsets': 'study: positions by which blocks are moved; 0 is a control.',
}
_SIZES = {
    'tokens': 'fifty: tokens that are deposited.',
    'continuations': 'fifty: tails behind them.',
    'tail': 'Tokens behind a length, and behind a block of the study.',
    'schedule_tokens': 'invariance: tokens of the text.',
    'block': 'study: tokens of a block.',
    'samples': 'study: texts.',
}


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_string(
      'run_dir', None, 'Directory for the ledger and the store; must hold no'
      ' run.', flag_values=fv)
  for name, what in _NAMES.items():
    absl_flags.DEFINE_list(name, None, what + _DEFAULT, flag_values=fv)
  for name, what in _LISTS.items():
    absl_flags.DEFINE_list(name, None, what + _DEFAULT, flag_values=fv)
  for name, what in _SIZES.items():
    absl_flags.DEFINE_integer(
        name, None, what + _DEFAULT, lower_bound=1, flag_values=fv)
  absl_flags.DEFINE_string(
      'text_file', None, 'UTF-8 text; the ledger has its hash alone. By default'
      ' the document that comes with the package.', flag_values=fv)
  flags.model(fv, one_dtype=False)



def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs; returns exit code and JSON."""
  flags.require(args, 'run_dir')
  given = {name: getattr(args, name) for name in (
      *_NAMES, *_SIZES, 'text_file', 'chunk', 'tile', 'page')}
  settings = {name: tuple(value) if isinstance(value, list) else value
              for name, value in given.items() if value is not None}
  for name in _LISTS:
    if getattr(args, name) is not None:
      settings[name] = tuple(
          flags.number(name, item) for item in getattr(args, name))
  common.pin_threads(args)
  from kvgraft_jax import evidence  # Imports jax, which --help does not need.
  from kvgraft_jax import ledger
  with common.Progress('evidence') as bar:
    update = bar.callback
    folder = evidence.run(
        evidence.default_settings(args.model, **settings), args.run_dir,
        command=common.command_line('evidence'),
        progress=update and (lambda what, done, total: update(
            done, total, what)))
  lines = ledger.read(folder)
  verdicts = [line['body'] for line in lines if line['kind'] == 'verdict']
  failed = [v['id'] for v in verdicts if not v['passed']]
  for line in lines:
    if line['body'].get('role') == 'finding':
      common.say(line['body']['text'])
  common.say(f'{len(verdicts) - len(failed)} of {len(verdicts)} verdicts passed'
             + (f'; NOT passed: {", ".join(failed)}' if failed else ''))
  return int(bool(failed)), {
      'run_dir': os.fspath(folder), 'lines': len(lines),
      'head': lines[-1]['hash'], 'verdicts': len(verdicts), 'failed': failed}


if __name__ == '__main__':
  cli.start('evidence')
