"""How much memory and storage a model needs, by arithmetic alone."""

import dataclasses
import math
import os

import jax

from kvgraft_jax import artifact as artifact_lib
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import memory
from kvgraft_jax import numerics
from kvgraft_jax import rope
from kvgraft_jax import streaming
from kvgraft_jax.checkpoints import huggingface
from kvgraft_jax.checkpoints import resolve
from kvgraft_jax.checkpoints import tree

MODES = (artifact_lib.FULL, artifact_lib.WINDOW)


@dataclasses.dataclass(frozen=True)
class Streamed:
  """What a streamed context needs. All sizes are bytes.

  Attributes:
    device_kv_least: least K and V on the device, however long the context is.
    device_kv_default: what it takes unless told otherwise.
    needed: on the device with that, weights and scratch included.
    needed_least: likewise with the least.
    read_per_step: K and V that a decode step behind the context, just grafted,
      reads: from host memory as far as they may stay there, else from the
      store.
  """

  device_kv_least: int
  device_kv_default: int
  needed: int
  needed_least: int
  read_per_step: int


@dataclasses.dataclass(frozen=True)
class Plan:
  """What one model needs for one context. All sizes are bytes.

  Attributes:
    model: name.
    dtype: of weights, operands and cache.
    context: positions.
    parameters: number of weights.
    weights: on the device.
    kv_per_token: kind -> K and V of one token in the layers of that kind.
    cache_slots: positions that the global layers' arrays are made for.
    cache: K and V on the device, for one sequence.
    scratch: an estimate of what computing takes beside them.
    recorded: sliding rows that a full deposit keeps on the host.
    needed: on the device, to continue a context, grafted or not.
    needed_to_deposit: on the device, to compute and store one.
    artifact: sliding mode -> data files of an artifact of [0, context).
    streamed: the same context, streamed.
  """

  model: str
  dtype: str
  context: int
  parameters: int
  weights: int
  kv_per_token: dict[str, int]
  cache_slots: int
  cache: int
  scratch: int
  recorded: int
  needed: int
  needed_to_deposit: int
  artifact: dict[str, int]
  streamed: Streamed


@dataclasses.dataclass(frozen=True)
class Corpus:
  """A corpus in passages, each an artifact of its own from position 0.

  Attributes:
    tokens: of the corpus.
    passage_tokens: of each passage but the last, which has the rest.
    passages: how many.
    store: sliding mode -> bytes of all data files.
    passage: sliding mode -> bytes of one whole passage.
  """

  tokens: int
  passage_tokens: int
  passages: int
  store: dict[str, int]
  passage: dict[str, int]


def config_of(spec: str) -> config_lib.ModelConfig:
  """Returns the architecture that `spec` names, without reading weights.

  Args:
    spec: a published or tiny size, alone or as in 'random:SIZE:SEED' or
      'SIZE:SEED'; or a checkpoint.

  Raises:
    UsageError: if there is no such model, or its headers are not accepted.
  """
  sizes = config_lib.PRESETS | config_lib.TINY_PRESETS
  name = spec.removeprefix('random:').partition(':')[0]
  if name in sizes:
    return sizes[name]
  if os.path.isdir(spec):
    # A config.json says enough; the weights need not be there.
    found = huggingface.config_of(spec)
    if found is not None:
      return found
  if os.path.exists(spec):
    return resolve.open_source(spec).config
  raise errors.NotFoundError(
      f'model {spec!r}: no such size or checkpoint; give a path, or one of'
      f' {", ".join(sizes)}')


def parameters(config: config_lib.ModelConfig) -> int:
  """Returns the number of weights of the text model."""
  shapes = tree.flatten(tree.param_shapes(config))
  return sum(math.prod(shape) for _, (shape, _) in shapes)


def cache_bytes(
    config: config_lib.ModelConfig, profile: numerics.Profile, positions: int
) -> int:
  """Returns bytes of the cache of one sequence of `positions`."""
  slots = cache_lib.slots_for(config, profile, positions)
  return cache_lib.bytes_at(config, profile, slots)


def needed_bytes(
    config: config_lib.ModelConfig, profile: numerics.Profile, positions: int,
    *, deposit: bool = False,
) -> int:
  """Returns bytes on the device for a context of `positions`.

  Args:
    config: architecture.
    profile: numerics.
    positions: of one sequence.
    deposit: count the rows that a deposit with `sliding='full'` records too,
      where host and device memory are one.
  """
  total = (tree.weight_bytes(config, profile.dtype)
           + memory.scratch_bytes(config, profile.chunk)
           + cache_bytes(config, profile, positions))
  if deposit and jax.default_backend() == 'cpu':
    per_token = cache_lib.token_bytes(config, profile.dtype)
    total += positions * per_token[config_lib.SLIDING]
  return total


