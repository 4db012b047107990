"""Compares streamed contexts with those in memory, and measures long ones.

  python scripts/bench_stream.py equal --lengths=8192,16384
  python scripts/bench_stream.py long --store=DIR --artifact=NAME
  python scripts/bench_stream.py equal long --quick      # tiny model, seconds

equal: one text is deposited in memory, streamed, and streamed by a process
that is killed (SIGKILL) at half and resumed here: one id. The device may hold
the sliding windows and an eighth of the global layers' positions, host memory
another eighth and a block, so that most is read from the store. Then
continuations of streamed grafts are compared with fresh ones in memory.

long: prefixes of a stored artifact (`kvgraft deposit --stream`, sliding=full),
doubling, are grafted and go on greedily, one token a step: once with all that
is cold in host memory, once from the store at every step. Beside it the same
blocks are read without a model. What was read lately is in the operating
system's page cache, so this measures copying and checking rather than a disk.
Random blocks are audited.

A table for people goes first; the last line on stdout is one JSON object.
Exits 1 if anything differs.
"""

import argparse
from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

import kvgraft_jax
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import cold as cold_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import hashing
from kvgraft_jax import memory
from kvgraft_jax import numerics
from kvgraft_jax import ring as ring_lib
from kvgraft_jax import segments
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming as streaming_lib
from kvgraft_jax import verification

MODES = ('equal', 'long')
TEXT = pathlib.Path(kvgraft_jax.__file__).parent / 'data' / 'document.txt'
QUICK = {'model': 'tiny:0', 'lengths': '700', 'continuations': 4,
         'first': 300, 'steps': 3, 'reads': 3, 'audit_blocks': 5,
         'device_kv_bytes': '180kB'}
QUICK_LONG = 1400  # Tokens of the artifact that a quick run makes for itself.
SHARE = 8  # The device holds one part in so many of the global layers.


class Store(store_lib.Store):
  """A store that counts the bytes of the global layers that are read."""

  def __init__(self, url: str, *, create: bool = True):
    super().__init__(url, create=create)
    self.global_bytes = 0
    self._lock = threading.Lock()

  def read(self, manifest, kind, *args, **kwargs):
    """Reads as any store does, and counts."""
    nbytes = super().read(manifest, kind, *args, **kwargs)
    if kind == config_lib.GLOBAL:
      with self._lock:
        self.global_bytes += nbytes
    return nbytes


def log(text: str) -> None:
  """Prints what is being done."""
  print(f'{time.strftime("%H:%M:%S")} {text}', file=sys.stderr, flush=True)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
  """Returns a call's value and its seconds."""
  began = time.perf_counter()
  value = call()
  return value, time.perf_counter() - began


def tokens_of(
    model: engine.Model, path: str | None, length: int
) -> list[int]:
  """Returns `length` ids, of a file or of the embedded text, over again."""
  if path is not None:
    ids = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  else:
    ids = model.tokenizer.encode(
        TEXT.read_text(encoding='utf-8'), add_bos=True)
  body = ids[1:]
  return ids[:1] + [body[i % len(body)] for i in range(length - 1)]


def bytes_on_device(
    model: engine.Model, kind: str, positions: int = 1
) -> int:
  """Returns the bytes of K and V of one kind's layers on the device."""
  shape = cache_lib.shapes(
      model.config, model.profile, 1,
      cache_lib.round_up(positions, model.profile.page))[kind]
  element = np.dtype(cache_lib.BITS[model.profile.dtype])
  return 2 * element.itemsize * int(np.prod(shape))


def budget_of(
    model: engine.Model, length: int
) -> streaming_lib.Streaming:
  """Returns the windows and an eighth of a length; for the host a block more.

  What leaves the device waits there until its block is whole.
  """
  part = bytes_on_device(model, config_lib.GLOBAL, length) // SHARE
  return streaming_lib.Streaming(
      bytes_on_device(model, config_lib.SLIDING) + part,
      part + bytes_on_device(
          model, config_lib.GLOBAL, grafting.check_block(model, None)))


