"""Runs untrusted Python programs so that nothing gets out or stays behind.

Each run has its own process, PID, mount, network and IPC namespaces, an empty
environment, a root that holds the interpreter and system libraries (read-only)
and one small directory in memory, an id without privileges, a filter of system
calls, and limits. `sandbox_child` enforces them. Where one of them cannot be
enforced, a run is refused.
"""

import base64
from collections.abc import Mapping
import dataclasses
import functools
import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

from kvgraft_jax import errors
from kvgraft_jax import sandbox_child

_GRACE_S = 30  # For starting and ending, on a busy machine.
_SYSTEM = ('/', '/usr', '/usr/local')  # Prefixes that hold more than Python.


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one run may use; processes and threads count alike.

  Memory is limited for each process (address space) and for all together
  (private pages; pages that a fork shares count once for each process).
  `file_bytes` holds for each file and for all together.
  """

  cpu_s: float = 10
  wall_s: float = 20
  memory_bytes: int = 512 << 20
  processes: int = 16
  file_bytes: int = 16 << 20
  output_bytes: int = 64 << 10

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      whole = not field.name.endswith('_s')
      if type(value) not in (int, float)[:2 - whole] or not (
          0 < value < 1 << 62):
        raise errors.UsageError(
            f'limit {field.name} is {value!r:.80}; expected'
            f' {"an integer" if whole else "a number"} above 0')


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run ended.

  Attributes:
    stdout: what it printed, undecodable bytes replaced, cut at the limit.
    stderr: likewise.
    exit_code: where it ended by itself.
    ended: 'exit', 'signal N', or the limit it broke: 'cpu', 'wall', 'memory',
      'output'.
    seconds: wall time.
    sandboxed: whether everything was enforced.
  """

  stdout: str
  stderr: str
  exit_code: int | None
  ended: str
  seconds: float
  sandboxed: bool

  @property
  def ok(self) -> bool:
    """Whether it ended by itself with exit code 0."""
    return self.ended == 'exit' and self.exit_code == 0


# Says so if a wall is missing. Limits on memory in sum, time and output are
# kept by the supervisor, which fails by itself where it cannot.
_PROBE = """
import ctypes, errno, os, resource, socket
def refused(what, call, *args):
  try:
    call(*args)
  except OSError:
    return
  print(what)
refused('network', socket.socket)
refused('files outside', os.listdir, '/proc')
refused('files outside', open, '/etc/passwd')
refused('a read-only root', os.mkdir, '/new')
refused('a read-only root', open, os.__file__, 'a')
if ctypes.CDLL(None).unshare(0x10000000) == 0: print('the call filter')
if os.getppid() != 1: print('PID namespaces')
if 0 in os.getresuid() + os.getresgid(): print('an id without privileges')
if resource.getrlimit(resource.RLIMIT_AS)[1] < 0: print('memory')
count = 0
try:
  while count < 3:
    if os.fork() == 0:
      os.read(os.pipe()[0], 1)
    count += 1
except OSError:
  pass
if count != 2: print(f'the number of processes ({count + 1} of 3)')
"""


@functools.cache
def unavailable() -> str:
  """Returns why programs cannot be run safely here, '' if they can.

  Tries it, once in each process.
  """
  if sys.platform != 'linux':
    return f'{sys.platform} has no namespaces'
  try:
    result = _run(_PROBE, '', {}, Limits(processes=3), True, False)
  except errors.SandboxError as error:
    return str(error)
  missing = ', '.join(dict.fromkeys(result.stdout.split('\n')[:-1]))
  if missing:
    return f'not enforced: {missing}'
  if not result.ok:
    return (f'a test program failed ({result.ended} {result.exit_code}):'
            f' {" ".join(result.stderr.split())[-200:]}')
  return ''


def run(
    source: str, *, stdin: str = '', files: Mapping[str, bytes] | None = None,
    limits: Limits = Limits(), unsafe: bool = False, packages: bool = False,
) -> Result:
  """Runs a Python program that nobody has vouched for.

  Nothing that it started outlives this call, nor this process.

  Args:
    source: of the program.
    stdin: what it reads.
    files: relative path -> content, put into its directory.
    limits: of the run.
    unsafe: where the sandbox is unavailable, run the program all the same, with
      limits but without walls; `Result.sandboxed` tells.
    packages: whether it can import the packages that are installed here.

  Raises:
    SandboxError: if the sandbox is unavailable and `unsafe` is not set, or
      fails.
  """
  why = unavailable()
  if why and not unsafe:
    raise errors.SandboxError(
        f'programs cannot be run safely here: {why}; use a machine or container'
        ' that allows it, or pass --unsafe_exec to run them with limits but'
        ' without walls')
  return _run(source, stdin, files or {}, limits, not why, packages)


