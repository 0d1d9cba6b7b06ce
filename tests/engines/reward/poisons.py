"""A reward function that misbehaves in the way that its completion names, and a few that don't."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time


def fine(completions, **columns):
    return [float(len(text)) for text in completions]


def first_letter(completions, answer):
    return [1.0 if text[:1] == target else 0.0 for text, target in zip(completions, answer, strict=True)]


def none_for_empty(completions, **columns):
    return [None if not text else 0.5 for text in completions]


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


def _grandchild(num_rows):
    child = subprocess.Popen(["sleep", "60"])
    with open(os.environ["SPMDRL_TEST_PID_FILE"], "w") as file:
        file.write(str(child.pid))
    child.wait()


def _fork_and_die(num_rows):
    # The forked child keeps the pipe open: the end of the pipe can't tell that the worker died.
    if os.fork() == 0:
        time.sleep(60)
    os._exit(4)


def _raise(num_rows):
    raise KeyError("lost")


POISONS = {
    "fine": lambda num_rows: [1.0] * num_rows,
    "raise": _raise,
    "exit": lambda num_rows: sys.exit(1),
    "loop": _loop,
    "sleep": lambda num_rows: time.sleep(60),
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
    "wrong_pipe": lambda num_rows: (
        [os.write(fd, b"x" * 64) for fd in range(3, 6) if _is_writable(fd)] and [1.0] * num_rows
    ),
}


def _is_writable(fd):
    try:
        return os.write(fd, b"") == 0
    except OSError:
        return False
