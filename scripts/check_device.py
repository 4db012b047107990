"""Checks numerics, grafts and speed on one GPU or TPU, in minutes.

  python scripts/check_device.py --out=device.json
  python scripts/check_device.py --rehearse --out=/tmp/rehearsal.json   # CPU

Sections, in order: the profile; a table of which row counts and column slices
of every matmul shape give equal bits; equality of the whole model for several
schedules; run to run and process to process; deposit, graft and verify in a
second process; speed; the same for a large model as far as time goes. Random
weights, the core packages only.

This process never imports jax: each part runs in a process of its own, one at
a time, so that a crash, a time-out or a device held by another process loses
that part and no other. --out is rewritten after each; what was skipped is null
and `skipped` says why. The last line on stdout is a JSON object.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
SECTIONS = ('profile', 'matmuls', 'equality', 'repeat', 'graft', 'speed')
# `tokens` of the whole-model comparison: no multiple of a step, past the ring.
REAL = {'small': 'random:gemma3-1b:0', 'large': 'random:gemma3-12b:0',
        'presets': ['gemma3-1b', 'gemma3-12b'], 'most': None, 'tokens': 1100,
        'lengths': [2048, 8192], 'load_s': 10}
REHEARSAL = {'small': 'tiny:0', 'large': 'tiny:1', 'presets': ['gemma3-270m'],
             'most': 4096, 'tokens': 150, 'lengths': [200, 300], 'load_s': 1}
# Part, model, and the share of the budget by whose end it must be done.
PLAN = (('profile', 'small', 0.15), ('matmuls', 'small', 0.37),
        ('first', 'small', 0.66), ('second', 'small', 0.82),
        ('first', 'large', 0.94), ('second', 'large', 1.0))
GRACE = 0.04  # Of the budget, behind a part's end, before it is killed.


def write(path: pathlib.Path, report: dict[str, Any]) -> None:
  """Writes the report, whole or not at all."""
  new = path.with_name(path.name + '.new')
  new.write_text(json.dumps(report, indent=1) + '\n', encoding='utf-8')
  os.replace(new, path)


def run_part(order: dict[str, Any], env: dict[str, str], stop: float) -> str:
  """Runs a part until `stop` (epoch seconds); returns what went wrong."""
  part = subprocess.Popen(
      [sys.executable, str(HERE / 'device_parts.py'), json.dumps(order)],
      env=env, stdout=sys.stderr, start_new_session=True)
  try:
    code = part.wait(max(1.0, stop - time.time()))
  except subprocess.TimeoutExpired:
    return 'stopped: out of time'
  finally:
    if part.poll() is None:
      os.killpg(part.pid, signal.SIGKILL)
      part.wait()
  return '' if code == 0 else f'ended with exit code {code}'


def merge(report: dict[str, Any], part: str, model: str, found) -> None:
  """Puts a part's results into the report."""
  prefix = 'large.' if model == 'large' else ''
  target = report
  if prefix:
    report['large'] = report['large'] or dict.fromkeys(SECTIONS[2:])
    target = report['large']
  for section, items in found['sections'].items():
    merged = (target[section] or {}) | items
    if any(value is not None for value in merged.values()):
      target[section] = merged
  for what in ('skipped', 'errors', 'seconds'):
    report[what] |= {f'{prefix}{part}.{k}': v for k, v in found[what].items()}


def tiles(report: dict[str, Any], chunk: int) -> list[int]:
  """Returns row counts with a `chunk` row product's bits in every shape."""
  entries = list((report['matmuls'] or {}).values())
  if not entries or None in entries:
    return []
  # Attention handles at most 128 rows at once, so it has no 512 row product.
  lists = [(e.get(f'equal_{chunk}') or e['equal_128'])['1'] for e in entries]
  common = set(lists[0]).intersection(*lists[1:])
  return sorted(n for n in common if 2 <= n <= chunk)


def recommend(report: dict[str, Any]) -> dict[str, Any]:
  """Returns what the default profile should be, and why."""
  shown = {k: v for k, v in (report['equality'] or {}).items()
           if v and k.startswith('tile_')}
  refuted = [k for k, v in shown.items() if not v['equal']]
  for chunk in (512, 128):
    found = [n for n in tiles(report, chunk) if n < chunk
             and f'tile_{n}' not in refuted]
    if found and (chunk == 128 or 128 in found):
      return {'chunk': chunk, 'tile': found[0],
              'reason': f'in every matmul shape rows {found} have the bits of'
                        f' {chunk}' + (f'; whole model: {shown and "equal"}'
                                       if shown else '')}
  why = ('the table is incomplete' if not tiles(report, 128) else
         'no smaller row count has equal bits in every shape'
         if not refuted else f'the whole model refutes {", ".join(refuted)}')
  return {'chunk': 128, 'tile': 128, 'reason': why}


