# ruff: noqa: E501 - one program per line
"""Programs that try to escape the sandbox or to exceed its limits; a program prints ESCAPED if it succeeds.

`{secret}` is a world-readable file, `{link}` a symbolic link to it, `{open}` a world-writable folder, `{port}` a listening TCP port,
`{socket}` a world-writable datagram socket, `{victim}` a process of the same user, `{agent}` the process that runs the tool.
"""

LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
MAPS = LIBC + (
    "P, N = ctypes.c_void_p, ctypes.c_size_t\n"
    "libc.mmap.restype, libc.mmap.argtypes = P, [P, N, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\n"
    "libc.munmap.argtypes, libc.madvise.argtypes = [P, N], [P, N, ctypes.c_int]\n"
    "libc.vmsplice.argtypes = [ctypes.c_int, P, N, ctypes.c_uint]\n"
    "def mapped(size, flags): a = libc.mmap(None, size, 3, flags, -1, 0); assert a != 2**64 - 1; return a\n"
)
# Machine code that starts a sleeping thread without libc and without a stack.
RAW_THREAD = "b838000000bf000f010031f631d24d31d24d31c00f054885c07401c3b8220000000f05ebf7"

# Chains of nested folders: each is moved to the end of the next, and each ends in a file of 8 MiB.
DEEPER = """
import os
chain = ['x' * 200] * 18
for n in range(9):
    for k in range(1, 19): os.mkdir('/'.join(chain[:k]))
    with open('/'.join(chain) + '/f', 'wb') as f: f.write(bytes(8 << 20))
    if n: os.rename('end', '/'.join(chain) + '/n')
    os.rename('x' * 200, 'end')
"""

