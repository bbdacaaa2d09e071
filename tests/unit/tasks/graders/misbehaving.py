"""A hundred candidate programs that misbehave. NEEDLE is put in place of a word that is unique to a test run."""

# ruff: noqa: E501
from __future__ import annotations

_LOOPS = {
    "loop": "while True: pass",
    "loop in C": "sum(range(10**18))",
    "loop in a power": "9 ** 9 ** 9",
    "loop in a regex": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "loop that swallows all": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "recursion": "def f(): f()\nf()",
    "recursion without limit": "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()",
    "recursion in C": "import sys; sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "recursion of repr": "class A:\n    def __repr__(self): return repr(self)\nimport sys; sys.setrecursionlimit(10**9); repr(A())",
    "busy threads": "import threading\ndef f():\n    while True: pass\nfor _ in range(8): threading.Thread(target=f).start()",
    "sleep": "import time; time.sleep(1000)",
    "sleep in small steps": "import time\nwhile True: time.sleep(0.001)",
    "pause": "import signal; signal.pause()",
    "sleep at exit": "import atexit, time; atexit.register(time.sleep, 1000)",
    "loop at exit": "import atexit\ndef f():\n    while True: pass\natexit.register(f)",
    "deadlock": "import threading; l = threading.Lock(); l.acquire(); l.acquire()",
    "wait for itself": "import os; r, w = os.pipe(); os.read(r, 1)",
    "read standard input for ever": "import sys\nwhile True: sys.stdin.read()",
    "finalizer loop": "class A:\n    def __del__(self):\n        while True: pass\na = A(); del a",
    "hash collisions": "class A:\n    def __hash__(self): return 1\n    def __eq__(self, o): return False\nd = {A() for _ in range(10**6)}",
}

_IGNORES = "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
_SIGNALS = {
    "ignores signals and loops": _IGNORES + "while True: pass",
    "ignores signals and sleeps": _IGNORES + "import time\nwhile True: time.sleep(1)",
    "ignores signals in a child": _IGNORES
    + "import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True: time.sleep(1)",
    "blocks signals": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "handles the end of its time": "import signal\nsignal.signal(signal.SIGXCPU, lambda *a: None)\nwhile True: pass",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "stops its group": "import os, signal; os.killpg(0, signal.SIGSTOP)",
    "kills its parent": "import os, time; os.kill(os.getppid(), 9); time.sleep(1000)",
    "kills its parent's group": "import os, time; os.killpg(os.getpgid(os.getppid()), 9); time.sleep(1000)",
    "kills its group": "import os; os.killpg(0, 9)",
    "interrupts its parent": "import os, time, signal; os.kill(os.getppid(), signal.SIGINT); time.sleep(1000)",
    "stops its parent": "import os, time, signal; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1000)",
    "kills the first process": "import os, time\nfor n in (9, 15, 2, 11):\n    try: os.kill(1, n)\n    except OSError: pass\ntime.sleep(1000)",
    "kills itself": "import os; os.kill(os.getpid(), 9)",
    "alarm": "import signal; signal.alarm(1); signal.pause()",
}

_PROCESSES = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork bomb that sleeps": "import os, time\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(1000)\n    except OSError: time.sleep(0.01)",
    "fork bomb of sessions": "import os\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass",
    "fork bomb of a shell": "import os; os.system('f() { f | f & }; f; sleep 1000')",
    "fork bomb of pythons": "import subprocess, sys\nwhile True:\n    try: subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n    except OSError: pass",
    "fork bomb that ends its parents": "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(1000,)).start()\n    except RuntimeError: pass",
    "vfork bomb": "import os\nwhile True:\n    try: os.posix_spawn('/bin/sleep', ['sleep', '1000'], {})\n    except OSError: pass",
    "orphan": "import os, time\nif os.fork() == 0: time.sleep(1000)",
    "orphan in a new session": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1000)",
    "daemon": "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nwhile True: time.sleep(1)",
    "busy daemon": "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nwhile True: pass",
    "daemon of another program": "import subprocess\nsubprocess.Popen(['/bin/sleep', '1000'], start_new_session=True, close_fds=True)",
    "daemon without an environment": "import os\nif os.fork() == 0:\n    os.setsid(); os.execve('/bin/sleep', ['NEEDLE', '1000'], {})",
    "daemon without open files": "import os, time\nif os.fork() == 0:\n    os.setsid(); os.closerange(0, 256); time.sleep(1000)",
    "nohup": "import os; os.system('nohup setsid sleep 1000 >/dev/null 2>&1 &')",
    "multiprocessing": "import multiprocessing as m, time\nfor _ in range(8): m.get_context('fork').Process(target=time.sleep, args=(1000,)).start()",
    "zombies": "import os, time\nfor _ in range(10):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(1000)",
    "traced child": "import ctypes, os, time\nc = ctypes.CDLL(None)\nif os.fork() == 0:\n    c.ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)\ntime.sleep(1000)",
    "reaper": "import ctypes, os, time\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\nfor _ in range(3):\n    if os.fork() == 0:\n        if os.fork() == 0: time.sleep(1000)\n        os._exit(0)\ntime.sleep(1000)",
    "namespaces of its own": "import ctypes, os, time\nctypes.CDLL(None).unshare(0x10000000 | 0x20000000)\nif os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)",
    "executes itself for ever": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import os, sys; os.execv(sys.executable, sys.orig_argv)'])",
}

