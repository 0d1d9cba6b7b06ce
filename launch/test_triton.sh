#!/usr/bin/env bash
# Tests of the kernels in Triton, interpreted and compiled for Hopper: bash launch/test_triton.sh [pytest's arguments ...]
# Triton, which PyTorch's builds for CUDA bring along, lies in a folder of its own here: 1 GB beside .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
if ! [ -e .triton/installed ]; then
    say "installing Triton in .triton"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --upgrade --no-deps --target .triton "triton>=3.5,<4" || {
        printf '== Triton tests LEFT OUT: Triton could not be installed here\n'
        exit 69
    }
    touch .triton/installed
fi
share_cores 2
PYTHONPATH=$PWD/.triton exec .venv/bin/pytest tests/engines/models/kernels/test_paged_attention.py \
    tests/engines/models/kernels/test_fused_kernels.py "$@"
