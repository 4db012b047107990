"""Runs one untrusted Python program behind walls: the script of `sandbox`.

It is started as `python -I -S sandbox_child.py PARENT_PID`, reads one JSON
request from stdin and writes one JSON result to stdout. Three processes: the
supervisor (here: clock, memory, output), `init` (first process of new
namespaces: it builds a root of read-only binds and waits) and the program.
The program holds no descriptor that leads out, init's death ends all that it
ever started, and init dies with the supervisor, which dies with the caller.
Standard library alone, and nothing of this package.
"""

import base64
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any
from typing import NoReturn

INSIDE = 1000  # User and group id of a program, as it sees them.
BOX = '/box'  # Its directory.
_FILES = 64  # Open files of one process.
_TICK_MS = 10  # Between looks at memory and CPU time.

# Number on x86_64 and aarch64. All others are refused; sockets, memfd, System
# V IPC, mounts, namespaces, keys, bpf, io_uring, ptrace among them.
_ALLOWED = """
read:0:63 write:1:64 close:3:57 open:2: openat:257:56 creat:85: stat:4:
lstat:6: fstat:5:80 newfstatat:262:79 statx:332:291 access:21:
faccessat:269:48 faccessat2:439:439 readlink:89: readlinkat:267:78
getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 lseek:8:62
pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69
pwritev:296:70 sendfile:40:71 copy_file_range:326:285 fadvise64:221:223
fallocate:285:47 truncate:76:45 ftruncate:77:46 fsync:74:82
fdatasync:75:83 flock:73:32 fcntl:72:25 dup:32:23 dup2:33: dup3:292:24
pipe:22: pipe2:293:59 close_range:436:436 rename:82: renameat:264:38
renameat2:316:276 mkdir:83: mkdirat:258:34 rmdir:84: link:86:
linkat:265:37 unlink:87: unlinkat:263:35 symlink:88: symlinkat:266:36
chmod:90: fchmod:91:52 fchmodat:268:53 umask:95:166 utime:132: utimes:235:
futimesat:261: utimensat:280:88 statfs:137:43 fstatfs:138:44
getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11
llistxattr:195:12 flistxattr:196:13 poll:7: ppoll:271:73 select:23:
pselect6:270:72 epoll_create:213: epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232: epoll_pwait:281:22 eventfd2:290:19 munmap:11:215
mprotect:10:226 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233
brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigsuspend:130:133 rt_sigpending:127:136 rt_sigtimedwait:128:137
sigaltstack:131:132 kill:62:129 tkill:200:130 tgkill:234:131 pause:34:
alarm:37: getitimer:36:102 setitimer:38:103 nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114
gettimeofday:96:169 time:201: times:100:153 restart_syscall:219:128
timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_delete:226:111 timer_getoverrun:225:109 fork:57: vfork:58:
execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
getpid:39:172 getppid:110:173 gettid:186:178 getpgid:121:155 getpgrp:111:
setpgid:109:154 getsid:124:156 setsid:112:157 getuid:102:174
geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
getresgid:120:150 getgroups:115:158 getrlimit:97:163 setrlimit:160:164
getrusage:98:165 sysinfo:99:179 uname:63:160 getpriority:140:141
sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125
sched_get_priority_min:147:126 getcpu:309:168 getrandom:318:278
futex:202:98 set_robust_list:273:99 get_robust_list:274:100
set_tid_address:218:96 rseq:334:293 membarrier:324:283 arch_prctl:158:
"""
_AUDIT = {'x86_64': 0xc000003e, 'aarch64': 0xc00000b7}
# From here on numbers are the same everywhere, and the C library falls back
# to an older call if it hears "no such call", but not on "not permitted".
_NEW_CALLS = 424
_CLONE_NEW = 0x7e020000  # All flags for new namespaces.
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x1, 0x20, 0x40000
_IOCTLS = (0x5401, 0x5413, 0x541b, 0x5421, 0x5450, 0x5451)  # Terminals, FION*.
_PRCTLS = (1, 15, 16, 0x53564d41)  # Death signal, names.

_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_PIVOT_ROOT = {'x86_64': 155, 'aarch64': 41}
_SYS_CAPSET = {'x86_64': 126, 'aarch64': 91}
_SYS_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_CAP_SYS_ADMIN = 21
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 22, 24
_PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47

_libc = ctypes.CDLL(None, use_errno=True)


