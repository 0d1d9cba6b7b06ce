"""The device that tests run on: a CPU, unless pytest's `--device` or the environment names another kind."""

from __future__ import annotations

import os

import pytest
import torch

from spmdrl.resources.device import BACKENDS

VARIABLE = "SPMDRL_TEST_DEVICE"
"""Holds the kind, also for the processes that tests start."""


def chosen_kind() -> str:
    return os.environ.get(VARIABLE, "cpu")


def why_missing() -> str | None:
    """Why the chosen device can't be made here, where it is a simulated one."""
    if chosen_kind() in BACKENDS:
        return None
    from tests.support import simulated_accelerator

    return simulated_accelerator.why_not()


def install_chosen() -> str:
    """Make the chosen kind usable in this process, and return it.

    Raises ValueError where there is no such device.
    """
    kind = chosen_kind()
    if kind not in BACKENDS:
        from tests.support import simulated_accelerator

        simulated_accelerator.install(kind)
    found = torch.accelerator.current_accelerator()
    if kind != "cpu" and (found is None or found.type != kind):
        raise ValueError(f"the tests' device is {kind!r}, but PyTorch finds {found}; choose cpu or sim")
    return kind


def skip_without_devices(num_ranks: int) -> None:
    """Skip the test that runs where this host has fewer devices than ranks."""
    if chosen_kind() != "cpu" and (found := torch.accelerator.device_count()) < num_ranks:
        pytest.skip(f"needs {num_ranks} devices of kind {chosen_kind()}; this host has {found}")


class Uses:
    """Counts how often the device was asked for, which tells the tests that run on it from the others."""

    count = 0


def chosen_device() -> torch.device:
    """The device of the chosen kind that this process uses: a rank's own, or the first."""
    Uses.count += 1
    kind = chosen_kind()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def races_found() -> list[str]:
    """Unordered accesses that the simulated device noticed in this process; other devices notice none."""
    module = getattr(torch, chosen_kind(), None)
    return list(module.races()) if hasattr(module, "races") else []
