"""Every block of README and the documentation is what it claims: commands are read with their keys, YAML by the schema,
Python by its grammar, and files that are named are there."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from spmdrl.algorithms.table import ALGORITHMS
from spmdrl.cli.command_line import VERBS, take_plan, take_prompts, take_question
from spmdrl.cli.flags import take_numbers, take_planned_device, take_verb
from spmdrl.cli.manual import help_page
from spmdrl.config.aliases import ALIASES
from spmdrl.config.config import Config, load_config
from spmdrl.config.key_schema import schema, schema_keys
from spmdrl.config.sources import split_arguments
from tests.bench.__main__ import BENCHES, bench_named
from tests.support.jobs import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("configs/recipes/**/*.md"))]
CONFIGURED = ("train", "sft", "preferences", "reward-model", "eval", "generate")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
# A span of prose that is a whole command, as opposed to a name.
COMMAND = re.compile(r"(?:\w+=\S+ )*(?:python -m (?:spmdrl|tests\.)|spmdrl [a-z]|bash launch/|torchrun |pytest )")
# Scripts that start a verb, whose words they pass on.
STARTERS = ("launch/torchrun.sh", "launch/debug_cpu.sh", "launching/slurm.sbatch", "launching/msrun.sh")
RUNS = {
    "launch/quickstart.sh": "configs/debug/quickstart.yaml",
    "launch/smollm2.sh": "configs/grpo/smollm2_arithmetic.yaml",
}
# What stands for a word of the reader's: `$lr`, FILE, `...`.
PLACEHOLDER = re.compile(r"\$|\.\.\.|\b[A-Z][A-Z_]+\b(?!\.)|=[A-Z]$")
# Texts, for which a placeholder is a value like others.
TEXTS = ("model.path", "run.dir", "run.name")
FILES = (".py", ".json", ".yaml", ".lock", ".token")
# Values of any kind, whose own keys aren't a config's.
OPEN = {"log.alerts", "data.train", "data.eval", "rollout.engine_kwargs", "data.chat_template_kwargs"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], textwrap.dedent(found[3]))
        for found in FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def named_files(language: str) -> dict[tuple[Path, str], str]:
    """Blocks that begin with the name of the file that they are, by page and name."""
    found = ((block, re.match(r"# ([\w.]+\.\w+)\b", block.text)) for block in of_language(language))
    return {(block.page, name[1]): block.text for block, name in found if name}


def shell_lines(block: Block) -> Iterator[str]:
    """Commands of a block; of a recorded screen, those behind its prompts."""
    lines = iter(block.text.replace("\\\n", " ").splitlines())
    for line in lines:
        if block.language == "bash" or (line.startswith("$ ") and not block.language):
            line = re.sub(r"(^|\s)#\s.*", "", line.removeprefix("$ "))
            # A quotation of several lines is one word.
            while line.count("'") % 2 or line.count('"') % 2:
                line += "\n" + next(lines)
            yield line


def simple_commands(line: str) -> Iterator[list[str]]:
    """Words of each command of a line, without the shell's own."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    words: list[str] = []
    is_redirected = False
    for word in [*lexer, ";"]:
        if not set(word) <= set(";&|<>()"):
            words += [] if is_redirected else [word]
            is_redirected = False
        elif set(word) & set("<>"):
            words = words[:-1] if words[-1:] == ["2"] else words
            is_redirected = True
        else:
            while words and (words[0] in ("do", "then", "exec", "nice", "env") or re.match(r"[A-Za-z_]\w*=", words[0])):
                words.pop(0)
            yield words
            words = []


def commands() -> list[tuple[str, list[str]]]:
    """Place and words of every command that the pages show."""
    found = []
    for block in BLOCKS:
        if "<<" not in block.text:
            lines = list(shell_lines(block))
            found += [(f"{block}: {line.strip()}", words) for line in lines for words in simple_commands(line) if words]
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        spans = (" ".join(span[1].split()) for span in SPAN.finditer(prose))
        # One that goes on, or is a form, is no command.
        whole = [span for span in spans if COMMAND.match(span) and not span.endswith("...")]
        found += [
            (f"{page.relative_to(ROOT)}: `{span}`", words) for span in whole for words in simple_commands(span) if words
        ]
    return found


