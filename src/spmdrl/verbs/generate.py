"""The `generate` verb: a model's responses to prompts, as JSON lines on the screen and in the run's folder."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from spmdrl.config.config import Config
from spmdrl.config.reader import LoadedConfig, start_up
from spmdrl.job.model.replica import load_replica
from spmdrl.job.rollouts.kept_answers import KeptAnswers, identity_of_answers, open_requests
from spmdrl.job.rollouts.open_model import OpenModel
from spmdrl.job.rollouts.rollout import turns_of
from spmdrl.job.run.run_failure import explained_memory
from spmdrl.job.run.run_folder import hold_run_folder
from spmdrl.job.settings_of_run import with_settings_of_run
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import prepare_together
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import check_run
from spmdrl.observability.jsonl import write_atomic
from spmdrl.observability.summary import software_versions, write_verb_summary
from spmdrl.observability.terminal.console import Console
from spmdrl.observability.terminal.progress import GenerationProgress
from spmdrl.resources.world import World
from spmdrl.runtime.screen import show

FILE = "generated.jsonl"


def main(loaded: LoadedConfig[Config], prompts: Sequence[str] = ()) -> int:
    """Generate responses with the sampling of the section `rollout`, `eval.num_samples` per prompt.

    A run's model is used as in its evaluations, if the config doesn't set one. Responses to `data.eval` go to a folder
    of the model below the run's, and repeating an interrupted command continues it. `prompts`, if given, replace them;
    their responses are shown and leave no file.
    """
    started = time.perf_counter()
    loaded = with_settings_of_run(loaded, "generate")
    config, checked = loaded.value, check_run(loaded, verb="generate", prompts=prompts)
    with ExitStack() as stack:
        world = stack.enter_context(open_job(checked))
        stack.enter_context(start_up())
        folder = config.run.folder
        if prompts:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="spmdrl_generate_")))
        else:
            stack.enter_context(hold_run_folder(config.run, world, "generate.lock"))
        with explained_memory(config):
            kept = keep_answers(checked, world, folder)
        lines = kept.gathered()
        if world.is_main and prompts:
            _show_answers(prompts, [json.loads(line) for line in lines])
        elif world.is_main:
            _write_answers(config, lines, kept.folder.with_name(FILE), time.perf_counter() - started)
        kept.drop()
    return 0


def _show_answers(prompts: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> None:
    """Show each prompt after `> `, and its responses below."""
    num_samples = len(answers) // len(prompts)
    for answer in answers:
        prompt, sample = divmod(answer["row"], num_samples)
        if sample == 0:
            show(f"> {prompts[prompt]}")
        number = f"[{sample + 1}] " if num_samples > 1 else ""
        cut = " ... (cut at rollout.max_completion_length or the model's last position)"
        cut = cut if answer["finish"] == "length" else ""
        show(f"{number}{answer['response']}{cut}")


def _write_answers(config: Config, lines: Sequence[str], path: Path, seconds: float) -> None:
    """Write the responses and, beside them, the summary, and print them all."""
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    settings = {"model": config.model.path, "data": str(config.data.eval), "num_samples": config.eval.num_samples}
    found = {"rows": len(lines), "finish": Counter(json.loads(line)["finish"] for line in lines), "seconds": seconds}
    summary = write_verb_summary(path.parent, "generate", settings | found | {"versions": software_versions()})
    for line in lines:
        show(line)
    console = Console(stream=sys.stderr)
    console.note(f"answers  {path}")
    console.note(f"summary  {summary}")


def keep_answers(checked: CheckedRun, world: World, run: Path) -> KeptAnswers:
    """Generate all rows that no interrupted run has finished, and store each as it ends. Collective."""
    config = checked.config
    console = Console(enabled=world.is_main, stream=sys.stderr)
    prepared = prepare_together(checked, world, console)
    source, tokenizer, rows = prepared.source, prepared.tokenizer, prepared.held_out
    assert rows is not None, "generate is refused with nothing to answer"
    prompts = list(itertools.islice(rows.all(), config.eval.max_rows))
    sampling = config.rollout.sampling(tokenizer.stop_token_ids)
    kept = KeptAnswers(source.results_in(run, "generate", config), identity_of_answers(config, source, prompts), world)
    if config.resume == "never":
        kept.put_aside()
    done = kept.rows()
    if done:
        note = f"{kept.folder} has {len(done)} of {len(prompts) * config.eval.num_samples} rows; the rest is generated"
        console.note(note)
    with console.doing("loading the weights"):
        replica = load_replica(config, source, world)
    requests = open_requests(config, prompts, replica, sampling, done, source.decoder.max_positions)
    # This replica's only: others have as many rows, give or take a prompt.
    unit = "rows" if len(replica.mesh.replicas) == 1 else "rows of this replica"
    num_rows = sum(len(request.rows) for request in requests)
    progress = GenerationProgress(num_rows, unit) if world.is_main else None
    with ExitStack() as stack:
        model = OpenModel(
            config, prepared, replica, world, turns_of(config, prepared, replica, world.device.torch_device, stack)
        )
        for answers, responses in model.run(requests, prompts):
            if replica.mesh.is_leader:
                kept.add(answers)
            if progress is not None:
                progress.add(len(responses), sum(response.num_own_tokens for response in responses))
    return kept
