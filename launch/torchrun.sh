#!/usr/bin/env bash
# One verb under torchrun, whose last line is the cause if it fails, and whose exit code is that of the ranks:
#   RANKS_PER_NODE=8 bash launch/torchrun.sh train run.yaml key.path=value
# On several nodes, the same command on each of them:
#   HEAD=node0 NODES=4 RANKS_PER_NODE=8 bash launch/torchrun.sh train run.yaml key.path=value
# Close port 29400 of HEAD to all but the nodes: anyone who reaches torchrun's store there can run code in torchrun.
# PYTHON=/path/to/python names an environment that spmdrl is installed in.
set -uo pipefail

python=${PYTHON:-python}
if ! "$python" -c 'import spmdrl' 2> /dev/null; then
    # As the quickstart leaves it.
    python=$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python
fi
logs=$(mktemp -d) || exit 1
watch=
trap '[ -z "$watch" ] || kill -- "-$watch" 2> /dev/null; rm -rf -- "$logs"' EXIT
if [ "${NODES:-1}" -eq 1 ]; then
    # In a file, as torchrun runs what it finds in a store that it opens to everybody.
    meeting=(--rdzv-conf store_type=file --rdzv-endpoint "$logs/meeting" --local-addr 127.0.0.1)
else
    : "${HEAD:?the name or address of one of the nodes, the same on all of them}"
    # By the way to HEAD: a host's own name may have no address, or one that others can't reach.
    addresses=$("$python" - "$HEAD" << 'END'
import socket, sys

family, kind, _, _, head = socket.getaddrinfo(sys.argv[1], 1, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, kind) as way:
    way.connect(head)
    own = way.getsockname()[0]
print(own, int(own == head[0]))
END
    ) || { printf '[torchrun] no way to HEAD, which is %s\n' "$HEAD" >&2; exit 2; }
    meeting=(--nnodes "$NODES" --local-addr "${addresses% *}" --rdzv-conf "is_host=${addresses#* }"
        --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${RUN_ID:-spmdrl}")
fi

asked=
ask() {
    if [ -n "$asked" ]; then
        printf '[torchrun] asked to stop for the second time; the ranks are killed\n' >&2
        asked=$3
        kill -s KILL "$launcher"
    else
        asked=$2
        kill -s "$1" "$launcher"
    fi
}
trap 'ask INT 130 130' INT
trap 'ask TERM 75 143' TERM HUP USR1
# torchrun is in a process group of its own, so that it gets each signal once. For its ranks to save, it waits as long
# as this from PyTorch 2.13 on, and 30 s before.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}
# Its warnings of lost connections are pages of C++ frames.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
set -m
"$python" -m torch.distributed.run --nproc-per-node "${RANKS_PER_NODE:-auto}" --rdzv-backend c10d "${meeting[@]}" \
    --log-dir "$logs" -m spmdrl "$@" &
launcher=$!
if [ "${NODES:-1}" -gt 1 ]; then
    # torchrun waits for a store on a lost node for a quarter of an hour, and doesn't notice that its ranks have ended.
    (
        until compgen -G "$logs/*/attempt_*/*/error.json"; do sleep 1; done
        sleep 15
        kill -s KILL "$launcher"
    ) > /dev/null 2>&1 &
    watch=$!
fi
# A signal that is trapped ends `wait` early; afterwards bash still has the exit code.
while kill -0 "$launcher" 2> /dev/null; do
    wait "$launcher"
done
wait "$launcher" 2> /dev/null
code=$?
[ "$code" -ne 0 ] || exit 0
"$python" -m spmdrl.job_end "$logs" "${asked:-$code}"
