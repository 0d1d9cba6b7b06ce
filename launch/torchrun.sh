#!/usr/bin/env bash
# One verb on several nodes: the same command on each of them, in an environment that spmdrl is installed in.
#   HEAD=node0 NODES=4 RANKS_PER_NODE=8 bash launch/torchrun.sh train run.yaml key.path=value
# Close port 29400 of HEAD to all but the nodes: anyone who reaches torchrun's store there can run code in torchrun.
set -euo pipefail
: "${HEAD:?the name or address of one of the nodes, the same on all of them}"
# torchrun's own options and ranks; where one fails, the last line is the cause.
python=python
if ! python -c 'import spmdrl' 2> /dev/null; then
    # As the quickstart leaves it.
    python=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
fi
exec "$python" -m spmdrl.torchrun --nnodes "${NODES:-1}" --nproc-per-node "${RANKS_PER_NODE:-auto}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${RUN_ID:-spmdrl}" \
    -m spmdrl "$@"
