"""Tokens that an environment wrote: nothing that is learnt or measured of the model's own tokens depends on them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dataflow.stages.test_update import MODEL, Taken
from tests.engines.training.tiny import OPTIM, SeededWeights
from tests.support.ranks import run_ranks
from torch import Tensor

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.table import ALGORITHMS, build_algorithm
from spmdrl.dataflow.stages.rows import TURNS, ModelTokens, token_rows
from spmdrl.dataflow.stages.update import PolicyLoss, UpdatePlan, UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.models.hf.model_folder import hf_config_dict
from spmdrl.engines.training.packed_rows import Scores, TokenRows, to_microbatch
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, LossScope
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World

TOP = ("teacher_top_ids", "teacher_top_logprobs")
COLUMNS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
CONFIGS = [
    *(config() for config in ALGORITHMS),
    GrpoConfig(kl_coef=0.1, entropy_coef=0.1, off_policy_bound=0.5),
    GrpoConfig(ratio_level="sequence", loss_agg="seq-mean-token-mean", rollout_is="seq-mask-tis"),
    GrpoConfig(loss_agg="seq-mean-token-sum-norm", rollout_is="tis", kl_coef=0.1),
]


def rows_of(turns: list[list[int]], seed: int) -> tuple[Batch, Tensor]:
    """Rows with these turns, and log-probs of the model's tokens; those are the same whatever lies between them."""
    own, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + sum(map(len, turns)))

    def draw(generator: torch.Generator) -> torch.Tensor:
        return torch.randn((), generator=generator)

    batch = Batch.of_rows(range(len(turns)))
    batch.put_lists("prompt_ids", [[1, 2]] * len(turns), torch.int32)
    batch.put_lists(TURNS, turns, torch.int16)
    offsets = batch.offsets(TURNS)
    drawn = [[int(draw(own if turn else other).abs() * 4) for turn in row] for row in turns]
    batch.put_lists("response_ids", drawn, torch.int32)
    for name in COLUMNS:
        values = [float(draw(own if turn else other)) for row in turns for turn in row]
        batch.put_ragged(name, torch.tensor(values), offsets)
    versions = [int(draw(own if turn else other) > 0) for row in turns for turn in row]
    for name, dtype in (("teacher_top_ids", torch.int32), ("teacher_top_logprobs", torch.float32)):
        several = [[float(draw(own if turn else other).abs()) for turn in row for _ in range(2)] for row in turns]
        batch.put_lists(name, [[-value for value in row] for row in several], dtype)
    batch.put_ragged("versions", torch.tensor(versions, dtype=torch.int32), offsets)
    num_own = sum(turn > 0 for row in turns for turn in row)
    return batch, torch.randn(num_own, generator=own)


TURN_LISTS = st.lists(
    st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=8).filter(any), min_size=1, max_size=4
)  # fmt: skip


