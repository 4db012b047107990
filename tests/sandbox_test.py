"""Hostile programs: nothing gets out, nothing hangs, nothing is left.

Where the sandbox is unavailable the same tests check that it refuses. Each
program runs as whoever runs the tests and, where that is root, also as an
ordinary user.
"""

import functools
import glob
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from kvgraft_jax import errors
from kvgraft_jax import sandbox
from kvgraft_jax import sandbox_child
import sandbox_helpers

HELPER = sandbox_helpers.__file__
NOBODY = ['setpriv', '--reuid=65534', '--regid=65534', '--clear-groups']
SMALL = {'cpu_s': 5, 'wall_s': 10, 'memory_bytes': 256 << 20}
MIB = 1 << 20


@functools.cache
def _ordinary_python():
  """Returns an interpreter that an ordinary user can run, '' if none."""
  if os.geteuid() != 0 or not shutil.which('setpriv'):
    return ''
  for python in (os.path.realpath(sys._base_executable), '/usr/bin/python3',
                 '/usr/local/bin/python3'):
    code = (f'import sys; sys.path.insert(0, {str(sandbox_helpers.ROOT)!r});'
            ' assert sys.version_info >= (3, 11); import kvgraft_jax.sandbox;'
            ' open(sys.executable)')
    try:
      if subprocess.run([*NOBODY, python, '-I', '-S', '-c', code], check=False,
                        cwd='/', capture_output=True).returncode == 0:
        return python
    except OSError:
      pass
  return ''


def _helper(source, limits, command=(), python=sys.executable, **more):
  """Runs a program through the helper script; returns what it prints."""
  done = subprocess.run(
      [*command, python, '-I', '-S', HELPER],
      input=json.dumps({'source': source, 'limits': limits, **more}),
      capture_output=True, text=True, timeout=120, check=False, cwd='/')
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.fixture(params=['here', 'ordinary'])
def run(request, nothing_left):
  """Runs programs; returns what happened, None where they are refused."""
  if request.param == 'here':
    def go(source, **limits):
      limits = {**SMALL, **limits}
      if sandbox.unavailable():
        with pytest.raises(errors.SandboxError, match='--unsafe_exec'):
          sandbox.run(source, limits=sandbox.Limits(**limits))
        return None
      return sandbox.run(source, limits=sandbox.Limits(**limits))
  else:
    python = _ordinary_python()
    if not python:
      pytest.skip('not root, or no Python that an ordinary user can run')
    def go(source, **limits):
      found = _helper(source, {**SMALL, **limits}, NOBODY, python)
      if 'refused' in found:
        assert '--unsafe_exec' in found['refused']
        return None
      return sandbox.Result(**found)
  return go


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
  """Checks that no process, directory, mount or shared memory is left."""
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  def mounts():
    with open('/proc/self/mountinfo') as f:
      return {line.split(' ')[4] for line in f}
  sandbox_helpers.adopt_orphans(1)
  before = sandbox_helpers.descendants()
  memory, segments, mounted = (
      sandbox_helpers.shared_memory(), sandbox_helpers.segments(), mounts())
  yield
  try:
    left = set(sandbox_helpers.descendants()) - set(before)
    assert not left, {p: open(f'/proc/{p}/cmdline').read() for p in left}
    assert mounts() <= mounted
    assert not glob.glob(f'{tmp_path}/kvgraft*')
    assert not any(os.path.lexists(p) for p in ('/box', '/old', '/usr/old'))
    assert sandbox_helpers.segments() <= segments
    assert sandbox_helpers.wait_until(
        lambda: sandbox_helpers.shared_memory() - memory < 200 * MIB)
  finally:
    sandbox_helpers.adopt_orphans(0)