ESCAPES = {
    "read a file": "print('ESCAPED' if open('{secret}').read() else '')",
    "read it by way of folders above": "print('ESCAPED' if open('../../../..{secret}').read() else '')",
    "read it over a symbolic link": "import os\nos.symlink('{secret}', 'l')\nprint('ESCAPED', open('l').read())",
    "read it over a hard link": "import os\nos.link('{secret}', 'l')\nprint('ESCAPED', open('l').read())",
    "rename it into the own folder": "import os\nos.rename('{secret}', 'own')\nprint('ESCAPED', open('own').read())",
    "read it with the C library": LIBC
    + "d = libc.open(b'{secret}', 0)\nprint('ESCAPED' if d >= 0 and os.read(d, 9) else '')",
    "read it by the root of a process": "print('ESCAPED', open('/proc/{agent}/root{secret}').read())",
    "read it by its own root": "print('ESCAPED', open('/proc/self/root{secret}').read())",
    "read its attributes": "import os\nprint('ESCAPED', os.getxattr('{secret}', 'user.about'))",
    "where a link leads": "import os\nprint('ESCAPED', os.readlink('{link}'))",
    "list the folder": "import os\nprint('ESCAPED' if os.listdir('{open}/..') else '')",
    "write a file": "open('{open}/x', 'w')\nprint('ESCAPED')",
    "write it with sqlite": "import sqlite3\nc = sqlite3.connect('{open}/x')\nc.execute('create table t(x)')\nprint('ESCAPED')",
    "write it with sqlite's attach": "import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute(\"attach '{open}/x' as o\")\n"
    "c.execute('create table o.t(x)')\nprint('ESCAPED')",
    "write it with logging": "import logging\nlogging.FileHandler('{open}/x').emit(logging.makeLogRecord({{}}))\nprint('ESCAPED')",
    "make a folder": "import os\nos.mkdir('{open}/x')\nprint('ESCAPED')",
    "make a device": "import os, stat\nos.mknod('d', stat.S_IFBLK | 0o666, os.makedev(259, 0))\nos.mknod('e', stat.S_IFBLK | 0o666, "
    "os.makedev(254, 0))\nfor n in 'de':\n  if os.read(os.open(n, 0), 1): print('ESCAPED')",
    "remove a file": "import os\nos.remove('{secret}')\nprint('ESCAPED')",
    "truncate a file": "import os\nos.truncate('{secret}', 0)\nprint('ESCAPED')",
    "change a file's mode": "import os\nos.chmod('{secret}', 0)\nprint('ESCAPED')",
    "change a file's owner": "import os\nos.chown('{secret}', 0, 0)\nprint('ESCAPED')",
    "change a file's times": "import os\nos.utime('{secret}', (1, 1))\nprint('ESCAPED')",
    "give a file attributes": "import os\nos.setxattr('{secret}', 'user.x', b'x')\nprint('ESCAPED')",
    "write to Python's library": "import os\nopen(os.path.dirname(os.__file__) + '/x.py', 'w')\nprint('ESCAPED')",
    "frames of the runner": "try: 1 / 0\nexcept Exception as e: g = e.__traceback__.tb_frame.f_back.f_globals\n"
    "g.update(FORBIDDEN=(), own='/')\nimport subprocess\nsubprocess.run(['/bin/cp', '{secret}', '{open}/x'], check=True)\nprint('ESCAPED')",
    "start a program": "import subprocess\nsubprocess.run(['/bin/true'], check=True)\nprint('ESCAPED')",
    "start Python again": "import sys, subprocess\nsubprocess.run([sys.executable, '-c', ''], check=True)\nprint('ESCAPED')",
    "start a shell": "import os\nprint('ESCAPED' if os.system('/bin/true') == 0 else '')",
    "become a program": "import os\nos.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "become a program of its own": "import os, sys\nopen('p', 'w').write('#!' + sys.executable + chr(10) + 'print(\"ESCAPED\")')\n"
    "os.chmod('p', 0o755)\nos.execv('./p', ['p'])",
    "become a program in memory": "import os, sys\nd = os.memfd_create('x')\nos.write(d, open(sys.executable, 'rb').read())\n"
    "os.execve(d, ['x', '-c', 'print(\"ESCAPED\")'], {{}})",
    "spawn": "import os\nos.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)\nprint('ESCAPED')",
    "fork": "import os\nif os.fork() == 0: print('ESCAPED', flush=True)",
    "fork by system call": LIBC + "if libc.syscall(57) >= 0: print('ESCAPED', flush=True)",
    "fork a terminal": "import pty\npty.fork()\nprint('ESCAPED')",
    "clone": LIBC + "if libc.syscall(56, 17, 0, 0, 0, 0) >= 0: print('ESCAPED', flush=True)",
    "clone newly": LIBC
    + "a = (ctypes.c_uint64 * 11)()\na[4] = 17\nif libc.syscall(435, a, 88) >= 0: print('ESCAPED', flush=True)",
    "multiprocessing": "import multiprocessing as m\np = m.Process(target=print, args=('ESCAPED',))\np.start()\np.join()",
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('ESCAPED')",
    "ask a page": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)\nprint('ESCAPED')",
    "send a datagram": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\nprint('ESCAPED')",
    "connect by system call": LIBC + "if libc.syscall(41, 2, 1, 0) >= 0: print('ESCAPED')",
    "connect to an abstract socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0lookahead-test-{port}')\nprint('ESCAPED')",
    "a pair of network sockets": "import socket\nsocket.socketpair(socket.AF_INET, socket.SOCK_STREAM)\nsocket.socket(socket.AF_INET)\n"
    "print('ESCAPED')",
    "a packet socket": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('ESCAPED')",
    "kill a process": "import os\nos.kill({victim}, 9)\nprint('ESCAPED')",
    "kill the agent": "import os\nos.kill({agent}, 9)\nprint('ESCAPED')",
    "kill a process by thread": LIBC + "if libc.syscall(234, {victim}, {victim}, 9) == 0: print('ESCAPED')",
    "kill a process by descriptor": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open({victim}), 9)\nprint('ESCAPED')",
    "lower a process's limits": "import resource\nresource.prlimit({victim}, resource.RLIMIT_NOFILE, (0, 0))\nprint('ESCAPED')",
    "lower a process's priority": "import os\nos.setpriority(os.PRIO_PROCESS, {victim}, 19)\nprint('ESCAPED')",
    "bind a process to a core": "import os\nos.sched_setaffinity({victim}, [0])\nprint('ESCAPED')",
    "trace a process": LIBC + "if libc.ptrace(16, {victim}, 0, 0) == 0: print('ESCAPED')",
    "read a process's memory": LIBC
    + "b = ctypes.create_string_buffer(8)\nv = (ctypes.c_uint64 * 2)(ctypes.addressof(b), 8)\n"
    "if libc.syscall(310, {agent}, v, 1, v, 1, 0) > 0: print('ESCAPED')",
    "read a process's environment": "print('ESCAPED' if open('/proc/{agent}/environ').read() else '')",
    "its own environment": "import os\nprint('ESCAPED' if 'hidden' in str(dict(os.environ)) else '')",
    "descriptors of the agent": "import os\nfor d in range(3, 64):\n  try: print('ESCAPED', d, os.fstat(d))\n  except OSError: pass",
    "become root": "import os\nos.setuid(0)\nprint('ESCAPED')",
    "be root": "import os\nprint('ESCAPED' if 0 in os.getresuid() else '')",
    "have capabilities": LIBC
    + "h = (ctypes.c_uint32 * 2)(0x20080522, 0)\nd = (ctypes.c_uint32 * 6)()\nlibc.capget(h, d)\n"
    "print('ESCAPED' if (d[0] | d[1] | d[3] | d[4]) & ~4 else '')",
    "a new root": "import os\nos.chroot('.')\nprint('ESCAPED')",
    "a user namespace": LIBC + "if libc.unshare(0x10000000) == 0: print('ESCAPED')",
    "another namespace": "import os\nLIBC = 0\n"
    + LIBC
    + "if libc.setns(os.open('/proc/{agent}/ns/mnt', 0), 0) == 0: print('ESCAPED')",
    "mount": LIBC + "if libc.mount(b'/', b'.', None, 4096, None) == 0: print('ESCAPED')",
    "mount the library for writing": LIBC
    + "if libc.mount(None, b'/lib', None, 4096 | 32, None) == 0: print('ESCAPED')",
    "unmount": LIBC + "if libc.umount2(b'/lib', 2) == 0: print('ESCAPED')",
    "open by handle": LIBC
    + "h = (ctypes.c_uint32 * 40)(128)\nif libc.name_to_handle_at(-100, b'.', h, ctypes.byref(ctypes.c_int()), 0) == 0: "
    "print('ESCAPED')",
    "io_uring": LIBC + "if libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0: print('ESCAPED')",
    "bpf": LIBC + "if libc.syscall(321, 0, ctypes.create_string_buffer(120), 72) >= 0: print('ESCAPED')",
    "user page faults": LIBC + "if libc.syscall(323, 0) >= 0: print('ESCAPED')",
    "keys of the kernel": LIBC + "if libc.syscall(250, 0, -3, 1) >= 0: print('ESCAPED')",
    "calls of another architecture": LIBC + "if libc.syscall(0x40000000 | 39) > 0: print('ESCAPED')",
    "System V shared memory": LIBC + "if libc.shmget(4711, 4096, 0o1666) >= 0: print('ESCAPED')",
    "System V messages": LIBC + "if libc.msgget(4711, 0o1666) >= 0: print('ESCAPED')",
    "POSIX messages": LIBC + "librt = libc\nif libc.syscall(240, b'x', 0o102, 0o666, None) >= 0: print('ESCAPED')",
    "shared memory that stays": "from multiprocessing import shared_memory\nshared_memory.SharedMemory('lookahead-x', True, 99)\nprint('ESCAPED')",
    "a semaphore that stays": "import multiprocessing\nmultiprocessing.Semaphore()\nprint('ESCAPED')",
    "watch a folder": LIBC
    + "d = libc.inotify_init()\nprint('ESCAPED' if d >= 0 and libc.inotify_add_watch(d, b'{open}', 4095) >= 0 else '')",
    "outlive the agent": LIBC + "if libc.prctl(1, 0, 0, 0, 0) == 0: print('ESCAPED')",
    "leave the process group": "import os\nos.setsid()\nprint('ESCAPED')",
    "raise its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 50, 1 << 50))\nprint('ESCAPED')",
    "type into the terminal": "import fcntl, termios\nfcntl.ioctl(open('/dev/tty'), termios.TIOCSTI, b'x')\nprint('ESCAPED')",
    "the machine's name": "import socket\nsocket.sethostname('escaped')\nprint('ESCAPED')",
    "the machine's clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nprint('ESCAPED')",
    "send a descriptor over a pair's datagrams": "import array, os, socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "b.sendmsg([b'x'], [(1, 1, array.array('i', [0]))], 0, '{socket}')\nprint('ESCAPED')",
    "send over a pair's datagrams": "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "a.sendto(b'x', '{socket}')\nprint('ESCAPED')",
    "send over a pair's packets": "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\nprint('ESCAPED')",
    "descriptors in flight": "import array, socket\na, b = socket.socketpair()\na.sendmsg([b'x'], [(1, 1, array.array('i', [0]))])\nprint('ESCAPED')",
    "bytes out of band": "import socket\na, b = socket.socketpair()\na.send(b'x', socket.MSG_OOB)\nprint('ESCAPED')",
    "greater buffers of a pair": "import socket\na, b = socket.socketpair()\na.setsockopt(1, 7, 1 << 20)\nprint('ESCAPED')",
    "hold up who writes to the library": "import fcntl, os\nfcntl.fcntl(os.open(os.__file__, 0), 1024, 0)\nprint('ESCAPED')",
    "lock the library": "import fcntl, os\nfcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_EX)\nprint('ESCAPED')",
    "lock the library by descriptor": "import fcntl, os, struct\nfcntl.fcntl(os.open(os.__file__, 0), 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))\n"
    "print('ESCAPED')",
    "watch the library": LIBC
    + "if libc.inotify_add_watch(libc.inotify_init(), os.path.dirname(os.__file__).encode(), 4095) >= 0: print('ESCAPED')",
    "be told of changes": "import fcntl, os\nfcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), 1026, 1)\nprint('ESCAPED')",
    "have others signalled": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], 8, {victim})\nprint('ESCAPED')",
    "have others signalled by ioctl": "import fcntl, socket, struct\na, b = socket.socketpair()\nfcntl.ioctl(a, 0x8901, struct.pack('i', {victim}))\nprint('ESCAPED')",
    "who has read the library": LIBC
    + "if libc.syscall(451, os.open(os.__file__, 0), (ctypes.c_uint64 * 2)(0, 1), (ctypes.c_uint64 * 5)(), 0) == 0: print('ESCAPED')",
    "drop the library from memory": "import os\nos.posix_fadvise(os.open(os.__file__, 0), 0, 0, os.POSIX_FADV_DONTNEED)\nprint('ESCAPED')",
    "write out all disks": LIBC + "if libc.syscall(162) == 0: print('ESCAPED')",
    "merge pages with others'": MAPS + "if libc.madvise(mapped(1 << 20, 0x22), 1 << 20, 12) == 0: print('ESCAPED')",
    "be dumped": LIBC + "if libc.prctl(4, 1, 0, 0, 0) == 0: print('ESCAPED')",
    "great pages again": LIBC + "if libc.prctl(41, 0, 0, 0, 0) == 0: print('ESCAPED')",
    "the machine's great pages": MAPS
    + "try: mapped(2 << 20, 0x40022)\nexcept AssertionError: assert ctypes.get_errno() == 12\nprint('ESCAPED')",
    "memory that is left to one page of it": MAPS
    + "for _ in range(9):\n  a = mapped(1 << 25, 0x21)\n  ctypes.memset(a, 1, 1 << 25)\n  libc.munmap(a + 4096, (1 << 25) - 4096)\nprint('ESCAPED')",
    "memory in a descriptor": "import os\nd = os.memfd_create('x')\nos.truncate(d, 1 << 20)\nprint('ESCAPED')",
    "memory in pipes": MAPS
    + "if libc.vmsplice(os.pipe()[1], (ctypes.c_uint64 * 2)(mapped(4096, 0x22), 4096), 1, 0) > 0: print('ESCAPED')",
    "files in pipes": "import os\nos.splice(os.open(os.__file__, 0), os.pipe()[1], 4096)\nprint('ESCAPED')",
    "files sent to pipes": "import os\nos.sendfile(os.pipe()[1], os.open(os.__file__, 0), 0, 4096)\nprint('ESCAPED')",
    "pipes in pipes": LIBC
    + "(r, w), (s, v) = os.pipe(), os.pipe()\nos.write(w, b'x')\nif libc.tee(r, v, 1, 0) > 0: print('ESCAPED')",
    "greater pipes": "import fcntl, os\nfcntl.fcntl(os.pipe()[1], 1031, 1 << 20)\nprint('ESCAPED')",
    "more threads than it may": "import ctypes, mmap\nm = mmap.mmap(-1, 4096, flags=2, prot=7)\nm.write(bytes.fromhex('"
    + RAW_THREAD
    + "'))\n"
    "f = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nif all(f() > 0 for _ in range(80)): print('ESCAPED', flush=True)",
    "timers": LIBC
    + "if all(libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0 for _ in range(80)): print('ESCAPED')",
    "say that there is no boundary": "import os\nprint('no boundary: ', flush=True)\nos._exit(202)",
}