@given(TURN_LISTS, st.sampled_from(CONFIGS), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_what_an_environment_inserts_changes_no_loss_gradient_or_metric(device, turns, config, seed):
    results, learner = [], build_algorithm(config)
    turns = turns * learner.unit_size
    for rows in (turns, [[turn for turn in row if turn] for row in turns]):
        batch, logprobs_R = rows_of(rows, seed)
        tokens = ModelTokens.of(batch)
        scope = LossScope(int(tokens.lengths_B.sum()), len(batch), 16)
        weights = tokens.spread(learner.token_weights(tokens.lengths_B, scope).float())
        batch.put_ragged("weights", weights, batch.offsets(TURNS))
        packed = token_rows(batch, MODEL, [*COLUMNS, *TOP, "versions", "weights"])
        micro = to_microbatch(packed, range(len(packed)), device, "logprobs")
        logprobs_R = logprobs_R.to(device).requires_grad_()
        terms = PolicyLoss(learner, 0, "column", None)(
            Scores(logprobs_R, logprobs_R.detach().exp(), logprobs_R[:, None] - torch.arange(1.0, 3.0, device=device)),
            micro,
        )
        terms.loss.backward()
        assert micro.targets_P[:, 0].tolist() == tokens.pick(batch.values("response_ids")).tolist()
        assert batch.values("weights").sum() == pytest.approx(float(tokens.pick(batch.values("weights")).sum()))
        results.append((terms.loss, logprobs_R.grad, terms.metrics | terms.maxima))
    (loss, gradient, metrics), (expected_loss, expected_gradient, expected_metrics) = results
    assert torch.equal(loss, expected_loss) and torch.equal(gradient, expected_gradient)
    assert metrics == expected_metrics


def test_rows_are_picked_and_spread_by_who_wrote_them():
    batch = Batch.of_rows([4, 7])
    batch.put_lists("response_ids", [[5, 6, 7], [8, 9]], torch.int32)
    values = torch.arange(1.0, 6.0)
    assert ModelTokens.of(batch).pick(values) is values is ModelTokens.of(batch).spread(values)
    batch.put_lists(TURNS, [[1, 0, 2], [0, 1]], torch.int16)
    tokens = ModelTokens.of(batch)
    assert tokens.lengths_B.tolist() == [2, 1]
    assert tokens.pick(values).tolist() == [1, 3, 5]
    assert tokens.spread(tokens.pick(values)).tolist() == [1, 0, 3, 0, 5]


def test_rows_whose_prompt_is_said_to_be_the_models_are_refused():
    with pytest.raises(ValueError, match="marks prompt tokens"):
        TokenRows(torch.arange(4), torch.tensor([0, 4]), torch.tensor([2]), is_model_T=torch.tensor([0, 1, 1, 1]) > 0)


TURNS_OF_ROWS = [[1, 1, 0, 0, 2, 2], [1], [1, 0, 2, 0, 0, 3], [0, 1, 1], [1, 1, 1], [1, 0]]


def one_step(world: World, layout: UpdateLayout) -> tuple[dict, dict]:
    """The metrics of one update of rows with inserted tokens, and the gradient's norm that transformers finds."""
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    training = TrainingConfig(max_tokens_per_microbatch=16)
    engine = TrainingEngine(MODEL, training, OPTIM, mesh, world.device, compute_dtype=torch.float32)
    source = SeededWeights()
    engine.load(source)
    batch, _ = rows_of(TURNS_OF_ROWS, 5)
    expected = of_transformers(batch, source)
    mine = [row for row in range(len(batch)) if row % engine.mesh.data.size == engine.mesh.data.rank]
    plan = UpdatePlan(1, 1, 16, skip_zero_advantage=False)
    recorder = Recorder()
    UpdateStage(engine, plan, recorder, ShownRows(6))(Taken(batch.select(mine), len(batch)), Grpo(GrpoConfig()))
    return merge(gather_bytes(encode(recorder.drain()))), expected


def of_transformers(batch: Batch, source: SeededWeights) -> dict[str, float]:
    """-sum(advantage * log-prob) / tokens over the model's tokens, row by row with transformers, and its gradient.

    In the one update of a batch GRPO's ratio is 1, so that this has GRPO's gradient.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    content = hf_config_dict(MODEL, torch.float32)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(content.pop("model_type"), **content), attn_implementation="eager"
    )
    # The source's weights are those of a wider model, of which this one has the first columns.
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    model.load_state_dict(
        {name: weight[tuple(map(slice, shapes[name]))] for name, weight in source.tensors.items() if name in shapes}
    )
    prompts, responses, turns, advantages, generated, versions = (
        batch.to_lists(name)
        for name in ("prompt_ids", "response_ids", TURNS, "advantages", "rollout_logprobs", "versions")
    )
    total, entropy, distances = torch.zeros(()), [], []
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([*map(int, prompt), *map(int, responses[row])])
        logprobs_TV = model(ids[None]).logits[0].log_softmax(-1)
        for place, turn in enumerate(turns[row]):
            if turn:
                position = len(prompt) + place
                logprob = logprobs_TV[position - 1, ids[position]]
                total = total - advantages[row][place] * logprob
                before_V = logprobs_TV[position - 1].detach()
                entropy.append(-float((before_V.exp() * before_V).sum()))
                if versions[row][place] == 0:
                    distances.append(abs(generated[row][place] - float(logprob.detach())))
    (total / len(entropy)).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    return {
        "grad_norm": float(norm), "entropy": sum(entropy) / len(entropy),
        "mismatch/abs_mean": sum(distances) / len(distances), "mismatch/abs_max": max(distances),
    }  # fmt: skip


def check_step(world: World, layout: UpdateLayout) -> None:
    found, expected = one_step(world, layout)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-4), name
    lags = [found.get(f"off_policy/lag_{lag}", 0) for lag in (-1, 0)]
    assert sum(lags) == sum(turn > 0 for row in TURNS_OF_ROWS for turn in row), "lags of the model's tokens alone"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(1, UpdateLayout()), (2, UpdateLayout(data=2, shard=1)), (2, UpdateLayout(context=2)),
     (2, UpdateLayout(tensor=2)), (2, UpdateLayout(pipeline=2))],
)  # fmt: skip
def test_an_update_learns_the_models_tokens_as_transformers_does(num_ranks, layout):
    run_ranks(num_ranks, check_step, layout)