def _refusals(*attempts):
  """Returns a program that prints each attempt that is not refused."""
  body = '\n'.join(
      f'try:\n  {a}\nexcept (OSError, ValueError) as e:\n  n += 1\n'
      f'else:\n  print({a!r})' for a in attempts)
  return ('import ctypes, mmap, os, resource, signal, socket, sys\n'
          'libc = ctypes.CDLL(None, use_errno=True)\n'
          'def call(*args):\n'
          '  if libc.syscall(*map(ctypes.c_long, args)) >= 0: return\n'
          '  raise OSError(ctypes.get_errno(), "refused")\n'
          f'n = 0\n{body}\nprint(n)\n')


def _all_refused(result, attempts):
  if result is not None:
    assert (result.stdout, result.ended) == (f'{len(attempts)}\n', 'exit'), (
        result)
    assert result.sandboxed


# What works.


def test_an_honest_program_runs(run):
  result = run(
      'import decimal, fractions, itertools, json, math, os, subprocess, sys,'
      ' threading, random\n'
      't = threading.Thread(target=print, args=("thread",)); t.start()\n'
      't.join()\n'
      'done = subprocess.run([sys.executable, "-c", "print(6 * 7)"],'
      ' capture_output=True, text=True)\n'
      'os.environ.pop("LC_CTYPE", "")\n'  # Python itself may set it.
      'print(done.stdout.strip(), dict(os.environ), os.getcwd())\n'
      'open("x", "w").write("kept"); print(open("x").read())\n'
      'print("\\u00e9", file=sys.stderr); exit(3)\n')
  if result is not None:
    assert result.stdout == 'thread\n42 {} /box\nkept\n'
    assert result.stderr == '\u00e9\n'
    assert (result.ended, result.exit_code) == ('exit', 3)


def test_files_and_stdin_arrive(nothing_left):
  if sandbox.unavailable():
    pytest.raises(errors.SandboxError, sandbox.run, 'print(1)')
    return
  result = sandbox.run(
      'import sys; print(sys.stdin.read() + open("a/b").read())', stdin='in ',
      files={'a/b': b'file'})
  assert result.ok and result.stdout == 'in file\n'


@pytest.mark.parametrize('name', ['/etc/x', '../x', 'a/../../x', ''])
def test_a_file_outside_its_directory_is_refused(name):
  with pytest.raises(errors.UsageError, match='not inside'):
    sandbox.run('1', files={name: b''}, unsafe=True)


@pytest.mark.parametrize('name', ['cpu_s', 'wall_s', 'memory_bytes',
                                  'processes', 'file_bytes', 'output_bytes'])
def test_a_limit_of_nothing_is_refused(name):
  with pytest.raises(errors.UsageError, match=name):
    sandbox.Limits(**{name: 0})


@pytest.mark.parametrize('name, value', [
    ('cpu_s', float('inf')), ('wall_s', float('nan')), ('cpu_s', '1'),
    ('cpu_s', True), ('memory_bytes', 3e8), ('memory_bytes', 1 << 70),
    ('processes', None)])
def test_a_limit_that_cannot_be_set_is_refused(name, value):
  with pytest.raises(errors.UsageError, match=name):
    sandbox.Limits(**{name: value})


@pytest.mark.parametrize('source, ended, code', [
    ('import os; os._exit(7)', 'exit', 7),
    ('1 / 0', 'exit', 1),
    ('import os; os.kill(os.getpid(), 9)', 'signal 9', None),
    ('import os; os.abort()', 'signal 6', None),
    ('import ctypes; ctypes.string_at(0)', 'signal 11', None),
    ('this is no Python', 'exit', 1),
])
def test_how_it_ended(run, source, ended, code):
  result = run(source)
  if result is not None:
    assert (result.ended, result.exit_code) == (ended, code)


# Processes, time.


def test_fork_bomb(run):
  result = run('import os\nwhile True:\n  try: os.fork()\n'
               '  except OSError: pass', cpu_s=1)
  assert result is None or result.ended in ('cpu', 'wall')


def test_the_number_of_processes(run):
  result = run(
      'import os, time\nn = 1\ntry:\n  while True:\n'
      '    if not os.fork(): time.sleep(100)\n    n += 1\n'
      'except BlockingIOError: print(n)', processes=5)
  assert result is None or result.stdout == '5\n'


