"""Command line: one verb, then its arguments. A verb's module is imported only when it runs."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spmdrl import __version__
from spmdrl.cli.failure_page import OTHER_RANKS_WAIT_SECONDS, end_with, wants_traceback
from spmdrl.cli.flags import MEMORY, take_numbers, take_planned_device, take_texts, take_verb
from spmdrl.cli.init_command import first_config
from spmdrl.cli.manual import VERB_PAGES, help_page
from spmdrl.cli.verb_mains import configured_main, own_main
from spmdrl.config.reader import ConfigError, start_up
from spmdrl.config.sources import split_arguments
from spmdrl.observability.terminal.spelling import nearest
from spmdrl.runtime.installed import located
from spmdrl.runtime.launch import LaunchEnvironment, StartRefused, is_msruns_scheduler, read_launch_environment
from spmdrl.runtime.screen import output_file, show, waiting
from spmdrl.runtime.supervision.launcher import end_with_launcher, remove_empty_folders, write_error_file
from spmdrl.runtime.supervision.stop_request import INTERRUPTED, Stopped, request, stop_words

VERBS = {
    "quickstart": "train a small model on this machine, as a first look",
    "init": "write a first run.yaml with its files",
    "train": "reinforcement learning from a config; the same command again goes on where it stopped",
    "sft": "supervised training on the answers of data.train",
    "preferences": "DPO on the pairs of data.train",
    "reward-model": "a model that scores the better response of a pair higher",
    "eval": "mean reward and accuracy on the held-out rows of data.eval",
    "generate": "answers of a model to prompts",
    "replay": "rows of a step again in one process, beside what the run recorded of them",
    "convert": "a run.yaml from settings of TRL, verl, OpenRLHF, prime-rl, slime or NeMo-RL",
    "check": "whether a verb would start with a config, fits, and reads its data as meant; trains nothing",
    "plan": "memory of a run on any number of devices, by rank and owner; needs neither the devices nor the data",
    "launch": "start a run under Slurm or msrun, or print the script that would",
    "explain": "the equations of an algorithm, its defaults, and where other trainers differ",
    "doctor": "check what the devices of this machine must do for a job",
    "report": "write report.html of a run's folder",
}

USAGE = """usage: spmdrl VERB [FILE.yaml ...] [key.path=value ...]

verbs:
{verbs}

Later files win over earlier ones, and key.path=value (or --key.path value) wins over files.

examples:
  python -m spmdrl train configs/debug/quickstart.yaml                       one process
  torchrun --standalone --nproc-per-node 8 -m spmdrl train run.yaml          8 ranks on one node
  python -m spmdrl train run.yaml optim.lr=1e-6 --rollout.temperature 0.8    with overrides
  python -m spmdrl convert grpo.yaml --ranks 8                               settings of TRL and others as run.yaml
  python -m spmdrl check run.yaml --reward                                   is this config right, and its reward?
  python -m spmdrl plan run.yaml --ranks 64 --nodes 8 --device h100          does it fit, and in which part of a step?
  python -m spmdrl launch slurm run.yaml --nodes 4 --ranks-per-node 8        submit it to Slurm
  python -m spmdrl eval run.yaml model.path=runs/a/checkpoints/step_000100/model
  python -m spmdrl generate model.path=runs/a prompt='12+30='
  python -m spmdrl replay runs/a --step 101 --row 7
  python -m spmdrl report runs/a
  python -m spmdrl explain algo.gspo
  python -m spmdrl doctor

