"""A reward function that misbehaves in the way that its completion names, and a few that don't."""

import asyncio
import ctypes
import json
import mmap
import os
import pdb
import signal
import stat
import subprocess
import sys
import time


def fine(completions, **columns):
    return [float(len(text)) for text in completions]


def first_letter(completions, answer):
    return [1.0 if text[:1] == target else 0.0 for text, target in zip(completions, answer, strict=True)]


def none_for_empty(completions, **columns):
    return [None if not text else 0.5 for text in completions]


def even_only(completions, **columns):
    return [float(len(text)) if text and len(text) % 2 == 0 else None for text in completions]


def without_score(solution_str, ground_truth):
    return {"acc": 1.0, "reward": 1.0} if solution_str == "malformed" else {"score": None}


def as_written(completions, **columns):
    return [float(text) for text in completions]


def needs_hint(completions, hint):
    return [1.0] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise ValueError("no score")
    return {"score": float(solution_str == ground_truth), "source": data_source}


async def slow_but_together(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


def text_of_messages(prompts, completions, **columns):
    return [float(message[0]["content"] == "hi") for message in completions]


def parts_with_columns(completions, completion_ids, level, **columns):
    return [len(ids) + rank for ids, rank in zip(completion_ids, level, strict=True)]


def poison(prompts, completions, **columns):
    return POISONS[completions[0]](len(completions))


def _loop(num_rows):
    while True:
        pass


def _hog(num_rows):
    blocks = []
    while True:
        blocks.append(bytearray(1 << 24))


def _print_garbage(num_rows):
    print("garbage", flush=True)
    os.write(1, b"\0" * 100)
    sys.__stdout__.flush()
    return [1.0] * num_rows


def _note(pid):
    with open(os.environ["SPMDRL_TEST_PID_FILE"], "a") as file:
        file.write(f"{pid}\n")


def _grandchild(num_rows):
    child = subprocess.Popen(["sleep", "60"])
    _note(child.pid)
    child.wait()


def _own_session(num_rows):
    _note(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    return [1.0] * num_rows


def _daemon(num_rows):
    # Twice away from its parent, in a session of its own, deaf to polite signals, its descriptors closed.
    path = os.environ["SPMDRL_TEST_PID_FILE"]
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _note(os.getpid())
            os.closerange(0, 4096)
            time.sleep(60)
        os._exit(0)
    os.waitpid(child, 0)
    while not os.path.exists(path) or os.path.getsize(path) == size:
        time.sleep(0.001)
    return [1.0] * num_rows


def _shell(num_rows):
    script = 'sleep 60 & echo $! >> "$SPMDRL_TEST_PID_FILE"; setsid sleep 60 & echo $! >> "$SPMDRL_TEST_PID_FILE"'
    subprocess.run(["sh", "-c", script], check=True)
    return [1.0] * num_rows


def _respawning(num_rows):
    # Each generation starts the next in a new session and ends.
    if os.fork() == 0:
        for _ in range(100_000):
            if os.fork() != 0:
                os._exit(0)
            os.setsid()
            _note(os.getpid())
            time.sleep(0.002)
    time.sleep(0.1)
    return [1.0] * num_rows


def _helper(num_rows):
    global _HELPER
    _HELPER = _HELPER or subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _HELPER.stdin.write(b"1.0\n")
    _HELPER.stdin.flush()
    return [float(_HELPER.stdout.readline())] * num_rows


_HELPER = None


def _many(num_rows):
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(60)
    time.sleep(60)


def _shared_memory(num_rows):
    held = mmap.mmap(-1, 1 << 29)
    for start in range(0, len(held), 4096):
        held[start] = 1
    time.sleep(60)


def _children_with_memory(num_rows):
    for _ in range(8):
        if os.fork() == 0:
            held = b"x" * (40 << 20)
            time.sleep(60 + len(held) % 2)
    time.sleep(60)


def _stop_guard(num_rows):
    _note(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(60)


def _pipes():
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue
        if int(name) > 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            yield int(name)


def _write_everywhere(data):
    for fd in _pipes():
        try:
            os.write(fd, data)
        except OSError:
            continue


def _wrong_pipe(num_rows):
    _write_everywhere(b"x" * 64)
    return [1.0] * num_rows


def _forge(num_rows):
    scores = [{"values": [1e9] * num_rows, "verdicts": [0] * num_rows, "error": None}]
    for key, value in (("id", 0), ("nonce", "0" * 32), ("nonce", None)):
        body = json.dumps({key: value, "answer": scores}).encode()
        _write_everywhere(body + b"\n")
    return [1.0] * num_rows


def _forge_deep(num_rows):
    body = b"[" * 100_000 + b"]" * 100_000
    _write_everywhere(body + b"\n")
    return [1.0] * num_rows


def _environment(num_rows):
    return [float(bool(os.environ.get(name))) for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_KEY", "PATH")[:num_rows]]


def _fork_and_die(num_rows):
    # The forked child keeps the pipe open: its end doesn't show that the worker died.
    if os.fork() == 0:
        time.sleep(60)
    os._exit(4)


def _raise(num_rows):
    raise KeyError("lost")


def _interrupt(num_rows):
    raise KeyboardInterrupt("stop")


async def interrupted_later(completions, **columns):
    await asyncio.sleep(0)
    raise asyncio.CancelledError


def _memory_file(num_rows):
    file = os.memfd_create("unmapped")
    for _ in range(400):
        os.write(file, b"x" * (1 << 20))
    time.sleep(60)


def _bomb(num_rows):
    for _ in range(9):
        os.fork()
    time.sleep(60)


def _escape(num_rows):
    sys.stderr.write("\x1b]0;title\x07\u202ered\n")
    os.write(1, b"\x1b[2J half a letter: \xff\n")
    return [1.0] * num_rows


POISONS = {
    "interrupt": _interrupt,
    "memory_file": _memory_file,
    "bomb": _bomb,
    "escape": _escape,
    "fine": lambda num_rows: [1.0] * num_rows,
    "raise": _raise,
    "exit": lambda num_rows: sys.exit(1),
    "loop": _loop,
    "sleep": lambda num_rows: time.sleep(60),
    "nap": lambda num_rows: [time.sleep(0.5) or 1.0] * num_rows,
    "segfault": lambda num_rows: ctypes.string_at(0),
    "os_exit": lambda num_rows: os._exit(3),
    "hog": _hog,
    "short": lambda num_rows: [1.0] * (num_rows - 1),
    "text": lambda num_rows: ["1.0"] * num_rows,
    "string": lambda num_rows: "a" * num_rows,
    "nan": lambda num_rows: [float("nan")] * num_rows,
    "huge": lambda num_rows: [10**400] * num_rows,
    "print": _print_garbage,
    "grandchild": _grandchild,
    "fork": _fork_and_die,
    "wrong_pipe": _wrong_pipe,
    "forge": _forge,
    "forge_deep": _forge_deep,
    "own_session": _own_session,
    "daemon": _daemon,
    "shell": _shell,
    "respawning": _respawning,
    "own_session_and_wait": lambda num_rows: _own_session(num_rows) and time.sleep(60),
    "daemon_and_wait": lambda num_rows: _daemon(num_rows) and time.sleep(60),
    "helper": _helper,
    "many": _many,
    "shared_memory": _shared_memory,
    "children_with_memory": _children_with_memory,
    "stop_guard": _stop_guard,
    "environment": _environment,
    "breakpoint": lambda num_rows: breakpoint(),
    "pdb": lambda num_rows: [pdb.set_trace(), num_rows],
    "pdb_on_stdin": lambda num_rows: [pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout).set_trace(), num_rows],
    "input": lambda num_rows: [float(input("reward? "))] * num_rows,
}