_MEMORY = {
    "list without end": "x = []\nwhile True: x.append(' ' * 10**6)",
    "one large block": "bytearray(10**11)",
    "doubling": "x = 'a'\nwhile True: x += x",
    "mapping": "import mmap\nx = []\nwhile True: m = mmap.mmap(-1, 10**7); m.write(b'x' * 10**7); x.append(m)",
    "many small objects": "x = []\nwhile True: x.append([])",
    "large number": "10 ** 10**10",
    "hogs": "import os\nfor _ in range(3): os.fork()\nx = [bytes([n % 256]) * 10**6 for n in range(100)]\nimport time; time.sleep(1000)",
    "memory file": "import os\nf = os.memfd_create('x')\nwhile True: os.write(f, b'x' * 10**6)",
    "swallows the error": "x = []\nwhile True:\n    try: x.append(bytearray(10**6))\n    except MemoryError: pass",
    "locked memory": "import ctypes, mmap\nctypes.CDLL(None).mlockall(3); x = [bytearray(10**6) for _ in range(10**6)]",
}

_OUTPUT = {
    "100 MB of output": "print('x' * 10**8)",
    "100 MB in lines": "for _ in range(10**6): print('x' * 99)",
    "output for ever": "while True: print('x')",
    "errors for ever": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "output of a child": "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: os.write(1, b'x' * 1000)",
    "output of yes": "import os; os.execv('/usr/bin/yes', ['yes'])",
    "grows its output": "import os; os.ftruncate(1, 10**12)",
    "output far away": "import os; os.lseek(1, 10**12, 0); os.write(1, b'x')",
    "broken characters": "import os; os.write(1, bytes(range(256)) * 100)",
    "closes its output": "import os; os.close(1); os.close(2); os.close(0)\nwhile True: pass",
    "closes all": "import os; os.closerange(0, 1000)",
    "half a line of JSON": "print('{\"stdout\": \"', end='')",
    "claims to be a result": 'print(\'{"stdout": "right", "stderr": "", "exit_code": 0, "reason": ""}\')',
    "writes to every open file": 'import os\nfor n in range(256):\n    try: os.write(n, b\'{"stdout": "right\\\\n", "stderr": "", "exit_code": 0, "reason": ""}\\n\')\n    except OSError: pass',
}

_PLACES = "['/', '/tmp', '/var/tmp', '/dev/shm', '..', '/root', '/home', '/etc', '/proc', '/usr/lib', '/work', os.path.expanduser('~')]"
_TRY = "    except OSError: pass\n"
_FILES = {
    "writes elsewhere": f"import os\nfor p in {_PLACES}:\n    try: open(p + '/NEEDLE', 'w').write('x')\n" + _TRY,
    "makes folders elsewhere": f"import os\nfor p in {_PLACES}:\n    try: os.makedirs(p + '/NEEDLE/a/b')\n" + _TRY,
    "links elsewhere": f"import os\nfor p in {_PLACES}:\n    try: os.symlink('/etc/passwd', p + '/NEEDLE')\n" + _TRY,
    "pipes elsewhere": f"import os\nfor p in {_PLACES}:\n    try: os.mkfifo(p + '/NEEDLE')\n" + _TRY,
    "changes itself": "import os\nopen(__file__, 'w').write('NEEDLE')",
    "changes its library": "import os, json\nopen(json.__file__, 'a').write('# NEEDLE')",
    "removes all": "import shutil\nfor p in ('/tmp', '/var/tmp', '/work', '/dev/shm'): shutil.rmtree(p + '/NEEDLE-keep', ignore_errors=True)\nshutil.rmtree('/', ignore_errors=True)",
    "huge file": "f = open('NEEDLE', 'wb')\nwhile True: f.write(b'x' * 10**6)",
    "huge sparse file": "open('NEEDLE', 'wb').truncate(10**12)",
    "many files": "for n in range(10**6): open(f'NEEDLE{n}', 'w').close()",
    "many files in deep folders": "import os\nwhile True: os.mkdir('NEEDLE'); os.chdir('NEEDLE')",
    "files that cannot be removed": "import os\nos.mkdir('NEEDLE'); open('NEEDLE/a', 'w').close(); os.chmod('NEEDLE', 0); os.chmod('.', 0)",
    "removes its folder": "import os; os.rmdir(os.getcwd()); open('NEEDLE', 'w')",
    "opens without end": "x = []\nwhile True: x.append(open('/dev/null'))",
    "odd names": "open('NEEDLE\\n\\udc80', 'w').close(); open(' ' * 200, 'w').close(); open('-rf', 'w').close()",
}

_OTHERS = {
    "connects": "import socket; socket.create_connection(('1.1.1.1', 53), 100)",
    "listens": "import socket; s = socket.create_server(('127.0.0.1', 0)); s.accept()",
    "asks for names": "import socket; socket.getaddrinfo('example.org', 80)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "writes over its memory": "import ctypes, os\nfor a in range(id(0) - 10**6, id(0), 8): ctypes.c_long.from_address(a).value = 7",
    "aborts": "import os; os.abort()",
    "leaves": "import os; os._exit(0)",
    "leaves politely": "raise SystemExit(0)",
    "is no Python": "this is not Python",
    "has a null byte": "x = '\0'",
    "has a lone surrogate": "x = '\udc80'",
    "is very deep": "(" * 10_000 + ")" * 10_000,
    "is very long": "x = " + " + ".join(["1"] * 50_000),
    "becomes root": "import os\nfor f in (os.setuid, os.setgid, os.seteuid): f(0)",
    "mounts": "import ctypes\nctypes.CDLL(None).mount(b'/', b'/sandbox', None, 4096, None); open('/sandbox/tmp/NEEDLE', 'w')",
}

PROGRAMS = _LOOPS | _SIGNALS | _PROCESSES | _MEMORY | _OUTPUT | _FILES | _OTHERS
