#!/usr/bin/env bash
# Runs the commands of docs/results.md one after another, about three hours: bash launch/results.sh [PATTERN]
#
# PATTERN chooses commands by a regular expression, such as 'bench (samples|nodes)'. Each command's output goes to
# runs/results/NUMBER.log, and a line with its exit code and seconds to the screen. Names in capitals are variables:
# MODEL=models/a PROMPTS=rows bash launch/results.sh; a command with one that isn't set is left out, and named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment dev
logs=runs/results
mkdir -p "$logs"
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"

# One command a line: those in `...` of table rows and text, and the lines of ```bash blocks.
commands() {
    .venv/bin/python - "${1:-.}" <<'PYTHON'
import re, sys
from pathlib import Path

page = Path("docs/results.md").read_text(encoding="utf-8")
blocks = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
start = re.compile(r"(?:\w+=\S+ )*(?:python -m (?:tests\.bench|spmdrl) |bash launch/|pytest )")
for command in dict.fromkeys(found for found in [*blocks, *inline] if start.match(found)):
    if re.search(sys.argv[1], command):
        print(command)
PYTHON
}

number=0
while IFS= read -r command; do
    number=$((number + 1))
    filled=$command
    for name in $(grep -oE '\b[A-Z][A-Z0-9_]{3,}\b' <<< "$command" | grep -vE '^(OMP_|SPMDRL_)' | sort -u || true); do
        if [ -n "${!name:-}" ]; then filled=${filled//$name/${!name}}; fi
    done
    if grep -qE '(^|[ /=])(MODEL|PROMPTS|QUESTIONS|SMOLLM2|QUICKSTART_START|PYTHON_WITH_VLLM)\b' <<< "$filled"; then
        say "$number left out, a name isn't set: $command"
        continue
    fi
    say "$number $filled"
    begun=$SECONDS code=0
    bash -c "$filled" > "$logs/$number.log" 2>&1 < /dev/null || code=$?
    say "$number ended with $code after $((SECONDS - begun)) s; its output is in $logs/$number.log"
done < <(commands "$@")
