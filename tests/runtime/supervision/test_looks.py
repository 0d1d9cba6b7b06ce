"""What a thread sees of the main thread, and that looking leaves nothing behind."""

from __future__ import annotations

import linecache
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

from tests.support.jobs import environment

from spmdrl.runtime.supervision.main_thread import state_of_this, waits_for_others


def looked_at(block: Callable[[SimpleNamespace], None]) -> bool:
    """Whether another thread finds this one waiting while it is in the block, called with a lock that is released."""
    lock, found, ident = threading.Lock(), list[bool](), threading.get_ident()
    lock.acquire()

    def look() -> None:
        while sys._current_frames()[ident].f_code is not block.__code__:
            time.sleep(0.001)
        found.append(waits_for_others())
        lock.release()

    thread = threading.Thread(target=look)
    thread.start()
    block(SimpleNamespace(wait=lock.acquire, work=lock.acquire))
    thread.join()
    return found[0]


def wait(on: SimpleNamespace) -> None:
    on.wait()


def work(on: SimpleNamespace) -> None:
    on.work()


def test_a_wait_is_told_from_work():
    assert looked_at(wait) and not looked_at(work)


def test_looks_keep_no_file_of_the_main_threads_stack_in_memory():
    linecache.clearcache()
    assert looked_at(wait) and state_of_this(0, 0.0).stage
    assert __file__ not in linecache.cache


RUNNING = """
import gc, sys, threading, time
from spmdrl.runtime.supervision.main_thread import _main_frames

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0002)

def look():
    while True:
        for _ in _main_frames():
            Garbage()

def descend(depth):
    return descend(depth - 1) if depth else sum(number for number in range(5))

threading.Thread(target=look, daemon=True).start()
sys.setswitchinterval(1e-6)
gc.set_threshold(1)
end = time.monotonic() + 2
while time.monotonic() < end:
    descend(30)
"""


def test_frames_of_a_running_thread_are_read_while_garbage_is_collected():
    subprocess.run([sys.executable, "-c", RUNNING], env=environment(), timeout=60, check=True)
