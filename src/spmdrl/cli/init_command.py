"""`spmdrl init`: a first run.yaml with its files, copied from the configurations that are tested here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spmdrl.cli.flags import take_texts
from spmdrl.config.reader import ConfigError
from spmdrl.observability.terminal.spelling import nearest
from spmdrl.runtime.screen import show

FOLDER = Path(__file__).with_name("first_files")
# By name: what it is, the command after it, and its files, each with its place in the clone and its name here.
_RECIPE = "configs/recipes/higher_or_lower"
STARTS: dict[str, tuple[str, str, dict[str, tuple[str, str]]]] = {
    "quickstart": (
        "a small model made by code learns sums, in minutes on a laptop",
        "spmdrl train run.yaml",
        {"quickstart.yaml": ("configs/debug/quickstart.yaml", "run.yaml")},
    ),
    "smollm2": (
        "SmolLM2-135M-Instruct learns to calculate, on a laptop's CPU",
        "hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir models/SmolLM2-135M-Instruct, then\n"
        "  torchrun --standalone --nproc-per-node 2 -m spmdrl train run.yaml",
        {"smollm2.yaml": ("configs/grpo/smollm2_arithmetic.yaml", "run.yaml")},
    ),
    "gsm8k": (
        "Qwen2.5-0.5B-Instruct learns GSM8K on one GPU, with vLLM",
        "spmdrl train run.yaml data.train=TRAIN.jsonl data.eval=TEST.jsonl",
        {"gsm8k.yaml": ("configs/grpo/qwen2_5_0_5b_gsm8k.yaml", "run.yaml")},
    ),
    "dpo": (
        "supervised training, then DPO or a reward model, on pairs made by code",
        "spmdrl sft run.yaml run.name=pairs_start",
        {"dpo.yaml": ("configs/debug/preferences.yaml", "run.yaml")},
    ),
    "environment": (
        "a game of several turns, with an environment of one's own",
        "spmdrl train run.yaml",
        {
            "environment.yaml": (f"{_RECIPE}/train.yaml", "run.yaml"),
            "game.py.txt": (f"{_RECIPE}/game.py", "game.py"),
            "secrets.jsonl": (f"{_RECIPE}/secrets.jsonl", "secrets.jsonl"),
        },
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Write the files of one start into a folder, by default this one; without a name, list them. Returns 0."""
    texts, names = take_texts(arguments, ("--to",))
    if not names:
        show("spmdrl init NAME [--to FOLDER] writes run.yaml and its files:")
        for name, (purpose, _, _) in STARTS.items():
            show(f"  {name:12}{purpose}")
        return 0
    if len(names) > 1 or names[0] not in STARTS:
        near = nearest(names[0], STARTS)
        advice = f"did you mean {near}?" if near else f"the names are {', '.join(STARTS)}"
        raise ConfigError(f"init takes one name, and there is no {' '.join(names)!r}; {advice}")
    folder = Path(texts.get("--to", "."))
    _, command, files = STARTS[names[0]]
    written = {folder / target: _local_text(FOLDER / source, files) for source, (_, target) in files.items()}
    try:
        if there := [path for path in written if path.exists()]:
            raise ConfigError(f"{there[0]} exists; move it away, or write elsewhere by --to FOLDER")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} takes no files: {error.strerror}; write elsewhere by --to FOLDER") from error
    show(f"wrote {', '.join(map(str, written))}")
    show(f"next: {f'cd {folder} && ' if '--to' in texts else ''}{command}")
    return 0


def first_config(name: str) -> Path:
    """Return the installed configuration of a start."""
    return FOLDER / f"{name}.yaml"


def _local_text(path: Path, files: dict[str, tuple[str, str]]) -> str:
    """Return a file's text with the names that its files have side by side, and without its editors' line."""
    text = path.read_text(encoding="utf-8")
    for place, target in files.values():
        text = text.replace(place, target)
    first, _, rest = text.partition("\n")
    return rest if first.startswith("# yaml-language-server") else text