class _Stop(BaseException):
  """The caller gave up."""


def _must(what: str, name: str, *args: Any) -> int:
  """Calls the C library, or raises an error that names what failed."""
  result = getattr(_libc, name)(*(
      ctypes.c_long(a) if isinstance(a, int) else a for a in args))
  if result < 0:
    raise OSError(ctypes.get_errno(),
                  f'{what}: {os.strerror(ctypes.get_errno())}')
  return result


def _prctl(option: int, *args: Any) -> int:
  rest = (*args, 0, 0, 0, 0)[:4]
  return _must(f'prctl {option}', 'prctl', option, *rest)


def _machine() -> str:
  machine = os.uname().machine
  if machine not in _AUDIT or struct.calcsize('P') != 8:
    raise OSError(errno.ENOSYS, f'no system call filter for {machine}')
  return machine


# The filter of system calls.


def _filter(machine: str) -> bytes:
  """Returns the classic BPF program that lets the allowed calls pass."""
  load, equal, above, tests, give = 0x20, 0x15, 0x35, 0x45, 0x06
  allow, kill, refuse = 0x7fff0000, 0x80000000, 0x00050000
  code: list[tuple[int, int, int, int]] = []

  def add(op: int, value: int, then: int = 0, otherwise: int = 0) -> None:
    code.append((op, then, otherwise, value))

  add(load, 4)  # Architecture.
  add(equal, _AUDIT[machine], 1, 0)
  add(give, kill)
  add(load, 0)  # Number; those of x32 have a high bit and match nothing.
  column = 1 if machine == 'x86_64' else 2
  for entry in _ALLOWED.split():
    number = entry.split(':')[column]
    if number:
      add(equal, int(number), 0, 1)
      add(give, allow)
  numbers = {'clone': (56, 220), 'mmap': (9, 222), 'prlimit64': (302, 261),
             'ioctl': (16, 29), 'prctl': (157, 167)}
  number_of = {name: pair[column - 1] for name, pair in numbers.items()}
  denied = (give, 0, 0, refuse | errno.EPERM)
  passed = (give, 0, 0, allow)

  def argument(index: int) -> tuple[int, int, int, int]:
    return load, 0, 0, 16 + 8 * index  # The low half; both are little-endian.

  rules = {
      'clone': [argument(0), (tests, 0, 1, _CLONE_NEW), denied, passed],
      # Shared memory without a file and huge pages count for no process.
      'mmap': [argument(3), (tests, 2, 0, _MAP_HUGETLB),
               (tests, 0, 2, _MAP_ANONYMOUS), (tests, 0, 1, _MAP_SHARED),
               denied, passed],
      'prlimit64': [argument(0), (equal, 1, 0, 0), denied, passed],
      'ioctl': [argument(1), *(
          step for value in _IOCTLS
          for step in ((equal, 0, 1, value), passed)), denied],
      'prctl': [argument(0), *(
          step for value in _PRCTLS
          for step in ((equal, 0, 1, value), passed)), denied],
  }
  for name, steps in rules.items():
    add(equal, number_of[name], 0, len(steps))
    code.extend(steps)
  add(above, 0x40000000, 1, 0)
  add(above, _NEW_CALLS, 1, 0)
  add(give, refuse | errno.EPERM)
  add(give, refuse | errno.ENOSYS)
  return b''.join(struct.pack('<HBBI', *step) for step in code)


def _install(program: bytes) -> None:
  """Puts a filter on this process and all that it starts."""
  buffer = ctypes.create_string_buffer(program, len(program))
  head = struct.pack('@HP', len(program) // 8, ctypes.addressof(buffer))
  _prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(head, len(head)))


# Namespaces, the root directory, privileges.


def _mount(source: str, target: str, kind: str | None, flags: int,
           options: str = '') -> None:
  _must(f'mount {target}', 'mount', source.encode(), target.encode(),
        kind.encode() if kind else None, flags, options.encode() or None)


def _read_only(path: str, recursive: bool) -> None:
  attributes = struct.pack('<QQQQ', _MS_RDONLY | _MS_NOSUID, 0, 0, 0)
  _must('read-only binds (Linux 5.12)', 'syscall', _SYS_MOUNT_SETATTR, -100,
        path.encode(), _AT_RECURSIVE if recursive else 0, attributes,
        len(attributes))


