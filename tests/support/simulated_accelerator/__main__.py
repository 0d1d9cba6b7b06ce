"""Runs a module on the simulated accelerator: `python -m tests.support.simulated_accelerator spmdrl train ...`.

So do the Python processes that the module starts.
"""

from __future__ import annotations

import argparse
import runpy
import sys

from tests.support.simulated_accelerator.compiling import why_not
from tests.support.simulated_accelerator.registering import Options, install_with


def main() -> None:
    parser = argparse.ArgumentParser(prog="simulated_accelerator", description=__doc__)
    parser.add_argument("--name", default="sim", help="of the device in PyTorch; npu stands for that path")
    parser.add_argument("--late-kernels", action="store_true", help="run kernels as late as copies")
    parser.add_argument("--memory-bytes", type=int, help="memory of each device (default: 1 GiB)")
    parser.add_argument("module", help="to run, as by python -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    install_with(Options(given.name, late_kernels=given.late_kernels, memory_bytes=given.memory_bytes))
    sys.argv = [given.module, *given.arguments]
    runpy.run_module(given.module, run_name="__main__", alter_sys=True)


main()
