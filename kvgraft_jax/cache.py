"""The KV cache: bit patterns of K and V, one stacked array per layer kind.

K and V are held as unsigned integers, not floats: XLA:CPU turns an update of
a bfloat16 array into a conversion of the whole array to float32 and back.

Global layers: slot = position. Sliding layers: a ring of whole pages, slot =
position mod ring, between two margins that are never read. What a slot holds
is decided by positions alone; the mask never looks at slots.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import math

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import config as config_lib
from kvgraft_jax import numerics

BITS = {'bfloat16': np.uint16, 'float32': np.uint32}


@flax.struct.dataclass
class KVCache:
  """Keys and values of B sequences, as bit patterns.

  Attributes:
    k: kind -> uint16 or uint32 [L_kind, B, S_kind, K, H], after rotary.
    v: same shapes.
    scalars: float32 [] leaves that must reach a program at run time, among
      them `one`, the seal (see `layers`).
  """

  k: dict[str, jax.Array]
  v: dict[str, jax.Array]
  scalars: dict[str, jax.Array]

  @property
  def batch(self) -> int:
    """Number of sequences."""
    return self.k[config_lib.GLOBAL].shape[1]

  @property
  def capacity(self) -> int:
    """Positions that the global layers can hold."""
    return self.k[config_lib.GLOBAL].shape[2]

  @property
  def nbytes(self) -> int:
    """Bytes of K and V on the device."""
    return sum(a.nbytes for d in (self.k, self.v) for a in d.values())


def round_up(value: int, multiple: int) -> int:
  """Returns the smallest multiple of `multiple` that is >= `value`."""
  return -(-value // multiple) * multiple


def ring_size(window: int, profile: numerics.Profile) -> int:
  """Returns slots of a sliding layer's ring, for every step size <= chunk.

  A step of R rows needs the window - 1 positions in front of its first row
  beside its own R; whole pages, so that a page never wraps.
  """
  return round_up(window + profile.chunk - 1, profile.page)


def slots_for(
    config: config_lib.ModelConfig, profile: numerics.Profile, positions: int
) -> int:
  """Returns the capacity that a context of `positions` is given.

  Few sizes, so that few programs are compiled; up to the length that the model
  was trained for at most what that takes, a padded chunk included.
  """
  slots = 8 * profile.chunk
  while slots < positions + profile.chunk:
    slots *= 2
  most = round_up(config.max_context + profile.chunk, profile.page)
  return slots if positions + profile.chunk > most else min(slots, most)


def shapes(
    config: config_lib.ModelConfig, profile: numerics.Profile, batch: int,
    capacity: int,
) -> dict[str, tuple[int, ...]]:
  """Returns kind -> shape [L_kind, B, S_kind, K, H].

  S_kind of a sliding kind is margin + ring + margin: the margins, `chunk`
  slots each, take what a step writes past either end of the ring.
  """
  result: dict[str, tuple[int, ...]] = {}
  for kind in config_lib.KINDS:
    spec = config.spec(kind)
    slots = round_up(capacity, profile.page)
    if spec.window is not None:
      slots = ring_size(spec.window, profile) + 2 * profile.chunk
    result[kind] = (len(config.kind_layers(kind)), batch, slots,
                    spec.kv_heads, spec.head_dim)
  return result


def bytes_at(
    config: config_lib.ModelConfig, profile: numerics.Profile, capacity: int
) -> int:
  """Returns bytes of the cache of one sequence with so many global slots."""
  size = 2 * np.dtype(BITS[profile.dtype]).itemsize
  made = shapes(config, profile, 1, capacity)
  return size * sum(math.prod(shape) for shape in made.values())


def token_bytes(config: config_lib.ModelConfig, dtype: str) -> dict[str, int]:
  """Returns kind -> bytes of one token's K and V in all layers that own one."""
  size = 2 * np.dtype(BITS[dtype]).itemsize
  return {
      kind: len(config.kind_layers(kind)) * size * config.spec(kind).kv_heads
      * config.spec(kind).head_dim for kind in config_lib.KINDS}


