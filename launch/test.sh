#!/usr/bin/env bash
# CI's checks and tests, but for those with Triton, Slurm and vLLM: bash launch/test.sh [pytest's arguments ...]
# Every check runs, whatever the others find; the exit code is 0 if all pass. pytest's summary comes last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
cores=$(getconf _NPROCESSORS_ONLN)
# Tests start up to four ranks, which wait for each other half of the time.
workers=$((cores > 8 ? cores / 4 : cores > 1 ? 2 : 1))
share_cores $((4 * workers))

failed=""
check() {
    printf '== %s\n' "$*"
    "$@" || failed="$failed ${1##*/}"
}

if [ $# -eq 0 ]; then
    # The simulated device compiles beside the next checks, each of which takes one core. The tests wait for it, or
    # compile it themselves and show what is wrong.
    .venv/bin/python -c "from tests.support.simulated_accelerator.compiling import built; built()" > /dev/null 2>&1 &
fi
check .venv/bin/ruff check src tests
check .venv/bin/lint-imports
check .venv/bin/mypy
if [ $# -eq 0 ]; then
    # Arguments choose among the tests below, of which these are some. Their files alone are imported.
    files=$(grep -rl --include="*.py" "mark.on_device" tests)
    # shellcheck disable=SC2086
    check .venv/bin/pytest --device sim -m "on_device and not gpu" --numprocesses "$workers" --dist worksteal -q $files
fi
if [ -n "$failed" ]; then
    printf '== FAILED, whatever the tests find now:%s\n' "$failed" >&2
fi
printf '== pytest\n'
# Several workers, so that what they print and --pdb take "-n 0" behind this command.
.venv/bin/pytest -m "not gpu and not slurm and not msrun" --numprocesses "$workers" --dist worksteal "$@"
[ -z "$failed" ]