def die_at_half(args: argparse.Namespace) -> None:
  """Deposits into `args.die_in` until half is done, and is killed there."""
  model = engine.load_model(args.model, dtype=args.dtype)
  length, = args.lengths

  def progress(done, total):
    if 2 * done >= total:
      os.kill(os.getpid(), signal.SIGKILL)

  depositing.deposit(
      model, store_lib.Store(args.die_in),
      tokens_of(model, args.tokens_file, length),
      streaming=budget_of(model, length), progress=progress)


def killed(args: argparse.Namespace, folder: str, length: int) -> bool:
  """Runs `die_at_half` in a process; tells whether it was killed."""
  command = [sys.executable, __file__, 'equal', f'--die_in={folder}',
             f'--model={args.model}', f'--dtype={args.dtype}',
             f'--lengths={length}']
  if args.tokens_file:
    command.append(f'--tokens_file={args.tokens_file}')
  return subprocess.run(command, check=False).returncode == -signal.SIGKILL


def compare(
    model: engine.Model, args: argparse.Namespace, length: int, folder: str
) -> dict[str, Any]:
  """Deposits one text three times and verifies streamed grafts of it."""
  ids = tokens_of(model, args.tokens_file, length)
  streaming = budget_of(model, length)
  stores = [Store(os.path.join(folder, f'{length}-{name}'))
            for name in ('memory', 'streamed', 'killed')]
  log(f'{length} tokens: deposit in memory')
  plain, plain_s = timed(lambda: depositing.deposit(model, stores[0], ids))
  log(f'{length} tokens: streamed deposit')
  streamed, streamed_s = timed(lambda: depositing.deposit(
      model, stores[1], ids, streaming=streaming))
  log(f'{length} tokens: streamed deposit that is killed')
  was_killed = killed(args, stores[2].url, length)
  resumed = depositing.deposit(model, stores[2], ids, streaming=streaming)
  log(f'{length} tokens: verify')
  before = stores[1].global_bytes
  found, verify_s = timed(lambda: verification.verify(
      model, stores[1], streamed, n_continuations=args.continuations,
      streaming=streaming,
      progress=lambda done, n: log(f'continuation {done} of {n}')))
  read = stores[1].global_bytes - before
  usage = streamed.usage
  assert usage is not None
  return {
      'length': length, 'id': plain.id,
      'ids_equal': plain.id == streamed.id == resumed.id,
      'device_kv_limit': streaming.device_kv_bytes,
      'host_kv_limit': streaming.host_kv_bytes,
      'device_kv_bytes': usage.device_kv_bytes,
      'device_kv_source': usage.device_kv_source,
      'host_kv_bytes': usage.host_kv_bytes,
      'memory_kv_bytes': plain.usage.device_kv_bytes,
      'deposit_s': plain_s, 'deposit_streamed_s': streamed_s,
      'killed': was_killed, 'tokens_resumed': resumed.tokens_resumed,
      'tokens_computed_after': resumed.tokens_computed,
      'verify': dataclasses.asdict(found), 'verify_s': verify_s,
      'store_bytes_read': read,
      'equal': (plain.id == streamed.id == resumed.id and was_killed
                and 0 < resumed.tokens_resumed < length
                and found.ok and read > 0
                and usage.device_kv_bytes <= streaming.device_kv_bytes),
  }


def steps_of(
    model: engine.Model, store: store_lib.Store,
    manifest: Any, length: int, streaming: streaming_lib.Streaming, steps: int,
) -> dict[str, Any]:
  """Grafts [0, length) and decodes; returns times and bytes of a step."""
  context, graft_s = timed(lambda: grafting.graft(
      model, store, manifest, length, streaming=streaming, record=False))
  # The first pass fills host memory as far as it may.
  hidden, first_s = timed(context.logits_sha256)
  before = context.usage()
  times: list[float] = []

  def on_token(unused_sample, unused_token):
    times.append(time.perf_counter())

  made, = context.generate(
      steps + 1, stop_ids=(), speculate=1, on_token=on_token)
  # The first token needs no step: its logits are there.
  seconds = [b - a for a, b in zip(times, times[1:])]
  after = context.usage()
  return {
      'graft_s': graft_s, 'first_pass_s': first_s,
      'step_s': statistics.median(seconds), 'steps_s': seconds,
      'store_bytes_a_step': (
          after.store_bytes_read - before.store_bytes_read) // steps,
      'store_blocks_a_step': (
          after.store_blocks_read - before.store_blocks_read) // steps,
      'wait_s_a_step': (after.store_wait_s - before.store_wait_s) / steps,
      'device_kv_bytes': after.device_kv_bytes,
      'device_kv_source': after.device_kv_source,
      'host_kv_bytes': after.host_kv_bytes,
      'token_ids': made.token_ids, 'first_logits_sha256': hidden,
  }


