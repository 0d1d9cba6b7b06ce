"""vLLM scores given rows with the weights that it was given last, whatever its prefix cache holds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spmdrl.engines.generation.vllm_engine import VllmEngine
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.world import World
from tests.engines.generation.support import run
from tests.engines.generation.test_vllm_engine import (
    DENSE,
    GREEDY,
    LONG_PROMPT,
    SHORT_PROMPT,
    SPARSE,
    awake,
    make_models,
    reference_model,
    requests,
)
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed; see docs/vllm.md"),
]

ROWS = [list(LONG_PROMPT), list(SHORT_PROMPT)]


def score(world: World, folders: list[str], temperature: float, top_p: float) -> list[list[list[float]]]:
    """With the first weights, with the second ones, and again after they generated from the same prompts."""
    # The two choices use both of vLLM's modes for log-probs of generated tokens.
    rollout = RolloutConfig(temperature=temperature, top_p=top_p, max_running_rows=8)
    engine = VllmEngine(Path(folders[0]), rollout, torch.device("cpu"), torch.float32, tensor=world.size)
    scored = [engine_scores(awake(engine, folders[0], 0))]
    engine.submit(requests(GREEDY))
    with pytest.raises(RuntimeError, match="6 rows are unfinished"):
        engine.score(ROWS)
    engine.abort()
    engine.sleep()
    scored.append(engine_scores(awake(engine, folders[1], 1)))
    run(engine, requests(GREEDY))
    scored.append(engine_scores(engine))
    engine.sleep()
    return scored


def engine_scores(engine: VllmEngine) -> list[list[float]]:
    return [scored.tolist() for scored in engine.score(ROWS)]


@torch.no_grad()
def expected_scores(folder: str) -> list[list[float]]:
    scores = []
    for row in ROWS:
        logits = reference_model(folder)(torch.tensor([row])).logits[0, :-1]
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist())
    return scores


@pytest.mark.parametrize(
    ("make", "ranks", "temperature", "top_p"), [(DENSE, 1, 0.7, 1.0), (SPARSE, 2, 1.0, 0.9)], ids=["dense", "sparse"]
)
def test_scores_are_unscaled_and_those_of_the_weights_given_last(tmp_path, make, ranks, temperature, top_p):
    folders = make_models(tmp_path, make)
    by_rank = run_ranks(ranks, score, folders, temperature, top_p, timeout=180)
    for first, second, again in by_rank:
        for found, folder in ((first, folders[0]), (second, folders[1]), (again, folders[1])):
            for scored, expected in zip(found, expected_scores(folder), strict=True):
                assert scored == pytest.approx(expected, abs=1e-5)
