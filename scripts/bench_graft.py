"""Measures what a graft saves, and what limits it.

  python scripts/bench_graft.py
  python scripts/bench_graft.py --lengths=512,2048 --sections=ttft,restore
  python scripts/bench_graft.py --quick       # tiny model, seconds

Sections: `ttft` (cold and grafted time to first token, with prefill and
decode speed), `restore` (bytes a second against `readinto`), `startup` (a
process of its own, start to first token), `capacity` (does a step cost more in
a larger cache). Times to first token begin with the model loaded and the
programs compiled, and neither side records rows for a later deposit.

A table for people goes first; the last line on stdout is one JSON object.
Exits 1 if a grafted hash differs from the cold one.
"""

import argparse
from collections.abc import Callable
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

import kvgraft_jax
from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import hashing
from kvgraft_jax import numerics
from kvgraft_jax import programs as programs_lib

SECTIONS = ('ttft', 'restore', 'startup', 'capacity')
QUICK = {'model': 'tiny:0', 'lengths': '40,200', 'repeats': 2, 'decode': 8,
         'capacities': '256,1024'}
TEXT = pathlib.Path(kvgraft_jax.__file__).parent / 'data' / 'document.txt'

# What a user's process does: argv is model, dtype, store, id, tail, start.
FIRST_TOKEN = '''
import json, sys, time
spec, dtype, where, ref, tail, began = sys.argv[1:]
marks = [time.time()]
from kvgraft_jax import Store, graft, load_model  # Names load their modules.
marks.append(time.time())
model = load_model(spec, dtype=dtype)
marks.append(time.time())
context = graft(model, Store(where), ref)
context.extend(json.loads(tail))
token = int(context.logits().argmax())
marks.append(time.time())
names = 'interpreter', 'imports', 'model', 'graft_and_programs'
ends = [float(began)] + marks
print(json.dumps({'sha256': context.logits_sha256(), 'token': token,
                  'total_s': marks[-1] - float(began)} |
                 {n + '_s': b - a for n, a, b in zip(names, ends, marks)}))
'''


def seconds(call: Callable[[], Any]) -> float:
  """Returns how long `call` takes."""
  began = time.perf_counter()
  call()
  return time.perf_counter() - began


def median(call: Callable[[], Any], repeats: int) -> float:
  """Returns the median of `repeats` timings, after one that is dropped."""
  call()
  return statistics.median(seconds(call) for _ in range(repeats))


def text_tokens(model: engine.Model, count: int) -> list[int]:
  """Returns `count` ids: bos, then the packaged text again and again."""
  text = TEXT.read_text(encoding='utf-8')
  tokens = model.tokenizer.encode(text, add_bos=True)
  more = model.tokenizer.encode(text, add_bos=False)
  while len(tokens) < count:
    tokens += more
  return tokens[:count]


def run(model: engine.Model, context: engine.Context, tail: list[int]):
  """Extends by `tail`; returns (seconds of steps, of the head, hash)."""
  began = time.perf_counter()
  context.extend(tail)
  jax.block_until_ready(context.cache)
  middle = time.perf_counter()
  row = context.logits()
  return (middle - began, time.perf_counter() - middle,
          hashing.logits_sha256(row))


