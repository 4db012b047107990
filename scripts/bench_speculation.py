"""Compares decoding with and without speculation by lookup.

  python scripts/bench_speculation.py
  python scripts/bench_speculation.py --quick       # tiny model, seconds

Half of the prompts ask for what the context holds (a passage or a list, once
more), half go on freely. Each is deposited, grafted, continued one token at a
time and with steps of R rows, and deposited again. Compared are the tokens,
the hashes of all logits that chose one, the visible cache bytes, and the ids
and block digests of the deposits.

A table for people goes first; the last line on stdout is one JSON object.
Exits 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

import kvgraft_jax
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import engine
from kvgraft_jax import hashing
from kvgraft_jax import numerics
from kvgraft_jax import sampling

QUICK = {'model': 'tiny:0', 'prompts': 4, 'repeating_tokens': 24,
         'other_tokens': 12}
TEXT = pathlib.Path(kvgraft_jax.__file__).parent / 'data' / 'document.txt'
COMPARED = ('tokens', 'logits', 'cache', 'deposit')

GOODS = ('apples', 'bricks', 'candles', 'drums', 'eggs', 'forks', 'gloves',
         'hammers', 'inkpots', 'jars', 'kettles', 'lamps', 'mirrors', 'nails',
         'onions', 'pears', 'quilts', 'ropes', 'spoons', 'tiles')
OPENINGS = (
    'The old lighthouse keeper climbed the stairs and',
    'Bread is baked in an oven because',
    'Rivers that flow north are',
    'My grandmother used to say that',
    'The first thing to check in a broken radio is',
    'In the year 2140 the harbour',
    'A good chess player knows',
    'Volcanoes erupt when',
    'She opened the letter slowly, and inside',
    'The difference between a fox and a wolf is',
    'To repair a bicycle tyre you need',
    'Winter came early, so the farmers',
    'Copper is used for wires since',
    'The orchestra stopped playing when',
    'Most birds migrate',
    'On the table there were three things:',
    'The mayor explained that the bridge',
    'Glass is made from',
    'Two brothers lived at the edge of the forest.',
    'Computers store numbers as',
    'The train was late again, which',
    'If the tide is high at noon, then',
    'Honey does not spoil because',
    'He had never seen a map like that:',
    'The recipe starts with onions, and',
)


def passages(model: engine.Model, count: int) -> list[tuple[str, str]]:
  """Returns (text to deposit, text behind it) that ask for a repetition."""
  words = TEXT.read_text(encoding='utf-8').split()
  size = 70 if model.config.name.startswith('gemma') else 12
  result = []
  for i in range(count):
    if i % 2:
      goods = [f'{(7 * i + 3 * j) % 90 + 10} {GOODS[(i + j) % len(GOODS)]}'
               for j in range(size // 3)]
      body, label = ', '.join(goods), 'List'
    else:
      at = i * size % (len(words) - size)
      body, label = ' '.join(words[at:at + size]), 'Text'
    result.append((f'{label}: {body}.\n\n{label}: {body}.\n\n', f'{label}:'))
  return result


def openings(count: int) -> list[tuple[str, str]]:
  """Returns (text to deposit, text behind it) to go on from freely."""
  result = []
  for i in range(count):
    words = OPENINGS[i % len(OPENINGS)].split()
    result.append((' '.join(words[:-1]), ' ' + words[-1]))
  return result


class Run:
  """One continuation of a graft and all that is compared."""

  def __init__(self, model, store, artifact, tail, count, rows):
    plain = sampling.sample

    def sample(logits, **kwargs):
      rows_seen.append(logits)
      return plain(logits, **kwargs)

    rows_seen: list[Any] = []
    context = kvgraft_jax.graft(model, store, artifact)
    context.extend(tail)
    context.logits()
    sampling.sample = sample
    began, cpu = time.perf_counter(), time.process_time()
    try:
      made, = context.generate(count, stop_ids=(), speculate=rows)
    finally:
      self.seconds = time.perf_counter() - began
      self.cpu_seconds = time.process_time() - cpu
      sampling.sample = plain
    hashes = [hashing.logits_sha256(row) for row in rows_seen]
    self.steps, self.count = made.steps, len(made.token_ids)
    self.text = made.text
    context.compute()
    sha = hashlib.sha256()
    for part in cache_lib.visible_rows(
        context.cache, model.config, model.profile.chunk, context.length):
      sha.update(part.tobytes())
    child = kvgraft_jax.deposit(model, store, context, sliding='full')
    self.found = dict(zip(COMPARED, (
        made.token_ids, hashes, sha.hexdigest(),
        (child.id, child.manifest.digests))))


def measure(model, stores, prompt, count) -> dict[int, Run]:
  """Returns rows -> run of one prompt; a store for each, the same parent."""
  text, tail = prompt
  front = model.prefill(model.tokenizer.encode(text, add_bos=True))
  ids = model.tokenizer.encode(tail, add_bos=False)
  runs = {}
  for rows, store in stores.items():
    parent = kvgraft_jax.deposit(model, store, front, sliding='full')
    runs[rows] = Run(model, store, parent, ids, count, rows)
  return runs


def warm_up(model: engine.Model, groups, most: int) -> None:
  """Compiles every step that is timed, and runs one of each and the head."""
  slots = set()
  for prompts, count in groups.values():
    for text, tail in prompts:
      length = len(model.tokenizer.encode(text + tail, add_bos=True))
      slots |= {model.slots_for(length), model.slots_for(length + count)}
  for size in model.row_counts():
    if size <= max(model.profile.tile, 2 * most):
      for capacity in slots:
        model.programs.run_step(
            model.params, model.programs.empty_cache(1, capacity),
            np.zeros((1, size), np.int32), np.zeros(1, np.int32))
  model.prefill([5]).logits()


def summary(runs: list[dict[int, Run]], rows: int) -> dict[str, Any]:
  """Returns equality, tokens a step and wall ratio of one row count."""
  pairs = [(case[1], case[rows]) for case in runs]
  equal = {what: sum(a.found[what] == b.found[what] for a, b in pairs)
           for what in COMPARED}
  ratios = [a.seconds / b.seconds for a, b in pairs]
  cpu_ratios = [a.cpu_seconds / b.cpu_seconds for a, b in pairs]
  per_step = [b.count / b.steps for _, b in pairs]
  return {
      'prompts': len(pairs), 'equal': equal,
      'tokens': sum(b.count for _, b in pairs),
      'steps': sum(b.steps for _, b in pairs),
      'tokens_per_step': statistics.median(per_step),
      'tokens_per_step_range': [min(per_step), max(per_step)],
      'wall_ratio': statistics.median(ratios),
      'wall_ratio_range': [min(ratios), max(ratios)],
      'cpu_ratio': statistics.median(cpu_ratios),
      'seconds': sum(b.seconds for _, b in pairs),
      'seconds_plain': sum(a.seconds for a, _ in pairs),
  }


def show(report: dict[str, Any]) -> None:
  """Prints the report for people."""
  print(f'{"":>10} {"R":>3} {"equal":>9} {"tokens/step":>12}'
        f' {"wall ratio":>11} {"least":>6} {"CPU ratio":>10}')
  for group in ('repeating', 'other'):
    for rows, found in report[group].items():
      equal = min(found['equal'].values())
      print(f'{group:>10} {rows:>3} {equal:>4} of {found["prompts"]:<2}'
            f' {found["tokens_per_step"]:>12.2f} {found["wall_ratio"]:>11.2f}'
            f' {found["wall_ratio_range"][0]:>6.2f}'
            f' {found["cpu_ratio"]:>10.2f}')


def arguments() -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='gemma3-270m')
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--rows', default='4,8,16',
                      help='of a step, each compared with one by one')
  parser.add_argument('--prompts', type=int, default=50,
                      help='half of them repeating')
  parser.add_argument('--repeating_tokens', type=int, default=64)
  parser.add_argument('--other_tokens', type=int, default=24)
  parser.add_argument('--quick', action='store_true',
                      help='tiny model and few prompts, for a test')
  parser.add_argument('--texts', action='store_true',
                      help='print what was generated')
  first, _ = parser.parse_known_args()
  if first.quick:
    parser.set_defaults(**QUICK)
  args = parser.parse_args()
  args.rows = [int(part) for part in args.rows.split(',')]
  if min(args.rows) < 2 or args.prompts < 2:
    parser.error('--rows: expected 2 or more each, and --prompts 2 or more')
  return args


def main() -> int:
  """Runs all prompts; returns the exit code."""
  args = arguments()
  began, load = time.monotonic(), os.getloadavg()
  model = engine.load_model(args.model, dtype=args.dtype)
  half = args.prompts // 2
  groups = {
      'repeating': (passages(model, half), args.repeating_tokens),
      'other': (openings(args.prompts - half), args.other_tokens)}
  report: dict[str, Any] = {
      'model': args.model, 'dtype': args.dtype,
      'profile': model.profile.fingerprint,
      'class': numerics.class_fingerprint(model.numerics_class),
      'environment': dict(model.profile.environment),
      'python': sys.version.split()[0], 'kvgraft_jax': kvgraft_jax.__version__,
      'tile': model.profile.tile,
      'row_counts': model.row_counts(),
      'rows_in_force': {r: model.speculative_rows(r) for r in args.rows},
  }
  with tempfile.TemporaryDirectory(prefix='kvgraft-bench-') as folder:
    stores = {rows: kvgraft_jax.Store(os.path.join(folder, str(rows)))
              for rows in (1, *args.rows)}
    warm_up(model, groups, max(args.rows))
    for group, (prompts, count) in groups.items():
      runs = []
      for number, prompt in enumerate(prompts):
        print(f'{group} {number + 1} of {len(prompts)}', file=sys.stderr,
              flush=True)
        runs.append(measure(model, stores, prompt, count))
        if args.texts:
          print(f'{prompt[0]}{prompt[1]}|{runs[-1][1].text!r}')
      report[group] = {rows: summary(runs, rows) for rows in args.rows}
  report |= {
      'equal': all(
          n == found['prompts'] for group in groups
          for found in report[group].values() for n in found['equal'].values()),
      'elapsed_s': time.monotonic() - began,
      'load_before': load, 'load_after': os.getloadavg(),
  }
  show(report)
  print(json.dumps(report, sort_keys=True))
  return 0 if report['equal'] else 1


if __name__ == '__main__':
  sys.exit(main())
