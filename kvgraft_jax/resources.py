"""What a run costs: time, tokens, FLOPs, bytes, memory and energy.

What was not measured is null, and energy says why; nothing is estimated.
Energy is read from counters of whole devices, with idle draw and whatever else
runs there; they move in steps of up to 0.1 s.

* NVIDIA: nvmlDeviceGetTotalEnergyConsumption, in millijoules, from Volta on.
  Older GPUs report power alone, and a sum of samples would be an estimate.
* CPU: RAPL in Linux's powercap tree. Newer kernels let only root read it, and
  many containers hide it.
* TPU: libtpu.sdk.tpumonitoring (0.0.42) has no metric of power or energy.
"""

import ctypes
import pathlib
import resource
import sys
import threading
import time
from typing import Any

from kvgraft_jax import config as config_lib

_ROOT = pathlib.Path('/')
_LIBRARIES = 'libnvidia-ml.so.1', 'libcuda.so.1'
# No CPU package takes more watts. It tells a wrap from a reset; the smallest
# range in use, 65.5 kJ, lasts 32 s at it.
_MAX_WATTS = 2000
_SAMPLE_SECONDS = 10
_SLACK_SECONDS = 0.1  # Counters move in steps and are not read with the clock.
_NONE = {'tpu': 'libtpu.sdk.tpumonitoring has no metric of power or energy'}
_TOLD = ('tokens_computed', 'tokens_restored', 'tokens_decoded', 'bytes_read',
         'bytes_written')


def visible_keys(start: int, stop: int, window: int | None) -> int:
  """Returns how many keys the queries at [start, stop) see in all."""
  knee = stop if window is None else min(max(start, window), stop)
  ramp = (knee * (knee + 1) - start * (start + 1)) // 2
  return ramp + (stop - knee) * (window or 0)


def flops(
    config: config_lib.ModelConfig, start: int, stop: int, *,
    head_rows: int = 0, wanted: int | None = None,
) -> int:
  """Returns the operations of the matrix products that a result needs.

  Two a multiply-add, as in arXiv:2001.08361 (section 2.1) and arXiv:2204.02311
  (appendix B); the shapes are those of `model`. Counted: query, key, value and
  output projections, scores and weighted values over the keys that a row sees,
  the dense feed-forward, the router, the experts that a token is sent to,
  per-layer inputs, rows of the head. Not counted: what is no matrix product
  (embedding, norms, rotary, softmax, gates, soft cap, sampling), padding,
  masked keys, self-tests, compilation. So the device does more than this.

  Args:
    config: architecture.
    start: first position.
    stop: one past the last.
    head_rows: rows that logits are made of.
    wanted: the last rows, whose hidden state is used; None for all. Layers
      that share keys and values are counted for these alone.
  """
  d, n = config.width, config.num_heads
  total = head_rows * config.vocab_size * d
  for i, kind in enumerate(config.layers):
    spec, first, own = config.spec(kind), start, 0
    if i < config.first_shared:
      own = spec.kv_heads * (1 if spec.value_from_key else 2)
    elif wanted is not None:
      first = max(start, stop - wanted)
    row = d * spec.head_dim * (2 * n + own)
    row += 3 * d * (config.layer_hidden(i) + config.per_layer_dim)
    row += d * config.num_experts
    row += config.top_k_experts * 3 * d * config.expert_hidden
    keys = visible_keys(first, stop, spec.window)
    total += (stop - first) * row + 2 * n * spec.head_dim * keys
  return 2 * total


def not_measured(reason: str) -> dict[str, Any]:
  """Returns the energy field of what was not measured."""
  return {'joules': 'not measured', 'reason': reason}


def _measured(joules: float, source: str, counts: str) -> dict[str, Any]:
  return {'joules': repr(joules), 'source': source, 'counts': counts}


class _Zone:
  """One RAPL counter, in microjoules; `reason` says why it is of no use."""

  def __init__(self, path: pathlib.Path):
    self.path, self.name, self.reason = path, '', ''
    self.at, self.last, self.total = 0.0, -1, 0

  def advance(self, clock) -> str:
    """Adds what the counter gained; returns why nobody knows it, or ''."""
    self.name = (self.path / 'name').read_text().strip()
    if self.name != 'psys' and not self.name.startswith('package'):
      return f'unknown domain {self.name!r:.40}'
    # One unit, 61 microjoules at most, below the true period.
    span = int((self.path / 'max_energy_range_uj').read_text())
    now, at = int((self.path / 'energy_uj').read_text()), clock()
    last, seconds = self.last, at - self.at
    self.last, self.at = now, at
    if last < 0:
      return ''
    if seconds * _MAX_WATTS * 1e6 >= span:
      return f'{seconds:.0f} s unread, it may have wrapped more than once'
    gained = now - last + (span if now < last else 0)
    if not 0 <= gained <= (seconds + _SLACK_SECONDS) * _MAX_WATTS * 1e6:
      return f'{last} uJ, then {now} uJ after {seconds:.3f} s: it was reset'
    self.total += gained
    return ''