EXHAUSTIONS = {
    "for ever": "while True: pass",
    "sleep": "import time\ntime.sleep(600)",
    "sleep without output": "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)",
    "ignore all signals": "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
    "while True: pass",
    "a fifo that nobody reads": "import os\nos.mkfifo('f')\nopen('f', 'w')",
    "locks that nobody opens": "import threading\nl = threading.Lock()\nl.acquire()\n"
    "[threading.Thread(target=l.acquire).start() for _ in range(20)]\nl.acquire()",
    "one great object": "x = bytearray(1 << 40)\nprint('ESCAPED')",
    "many objects": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "maps of memory": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 64 << 20))",
    "unpack a bomb": "import zlib\nz = zlib.compress(bytes(1 << 26))\nx = []\nwhile True: x.append(zlib.decompress(z))",
    "numbers that grow": "x = 9\nwhile True: x = x ** 99",
    "a regular expression": "import re\nre.match(r'(a+)+b', 'a' * 99)",
    "a stack without end": "import sys, threading\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "processes": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "small threads": "import threading, time\nthreading.stack_size(32768)\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "descriptors": "import os\nwhile True: os.open('.', 0)",
    "pipes": "import os\nwhile True: os.pipe()",
    "output": "while True: print('x' * 1000)",
    "a long line": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    "a great file": "f = open('f', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "many files": "n = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb').write(bytes(1 << 20))",
    "many files without output": "import os\nos.close(1)\nos.close(2)\nn = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb').write(bytes(1 << 20))",
    "empty files": "n = 0\nwhile True:\n  n += 1\n  open(str(n), 'w').close()",
    "long links": "import os\nn = 0\nwhile True:\n  n += 1\n  os.symlink('x' * 4000, str(n))",
    "folders in folders": "import os\nwhile True:\n  os.mkdir('d')\n  os.chdir('d')",
    "folders in folders by descriptors": "import os\nd = os.open('.', 0)\nwhile True:\n  os.mkdir('d', dir_fd=d)\n  e = os.open('d', 0, dir_fd=d)\n  "
    "os.close(d)\n  d = e",
    "folders in folders by moving": "import os\nos.mkdir('c')\nwhile True:\n  os.mkdir('n')\n  os.rename('c', 'n/c')\n  os.rename('n', 'c')",
    "folders deeper than names go": DEEPER,
    "folders as deep as names go": "import os\nfor n in range(1, 2040): os.mkdir('d/' * n)\nraise SystemExit('as deep as that')",
    "folders that nobody may look into": "import os\nos.mkdir('d', 0o300)\nos.mkdir('d/e', 0o700)\nopen('d/e/f', 'w').write('x')\nos.mkdir('g', 0)\n"
    "raise SystemExit('closed')",
    "attributes of files": "import os\nopen('f', 'w')\nn = 0\nwhile True:\n  n += 1\n  os.setxattr('f', f'user.{n}', bytes(4000))",
    "files without names, kept by a page": "import mmap, os\nx = []\nwhile True:\n  d = os.open('f', os.O_RDWR | os.O_CREAT)\n  os.unlink('f')\n  "
    "os.write(d, bytes(4 << 20))\n  x.append(mmap.mmap(d, 4096))\n  os.close(d)",
    "files without names": "import os, tempfile\nwhile True:\n  f = tempfile.TemporaryFile()\n  f.write(bytes(1 << 20))\n  f.flush()\n  os.dup(f.fileno())",
    "break the interpreter": "import ctypes\nctypes.string_at(0)",
}
