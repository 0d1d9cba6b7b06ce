"""Functions and a class as TRL's trainers take them, loaded by their file's path."""

import asyncio


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def wait(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: For how long.
    """
    await asyncio.sleep(seconds)
    return "waited"


called = []


def count() -> int:
    """
    Counts this function's calls.
    """
    called.append(1)
    return len(called)


def bare(a):
    return a


class Counter:
    """Counts by steps that the model asks for, up to the row's goal."""

    def __init__(self):
        self.count = 0

    def reset(self, goal: int, **row) -> str:
        self.goal, self.row = goal, row
        return f" Count to {goal}."

    def add(self, step: int) -> str:
        """
        Adds to the count.

        Args:
            step: How much.
        """
        if step < 0:
            raise ValueError("only upwards")
        self.count += step
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.goal)

    def _secret(self):
        """Hidden."""


class Awaiting(Counter):
    """A counter whose reward is awaited, and which says nothing at first."""

    def reset(self, **row):
        self.goal = row["goal"]

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return 0.5


class Unreset:
    """Lacks `reset`."""


class Picturing(Counter):
    """Begins with an image."""

    def reset(self, **row):
        return [{"type": "image", "image": None}]