@pytest.mark.parametrize('source', [
    'while True: pass',
    'import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n'
    'while True: pass',
    'import os\nfor _ in range(3): os.fork()\nwhile True: pass',
    # Those who die are counted, too.
    'import os, time\nwhile True:\n  if not os.fork():\n'
    '    t = time.process_time()\n'
    '    while time.process_time() < t + .1: pass\n    os._exit(0)\n'
    '  os.wait()',
])
def test_endless_work(run, source):
  result = run(source, cpu_s=1, wall_s=30)
  assert result is None or (result.ended == 'cpu' and result.seconds < 25)


@pytest.mark.parametrize('source', [
    'import time; time.sleep(1e6)',
    'import signal, time\nfor n in range(1, 65):\n'
    '  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError):'
    ' pass\ntime.sleep(1e6)',
    'import os, time; os.closerange(0, 1000); time.sleep(1e6)',
    'import os, signal; os.kill(os.getpid(), signal.SIGSTOP)',
    'import os\nfor _ in range(3): os.fork()\n'
    'os.read(os.pipe()[0], 1)',
])
def test_endless_sleep(run, source):
  result = run(source, wall_s=1)
  assert result is None or (result.ended == 'wall' and result.seconds < 10)


def test_orphans_die_with_the_program(run, tmp_path):
  result = run(
      'import os, signal, time\nif os.fork() == 0:\n  os.setsid()\n'
      '  if os.fork() == 0:\n    signal.signal(signal.SIGHUP, signal.SIG_IGN)\n'
      '    os.closerange(0, 3)\n    time.sleep(1e6)\n  os._exit(0)\n'
      'os.wait(); print("gone")')
  assert result is None or (result.ok and result.stdout == 'gone\n')


def test_an_orphan_that_holds_the_output_open(run):
  result = run('import os, time\nif os.fork() == 0: time.sleep(1e6)\n'
               'print("done", flush=True)')
  assert result is None or (result.ok and result.seconds < 5)


# Memory.


def test_memory_of_one_process(run):
  result = run('x = bytearray(10 ** 10)')
  assert result is None or 'MemoryError' in result.stderr


def test_memory_over_many_forks(run):
  result = run('import os, time\nfor _ in range(10):\n  if not os.fork():\n'
               '    x = b"x" * (100 << 20)\n    time.sleep(100)\n'
               'time.sleep(100)')
  assert result is None or result.ended == 'memory'


def test_memory_of_processes_whose_first_thread_has_ended(run):
  number = {'x86_64': 60, 'aarch64': 93}[platform.machine()]
  result = run(
      'import ctypes, os, threading, time\ndef hog():\n'
      '  time.sleep(.5)\n  x = b"x" * (100 << 20)\n  time.sleep(100)\n'
      'for _ in range(7):\n  if not os.fork():\n'
      '    threading.Thread(target=hog).start()\n'
      f'    ctypes.CDLL(None).syscall({number}, 0)\n'
      'time.sleep(100)')
  assert result is None or result.ended == 'memory'


SHARED = (
    'os.memfd_create("x")',
    'mmap.mmap(-1, 1 << 20)',  # Shared, and of no process's own.
    'open("/dev/shm/x", "w")',
    'open("/dev/zero")',
    'mmap.mmap(-1, 1 << 21, flags=0x40022)',  # Huge pages.
    *(f'call({n}, 0, 1 << 20, 0o1666)' for n in (
        {'x86_64': (29, 64, 68, 240), 'aarch64': (194, 190, 186, 180)}[
            platform.machine()])),  # shmget, semget, msgget, mq_open.
    'call(447, 0)',  # memfd_secret.
)


def test_memory_that_belongs_to_no_process(run):
  _all_refused(run(_refusals(*SHARED)), SHARED)


