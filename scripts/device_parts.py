"""The parts of check_device.py, each run in a process of its own.

A part gets its order as one JSON argument and rewrites its results after every
item, so that what was measured survives whatever ends the process. Only one
process holds the device at a time.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import hashlib
import json
import os
import resource
import sys
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import kvgraft_jax
from kvgraft_jax import attention
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import layers
from kvgraft_jax import numerics
from kvgraft_jax import programs as programs_lib

ROWS = (1, 4, 16, 64, 128, 256, 512)
SLICES = (1, 2, 4, 8)
DECODE = 32


class Results:
  """Items of sections, kept on disk; runs an item only if time allows.

  Attributes:
    order: what the part was asked to do.
    data: everything so far.
  """

  def __init__(self, order: dict[str, Any]):
    self.order = order
    self.data: dict[str, Any] = {
        'sections': {}, 'skipped': {}, 'errors': {}, 'seconds': {}}

  def run(
      self, section: str, item: str, need_s: float, call: Callable[[], Any]
  ) -> Any:
    """Runs an item and returns its value; None if skipped or failed."""
    left, name = self.order['deadline'] - time.time(), f'{section}.{item}'
    value, began = None, time.perf_counter()
    if left < need_s:
      self.data['skipped'][name] = (
          f'needs about {need_s:.0f} s, {max(left, 0):.0f} s left')
    else:
      try:
        value = call()
      except Exception as e:  # pylint: disable=broad-except
        text = f'{type(e).__name__}: {e}'
        self.data['errors'][name] = ' '.join(text.split())[:600]
      self.data['seconds'][name] = round(time.perf_counter() - began, 3)
    self.data['sections'].setdefault(section, {})[item] = value
    self.save()
    return value

  def save(self) -> None:
    """Rewrites the part's file, whole or not at all."""
    path = self.order['out']
    with open(path + '.new', 'w', encoding='utf-8') as f:
      json.dump(self.data, f)
    os.replace(path + '.new', path)


def profile(results: Results) -> None:
  """Section 1: the device, every factor, and which options are accepted."""
  def device():
    it = jax.devices()[0]
    stats = it.memory_stats() or {}
    return {
        'platform': it.platform, 'kind': it.device_kind,
        'count': jax.device_count(), 'cpus': os.cpu_count(),
        'compute_capability': getattr(it, 'compute_capability', None),
        'memory_bytes': stats.get('bytes_limit'),
        'python': sys.version.split()[0], 'jax': jax.__version__,
    }

  def options(made):
    found = {}
    for name, value in made.compiler_options:
      try:
        jax.jit(jnp.sin, compiler_options={name: value}).lower(
            np.ones(8, np.float32)).compile()
        found[name] = 'accepted'
      except Exception as e:  # pylint: disable=broad-except
        found[name] = str(e).splitlines()[0][:200]
    return found

  results.run('profile', 'device', 0, device)
  for dtype in numerics.DTYPES:
    made = numerics.default_profile(dtype)
    results.run('profile', dtype, 0, lambda made=made: {
        'fingerprint': made.fingerprint, 'factors': made.factors()})
  results.run('profile', 'options', 0, lambda: options(made))


# Section 2.


def _products(config: config_lib.ModelConfig, most: int | None):
  """Returns name -> (inputs, outputs) of the products with weights."""
  n, k, dim = config.num_heads, config.full.kv_heads, config.full.head_dim
  found = {
      'qkv': (config.width, (n + 2 * k) * dim),
      'attn_vec': (n * dim, config.width),
      'gating': (config.width, 2 * config.hidden),
      'linear': (config.hidden, config.width),
      'head': (config.width, config.vocab_size),
  }
  return {name: (i, min(o, most or o)) for name, (i, o) in found.items()}


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
  return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def _compare(outputs, row_axis: int) -> dict[str, Any]:
  """Returns which row counts have the bits of the 128 and 512 row products.

  Args:
    outputs: (rows, parts) -> host array; its columns are the first 1/parts.
    row_axis: axis of the rows; they may stand for several (query heads).
  """
  result = {}
  for base in (128, 512):
    if (base, 1) not in outputs:
      continue
    equal: dict[str, list[int]] = {}
    for (rows, parts), out in sorted(outputs.items()):
      per_row = out.shape[row_axis] // rows
      count = min(rows, base) * per_row
      want = np.take(outputs[base, 1], range(count), row_axis)
      have = np.take(out, range(count), row_axis)
      if _equal(np.ascontiguousarray(have),
                np.ascontiguousarray(want[..., :out.shape[-1]])):
        equal.setdefault(str(parts), []).append(rows)
      else:
        equal.setdefault(str(parts), [])
    result[f'equal_{base}'] = equal
  return result


