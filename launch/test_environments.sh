#!/usr/bin/env bash
# The tests with libraries of environments and tasks: bash launch/test_environments.sh [pytest's arguments ...]
#
# .venv-environments holds what setup.cfg's extras for them need beyond .venv, which is behind it on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
share_cores 2
extras="gyms mcp reasoning-gym"
# A client for the documented program.
also="openai"
state="$extras $also setup.cfg=$(cksum < setup.cfg)"
if [ "$(cat .venv-environments/installed 2> /dev/null)" != "$state" ]; then
    say "making .venv-environments with $extras"
    layer_environment .venv-environments > /dev/null
    needed=$(.venv/bin/python -c '
import configparser, sys
config = configparser.ConfigParser()
config.read("setup.cfg")
print(*(config["options.extras_require"][extra].strip() for extra in sys.argv[1:]), sep="\n")' $extras)
    # Seen from there, what .venv has is installed already, PyTorch's build among it.
    # shellcheck disable=SC2086
    .venv/bin/python -m pip --python .venv-environments/bin/python install -qq --disable-pip-version-check $needed $also || {
        printf '== tests with libraries of environments LEFT OUT: these could not be installed here\n'
        exit 69
    }
    echo "$state" > .venv-environments/installed
fi
files=$(grep -rlE --include="test_*.py" '(importorskip|find_spec)\("(gymnasium|skyrl_gym|mcp|reasoning_gym)"' tests/engines tests/dataflow)
# shellcheck disable=SC2086
exec .venv-environments/bin/python -m pytest -q "$@" $files \
    "tests/job/test_environment.py::test_the_documented_tools_train_on_two_ranks["{mcp,program}"]" \
    "tests/test_recipes.py::test_a_recipe_takes_a_step[reasoning_gym-"{spell_backward,word_sequence_reversal}"]" \
    tests/test_recipes.py::test_no_question_that_is_held_out_is_trained_on
