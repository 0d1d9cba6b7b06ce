#!/usr/bin/env bash
# Random rows through the functions of verl, TRL and OpenRLHF, and through ours: bash launch/disagreements.sh [--write]
# They lie in an environment of their own, .peers, with what their functions on a CPU need and no more.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

if ! [ -e .peers/installed ]; then
    say "installing verl, TRL and OpenRLHF in .peers"
    "$(find_python)" -m venv --clear .peers
    .peers/bin/python -m pip install -qq --disable-pip-version-check -e . hypothesis pytest \
        trl==1.16.0 ray omegaconf hydra-core codetiming orjson pillow
    # What else they require is for GPUs.
    .peers/bin/python -m pip install -qq --disable-pip-version-check --no-deps verl==0.9.1 openrlhf==0.11.2
    touch .peers/installed
fi
share_cores 1
exec .peers/bin/python -W ignore -m tests.algorithms.disagreements "$@"
