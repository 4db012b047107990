"""FLOPs against the traced programs; counters as files and as a library."""

import contextlib
import ctypes
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvgraft_jax
from kvgraft_jax import attention
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import hashing
from kvgraft_jax import model as model_lib
from kvgraft_jax import numerics
from kvgraft_jax import resources
from kvgraft_jax.checkpoints import tree

TINY = list(config_lib.TINY_PRESETS.values())
NAMES = [config.name for config in TINY]
RANGE = 65_532_610_987
NO_LIBRARY = ('no-such-nvml.so', 'no-such-cuda.so')


# FLOPs.


def brute_keys(start, stop, window):
  """Counts the mask that attention itself applies."""
  rows, keys = jnp.arange(start, stop), jnp.arange(stop)
  return int(attention.visible(rows, keys, window).sum())


def dots(jaxpr) -> int:
  """Returns multiply-adds of every product outside loops, times two."""
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
      total += 2 * inner * math.prod(eqn.outvars[0].aval.shape)
    elif eqn.primitive.name not in ('while', 'scan'):
      for inner in jax.tree.leaves(
          list(eqn.params.values()),
          is_leaf=lambda x: hasattr(x, 'eqns') or hasattr(x, 'jaxpr')):
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          total += dots(inner)
  return total


def traced(config, rows, sharers_rows=None) -> int:
  """Returns `dots` of the decoder's own programs at `rows` rows."""
  profile = numerics.profile_for(config, 'float32')
  shape = jax.ShapeDtypeStruct
  params = tree.nest({
      path: shape(dims, np.float32)
      for path, (dims, _) in tree.flatten(tree.param_shapes(config))})
  cache = {
      kind: shape(dims, np.uint32)
      for kind, dims in cache_lib.shapes(config, profile, 1, 256).items()}
  cache = cache_lib.KVCache(
      cache, dict(cache), model_lib.scalars(config, 'float32'))

  def where(count):
    half = {kind: config.spec(kind).head_dim // 2 for kind in config_lib.KINDS}
    return (shape((1, count), np.int32), shape((1,), np.int32),
            {kind: (shape((count, size), np.float32),) * 2
             for kind, size in half.items()})

  def run(function, *args):
    return dots(jax.make_jaxpr(lambda *a: function(
        *a, config=config, profile=profile))(*args).jaxpr)

  if sharers_rows is None:
    return run(model_lib.step, params, cache, *where(rows))
  hidden = shape((1, sharers_rows, config.width), np.float32)
  return run(model_lib.owners, params, cache, *where(rows)) + run(
      model_lib.sharers, params, cache, hidden, *where(sharers_rows))


def brute_attention(config, start, stop, first_wanted) -> int:
  """Returns scores and weighted values, row by row over the mask."""
  total = 0
  for i, kind in enumerate(config.layers):
    spec = config.spec(kind)
    first = start if i < config.first_shared else first_wanted
    total += 2 * 2 * config.num_heads * spec.head_dim * brute_keys(
        first, stop, spec.window)
  return total


def experts_flops(config, rows) -> int:
  """Returns what the experts of `rows` rows do; they run in a loop."""
  leaves = [
      shape for path, (shape, _) in tree.flatten(tree.param_shapes(config))
      if '/experts/' in path]
  return sum(
      2 * rows * config.top_k_experts * math.prod(shape[1:])
      for shape in leaves)


@pytest.mark.parametrize('window', [None, 1, 24])
@pytest.mark.parametrize(
    'start, stop', [(0, 0), (0, 1), (0, 70), (5, 24), (23, 26), (40, 90)])
def test_visible_keys_are_those_of_the_mask(start, stop, window):
  found = resources.visible_keys(start, stop, window)
  assert found == brute_keys(start, stop, window)


@pytest.mark.parametrize('config', TINY, ids=NAMES)
def test_flops_are_those_of_the_traced_programs(config):
  start, rows = 20, 32
  stop = start + rows
  expected = (traced(config, rows) + experts_flops(config, rows)
              + brute_attention(config, start, stop, start))
  assert resources.flops(config, start, stop) == expected


@pytest.mark.parametrize(
    'config', [c for c in TINY if c.shared_layers], ids=lambda c: c.name)
def test_layers_that_share_run_for_the_wanted_rows_alone(config):
  expected = traced(config, 32, 4) + brute_attention(config, 20, 52, 48)
  assert resources.flops(config, 20, 52, wanted=4) == expected
  assert expected < resources.flops(config, 20, 52)
  assert resources.flops(config, 50, 52, wanted=9) == resources.flops(
      config, 50, 52)


def test_head_rows_are_counted_as_the_compiler_does():
  config = config_lib.TINY
  table = jnp.zeros((config.vocab_size, config.width))
  compiled = jax.jit(lambda x: x @ table.T).lower(
      jnp.zeros((16, config.width))).compile()
  found = resources.flops(config, 7, 7, head_rows=16)
  assert found == compiled.cost_analysis()['flops']


def test_flops_of_a_published_size_are_about_two_a_weight():
  # 170 million of the 270M's weights are the embedding, which is the head.
  config = config_lib.PRESETS['gemma3-270m']
  matrices = sum(
      math.prod(shape) for path, (shape, is_matrix)
      in tree.flatten(tree.param_shapes(config)) if is_matrix)
  attention_flops = brute_attention(config, 999, 1000, 999)
  found = resources.flops(config, 999, 1000, head_rows=1)
  assert found == 2 * matrices + attention_flops


# RAPL: real files in a temporary tree.


class Clock:
  """Seconds that a test sets."""

  now = 100.0

  def __call__(self):
    return self.now


def zone(root, folder, name, energy, span=RANGE):
  path = root / 'sys/class/powercap' / folder
  path.mkdir(parents=True)
  (path / 'name').write_text(f'{name}\n')
  (path / 'max_energy_range_uj').write_text(f'{span}\n')
  (path / 'energy_uj').write_text(f'{energy}\n')
  return path / 'energy_uj'


def rapl(root, *steps, clock=None):
  """Returns Rapl after each (seconds, {file: energy}) was read."""
  clock = clock or Clock()
  found = resources.Rapl(root, clock)
  for seconds, values in steps:
    clock.now += seconds
    for file, value in values.items():
      file.write_text(f'{value}\n')
    found.sample()
  return found


def reason(energy):
  assert energy['joules'] == 'not measured' and set(energy) == {
      'joules', 'reason'}
  return energy['reason']


def test_packages_are_added_and_their_parts_are_not(tmp_path):
  a = zone(tmp_path, 'intel-rapl:0', 'package-0', 1_000_000)
  b = zone(tmp_path, 'intel-rapl:1', 'package-1', 5_000_000)
  part = zone(tmp_path, 'intel-rapl:0:0', 'core', 10)
  again = zone(tmp_path, 'intel-rapl-mmio:0', 'package-0', 20)
  psys = zone(tmp_path, 'intel-rapl:2', 'psys', 7)
  (tmp_path / 'sys/class/powercap/intel-rapl').mkdir()
  found = rapl(
      tmp_path,
      (1.0, {a: 3_500_000, b: 5_000_001, part: 900, again: 900, psys: 99}),
      (1.0, {a: 3_500_002, b: 6_000_000, psys: 4_000_007}))
  assert found.energy() == {
      'joules': '3.500002', 'source': 'rapl package',
      'counts': '2 package domain(s), all processes of the machine'}
  assert found.energy(psys=True)['joules'] == '4.0'


def test_a_counter_wraps(tmp_path):
  file = zone(tmp_path, 'intel-rapl:0', 'package-0', RANGE - 2_000_000)
  found = rapl(tmp_path, (10.0, {file: 1_000_000}))
  assert found.energy()['joules'] == '3.0'


def test_each_wrap_between_two_samples_is_counted(tmp_path):
  file = zone(tmp_path, 'intel-rapl:0', 'package-0', 0, span=1_000_000_000)
  # 100 J a second for 60 s: 6 wraps of a counter of 1 kJ, read in time.
  clock = Clock()
  found = resources.Rapl(tmp_path, clock)
  for second in range(600):
    clock.now += 0.1
    file.write_text(str(10_000_000 * (second + 1) % 1_000_000_000))
    found.sample()
  assert found.energy()['joules'] == '6000.0'


@pytest.mark.parametrize(
    'seconds, value, problem',
    [
        (40.0, 30_000_000_000, 'may have wrapped more than once'),
        (40.0, 20_000_000_001, 'may have wrapped more than once'),
        (5.0, 0, 'it was reset'),
        (5.0, 19_999_999_999, 'it was reset'),
        (5.0, 60_000_000_000, 'it was reset'),
        (5.0, 2 * RANGE, 'it was reset'),
        (5.0, -3, 'it was reset'),
        (5.0, 'gone', 'invalid literal'),
        (5.0, '', 'invalid literal'),
        (5.0, 20_000_000_000, 'it did not move'),
    ],
)
def test_what_nobody_knows_is_not_measured(tmp_path, seconds, value, problem):
  file = zone(tmp_path, 'intel-rapl:0', 'package-0', 20_000_000_000)
  other = zone(tmp_path, 'intel-rapl:1', 'package-1', 0)
  found = rapl(tmp_path, (seconds, {file: value, other: 1_000_000}))
  assert problem in reason(found.energy())


def test_a_counter_that_came_back_is_not_measured_again(tmp_path):
  file = zone(tmp_path, 'intel-rapl:0', 'package-0', 20_000_000_000)
  found = rapl(tmp_path, (1.0, {file: 0}), (1.0, {file: 5_000_000}))
  assert 'it was reset' in reason(found.energy())


def test_a_counter_that_is_gone_at_the_end(tmp_path):
  file = zone(tmp_path, 'intel-rapl:0', 'package-0', 0)
  clock = Clock()
  found = rapl(tmp_path, (1.0, {file: 1_000_000}), clock=clock)
  file.unlink()
  clock.now += 1
  found.sample()
  assert 'No such file' in reason(found.energy())


def test_a_link_that_a_container_hides(tmp_path):
  tree_root = tmp_path / 'sys/class/powercap'
  tree_root.mkdir(parents=True)
  (tree_root / 'intel-rapl:0').symlink_to(tmp_path / 'masked')
  assert 'No such file' in reason(rapl(tmp_path).energy())


@contextlib.contextmanager
def as_nobody():
  """Lets root read as another user does: root may read everything."""
  if os.geteuid():
    yield
    return
  try:
    os.seteuid(65534)
  except OSError:
    pytest.skip('this root may not become another user')
  try:
    yield
  finally:
    os.seteuid(0)


def test_a_counter_that_only_root_reads():
  # Not in tmp_path, whose parents only its owner may enter.
  with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    root.chmod(0o755)
    zone(root, 'intel-rapl:0', 'package-0', 0).chmod(
        0 if os.geteuid() else 0o400)
    with as_nobody():
      found = resources.Rapl(root)
  text = reason(found.energy())
  assert text.startswith('RAPL intel-rapl:0') and 'Permission denied' in text


def test_no_tree_and_unknown_domains(tmp_path):
  assert 'no RAPL package' in reason(rapl(tmp_path).energy())
  assert 'no RAPL psys' in reason(rapl(tmp_path).energy(psys=True))
  zone(tmp_path, 'intel-rapl:0', 'moon', 0)
  assert "unknown domain 'moon'" in reason(rapl(tmp_path).energy())


# NVML: a real shared library with the same calls stands for both libraries.

SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int number; } Device;
static Device devices[3] = {{0}, {1}, {2}};
static int opened = 0;