class Rapl:
  """Energy of this machine's CPU packages, from construction on.

  Sub-domains are parts of their package, and intel-rapl-mmio shows the packages
  once more: neither is added. psys is the whole platform and stands apart.
  Counters wrap within minutes: call `sample` several times a minute. `root` is
  that of the file system, `clock` gives monotonic seconds.
  """

  def __init__(self, root: pathlib.Path = _ROOT, clock=time.monotonic):
    self._tree, self._clock = root / 'sys/class/powercap', clock
    self._zones = {
        p.name: _Zone(p) for p in sorted(self._tree.glob('intel-rapl:*'))
        if p.name.count(':') == 1}
    self.sample()

  def sample(self) -> None:
    """Reads all counters."""
    for zone in self._zones.values():
      try:
        zone.reason = zone.reason or zone.advance(self._clock)
      except (OSError, ValueError) as e:
        zone.reason = str(e)

  def energy(self, psys: bool = False) -> dict[str, Any]:
    """Returns what all packages, or psys, took up to the last sample."""
    what = 'psys' if psys else 'package'
    zones = {name: zone for name, zone in self._zones.items()
             if (zone.name == 'psys') == psys}
    if not zones:
      return not_measured(f'no RAPL {what} in {self._tree}')
    for name, zone in zones.items():  # The rest alone would be a wrong total.
      if zone.reason or not zone.total:
        return not_measured(f'RAPL {name}: {zone.reason or "it did not move"}')
    return _measured(
        sum(z.total for z in zones.values()) / 1e6, f'rapl {what}',
        f'{len(zones)} {what} domain(s), all processes of the machine')


class Nvml:
  """Energy of some NVIDIA GPUs, from construction on.

  This process's CUDA driver says which GPU an ordinal is, so that
  CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are in force. A partitioned GPU
  (MIG) has one counter for all tenants: not measured. `ordinals` are CUDA's,
  the `local_hardware_id` of jax devices; `libraries` NVML and the CUDA driver.
  """

  def __init__(
      self, ordinals: list[int], libraries: tuple[str, str] = _LIBRARIES):
    self._reason, self._open = '', False
    self._start: list[tuple[ctypes.c_void_p, int]] = []
    ref = ctypes.byref
    try:
      self._nvml, driver = map(ctypes.CDLL, libraries)
      _call(driver, 'cuInit', 0)
      _call(self._nvml, 'nvmlInit_v2')
      self._open = True
      for ordinal in ordinals:
        device, bus = ctypes.c_int(), ctypes.create_string_buffer(32)
        handle, mig, later = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
        _call(driver, 'cuDeviceGet', ref(device), ordinal)
        _call(driver, 'cuDeviceGetPCIBusId', bus, len(bus), device)
        _call(self._nvml, 'nvmlDeviceGetHandleByPciBusId_v2', bus, ref(handle))
        # Fails, and leaves 0, where there is no such thing.
        self._nvml.nvmlDeviceGetMigMode(handle, ref(mig), ref(later))
        if mig.value:
          raise OSError(f'GPU {ordinal} is partitioned (MIG)')
        self._start.append((handle, self._millijoules(handle)))
    except (OSError, AttributeError) as e:  # No library, or an old one.
      self._reason = f'NVML: {e}'

  def energy(self) -> dict[str, Any]:
    """Returns what the GPUs took; to be asked once, for it closes NVML."""
    total = 0
    try:
      for handle, start in () if self._reason else self._start:
        end = self._millijoules(handle)
        if end <= start:
          raise OSError(f'{start} mJ, then {end} mJ: reset, or did not move')
        total += end - start
    except OSError as e:
      self._reason = f'NVML: {e}'
    if self._open:
      self._nvml.nvmlShutdown()
    return not_measured(self._reason) if self._reason else _measured(
        total / 1e3, 'nvml',
        f'{len(self._start)} whole GPU(s), all processes on them')

  def _millijoules(self, handle: ctypes.c_void_p) -> int:
    value = ctypes.c_ulonglong()
    _call(self._nvml, 'nvmlDeviceGetTotalEnergyConsumption', handle,
          ctypes.byref(value))
    return value.value


def _call(library: ctypes.CDLL, name: str, *args: Any) -> None:
  code = getattr(library, name)(*args)
  if code:
    raise OSError(f'{name} failed with code {code}')


def io_bytes(root: pathlib.Path = _ROOT) -> tuple[int, int] | None:
  """Returns bytes that this process read and wrote; None where unknown.

  rchar and wchar of /proc/self/io: what read and write calls moved, from disk,
  page cache, pipe or terminal alike. Mapped files are no part of it.
  """
  try:
    text = (root / 'proc/self/io').read_text()
    found = dict(line.split(': ') for line in text.splitlines())
    return int(found['rchar']), int(found['wchar'])
  except (OSError, ValueError, KeyError):
    return None


