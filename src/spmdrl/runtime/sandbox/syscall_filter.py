"""System calls forbidden to a program (seccomp): it can't start processes, open sockets or change the system."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from spmdrl.runtime.sandbox.kernel_calls import call

# Number of each call on x86_64, and on aarch64, which lacks some.
_REFUSED: dict[str, tuple[int, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "socket": (41, 198), "bind": (49, 200), "listen": (50, 201), "connect": (42, 203),
    "memfd_create": (319, 279), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "mknod": (133, None), "mknodat": (259, 33), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "acct": (163, 89),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
    "personality": (135, 92), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "syslog": (103, 116), "lookup_dcookie": (212, 18),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "vhangup": (153, 58),
    "io_setup": (206, 0), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
}  # fmt: skip
_CLONE = (56, 220)
# From here on numbers are the same on all processors: pidfd_open, io_uring, mounts by descriptor, clone3 and later
# calls. The C library falls back where the kernel lacks them.
_FIRST_NEWER = 424
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_CLONE_THREAD = 0x10000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install() -> None:
    """Forbid these calls in this process from now on. Needs no_new_privs."""
    code = b"".join(_instructions(platform.machine()))
    program = _Program(len(code) // 8, code)
    call("prctl", _PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program))


def _instructions(machine: str) -> list[bytes]:
    column = list(_ARCHITECTURES).index(machine)
    refused = sorted(number for numbers in _REFUSED.values() if (number := numbers[column]) is not None)
    return [
        _one(_LOAD, _ARCHITECTURE_AT),
        _one(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _one(_RETURN, _KILL),
        _one(_LOAD, _NUMBER_AT),
        _one(_AT_LEAST, _X32, 0, 1),
        _one(_RETURN, _KILL),
        _one(_AT_LEAST, _FIRST_NEWER, 0, 1),
        _one(_RETURN, _ERROR | errno.ENOSYS),
        *(part for number in refused for part in (_one(_EQUAL, number, 0, 1), _one(_RETURN, _ERROR | errno.EPERM))),
        _one(_EQUAL, _CLONE[column], 0, 3),
        _one(_LOAD, _FIRST_ARGUMENT_AT),
        _one(_ANY_BIT, _CLONE_THREAD, 1, 0),
        _one(_RETURN, _ERROR | errno.EPERM),
        _one(_RETURN, _ALLOW),
    ]


def _one(code: int, value: int, if_so: int = 0, else_: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_so, else_, value)