def artifact_bytes(
    config: config_lib.ModelConfig, profile: numerics.Profile, end: int,
    sliding: str, start: int = 0, block: int | None = None,
) -> int:
  """Returns bytes of the data files of a deposit of [start, end).

  Args:
    config: architecture.
    profile: numerics.
    end: one past the last position.
    sliding: 'full' or 'window'.
    start: first position; a child's is its parent's length.
    block: positions of a stored block; None for the default.
  """
  fields = artifact_lib.KeyFields(
      model='-', tokenizer='-', template='-', numerics_class='-',
      parent='0' * 64 if start else '', start=start, end=end,
      tokens_sha256='0' * 64, block=block or grafting.default_block(profile),
      sliding=sliding)
  layouts = grafting.layouts(config, profile.dtype)
  return sum(artifact_lib.data_files(fields, layouts).values())


def streamed(
    config: config_lib.ModelConfig, profile: numerics.Profile, positions: int
) -> Streamed:
  """Returns what a streamed context of `positions` needs."""
  least = streaming.least_bytes(config, profile)
  default = streaming.layout(config, profile).device_bytes
  beside = (tree.weight_bytes(config, profile.dtype)
            + memory.scratch_bytes(config, profile.chunk))
  # All pages but the last one are cold behind a graft; a block is read whole.
  cold = (positions - 1) // profile.page * profile.page
  read = min(
      positions, cache_lib.round_up(cold, grafting.default_block(profile)))
  return Streamed(
      least, default, beside + default, beside + least,
      read * cache_lib.token_bytes(config, profile.dtype)[config_lib.GLOBAL])


def most_positions(config: config_lib.ModelConfig, beyond: bool) -> int:
  """Returns the most positions of a context.

  Args:
    config: architecture.
    beyond: let it be longer than the model was trained for.
  """
  return rope.MAX_POSITION if beyond else config.max_context


def _check_length(
    what: str, found: int, config: config_lib.ModelConfig, beyond: bool
) -> None:
  most = most_positions(config, beyond)
  if 0 < found <= most:
    return
  limit = ('the positions that are exact' if beyond
           else f'the context of {config.name}')
  raise errors.CapacityError(
      f'{what}: expected 1 to {most}, {limit}, found {found}; choose fewer'
      + ('' if beyond else ', or --allow_beyond_trained'))


def make(
    config: config_lib.ModelConfig, profile: numerics.Profile,
    context: int | None = None, *, beyond: bool = False,
) -> Plan:
  """Returns the plan of a model for `context` positions.

  Args:
    config: architecture.
    profile: numerics.
    context: positions; None for what the model was trained for.
    beyond: let them be more than that.

  Raises:
    CapacityError: if they are more than may be.
  """
  context = config.max_context if context is None else context
  _check_length('context', context, config, beyond)
  per_token = cache_lib.token_bytes(config, profile.dtype)
  return Plan(
      model=config.name, dtype=profile.dtype, context=context,
      parameters=parameters(config),
      weights=tree.weight_bytes(config, profile.dtype), kv_per_token=per_token,
      cache_slots=cache_lib.slots_for(config, profile, context),
      cache=cache_bytes(config, profile, context),
      scratch=memory.scratch_bytes(config, profile.chunk),
      recorded=per_token[config_lib.SLIDING] * context,
      needed=needed_bytes(config, profile, context),
      needed_to_deposit=needed_bytes(config, profile, context, deposit=True),
      artifact={mode: artifact_bytes(config, profile, context, mode)
                for mode in MODES},
      streamed=streamed(config, profile, context))


def largest_context(
    config: config_lib.ModelConfig, profile: numerics.Profile, available: int,
    *, deposit: bool = False, beyond: bool = False,
) -> int:
  """Returns the most positions that fit into `available` bytes; 0 for none.

  With all keys and values on the device, that is.

  Args:
    config: architecture.
    profile: numerics.
    available: bytes.
    deposit: count what depositing needs beside computing.
    beyond: let them be more than the model was trained for.
  """
  low, high = 0, most_positions(config, beyond)
  while low < high:
    middle = (low + high + 1) // 2
    needed = needed_bytes(config, profile, middle, deposit=deposit)
    low, high = (middle, high) if needed <= available else (low, middle - 1)
  return low


def corpus(
    config: config_lib.ModelConfig, profile: numerics.Profile, tokens: int,
    passage_tokens: int, *, beyond: bool = False,
) -> Corpus:
  """Returns what the store of a corpus takes.

  Args:
    config: architecture.
    profile: numerics.
    tokens: of the corpus.
    passage_tokens: of a passage.
    beyond: let a passage be longer than the model was trained for.

  Raises:
    CapacityError: if a passage is longer than a context may be.
  """
  _check_length('passage_tokens', passage_tokens, config, beyond)
  whole, rest = divmod(tokens, passage_tokens)
  passage, store = {}, {}
  for mode in MODES:
    passage[mode] = artifact_bytes(config, profile, passage_tokens, mode)
    store[mode] = whole * passage[mode]
    if rest:
      store[mode] += artifact_bytes(config, profile, rest, mode)
  return Corpus(tokens, passage_tokens, whole + bool(rest), store, passage)