def read_times(
    model: engine.Model, store: store_lib.Store, manifest: Any, length: int,
    layout: streaming_lib.Layout, count: int, verify: bool,
) -> tuple[float, int]:
  """Returns median seconds and bytes of reading what a step reads."""
  config, profile = model.config, model.profile
  spec = config.spec(config_lib.GLOBAL)
  element = np.dtype(cache_lib.BITS[profile.dtype])
  shape = spec.kv_heads, spec.head_dim
  base = (length - 1) // profile.page * profile.page
  found = grafting.sources(
      store, grafting.chain(store, manifest, length), verify)
  rows = [config.cache_row(part.closes)
          for part in segments.segments(config, range(len(config.layers)))
          if part.closes is not None]
  requests = [(row, at, min(at + layout.group, base)) for row in rows
              for at in range(0, base, layout.group)]
  ring = ring_lib.Ring(
      (layout.group, *shape), element, layout.buffers)
  seconds, nbytes = [], 0
  for _ in range(count):
    cold = cold_lib.Cold(
        (len(config.kind_layers(config_lib.GLOBAL)), *shape), element, 0)
    for source in found:
      cold.back(source.backing())
    cold.stop = base
    began = time.perf_counter()
    for _ in ring.flow(cold, requests):
      pass
    seconds.append(time.perf_counter() - began)
    nbytes = cold.store_bytes
  return statistics.median(seconds), nbytes


def slope(rows: Sequence[dict[str, Any]], of: Callable[[Any], float]) -> float:
  """Returns the least-squares slope against the length, in seconds each."""
  return float(np.polyfit([r['length'] for r in rows], [*map(of, rows)], 1)[0])


def measure_long(
    model: engine.Model, args: argparse.Namespace, store: store_lib.Store,
    ref: str,
) -> dict[str, Any]:
  """Measures prefixes of one artifact and audits blocks of it."""
  manifest = store.find(ref)
  end = manifest.fields.end
  if end <= args.first:
    raise errors.UsageError(
        f'--first: expected fewer than the {end} tokens of the artifact, found'
        f' {args.first}')
  limit = args.device_kv_bytes
  layout = streaming_lib.layout(model.config, model.profile, limit)
  model.warm_up(1, 1, streaming=streaming_lib.Streaming(limit, None))
  lengths, at = [], args.first
  while at < end:
    lengths.append(at)
    at *= 2
  rows = []
  for length in lengths + [end]:
    row: dict[str, Any] = {'length': length}
    for name, host in (('host', None), ('store', 0)):
      log(f'{length} positions: decode with what is cold in the {name}')
      row[name] = steps_of(
          model, store, manifest, length,
          streaming_lib.Streaming(limit, host), args.steps)
    for name, verify in (('read_s', True), ('read_unverified_s', False)):
      row[name], nbytes = read_times(
          model, store, manifest, length, layout, args.reads, verify)
      row['read_bytes'] = nbytes
    row['step_to_read'] = (
        row['store']['step_s'] / row['read_s'] if row['read_bytes'] else None)
    row['equal'] = all(
        row['host'][what] == row['store'][what]
        for what in ('token_ids', 'first_logits_sha256'))
    rows.append(row)
  fields = manifest.fields
  blocks = [b.number for b in verification.choose_blocks(manifest, 'all')]
  rng = np.random.Generator(np.random.PCG64(args.seed))
  chosen = sorted(rng.choice(
      blocks, min(args.audit_blocks, len(blocks)), replace=False).tolist())
  log(f'audit of blocks {chosen}')
  audited, audit_s = timed(lambda: verification.audit(
      model, store, manifest, blocks=chosen,
      streaming=streaming_lib.Streaming(limit, None),
      progress=lambda done, n: log(f'block {done} of {n}')))
  devices = {row[name]['device_kv_bytes']
             for row in rows for name in ('host', 'store')}
  slopes = {
      'step_host': slope(rows, lambda r: r['host']['step_s']),
      'step_store': slope(rows, lambda r: r['store']['step_s']),
      'read': slope(rows, lambda r: r['read_s']),
      'read_unverified': slope(rows, lambda r: r['read_unverified_s'])}
  return {
      'artifact': manifest.id, 'end': end, 'block': fields.block,
      'trained_for': model.config.max_context,
      'layout': dataclasses.asdict(layout), 'rows': rows,
      'global_bytes_in_memory': bytes_on_device(
          model, config_lib.GLOBAL, end),
      'device_kv_bytes': sorted(devices),
      'device_kv_constant': len(devices) == 1,
      'slope_s_per_position': slopes,
      'slope_step_to_read': slopes['step_store'] / slopes['read'],
      'audit': dataclasses.asdict(audited) | {
          'blocks': chosen, 'seconds': audit_s},
      'equal': (all(row['equal'] for row in rows) and len(devices) == 1
                and audited.ok and audited.blocks_checked > 0
                and not audited.blocks_not_auditable),
  }


