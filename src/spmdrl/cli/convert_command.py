"""`spmdrl convert`: a configuration of another trainer as a run.yaml, with what became of each of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from pathlib import Path

from spmdrl.cli.flags import take_numbers, take_texts
from spmdrl.config.aliases import MARKS
from spmdrl.config.config import Config, load_config
from spmdrl.config.foreign_file import END, read_elsewhere, read_words, words_of_script
from spmdrl.config.given import Given, given_of, shortened
from spmdrl.config.reader import ConfigError
from spmdrl.config.translation import (
    CONVERTED,
    MISSING_HERE,
    NEEDLESS_HERE,
    TAKEN,
    Translation,
    programs_of,
    trainer_of,
    translate,
    verb_of,
)
from spmdrl.config.verb_keys import STEPS
from spmdrl.runtime.screen import show

_FLAGS = ("--to", "--from", "--verb")


def main(arguments: Sequence[str]) -> int:
    """Convert a file, or the words after `--`; returns 0, whatever is left to set."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    numbers, others = take_numbers(arguments[:end], ("--ranks",))
    texts, files = take_texts(others, _FLAGS)
    words = list(arguments[end + 1 :])
    if len(files) != (0 if words else 1) or any(file.startswith("-") for file in files):
        raise ConfigError("convert takes one file, as in spmdrl convert grpo.yaml, or a command line after --")
    to = Path(texts.get("--to", "run.yaml"))
    written, names = _read(files, words)
    trainer = texts.get("--from") or trainer_of([name for name, _ in written], names)
    if trainer is None or trainer not in MARKS:
        known = ", ".join(MARKS)
        raise ConfigError(f"whose settings these are isn't plain; write --from and one of {known}")
    written += _of_command(names)
    verb = texts.get("--verb") or verb_of([name for name, _ in written], names)
    if verb not in STEPS:
        raise ConfigError(f"--verb is {verb}, but must be one of {', '.join(STEPS)}")
    num_ranks = numbers.get("--ranks", 1)
    done = translate(Config, written, trainer, verb, num_ranks)
    command = " ".join([*files, *words])
    head = f"# Converted from {trainer}'s settings ({shortened(command)}), for `spmdrl {verb}` on {num_ranks} ranks.\n"
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(head + done.text())
    except OSError as error:
        why = "exists; move it away, or" if isinstance(error, FileExistsError) else f"isn't written: {error.strerror};"
        raise ConfigError(f"{to} {why} write elsewhere by --to FILE") from error
    _show(done, trainer, verb, num_ranks)
    _show_what_is_left(to, verb)
    return 0


def _of_command(names: Sequence[str]) -> list[tuple[str, Given]]:
    """Return what TRL's command sets beside its options. Raises ConfigError for one without a counterpart."""
    command = next((word for last, word in pairwise(names) if last == "trl" and word.isidentifier()), "grpo")
    if command not in ("grpo", "rloo", "sft", "dpo", "reward"):
        raise ConfigError(f"trl {command} has no counterpart; spmdrl has TRL's grpo, rloo, sft, dpo and reward")
    return [("algo.name", given_of("rloo", "trl rloo"))] if command == "rloo" else []


def _read(files: Sequence[str], words: Sequence[str]) -> tuple[list[tuple[str, Given]], list[str]]:
    """Return the settings, and words that may name the trainer and the kind of training."""
    problems: list[str] = []
    written = read_elsewhere(Path(files[0]), problems) if files else read_words(words, "command line")
    if problems:
        raise ConfigError("\n".join(problems))
    if not written:
        raise ConfigError("no settings found; they are --name VALUE or key=VALUE, or those of a YAML or TOML file")
    if not files:
        return written, programs_of(words)
    path = Path(files[0])
    script = "" if path.suffix in (".yaml", ".yml", ".toml") else path.read_text(encoding="utf-8")
    commands = [list(command) for is_end, command in groupby(words_of_script(script), key=END.__eq__) if not is_end]
    # The name of a file may be of anything in it, such as a reward model beside PPO.
    return written, [*chain(*map(programs_of, commands)), path.name]


def _show(done: Translation, trainer: str, verb: str, num_ranks: int) -> None:
    show(f"{trainer}'s settings, for spmdrl {verb} on {num_ranks} {'ranks' if num_ranks > 1 else 'rank (--ranks)'}")
    for kind in (TAKEN, CONVERTED, NEEDLESS_HERE, MISSING_HERE):
        fates = [fate for fate in done.fates if fate.kind == kind]
        if fates:
            show(f"\n{kind}:")
        for fate in fates:
            name = f"{fate.name}={shortened(fate.written)}" + (f" ({trainer}'s default)" if fate.is_default else "")
            show(f"  {name}: {fate.words}" if kind != TAKEN else f"  {name} -> {fate.words}")
    counts = done.counts()
    parts = [f"{counts[kind]} {kind}" for kind in (TAKEN, CONVERTED, NEEDLESS_HERE, MISSING_HERE)]
    show(f"\n{sum(counts.values())} keys: {', '.join(parts)}")


def _show_what_is_left(to: Path, verb: str) -> None:
    try:
        load_config([to], [], verb)
    except ConfigError as left:
        show(f"\n{to} is written; left to set:\n{left}")
        return
    show(f"\n{to} is written; next: spmdrl check {'' if verb == 'train' else verb + ' '}{to}")
