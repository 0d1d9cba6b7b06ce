#!/usr/bin/env bash
# The tests on a real Slurm of two nodes on this machine: bash launch/test_slurm.sh [pytest's arguments ...]
# As root on Debian or Ubuntu it installs slurm-wlm and munge. Its daemons run from a folder of their own, and end with
# the tests; no other Slurm on the machine is touched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
left_out() {
    printf '== Slurm tests LEFT OUT: %s\n' "$1"
    exit 69
}
[ "$(id -u)" -eq 0 ] || left_out "its daemons need root"
if ! command -v slurmctld > /dev/null || ! command -v slurmd > /dev/null || ! command -v munged > /dev/null; then
    command -v apt-get > /dev/null || left_out "there is no slurmctld, slurmd or munged, and no apt-get to install them"
    say "installing slurm-wlm and munge"
    install_slurm() { DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge > /dev/null; }
    install_slurm 2> /dev/null || { apt-get update -qq && install_slurm; } || left_out "it could not be installed here"
fi
share_cores 2
exec .venv/bin/pytest -m slurm tests/launch/test_slurm.py "$@"