static long long value(const char *name, int number) {
  char key[64];
  snprintf(key, sizeof key, "FAKE_%s_%d", name, number);
  const char *text = getenv(key);
  return text ? atoll(text) : 0;
}

int fake_opened(void) { return opened; }
int cuInit(unsigned flags) { return 0; }
/* Ordinals are in another order than the bus. */
int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal > 2) return 101;
  *device = 2 - ordinal;
  return 0;
}
int cuDeviceGetPCIBusId(char *bus, int size, int device) {
  return snprintf(bus, size, "0000:0%d:00.0", device) >= size;
}
int nvmlInit_v2(void) { opened++; return value("INIT", 0); }
int nvmlShutdown(void) { opened--; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device **device) {
  int number;
  if (sscanf(bus, "0000:0%d:00.0", &number) != 1) return 6;
  *device = devices + number;
  return 0;
}
int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *later) {
  long long mode = value("MIG", device->number);
  if (!mode) return 3;
  *now = *later = mode - 1;
  return 0;
}
#ifndef WITHOUT_ENERGY
int nvmlDeviceGetTotalEnergyConsumption(
    Device *device, unsigned long long *energy) {
  long long now = value("ENERGY", device->number);
  if (now < 0) return -now;
  *energy = now;
  return 0;
}
#endif
"""


def build(folder, *flags):
  compiler = shutil.which('cc') or shutil.which('gcc')
  if compiler is None:
    pytest.skip('no C compiler')
  source, library = folder / 'fake.c', folder / f'fake{len(flags)}.so'
  source.write_text(SOURCE)
  subprocess.run([compiler, '-shared', '-fPIC', *flags, '-o', str(library),
                  str(source)], check=True)
  return str(library), str(library)


@pytest.fixture(scope='module')
def libraries(tmp_path_factory):
  return build(tmp_path_factory.mktemp('nvml'))


@pytest.fixture
def gpu(monkeypatch):
  """Sets the values that the library returns; getenv of C sees them."""
  def put(name, number, value):
    monkeypatch.setenv(f'FAKE_{name}_{number}', str(value))

  return put


def test_the_energy_of_the_gpus_in_use(libraries, gpu):
  for number in range(3):
    gpu('ENERGY', number, 2**40 + number)
  found = resources.Nvml([0, 1], libraries)
  gpu('ENERGY', 0, 2**41)  # Ordinal 2: of somebody else.
  gpu('ENERGY', 1, 2**40 + 1 + 1_500)
  gpu('ENERGY', 2, 2**40 + 2 + 250)
  assert found.energy() == {
      'joules': '1.75', 'source': 'nvml',
      'counts': '2 whole GPU(s), all processes on them'}
  assert ctypes.CDLL(libraries[0]).fake_opened() == 0


@pytest.mark.parametrize(
    'before, after, problem',
    [
        ({}, {'ENERGY': 5}, '7 mJ, then 5 mJ: reset'),
        ({}, {}, 'did not move'),
        ({}, {'ENERGY': -15}, 'TotalEnergyConsumption failed with code 15'),
        ({'ENERGY': -3}, {'ENERGY': 9}, 'failed with code 3'),
        ({'MIG': 2}, {'ENERGY': 9}, 'GPU 2 is partitioned (MIG)'),
        ({'INIT': 9}, {'ENERGY': 9}, 'nvmlInit_v2 failed with code 9'),
    ],
)
def test_a_gpu_that_cannot_be_measured(
    libraries, gpu, before, after, problem):
  gpu('ENERGY', 0, 7)
  gpu('ENERGY', 1, 7)
  for name, value in before.items():
    gpu(name, 0, value)
  found = resources.Nvml([1, 2], libraries)
  gpu('ENERGY', 1, 1_000)
  for name, value in after.items():
    gpu(name, 0, value)
  assert problem in reason(found.energy())


def test_a_gpu_with_partitioning_off_is_measured(libraries, gpu):
  gpu('MIG', 0, 1)
  found = resources.Nvml([2], libraries)
  gpu('ENERGY', 0, 2_000)
  assert found.energy()['joules'] == '2.0'


def test_no_library_an_old_one_and_no_such_gpu(libraries, tmp_path):
  assert 'no-such-nvml.so' in reason(resources.Nvml([0], NO_LIBRARY).energy())
  old = build(tmp_path, '-DWITHOUT_ENERGY')
  assert 'undefined symbol' in reason(resources.Nvml([0], old).energy())
  found = resources.Nvml([5], libraries).energy()
  assert 'cuDeviceGet failed with code 101' in reason(found)


# Meter.


class Device:
  """What Meter asks of a jax device, for platforms that are not here."""

  def __init__(self, platform, number=0, peak=None):
    self.platform, self.local_hardware_id, self.peak = platform, number, peak

  def memory_stats(self):
    return self.peak and {'peak_bytes_in_use': self.peak}


def test_a_meter_of_this_process(tmp_path):
  with resources.Meter(config_lib.TINY, {'case': 'base', 'm': 8}) as meter:
    (tmp_path / 'file').write_bytes(bytes(1 << 20))
    np.linalg.norm(np.ones((200, 200)) @ np.ones((200, 200)))
    meter.add(tokens_restored=20, tokens_computed=32, tokens_decoded=3)
    meter.add(tokens_computed=4, start=60, head_rows=4)
  body = meter.body()
  hashing.canonical_json(body)
  assert body['group'] == {'case': 'base', 'm': 8}
  assert 0 < float(body['seconds']) < 60
  assert 0 <= float(body['cpu_seconds']) < 600
  assert (body['tokens_restored'], body['tokens_computed'],
          body['tokens_decoded']) == (20, 36, 3)
  # Of three new tokens two were run, and each took a row of the head.
  assert body['flops'] == resources.flops(
      config_lib.TINY, 20, 54, head_rows=3) + resources.flops(
          config_lib.TINY, 60, 64, head_rows=4)
  assert body['peak_bytes'] > 50 << 20
  assert body['device_peak_bytes'] is None
  assert set(body['energy']) >= {'joules'}


def test_a_meter_counts_what_layers_that_share_run():
  config = config_lib.TINY_PRESETS['tiny-gemma4-e2b']
  bodies = []
  for every in (False, True):
    with resources.Meter(config) as meter:
      meter.add(tokens_computed=10, tokens_decoded=4, every=every)
    bodies.append(meter.body()['flops'])
  assert bodies == [
      resources.flops(config, 0, 13, head_rows=4, wanted=4),
      resources.flops(config, 0, 13, head_rows=4)]


def test_nothing_there_and_nothing_told(tmp_path):
  with resources.Meter(None, root=tmp_path) as meter:
    pass
  body = meter.body()
  for name in ('tokens_computed', 'tokens_restored', 'tokens_decoded', 'flops',
               'bytes_read', 'bytes_written', 'bytes_source'):
    assert body[name] is None
  assert 'no RAPL package' in reason(body['energy'])


def test_bytes_from_the_system_or_as_told(tmp_path):
  file = tmp_path / 'proc/self/io'
  file.parent.mkdir(parents=True)
  file.write_text('rchar: 100\nwchar: 7\nread_bytes: 1\n')
  with resources.Meter(None, root=tmp_path) as meter:
    file.write_text('rchar: 1100\nwchar: 10\nread_bytes: 1\n')
  body = meter.body()
  assert (body['bytes_read'], body['bytes_written']) == (1000, 3)
  assert body['bytes_source'] == 'rchar and wchar of /proc/self/io'
  with resources.Meter(None, root=tmp_path) as meter:
    meter.add(bytes_read=5)
    meter.add(bytes_read=6)
  body = meter.body()
  assert (body['bytes_read'], body['bytes_written']) == (11, None)
  assert body['bytes_source'] == 'told'
  file.write_text('rchar 100')
  assert resources.io_bytes(tmp_path) is None


def test_the_system_counts_what_is_read(tmp_path):
  before = resources.io_bytes()
  if before is None:
    pytest.skip('no /proc/self/io')
  (tmp_path / 'file').write_bytes(bytes(1 << 20))
  (tmp_path / 'file').read_bytes()
  after = resources.io_bytes()
  assert after[0] - before[0] >= 1 << 20


def test_energy_is_that_of_the_devices_in_use(tmp_path, libraries, gpu):
  file = zone(tmp_path, 'intel-rapl:0', 'package-0', 0)
  psys = zone(tmp_path, 'intel-rapl:1', 'psys', 0)
  gpu('ENERGY', 1, 100)

  def energy(platform):
    file.write_text('0')
    psys.write_text('0')
    devices = [Device(platform, 1, 77), Device(platform, 1, 99)]
    with resources.Meter(None, devices=devices[:1 + (platform != 'gpu')],
                         root=tmp_path, libraries=libraries) as meter:
      file.write_text('2000000')
      psys.write_text('3000000')
      gpu('ENERGY', 1, 4100)
    gpu('ENERGY', 1, 100)
    peaks = {'gpu': 77}.get(platform, 99)
    assert meter.body()['device_peak_bytes'] == peaks
    return meter.body()['energy']

  cpu = energy('cpu')
  assert (cpu['joules'], cpu['source']) == ('2.0', 'rapl package')
  assert [x['source'] for x in cpu['apart']] == ['rapl psys']
  both = [('2.0', 'rapl package'), ('3.0', 'rapl psys')]
  on_gpu = energy('gpu')
  assert (on_gpu['joules'], on_gpu['source']) == ('4.0', 'nvml')
  assert [(x['joules'], x['source']) for x in on_gpu['apart']] == both
  for platform, text in (('tpu', 'libtpu'), ('moon', 'no counter is known')):
    found = energy(platform)
    assert found['joules'] == 'not measured' and text in found['reason']
    assert [(x['joules'], x['source']) for x in found['apart']] == both


def test_a_meter_samples_while_the_block_runs(tmp_path, monkeypatch):
  monkeypatch.setattr(resources, '_SAMPLE_SECONDS', 0.01)
  span = 10_000_000_000
  file = zone(tmp_path, 'intel-rapl:0', 'package-0', span - 50, span)
  with resources.Meter(None, devices=[], root=tmp_path) as meter:
    file.write_text('100000000')
    for _ in range(500):
      if meter._rapl._zones['intel-rapl:0'].total:
        break
      time.sleep(0.01)
    file.write_text('150000000')
  assert meter.body()['energy']['joules'] == '150.00005'


def test_an_error_in_the_block_passes_and_is_measured(tmp_path):
  meter = resources.Meter(None, root=tmp_path)
  with pytest.raises(KeyError), meter:
    raise KeyError
  assert float(meter.body()['seconds']) >= 0
  assert not meter._sampler.is_alive()


def test_without_jax_no_device_is_asked():
  # The package itself imports jax; a bare one in its place does not.
  script = f"""
import json, sys, types
sys.modules['kvgraft_jax'] = package = types.ModuleType('kvgraft_jax')
package.__path__ = {list(kvgraft_jax.__path__)!r}
from kvgraft_jax import resources
with resources.Meter(None) as meter:
  pass
print(json.dumps([meter.body(), 'jax' in sys.modules]))
"""
  done = subprocess.run([sys.executable, '-c', script], capture_output=True,
                        text=True, check=True)
  body, imported = json.loads(done.stdout)
  assert not imported and body['device_peak_bytes'] is None