def quick_artifact(model: engine.Model, folder: str) -> Store:
  """Deposits what a quick run measures, under the name 'long'."""
  store = Store(os.path.join(folder, 'long'))
  depositing.deposit(
      model, store, tokens_of(model, None, QUICK_LONG), name='long',
      streaming=streaming_lib.Streaming())
  return store


def show_equal(rows: Sequence[dict[str, Any]]) -> None:
  """Prints the comparison for people."""
  print(f'{"tokens":>8} {"device KV":>10} {"in memory":>10} {"ids":>5}'
        f' {"resumed":>8} {"SHA-256":>9} {"argmax":>9} {"max KL":>7}'
        f' {"greedy":>9} {"from store":>11}')
  for row in rows:
    found = row['verify']
    count = found['continuations']
    print(f'{row["length"]:>8} {memory.human(row["device_kv_bytes"]):>10}'
          f' {memory.human(row["memory_kv_bytes"]):>10}'
          f' {"equal" if row["ids_equal"] else "DIFFER":>5}'
          f' {row["tokens_resumed"]:>8}'
          f' {found["sha256_equal"]:>3} of {count:<2}'
          f' {found["argmax_agree"]:>3} of {count:<2} {found["max_kl"]:>7g}'
          f' {found["greedy_tokens_equal"]:>3} of {found["greedy_tokens"]:<2}'
          f' {memory.human(row["store_bytes_read"]):>11}')


def show_long(report: dict[str, Any]) -> None:
  """Prints the measurement for people."""
  print(f'{"positions":>10} {"device KV":>10} {"host: ms":>9} {"store: ms":>10}'
        f' {"waited":>8} {"read: ms":>9} {"unchecked":>10} {"step/read":>10}'
        f' {"read a step":>12}')
  for row in report['rows']:
    ratio = row['step_to_read']
    print(f'{row["length"]:>10}'
          f' {memory.human(row["store"]["device_kv_bytes"]):>10}'
          f' {1000 * row["host"]["step_s"]:>9.1f}'
          f' {1000 * row["store"]["step_s"]:>10.1f}'
          f' {1000 * row["store"]["wait_s_a_step"]:>8.1f}'
          f' {1000 * row["read_s"]:>9.1f}'
          f' {1000 * row["read_unverified_s"]:>10.1f}'
          f' {"-" if ratio is None else format(ratio, ".2f"):>10}'
          f' {memory.human(row["store"]["store_bytes_a_step"]):>12}')
  slopes = report['slope_s_per_position']
  print('slope, microseconds a position: '
        + ', '.join(f'{name} {1e6 * value:.3f}'
                    for name, value in slopes.items())
        + f'; step from the store / read {report["slope_step_to_read"]:.2f}')
  audited = report['audit']
  print(f'audit: {audited["blocks_equal"]} of {audited["blocks_checked"]} parts'
        f' of {len(audited["blocks"])} blocks equal')