def test_pages_given_back_but_kept_by_a_file(run):
  result = run(
      'import mmap, os\nf = open("x", "w+b")\ntry:\n'
      '  os.posix_fallocate(f.fileno(), 0, 100 << 20)\n'
      'except OSError as e: print(e.errno)', file_bytes=MIB)
  assert result is None or result.stdout in ('27\n', '28\n')


# Output and disk.


@pytest.mark.parametrize('stream', ['stdout', 'stderr'])
def test_endless_output(run, stream):
  result = run(f'import sys\nwhile True: sys.{stream}.write("x" * 9999)',
               output_bytes=100_000)
  if result is not None:
    assert result.ended == 'output'
    assert len(getattr(result, stream)) == 100_000


def test_output_from_many_processes(run):
  result = run('import os\nfor _ in range(3): os.fork()\n'
               'while True: os.write(1, b"x" * 9999)', output_bytes=100_000)
  assert result is None or result.ended == 'output'


def test_disk_filler(run):
  result = run(
      'import os\nn = t = 0\ntry:\n  while True:\n'
      '    with open(f"f{n}", "wb", 0) as f:\n'
      '      n += 1\n      t += f.write(b"x" * 1000_000)\n'
      'except OSError as e: print(t, e.errno)\n'
      'try:\n  f = open("big", "wb", 0)\n  f.truncate(1 << 40)\n'
      'except OSError as e: print(e.errno)', file_bytes=5 * MIB)
  if result is not None:
    total, error, big = map(int, result.stdout.split())
    assert 4 * MIB < total <= 5 * MIB and error == 28 and big in (27, 28)


def test_file_counts(run):
  result = run('import os\nn = 0\ntry:\n  while True:\n    n += 1\n'
               '    os.close(os.open(f"f{n}", os.O_CREAT))\n'
               'except OSError as e: print(n, e.errno)\n'
               'fds = []\ntry:\n  while True: fds.append(os.dup(0))\n'
               'except OSError as e: print(len(fds), e.errno)')
  if result is not None:
    files, full, fds, many = map(int, result.stdout.split())
    assert files < 1100 and full == 28 and fds < 64 and many == 24


# Files outside.


@pytest.fixture
def store(tmp_path):
  """A directory that everybody may write."""
  path = tmp_path / 'store'
  path.mkdir()
  for parent in (tmp_path, *tmp_path.parents):
    if parent.stat().st_uid == os.geteuid() and str(parent).startswith(
        tempfile.gettempdir()):
      parent.chmod(0o755)
  path.chmod(0o777)
  (path / 'secret').write_text('secret')
  (path / 'secret').chmod(0o666)
  return path


def test_reading_outside(run, store):
  package = os.path.dirname(sandbox.__file__)
  attempts = [f'print(os.listdir({p!r}) if os.path.isdir({p!r}) else'
              f' open({p!r}).read())' for p in (
      str(store), f'{store}/secret', f'../../../../../{store}/secret',
      os.path.expanduser('~/.bashrc'), '/home', '/etc/passwd', '/etc/shadow',
      '/etc/hostname', '/proc', '/proc/1/environ', '/proc/self/maps', '/sys',
      '/dev/mem', '/var', '/old', '/run', f'{package}/errors.py',
      f'{package}/sandbox_child.py', os.environ.get(
          'KVGRAFT_CACHE_DIR', os.path.expanduser('~/.cache/kvgraft')),
      os.getcwd(), '/boot', '/usr/share', '/usr/bin/env')]
  _all_refused(run(_refusals(*attempts)), attempts)


def test_writing_outside(run, store):
  attempts = [
      f'open("{store}/secret", "w")', f'open("{store}/new", "w")',
      f'os.unlink("{store}/secret")', f'os.rename("{store}", "{store}2")',
      'os.mkdir("/new")', 'open(os.__file__, "a")', 'os.unlink(os.__file__)',
      'os.chmod(os.__file__, 0o777)', 'os.chmod("/", 0o777)',
      'os.utime(os.__file__)', 'os.rename("/box", "/x")',
      'open("/etc/passwd", "w")', 'open("/dev/x", "w")', 'os.mkdir("/tmp")',
      'os.mknod("x", 0o20666, os.makedev(1, 1))', 'os.chown(".", 0, 0)']
  _all_refused(run(_refusals(*attempts)), attempts)
  assert (store / 'secret').read_text() == 'secret'
  assert sorted(os.listdir(store)) == ['secret']