def slots_at(
    positions: np.ndarray, window: int | None, slots: int, chunk: int
) -> np.ndarray:
  """Returns the slots of positions in an array of `slots` (see `shapes`)."""
  if window is None:
    return positions
  return chunk + positions % (slots - 2 * chunk)


def is_whole(cache: KVCache | None) -> bool:
  """Returns whether no array was given away and its successor lost."""
  return not any(x.is_deleted() for x in jax.tree.leaves(cache)
                 if isinstance(x, jax.Array))


def visible_rows(
    cache: KVCache, config: config_lib.ModelConfig, chunk: int, done: int,
    b: int = 0, kinds: Iterable[str] = config_lib.KINDS,
) -> Iterator[np.ndarray]:
  """Yields what a continuation of `done` positions sees of K and V, by kind.

  Each is a host array, unsigned [L, positions, K, H], of sequence `b`.
  """
  for kind in kinds:
    window = config.spec(kind).window
    positions = np.arange(max(0, done - (window or done)), done)
    for side in (cache.k, cache.v):
      array = np.asarray(side[kind])[:, b]
      yield np.ascontiguousarray(
          array[:, slots_at(positions, window, array.shape[1], chunk)])


def empty(
    config: config_lib.ModelConfig, profile: numerics.Profile, *, batch: int,
    capacity: int, scalars: Mapping[str, np.ndarray | jax.Array],
) -> KVCache:
  """Returns a cache of zeros for `batch` sequences of up to `capacity`."""
  bits = BITS[profile.dtype]
  made = shapes(config, profile, batch, capacity)
  return KVCache(
      k={kind: jnp.zeros(shape, bits) for kind, shape in made.items()},
      v={kind: jnp.zeros(shape, bits) for kind, shape in made.items()},
      scalars={name: jnp.asarray(x) for name, x in scalars.items()},
  )


def to_bits(x: jax.Array, dtype: str) -> jax.Array:
  """Rounds float32 `x` to `dtype` and returns its bit pattern."""
  return lax.bitcast_convert_type(x.astype(dtype), BITS[dtype])


def from_bits(x: jax.Array, dtype: str) -> jax.Array:
  """Returns the floats of `dtype` whose bit patterns are `x`."""
  return lax.bitcast_convert_type(x, jnp.dtype(dtype))


def write_rows(
    cache: jax.Array, rows: jax.Array, layer: jax.Array | int, b: int,
    start: jax.Array,
    margin: int,
) -> jax.Array:
  """Writes R rows at positions start.. of one layer and sequence.

  Args:
    cache: unsigned [L, B, S, K, H].
    rows: same type, [R, K, H].
    layer: row of `cache`.
    b: sequence.
    start: int32 [], first position. For a global layer the caller has checked
      start + R <= S (`dynamic_update_slice` would silently move the write).
    margin: 0 for a global layer; for a ring the slots in front of and behind
      it (see `shapes`), at least R.

  Returns:
    The updated array, in place where it is donated.
  """
  rows = rows[None, None]
  if not margin:
    return lax.dynamic_update_slice(cache, rows, (layer, b, start, 0, 0))
  ring = cache.shape[2] - 2 * margin
  slot = lax.rem(start, ring)
  # Rows past the ring's end spill into the rear margin; a second write one
  # ring earlier puts them where they belong, and all others into the front
  # margin. Two blind writes, because reading what is there first would make
  # XLA copy the whole array.
  cache = lax.dynamic_update_slice(
      cache, rows, (layer, b, margin + slot, 0, 0))
  early = jnp.maximum(margin + slot - ring, 0)
  return lax.dynamic_update_slice(cache, rows, (layer, b, early, 0, 0))


def read_page(
    cache: jax.Array, layer: jax.Array | int, b: int,
    page_number: jax.Array, page: int, dtype: str, margin: int,
) -> jax.Array:
  """Returns the page with absolute number `page_number`, float [P, K, H]."""
  _, _, slots, heads, dim = cache.shape
  pages = (slots - 2 * margin) // page
  slot = margin + lax.rem(page_number, pages) * page
  bits = lax.dynamic_slice(
      cache, (layer, b, slot, 0, 0), (1, 1, page, heads, dim))
  return from_bits(bits[0, 0], dtype)
