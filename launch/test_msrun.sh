#!/usr/bin/env bash
# The tests under MindSpore's msrun, on its CPU build in .venv-msrun: bash launch/test_msrun.sh [pytest's arguments ...]
# MindSpore is an 800 MB download and takes 3 GB; ranks run in .venv, and import nothing of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
mindspore=mindspore==2.10.0
if [ "$(cat .venv-msrun/installed 2> /dev/null)" != "$mindspore" ]; then
    say "installing $mindspore in .venv-msrun"
    .venv/bin/python -m venv --clear .venv-msrun
    .venv-msrun/bin/python -m pip install -qq --disable-pip-version-check "$mindspore" || {
        printf '== msrun tests LEFT OUT: MindSpore could not be installed here\n'
        exit 69
    }
    echo "$mindspore" > .venv-msrun/installed
fi
share_cores 2
MSRUN=$PWD/.venv-msrun/bin/msrun exec .venv/bin/pytest -m msrun tests/launch/test_msrun.py "$@"
