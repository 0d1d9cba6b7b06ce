"""vLLM itself, on CPU: it answers as transformers does with the weights that it was given last.

An engine lives in ranks of its own, as vLLM patches the process that it runs in, and each answers all requests
that the tests below check.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spmdrl.engines.generation.protocol import PartialResponse, Request, Response
from spmdrl.engines.generation.vllm_engine import VllmEngine
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from spmdrl.resources.world import World
from tests.engines.generation.support import request, run
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed; see docs/vllm.md"),
]

DENSE = MakeConfig(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=192,
    max_position_embeddings=256,
)
SPARSE = MakeConfig(
    model_type="qwen3_moe", hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    moe_intermediate_size=64,
    num_experts=4, max_position_embeddings=256,
)  # fmt: skip

# Longer than a block of vLLM's KV cache, so that it is kept for the next request, and would be for the next weights.
LONG_PROMPT = tuple(4 + number * 7 % 90 for number in range(150))
SHORT_PROMPT = (5, 6, 7)
TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=TOKENS)

Answers = dict[str, dict[int, Response]]


def awake(engine: VllmEngine, folder: str, version: int) -> VllmEngine:
    """The engine with the weights of `folder`."""
    files = open_weights(Path(folder), read_config(folder))
    engine.wake_weights()
    engine.load_weights(
        (name, files.read(whole_slice(name, files.shape(name)))) for name in sorted(engine.weight_shapes())
    )
    engine.wake_cache()
    engine.version = version
    return engine


def requests(sampling: SamplingParams) -> list[Request]:
    return [request(LONG_PROMPT, range(3), sampling), request(SHORT_PROMPT, range(3, 6), sampling)]


def resumed(aborted: dict[int, Response]) -> list[Request]:
    """One request per row, which continues after the tokens that the row already has."""
    return [
        Request((row,), prompt_of(row), (row,), GREEDY, (PartialResponse(got.token_ids, got.logprobs, got.versions),))
        for row, got in aborted.items()
    ]


def as_text(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def prompt_of(row: int) -> tuple[int, ...]:
    return LONG_PROMPT if row < 3 else SHORT_PROMPT


def ask(world: World, folders: list[str], tensor: int) -> Answers:
    rollout = RolloutConfig(temperature=0.7, max_running_rows=8)
    engine = VllmEngine(Path(folders[0]), rollout, torch.device("cpu"), torch.float32, tensor=tensor, decode=as_text)
    with pytest.raises(RuntimeError, match="a sleeping engine can't generate"):
        engine.submit(requests(GREEDY))
    answers = {"first": run(awake(engine, folders[0], 0), requests(SAMPLED))}
    engine.sleep()
    answers["second"] = run(awake(engine, folders[1], 1), requests(SAMPLED))
    answers["greedy"] = run(engine, requests(GREEDY))
    stop = answers["greedy"][0].token_ids[4]
    answers["stopped"] = run(
        engine, [request(LONG_PROMPT, [0], SamplingParams(0, max_tokens=9, stop_token_ids=(stop,)))]
    )
    stop_string = SamplingParams(0, max_tokens=9, stop_strings=(as_text(answers["greedy"][0].token_ids[2:5]),))
    answers["stop_string"] = run(engine, [request(LONG_PROMPT, [0], stop_string)])
    engine.submit(requests(GREEDY))
    for _ in range(5):
        engine.step()
    with pytest.raises(RuntimeError, match="6 rows are unfinished"):
        engine.load_weights(iter([]))
    answers["aborted"] = {response.row: response for response in engine.abort()}
    assert engine.num_unfinished == 0
    answers["resumed"] = run(engine, resumed(answers["aborted"]))
    engine.sleep()
    return answers


def make_models(folder: Path, make: MakeConfig) -> list[str]:
    """Two models of one kind with different weights."""
    for seed in range(2):
        make_model_folder(folder / str(seed), make, seed)
    return [str(folder / str(seed)) for seed in range(2)]


class Asked:
    """The models, and what each rank's engine answered with them."""

    def __init__(self, folder: Path, make: MakeConfig, tensor: int):
        self.folders = make_models(folder, make)
        self.by_rank: list[Answers] = run_ranks(tensor, ask, self.folders, tensor, timeout=180)

    def __getitem__(self, name: str) -> dict[int, Response]:
        return self.by_rank[0][name]


KINDS = {
    "dense": (DENSE, 1),
    "sparse": (SPARSE, 1),
    "sparse in tensor parallel": (SPARSE, 2),
    "gemma3_text": (replace(DENSE, model_type="gemma3_text", sliding_window=40), 1),
    "glm4_moe": (replace(SPARSE, model_type="glm4_moe", tie_word_embeddings=False), 1),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    yield Asked(tmp_path_factory.mktemp("models"), *request.param)


@functools.cache
def reference_model(folder: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(folder: str, response: Response, temperature: float) -> torch.Tensor:
    prompt, answer = prompt_of(response.row), response.token_ids
    logits = reference_model(folder)(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def largest_difference(folder: str, responses: dict[int, Response], temperature: float = SAMPLED.temperature) -> float:
    return max(
        (reference_logprobs(folder, response, temperature) - torch.tensor(response.logprobs)).abs().max().item()
        for response in responses.values()
    )


def test_log_probs_are_those_of_the_weights_given_last(asked: Asked):
    assert largest_difference(asked.folders[0], asked["first"]) < 1e-5
    assert largest_difference(asked.folders[1], asked["second"]) < 1e-5
    assert {version for response in asked["second"].values() for version in response.versions} == {1}


def test_an_engine_that_missed_an_update_shows_in_its_log_probs(asked: Asked):
    assert largest_difference(asked.folders[1], asked["first"]) > 0.1


def test_greedy_tokens_equal_those_of_transformers(asked: Asked):
    model = reference_model(asked.folders[1])
    for prompt, row in ((LONG_PROMPT, 0), (SHORT_PROMPT, 3)):
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert asked["greedy"][row].token_ids == tuple(whole[0, len(prompt) :].tolist())
        assert asked["greedy"][row].finish == "length"
    assert largest_difference(asked.folders[1], asked["greedy"], temperature=1) < 1e-5


def test_rows_of_a_group_differ_by_their_seeds(asked: Asked):
    for rows in (range(3), range(3, 6)):
        assert len({asked["second"][row].token_ids for row in rows}) == 3


def test_a_stop_token_ends_a_row_and_is_part_of_it(asked: Asked):
    stopped, whole = asked["stopped"][0], asked["greedy"][0].token_ids
    assert stopped.finish == "stop"
    assert stopped.token_ids == whole[: whole.index(stopped.token_ids[-1]) + 1]
    assert asked["stop_string"][0].finish == "stop" and asked["stop_string"][0].token_ids == whole[:5]


def test_an_aborted_row_goes_on_as_if_nothing_had_happened(asked: Asked):
    for row, whole in asked["greedy"].items():
        aborted, rest = asked["aborted"][row], asked["resumed"][row]
        assert aborted.finish == "aborted"
        assert 0 < len(aborted.token_ids) < TOKENS
        assert len(aborted.logprobs) == len(aborted.token_ids)
        assert rest.token_ids == whole.token_ids and rest.finish == "length"
        assert rest.token_ids[: len(aborted.token_ids)] == aborted.token_ids
        assert rest.logprobs[: len(aborted.token_ids)] == aborted.logprobs and len(rest.versions) == TOKENS


def test_ranks_of_a_tensor_group_answer_alike(asked: Asked):
    assert all(answers == asked.by_rank[0] for answers in asked.by_rank)
