#!/usr/bin/env bash
# A verb on the CPU of this machine, whatever devices it has: one process, under pdb if wanted, or several ranks.
#   bash launch/debug_cpu.sh train configs/debug/quickstart.yaml key.path=value
#   PDB=1 bash launch/debug_cpu.sh train ...      the whole loop in one process under pdb: `b FILE:LINE`, `c`, `up`, `p x`
#   RANKS=4 bash launch/debug_cpu.sh train ...    four gloo ranks, whose tracebacks are all shown
set -euo pipefail
if [ $# -eq 0 ]; then
    printf 'no verb given: bash launch/debug_cpu.sh train run.yaml\n' >&2
    exit 2
fi
ranks=${RANKS:-1}
python=python
if ! python -c 'import spmdrl' 2> /dev/null; then
    # As the quickstart leaves it.
    python=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
fi
cores=$(($(getconf _NPROCESSORS_ONLN) / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 1 ? cores : 1))}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
export SPMDRL_TRACEBACK=1
if [ "${PDB:-0}" != 0 ]; then
    if [ "$ranks" -ne 1 ]; then
        printf 'PDB=1 needs RANKS=1, as %s ranks cannot share a terminal; a breakpoint() in the code has the same limit\n' "$ranks" >&2
        exit 2
    fi
    exec "$python" -m pdb -m spmdrl "$1" resources.device=cpu "${@:2}"
fi
if [ "$ranks" -eq 1 ]; then
    exec "$python" -m spmdrl "$1" resources.device=cpu "${@:2}"
fi
PYTHON=$python RANKS_PER_NODE=$ranks exec bash "$(dirname "${BASH_SOURCE[0]}")/torchrun.sh" "$1" resources.device=cpu "${@:2}"
