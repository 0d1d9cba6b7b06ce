from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from tests.bench.plan.foreign_rows import ROWS, ForeignRow, ForeignUpdate, _within, planned_owners, trace
from tests.bench.plan.foreign_times import BACKWARD, FORWARD, Kernels, seconds_of

from spmdrl.plan.account import Span, Work
from spmdrl.plan.run_plan import each_in_a_child


def _owners(row: ForeignRow, tokens: int) -> Counter[str]:
    # A trace changes the operators of its process.
    return planned_owners(row, tokens, each_in_a_child(partial(trace, row.update, tokens))[0])


def test_attention_takes_the_time_of_its_published_rate():
    attention = {FORWARD: 648 * 10**12, BACKWARD: 2 * 561 * 10**12}
    span = Span(work=Work(flops=sum(attention.values()) + 590 * 10**12))
    assert seconds_of(span, attention, Kernels("h100", "prime"), ranks_per_node=1) == pytest.approx(1 + 2 + 1)
    shared = Kernels("h100", "prime", context=4)
    assert seconds_of(span, attention, shared, ranks_per_node=1) == pytest.approx(4 * (1 + 2) + 1)
    older = seconds_of(span, attention, Kernels("h100", "titan"), ranks_per_node=1)
    assert older == pytest.approx(648 / 370 + 2 * 561 / 322 + 1)


def test_kept_products_and_attention_are_not_computed_again():
    attention = {FORWARD: 2 * 370 * 10**12}
    span = Span(work=Work(flops=attention[FORWARD] + 590 * 10**12))
    kernels = Kernels("h100", "titan", kept_flops=295 * 10**12)
    assert seconds_of(span, attention, kernels, ranks_per_node=1) == pytest.approx(1 + 0.5)


def test_an_update_takes_at_least_its_launches():
    span = Span(work=Work(launches=10**6))
    assert seconds_of(span, {}, Kernels("h100", "prime"), ranks_per_node=1) == pytest.approx(6.0)


def test_a_row_counts_if_none_of_its_lengths_misses():
    errors = [(1, 0.05), (2, -0.11), (2, 0.0), (3, None), (4, 0.1)]
    assert _within([{"row": row, "error": error} for row, error in errors], "error", 0.1) == [1, 4]


@pytest.mark.slow
def test_a_row_without_a_fused_head_has_the_bytes_of_its_sizes():
    owners = _owners(ForeignRow(0, ForeignUpdate("Qwen3-0.6B", 1, fused_head=False), {}), 2048)
    # Queries and outputs, keys and values, three matrices, norms of both parts and of heads; and tied embeddings.
    layer = 2 * 1024 * 16 * 128 + 2 * 1024 * 8 * 128 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    parameters = 28 * layer + 151936 * 1024 + 1024
    assert owners["update_weights"] == pytest.approx(4 * parameters, rel=1e-3)
    assert owners["optimizer"] == pytest.approx(8 * parameters, rel=1e-3)
    assert owners["gradients"] == pytest.approx(4 * parameters, rel=1e-3)
    assert owners["activations"] == 28 * 2048 * 1024 * 2 + 16 * 2048 * 151936


@pytest.mark.slow
def test_adapters_have_no_means_and_a_float32_base():
    owners = _owners(ForeignRow(0, ForeignUpdate("Qwen3-0.6B", 1, adapters=True), {}), 2048)
    adapters = 28 * 4 * 16 * (3072 + 2 * 2048 + 3072 + 3 * 4096)
    assert owners["update_weights"] == pytest.approx(4 * adapters, rel=1e-3)
    assert owners["base_weights"] == pytest.approx(4 * 596_049_920, rel=1e-3)
    assert "optimizer" not in owners


@pytest.mark.slow
def test_selective_recomputation_keeps_every_second_product():
    row = next(row for row in ROWS if row.number == 15 and not row.compiled)
    owners = _owners(row, 16384)
    # Queries, attention, values, the first and last of the feed-forward layer, the layer's input; attention's sums.
    of_layer = 2 * (4096 + 4096 + 1024 + 14336 + 4096 + 4096) + 4 * 32
    assert owners["activations"] == 16384 * (32 * of_layer + 12 * 128256)
