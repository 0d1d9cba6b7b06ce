"""Programs that try to get out of a box: each prints ESCAPED where it can do what it tries.

They are texts with {secret}: a file of the user that holds ESCAPED, {folder}: a folder that the user may write to,
{victim}: a process of the user, {port}: where something listens on loopback, {name}: an abstract socket.
"""

SYSCALL = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\nsyscall = libc.syscall\n"


def _fails(what: str) -> str:
    """A system call that gives -1 in a box."""
    return f"{SYSCALL}print('ESCAPED' if {what} != -1 else os.strerror(ctypes.get_errno()))"


READING = {
    "a file of the user": "print(open('{secret}').read())",
    "the run's secret": "print(open('{folder}/.job_secret').read())",
    "the list of users": "print('root' in open('/etc/passwd').read() and 'ESCAPED')",
    "its home": "import pathlib; print(list(pathlib.Path('{folder}').iterdir()) and 'ESCAPED')",
    "a variable of the job": "import os; print(os.environ['JOB_KEY'])",
    "its environment as it was": "print(open('/proc/self/environ').read())",
    "another process's environment": "print(open('/proc/{victim}/environ').read())",
    "another process's memory": "open('/proc/{victim}/mem', 'rb'); print('ESCAPED')",
    "the kernel's settings": "import os; print(os.listdir('/sys') and 'ESCAPED')",
    "devices": "import os; print('ESCAPED' if len(os.listdir('/dev')) > 4 else 'four')",
    "a link to a file": "import os; os.symlink('{secret}', 'link'); print(open('link').read())",
    "a hard link": "import os; os.link('{secret}', '{folder}/hard'); print('ESCAPED')",
    "a path upwards": "print(open('../' * 40 + '{secret}'[1:]).read())",
    "an open folder upwards": (
        "import os\nplace = os.open('/', os.O_RDONLY)\n"
        "for _ in range(40): place = os.open('..', os.O_RDONLY, dir_fd=place)\n"
        "print(os.read(os.open('{secret}'[1:], os.O_RDONLY, dir_fd=place), 100))"
    ),
    "an inherited descriptor": (
        "import os\nfor number in range(3, 200):\n    try: print(os.pread(number, 100, 0))\n    except OSError: pass"
    ),
    "its descriptors by name": "import os; print(os.listdir('/proc/self/fd') and 'ESCAPED')",
    "its own memory by another call": (
        SYSCALL + "import struct\nown = ctypes.create_string_buffer(8); read = ctypes.create_string_buffer(8)\n"
        "parts = [struct.pack('QQ', ctypes.addressof(one), 8) for one in (read, own)]\n"
        "print('ESCAPED' if libc.process_vm_readv(os.getpid(), parts[0], 1, parts[1], 1, 0) == 8 else 'no')"
    ),
}
WRITING = {
    "a file elsewhere": "open('{folder}/written', 'w').write('x'); print('ESCAPED')",
    "Python's library": "import os; open(os.__file__, 'a'); print('ESCAPED')",
    "a file at the root": "open('/spmdrl_written', 'w'); import os; os.unlink('/spmdrl_written'); print('ESCAPED')",
    "a file's removal": "import os; os.unlink('{folder}/removed'); print('ESCAPED')",
    "a file's mode": "import os; os.chmod('{secret}', 0o644); print('ESCAPED')",
    "a large file": "open('large', 'wb').write(bytes(64 << 20)); print('ESCAPED')",
    "many files": "for number in range(2000): open(f'file{{number}}', 'w').close()\nprint('ESCAPED')",
    "memory as a file": "import os; os.write(os.memfd_create('x'), b'x'); print('ESCAPED')",
    "shared memory": (
        "import os; name = '/dev/shm/spmdrl_{victim}'; open(name, 'w').close(); os.unlink(name); print('ESCAPED')"
    ),
    "a segment of shared memory": (
        f"{SYSCALL}number = libc.shmget(0, 4096, 0o1600)\nlibc.shmctl(number, 0, 0)\n"
        "print('ESCAPED' if number != -1 else 'no')"
    ),
}
PROCESSES = {
    "a child": "import os\nif os.fork() == 0: os._exit(0)\nos.wait(); print('ESCAPED')",
    "another program": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(\"ESCAPED\")'])",
    "a spawned program": "import os, sys; os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0); print('ESCAPED')",
    "an orphan in a session of its own": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(2)\n    os._exit(0)\n"
        "os.wait(); print('ESCAPED')"
    ),
    "a fork bomb": (
        "import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(0.5); os._exit(0)\nprint('ESCAPED')"
    ),
    "a bomb of threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()\nprint('ESCAPED')"
    ),
    "a signal to another process": "import os; os.kill({victim}, 0); print('ESCAPED')",
    "a debugger": _fails("libc.ptrace(0, 0, 0, 0)"),
    "memory without end": "import mmap; mmap.mmap(-1, 3 << 30); print('ESCAPED')",
    "higher limits": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)); print('ESCAPED')"),
}
SYSTEM = {
    "a connection to loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('ESCAPED')",
    "a socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM); print('ESCAPED')",
    "an abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('ESCAPED')",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); print('ESCAPED')",
    "a mount": _fails("libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)"),
    "an unmount": _fails("min(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None), libc.umount2(b'/mnt', 2))"),
    "another root": "import os; os.chroot('/usr'); print('ESCAPED')",
    "a user namespace": _fails("libc.unshare(0x10000000)"),
    "a thread in new namespaces": _fails("libc.unshare(0x20000)"),
    "root": "import os; os.setuid(0); print('ESCAPED')",
    "the host's name": _fails("libc.sethostname(b'x', 1)"),
    "the kernel's keys": _fails("syscall(250 if os.uname().machine == 'x86_64' else 219, 0, -3, 1)"),
    "a changed personality": _fails("libc.personality(0x0040000)"),
}  # fmt: skip
ATTEMPTS = {**READING, **WRITING, **PROCESSES, **SYSTEM}
