"""What the present device can still take, known before anything is loaded."""

from collections.abc import Iterator
import decimal
import pathlib
import re

import jax

from kvgraft_jax import config as config_lib
from kvgraft_jax import errors

_PROC = pathlib.Path('/proc')
_CGROUPS = pathlib.Path('/sys/fs/cgroup')
# Of jax, its programs and the allocator; and of each element of the largest
# layer matrix. Fitted to peaks on CPU: for Gemma 3 270M, 1B, 4B and Gemma 4 E2B
# the whole estimate is 17, 5, -2 and 46 % above what was measured.
_RUNTIME_BYTES = 400 << 20
_BYTES_A_WEIGHT = 6
_UNITS = {'': 1, 'b': 1} | {
    f'{letter}{end}': base**power
    for power, letter in enumerate('kmgtp', 1)
    for end, base in (('b', 1000), ('ib', 1024))}


def available_bytes() -> int | None:
  """Returns bytes that the default device can still take; None if unknown.

  On CPU that is what the system calls available, within the limits of this
  process's control groups (containers, batch jobs).
  """
  device = jax.devices()[0]
  if device.platform == 'cpu':
    return host_bytes()
  stats = device.memory_stats() or {}
  if 'bytes_limit' not in stats:
    return None
  return max(0, stats['bytes_limit'] - stats.get('bytes_in_use', 0))


def allocated_bytes() -> tuple[int, int] | None:
  """Returns bytes (in use, at most in use so far) by the default device.

  None where its allocator does not tell, as on CPU.
  """
  stats = jax.devices()[0].memory_stats() or {}
  if 'bytes_in_use' not in stats or 'peak_bytes_in_use' not in stats:
    return None
  return stats['bytes_in_use'], stats['peak_bytes_in_use']


def check(needed: int, what: str) -> None:
  """Raises CapacityError if `what` cannot be placed on the default device.

  Args:
    needed: bytes.
    what: names it, such as "random:gemma4-31b:0 in bfloat16".
  """
  free = available_bytes()
  if free is not None and needed > free:
    raise errors.CapacityError(
        f'{what} needs {human(needed)} of memory, found {human(free)} available'
        ' on this device; choose a smaller model or context, or'
        ' --dtype=bfloat16; `kvgraft plan --model=all` shows what fits')


def scratch_bytes(config: config_lib.ModelConfig, chunk: int) -> int:
  """Estimates what computing takes beside weights and cache.

  Args:
    config: architecture.
    chunk: rows of a prefill step.
  """
  row = largest = 0
  for i, kind in enumerate(config.layers):
    spec, hidden = config.spec(kind), config.layer_hidden(i)
    # Of one prefill row, fitted to the compiler's own figures for Gemma 3:
    # within an eighth.
    row = max(row, 16 * hidden + (44 + 12 * spec.kv_heads)
              * config.num_heads * spec.head_dim)
    largest = max(largest, 2 * hidden * config.width)
  return _RUNTIME_BYTES + _BYTES_A_WEIGHT * largest + chunk * row


def human(nbytes: int) -> str:
  """Returns a size with three digits and a decimal unit."""
  value, units = float(nbytes), ['B', 'kB', 'MB', 'GB', 'TB', 'PB']
  while value >= 999.5 and len(units) > 1:
    value /= 1000
    units.pop(0)
  digits = (value < 99.95) + (value < 9.995) if units[0] != 'B' else 0
  return f'{value:,.{digits}f} {units[0]}'


def parse_bytes(text: str, flag: str) -> int:
  """Returns bytes of a size such as '786432', '48MB', '1.5 GiB' or '64kB'.

  Args:
    text: a number of bytes, or one with a decimal or binary unit.
    flag: it came from, for the error.

  Raises:
    UsageError: if it is no size of at least a byte.
  """
  found = re.fullmatch(r'([0-9]+(?:\.[0-9]+)?) ?([a-z]*)', text.strip().lower())
  unit = _UNITS.get(found[2]) if found else None
  size = int(decimal.Decimal(found[1]) * unit) if found and unit else 0
  if size < 1:
    raise errors.UsageError(
        f'--{flag}: expected a size such as 48MB, 1.5GiB or 786432, found'
        f' {text!r:.80}')
  return size


def host_bytes(
    proc: pathlib.Path = _PROC, cgroups: pathlib.Path = _CGROUPS
) -> int | None:
  """Returns available bytes of host memory; None where there is no /proc.

  Args:
    proc: where the kernel's process files are.
    cgroups: where its control groups are mounted, version 1 or 2.
  """
  meminfo = _pairs(proc / 'meminfo')
  if 'MemAvailable:' not in meminfo:
    return None
  free = 1024 * meminfo['MemAvailable:']
  return max(0, min([free, *_cgroup_bytes(proc, cgroups)]))


def _cgroup_bytes(
    proc: pathlib.Path, cgroups: pathlib.Path
) -> Iterator[int]:
  """Yields what is left in each limited group around this process."""
  for line in _text(proc / 'self' / 'cgroup').splitlines():
    _, controllers, path = (line.split(':', 2) + ['', ''])[:3]
    if not controllers:
      base, names = cgroups, ('memory.max', 'memory.current', 'inactive_file')
    elif 'memory' in controllers.split(','):
      base = cgroups / 'memory'
      names = ('memory.limit_in_bytes', 'memory.usage_in_bytes',
               'total_inactive_file')
    else:
      continue
    folder = base / path.lstrip('/')
    # A container may see its own group as the root: then only `base` exists.
    for group in (folder, *folder.parents):
      limit = _text(group / names[0]).strip()
      used = _text(group / names[1]).strip()
      if limit.isdigit() and used.isdigit():
        # The kernel drops unused file pages before it refuses memory.
        cached = _pairs(group / 'memory.stat').get(names[2], 0)
        yield int(limit) - int(used) + cached
      if group == base:
        break


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding='utf-8', errors='replace')
  except OSError:
    return ''


def _pairs(path: pathlib.Path) -> dict[str, int]:
  """Returns name -> number of a file with one of each a line."""
  rows = (line.split() for line in _text(path).splitlines())
  return {r[0]: int(r[1]) for r in rows if len(r) > 1 and r[1].isdigit()}
