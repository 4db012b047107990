"""Numerics profile and class: everything that may fix the bits, as values.

The profile lists every factor. The class is the profile less what the
recorded self-test proved irrelevant; bits are promised only between equal
classes.
"""

from collections.abc import Mapping
import dataclasses
import importlib.metadata
import os
import platform

import jax

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing

# Raised by hand whenever goldens change.
NUMERICS_VERSION = 1

DTYPES = ('bfloat16', 'float32')

# Instruction sets that a compiler or a matmul library chooses kernels by.
_CPU_FEATURES = (
    'sse4_2', 'avx', 'avx2', 'fma', 'f16c', 'avx_vnni', 'avx512f', 'avx512bw',
    'avx512cd', 'avx512dq', 'avx512vl', 'avx512_vnni', 'avx512_bf16',
    'avx512_fp16', 'amx_tile', 'amx_bf16', 'amx_int8', 'asimd', 'asimdhp',
    'asimddp', 'bf16', 'i8mm', 'sve', 'sve2',
)

# Factors that the self-test's invariance of the same name removes from the
# class once it is proven.
_PROVABLE = ('chunk', 'tile')
# Without these no two computations can be promised equal bits. A chunk that is
# not proven stays in the class instead: then all use the same one.
REQUIRED = ('run', 'slot', 'neighbours', 'capacity', 'tile')


@dataclasses.dataclass(frozen=True)
class Profile:
  """How numbers are computed.

  Attributes:
    dtype: of weights, matmul operands and the cache.
    chunk: rows of a prefill step.
    tile: rows of a decode step and of the head.
    page: positions of an attention partial.
    heads: 'unrolled' (one product a kv head) or 'batched'.
    compiler_options: passed to every executable, sorted pairs.
    environment: versions, device and threads, sorted pairs.
    numerics_version: of this package's step programs.
  """

  dtype: str
  chunk: int
  tile: int
  page: int
  heads: str = 'unrolled'
  compiler_options: tuple[tuple[str, bool | int | str], ...] = ()
  environment: tuple[tuple[str, str], ...] = ()
  numerics_version: int = NUMERICS_VERSION

  def __post_init__(self):
    if self.dtype not in DTYPES:
      raise errors.UsageError(
          f'dtype: expected one of {", ".join(DTYPES)}, found {self.dtype!r}')
    for name in ('chunk', 'tile', 'page'):
      value = getattr(self, name)
      if value < 2 or value & (value - 1):
        raise errors.UsageError(
            f'{name}: expected a power of two, at least 2 (a one-row program'
            f' has other bits), found {value}')
    if self.tile > self.chunk:
      raise errors.UsageError(
          f'tile: expected at most the chunk ({self.chunk}), found {self.tile}')

  def factors(self) -> dict[str, str]:
    """Returns every factor by name, in the order in which they are compared."""
    result = {
        'numerics_version': str(self.numerics_version),
        'dtype': self.dtype,
        'page': str(self.page),
        'chunk': str(self.chunk),
        'tile': str(self.tile),
        'heads': self.heads,
        'reductions': 'tree',
        'attention': 'page partials, one at a time, ascending',
    }
    result |= {f'option.{k}': str(v) for k, v in self.compiler_options}
    return result | dict(self.environment)

  @property
  def fingerprint(self) -> str:
    """Hex SHA-256 over every factor."""
    return hashing.json_sha256('kvgraft.profile', self.factors())


def numerics_class(
    profile: Profile, invariances: Mapping[str, bool | None]
) -> dict[str, str]:
  """Returns the factors that are left once proven ones are removed.

  Args:
    profile: of the programs that the self-test ran.
    invariances: name -> True, False or None (not tested), from the self-test.
  """
  return {k: v for k, v in profile.factors().items()
          if k not in _PROVABLE or not invariances.get(k)}


def certain(factors: Mapping[str, str]) -> dict[str, str]:
  """Returns the factors that no self-test can remove from a class."""
  return {k: v for k, v in factors.items() if k not in _PROVABLE}


def class_fingerprint(factors: Mapping[str, str]) -> str:
  """Returns the hex SHA-256 that names a class."""
  return hashing.json_sha256('kvgraft.class', dict(factors))