def test_links(run, store):
  secret = f'{store}/secret'
  attempts = [
      f'os.symlink("{secret}", "a"); open("a")',
      'os.symlink("/", "b"); open("b/etc/passwd")',
      'os.symlink("../../../../home", "c"); os.listdir("c/")',
      'os.symlink("/proc/1/root", "d"); os.listdir("d/")',
      'os.symlink(os.__file__, "e"); open("e", "w")',
      f'os.link("{secret}", "f")', 'os.link(os.__file__, "g")',
      'os.symlink("h", "h"); open("h")',
      'os.open("..", os.O_TMPFILE | os.O_WRONLY)']
  _all_refused(run(_refusals(*attempts)), attempts)


# Network.


def test_sockets(run):
  with socket.create_server(('127.0.0.1', 0)) as server:
    server.settimeout(0.2)
    port = server.getsockname()[1]
    attempts = [
        f'socket.create_connection(("127.0.0.1", {port}), 2)',
        'socket.socket(socket.AF_INET6, socket.SOCK_STREAM)',
        'socket.socket(socket.AF_INET, socket.SOCK_DGRAM)',
        'socket.socket(socket.AF_INET, socket.SOCK_RAW)',
        'socket.socket(socket.AF_UNIX).connect("\\0x")',
        'socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)',
        'socket.socket(17, socket.SOCK_RAW)', 'socket.socketpair()',
        'socket.getaddrinfo("localhost", 80)']
    _all_refused(run(_refusals(*attempts)), attempts)
    with pytest.raises(TimeoutError):
      server.accept()


# Signals, other processes.


def test_signals_stay_inside(run):
  result = run(
      'import os, signal\n'
      'for n in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):\n'
      '  os.kill(os.getppid(), n)\n'
      'found = 0\n'
      f'for pid in (*range(3, 30), {os.getpid()}, {os.getppid()}):\n'
      '  try: os.kill(pid, signal.SIGKILL)\n'
      '  except ProcessLookupError: continue\n'
      '  found += 1\n'
      'try: os.kill(-1, signal.SIGKILL)\n'
      'except ProcessLookupError: pass\n'
      'print(os.getppid(), os.getpid(), found)')
  assert result is None or result.stdout == '1 2 0\n'


def test_it_can_end_its_own_group_alone(run):
  result = run('import os; os.killpg(0, 9)')
  assert result is None or result.ended == 'signal 9'


def test_inherited_descriptors(run):
  result = run('import os\nopen_ = []\nfor fd in range(4096):\n  try:'
               ' os.fstat(fd)\n  except OSError: continue\n'
               '  open_.append(fd)\nprint(open_)\n'
               'try: os.write(0, b"x")\nexcept OSError: print("sealed")')
  assert result is None or result.stdout == '[0, 1, 2]\nsealed\n'


def test_output_that_forges_the_result(run):
  forged = json.dumps({'code': 0, 'ended': 'exit', 'stdout': '', 'cpu': 0})
  result = run(
      f'import os, sys\nfor fd in range(64):\n  for _ in range(3):\n'
      f'    try: os.write(fd, {forged.encode()!r} + b"\\n")\n'
      '    except OSError: pass\nos._exit(3)')
  if result is not None:
    assert (result.ended, result.exit_code) == ('exit', 3)
    assert result.stdout == f'{forged}\n' * 3


def test_limits_cannot_be_raised(run):
  attempts = [
      *(f'resource.setrlimit(resource.RLIMIT_{n}, (1 << 40, 1 << 40))' for n in
        ('AS', 'CPU', 'NPROC', 'FSIZE', 'NOFILE', 'CORE', 'MEMLOCK')),
      'resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))',
      'os.setpriority(os.PRIO_PROCESS, 0, -20)', 'os.nice(-5)']
  _all_refused(run(_refusals(*attempts)), attempts)


