#!/usr/bin/env bash
# CI's checks and tests, but for those with Triton, Slurm and vLLM: bash launch/test.sh [all | pytest's arguments ...]
# Without an argument the checks and the tests that aren't marked `slow`; with `all`, the slow ones follow.
# Everything runs, whatever the rest finds; the exit code is 0 if all pass. pytest's summary comes last.
# Slow tests that have not begun by SLOW_TESTS_UNTIL, in seconds since the epoch, are skipped, and counted as such. They
# run in another order each day, so that none is always among the last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
# Set in some containers: each of thousands of processes would compile what it imports.
unset PYTHONDONTWRITEBYTECODE
cores=$(getconf _NPROCESSORS_ONLN)
# Tests start up to four ranks, so that two workers keep two cores busy; a third one makes each test slower instead.
workers=$((cores > 8 ? cores / 4 : cores > 1 ? 2 : 1))
share_cores $((4 * workers))

failed=""
check() {
    printf '== %s\n' "$*"
    "$@" || failed="$failed ${1##*/}"
}
# Several workers, so that what they print and --pdb take "-n 0" behind this script.
tests() {
    local marks=$1
    shift
    printf '== pytest: %s\n' "$marks"
    .venv/bin/pytest -m "$marks" --numprocesses "$workers" --dist worksteal --durations=25 "$@"
}

everywhere="not gpu and not slurm and not msrun"
chosen=false
[ $# -eq 0 ] || [ "$*" = all ] || chosen=true

check .venv/bin/ruff check src tests
check .venv/bin/lint-imports
if "$chosen"; then
    check .venv/bin/mypy
    if [ -n "$failed" ]; then
        printf '== FAILED, whatever the tests find now:%s\n' "$failed" >&2
    fi
    tests "$everywhere" "$@"
    [ -z "$failed" ]
    exit
fi

# What takes one core for most of a minute runs beside the first tests, which import and wait a lot. Those that need
# the simulated device wait for it, or compile it themselves and show what is wrong.
nice .venv/bin/python -c "from tests.support.simulated_accelerator.compiling import built; built()" > /dev/null 2>&1 &
types=$(mktemp)
nice .venv/bin/mypy > "$types" 2>&1 &
checking=$!
mypy() {
    local status=0
    wait "$checking" || status=$?
    cat "$types"
    rm "$types"
    return "$status"
}

# The files that have such tests, which alone are imported; tests/conftest.py refuses marks that aren't found so.
marked() {
    grep -rl --include="test_*.py" "mark.$1" tests | sort
}
for marks in "not slow" ${1:+"slow"}; do
    files=""
    [ "$marks" = "not slow" ] || files=$(marked slow | sort --random-sort --random-source=<(yes "$(date +%F)"))
    # shellcheck disable=SC2086
    tests "$marks and $everywhere" $files || failed="$failed tests($marks)"
    [ "$marks" = slow ] || check mypy
    # Ranks on the simulated device, most of its minute, are left to the slow ones: they run on the CPU here too.
    on_sim="$marks and not ranks"
    [ "$marks" = "not slow" ] || on_sim="(slow or ranks)"
    # shellcheck disable=SC2046
    tests "on_device and $on_sim and not gpu" --device sim -q $(marked on_device) ||
        failed="$failed on_device($marks)"
done
if [ -n "$failed" ]; then
    printf '== FAILED:%s\n' "$failed" >&2
    exit 1
fi