def arguments() -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('modes', nargs='+', choices=MODES)
  parser.add_argument('--model', default='gemma3-270m')
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--out', type=pathlib.Path, help='JSON file to write')
  parser.add_argument('--quick', action='store_true',
                      help='tiny model and short texts, for a test')
  parser.add_argument('--tokens_file', help='equal: ids, a JSON list; a text of'
                      ' the package, over and over, by default')
  parser.add_argument('--lengths', default='8192,16384', help='equal: tokens')
  parser.add_argument('--continuations', type=int, default=50,
                      help='equal: tails to compare')
  parser.add_argument('--work', help='equal: directory for its stores, which'
                      ' are removed; a temporary one by default')
  parser.add_argument('--die_in', help=argparse.SUPPRESS)
  parser.add_argument('--store', help='long: the store')
  parser.add_argument('--artifact', help='long: id, prefix or name')
  parser.add_argument('--device_kv_bytes', help='long: such as 48MB; what makes'
                      ' steps fast by default')
  parser.add_argument('--first', type=int, default=8192,
                      help='long: shortest prefix, doubled up to the end')
  parser.add_argument('--steps', type=int, default=8,
                      help='long: decode steps, of which the median counts')
  parser.add_argument('--reads', type=int, default=5,
                      help='long: plain reads, of which the median counts')
  parser.add_argument('--audit_blocks', type=int, default=20)
  parser.add_argument('--seed', type=int, default=0, help='long: of the blocks')
  first, _ = parser.parse_known_args()
  if first.quick:
    parser.set_defaults(**QUICK)
  args = parser.parse_args()
  args.lengths = [int(part) for part in args.lengths.split(',')]
  if args.device_kv_bytes is not None:
    try:
      args.device_kv_bytes = memory.parse_bytes(
          args.device_kv_bytes, 'device_kv_bytes')
    except errors.UsageError as e:
      parser.error(str(e))
  if 'long' in args.modes and not args.quick and not (
      args.store and args.artifact):
    parser.error('long: expected --store and --artifact of a deposit; make one'
                 ' with `kvgraft deposit --stream`')
  least = {'lengths': 2, 'continuations': 1, 'first': 2, 'steps': 1, 'reads': 1,
           'audit_blocks': 1}
  for name, bound in least.items():
    values = getattr(args, name)
    for value in values if isinstance(values, list) else [values]:
      if value < bound:
        parser.error(f'--{name}: expected at least {bound}, found {value}')
  return args


def main() -> int:
  """Runs the modes; returns the exit code."""
  args = arguments()
  if args.die_in:
    die_at_half(args)
    return 1
  began, load = time.monotonic(), os.getloadavg()
  model = engine.load_model(
      args.model, dtype=args.dtype, allow_beyond_trained='long' in args.modes)
  report: dict[str, Any] = {
      'model': args.model, 'dtype': args.dtype,
      'profile': model.profile.fingerprint,
      'class': numerics.class_fingerprint(model.numerics_class),
      'environment': dict(model.profile.environment),
      'python': sys.version.split()[0], 'kvgraft_jax': kvgraft_jax.__version__,
      'text_sha256': None,
  }
  with tempfile.TemporaryDirectory(
      prefix='kvgraft-bench-', dir=args.work) as folder:
    if 'equal' in args.modes:
      report['text_sha256'] = hashing.tokens_sha256(
          tokens_of(model, args.tokens_file, max(args.lengths)))
      report['equal_runs'] = [
          compare(model, args, length, folder) for length in args.lengths]
      show_equal(report['equal_runs'])
    if 'long' in args.modes:
      if args.store:
        store = Store(args.store, create=False)
        ref = args.artifact
      else:
        store, ref = quick_artifact(model, folder), 'long'
      report['long'] = measure_long(model, args, store, ref)
      show_long(report['long'])
  parts = [*report.get('equal_runs', ()), *filter(None, [report.get('long')])]
  report |= {
      'equal': all(part['equal'] for part in parts),
      'elapsed_s': time.monotonic() - began,
      'load_before': load, 'load_after': os.getloadavg(),
  }
  line = json.dumps(report, sort_keys=True)
  if args.out:
    args.out.write_text(line + '\n', encoding='utf-8')
  print(line)
  return 0 if report['equal'] else 1


if __name__ == '__main__':
  try:
    sys.exit(main())
  except errors.KvgraftError as e:
    print(f'bench_stream: {e}', file=sys.stderr)
    sys.exit(e.exit_code)