# Kernel.


def test_set_user_id_programs(run):
  programs = [p for d in ('/usr/bin', '/bin', '/usr/sbin', '/usr/lib/openssh')
              for p in glob.glob(f'{d}/*')
              if os.path.isfile(p) and os.stat(p).st_mode & stat.S_ISUID]
  attempts = [*(f'os.execv({p!r}, [{p!r}])' for p in programs[:8]),
              'import shutil; shutil.copy(sys.executable, "su");'
              ' os.chmod("su", 0o4755); os.execv("su", ["su"])',
              'os.setuid(0)', 'os.setresuid(0, 0, 0)', 'os.setgroups([0])',
              'os.seteuid(65534)']
  _all_refused(run(_refusals(*attempts), file_bytes=64 * MIB), attempts)


# Name -> number on x86_64 and aarch64, arguments.
CALLS = {
    'mount': (165, 40), 'umount2': (166, 39), 'pivot_root': (155, 41),
    'chroot': (161, 51), 'unshare': (272, 97, 0x10000000), 'setns': (308, 268),
    'clone': (56, 220, 0x10000011), 'clone3': (435, 435), 'ptrace': (101, 117),
    'process_vm_readv': (310, 270, 1), 'process_vm_writev': (311, 271, 1),
    'kcmp': (312, 272, 1, 2), 'keyctl': (250, 219), 'add_key': (248, 217),
    'request_key': (249, 218), 'bpf': (321, 280), 'io_uring_setup': (425, 425),
    'userfaultfd': (323, 282), 'perf_event_open': (298, 241),
    'personality': (135, 92, 0x0040000), 'sethostname': (170, 161),
    'settimeofday': (164, 170), 'clock_settime': (227, 112),
    'init_module': (175, 105), 'kexec_load': (246, 104), 'reboot': (169, 142),
    'swapon': (167, 224), 'quotactl': (179, 60), 'syslog': (103, 116, 3),
    'open_by_handle_at': (304, 265), 'fsopen': (430, 430),
    'open_tree': (428, 428), 'move_mount': (429, 429),
    'mount_setattr': (442, 442), 'pidfd_open': (434, 434, 1),
    'pidfd_getfd': (438, 438, 0, 0), 'pidfd_send_signal': (424, 424),
    'seccomp': (317, 277), 'capset': (126, 91), 'inotify_init1': (294, 26),
    'fanotify_init': (300, 262), 'mbind': (237, 235), 'acct': (163, 89),
    'vhangup': (153, 58), 'landlock': (444, 444), 'setdomainname': (171, 162),
    'ioctl TIOCSTI': (16, 29, 0, 0x5412, 0), 'prctl': (157, 167, 4, 1),
}


def test_refused_calls(run):
  column = ('x86_64', 'aarch64').index(platform.machine())
  attempts = [f'call{(c[column], *c[2:], 0, 0, 0)[:6]}  # {name}'
              for name, c in CALLS.items()]
  result = run(_refusals(*attempts))
  _all_refused(result, attempts)


def test_the_other_doors_into_the_kernel(run):
  if platform.machine() != 'x86_64':
    pytest.skip('x86_64 alone has them')
  attempts = ['call(0x40000000 + 39)', 'call(0x40000000 + 41, 2, 1, 0)']
  _all_refused(run(_refusals(*attempts)), attempts)
  result = run(
      'import ctypes, mmap\nm = mmap.mmap(-1, 4096, flags=0x22, prot=7)\n'
      'm.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")\n'  # getpid, 32 bits.
      'ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof('
      'ctypes.c_char.from_buffer(m)))()\nprint("passed")')
  assert result is None or result.ended == 'signal 31'