def _place(target: str, is_dir: bool) -> None:
  os.makedirs(target if is_dir else os.path.dirname(target), exist_ok=True)
  if not is_dir and not os.path.exists(target):
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def _build_root(request: dict[str, Any], uid: int) -> None:
  """Makes a root of read-only binds and one small writable directory."""
  _must('namespaces of mounts, network and IPC', 'unshare',
        _NEWNS | _NEWNET | _NEWIPC | _NEWUTS)
  _must('host name', 'sethostname', b'box', 3)
  _mount('none', '/', None, _MS_REC | _MS_PRIVATE)
  # Any directory will do: once it is the root, what it covered is seen again.
  base = '/usr'
  _mount('tmpfs', base, 'tmpfs', _MS_NOSUID,
         'size=1m,nr_inodes=4096,mode=755')
  os.mkdir(f'{base}/old')
  _must('pivot_root', 'syscall', _SYS_PIVOT_ROOT[_machine()], base.encode(),
        f'{base}/old'.encode())
  os.chdir('/')
  for path in request['binds']:
    _place(path, os.path.isdir('/old' + path))
    _mount('/old' + path, path, None, _MS_BIND | _MS_REC)
  for path, target in request['links'].items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.lexists(path):
      os.symlink(target, path)
  for path in request['hide']:
    if os.path.isdir(path):
      _mount('tmpfs', path, 'tmpfs', _MS_NODEV, 'size=4k,nr_inodes=2')
  os.mkdir(BOX)
  _must('umount', 'umount2', b'/old', _MNT_DETACH)
  os.rmdir('/old')
  _read_only('/', True)
  _mount('tmpfs', BOX, 'tmpfs', _MS_NOSUID | _MS_NODEV | _MS_NOEXEC,
         f'size={request["file_bytes"]},nr_inodes=1024,mode=700,'
         f'uid={uid},gid={uid}')


def _drop(uid: int | None) -> None:
  """Gives up every privilege for good; `uid` is set where we are root."""
  for cap in range(64):
    if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_long(cap), 0, 0, 0) < 0:
      break
  if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
  _prctl(_PR_CAP_AMBIENT, 4)
  head = ctypes.create_string_buffer(struct.pack('<Ii', 0x20080522, 0), 8)
  _must('capabilities', 'syscall', _SYS_CAPSET[_machine()], head, bytes(24))
  _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _is_root() -> bool:
  """Tells whether this process may mount and take any user id."""
  with open('/proc/self/status', encoding='ascii') as f:
    effective = next(int(line.split()[1], 16) for line in f
                     if line.startswith('CapEff'))
  if os.geteuid() != 0 or not effective >> _CAP_SYS_ADMIN & 1:
    return False
  with open('/proc/self/uid_map', encoding='ascii') as f:
    return sum(int(line.split()[2]) for line in f) >= 0xffffffff


def _new_user() -> None:
  """Enters a new user namespace as an ordinary user of it."""
  uid, gid = os.geteuid(), os.getegid()
  _must('user namespaces', 'unshare', _NEWUSER | _NEWPID)
  for name, text in (('setgroups', 'deny'), ('uid_map', f'{INSIDE} {uid} 1'),
                     ('gid_map', f'{INSIDE} {gid} 1')):
    try:
      with open(f'/proc/self/{name}', 'w', encoding='ascii') as f:
        f.write(text)
    except OSError as error:
      raise OSError(error.errno, f'user namespaces: {name}:'
                    f' {error.strerror}') from None


# The three processes.


def _limit(which: int, value: int) -> None:
  hard = resource.getrlimit(which)[1]
  value = value if hard == resource.RLIM_INFINITY else min(value, hard)
  resource.setrlimit(which, (value, value))


def _program(request: dict[str, Any], fds: tuple[int, int, int], status: int,
             processes: int | None) -> NoReturn:
  """Becomes the program."""
  try:
    # A group of processes can span namespaces, and so could its signals.
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    for target, fd in enumerate(fds):
      os.dup2(fd, target)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM,
                   signal.SIGINT):
      signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _FILES)
    _limit(resource.RLIMIT_FSIZE, request['file_bytes'])
    _limit(resource.RLIMIT_CPU, int(request['cpu_s']) + 1)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    _limit(resource.RLIMIT_SIGPENDING, 128)
    if processes is not None:
      _limit(resource.RLIMIT_NPROC, processes)
    code = _filter(_machine()) if request['sealed'] else b''
    argv = [request['python'], '-I', '-B', '-X', 'utf8', *request['argv']]
    _limit(resource.RLIMIT_AS, request['memory_bytes'])
    if code:
      _install(code)
    os.execve(request['python'], argv, {})
  except BaseException as error:  # No Python frame may survive the fork.
    _tell(status, {'error': f'start: {_why(error)}'})
  os._exit(127)


