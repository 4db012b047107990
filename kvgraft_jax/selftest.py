"""The self-test that decides the numerics class.

It runs one sliding and one global layer of the model (two of each where layers
share keys and values) at its own shapes, with its own weights, through every
schedule, and compares the bits of every hidden row, of the cache and of the
logits. Its recipe is fixed and versioned; what it proves is recorded in every
artifact.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import logging
import os
import pathlib
import time
from typing import Any
import uuid

import jax.numpy as jnp
import numpy as np

from kvgraft_jax import artifact
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics
from kvgraft_jax import paths
from kvgraft_jax import programs as programs_lib
from kvgraft_jax import streaming

VERSION = 2
_LOG = logging.getLogger(__name__)
# A case is a list of steps; each is (rows of the program, valid rows).
Schedule = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Report:
  """What the self-test found.

  Attributes:
    version: of the recipe.
    tokens: positions that every case ran.
    invariances: name -> True (proved), False (refuted) or None (not run).
    digests: case -> SHA-256 over hidden rows, cache bits and logits.
    elapsed_s: how long it took.
  """

  version: int
  tokens: int
  invariances: dict[str, bool | None]
  digests: dict[str, str]
  elapsed_s: float

  @property
  def exact(self) -> bool:
    """Whether equal classes may be promised equal bits."""
    return all(self.invariances.get(n) for n in numerics.REQUIRED)

  def to_json(self) -> dict[str, Any]:
    """Returns the canonical-JSON form (times in milliseconds)."""
    return {
        'version': self.version, 'tokens': self.tokens,
        'invariances': dict(self.invariances), 'digests': dict(self.digests),
        'elapsed_ms': round(self.elapsed_s * 1000),
    }

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> 'Report':
    """Returns the report that `to_json` wrote."""
    return cls(value['version'], value['tokens'], dict(value['invariances']),
               dict(value['digests']), value['elapsed_ms'] / 1000)


def row_ladder(profile: numerics.Profile) -> list[int]:
  """Returns the step sizes that are compared, descending: chunk to tile."""
  chunk = profile.chunk
  sizes = {chunk, chunk // 2, chunk // 4, chunk // 8, 16, 4, profile.tile}
  return sorted((s for s in sizes if 2 <= s <= chunk), reverse=True)


def _even(rows: int, total: int) -> Schedule:
  return [(rows, min(rows, total - at)) for at in range(0, total, rows)]


def _few_layers(config: config_lib.ModelConfig, params: model_lib.Params):
  """Returns config and params of the first layer of each sort.

  Sorts are the kinds, and of each kind the layers that own their keys and
  values and those that share.
  """
  owners = [config.kind_layers(kind)[0] for kind in config_lib.KINDS]
  sharers = [
      config.layers.index(kind, config.first_shared)
      for kind in config_lib.KINDS
      if kind in config.layers[config.first_shared:]]
  picked = owners + sharers
  small = dataclasses.replace(
      config, layers=tuple(config.layers[i] for i in picked),
      shared_layers=len(sharers))
  kept = {k: v for k, v in params.items() if not k.startswith('layer_')}
  kept |= {f'layer_{n}': params[f'layer_{i}'] for n, i in enumerate(picked)}
  if config.per_layer_dim:
    kept['embedder'] = _per_layer_parts(config, kept['embedder'], picked)
  return small, kept


def _per_layer_parts(config, embedder, picked):
  """Returns the embedder with the per-layer parts of the picked layers."""
  size = config.per_layer_dim
  parts = [slice(i * size, (i + 1) * size) for i in picked]
  table = embedder['per_layer_embedding']
  projection = embedder['per_layer_model_projection']['w']
  return dict(
      embedder,
      per_layer_embedding=jnp.concatenate([table[:, p] for p in parts], 1),
      per_layer_model_projection={
          'w': jnp.concatenate([projection[p] for p in parts])})


class _Bench:
  """Runs schedules and digests what they leave."""

  def __init__(self, config, profile, params):
    self.config, self.params = _few_layers(config, params)
    self.programs = programs_lib.Programs(self.config, profile, self.params)
    self.chunk = profile.chunk
    # Past the window and past a chunk, and no multiple of anything.
    window = config.sliding.window or 0
    total = max(profile.chunk, window) + profile.chunk // 2 + 3
    self.capacity = 4 * profile.chunk
    while self.capacity < total + profile.chunk:
      self.capacity *= 2
    rng = np.random.Generator(np.random.PCG64(20260714))
    self.tokens = rng.integers(
        5, config.vocab_size, size=total, dtype=np.int64).astype(np.int32)

  def run(self, schedule: Schedule, capacity: int, pad: int = 0):
    """Returns (hidden [T, D], cache) of the test tokens."""
    cache = self.programs.empty_cache(1, capacity)

    def run(step, starts):
      nonlocal cache
      out, cache = self.programs.run_step(self.params, cache, step, starts)
      return out

    return self._drive(schedule, run, pad), cache

  def _drive(self, schedule: Schedule, run, pad: int = 0) -> np.ndarray:
    """Calls `run` with tokens and start of each step; returns hidden [T, D]."""
    hidden, at = [], 0
    for rows, valid in schedule:
      step = np.full((1, rows), pad, np.int32)
      step[0, :valid] = self.tokens[at:at + valid]
      out = run(step, np.asarray([at], np.int32))
      hidden.append(np.asarray(out[0, :valid]))
      at += valid
    return np.concatenate(hidden)

  def stream(self) -> str:
    """Returns the digest of a streamed run through every size of its steps."""
    profile, total = self.programs.profile, len(self.tokens)
    schedule, left = [], total
    for rows in reversed(streaming.step_rows(profile)):
      # One chunk; of smaller steps enough to let hot positions grow cold.
      count = left if rows == profile.tile else min(left, max(
          rows, left // 2 // rows * rows))
      schedule += _even(rows, count)
      left -= count
    least = streaming.least_bytes(self.config, profile)
    streamed = streaming.Streamed(
        self.programs, streaming.Streaming(least, 1 << 62))

    def run(step, starts):
      streamed.make_room(int(starts[0]), step.shape[1])
      return streamed.run_step(self.params, step, starts)

    hidden = self._drive(schedule, run)
    return self._digest(hidden, streamed.visible_rows(total))

  def digest(self, hidden: np.ndarray, cache, b: int = 0) -> str:
    """Returns SHA-256 over hidden rows, visible cache rows and logits."""
    return self._digest(hidden, cache_lib.visible_rows(
        cache, self.config, self.chunk, len(hidden), b))

  def _digest(self, hidden, visible) -> str:
    sha = hashlib.sha256(hidden.tobytes())
    for rows in visible:
      sha.update(rows.tobytes())
    logits = self.programs.run_head(self.params, hidden[-1:])
    sha.update(logits.tobytes())
    return sha.hexdigest()

  def batch(self, base_hidden: np.ndarray, capacity: int, tile: int) -> bool:
    """Compares four sequences of unequal lengths in one program with alone."""
    total = len(self.tokens)
    lengths = [total, total - 1, total // 2, tile + 1]
    cache = self.programs.empty_cache(4, capacity)
    done = np.zeros(4, np.int32)
    while any(d < n for d, n in zip(done, lengths)):
      step = np.zeros((4, tile), np.int32)
      valid = [min(tile, n - d) for d, n in zip(done, lengths)]
      for b, v in enumerate(valid):
        step[b, :v] = self.tokens[done[b]:done[b] + v]
      out, cache = self.programs.run_step(self.params, cache, step, done)
      rows = np.asarray(out)
      for b, v in enumerate(valid):
        want = base_hidden[done[b]:done[b] + v]
        if v and rows[b, :v].tobytes() != want.tobytes():
          return False
      done = done + np.asarray(valid, np.int32)
    return True

  def head_slots(self, hidden: np.ndarray) -> bool:
    """Compares the head's row 0 with the same row in the last slot."""
    tile = self.programs.profile.tile
    scalars = model_lib.scalars(self.config, self.programs.profile.dtype)
    program = self.programs.head()
    first = np.zeros((tile, hidden.shape[1]), np.float32)
    first[0] = hidden[-1]
    last = hidden[-tile:]
    a = np.asarray(program(self.params, first, scalars))[0]
    b = np.asarray(program(self.params, last, scalars))[-1]
    return a.tobytes() == b.tobytes()