spmdrl VERB --help describes a verb, and spmdrl help KEY a key or section, such as algo.kl_coef or rollout.
spmdrl help --markdown is the page of all keys (docs/config.md), spmdrl help --schema their JSON schema, and
spmdrl help --coming-from=trl (verl, openrlhf, prime-rl, slime, nemo-rl, others) what other trainers' settings are here.
"""

_MACOS = "macOS isn't tested: several nodes and the reward code are refused, and reward processes have no memory limit"
_MOST_PROMPT_BYTES = 1 << 20
# Verbs that save and exit when asked to stop.
_STOPPING_VERBS = ("train", "sft", "preferences", "reward-model")
_CONFIGURED_VERBS = ("train", "sft", "preferences", "reward-model", "eval", "generate")
# Verbs whose ranks form one job.
_JOINING_VERBS = (*_CONFIGURED_VERBS, "check")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns 0, or 2 for wrong input; any other failure raises, so that Python exits with 1."""
    if is_msruns_scheduler(os.environ):
        # Ranks form the job without it, and msrun waits for it to end well.
        return 0
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_own_help = arguments[:1] in (["doctor"], ["report"], ["replay"]) or "--" in arguments
    if arguments[:1] == ["--version"]:
        show(f"spmdrl {__version__}")
        return 0
    if arguments[:1] == ["help"] or (not is_own_help and {"-h", "--help"} & set(arguments)):
        return _help(arguments)
    launch = LaunchEnvironment()
    # Read when torch is imported: its warnings of lost connections are pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    end_with_launcher()
    remove_empty_folders()
    try:
        try:
            with start_up():
                launch = read_launch_environment(os.environ)
            return _run(arguments, launch)
        except StartRefused as refusal:
            return _refuse(refusal, launch)
        except ConfigError as error:
            return _refuse_all(error, launch, is_joining=bool({*arguments[:1]} & {*_JOINING_VERBS}))
    except KeyboardInterrupt:
        # Ctrl-C reaches all ranks; once they work together, all but the first to notice it end by PeerFailed.
        if launch.rank == 0:
            show("spmdrl: interrupted", stream=sys.stderr)
        return INTERRUPTED
    except Stopped as stopped:
        text = str(stopped) or f"{stop_words(stopped.reason)} before it began; the same command starts again"
        if launch.rank == 0 or (str(stopped) and not stopped.is_agreed):
            show(f"spmdrl: {text}", stream=sys.stderr)
        if str(stopped) or stopped.is_agreed:
            # Otherwise the launcher may have asked, as another rank had died before they joined.
            write_error_file(f"spmdrl: {text}", stopped.code)
        return stopped.code


def _help(arguments: Sequence[str]) -> int:
    """Print the page of a verb or of each key; for anything else, the general page."""
    names = [argument for argument in arguments if argument not in ("help", "-h", "--help")]
    if names and names[0] in VERB_PAGES:
        names = names[:1]
    elif names and names[0] in VERBS:
        names = []
    try:
        pages = [help_page(name, keys_too=arguments[0] == "help") for name in names]
        show(located("\n".join(pages) if names else usage()), end="")
    except ConfigError as error:
        return _refuse(error, LaunchEnvironment())
    return 0


def usage() -> str:
    """Return the text of `--help`."""
    return USAGE.format(verbs="\n".join(f"  {verb:13}{purpose}" for verb, purpose in VERBS.items()))


def _run(arguments: Sequence[str], launch: LaunchEnvironment) -> int:
    if not arguments:
        raise ConfigError(f"no verb given\n\n{usage()}")
    verb, *rest = arguments
    if verb not in VERBS:
        near = nearest(verb, VERBS)
        advice = f"did you mean {near}?" if near else f"the verbs are {', '.join(VERBS)}"
        raise ConfigError(f"unknown verb {verb!r}; {advice}")
    if verb == "quickstart":
        return _run_configured("train", [str(first_config(verb)), *rest], launch)
    if (own := own_main(verb)) is not None:
        return own(rest)
    if verb == "launch":
        from spmdrl.cli.launch_command import main as launch_job

        return launch_job(rest, launch, _JOINING_VERBS)
    return _run_configured(verb, rest, launch)