COMMANDS = commands()


def spmdrl_words(words: Sequence[str]) -> list[str] | None:
    """The verb and its arguments, whatever starts them."""
    for place, word in enumerate(words):
        is_module = place == 0 or words[place - 1] == "-m" or "tests.support.simulated_accelerator" in words[:place]
        if word == "spmdrl" and is_module:
            return list(words[place + 1 :])
        if word.endswith(STARTERS):
            return list(words[place + 1 :])
        if run := next((config for script, config in RUNS.items() if word.endswith(script)), None):
            return ["train", run, *words[place + 1 :]]
    return None


# The notebook's entries keep the command of their day where `spmdrl bench` was one (docs/notebook/README.md).
VERB_COMMANDS = [
    (place, found)
    for place, words in COMMANDS
    if (found := spmdrl_words(words)) and not (found[0] == "bench" and "/notebook/" in place)
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configs that pages show, README's as run.yaml."""
    folder = tmp_path_factory.mktemp("configs")
    for (page, name), text in named_files("yaml").items():
        (folder / page.stem).mkdir(exist_ok=True)
        (folder / page.stem / name).write_text(text)
    return folder


def config_file(path: Path, page: str, configs: Path) -> Path:
    own = configs / Path(page).stem / path.name
    common = configs / "README" / "run.yaml"
    return (
        own if own.exists() else ROOT / path if (ROOT / path).exists() else common if path.name == "run.yaml" else path
    )


def read(verb: str, words: Sequence[str], page: str, configs: Path) -> None:
    """Read a config as the verb does; what a placeholder stands for is left out, but not its key."""
    files, overrides = split_arguments(words)
    files = [
        config_file(path, page, configs)
        for path in files
        if not PLACEHOLDER.search(path.as_posix().replace(".yaml", ""))
    ]
    keys = schema_keys(Config)
    exact = []
    for override in overrides:
        key = override.removeprefix("--").partition("=")[0]
        if key in TEXTS or not PLACEHOLDER.search(override):
            exact.append(override)
        elif "=" in override and "$" not in key:
            assert key in keys or key in ("prompt", "eval.pass_at"), f"there is no key {key}"
    if files or exact:
        load_config(files, exact, verb)


def read_verb(words: list[str], page: str, configs: Path) -> None:
    verb, *rest = [
        "1" if flag.startswith("--") and PLACEHOLDER.search(word) else word
        for flag, word in zip(["", *words[:-1]], words, strict=True)
    ]
    assert verb in {*VERBS, "help", "--help", "--version"}, f"there is no verb {verb}"
    if verb == "help" or "--help" in rest:
        for name in rest if verb == "help" else [verb]:
            assert PLACEHOLDER.search(name) or help_page(name)
    elif verb == "explain":
        names = [word.removeprefix("algo.") for word in rest if not word.startswith("--") and "NAME" not in word]
        assert set(names) <= {config.name for config in ALGORITHMS}
    elif verb == "launch":
        system, *rest = rest
        assert system in ("slurm", "msrun")
        rest = [word for word in rest if not word.startswith(("--sbatch", "--dry-run"))]
        rest = take_numbers(rest, ("--nodes", "--ranks-per-node"))[1]
        read(*take_verb(rest, CONFIGURED), page, configs)
    elif verb == "check":
        question, rest = take_question(rest)
        read(question["verb"], rest, page, configs)
    elif verb == "plan" or "--dry-run" in rest:
        read("train", take_plan(rest)[1], page, configs)
    elif verb in CONFIGURED:
        rest = (
            take_prompts(rest)[1] if verb == "generate" else take_planned_device(rest)[1] if verb == "train" else rest
        )
        read(verb, rest, page, configs)


@pytest.mark.parametrize(("place", "words"), VERB_COMMANDS, ids=[place for place, _ in VERB_COMMANDS])
def test_each_command_of_the_pages_is_read_with_its_keys(place: str, words: list[str], configs: Path) -> None:
    read_verb(words, place.partition(":")[0], configs)


def test_the_pages_have_commands_of_every_verb() -> None:
    shown = {words[0] for _, words in VERB_COMMANDS}
    assert len(VERB_COMMANDS) > 100 and set(VERBS) <= shown


BENCH_COMMANDS = [
    (place, words[words.index("tests.bench") + 1 :]) for place, words in COMMANDS if "tests.bench" in words
]


def test_each_bench_and_each_of_its_options_is_there() -> None:
    assert len(BENCH_COMMANDS) > 40
    for place, words in BENCH_COMMANDS:
        if not words or PLACEHOLDER.search(words[0]) or words[0] == "--help":
            continue
        assert words[0] in BENCHES, place
        parser = argparse.ArgumentParser(exit_on_error=False)
        bench_named(words[0]).add_arguments(parser)
        parser.add_argument("--json", nargs="?")
        for action in parser._actions if "`" in place else ():
            # Prose leaves out what the page has said.
            action.required = False
        if not PLACEHOLDER.search(" ".join(words[1:])):
            try:
                parser.parse_args(words[1:])
            except (argparse.ArgumentError, SystemExit) as error:
                pytest.fail(f"{place}: {error}")


def test_each_file_that_a_command_names_is_there() -> None:
    scripts = {name for _, name in named_files("bash")} | {name for _, name in named_files("python")}
    lacking = []
    for place, words in COMMANDS:
        for word in words:
            path = word.partition("::")[0].rstrip("/")
            is_ours = re.match(r"(?:tests|launch|configs|src|docs)/[\w./-]+$", path) and not PLACEHOLDER.search(path)
            if is_ours and not (ROOT / path).exists():
                lacking.append(f"{place}: {word}")
            if re.fullmatch(r"[\w-]+\.sh", word) and word not in scripts:
                lacking.append(f"{place}: {word}")
    assert not lacking


def unknown_keys(node: yaml.Node, path: str, known: set[str]) -> Iterator[str]:
    """Keys of a mapping that no config has, sections' own included."""
    if not isinstance(node, yaml.MappingNode) or path in OPEN:
        return
    for name, value in node.value:
        key = f"{path}.{name.value}" if path else name.value
        if key not in known:
            yield key
        else:
            yield from unknown_keys(value, key, known)


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_each_yaml_of_the_pages_is_valid_and_its_keys_are_known(block: Block) -> None:
    root = yaml.compose(block.text)
    known = set(schema_keys(Config))
    if "wandb sweep" in block.text:
        # W&B's own form; what it varies are keys here.
        assert set(yaml.safe_load(block.text)["parameters"]) <= known
    elif root is not None:
        assert list(unknown_keys(root, "", known)) == []


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_each_python_of_the_pages_compiles(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", of_language("jsonl") + of_language("json"), ids=str)
def test_each_json_of_the_pages_is_valid(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def test_keys_in_code_spans_are_known() -> None:
    """`optim.lr=1e-6` and `optim.lr` in prose: what begins with a section is a key of it."""
    sections = {key.name for key in schema(Config) if "." not in key.name}
    known = {*schema_keys(Config), *ALIASES, "reward_model.ground_truth"}
    lacking = []
    for page in PAGES:
        for span in SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            found = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)(?:[= ].*|: .*)?", span)
            if found and found[1].partition(".")[0] in sections - {"resume", "seed"} and found[1] not in known:
                lacking += [] if found[1].endswith(FILES) else [f"{page.relative_to(ROOT)}: {span}"]
    assert not lacking