class Meter:
  """Measures a `with` block; `ledger.append('resources', {'id': ..., **body})`.

  What jax still has in flight at its end is not waited for.

  Args:
    config: architecture, for FLOPs; None leaves them unknown.
    group: labels of the line.
    devices: jax devices to measure; None for the default one.
    root: of the file system.
    libraries: NVML and the CUDA driver.
  """

  def __init__(
      self, config: config_lib.ModelConfig | None,
      group: dict[str, str | int] | None = None, *,
      devices: list[Any] | None = None, root: pathlib.Path = _ROOT,
      libraries: tuple[str, str] = _LIBRARIES,
  ):
    if devices is None:
      jax = sys.modules.get('jax')  # Not imported: this process uses no device.
      devices = list(jax.device_put(0).devices()) if jax else []
    self._config, self._devices, self._root = config, devices, root
    self._platform = '/'.join(sorted({d.platform for d in devices})) or 'cpu'
    self._libraries, self._told = libraries, dict[str, int]()
    self._body: dict[str, Any] = {'group': dict(group or {})}

  def __enter__(self) -> 'Meter':
    self._rapl, self._nvml = Rapl(self._root), None
    if self._platform == 'gpu':
      self._nvml = Nvml(
          [d.local_hardware_id for d in self._devices], self._libraries)
    self._stop = threading.Event()
    self._sampler = threading.Thread(target=self._sample, daemon=True)
    self._sampler.start()
    self._io = io_bytes(self._root)
    self._cpu, self._wall = time.process_time(), time.perf_counter()
    return self

  def __exit__(self, *exc: object) -> None:
    wall = time.perf_counter() - self._wall
    cpu = time.process_time() - self._cpu
    self._stop.set()
    self._sampler.join()
    self._rapl.sample()
    told, io = self._told, io_bytes(self._root)
    read, written = told.get('bytes_read'), told.get('bytes_written')
    source = None if (read, written) == (None, None) else 'told'
    if not source and self._io and io:
      read, written = io[0] - self._io[0], io[1] - self._io[1]
      source = 'rchar and wchar of /proc/self/io'
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stats = [d.memory_stats() or {} for d in self._devices]
    self._body |= {
        'seconds': repr(round(wall, 6)), 'cpu_seconds': repr(round(cpu, 6)),
        **{name: told.get(name) for name in (*_TOLD[:3], 'flops')},
        'bytes_read': read, 'bytes_written': written, 'bytes_source': source,
        # Peaks of the process since its start. macOS counts bytes, not KiB.
        'peak_bytes': peak if sys.platform == 'darwin' else 1024 * peak,
        'device_peak_bytes': max(
            (s.get('peak_bytes_in_use', 0) for s in stats), default=0) or None,
        'energy': self._energy(),
    }

  def add(
      self, *, tokens_restored: int = 0, tokens_computed: int = 0,
      tokens_decoded: int = 0, start: int | None = None, every: bool = False,
      head_rows: int = 0, bytes_read: int | None = None,
      bytes_written: int | None = None,
  ) -> None:
    """Adds work that was done.

    Args:
      tokens_restored: positions taken from a store.
      tokens_computed: positions run, without padding.
      tokens_decoded: new tokens behind them: a head row each, and all but the
        last were run.
      start: first computed position; None for `tokens_restored`.
      every: all computed rows' hidden states were used, not the last alone;
        matters where layers share keys and values.
      head_rows: rows that logits were made of, besides those of new tokens.
      bytes_read: by the process, instead of what the system counts.
      bytes_written: same.
    """
    told = dict(zip(_TOLD, (tokens_computed, tokens_restored, tokens_decoded,
                            bytes_read, bytes_written)))
    if self._config:
      first = tokens_restored if start is None else start
      last = first + tokens_computed + max(tokens_decoded - 1, 0)
      told['flops'] = flops(
          self._config, first, last, head_rows=head_rows + tokens_decoded,
          wanted=None if every else max(tokens_decoded, 1))
    for name, value in told.items():
      if value is not None:
        self._told[name] = self._told.get(name, 0) + value

  def body(self) -> dict[str, Any]:
    """Returns the line's body but for its id, behind the block."""
    return self._body

  def _sample(self) -> None:
    while not self._stop.wait(_SAMPLE_SECONDS):
      self._rapl.sample()

  def _energy(self) -> dict[str, Any]:
    """Returns the energy of the devices; other readings stand `apart`."""
    apart = [self._rapl.energy(), self._rapl.energy(psys=True)]
    if self._platform == 'cpu':
      result = apart.pop(0)
    elif self._nvml:
      result = self._nvml.energy()
    else:
      result = not_measured(_NONE.get(self._platform, 'no counter is known'))
    apart = [x for x in apart if 'reason' not in x]
    return {**result, 'apart': apart} if apart else result