def _run_configured(verb: str, arguments: Sequence[str], launch: LaunchEnvironment) -> int:
    question: dict[str, Any] = {"verb": verb}
    if verb == "train" and "--dry-run" in arguments:
        verb = "dry-run"
    if verb in ("check", "plan", "dry-run"):
        question, arguments = (take_question if verb == "check" else take_plan)(arguments)
    elif verb == "train":
        question["plan_device"], arguments = take_planned_device(arguments)
    if sys.platform == "darwin" and launch.rank == 0 and verb not in ("plan", "dry-run"):
        show(f"spmdrl: {_MACOS}", stream=sys.stderr)
    config_verb = question.get("verb", "train")
    prompts, arguments = take_prompts(arguments) if config_verb == "generate" else ([], arguments)
    files, overrides = split_arguments(arguments)
    if not files and not overrides:
        raise ConfigError(
            f"{verb} needs a config; write spmdrl {verb} FILE.yaml, such as the run.yaml of spmdrl init quickstart"
        )
    with ExitStack() as handled:
        # Signals during imports end the process at once: a module that is cut short may go on half done.
        handled.enter_context(request.handling_signals(launch.rank))
        from spmdrl.config.config import load_config

        with start_up():
            loaded = load_config(files, overrides, config_verb)
        if launch.rank == 0:
            # generate's stdout is JSON lines.
            stream = sys.stderr if verb == "generate" else None
            for written, canonical in loaded.aliases_used.items():
                show(f"config: {written} is read as {canonical}", stream=stream)
            if loaded.unread:
                show(f"config: not read by {config_verb}: {', '.join(loaded.unread)}", stream=stream)
        with waiting(f"spmdrl {verb}: starting PyTorch", enabled=launch.rank == 0):
            run = configured_main(verb, prompts, question)
        try:
            if verb in _STOPPING_VERBS:
                request.begin_set_up()
            else:
                handled.close()
            return run(loaded)
        except (ConfigError, StartRefused):
            raise
        except Exception as failure:
            if wants_traceback():
                raise
            return end_with(failure, loaded.value.run.folder, launch, handled.close)


