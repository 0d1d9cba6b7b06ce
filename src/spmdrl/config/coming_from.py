"""Pages for users of other trainers, made from the table of names: what each of their settings is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spmdrl.config.aliases import ADVICE, ALIASES, DEFAULTS, MARKS, NEEDLESS, OWN_NAMES
from spmdrl.config.given import inline

# What differs beside names, by trainer.
_COMMANDS = {
    "TRL": "spmdrl convert --ranks 8 -- trl grpo --model_name_or_path models/base --per_device_train_batch_size 8",
    "verl": "spmdrl convert run_qwen3_8b.sh --ranks 8",
    "OpenRLHF": "spmdrl convert train_dapo.sh --ranks 8",
    "prime-rl": "spmdrl convert rl.toml --ranks 8",
    "slime": "spmdrl convert run-qwen.sh --ranks 8",
    "NeMo-RL": "spmdrl convert grpo_math.yaml --ranks 8",
}


def coming_from(trainer: str) -> Iterator[str]:
    """Yield the lines of a trainer's Markdown page."""
    rows = {name: alias for name, alias in ALIASES.items() if trainer in alias.origin.split(", ")}
    rows |= OWN_NAMES[trainer]
    yield f"# Coming from {trainer}"
    yield from ["", f"This page is generated: `python -m spmdrl help --coming-from={trainer.lower()}`. The rules of"]
    yield "such names are in [aliases.md](../aliases.md); [others](others.md) have no key here."
    yield from ["", "```bash", _COMMANDS[trainer], "```", ""]
    yield "writes run.yaml with these settings, and prints what became of each. Most names are also read by the verbs"
    yield "themselves, in files and on the command line, unless the table says `convert`; `sft`, `preferences` and"
    yield from ["`reward-model` read them as keys of their own section, where it has such keys.", ""]
    yield from ["| name there | what it means there | what it sets here |", "|---|---|---|"]
    for name, alias in sorted(rows.items()):
        here = f": {alias.here}" if alias.here else ""
        only = " (`convert`)" if name in OWN_NAMES[trainer] else ""
        yield f"| `{name}`{only} | {_cell(alias.there)} | `{alias.key}`{_cell(here)} |"
    if trainer in DEFAULTS:
        yield from ["", "Defaults there that differ from ours, which `convert` writes out:", ""]
        for verb, values in DEFAULTS[trainer].items():
            pairs = ", ".join(f"`{name}={inline(value)}`" for name, value in values.items())
            yield f"- `{verb}`: {pairs}"


def others_page() -> Iterator[str]:
    """Yield the lines of the Markdown page of names that have no key here."""
    yield from ["# Settings of other trainers without a key here", ""]
    yield "This page is generated: `python -m spmdrl help --coming-from=others`. `NAME=VALUE` is a name with one value."
    yield from ["", "## Nothing to set", "", "These are accepted, and the start of a run names each.", ""]
    yield from _grouped(NEEDLESS)
    yield from ["", "## Something else to do", "", "These are refused, with this answer.", ""]
    yield from _grouped(ADVICE)


def _grouped(answers: Mapping[str, str]) -> Iterator[str]:
    names_of: dict[str, list[str]] = {}
    for name, answer in answers.items():
        names_of.setdefault(answer, []).append(name)
    yield from ["| names | answer |", "|---|---|"]
    for answer, names in names_of.items():
        yield f"| {', '.join(f'`{name}`' for name in names)} | {_cell(answer)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def pages() -> dict[str, list[str]]:
    """Return the lines of all pages by their names."""
    return {trainer.lower(): list(coming_from(trainer)) for trainer in MARKS} | {"others": list(others_page())}
