"""Ring and Ulysses attention on gloo ranks against one process, and which models the latter takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.layers import PackedCausalAttention
from spmdrl.engines.training.context.context_parallel import check_context_parallel, mix_of, share_of
from spmdrl.engines.training.context.ring_attention import halo_places
from spmdrl.engines.training.context.token_placement import Placement, num_places, place_tokens
from spmdrl.engines.training.packed_rows import MicroBatch, TokenRows, to_microbatch
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.settings.model_sizes import DeltaSizes, WindowConfig
from spmdrl.resources.layout import ContextKind
from spmdrl.resources.mesh import Axis
from spmdrl.resources.world import World
from tests.engines.training.tiny import CONFIG
from tests.support.chosen_device import chosen_device
from tests.support.ranks import run_ranks

LENGTHS = {"mixed": [1, 70, 13, 1, 33, 34, 2], "one": [37], "short": [1, 1], "equal": [16, 16, 16]}
HEADS = {"all": (4, 4), "grouped": (8, 4), "one key head": (4, 1)}
# What rows, with which heads.
CASES = [("mixed", "all"), ("mixed", "grouped"), ("mixed", "one key head")]
CASES += [("one", "grouped"), ("short", "one key head"), ("equal", "all")]
DECODERS = {
    "full": CONFIG,
    "windows": replace(CONFIG, attention_sinks=True, window=WindowConfig(4, layers=(1,))),
    "delta nets": replace(CONFIG, delta=DeltaSizes((0,), 2, 4, key_size=4, value_size=6, conv_width=4)),
}
# Windows within a chunk, over several chunks, and of the longest row, with sinks or without.
SEEN = [(1, False), (2, True), (5, False), (30, True), (70, True), (None, True)]


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    # Rows of one token have no gradient to queries and keys.
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1.0))


def _own(values_T: Tensor, placement: Placement) -> Tensor:
    """A rank's part of packed values, with garbage at padding."""
    source_T = placement.source_T.to(values_T.device)
    own = values_T[source_T.clamp(min=0)]
    own[source_T < 0] = 3.0
    return own


def _whole(own_t: Tensor, placement: Placement) -> Tensor:
    """The packed values of which each rank brings its own."""
    source_T = placement.source_T.to(own_t.device)
    whole_T = own_t.new_zeros((len(placement.place_A), *own_t.shape[1:]))
    whole_T[source_T[source_T >= 0]] = own_t[source_T >= 0]
    dist.all_reduce(whole_T)
    return whole_T


