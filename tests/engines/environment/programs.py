"""Programs of rows for tests, loaded by their file's path."""

import asyncio
import os
import signal
import subprocess
import time

print("loaded")


def number(row):
    return row.columns["number"]


async def waiting(row):
    await asyncio.sleep(0)
    return float(os.environ["NUMBER"])


def failing(row):
    print("before the end")
    return {}["nothing"]


def hanging(row):
    # In a session of its own, and with a child that has lost its parent.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    time.sleep(600)


def greedy(row):
    os.fork()
    held = b"x" * (150 << 20)
    time.sleep(600)
    return held


def killing_its_guard(row):
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def talkative(row):
    for _ in range(200):
        print("y" * 100_000)
    raise RuntimeError("the end")


def files(row):
    """What it has open, but for the folder that lists it, which is closed by then."""
    return sorted(os.path.realpath(f"/dev/fd/{fd}") for fd in os.listdir("/dev/fd") if int(fd) > 2)