def _why(error: BaseException) -> str:
  return getattr(error, 'strerror', None) or repr(error)


def _tell(fd: int, message: dict[str, Any]) -> None:
  os.write(fd, json.dumps(message).encode() + b'\n')


def _init(request: dict[str, Any], fds: tuple[int, int, int], status: int,
          uid: int | None) -> NoReturn:
  """Builds the box, starts the program in it, and reports how it ended."""
  try:
    os.umask(0o022)
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    processes = None
    if request['sealed']:
      # Should memory run out, here is what to kill.
      with open('/proc/self/oom_score_adj', 'w', encoding='ascii') as f:
        f.write('1000')
      _build_root(request, INSIDE if uid is None else uid)
      _drop(uid)
      # A change of user clears the death signal.
      _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
      processes = request['processes'] + (2 if uid is None else 1)
      os.chdir(BOX)
    else:
      os.chdir(request['directory'])
    poll = select.poll()
    poll.register(status, 0)
    if poll.poll(0):
      os._exit(1)  # The supervisor died before it could be our death.
    for name, data in request['files'].items():
      folder = os.path.dirname(name)
      if folder:
        os.makedirs(folder, exist_ok=True)
      with open(name, 'xb') as f:
        f.write(base64.b64decode(data))
    pid = os.fork()
    if pid == 0:
      _program(request, fds, status, processes)
    for fd in fds:
      os.close(fd)
    while True:
      found, code, usage = os.wait4(-1, 0)
      if found == pid:
        _tell(status, {'code': os.waitstatus_to_exitcode(code),
                       'cpu': usage.ru_utime + usage.ru_stime})
        break
  except BaseException as error:
    _tell(status, {'error': _why(error)})
  os._exit(0)


class _Watch:
  """Memory and CPU time of a process and all that it started."""

  def __init__(self) -> None:
    self._proc = os.open('/proc', os.O_RDONLY | os.O_DIRECTORY)
    self._tick = os.sysconf('SC_CLK_TCK')

  def _read(self, path: str) -> str:
    fd = os.open(path, os.O_RDONLY, dir_fd=self._proc)
    try:
      return os.read(fd, 1 << 16).decode('ascii', 'replace')
    finally:
      os.close(fd)

  def _threads(self, pid: int) -> list[str]:
    fd = os.open(f'{pid}/task', os.O_RDONLY, dir_fd=self._proc)
    try:
      return os.listdir(fd)
    finally:
      os.close(fd)

  def tree(self, root: int) -> dict[int, list[str]]:
    """Returns process id -> thread ids, of all that are below `root`."""
    # Without this file, memory in sum cannot be limited.
    self._read(f'{os.getpid()}/task/{os.getpid()}/children')
    found: dict[int, list[str]] = {}
    todo = [root]
    while todo:
      pid = todo.pop()
      try:
        threads = self._threads(pid)
        for thread in threads:
          todo += map(int, self._read(f'{pid}/task/{thread}/children').split())
      except OSError:
        threads = []  # It has just ended.
      if pid != root:
        found[pid] = threads
    return found

  def use(self, root: int) -> tuple[int, float]:
    """Returns bytes of private memory and seconds of CPU time below `root`."""
    memory, ticks = 0, 0
    for pid, threads in self.tree(root).items():
      for thread in threads:  # The first thread may have ended before others.
        try:
          text = self._read(f'{pid}/task/{thread}/status')
        except OSError:
          continue
        sizes = [int(line.split()[1]) for line in text.splitlines()
                 if line.startswith(('RssAnon:', 'RssShmem:', 'VmSwap:'))]
        if sizes:
          memory += sum(sizes) * 1024
          break
      ticks += self._ticks(pid)
    return memory, (ticks + self._ticks(root)) / self._tick

  def _ticks(self, pid: int) -> int:
    try:
      fields = self._read(f'{pid}/stat').rpartition(')')[2].split()
    except OSError:
      return 0
    return sum(map(int, fields[11:15]))  # Own, and of children waited for.