def _measure(function, inputs, options) -> tuple[dict, dict[str, float]]:
  """Compiles all cases side by side, runs them; returns outputs and ms."""
  def build(args):
    return jax.jit(function, compiler_options=options).lower(*args).compile()

  with futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    compiled = dict(zip(inputs, pool.map(build, inputs.values())))
  outputs, times = {}, {}
  for case, program in compiled.items():
    args = jax.device_put(inputs[case])
    outputs[case] = np.asarray(program(*args))
    if case[1] == 1:
      jax.block_until_ready(program(*args))
      began = time.perf_counter()
      out = None
      for _ in range(5):
        out = program(*args)
      jax.block_until_ready(out)
      times[str(case[0])] = round((time.perf_counter() - began) * 200, 4)
  return outputs, times


def _table_entry(config, made, name, shape):
  inner, outer = shape
  options = dict(made.compiler_options)
  rng = np.random.Generator(np.random.PCG64(1))
  x = rng.standard_normal((ROWS[-1], inner), np.float32).astype(jnp.bfloat16)
  w = jax.jit(
      lambda key: (jax.random.normal(key, (outer, inner)) * inner**-0.5
                   ).astype(jnp.bfloat16))(jax.random.key(0))
  parts = {s: w[:outer // s] for s in SLICES}
  inputs = {(m, s): (x[:m], parts[s]) for m in ROWS for s in SLICES}
  outputs, times = _measure(layers.matmul, inputs, options)
  return {'in': inner, 'out': outer, 'ms': times} | _compare(outputs, 0)


def _attention_entry(config, made):
  """The same for scores and weighted values of one page."""
  spec, page = config.full, made.page
  groups = config.num_heads // spec.kv_heads
  rng = np.random.Generator(np.random.PCG64(2))

  def normal(*shape):
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)

  most = min(attention.ROW_BLOCK, ROWS[-1])
  q = normal(spec.kv_heads, most * groups, spec.head_dim)
  q = q * np.asarray(spec.head_dim**-0.5, q.dtype)
  k, v = (normal(page, spec.kv_heads, spec.head_dim) for _ in 'kv')

  def partial(q, k, v, mask):
    _, total, mixed = attention.page_partial(
        q, k, v, mask, made.heads == 'unrolled')
    return jnp.concatenate([lax.expand_dims(total[..., 0], [2]), mixed], -1)

  inputs = {(m, 1): (q[:, :m * groups], k, v, np.ones((m, page), bool))
            for m in ROWS if m <= most}
  outputs, times = _measure(partial, inputs, dict(made.compiler_options))
  return {'in': spec.head_dim, 'out': page, 'ms': times} | _compare(outputs, 1)


def matmuls(results: Results) -> None:
  """Section 2: every matmul shape against row counts and column slices."""
  made = numerics.default_profile('bfloat16')
  need = 5.0
  for preset in results.order['presets']:
    config = config_lib.PRESETS[preset]
    cases = {
        name: lambda c=config, n=name, s=shape: _table_entry(c, made, n, s)
        for name, shape in _products(config, results.order['most']).items()}
    cases['attention'] = lambda c=config: _attention_entry(c, made)
    for name, call in cases.items():
      began = time.perf_counter()
      results.run('matmuls', f'{preset}.{name}', need, call)
      need = max(2.0, 1.5 * (time.perf_counter() - began))


# Sections 3 to 7.


def _tokens(model: engine.Model, count: int) -> list[int]:
  rng = np.random.Generator(np.random.PCG64(20260714))
  return rng.integers(5, model.config.vocab_size, size=count).tolist()


def _hidden(
    model: engine.Model, programs: programs_lib.Programs, rows: int,
    capacity: int, count: int,
) -> tuple[np.ndarray, float]:
  """Returns hidden rows [count, D] of a run from nothing, and its seconds."""
  programs.step(rows, 1, capacity)
  cache = programs.empty_cache(1, capacity)
  tokens = np.zeros(-(-count // rows) * rows, np.int32)
  tokens[:count] = _tokens(model, count)
  parts, began = [], time.perf_counter()
  for at in range(0, len(tokens), rows):
    out, cache = programs.run_step(
        model.params, cache, tokens[None, at:at + rows],
        np.asarray([at], np.int32))
    parts.append(out[0])
  jax.block_until_ready(parts)
  elapsed = time.perf_counter() - began
  return np.concatenate([np.asarray(p) for p in parts])[:count], elapsed


def _load(results: Results, section: str) -> engine.Model | None:
  loaded = []

  def load():
    began = time.perf_counter()
    model = engine.load_model(results.order['model'], self_test=False)
    jax.block_until_ready(model.params)
    loaded.append(model)
    return {'seconds': time.perf_counter() - began,
            'fingerprint': model.fingerprint,
            'layers': len(model.config.layers),
            'weights_bytes': sum(
                x.nbytes for x in jax.tree.leaves(model.params)),
            'chunk': model.profile.chunk, 'tile': model.profile.tile}

  results.run(section, 'model', results.order['load_s'], load)
  return loaded[0] if loaded else None


def first(results: Results) -> None:
  """Equality of schedules and runs, the self-test, and the deposits."""
  model = _load(results, 'equality')
  if model is None:
    return
  base, scale = model.profile, len(model.config.layers) / 26
  lengths, count = results.order['lengths'], results.order['tokens']
  capacity = model.slots_for(lengths[0])

  def fresh(made):
    return programs_lib.Programs(model.config, made, model.params)

  wide = dataclasses.replace(base, chunk=4 * base.chunk)
  tile = min(results.order['tile'] or 16, base.chunk // 2)
  name_of_base = f'chunk_{base.chunk}'
  cases = {
      name_of_base: (model.programs, base.chunk),
      f'chunk_{wide.chunk}': (fresh(wide), wide.chunk),
      f'tile_{tile}': (fresh(base), tile),
  }

  def build(case):
    programs, rows, slots = case
    began = time.perf_counter()
    programs.step(rows, 1, slots)
    return round(time.perf_counter() - began, 2)

  def compile_all():
    # Side by side into the persistent cache, from which all others read.
    wanted = {n: (made, rows, capacity) for n, (made, rows) in cases.items()}
    wanted |= {f'capacity_{slots}': (fresh(base), base.chunk, slots)
               for slots in {model.slots_for(n) for n in lengths} - {capacity}}
    with futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
      return dict(zip(wanted, pool.map(build, wanted.values())))

  results.run('equality', 'compile_s', 20 * scale, compile_all)
  spent, kept = 0.0, {}
  for name, (programs, rows) in cases.items():
    def compare(name=name, programs=programs, rows=rows):
      _hidden(model, programs, rows, capacity, count)
      hidden, elapsed = _hidden(model, programs, rows, capacity, count)
      kept[name] = hidden
      want = kept.get(name_of_base, hidden)
      same = (hidden.view(np.uint32) == want.view(np.uint32)).all(axis=-1)
      return {
          'equal': bool(same.all()), 'rows_equal': int(same.sum()),
          'rows': count, 'max_abs': float(np.abs(hidden - want).max()),
          'sha256': hashlib.sha256(hidden.tobytes()).hexdigest(),
          'tokens_s': count / elapsed,
          'finite': bool(np.isfinite(hidden).all()),
      }

    began = time.perf_counter()
    results.run('equality', name, max(3 * scale, spent), compare)
    spent = 1.5 * (time.perf_counter() - began)
    if name == name_of_base and name in kept:
      def again(want=kept[name], programs=programs, rows=rows):
        return all(
            _equal(_hidden(model, programs, rows, capacity, count)[0], want)
            for _ in range(3))
      results.run('repeat', 'run_to_run', spent, again)
  tested = results.run(
      'equality', 'self_test', 20, lambda: model.self_test().to_json())
  if tested is None:
    return
  store = kvgraft_jax.Store(results.order['store'])
  spent = 5 * scale
  for length in lengths:
    def deposit(length=length):
      began = time.perf_counter()
      made = kvgraft_jax.deposit(
          model, store, _tokens(model, length), name=f'n{length}')
      return {'seconds': time.perf_counter() - began, 'id': made.id,
              'bytes': made.manifest.nbytes, 'computed': made.tokens_computed}
    began = time.perf_counter()
    results.run('graft', f'deposit_{length}', spent, deposit)
    spent = 4 * (time.perf_counter() - began)


def second(results: Results) -> None:
  """The same in another process: equality, verify, speed."""
  model = _load(results, 'speed')
  if model is None:
    return
  base, scale = model.profile, len(model.config.layers) / 26
  capacity = model.slots_for(results.order['lengths'][0])
  expected = results.order['expected']

  def process_to_process():
    hidden, _ = _hidden(model, model.programs, base.chunk, capacity,
                        results.order['tokens'])
    return hashlib.sha256(hidden.tobytes()).hexdigest() == expected

  if expected:
    results.run('repeat', 'process_to_process', 10 * scale, process_to_process)
  tested = results.run('graft', 'exact', 5 * scale,
                       lambda: model.self_test().exact)
  if tested is None:
    return
  store = kvgraft_jax.Store(results.order['store'])
  # Where the class cannot promise bits, measure what they are all the same.
  mode = 'fail' if tested else 'inexact'
  names = store.names()
  lengths = [n for n in results.order['lengths'] if f'n{n}' in names]
  spent = 10 * scale
  for length in lengths:
    def check(length=length):
      report = kvgraft_jax.verify(
          model, store, f'n{length}', n_continuations=10, on_mismatch=mode)
      return dataclasses.asdict(report) | {'ok': report.ok}
    began = time.perf_counter()
    results.run('graft', f'verify_{length}', spent, check)
    spent = 2.5 * (time.perf_counter() - began)

  def timed(call):
    began = time.perf_counter()
    value = call()
    jax.block_until_ready(value.cache)
    return value, time.perf_counter() - began

  for length in lengths:
    def speed(length=length):
      tokens = _tokens(model, length)
      fresh, prefill = timed(lambda: model.prefill(tokens, record=False))
      fresh.generate(2, stop_ids=())
      began = time.perf_counter()
      fresh.generate(DECODE, stop_ids=())
      decode = (time.perf_counter() - began) / DECODE
      del fresh
      restores = []
      for _ in range(3):
        context, elapsed = timed(lambda: kvgraft_jax.graft(
            model, store, f'n{length}', on_mismatch=mode, record=False))
        restores.append(elapsed)
      nbytes = context.nbytes
      began = time.perf_counter()
      context.extend(tokens[:1]).logits()
      return {'prefill_tokens_s': length / prefill,
              'decode_tokens_s': 1 / decode,
              'restore_s': sorted(restores)[1], 'cache_bytes': nbytes,
              'first_token_s': time.perf_counter() - began}
    results.run('speed', f'tokens_{length}', 5 * scale, speed)

  def peak():
    stats = jax.devices()[0].memory_stats() or {}
    return {'device_bytes': stats.get('peak_bytes_in_use'),
            'host_bytes': 1024 * resource.getrusage(
                resource.RUSAGE_SELF).ru_maxrss}
  results.run('speed', 'peak_memory', 0, peak)


PARTS = {'profile': profile, 'matmuls': matmuls, 'first': first,
         'second': second}

if __name__ == '__main__':
  the_order = json.loads(sys.argv[1])
  # The same place for every part, so that the next one finds it compiled.
  programs_lib.enable_compilation_cache()
  PARTS[the_order['part']](Results(the_order))