def _decide(program, machine, number, *args):
  """Returns what a filter does with a call: the action and its error."""
  data = struct.pack('<IIQ6Q', number, sandbox_child._AUDIT[machine], 0,
                     *(args + (0,) * 6)[:6])
  at, value = 0, 0
  while True:
    op, then, otherwise, k = struct.unpack_from('<HBBI', program, 8 * at)
    at += 1
    if op == 0x06:
      return k >> 16, k & 0xffff
    if op == 0x20:
      value, = struct.unpack_from('<I', data, k)
    else:
      holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[op]
      at += then if holds else otherwise


# Here the filter of the other machine type is tried, too.
@pytest.mark.parametrize('machine', ['x86_64', 'aarch64'])
def test_what_the_filter_decides(machine):
  column = ('x86_64', 'aarch64').index(machine)
  program = sandbox_child._filter(machine)
  allow, refuse = (0x7fff, 0), 0x0005
  for name, call in CALLS.items():
    action, error = _decide(program, machine, call[column], *call[2:])
    assert (action, error) == (refuse, 38 if call[column] >= 424 else 1), name
  for pair, args in (
      ((0, 63), ()), ((1, 64), ()), ((257, 56), ()), ((59, 221), ()),
      ((231, 94), ()), ((202, 98), ()), ((318, 278), ()), ((12, 214), ()),
      ((56, 220), (17,)), ((9, 222), (0, 4096, 3, 0x22)),
      ((9, 222), (0, 4096, 1, 0x1)), ((302, 261), (0, 7)),
      ((16, 29), (0, 0x5401)), ((157, 167), (15,))):
    assert _decide(program, machine, pair[column], *args) == allow, pair
  for pair, args in (
      ((9, 222), (0, 4096, 3, 0x21)), ((9, 222), (0, 4096, 3, 0x23)),
      ((9, 222), (0, 4096, 3, 0x40022)), ((302, 261), (1, 7)),
      ((41, 198), (2, 1)), ((53, 199), ()), ((319, 279), ()), ((29, 194), ())):
    assert _decide(program, machine, pair[column], *args) == (refuse, 1), pair
  other = ('aarch64', 'x86_64')[column]
  assert _decide(program, other, 0) == (0x8000, 0)  # Kills.


# The caller.


def test_many_at_once(nothing_left):
  if sandbox.unavailable():
    pytest.raises(errors.SandboxError, sandbox.run, 'print(1)')
    return
  results = {}
  def one(i):
    results[i] = sandbox.run(
        f'import os\nn = 0\ntry:\n  while os.fork(): n += 1\n'
        f'  os.read(os.pipe()[0], 1)\nexcept OSError: print({i}, n)',
        limits=sandbox.Limits(processes=3))
  threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert [results[i].stdout for i in range(6)] == [f'{i} 2\n' for i in range(6)]


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize('unsafe', [False, True])
def test_nothing_outlives_the_caller(nothing_left, number, unsafe):
  child = subprocess.Popen(
      [sys.executable, '-I', '-S', HELPER], stdin=subprocess.PIPE,
      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd='/')
  code = 'import os, time\nfor _ in range(2): os.fork()\ntime.sleep(1e6)'
  child.stdin.write(json.dumps({
      'source': code, 'limits': {**SMALL, 'wall_s': 60},
      'no_unshare': unsafe, 'unsafe': unsafe}))
  child.stdin.close()
  refused = not unsafe and sandbox.unavailable()
  if not refused:
    # Supervisor, init, and four of the program.
    assert sandbox_helpers.wait_until(
        lambda: len(sandbox_helpers.descendants(child.pid)) == 6, 60)
    child.send_signal(number)
  child.wait(60)
  assert refused or child.returncode != 0
  child.stdout.close()
  def reaped():
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:
      pass
    left = sandbox_helpers.descendants()
    if unsafe and number == signal.SIGKILL and 0 < len(left) < 4:
      # Without namespaces only the program's first process is sure to die.
      for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left
  assert sandbox_helpers.wait_until(reaped)