def first_difference(
    theirs: Mapping[str, str], ours: Mapping[str, str]
) -> tuple[str, str, str] | None:
  """Returns (factor, theirs, ours) of the first differing factor, or None."""
  for name in list(ours) + [n for n in theirs if n not in ours]:
    a, b = theirs.get(name, 'not listed'), ours.get(name, 'not listed')
    if a != b:
      return name, a, b
  return None


def default_profile(
    dtype: str, *, chunk: int | None = None, tile: int | None = None,
    page: int | None = None,
) -> Profile:
  """Returns the profile for the default device of this process.

  On accelerators tile = chunk, since a matmul's bits may depend on its row
  count there; on CPU the self-test shows that they do not from `tile` up.
  """
  backend = jax.default_backend()
  options: dict[str, bool | int | str] = {'xla_allow_excess_precision': False}
  if backend == 'cpu':
    chunk = chunk or 512
    tile = tile or min(chunk, 4 if dtype == 'bfloat16' else 64)
    heads = 'unrolled'
  else:
    chunk = chunk or 128
    tile = tile or chunk
    heads = 'batched'
    if backend == 'gpu':
      options |= {
          'xla_gpu_autotune_level': 0,
          'xla_gpu_enable_triton_gemm': False,
          'xla_gpu_exclude_nondeterministic_ops': True,
      }
  return Profile(
      dtype=dtype, chunk=chunk, tile=tile, page=page or 128, heads=heads,
      compiler_options=tuple(sorted(options.items())),
      environment=tuple(sorted(environment().items())))


def profile_for(
    config: config_lib.ModelConfig, dtype: str, *, chunk: int | None = None,
    tile: int | None = None, page: int | None = None,
) -> Profile:
  """Returns the profile that a model has here; None for its defaults.

  Tiny models have small steps, so that short texts cross every boundary.
  """
  if config_lib.is_tiny(config):
    chunk, page = chunk or 32, page or 16
    tile = tile or min(4, chunk)
  return default_profile(dtype, chunk=chunk, tile=tile, page=page)


def environment() -> dict[str, str]:
  """Returns versions, flags, device and threads of this process."""
  device = jax.devices()[0]
  result = {
      'jax': jax.__version__,
      'jaxlib': importlib.metadata.version('jaxlib'),
      'backend': device.platform,
      'device': device.device_kind,
      'devices': '1',
      'xla_flags': ' '.join(sorted(os.environ.get('XLA_FLAGS', '').split())),
  }
  if device.platform == 'cpu':
    result |= {
        'machine': platform.machine(),
        'cpu': cpu_model(),
        'cpu_features': ' '.join(cpu_features()),
        'threads': str(threads()),
    }
    return result
  result['platform_version'] = ' '.join(device.client.platform_version.split())
  cores = getattr(device, 'core_count', None)
  if cores is not None:
    result['core_count'] = str(cores)
  for found in importlib.metadata.distributions():
    name = (found.metadata['Name'] or '').lower()
    if name == 'libtpu' or name.startswith(
        ('jax-cuda', 'jax-rocm', 'nvidia-cublas', 'nvidia-cudnn')):
      result[name] = found.version
  if device.platform == 'gpu':
    result['driver'] = _nvidia_driver()
  return result


def _nvidia_driver() -> str:
  try:
    with open('/proc/driver/nvidia/version', encoding='utf-8') as f:
      return ' '.join(f.readline().split())
  except OSError:
    return 'unknown'


def threads() -> int:
  """Returns the size of XLA's CPU thread pool: NPROC, or the affinity."""
  nproc = os.environ.get('NPROC', '')
  if nproc.isdigit() and int(nproc) > 0:
    return int(nproc)
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
  try:
    with open('/proc/cpuinfo', encoding='utf-8', errors='replace') as f:
      first = f.read().split('\n\n', maxsplit=1)[0]
  except OSError:
    return {}
  pairs = (line.partition(':') for line in first.splitlines())
  return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_features() -> list[str]:
  """Returns the instruction sets of this CPU that may choose kernels."""
  info = _cpuinfo()
  found = set(info.get('flags', info.get('Features', '')).split())
  return [name for name in _CPU_FEATURES if name in found]


def cpu_model() -> str:
  """Returns vendor, family and model: cache sizes fix matmul blocking too."""
  info = _cpuinfo()
  parts = [info.get(k, '') for k in (
      'vendor_id', 'cpu family', 'model', 'CPU implementer', 'CPU part')]
  return ' '.join(p for p in parts if p) or platform.processor() or 'unknown'
