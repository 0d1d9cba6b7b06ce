"""Facts of this machine's device, as JSON: `python -m spmdrl.verbs.doctor.device_facts [auto|cpu|cuda|npu]`.

In a process of its own, because the query holds some device memory until the process ends.
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from spmdrl.resources.device import Device, find_device
from spmdrl.runtime.screen import show

_PACKAGES = ("torch", "torch_npu", "transformers", "tensordict", "vllm", "triton")


def facts_of(device: Device) -> dict[str, Any]:
    """Return kind, name, number, memory and the relevant versions."""
    facts: dict[str, Any] = {"kind": device.kind, "name": platform.processor() or platform.machine(), "count": 1}
    memory = device.memory_bytes()
    if memory is not None:
        namer = getattr(device.module, "get_device_name", None)
        facts["name"] = namer(device.index) if namer is not None else device.kind
        facts["count"] = torch.accelerator.device_count()
        facts["memory_gib"] = round(memory[1] / 2**30, 1)
    return facts | {"python": platform.python_version(), "host": platform.node(), **_versions()}


def _versions() -> dict[str, str]:
    found = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    try:
        show(json.dumps(facts_of(find_device(sys.argv[1], 0))))
    except ValueError as error:
        show(str(error), stream=sys.stderr)
        raise SystemExit(2) from error
