"""Rows whose conversation forked: each piece is computed, and has its loss, as a row of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dataflow.stages.test_model_tokens import COLUMNS, CONFIGS, MODEL, TOP, rows_of
from tests.dataflow.stages.test_update import Taken
from tests.engines.training.test_transformers import transformers_model
from tests.engines.training.tiny import CONFIG, OPTIM, TEMPERATURE, make_engine, relative_difference, weighted_nll

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.table import build_algorithm
from spmdrl.dataflow.stages.critic_states import CriticUpdateStage
from spmdrl.dataflow.stages.rows import BEGINS_PIECE, TURNS, ModelTokens, piece_places, token_rows, turn_texts
from spmdrl.dataflow.stages.update import PolicyLoss, UpdatePlan, UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.packed_rows import Scores, to_microbatch
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, LossScope
from spmdrl.nouns.settings.role_configs import CriticConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh

VALUED = MODEL.with_value_head()
ROWS = [[1, 1, 0, 0, 2, -1, 0, 3, 3, 0, 4], [1, 1, 1], [0, 0, 1, -1, 0, 2, 2, -1, 3], [1, -1, 0, 2, 2, 2, 0, 0, 3]]

Piece = tuple[list[int], list[int]]
"""Its tokens and their turns, 0 in the prompt."""


def pieces_of(batch: Batch, row: int) -> list[Piece]:
    prompt, response, turns = (batch.to_lists(name)[row] for name in ("prompt_ids", "response_ids", TURNS))
    pieces: list[Piece] = [([*map(int, prompt)], [0] * len(prompt))]
    for token, turn in zip(response, turns, strict=True):
        if turn == BEGINS_PIECE:
            pieces.append(([], []))
        pieces[-1][0].append(int(token))
        pieces[-1][1].append(max(int(turn), 0))
    return pieces


def rows_with_pieces(turns: Sequence[Sequence[int]], seed: int) -> Batch:
    """Rows as `rows_of` makes them, where -1 begins a piece."""
    batch, _ = rows_of([[max(turn, 0) for turn in row] for row in turns], seed)
    batch.put_lists(TURNS, turns, torch.int16)
    return batch


def alone(batch: Batch) -> Batch:
    """Each piece as a row, with what is before its first token of the model as its prompt."""
    found = [(row, piece) for row in range(len(batch)) for piece in pieces_of(batch, row)]
    out = Batch.of_rows(int(batch.rows[row]) for row, _ in found)
    firsts = [next(at for at, turn in enumerate([*turns, 1]) if turn) for _, (_, turns) in found]
    out.put_lists("prompt_ids", [ids[:at] for at, (_, (ids, _)) in zip(firsts, found, strict=True)], torch.int32)
    out.put_lists("response_ids", [ids[at:] for at, (_, (ids, _)) in zip(firsts, found, strict=True)], torch.int32)
    out.put_lists(TURNS, [turns[at:] for at, (_, (_, turns)) in zip(firsts, found, strict=True)], torch.int16)
    for name in set(batch.names) - {*out.names}:
        many = 2 if name in TOP else 1
        own, tokens = batch.values(name).view(-1, many), ModelTokens.of(out)
        picked = ModelTokens.of(batch).pick(own)
        spread = torch.zeros(len(tokens.is_model), many, dtype=own.dtype)
        spread[tokens.is_model] = picked
        out.put_ragged(name, spread.flatten(), out.offsets("response_ids") * many)
    return out


def forked(turns: list[int], places: set[int]) -> list[int]:
    """A row whose pieces begin at some of the environment's tokens, with a token of the model in each."""
    out = list(turns)
    for place, turn in enumerate(turns):
        last = max((at for at in range(place) if out[at] == BEGINS_PIECE), default=0)
        if place in places and not turn and any(turns[last:place]) and any(turns[place:]):
            out[place] = BEGINS_PIECE
    return out


TURN_LISTS = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=12).filter(any), st.sets(st.integers(0, 11))),
    min_size=1, max_size=4,
)  # fmt: skip


