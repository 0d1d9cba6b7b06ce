#!/usr/bin/env bash
# What a device must do for a job, checked: bash launch/accelerator_check.sh [stage ...] [--json FILE] [--again] [--small]
#
# Run it first on a new cluster, on one of its nodes. It installs and downloads nothing: any Python that has PyTorch for
# the device, tensordict, transformers and what else setup.cfg requires will do, this package itself needn't be
# installed. PYTHON=/path/to/python names one; otherwise the first fit one of .venv/bin/python, python and python3.
# The table is explained in docs/accelerators.md; --help lists stages and options. Exit code 0: no stage failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
lacking=""
for python in ${PYTHON:-.venv/bin/python python python3}; do
    if lack=$("$python" -c 'import torch, tensordict, transformers, pydantic, yaml, jinja2, annotated_types, rich' 2>&1); then
        exec "$python" -m tests.bench accelerator "$@"
    fi
    lacking="$lacking"$'\n'"  $python: ${lack##*$'\n'}"
done
printf 'no Python here has what spmdrl needs; name one that has: PYTHON=/path/to/python%s\n' "$lacking" >&2
exit 2
