"""The `generate` verb: a model's answers to prompts, as JSON lines on the screen or in the run's folder."""

from __future__ import annotations

import itertools
import json

from spmdrl.config import Config
from spmdrl.configfile import LoadedConfig, start_up
from spmdrl.dataflow.samples.prompts import PromptSource
from spmdrl.dataflow.stages.generation import FinishedGroup, generate_groups
from spmdrl.dataflow.stages.partial import row_seed
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.job.actor import ModelSource, prepare_model
from spmdrl.job.checked import CheckedRun, check_run
from spmdrl.job.fitting import check_generation_fits
from spmdrl.job.replica import build_replica, load_for_generation
from spmdrl.observability.progress import GenerationProgress
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.world import World, open_world

FILE = "generated.jsonl"


def main(loaded: LoadedConfig[Config]) -> int:
    """Answer the prompts of `data.eval` with `rollout`'s sampling, `eval.num_samples` times each."""
    checked = check_run(loaded, verb="generate")
    with open_world(checked.config.resources.device, checked.config.resources.timeout_seconds) as world:
        with start_up():
            lines = generated_lines(checked, world)
        if world.is_main:
            path = checked.config.run.folder / FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in lines))
            for line in lines:
                print(line)
    return 0


def generated_lines(checked: CheckedRun, world: World) -> list[str]:
    """One JSON object a response, in row order, on every rank. Collective."""
    config = checked.config
    source = ModelSource.of(prepare_model(config, world))
    check_generation_fits(config, source.decoder)
    tokenizer = ModelTokenizer(source.folder)
    every = PromptSource(checked.eval_rows, tokenizer.raw, config.data, config.seed).all()
    prompts = list(itertools.islice(every, config.eval.max_rows))
    replica = build_replica(config, source, world, config.resources.generation)
    load_for_generation(replica.engine, source)
    size, sampling = config.eval.num_samples, config.rollout.sampling(tokenizer.stop_token_ids)
    numbers = replica.share_of(len(prompts))
    requests = []
    for number in numbers:
        rows = tuple(range(number * size, (number + 1) * size))
        seeds = tuple(row_seed(config.seed, 0, row) for row in rows)
        requests.append(Request(rows, prompts[number].prompt_ids, seeds, sampling))
    own: list[str] = []
    # Other replicas aren't asked: they have as many rows, give or take a prompt.
    rows_told = "rows" if len(replica.mesh.replicas) == 1 else "rows of this replica"
    progress = GenerationProgress(len(numbers) * size, rows_told) if world.is_main else None
    for group in generate_groups(replica.engine, requests, [prompts[number] for number in numbers]):
        if progress is not None:
            progress.add(size, sum(len(response.token_ids) for response in group.responses))
        if replica.mesh.is_leader:
            own += [json.dumps(_record(group, response, tokenizer)) for response in group.responses]
    gathered = gather_bytes("\n".join(own).encode())
    lines = [line for part in gathered for line in part.decode().splitlines()]
    return sorted(lines, key=lambda line: json.loads(line)["row"])


def _record(group: FinishedGroup, response: Response, tokenizer: ModelTokenizer) -> dict[str, object]:
    return {
        "row": response.row,
        "prompt": group.prompt.text,
        "response": tokenizer.decode(response.token_ids),
        "finish": response.finish,
        "logprob": sum(response.logprobs),
    }