def _kill(watch: _Watch, init: int) -> None:
  """Ends init and everything below it, and waits until all are gone."""
  try:
    os.kill(init, signal.SIGKILL)  # Of a PID namespace: all in it die.
  except ProcessLookupError:
    pass
  until = time.monotonic() + 10
  while time.monotonic() < until:
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:
      return
    for pid in watch.tree(os.getpid()):  # Orphans come to us.
      try:
        os.kill(pid, signal.SIGKILL)
      except ProcessLookupError:
        pass
    time.sleep(0.001)


def _memory_file(data: bytes) -> int:
  """Returns a descriptor to read `data` from, which cannot be changed."""
  fd = os.memfd_create('stdin', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  with open(fd, 'wb', closefd=False) as f:
    f.write(data)
  os.lseek(fd, 0, os.SEEK_SET)
  fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW
              | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
  return fd


def _supervise(request: dict[str, Any]) -> dict[str, Any]:
  """Runs a request to its end; nothing that it started is left."""
  watch = _Watch()
  uid = None
  _prctl(_PR_SET_SUBREAPER, 1)
  if request['sealed']:
    _machine()
    if _is_root():
      # An id that nobody else has: limits count by user, but not for root.
      uid = 0x40000000 + os.getpid()
      _must('PID namespaces', 'unshare', _NEWPID)
    else:
      _new_user()
  stdin = _memory_file(base64.b64decode(request['stdin']))
  out, out_end = os.pipe()
  err, err_end = os.pipe()
  status, status_end = os.pipe()
  start = time.monotonic()
  init = os.fork()
  if init == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(status)
    _init(request, (stdin, out_end, err_end), status_end, uid)
  try:
    for fd in (stdin, out_end, err_end, status_end):
      os.close(fd)
    got = {out: bytearray(), err: bytearray(), status: bytearray()}
    ended = _follow(watch, init, request, got, status, start)
    seconds = time.monotonic() - start
  finally:
    _kill(watch, init)
  for fd in (out, err):  # What was still in the pipes; all writers are gone.
    os.set_blocking(fd, False)
    try:
      while data := os.read(fd, 1 << 16):
        got[fd] += data
    except BlockingIOError:
      pass
  said = [json.loads(line) for line in got[status].splitlines()]
  for message in said:
    if 'error' in message:
      return message
  code = said[0]['code'] if said else -signal.SIGKILL
  cpu = said[0]['cpu'] if said else 0
  most = request['output_bytes']
  if not ended and max(len(got[out]), len(got[err])) > most:
    ended = 'output'
  if not ended and code < 0:
    late = code == -signal.SIGXCPU or cpu >= request['cpu_s']
    ended = 'cpu' if late else f'signal {-code}'
  return {'ended': ended or 'exit', 'code': None if ended else code,
          'seconds': seconds,
          'stdout': base64.b64encode(got[out][:most]).decode(),
          'stderr': base64.b64encode(got[err][:most]).decode()}


def _follow(watch: _Watch, init: int, request: dict[str, Any],
            got: dict[int, bytearray], status: int, start: float) -> str:
  """Reads until the program ends; returns why it must be ended, or ''."""
  poll = select.poll()
  for fd in got:
    poll.register(fd, select.POLLIN)
  look = 0.0
  while True:
    for fd, _ in poll.poll(_TICK_MS):
      data = os.read(fd, 1 << 16)
      got[fd] += data
      if not data:
        poll.unregister(fd)
        if fd == status:
          return ''  # Init has ended, or has said how the program did.
      elif fd != status and len(got[fd]) > request['output_bytes']:
        return 'output'
    now = time.monotonic()
    if now - start > request['wall_s']:
      return 'wall'
    if now - look >= _TICK_MS / 1000:
      look = now
      memory, cpu = watch.use(init)
      if memory > request['memory_bytes']:
        return 'memory'
      if cpu > request['cpu_s']:
        return 'cpu'


def _stop(*unused: Any) -> None:
  raise _Stop


def main() -> None:
  """Serves one request."""
  _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
  if os.getppid() != int(sys.argv[1]):
    return  # The caller died before it could be our death.
  signal.signal(signal.SIGTERM, _stop)
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    result = _supervise(json.load(sys.stdin))
  except OSError as error:
    result = {'error': _why(error)}
  except _Stop:
    return
  json.dump(result, sys.stdout)


if __name__ == '__main__':
  main()
