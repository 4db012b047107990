"""Measures what is exact here, what is not and why, into a ledger.

Three parts: a text that another process deposits is grafted with fifty tails
and at several lengths and compared with a fresh computation; one text is
computed by every schedule; and blocks are put back at their own position and
elsewhere, with one factor changed at a time. `kvgraft report DIR -o FILE.html`
shows the result, `kvgraft ledger recheck DIR` derives it anew. The default
settings take about an hour on two cores with the embedded model; tiny models
have smaller ones.
"""

import os
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '/tmp/run --model=gemma3-270m'
POSITIONAL = ('run_dir',)

# Flag -> what it is, and its default, which is smaller for tiny models.
_NAMES = {
    'parts': ('What to do.', 'fifty,invariance,study'),
    'dtypes': ('Of weights, operands and cache.', 'bfloat16,float32'),
    'cases': (
        'Cases of the study, by the factor that differs from base; float64'
        ' takes the weights of float32.', 'base,float32,float64,float32_both,'
        'window,float32_angles,sliding_only,global_only,half_page,small_chunk,'
        'slots'),
}
_LISTS = {
    'lengths': ('fifty: lengths at which the artifact is grafted as well.',
                '8,128,1024,4096'),
    'offsets': ('study: positions by which blocks are moved; 0 is a control.',
                '0,8,128,1024,4096'),
}
_SIZES = {
    'tokens': ('fifty: tokens that are deposited.', '4203'),
    'continuations': ('fifty: tails behind them.', '50'),
    'tail': ('Tokens behind a length, and behind a block of the study.', '64'),
    'schedule_tokens': ('invariance: tokens of the text.', '700'),
    'block': ('study: tokens of a block.', '576'),
    'samples': ('study: texts.', '2'),
}


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  absl_flags.DEFINE_string(
      'run_dir', None, 'Directory for the ledger and the store; must hold no'
      ' run.', flag_values=fv)
  for name, what in {**_NAMES, **_LISTS}.items():
    absl_flags.DEFINE_list(name, None, _help(*what), flag_values=fv)
  for name, what in _SIZES.items():
    absl_flags.DEFINE_integer(
        name, None, _help(*what), lower_bound=1, flag_values=fv)
  absl_flags.DEFINE_string(
      'text_file', None, 'UTF-8 text; the ledger has its hash alone. By default'
      ' the document that comes with the package.', flag_values=fv)
  flags.model(fv, one_dtype=False)



def _help(what: str, default: str) -> str:
  return f'{what} By default {default}.'


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