def take_question(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the arguments of `check`'s main, such as the verb, from the config's."""
    verb, rest = take_verb(arguments, _CONFIGURED_VERBS)
    planned, rest = take_ranks(rest)
    memory, rest = take_numbers(rest, (MEMORY,))
    question = {"verb": verb, "planned": planned, "device_gib": memory.get(MEMORY)}
    question |= {"is_linted": "--reward" in rest, "is_whole": "--all" in rest}
    if question["is_linted"] and verb not in ("train", "eval"):
        raise ConfigError(f"--reward looks at the rewards of train and eval, not at {verb}; leave it out")
    return question, [word for word in rest if word not in ("--reward", "--all")]


def take_plan(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the arguments of `plan`'s main from the config's."""
    is_dry_run, flags = "--dry-run" in arguments, {"--search", "--scale"} & {*arguments}
    planned, rest = take_ranks([word for word in arguments if word not in ("--dry-run", "--search", "--scale")])
    if is_dry_run and flags:
        raise ConfigError(f"{min(flags)} is of spmdrl plan, not of a dry run; leave it out, or write spmdrl plan")
    numbers, rest = take_numbers(rest, ("--prompt-length", "--response-length"))
    own = ("--rank",) if is_dry_run else ("--calibrate", "--picture")
    texts, rest = take_texts(rest, ("--device", "--sizes", "--json", *own))
    if others := {*texts, *numbers, *flags} - {"--calibrate"} if "--calibrate" in texts else set():
        raise ConfigError(f"{min(others)} is of a plan, and --calibrate runs jobs here instead; leave one of them out")
    rank = texts.get("--rank", "0")
    if not rank.isdecimal():
        raise ConfigError(f"--rank is {rank!r}, but must be a rank, as in --rank 0")
    of_plan = {
        "device_file": _output(texts.get("--calibrate")),
        "picture": _output(texts.get("--picture")),
        "searches": "--search" in flags,
        "scales": "--scale" in flags,
    }
    return {
        **({"rank": int(rank)} if is_dry_run else of_plan),
        "planned": planned,
        "device": texts.get("--device", "h100"),
        "prompt_length": numbers.get("--prompt-length"),
        "response_length": numbers.get("--response-length"),
        "sizes": Path(texts["--sizes"]) if "--sizes" in texts else None,
        "json_file": _output(texts.get("--json")),
    }, rest


def _output(text: str | None) -> Path | None:
    try:
        return None if text is None else output_file(text)
    except ArgumentTypeError as error:
        raise ConfigError(str(error)) from None


def take_prompts(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `prompt=TEXT`, `--prompt TEXT` and `-` (standard input as one prompt) from the other arguments."""
    prompts: list[str] = []
    others: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument.startswith(("prompt=", "--prompt=")):
            prompts.append(argument.partition("=")[2])
        elif argument == "--prompt" and rest:
            prompts.append(rest.popleft())
        elif argument == "-":
            prompts.append(_standard_input())
        else:
            others.append(argument)
    if any(not prompt.strip() for prompt in prompts):
        raise ConfigError("prompt is empty; write prompt='...', or - for standard input with text in it")
    return prompts, others


def take_ranks(arguments: Sequence[str]) -> tuple[LaunchEnvironment | None, list[str]]:
    """Split `--ranks N` and `--nodes N` from the other arguments: the job they describe, or None."""
    numbers, others = take_numbers(arguments, ("--ranks", "--nodes"))
    ranks, nodes = numbers.get("--ranks", 1), numbers.get("--nodes", 1)
    if ranks % nodes:
        raise ConfigError(f"--ranks {ranks} isn't a multiple of --nodes {nodes}; every node must start the same number")
    return LaunchEnvironment(world_size=ranks, local_world_size=ranks // nodes) if numbers else None, others


def _standard_input() -> str:
    if read_launch_environment(os.environ).world_size > 1:
        raise ConfigError("- is standard input, which only one rank could read; write prompt='...'")
    content = sys.stdin.buffer.read(_MOST_PROMPT_BYTES + 1)
    if len(content) > _MOST_PROMPT_BYTES:
        raise ConfigError(f"standard input has more than {_MOST_PROMPT_BYTES >> 20} MiB; put prompts into data.eval")
    try:
        return content.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input isn't UTF-8: byte 0x{content[error.start]:02x} at {error.start}") from error


def _refuse(error: ConfigError | StartRefused, launch: LaunchEnvironment, *, is_own: bool = False) -> int:
    """Show why the job can't start, once per screen. `is_own`: no other rank shows it sooner or later."""
    name = "spmdrl" if launch.rank == 0 else f"spmdrl: rank {launch.rank}"
    is_shown = isinstance(error, StartRefused) and error.is_shown
    if launch.rank and (is_shown or not is_own):
        # A launcher ends the ranks of its node as soon as one of them has failed.
        time.sleep(OTHER_RANKS_WAIT_SECONDS)
    if not is_shown:
        show(f"{name}: {located(str(error))}", stream=sys.stderr)
    write_error_file(f"{name}: {error}", 2)
    return 2


def _refuse_all(error: ConfigError, launch: LaunchEnvironment, *, is_joining: bool) -> int:
    """Show this rank's own error, and end the other ranks too."""
    if launch.rank == 0:
        _refuse(error, launch)
    if launch.world_size == 1 or not is_joining:
        # Verbs that join no other rank end without refusing for them.
        return 2 if launch.rank == 0 else _refuse(error, launch)
    # Imported only now, since it brings torch with it, which one rank's refusal doesn't need.
    from spmdrl.resources.world import refuse_all

    refusal = refuse_all(launch, str(error))
    return 2 if launch.rank == 0 else _refuse(refusal, launch, is_own=True)