def _attention_errors(
    axis: Axis,
    kind: ContextKind,
    lengths: list[int],
    heads: tuple[int, int],
    window: int | None = None,
    has_sinks: bool = False,
) -> dict[str, float]:
    """Relative errors of output and input gradients, of all ranks together."""
    torch.manual_seed(0)
    offsets = offsets_of(lengths)
    shapes = ((heads[0], 8), (heads[1], 8), (heads[1], 6))
    whole = [torch.randn(sum(lengths), *shape).to(chosen_device()).requires_grad_() for shape in shapes]
    weight = torch.randn(sum(lengths), heads[0], 6).to(chosen_device())
    sinks = torch.randn(heads[0]).to(chosen_device()).requires_grad_()
    seen = {"window": window, "sinks_H": sinks if has_sinks else None}
    expected = PackedCausalAttention(offsets)(0, *whole, **seen)
    *gradients, by_sinks = torch.autograd.grad((expected * weight).sum(), [*whole, sinks], materialize_grads=True)

    unit = 2 * axis.size
    size = (num_places(offsets, axis.size, kind) // unit + 2) * unit
    placement = place_tokens(offsets, axis, kind, size=size)
    own = [_own(x.detach(), placement).requires_grad_() for x in whole]
    real = (placement.source_T >= 0).to(chosen_device())
    attended = mix_of(PackedCausalAttention(placement.offsets), placement, chosen_device())(0, *own, **seen)
    *parts, part_of_sinks = torch.autograd.grad(
        (attended * _own(weight, placement))[real].sum(), [*own, sinks], materialize_grads=True
    )
    dist.all_reduce(part_of_sinks)
    errors = {"sinks": _relative_error(part_of_sinks, by_sinks)}
    for name, ours, theirs in zip(("out", "q", "k", "v"), (attended, *parts), (expected, *gradients), strict=True):
        errors[name] = _relative_error(_whole(ours.detach(), placement), theirs.detach())
    errors["gradients at padding"] = sum(float(part[~real].abs().sum()) for part in parts)
    return errors


def _scores(micro: MicroBatch, decoder: Decoder) -> Tensor:
    def head(hidden_TD: Tensor, head_VD: Tensor) -> Tensor:
        logprobs_PV = torch.log_softmax(hidden_TD[micro.places_P] @ head_VD.T, dim=-1)
        return logprobs_PV.gather(1, micro.targets_P[:, None]).squeeze(1)

    scores_P = decoder(micro.tokens_T, micro.positions_T, micro.attend, head)
    return scores_P if micro.gather_R is None else micro.gather_R(scores_P)


def _decoder_errors(axis: Axis, kind: ContextKind, lengths: list[int], config: DecoderConfig) -> dict[str, float]:
    """Relative errors of all scores, and of weight gradients summed over the ranks."""
    torch.manual_seed(1)
    prompts_B = torch.tensor([1 + length // 3 for length in lengths])
    rows = TokenRows(torch.randint(17, (sum(lengths),)), offsets_of(lengths), prompts_B)
    weights_R = torch.randn(rows.num_response_tokens).to(chosen_device())
    decoder = Decoder(config)
    for name, weight in decoder.named_parameters():
        if name.endswith(("sinks", "A_log", "dt_bias", "conv_q.weight", "conv_k.weight", "conv_v.weight")):
            torch.nn.init.normal_(weight)
    decoder.to(chosen_device())
    micro = to_microbatch(rows, range(len(rows)), chosen_device(), "logprobs")
    expected_R = _scores(micro, decoder)
    gradients = torch.autograd.grad((weights_R * expected_R).sum(), list(decoder.parameters()))

    size = -(-num_places(rows.offsets, axis.size, kind) // axis.size) * axis.size
    placement = place_tokens(rows.offsets, axis, kind, size=size)
    scores_R = _scores(share_of(micro, rows.rated_places("logprobs"), placement), decoder)
    errors = {"scores": _relative_error(scores_R.detach(), expected_R.detach())}
    shares = torch.autograd.grad((weights_R * scores_R).sum(), list(decoder.parameters()))
    for (name, _), share, gradient in zip(decoder.named_parameters(), shares, gradients, strict=True):
        dist.all_reduce(share)
        errors[name] = _relative_error(share, gradient)
    return errors


def _all_errors(world: World) -> dict[str, float]:
    axis = Axis("context", world.size, world.rank, dist.group.WORLD, tuple(range(world.size)))
    errors = {}
    for kind in ("ring", "ulysses"):
        for rows, heads in CASES:
            for what, error in _attention_errors(axis, kind, LENGTHS[rows], HEADS[heads]).items():
                errors[f"{kind}, {rows} rows, {heads} heads: {what}"] = error
        for window, has_sinks in SEEN:
            found = _attention_errors(axis, kind, LENGTHS["mixed"], HEADS["grouped"], window, has_sinks)
            for what, error in found.items():
                errors[f"{kind}, window {window}, sinks {has_sinks}: {what}"] = error
        for name, config in DECODERS.items():
            for what, error in _decoder_errors(axis, kind, [1, 12, 5, 2, 30], config).items():
                errors[f"{kind}, {name}: {what}"] = error
    return errors


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 9, 30, 200])
def test_a_halo_holds_the_tokens_before_each_chunk(window: int, size: int) -> None:
    chunk_lengths = [3, 0, 9, 1]
    positions = [
        [
            (row, chunk * length + place)
            for row, length in enumerate(chunk_lengths)
            for chunk in (rank, 2 * size - 1 - rank)
            for place in range(length)
        ]
        for rank in range(size)
    ]
    for rank in range(size):
        ranks, places, counts = halo_places(chunk_lengths, window, size, rank)
        found = [positions[source][place] for source, place in zip(ranks.tolist(), places.tolist(), strict=True)]
        expected = []
        for row, length in enumerate(chunk_lengths):
            for chunk in (rank, 2 * size - 1 - rank):
                start = chunk * length
                expected.append([(row, position) for position in range(max(0, start - window + 1), start)])
        assert counts.tolist() == [len(halo) for halo in expected]
        assert found == [token for halo in expected for token in halo]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_context_ranks_compute_what_one_process_computes(world_size: int) -> None:
    for rank, errors in enumerate(run_ranks(world_size, _all_errors)):
        # Not `error > bound`: a NaN must show too.
        wrong = {name: error for name, error in errors.items() if not error < 1e-5}
        assert not wrong, (rank, wrong)


def test_a_ring_takes_any_number_of_heads() -> None:
    check_context_parallel(CONFIG, tensor=4, context=7, kind="ring")


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (1, 2), (1, 4), (2, 2), (4, 1)])
def test_ulysses_deals_out_heads_that_divide(tensor: int, context: int) -> None:
    check_context_parallel(CONFIG, tensor=tensor, context=context, kind="ulysses")


@pytest.mark.parametrize(("tensor", "context", "fitting"), [(1, 3, "[1, 2, 4]"), (2, 4, "[1, 2]"), (4, 2, "[1]")])
def test_ulysses_refuses_heads_that_do_not_divide_with_a_way_out(tensor: int, context: int, fitting: str) -> None:
    with pytest.raises(ValueError, match="resources.update.context ") as refused:
        check_context_parallel(CONFIG, tensor=tensor, context=context, kind="ulysses")
    assert f"one of {fitting}, or context_kind to ring" in str(refused.value)


def test_ulysses_wants_key_heads_that_can_be_shared_evenly() -> None:
    config = replace(CONFIG, num_heads=12, num_kv_heads=3)
    check_context_parallel(config, tensor=1, context=6, kind="ulysses")
    with pytest.raises(ValueError, match="3 key and value heads"):
        check_context_parallel(config, tensor=1, context=2, kind="ulysses")