def run(
    config: config_lib.ModelConfig, profile: numerics.Profile,
    params: model_lib.Params, progress=None,
) -> Report:
  """Runs the self-test.

  Args:
    config: the whole model's.
    profile: under test.
    params: the whole model's; a few layers of them are used.
    progress: called with (case, number, count) before each case.
  """
  began = time.monotonic()
  bench = _Bench(config, profile, params)
  total, chunk, tile = len(bench.tokens), profile.chunk, profile.tile
  capacity = bench.capacity
  ladder = row_ladder(profile)
  shifted = [(chunk, chunk // 3), *_even(chunk, total - chunk // 3)]
  cases: dict[str, tuple[Schedule, int, int]] = {
      f'rows_{n}': (_even(n, total), capacity, 0) for n in ladder}
  base = f'rows_{chunk}'
  cases |= {
      'run': (_even(chunk, total), capacity, 0),
      'slot': (shifted, capacity, 0),
      'neighbours': (_even(chunk, total), capacity, 7),
      'capacity': (_even(chunk, total), 2 * capacity, 0),
  }
  digests: dict[str, str] = {}
  base_hidden = np.zeros((0, config.width), np.float32)
  for number, (name, (schedule, slots, pad)) in enumerate(cases.items()):
    if progress:
      progress(name, number, len(cases) + 2)
    hidden, cache = bench.run(schedule, slots, pad)
    digests[name] = bench.digest(hidden, cache)
    if name == base:
      base_hidden = hidden
  if progress:
    progress('stream', len(cases), len(cases) + 2)
  digests['stream'] = bench.stream()
  if progress:
    progress('batch', len(cases) + 1, len(cases) + 2)
  equal = {name: digest == digests[base] for name, digest in digests.items()}
  found: dict[str, bool | None] = {
      'run': equal['run'],
      'chunk': all(equal[f'rows_{n}'] for n in ladder if n * 8 >= chunk),
      'tile': equal[f'rows_{tile}'],
      'slot': equal['slot'] and bench.head_slots(base_hidden),
      'neighbours': equal['neighbours'],
      'batch': bench.batch(base_hidden, capacity, tile),
      'capacity': equal['capacity'],
      'stream': equal['stream'],
      'mesh': None,
  }
  found |= {name: equal[name] for name in digests if name.startswith('rows_')}
  return Report(VERSION, total, found, digests, time.monotonic() - began)


def base_digest(
    config: config_lib.ModelConfig, profile: numerics.Profile,
    params: model_lib.Params,
) -> str:
  """Returns the digest of the case that every other one is compared with."""
  bench = _Bench(config, profile, params)
  schedule = _even(profile.chunk, len(bench.tokens))
  return bench.digest(*bench.run(schedule, bench.capacity))


def load_or_run(
    config: config_lib.ModelConfig, profile: numerics.Profile,
    params: model_lib.Params, progress=None,
) -> Report:
  """Returns the cached report for these shapes and this profile, or runs it."""
  shapes = dict(config.to_json(), layers=[], max_context=0)
  key = hashing.json_sha256('kvgraft.selftest', {
      'version': VERSION, 'shapes': shapes, 'profile': profile.factors()})
  path = paths.cache_dir() / 'selftest' / f'{key}.json'
  report = _load(path, key)
  if report is None:
    _LOG.info('self-test of %s in %s, once on this machine: about a minute,'
              ' some for a large model', config.name, profile.dtype)
    report = run(config, profile, params, progress)
    _keep(path, key, report)
  return report


def _load(path: pathlib.Path, key: str) -> Report | None:
  """Returns a kept report; None unless it is whole and of this key.

  What is exact rests on it, so a report that was altered is not believed.
  """
  try:
    value = artifact.parse_signed(path.read_bytes(), str(path))
    return Report.from_json(value['report']) if value['key'] == key else None
  except (OSError, errors.DamageError, KeyError):
    return None


def _keep(path: pathlib.Path, key: str, report: Report) -> None:
  data = artifact.sign(hashing.canonical_json(
      {'key': key, 'report': report.to_json()}))
  temporary = path.with_name(f'{key}.{uuid.uuid4().hex}')
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      temporary.write_bytes(data)
      os.replace(temporary, path)
    finally:
      temporary.unlink(missing_ok=True)
  except OSError:
    pass  # A read-only cache only costs the next process the same seconds.
