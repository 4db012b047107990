"""The programs of a streamed step: pieces of layers between global attentions.

Cut where attention over cold pages begins and ends. They call what the step in
memory calls, and every product that feeds an addition is sealed (see
`layers`), so cutting changes no bit; the self-test measures that.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from kvgraft_jax import attention
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics


@dataclasses.dataclass(frozen=True)
class Segment:
  """What runs between two attentions over cold pages.

  Attributes:
    opens: the global layer whose attention it ends; None for the first.
    whole: sliding layers that it runs.
    closes: the global layer whose queries it makes; None for the last.
  """

  opens: int | None
  whole: tuple[int, ...]
  closes: int | None

  @property
  def layers(self) -> tuple[int, ...]:
    """All layers of which it runs something."""
    ends = [() if i is None else (i,) for i in (self.opens, self.closes)]
    return ends[0] + self.whole + ends[1]


def segments(
    config: config_lib.ModelConfig, numbers: range
) -> list[Segment]:
  """Cuts successive layers at each global attention."""
  result: list[Segment] = []
  opens: int | None = None
  whole: list[int] = []
  for i in numbers:
    if config.layers[i] == config_lib.GLOBAL:
      result.append(Segment(opens, tuple(whole), i))
      opens, whole = i, []
    else:
      whole.append(i)
  return result + [Segment(opens, tuple(whole), None)]


def run_segment(
    params: Sequence[model_lib.Params], carry: dict[str, Any],
    cache: cache_lib.KVCache, where: dict[str, Any], *, segment: Segment,
    numbers: range, config: config_lib.ModelConfig, profile: numerics.Profile,
) -> tuple[dict[str, Any], cache_lib.KVCache]:
  """Runs one segment.

  Args:
    params: of its layers, in order.
    carry: of the segment in front: `x` float32 [R, D]; `q`, and `state`, which
      has seen the cold pages, where it opens; `inputs` [R, n, P] where the
      model has per-layer inputs. Of the first: `embedder`, and `x` unless it
      begins with the tokens.
    cache: rings, and the hot positions as the global layers' slots.
    where: `tokens` int32 [1, R], `starts` int32 [1], `base` int32 [] (position
      of slot 0), `rope` as in `model.step`, `rows` int32 [n] and `inputs`
      int32 [n]: of each layer its row in the caches and in `inputs`.
    segment: what to run; the layers' numbers matter only through what they
      have in common with those of other segments of one shape.
    numbers: all layers of this pass.
    config: architecture.
    profile: numerics.

  Returns:
    What the next segment, or the caller, takes up; and the new cache.
  """
  s, start = cache.scalars, where['starts'][0]
  n_rows = where['tokens'].shape[1]
  k_cache, v_cache = dict(cache.k), dict(cache.v)
  spec, kind = config.spec(config_lib.GLOBAL), config_lib.GLOBAL
  inputs = carry.get('inputs')
  if 'embedder' in carry:
    ids = where['tokens'].reshape(-1)
    embedded = model_lib.embed(carry, ids, s)
    x = carry.get('x', embedded)
    if config.per_layer_dim:
      inputs = model_lib.per_layer_inputs(
          carry, ids, embedded, numbers, config, s)
  else:
    x = carry['x']

  def inputs_of(i):
    if inputs is None:
      return None
    return lax.dynamic_index_in_dim(
        inputs, where['inputs'][i], axis=1, keepdims=False)

  at = 0
  if segment.opens is not None:
    page, base = profile.page, where['base']

    def read(caches, number):
      return tuple(cache_lib.read_page(
          c, where['rows'][0], 0, number - base // page, page, profile.dtype, 0)
                   for c in caches)

    state, (k_cache[kind], v_cache[kind]) = attention.fold(
        carry['q'], carry['state'], (k_cache[kind], v_cache[kind]),
        start + jnp.arange(n_rows, dtype=jnp.int32), base // page,
        (start + n_rows - 1) // page + 1, read, window=None, profile=profile,
        one=s['one'])
    x = model_lib.finish_layer(
        params[0], x, attention.by_row(attention.finish(state), n_rows),
        inputs_of(0), config, s)
    at = 1
  sliding = config_lib.SLIDING
  for layer in segment.whole:
    x, k_cache[sliding], v_cache[sliding] = model_lib.run_layer(
        params[at], x, k_cache[sliding], v_cache[sliding], where['rows'][at],
        where['starts'], where['rope'], inputs_of(at), s, kind=sliding,
        shared=layer >= config.first_shared, n_batch=1, config=config,
        profile=profile)
    at += 1
  out: dict[str, Any] = {'x': x}
  if segment.closes is not None:
    shared = segment.closes >= config.first_shared
    q, k, v = model_lib.qkv_rows(
        params[at], x, where['rope'], kind, config, s, shared)
    if not shared:
      slot = start - where['base']
      for side, rows in ((k_cache, k), (v_cache, v)):
        side[kind] = cache_lib.write_rows(
            side[kind], cache_lib.to_bits(rows, profile.dtype),
            where['rows'][at], 0, slot, 0)
    out['q'] = attention.by_kv_head(q, spec, profile.dtype)
    out['state'] = attention.empty_state(out['q'])
    if inputs is not None:
      out['inputs'] = inputs
  return out, cache_lib.KVCache(k_cache, v_cache, s)


def fold_group(
    q: jax.Array, state: attention.State, k: jax.Array, v: jax.Array,
    first_page: jax.Array, count: jax.Array, start: jax.Array, one: jax.Array,
    *, groups: int, profile: numerics.Profile,
) -> attention.State:
  """Folds `count` cold pages of one layer into the state of R rows.

  Args:
    q: [K, R * G, H].
    state: of the pages in front.
    k: unsigned [n, K, H], whose first position is first_page * page.
    v: likewise.
    first_page: int32 [], absolute number.
    count: int32 [], pages to fold; what is behind them is not read.
    start: int32 [], position of the first row.
    one: the seal.
    groups: query heads a kv head, G.
    profile: numerics.
  """
  page = profile.page

  def read(caches, number):
    at = (number - first_page) * page
    return tuple(cache_lib.from_bits(
        lax.dynamic_slice_in_dim(c, at, page), profile.dtype) for c in caches)

  n_rows = q.shape[1] // groups
  state, _ = attention.fold(
      q, state, (k, v), start + jnp.arange(n_rows, dtype=jnp.int32),
      first_page, first_page + count, read, window=None, profile=profile,
      one=one)
  return state


def move_down(
    cache: cache_lib.KVCache, pages: jax.Array, *, page: int
) -> cache_lib.KVCache:
  """Moves the hot positions `pages` pages towards slot 0."""
  kind = config_lib.GLOBAL

  def move(array):
    layers, _, slots, heads, dim = array.shape
    size = (layers, 1, page, heads, dim)

    def body(i, array):
      rows = lax.dynamic_slice(array, (0, 0, (i + pages) * page, 0, 0), size)
      return lax.dynamic_update_slice(array, rows, (0, 0, i * page, 0, 0))

    return lax.fori_loop(0, slots // page - pages, body, array)

  return cache_lib.KVCache(
      cache.k | {kind: move(cache.k[kind])},
      cache.v | {kind: move(cache.v[kind])}, cache.scalars)