def summary(report: dict[str, Any]) -> str:
  """Returns one screen for people."""
  lines = []
  device = (report['profile'] or {}).get('device') or {}
  lines.append('device  ' + ', '.join(
      f'{k} {v}' for k, v in device.items() if v is not None))
  lines.append('matmuls: row counts with the bits of 128 rows / 512 rows,'
               ' whole columns; [1/2 1/4 1/8 equal?]')
  for name, entry in (report['matmuls'] or {}).items():
    if entry is None:
      lines.append(f'  {name:24} skipped')
      continue
    both = [entry.get(f'equal_{n}') or {} for n in (128, 512)]
    rows = ' / '.join(','.join(map(str, e.get('1', []))) or '-' for e in both)
    same = ' '.join(
        'yes' if both[0][s] == both[0]['1'] else 'no'
        for s in ('2', '4', '8') if s in both[0])
    lines.append(f"  {name:24} {entry['in']}x{entry['out']}: {rows} [{same}]"
                 f" {entry['ms'].get('128')} ms at 128")
  for title, part in (('', report), ('large ', report['large'] or {})):
    for section in SECTIONS[2:]:
      for item, value in (part.get(section) or {}).items():
        if item in ('model', 'compile_s', 'self_test'):
          continue
        if isinstance(value, dict):
          value = ', '.join(
              f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}'
              for k, v in value.items() if k not in ('sha256', 'id'))
        lines.append(f'{title}{section} {item}: {value}')
  for what in ('skipped', 'errors'):
    lines += [f'{what} {k}: {v}' for k, v in report[what].items()]
  best = report['recommendation']
  lines.append(f"default profile should be: chunk {best['chunk']}, tile"
               f" {best['tile']} ({best['reason']})")
  return '\n'.join(lines)


def main() -> int:
  """Runs all parts; returns the exit code: 1 if a part ended in an error."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--budget_s', type=float, default=300)
  parser.add_argument('--rehearse', action='store_true',
                      help='small sizes on CPU')
  args = parser.parse_args()
  if args.budget_s <= 0:
    parser.error(f'--budget_s: expected a positive number, found'
                 f' {args.budget_s}')
  began = time.time()
  sizes = REHEARSAL if args.rehearse else REAL
  report: dict[str, Any] = dict.fromkeys(SECTIONS + ('large',))
  report |= {
      'models': [sizes['small'], sizes['large']], 'rehearsal': args.rehearse,
      'budget_s': args.budget_s, 'skipped': {}, 'errors': {}, 'seconds': {},
      'recommendation': None, 'elapsed_s': 0.0,
  }
  write(args.out, report)
  with tempfile.TemporaryDirectory(prefix='kvgraft-check-') as folder:
    env = os.environ | {
        # Every program is compiled here, by the code that is checked.
        'KVGRAFT_CACHE_DIR': os.path.join(folder, 'cache'),
        'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
        'PYTHONPATH': os.pathsep.join(
            [str(HERE.parent), os.environ.get('PYTHONPATH', '')]),
    }
    env.pop('JAX_COMPILATION_CACHE_DIR', None)
    if args.rehearse:
      env['JAX_PLATFORMS'] = 'cpu'
    for number, (part, model, share) in enumerate(PLAN):
      large = model == 'large'
      deadline = began + share * args.budget_s
      part_key = f'{"large." if large else ""}{part}'
      if time.time() > deadline:
        report['skipped'][part_key] = 'its share of the budget is used up'
        continue
      base = (report['large'] or {}) if large else report
      chunk = next((v for k, v in (base.get('equality') or {}).items()
                    if k.startswith('chunk_')), None)
      out = os.path.join(folder, f'part{number}.json')
      order = {
          'part': part, 'out': out, 'deadline': deadline,
          'model': sizes[model], 'presets': sizes['presets'],
          'most': sizes['most'], 'tokens': sizes['tokens'],
          'lengths': sizes['lengths'][:1] if large else sizes['lengths'],
          'load_s': sizes['load_s'] * (3 if large else 1),
          'store': os.path.join(folder, f'store-{model}'),
          'tile': next(iter(tiles(report, 128)), None),
          'expected': chunk and chunk['sha256'],
      }
      print(f'{time.time() - began:6.1f} s  {part_key}', file=sys.stderr,
            flush=True)
      stop = min(deadline + GRACE * args.budget_s, began + args.budget_s - 1)
      problem = run_part(order, env, stop)
      if problem:
        report['errors'][part_key] = problem
      try:
        merge(report, part, model, json.loads(
            pathlib.Path(out).read_text(encoding='utf-8')))
      except OSError:
        pass  # It ended before its first item: said above.
      report['recommendation'] = recommend(report)
      report['elapsed_s'] = round(time.time() - began, 1)
      write(args.out, report)
  report['elapsed_s'] = round(time.time() - began, 1)
  write(args.out, report)
  print(summary(report))
  print(json.dumps({
      'out': str(args.out), 'elapsed_s': report['elapsed_s'],
      'errors': len(report['errors']), 'skipped': len(report['skipped']),
      'recommendation': report['recommendation']}))
  return 1 if report['errors'] else 0


if __name__ == '__main__':
  sys.exit(main())
