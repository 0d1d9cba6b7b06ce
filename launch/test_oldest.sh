#!/usr/bin/env bash
# The tests of text with the oldest transformers that setup.cfg admits: bash launch/test_oldest.sh [pytest's arguments ...]
#
# .venv-oldest holds transformers and what it pins alone; all else is .venv's, behind it on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
share_cores 1
oldest=$(sed -n 's/^ *transformers>=\([0-9.]*\),.*$/\1/p' setup.cfg)
state="transformers $oldest setup.cfg=$(cksum < setup.cfg)"
if [ "$(cat .venv-oldest/installed 2> /dev/null)" != "$state" ]; then
    say "making .venv-oldest with transformers $oldest"
    own=$(layer_environment .venv-oldest)
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --target "$own" \
        "transformers==$oldest" 'tokenizers>=0.22,<0.23' 'huggingface_hub<1'
    echo "$state" > .venv-oldest/installed
fi
files=$(grep -rl --include="*.py" "mark.oldest" tests)
# shellcheck disable=SC2086
exec .venv-oldest/bin/python -m pytest -m "oldest and not slow" -q "$@" $files
