"""A model that is open for any texts: its engine awake, its tokenizer, template and environment beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from spmdrl.config.config import Config
from spmdrl.config.reader import LoadedConfig, start_up
from spmdrl.dataflow.data.data_rows import rows_of_prompts
from spmdrl.dataflow.data.prompts import Prompt, PromptSource
from spmdrl.dataflow.stages.rollout.requests import Turns, run_rollout
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.job.model.replica import Replica, load_replica
from spmdrl.job.rollouts.kept_answers import answer_record, open_requests
from spmdrl.job.rollouts.rollout import turns_of
from spmdrl.job.run.run_failure import explained_memory
from spmdrl.job.settings_of_run import with_settings_of_run
from spmdrl.job.start.prepared import Prepared, prepare_together
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import check_run
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.world import World


@dataclass(frozen=True)
class OpenModel:
    """A model whose engine is awake, and all that answering takes."""

    config: Config
    prepared: Prepared
    replica: Replica
    world: World
    turns: Turns | None

    def run(
        self, requests: Sequence[Request], prompts: Sequence[Prompt]
    ) -> Iterator[tuple[list[dict[str, object]], list[Response]]]:
        """Yield records and responses as prompts end, eval.num_samples of each. Collective over the replica."""
        asked = [prompts[request.rows[0] // self.config.eval.num_samples] for request in requests]
        for ended in run_rollout(self.replica.engine, requests, asked, self.turns):
            pairs = [(asked[number], one) for number, responses in ended.items() for one in responses]
            tokenizer = self.prepared.tokenizer
            yield [answer_record(prompt, one, tokenizer) for prompt, one in pairs], [one for _, one in pairs]

    def answers(self, texts: Sequence[str]) -> list[str]:
        """Return responses to texts in their order, eval.num_samples for each. Collective over all ranks."""
        decoder, config = self.prepared.source.decoder, self.config
        rows = [rows_of_prompts(texts)]
        source = PromptSource(rows, self.prepared.renderer, config.data, config.seed, vocab_size=decoder.vocab_size)
        prompts = list(source.all())
        sampling = config.rollout.sampling(self.prepared.tokenizer.stop_token_ids)
        requests = open_requests(config, prompts, self.replica, sampling, set(), decoder.max_positions)
        found = [answer for answers, _ in self.run(requests, prompts) for answer in answers]
        own = json.dumps(found if self.replica.mesh.is_leader else []).encode()
        every = [answer for part in gather_bytes(own) for answer in json.loads(part)]
        return [answer["response"] for answer in sorted(every, key=lambda answer: int(answer["row"]))]


@contextmanager
def open_model(loaded: LoadedConfig[Config]) -> Iterator[OpenModel]:
    """Open the model that `generate` would use, for any texts. Collective over all ranks."""
    loaded = with_settings_of_run(loaded, "generate")
    config, checked = loaded.value, check_run(loaded, verb="generate", prompts=["."])
    with ExitStack() as stack:
        world = stack.enter_context(open_job(checked))
        with start_up(), explained_memory(config):
            console = Console(enabled=False)
            prepared = prepare_together(checked, world, console)
            replica = load_replica(config, prepared.source, world)
            turns = turns_of(config, prepared, replica, world.device.torch_device, stack)
        yield OpenModel(config, prepared, replica, world, turns)
