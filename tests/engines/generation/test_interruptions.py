"""Whatever interrupts a row, and wherever, it gets the tokens and log-probs of a row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import PartialResponse, Request, Response
from spmdrl.engines.models.hf.families import FAMILIES
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.schedules import Schedule, engine_of, rest_of
from tests.engines.generation.support import prompt_of, request, run
from tests.support.made import WINDOW, small_decoders

# One of each kind of state: of all positions, of windows beside them, of slots beside them.
KINDS = ("qwen3", "gpt_oss", "qwen3_5_text")
SMALL = small_decoders()
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NUM_TOKENS)
OTHER = 9
"""Row beside those of the test."""


@dataclass(frozen=True)
class Mode:
    """How prompts are computed, and how near the same row's log-probs are then."""

    prompt: tuple[int, ...]
    is_exact: bool

    @property
    def places(self) -> range:
        """Numbers of the prompt's tokens: all, or every seventh of the longer one."""
        return range(1, len(self.prompt), 1 if self.is_exact else 7)

    def compare(self, found: dict[int, Response], wanted: dict[int, Response]) -> None:
        for row, response in wanted.items():
            assert (found[row].token_ids, found[row].finish) == (response.token_ids, response.finish), row
            if self.is_exact:
                assert found[row].logprobs == response.logprobs, row
            # Rounding errors of 1e-7, enlarged by three layers of large weights.
            torch.testing.assert_close(found[row].logprobs, response.logprobs, atol=5e-4, rtol=0)


# Both prompts are beyond the window; the tokens of the longer one attend in two ways, one by one and in tiles.
EXACT, ROUNDED = Mode(prompt_of(WINDOW + 5), is_exact=True), Mode(prompt_of(70), is_exact=False)


ON_A_CPU = pytest.mark.cpu_only(reason="the exact mode's operations are a CPU's")
each_family = pytest.mark.parametrize(
    ("family", "mode"),
    [
        *(pytest.param(family, EXACT, id=f"{family}-exact", marks=ON_A_CPU) for family in KINDS),
        *(
            pytest.param(family, EXACT, id=f"{family}-exact", marks=[ON_A_CPU, pytest.mark.slow])
            for family in FAMILIES
            if family not in KINDS
        ),
        *(pytest.param(family, ROUNDED, id=f"{family}-rounded", marks=pytest.mark.slow) for family in KINDS),
    ],
    indirect=["mode"],
)


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> Mode:
    if request.param.is_exact:
        request.getfixturevalue("exact_mode")
    return request.param


def requests_for(prompt: Sequence[int]) -> list[Request]:
    """A greedy row, and two that draw other tokens."""
    return [request(prompt, [0], GREEDY), request(prompt, [1, 2], SAMPLED)]


def alone(engine: NativeEngine, requests: Sequence[Request]) -> dict[int, Response]:
    """Responses of rows that run one after the other, none from a prompt that was computed before."""
    found: dict[int, Response] = {}
    for whole in requests:
        for row, seed in zip(whole.rows, whole.seeds, strict=True):
            engine.version += 1
            found |= run(engine, [replace(whole, rows=(row,), seeds=(seed,))])
    assert len({response.token_ids for response in found.values()}) == len(found)
    engine.version += 1
    return found


def steps(engine: NativeEngine, num: int) -> dict[int, Response]:
    return {response.row: response for _ in range(num) for response in engine.step()}


@each_family
def test_a_prompt_may_be_computed_in_chunks_cut_anywhere(family, mode):
    engine = engine_of(SMALL[family], Schedule({"max_prefill_tokens": len(mode.prompt)}))
    requests = requests_for(mode.prompt)
    wanted = alone(engine, requests)
    for cut in mode.places:
        engine.version += 1
        # What another prompt leaves of the step's tokens.
        other = prompt_of(len(mode.prompt) - cut, seed=1)
        engine.submit([request(other, [OTHER], replace(GREEDY, max_tokens=1)), *requests])
        engine.step()
        assert engine._steps.scheduler._waiting[0].num_computed == cut
        mode.compare(run(engine, []), wanted)


@each_family
def test_rows_may_be_preempted_after_any_step(family, mode):
    engine = engine_of(SMALL[family], Schedule({}))
    requests = requests_for(mode.prompt)
    wanted = alone(engine, requests)
    scheduler = engine._steps.scheduler
    for num_steps in range(1, NUM_TOKENS - 1):
        engine.version += 1
        # The oldest row is never preempted.
        engine.submit([request(prompt_of(3), [OTHER], replace(GREEDY, max_tokens=20)), *requests])
        found = steps(engine, num_steps)
        assert len(scheduler.running) == 4
        while len(scheduler.running) > 1:
            scheduler._free_newest()
        mode.compare(found | run(engine, []), wanted)


@each_family
def test_rows_may_be_aborted_after_any_step_and_submitted_again(family, mode):
    engine = engine_of(SMALL[family], Schedule({}))
    requests = requests_for(mode.prompt)
    wanted = alone(engine, requests)
    for num_steps in range(NUM_TOKENS):
        engine.version += 1
        engine.submit(requests)
        found = steps(engine, num_steps)
        rest = rest_of(requests, engine.abort())
        assert bool(rest) == (num_steps < NUM_TOKENS - 1)
        mode.compare(found | run(engine, rest), wanted)


@each_family
def test_a_row_may_go_on_from_any_of_its_tokens(family, mode):
    engine = engine_of(SMALL[family], Schedule({}))
    requests = requests_for(mode.prompt)
    wanted = alone(engine, requests)
    for num in range(1, NUM_TOKENS):
        engine.version += 1
        parts = {
            row: PartialResponse(whole.token_ids[:num], whole.logprobs[:num], whole.versions[:num])
            for row, whole in wanted.items()
        }
        mode.compare(run(engine, [replace(x, partial=tuple(parts[row] for row in x.rows)) for x in requests]), wanted)


@each_family
def test_prompts_may_begin_alike_for_any_number_of_tokens(family, mode):
    engine = engine_of(SMALL[family], Schedule({}))
    requests = requests_for(mode.prompt)
    wanted = alone(engine, requests)
    for num in (0, *mode.places, len(mode.prompt)):
        engine.version += 1
        other = (*mode.prompt[:num], *prompt_of(7, seed=1))
        engine.submit([request(other, [OTHER], GREEDY)])
        found = steps(engine, 2)
        mode.compare(found | run(engine, requests), wanted)