def test_a_supervisor_that_is_killed_takes_all_with_it(nothing_left):
  if sandbox.unavailable():
    pytest.raises(errors.SandboxError, sandbox.run, 'print(1)')
    return
  before = set(sandbox_helpers.descendants())
  def new():
    return set(sandbox_helpers.descendants()) - before
  def kill():
    assert sandbox_helpers.wait_until(lambda: len(new()) == 4)
    os.kill(min(new()), signal.SIGKILL)
  thread = threading.Thread(target=kill)
  thread.start()
  with pytest.raises(errors.SandboxError, match='exit code -9'):
    sandbox.run('import os, time\nos.fork()\ntime.sleep(1e6)')
  thread.join()
  def reaped():  # Init has come to us.
    for pid in new():
      try:
        os.waitpid(pid, os.WNOHANG)
      except ChildProcessError:
        pass
    return not new()
  assert sandbox_helpers.wait_until(reaped)


# Refusal.


def test_where_namespaces_are_forbidden_it_is_refused(nothing_left):
  found = _helper('print(1)', SMALL, no_unshare=True)
  assert 'namespaces: Operation not permitted' in found['refused']
  assert '--unsafe_exec' in found['refused']


def test_where_an_ordinary_user_has_no_namespaces_it_is_refused(nothing_left):
  python = _ordinary_python()
  if not python:
    pytest.skip('not root, or no Python that an ordinary user can run')
  found = _helper('print(1)', SMALL, NOBODY, python, no_unshare=True)
  assert 'user namespaces: Operation not permitted' in found['refused']


def test_root_without_the_right_to_mount_is_refused(nothing_left):
  if os.geteuid() != 0 or not shutil.which('setpriv'):
    pytest.skip('needs root and setpriv')
  found = _helper('print(1)', SMALL, ['setpriv', '--bounding-set=-sys_admin'])
  assert re.search(r'number of processes|not permitted', found['refused'])


def test_where_user_namespaces_are_used_up_it_is_refused(nothing_left):
  command = ['unshare', '--user', '--map-root-user', 'sh', '-c',
             'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', 'sh']
  if not shutil.which('unshare') or subprocess.run(
      [*command, 'true'], check=False, capture_output=True).returncode:
    pytest.skip('cannot make a user namespace to limit')
  found = _helper('print(1)', SMALL, command)
  assert 'user namespaces: ' in found['refused']


def test_unsafe_runs_with_limits(nothing_left):
  found = _helper(
      'import os\nprint({**os.environ, "LC_CTYPE": 0}, os.listdir("."))',
      SMALL, no_unshare=True, unsafe=True)
  # Python itself may set LC_CTYPE.
  assert found['stdout'] == "{'LC_CTYPE': 0} ['main.py']\n"
  assert not found['sandboxed']


@pytest.mark.parametrize('source, ended', [
    ('import time; time.sleep(1e6)', 'wall'),
    ('while True: pass', 'cpu'),
    ('while True: print("x" * 9999)', 'output'),
    ('import os, time\nfor _ in range(9):\n  if not os.fork():\n'
     '    x = b"x" * (100 << 20)\n    time.sleep(100)\ntime.sleep(100)',
     'memory'),
    ('import os, time\nif os.fork() == 0:\n  os.setsid()\n'
     '  if os.fork() == 0: time.sleep(1e6)\n  os._exit(0)\nos.wait()', 'exit'),
])
def test_unsafe_ends_it_all_the_same(nothing_left, source, ended):
  found = _helper(source, {**SMALL, 'cpu_s': 1, 'wall_s': 3}, no_unshare=True,
                  unsafe=True)
  assert found['ended'] == ended and not found['sandboxed']


def test_start_up_is_quick():
  if sandbox.unavailable():
    pytest.raises(errors.SandboxError, sandbox.run, 'print(1)')
    return
  took = []
  for _ in range(5):
    start = time.monotonic()
    assert sandbox.run('print(1)').ok
    took.append(time.monotonic() - start)
  assert min(took) < 2  # Tens of milliseconds on a machine that is idle.
