#!/usr/bin/env bash
# Partial rollout beside rollouts of one step, in turn: bash launch/partial_rollout.sh [key.path=value ...]
# Prints seconds of a step and its generation (steps 3 to last - 1), ages of tokens, and rewards in tenths of the run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment ""
share_cores "${RANKS:-1}"
folder="runs/partial_rollout-$(date +%Y%m%d-%H%M%S)"
one_step="rollout.partial_max_rounds=1 rollout.partial_extra_prompts=null"
for name in one_step tis uncorrected one_step_again tis_again; do
    case "$name" in
        one_step*) settings="$one_step" ;;
        uncorrected) settings="algo.rollout_is=none" ;;
        *) settings="" ;;
    esac
    # shellcheck disable=SC2086  # settings are words
    PYTHON=.venv/bin/python RANKS_PER_NODE=${RANKS:-1} bash launch/torchrun.sh train configs/debug/partial_rollout.yaml \
        "run.dir=$folder/$name" $settings "$@" > "$folder.$name.log" 2>&1 || { tail -n 20 "$folder.$name.log"; exit 1; }
    .venv/bin/python - "$folder/$name" <<'PYTHON'
import json, sys
from pathlib import Path
from statistics import fmean

folder = Path(sys.argv[1])
steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
counted, size = steps[2:-1], -(-len(steps) // 10)
rewards = [f"{fmean(step['reward'] for step in steps[at:at + size]):.3f}" for at in range(0, len(steps), size)]
print(
    f"{folder.name:15s} mean seconds: step {fmean(step['time/step'] for step in counted):.2f} generation "
    f"{fmean(step['time/generation'] for step in counted):.2f} | length {fmean(step['completions/mean_length'] for step in counted):.1f} "
    f"| age mean {fmean(step['off_policy/mean'] for step in counted):.2f} max {max(step['off_policy/max'] for step in counted):.0f} "
    f"| reward {' '.join(rewards)}"
)
PYTHON
done