@given(TURN_LISTS, st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_packed_rows_are_the_pieces_in_order(drawn, seed):
    batch = rows_with_pieces([forked(*row) for row in drawn], seed)
    rows, expected = token_rows(batch, MODEL, COLUMNS), [pieces_of(batch, row) for row in range(len(batch))]
    bounds, flat = rows.offsets.tolist(), [piece for pieces in expected for piece in pieces]
    assert [rows.tokens_T[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)] == [ids for ids, _ in flat]
    assert rows.is_model_T.tolist() == [turn > 0 for _, turns in flat for turn in turns]
    assert piece_places(batch).tolist() == [row for row, pieces in enumerate(expected) for _ in pieces]
    behind = {sum(map(len, expected[:row])) for row in range(len(batch))}
    for place, (length, (_, turns)) in enumerate(zip(rows.prompt_lengths_B.tolist(), flat, strict=True)):
        assert length == 2 if place in behind else not any(turns[:length]) and turns[length] > 0
    for name in COLUMNS:
        assert torch.equal(rows.response[name], ModelTokens.of(batch).pick(batch.values(name)))


@given(TURN_LISTS, st.sampled_from([one for one in CONFIGS if build_algorithm(one).unit_size == 1]), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_the_loss_of_pieces_is_that_of_separate_rows(device, drawn, config, seed):
    batch, learner, results = rows_with_pieces([forked(*row) for row in drawn], seed), build_algorithm(config), []
    for rows in (batch, alone(batch)):
        packed = token_rows(rows, MODEL, [*COLUMNS, *TOP, "versions"])
        lengths_B = packed.response_offsets.diff()
        scope = LossScope(int(lengths_B.sum()), len(packed), 16)
        packed.response["weights"] = learner.token_weights(lengths_B, scope).float()
        logprobs_R = torch.randn(len(packed.response["weights"]), generator=torch.Generator().manual_seed(seed))
        logprobs_R = logprobs_R.to(device).requires_grad_()
        others_RJ = logprobs_R[:, None] - torch.arange(1.0, 3.0, device=device)
        micro = to_microbatch(packed, range(len(packed)), device, "logprobs")
        terms = PolicyLoss(learner, 0, "column", None)(Scores(logprobs_R, logprobs_R.detach().exp(), others_RJ), micro)
        terms.loss.backward()
        results.append((terms.loss, logprobs_R.grad, terms.metrics | terms.maxima))
    (loss, gradient, metrics), (expected_loss, expected_gradient, expected_metrics) = results
    assert torch.equal(loss, expected_loss) and torch.equal(gradient, expected_gradient)
    assert metrics == expected_metrics


def plain_logprobs(batch: Batch, model: torch.nn.Module) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Log-prob and entropy of each row's tokens of the model, one piece after another with transformers."""
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for row in range(len(batch)):
        found.append([])
        for ids, turns in pieces_of(batch, row):
            logprobs_TV = (model(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)
            entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
            own = [place for place, turn in enumerate(turns) if turn]
            found[-1] += [(logprobs_TV[place - 1, ids[place]], entropy_T[place - 1]) for place in own]
    return found


@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_the_gradient_of_a_split_row_is_that_of_its_pieces_in_transformers(world, max_tokens):
    batch, model = rows_with_pieces(ROWS, 5), transformers_model().double()
    engine = make_engine(world, max_tokens=max_tokens)
    rows = token_rows(batch, CONFIG)
    weights = torch.rand(rows.num_response_tokens, generator=torch.Generator().manual_seed(0))
    rows.response["weights"] = weights
    engine.accumulate(rows, weighted_nll)
    terms = [one for row in plain_logprobs(batch, model) for one in row]
    logprobs, entropy = (torch.stack(values) for values in zip(*terms, strict=True))
    (-(weights.double() * (logprobs + 0.1 * entropy)).sum()).backward()
    found = dict(engine.model.gather_whole(engine.model.named_gradients(), torch.float32))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = [torch.cat([one[name].cpu().double().flatten() for name in expected]) for one in (found, expected)]
    assert relative_difference(*whole) < 1e-6


def one_update(world, batch: Batch, plan: UpdatePlan) -> tuple[dict, ShownRows]:
    engine, recorder, shown = make_engine(world, max_tokens=1), Recorder(), ShownRows(len(batch))
    UpdateStage(engine, plan, recorder, shown)(Taken(batch, len(batch)), Grpo(GrpoConfig()))
    return merge(gather_bytes(encode(recorder.drain()))), shown


def test_an_updates_reports_are_of_whole_rows_whichever_micro_batches_have_their_pieces(world):
    batch = rows_with_pieces(ROWS, 5)
    expected = [[float(one.detach()) for one, _ in row] for row in plain_logprobs(batch, transformers_model())]
    flat = torch.tensor([one for row in expected for one in row])
    batch.put_ragged("rollout_logprobs", ModelTokens.of(batch).spread(flat), batch.offsets(TURNS))
    batch.put_ragged("versions", torch.zeros_like(batch.values("versions")), batch.offsets(TURNS))
    metrics, shown = one_update(world, batch, UpdatePlan(1, 1, 16, skip_zero_advantage=True))
    num_pieces = sum(row.count(BEGINS_PIECE) + 1 for row in ROWS)
    assert metrics["mismatch/abs_max"] < 1e-5 and metrics["update/rows"] == num_pieces
    for row in range(len(ROWS)):
        assert shown.logprobs(row) == pytest.approx(expected[row], abs=1e-5)
    metrics, shown = one_update(world, batch, UpdatePlan(1, 2, 16, skip_zero_advantage=True))
    assert metrics["update/rows"] == num_pieces and all(map(shown.logprobs, range(len(ROWS))))


def test_a_critic_learns_pieces_as_separate_rows(world):
    found = []
    for split in (True, False):
        batch = rows_with_pieces(ROWS, 5)
        for name, other in (("values", "advantages"), ("returns", "old_logprobs")):
            batch.put_ragged(name, batch.values(other), batch.offsets(TURNS))
        batch = batch if split else alone(batch)
        mesh = build_update_mesh(fit_update_layout(UpdateLayout(), 1), world.device, world.rank)
        engine = TrainingEngine(
            VALUED, TrainingConfig(max_tokens_per_microbatch=16), OPTIM, mesh, world.device, rating="token_values",
            compute_dtype=torch.float32,
        )  # fmt: skip
        engine.load(RandomWeights(VALUED, seed=0))
        taken = Taken(batch, len(ROWS))
        taken.take = lambda state, names, batch=batch: batch.select(range(len(batch)), names)
        taken.reads = lambda state, batch=batch: {*batch.names}
        CriticUpdateStage(engine, CriticConfig(), UpdatePlan(1, 1, 16, skip_zero_advantage=True), Recorder())(taken)
        found.append({name: weight.to("cpu", copy=True) for name, weight in engine.whole_weights(torch.float32)})
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], rtol=1e-5, atol=1e-6)


def test_a_conversation_read_anew_is_one_observation():
    texts = turn_texts([1, 2, 3, 4, 5, 6], [1, 0, 2, -1, 0, 3], lambda ids: "".join(map(str, ids)))
    assert texts == [("1", "2"), ("3", "45"), ("6", "")]