class Case:
  """One length: its deposit and what is measured on it."""

  def __init__(self, model, store, length, args):
    self.model, self.store, self.args = model, store, args
    tile = model.profile.tile
    everything = text_tokens(model, length + 2 * tile)
    self.tokens = everything[:length]
    self.tail = everything[length:length + tile]
    self.next = everything[length + tile:]
    self.length = length
    self.artifact = kvgraft_jax.deposit(model, store, self.tokens)
    self.manifest = self.artifact.manifest

  def graft(self, verify: bool = True) -> engine.Context:
    """Returns a context from the store; its cache is in place."""
    context = kvgraft_jax.graft(
        self.model, self.store, self.artifact.id, record=False, verify=verify)
    jax.block_until_ready(context.cache)
    return context

  def ttft(self) -> dict[str, Any]:
    """Measures cold and grafted time to first token."""
    run(self.model, self.graft(), self.tail)  # Compiles what is left.
    cold, limit = [], time.monotonic() + self.args.budget_s
    while not cold or (len(cold) < self.args.repeats
                       and time.monotonic() + cold[-1][1] < limit):
      began = time.perf_counter()
      context = self.model.prefill(self.tokens, record=False)
      jax.block_until_ready(context.cache)
      prefill = time.perf_counter() - began
      step, head, cold_hash = run(self.model, context, self.tail)
      cold.append((prefill, prefill + step + head))
      cold_computed = context.tokens_computed
    decode = self.args.decode
    options = {'stop_ids': (), 'speculate': 1}
    context.generate(1, **options)
    decode_s = seconds(lambda: context.generate(decode, **options))
    del context
    parts, hashes = [], set()
    for _ in range(self.args.repeats + 1):
      began = time.perf_counter()
      context = self.graft()
      restore = time.perf_counter() - began
      step, head, found = run(self.model, context, self.tail)
      hashes.add(found)
      computed = context.tokens_computed
      steady, _, _ = run(self.model, context, self.next)
      parts.append((restore + step + head, restore, step, head, steady))
    total, restore, step, head, steady = (
        statistics.median(column) for column in zip(*parts[1:]))
    cold_s = statistics.median(c[1] for c in cold)
    prefill_s = statistics.median(c[0] for c in cold)
    lookup = median(
        lambda: self.store.tokens(self.store.find(self.artifact.id)),
        self.args.repeats)
    unverified = median(lambda: self.graft(verify=False), self.args.repeats)
    verified = median(self.graft, self.args.repeats)
    return {
        'cold_s': cold_s, 'graft_s': total, 'ratio': cold_s / total,
        'cold_repeats': len(cold), 'repeats': self.args.repeats,
        'cold_tokens_computed': cold_computed,
        'graft_tokens_computed': computed,
        'sha256_equal': hashes == {cold_hash}, 'logits_sha256': cold_hash,
        'prefill_tokens_s': self.length / prefill_s,
        'decode_s_token': decode_s / decode,
        # Of the grafted time; `first step` over `steady step` is what taking
        # over host memory and touching it for the first time cost.
        'parts_s': {
            'lookup': lookup, 'read, allocate': max(0.0, unverified - lookup),
            'digests': max(0.0, verified - unverified),
            'steady step': min(step, steady),
            'first step extra': max(0.0, step - steady), 'head': head,
        },
        'restore_s': restore,
    }

  def restore(self) -> dict[str, Any]:
    """Measures restore bandwidth against `readinto` of the same bytes."""
    ranges = {config_lib.GLOBAL: (0, self.length)}
    window = self.model.config.sliding.window
    block = self.manifest.fields.block
    ranges[config_lib.SLIDING] = (
        max(0, self.length - window) // block * block, self.length)
    buffers, paths = {}, []
    root = f'a/{self.manifest.key}/{self.manifest.attempt}'
    for kind, (lo, hi) in ranges.items():
      layout = self.manifest.layouts[kind]
      shape = (len(layout.layers), hi - lo, layout.kv_heads, layout.head_dim)
      buffers[kind] = [
          np.zeros(shape, layout.element) for _ in artifact_lib.PARTS]
      paths += [
          self.store.where(f'{root}/{kind}/c.0.0.{i}.0.0')
          for i, b in enumerate(self.manifest.geometries[kind].blocks)
          if b.stop > lo]
    sizes = [os.path.getsize(path) for path in paths]
    flat = memoryview(bytearray(max(sizes)))

    def readinto():
      for path in paths:
        with open(path, 'rb', buffering=0) as f:
          f.readinto(flat)

    def read(verify):
      for kind, (lo, hi) in ranges.items():
        self.store.read(self.manifest, kind, lo, hi, *buffers[kind],
                        verify=verify)

    nbytes = sum(a.nbytes for pair in buffers.values() for a in pair)
    repeats = max(3, self.args.repeats)
    times = {
        'readinto': median(readinto, repeats),
        'read_unverified': median(lambda: read(False), repeats),
        'read_verified': median(lambda: read(True), repeats),
        'graft_unverified': median(lambda: self.graft(False), repeats),
        'graft_verified': median(lambda: self.graft(True), repeats),
    }
    return {'bytes': nbytes, 'file_bytes': sum(sizes)} | {
        f'{name}_gb_s': (sum(sizes) if name == 'readinto' else nbytes) / s / 1e9
        for name, s in times.items()}

  def startup(self, expected: str | None) -> dict[str, Any]:
    """Measures a process of its own from its start to its first token."""
    runs = []
    for _ in range(2):  # The first one warms every cache.
      done = subprocess.run(
          [sys.executable, '-c', FIRST_TOKEN, self.args.model,
           self.args.dtype, self.args.store, self.artifact.id,
           json.dumps(self.tail), repr(time.time())],
          check=True, capture_output=True, text=True)
      runs.append(json.loads(done.stdout.splitlines()[-1]))
    result = runs[-1]
    result['sha256_equal'] = expected in (None, result['sha256'])
    return result


def capacity(model: engine.Model, args) -> list[dict[str, Any]]:
  """Measures one tile step, a row write and a page read by cache capacity."""
  profile, config = model.profile, model.config
  tile, page = profile.tile, profile.page
  spec = config.full
  rows = np.ones((tile, spec.kv_heads, spec.head_dim),
                 cache_lib.BITS[profile.dtype])
  result = []
  for slots in args.capacities:
    at = np.int32(min(600, slots // 2))
    program = programs_lib.Programs(config, profile, model.params)
    cache = program.empty_cache(1, slots)
    tokens = np.full((1, tile), 7, np.int32)

    def step(state, program=program, tokens=tokens, at=at):
      _, state[0] = program.run_step(model.params, state[0], tokens, at[None])
      jax.block_until_ready(state[0])

    def write(array, rows, start):
      return cache_lib.write_rows(array, rows, 0, 0, start, 0)

    def read(array, number):
      def body(i, total):
        return total + cache_lib.read_page(
            array, 0, 0, i, page, profile.dtype, 0).astype(np.float32)
      zero = np.zeros((page, spec.kv_heads, spec.head_dim), np.float32)
      return jax.lax.fori_loop(0, number, body, zero)

    state = [cache]
    step_s = median(lambda state=state: step(state), args.repeats)
    memory = program.step(tile, 1, slots).memory_analysis()
    array = [jax.numpy.copy(state[0].k[config_lib.GLOBAL])]
    del cache, state
    options = dict(profile.compiler_options)
    writer = jax.jit(write, donate_argnums=0, compiler_options=options).lower(
        array[0], rows, at).compile()
    reader = jax.jit(read, compiler_options=options).lower(
        array[0], np.int32(2)).compile()

    def written(array=array, writer=writer, at=at):
      array[0] = jax.block_until_ready(writer(array[0], rows, at))

    result.append({
        'capacity': slots, 'position': int(at), 'step_s': step_s,
        'write_s': median(written, 50),
        'read_2_pages_s': median(
            lambda reader=reader, array=array: jax.block_until_ready(
                reader(array[0], np.int32(2))), 50),
        'temp_bytes': getattr(memory, 'temp_size_in_bytes', None),
    })
  return result


def table(title: str, rows: list[list[str]]) -> None:
  """Prints rows of equal length in columns; the first one is the head."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  print(f'\n{title}')
  for row in rows:
    print('  ' + '  '.join(cell.rjust(w) for cell, w in zip(row, widths)))


def show(report: dict[str, Any]) -> None:
  """Prints the report for people."""
  def columns(section, names):
    return [[f'{key:.4g}' if isinstance(key, float) else str(key)
             for key in (n, *(entry[name] for name in names))]
            for n, entry in report[section].items()]

  if report['ttft']:
    table('time to first token, s', [
        ['tokens', 'cold', 'graft', 'ratio', 'computed cold', 'graft',
         'equal', 'prefill tok/s', 'decode s/tok']] + columns('ttft', (
             'cold_s', 'graft_s', 'ratio', 'cold_tokens_computed',
             'graft_tokens_computed', 'sha256_equal', 'prefill_tokens_s',
             'decode_s_token')))
    parts = list(next(iter(report['ttft'].values()))['parts_s'])
    rows = [['tokens', *parts]]
    for n, entry in report['ttft'].items():
      whole = sum(entry['parts_s'].values())
      rows.append([n] + [f"{100 * entry['parts_s'][p] / whole:.0f}"
                         for p in parts])
    table('what limits the graft, share of its parts, %', rows)
  names = ('readinto', 'read_unverified', 'read_verified', 'graft_unverified',
           'graft_verified')
  if report['restore']:
    table('restore, GB/s (read: into reused arrays; graft: the whole call)', [
        ['tokens', 'bytes', *names]] + columns(
            'restore', ('bytes', *(f'{n}_gb_s' for n in names))))
  if report['startup']:
    names = ('interpreter_s', 'imports_s', 'model_s', 'graft_and_programs_s',
             'total_s')
    table('process start to first token, warm caches, s',
          [['tokens', *names]] + columns('startup', names))
  if report['capacity']:
    names = ('step_s', 'write_s', 'read_2_pages_s', 'temp_bytes')
    table('one tile step by capacity', [['capacity', *names]] + [
        [str(row['capacity'])] + [f'{row[n]:.4g}' for n in names]
        for row in report['capacity']])


def integers(text: str) -> list[int]:
  """Parses '512,2048'."""
  return [int(part) for part in text.split(',')]


def arguments() -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='gemma3-270m')
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--lengths', default='512,2048,8192,12288')
  parser.add_argument('--sections', default=','.join(SECTIONS))
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--decode', type=int, default=16,
                      help='tokens decoded to time one')
  parser.add_argument('--capacities', default='1024,4096,16384,65536')
  parser.add_argument('--budget_s', type=float, default=60,
                      help='of cold repeats a length; at least one runs')
  parser.add_argument('--quick', action='store_true',
                      help='tiny model and lengths, for a test')
  first, _ = parser.parse_known_args()
  if first.quick:
    parser.set_defaults(**QUICK)
  args = parser.parse_args()
  args.lengths, args.capacities = (
      integers(args.lengths), integers(args.capacities))
  args.sections = args.sections.split(',')
  unknown = set(args.sections) - set(SECTIONS)
  if unknown:
    parser.error(f'--sections: expected some of {",".join(SECTIONS)}, found'
                 f' {",".join(sorted(unknown))}')
  return args


def main() -> int:
  """Runs the sections; returns the exit code."""
  args = arguments()
  load = os.getloadavg()
  model = engine.load_model(args.model, dtype=args.dtype)
  report: dict[str, Any] = {
      'model': args.model, 'dtype': args.dtype,
      'tile': model.profile.tile, 'chunk': model.profile.chunk,
      'profile': model.profile.fingerprint,
      'class': numerics.class_fingerprint(model.numerics_class),
      'environment': dict(model.profile.environment),
      'python': sys.version.split()[0], 'kvgraft_jax': kvgraft_jax.__version__,
  }
  report |= {section: {} for section in SECTIONS}
  with tempfile.TemporaryDirectory(prefix='kvgraft-bench-') as folder:
    args.store = os.path.join(folder, 'store')
    store = kvgraft_jax.Store(args.store)
    lengths = args.lengths if set(args.sections) != {'capacity'} else []
    for length in lengths:
      print(f'{length} tokens ...', file=sys.stderr, flush=True)
      case, name = Case(model, store, length, args), str(length)
      expected = None
      if 'ttft' in args.sections:
        report['ttft'][name] = case.ttft()
        expected = report['ttft'][name]['logits_sha256']
      if 'restore' in args.sections:
        report['restore'][name] = case.restore()
      if 'startup' in args.sections:
        report['startup'][name] = case.startup(expected)
  if 'capacity' in args.sections:
    print('capacities ...', file=sys.stderr, flush=True)
    report['capacity'] = capacity(model, args)
  # Linux counts ru_maxrss in KiB.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  report |= {'peak_bytes': peak, 'load_before': load,
             'load_after': os.getloadavg()}
  equal = all(entry['sha256_equal'] for section in ('ttft', 'startup')
              for entry in report[section].values())
  report['sha256_equal'] = equal
  show(report)
  print(f"\npeak memory {peak / 1e9:.2f} GB; load {load[0]:.1f} before,"
        f" {report['load_after'][0]:.1f} after; class {report['class'][:16]}")
  if not equal:
    print('error: a grafted hash differs from the cold one', file=sys.stderr)
  print(json.dumps(report))
  return 0 if equal else 1


if __name__ == '__main__':
  sys.exit(main())
