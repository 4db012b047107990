"""Solves a dataset, deposits what was verified, asks again; into a ledger.

Each round solves what is not solved, under a budget of tokens; verifies it by
programs that agree, or by the answer key; adds what passed to the library and
deposits its context; then asks all of it again behind grafts. At the end come
problems with other numbers, problems in other words, near ones that no entry
may answer, and everything once more with an emptied library. A run that was
stopped goes on with --resume. `kvgraft report DIR` shows the result, `kvgraft
ledger recheck DIR` derives it anew.
"""

import dataclasses
import os
from typing import Any

from absl import flags as absl_flags

from kvgraft_jax.apps import cli
from kvgraft_jax.apps import common
from kvgraft_jax.apps import flags

EXAMPLE = '/tmp/run --dataset=shipped --budget=512 --rounds=2'
POSITIONAL = ('run_dir',)


def define(fv: absl_flags.FlagValues) -> None:
  """Defines this command's flags."""
  text, integer = absl_flags.DEFINE_string, absl_flags.DEFINE_integer
  text('run_dir', None, 'Directory for the ledger; must hold no run, unless it'
       ' is resumed.', flag_values=fv)
  text('dataset', 'shipped', "'shipped', or a JSONL file with id, problem and"
       ' answer. Of a file the ledger has hashes and answers, no texts.',
       flag_values=fv)
  text('programs', None, 'JSONL file with verified programs for the dataset;'
       ' they are offered where the model solves nothing.', flag_values=fv)
  text('library', None, 'Directory of the library; below run_dir by default.',
       flag_values=fv)
  flags.store(fv)
  integer('limit', None, 'Problems to take; all by default.', lower_bound=1,
          flag_values=fv)
  absl_flags.DEFINE_enum(
      'style', 'plain', ['plain', 'chat'], 'How to ask: plain for base models,'
      ' chat for tuned ones.', flag_values=fv)
  integer('rounds', 2, 'Times to solve, verify, deposit and ask again.',
          lower_bound=1, flag_values=fv)
  integer('budget', 512, 'Most tokens to decode for one problem in a round.',
          lower_bound=1, flag_values=fv)
  integer('samples', 4, 'That vote.', lower_bound=1, flag_values=fv)
  absl_flags.DEFINE_float(
      'temperature', 0.8, 'Of the samples.', flag_values=fv)
  integer('seed', 0, 'Of the samples.', lower_bound=0, flag_values=fv)
  absl_flags.DEFINE_list(
      'rungs', ['greedy', 'vote', 'program', 'think'], 'Of the solve ladder,'
      ' from below.', flag_values=fv)
  integer('answer_tokens', 24, 'Most tokens of an answer that is asked for at'
          ' once.', lower_bound=1, flag_values=fv)
  absl_flags.DEFINE_enum(
      'policy', 'vote', ['library', 'vote', 'abstain'], 'Where a confident vote'
      ' contradicts the answer behind a transferred method: which one stands,'
      ' or none.', flag_values=fv)
  absl_flags.DEFINE_boolean(
      'unsafe_exec', False, 'Run programs, those that the model writes too,'
      ' even where they cannot be kept apart from this machine.',
      flag_values=fv)
  absl_flags.DEFINE_boolean(
      'resume', False, 'Go on with the run in run_dir.', flag_values=fv)
  flags.model(fv, beyond=False)


def run(args: Any) -> tuple[int, dict[str, Any]]:
  """Runs; returns exit code and JSON."""
  flags.require(args, 'run_dir')
  common.pin_threads(args)
  from kvgraft_jax import findings  # These import jax; --help does not.
  from kvgraft_jax import flywheel
  from kvgraft_jax import ledger
  values = {field.name: getattr(args, field.name)
            for field in dataclasses.fields(flywheel.Settings)}
  values['rungs'] = tuple(values['rungs'])
  settings = flywheel.Settings(**values)
  with common.Progress('flywheel') as bar:
    update = bar.callback
    folder = flywheel.run(
        settings, args.run_dir, library=args.library, store=args.store,
        command=common.command_line('flywheel'), resume=args.resume,
        progress=update and (lambda what, done, total: update(
            done, total, what)))
  lines = ledger.read(folder)
  figures = {line['body']['id']: line['body']['value'] for line in lines
             if line['kind'] == 'summary'}
  for text in findings.sentences(lines):
    common.say(text)
  failed = [line['body']['id'] for line in lines if line['kind'] == 'verdict'
            and not line['body']['passed']]
  common.say(
      'checked: grafts exact, no wrong hit, no hit in an empty library'
      if not failed else f'NOT passed: {", ".join(failed)}')
  return int(bool(failed)), {
      'run_dir': os.fspath(folder), 'lines': len(lines),
      'head': lines[-1]['hash'], 'problems': figures['problems'],
      'entries': figures['entries'], 'hits': figures['hits'],
      'wrong_hits': figures['wrong_hits'],
      'grafts_equal': figures['grafts/equal'], 'failed': failed}


if __name__ == '__main__':
  cli.start('flywheel')
