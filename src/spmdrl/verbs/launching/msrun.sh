#!/usr/bin/env bash
# A run started by MindSpore's msrun; on several nodes, the same command on each but for NODE_RANK:
#   HEAD=10.0.0.1 NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 bash src/spmdrl/verbs/launching/msrun.sh train run.yaml
# `python -m spmdrl launch msrun run.yaml --nodes 2 --ranks-per-node 8` checks the config, fills in this script and
# runs it. Nothing of MindSpore is imported, so it may have an environment of its own: MSRUN=/path/bin/msrun.
set -uo pipefail

NODES=${NODES:-1}
NODE_RANK=${NODE_RANK:-}  # of this node among several, 0 on HEAD
RANKS_PER_NODE=${RANKS_PER_NODE:-1}
HEAD=${HEAD:-127.0.0.1}  # the name or address of node 0
PORT=${PORT:-8118}  # and a port there, after which the next one is taken too
SETUP=${SETUP:-}  # a file of shell commands that come first: modules, containers, variables such as NCCL_SOCKET_IFNAME
PYTHON=${PYTHON:-python}  # of the environment that spmdrl is installed in
MSRUN=${MSRUN:-msrun}
LOGS=${LOGS:-msrun_logs}
ARGUMENTS=("$@")

say() { printf '[msrun] %s\n' "$*" >&2; }

if [ ${#ARGUMENTS[@]} -eq 0 ]; then
    say "no verb given: bash $0 train run.yaml"
    exit 2
fi
if [ "$NODES" -gt 1 ] && [[ $HEAD =~ ^(127\.|localhost$) ]]; then
    say "HEAD is $HEAD, which other nodes can't reach; set it to the address of node 0 on all $NODES nodes"
    exit 2
fi
if [ "$NODES" -eq 1 ]; then
    NODE_RANK=0
elif [ -z "$NODE_RANK" ]; then
    say "NODE_RANK isn't set; set it to 0 on HEAD, and to 1, 2, ... on the other nodes (under srun, to \$SLURM_NODEID)"
    exit 2
fi
# Modules of clusters use variables that aren't set.
[ -z "$SETUP" ] || { set +u; source "$SETUP" || { say "SETUP is $SETUP, which fails"; exit 2; }; set -u; }
if ! msrun=$(command -v "$MSRUN"); then
    say "there is no $MSRUN; install mindspore, or name it: MSRUN=/path/to/bin/msrun"
    exit 2
fi
if ! "$PYTHON" -c 'import spmdrl' 2> /dev/null; then
    say "$PYTHON has no spmdrl; activate its environment, or name it: PYTHON=/path/to/bin/python"
    exit 2
fi
# msrun runs what PATH has as python.
PATH=$(dirname "$(command -v "$PYTHON")"):$PATH
# msrun doesn't export its --local_worker_num.
export LOCAL_WORLD_SIZE=$RANKS_PER_NODE
cores=$(($(getconf _NPROCESSORS_ONLN) / RANKS_PER_NODE))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 1 ? cores : 1))}
# msrun overwrites the logs of an earlier start.
logs=$LOGS/$(date +%Y%m%d-%H%M%S)-node$NODE_RANK
mkdir -p "$logs" || exit 2

# At SIGTERM and USR1, msrun would leave its workers behind; at Ctrl-C, kill them and end with 0. So it is kept from all
# of them in a process group of its own, and they go to the ranks, which end it.
set -m
workers() {
    local child
    for child in $(cat "/proc/$launcher/task/$launcher/children" 2> /dev/null); do
        # Beside its workers, msrun runs a tail of each one's log.
        [ "$(cat "/proc/$child/comm" 2> /dev/null)" = tail ] || echo "$child"
    done
}
forward() {
    # shellcheck disable=SC2046
    kill -s "$1" $(workers) 2> /dev/null
}
trap 'forward INT' INT
trap 'forward TERM' TERM
trap 'forward USR1' USR1

"$msrun" --worker_num=$((NODES * RANKS_PER_NODE)) --local_worker_num="$RANKS_PER_NODE" --node_rank="$NODE_RANK" \
    --master_addr="$HEAD" --master_port="$PORT" --log_dir="$logs" --join=True \
    python -m spmdrl "${ARGUMENTS[@]}" 2> "$logs/msrun.log" &
launcher=$!
# A signal that is trapped ends `wait` early; afterwards bash still has the exit code.
while kill -0 "$launcher" 2> /dev/null; do
    wait "$launcher"
done
wait "$launcher"
code=$?
# msrun ends with 1 whatever its workers end with, and writes the first one's exit code, -N for signal N.
first=$(sed -n 's/.*Error code: \(-\?[0-9]*\)\..*/\1/p' "$logs/msrun.log" | head -n 1)
if [ "$code" -ne 0 ] && [ -n "$first" ]; then
    code=$((first < 0 ? 128 - first : first))
elif [ "$code" -ne 0 ]; then
    cat "$logs/msrun.log" >&2
fi
exit "$code"
