"""Linux namespaces: a file system of its own, no network, no other processes.

The candidate sees system libraries and the Python installation, both read-only, and one empty folder in memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

FOLDER = "/sandbox"
"""Where the candidate runs; the only place it can write to."""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "full", "random", "urandom")
MAX_FILES = 1000

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY_NOSUID = -100, 0x8000, 1 | 2
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(user_id: int, group_id: int) -> None:
    """Leave all namespaces but the PID one, which the next child leaves. Raises OSError when that is not allowed."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    if user_id == 0:
        return _call("unshare", flags)
    _call("unshare", flags | NEWUSER)
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user_id} {user_id} 1"),
        ("gid_map", f"{group_id} {group_id} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as stream:
            stream.write(text)
    return None


def build_root(prefixes: Sequence[str], program: bytes) -> str:
    """Put a new root in place of the old one, as the first process of the PID namespace; the program's path in it."""
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")  # hides nothing: /tmp is seen from /old
    for path in ("/tmp/new", "/tmp/old"):
        os.mkdir(path)
    _pivot("/tmp", "/tmp/old")
    _mount("tmpfs", "/new", "tmpfs", _NOSUID, f"mode=755,size={len(program) + 2**20}")
    _system(prefixes)
    _devices()
    os.mkdir("/new" + FOLDER)
    if not os.path.lexists("/new/tmp"):
        os.symlink(FOLDER, "/new/tmp")
    with open("/new/program.py", "wb") as file:
        file.write(program)
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY_NOSUID, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, b"/new", _AT_RECURSIVE, ctypes.byref(attributes), 32)
    os.chdir("/new")
    _pivot(".", ".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")
    return "/program.py"


def fresh_folder(user_id: int, group_id: int, size: int) -> str:
    """An empty folder of at most ``size`` bytes; what was in the last one is gone."""
    if os.path.ismount(FOLDER):
        _call("umount2", FOLDER.encode(), _DETACH)
    options = f"mode=700,uid={user_id},gid={group_id},size={size},nr_inodes={MAX_FILES}"
    _mount("tmpfs", FOLDER, "tmpfs", _NOSUID | _NODEV, options)
    return FOLDER


def set_process_option(option: int, value: int) -> None:
    """prctl."""
    _call("prctl", option, value, 0, 0, 0)


def _system(prefixes: Sequence[str]) -> None:
    bound: list[str] = []
    for path in sorted({*SYSTEM, *prefixes}, key=len):
        if any(path == other or path.startswith(other + "/") for other in bound) or not os.path.lexists("/old" + path):
            continue
        new = "/new" + path
        os.makedirs(os.path.dirname(new), exist_ok=True)
        if os.path.islink("/old" + path) and path in SYSTEM:
            os.symlink(os.readlink("/old" + path), new)
            continue
        if os.path.isdir("/old" + path):
            os.mkdir(new)
        else:
            open(new, "w").close()
        _mount("/old" + path, new, None, _BIND | _REC)
        bound.append(path)


def _devices() -> None:
    os.mkdir("/new/dev")
    for name in DEVICES:
        if os.path.exists(f"/old/dev/{name}"):
            open(f"/new/dev/{name}", "w").close()
            _mount(f"/old/dev/{name}", f"/new/dev/{name}", None, _BIND)
    os.symlink("/proc/self/fd", "/new/dev/fd")
    os.symlink(FOLDER, "/new/dev/shm")
    os.mkdir("/new/proc")
    try:
        _mount("proc", "/new/proc", "proc", _NOSUID | _NODEV)
    except OSError:  # some containers forbid it; then the candidate has an empty /proc
        return


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _call("mount", *texts, flags, options.encode(), what=f"mount {target}")


def _pivot(new: str, old: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root is not known for {os.uname().machine}")
    _call("syscall", number, new.encode(), old.encode(), what="pivot_root")
    os.chdir("/")


def _call(name: str, *arguments: object, what: str = "") -> None:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_libc, name)(*wide) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what or name}: {os.strerror(number)}")
