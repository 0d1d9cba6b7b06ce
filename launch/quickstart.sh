#!/usr/bin/env bash
# From a fresh clone to a trained model: bash launch/quickstart.sh [key.path=value ...]
# run.dir=FOLDER of an earlier call goes on where that one stopped.
# RANKS=2 processes by default; PYTHON and SPMDRL_TORCH are explained in environment.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment ""
share_cores "${RANKS:-2}"
run=$(run_folder quickstart "$@")
PYTHON=.venv/bin/python RANKS_PER_NODE=${RANKS:-2} exec bash launch/torchrun.sh train configs/debug/quickstart.yaml \
    "$@" "run.dir=$run"
