#!/usr/bin/env bash
# Everything that CI runs: bash launch/test.sh [pytest's arguments ...]
# Every check runs, whatever the others say; the exit code is 0 where all are content. pytest's summary comes last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
# Tests start up to four ranks.
share_cores 4

failed=""
check() {
    printf '== %s\n' "$*"
    "$@" || failed="$failed ${1##*/}"
}

check .venv/bin/ruff check src tests
check .venv/bin/lint-imports
check .venv/bin/mypy
if [ -n "$failed" ]; then
    printf '== FAILED, whatever the tests say now:%s\n' "$failed" >&2
fi
printf '== pytest\n'
.venv/bin/pytest -m "not gpu" "$@"
[ -z "$failed" ]