def _run(source: str, stdin: str, files: Mapping[str, bytes], limits: Limits,
         sealed: bool, packages: bool) -> Result:
  contents = {'main.py': source.encode('utf-8', 'replace'), **files}
  for name in contents:
    if os.path.isabs(name) or '..' in name.split('/') or not name:
      raise errors.UsageError(
          f'file {name!r} is not inside the directory of the program')
  request: dict[str, Any] = {
      **dataclasses.asdict(limits), **_places(packages),
      'sealed': sealed,
      'stdin': base64.b64encode(stdin.encode('utf-8', 'replace')).decode(),
      'files': {name: base64.b64encode(data).decode()
                for name, data in contents.items()},
      'argv': ['main.py'],
  }
  if packages:
    request['argv'] = ['-c', 'import runpy, sys; sys.argv[:] = ["main.py"];'
                       f' sys.path += {_packages()!r};'
                       ' runpy.run_path("main.py", run_name="__main__")']
  directory = '' if sealed else tempfile.mkdtemp(prefix='kvgraft')
  request['directory'] = directory
  try:
    answer = _supervised(request, limits.wall_s + _GRACE_S)
  finally:
    if directory:
      shutil.rmtree(directory, ignore_errors=True)
  if 'error' in answer:
    raise errors.SandboxError(answer['error'])
  stdout, stderr = (
      base64.b64decode(answer[name]).decode('utf-8', 'replace')
      for name in ('stdout', 'stderr'))
  return Result(
      stdout=stdout, stderr=stderr, exit_code=answer['code'],
      ended=answer['ended'], seconds=answer['seconds'], sandboxed=sealed)


def _supervised(request: dict[str, Any], seconds: float) -> dict[str, Any]:
  """Hands a request to a new supervisor and returns its answer."""
  try:
    child = subprocess.Popen(
        [request['python'], '-I', '-S', '-B',
         sandbox_child.__file__, str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True)
  except OSError as error:
    raise errors.SandboxError(f'cannot start Python: {error}') from None
  try:
    out, err = child.communicate(json.dumps(request).encode(), seconds)
  except subprocess.TimeoutExpired:
    raise errors.SandboxError(
        f'the supervisor did not answer in {seconds:.0f} s') from None
  finally:
    if child.poll() is None:
      child.terminate()  # So that it ends what it started, and waits for that.
      try:
        child.wait(15)
      except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
      if pipe is not None:
        pipe.close()
  try:
    return json.loads(out)
  except ValueError:
    raise errors.SandboxError(
        f'the supervisor failed (exit code {child.returncode}):'
        f' {" ".join(err.decode("utf-8", "replace").split())[-200:]}') from None


def _packages() -> list[str]:
  """Returns the directories of this environment's packages."""
  return [path for path in sys.path if os.path.isdir(path) and
          os.path.basename(path) in ('site-packages', 'dist-packages')]


@functools.cache
def _places(packages: bool) -> dict[str, Any]:
  """Returns what a program can see of this machine's files.

  Args:
    packages: whether installed packages are among it.

  Returns:
    python: the interpreter; binds: files and directories; links: path ->
    target; hide: directories that look empty.
  """
  base = getattr(sys, '_base_executable', '') or sys.executable
  python = os.path.realpath(base)
  library = [os.path.realpath(sysconfig.get_path(
      name, vars={'installed_base': sys.base_prefix,
                  'platbase': sys.base_exec_prefix}))
             for name in ('stdlib', 'platstdlib')]
  wanted = [python, *library, '/etc/ld.so.cache', '/dev/null', '/dev/urandom']
  if os.path.realpath(sys.base_prefix) in _SYSTEM:
    wanted += glob.glob(f'{sys.base_prefix}/lib/libpython*')
  else:
    wanted.append(f'{sys.base_prefix}/lib')
  multiarch = sysconfig.get_config_var('MULTIARCH') or 'none'
  wanted += ['/lib64', '/usr/lib64', f'/lib/{multiarch}',
             f'/usr/lib/{multiarch}', *(_packages() if packages else ())]
  links = {}
  for path in ('/lib', '/lib64', *glob.glob('/lib/ld-linux*')):
    path = os.path.join(os.path.realpath(os.path.dirname(path)),
                        os.path.basename(path))
    if os.path.islink(path):
      links[path] = os.readlink(path)
    elif path != '/lib':
      wanted.append(path)
  binds: list[str] = []
  for path in sorted({os.path.realpath(p) for p in wanted}, key=len):
    if os.path.exists(path) and not any(
        path.startswith(b + '/') for b in binds):
      binds.append(path)
  hide = [] if packages else [
      f'{path}/{name}' for path in dict.fromkeys(library)
      for name in ('site-packages', 'dist-packages')]
  return {'python': python, 'binds': binds, 'links': links, 'hide': hide}
