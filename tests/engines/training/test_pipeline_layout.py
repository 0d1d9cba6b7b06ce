"""Who runs which layers of a pipeline, and when: on paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from spmdrl.engines.training.assignment import (
    check_pipeline,
    forward_order,
    layer_spans,
    microbatch_count,
    stage_numbers,
    stage_ranks,
)
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis
from tests.engines.training.tiny import CONFIG

# The first one that gets every schedule right.
RIGHT = TorchVersion("2.12.0+cpu")

LAYOUTS = st.builds(
    lambda pipeline, kind: UpdateLayout(pipeline=pipeline, pipeline_schedule=kind[0], pipeline_chunks=kind[1]),
    st.integers(2, 6),
    st.sampled_from(
        [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 2), ("zbv", 2)]
    ),
)


@given(st.integers(1, 8), st.integers(0, 20))
def test_every_layer_is_in_one_stage_and_the_ends_embed_and_head(num_stages: int, extra: int) -> None:
    spans = layer_spans(num_stages + extra, num_stages)
    assert [layer for span in spans for layer in range(span.first, span.stop)] == list(range(num_stages + extra))
    assert [span.embeds for span in spans] == [True] + [False] * (num_stages - 1)
    assert [span.heads for span in spans] == [False] * (num_stages - 1) + [True]
    sizes = [span.stop - span.first for span in spans]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(LAYOUTS)
def test_ranks_share_the_stages_out_and_neighbours_follow(layout: UpdateLayout) -> None:
    held = [stage_numbers(Axis("pipeline", layout.pipeline, rank, None, ()), layout) for rank in range(layout.pipeline)]
    assert {len(stages) for stages in held} == {layout.pipeline_chunks}
    assert sorted(stage for stages in held for stage in stages) == list(range(len(stage_ranks(layout))))
    if layout.pipeline_schedule == "zbv":
        assert held[0] == (0, 2 * layout.pipeline - 1)
    else:
        assert held[1] == tuple(range(1, layout.pipeline * layout.pipeline_chunks, layout.pipeline))


@given(LAYOUTS, st.integers(1, 30))
def test_forward_order_computes_each_stage_after_the_one_before(layout: UpdateLayout, count: int) -> None:
    ranks = stage_ranks(layout)
    order = forward_order(ranks, count)
    assert len(set(order)) == len(order) == len(ranks) * count
    seen: set[tuple[int, int]] = set()
    for stage, microbatch in order:
        assert stage == 0 or (stage - 1, microbatch) in seen
        assert microbatch == 0 or (stage, microbatch - 1) in seen
        seen.add((stage, microbatch))


@given(LAYOUTS, st.integers(1, 60))
def test_few_idle_microbatches_are_added(layout: UpdateLayout, count: int) -> None:
    scheduled = microbatch_count(count, layout)
    assert count <= scheduled < count + layout.pipeline
    assert microbatch_count(scheduled, layout) == scheduled
    if count % layout.pipeline == 0:
        assert scheduled == count


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (UpdateLayout(pipeline_chunks=2), "pipeline_chunks is 2, but resources.update.pipeline is 1"),
        (UpdateLayout(pipeline=2, pipeline_chunks=2), "pipeline_schedule is 1f1b.*one chunk.*pipeline_chunks is 2"),
        (UpdateLayout(pipeline=2, pipeline_schedule="interleaved"), "interleaved.*several.*pipeline_chunks is 1"),
        (UpdateLayout(pipeline=2, pipeline_schedule="zbv"), "zbv.*exactly 2.*pipeline_chunks is 1"),
        (UpdateLayout(pipeline=3), "pipeline 3 x pipeline_chunks 1 = 3 stages.*the model has 2"),
    ],
)
def test_what_cannot_be_pipelined_is_refused_with_a_way_out(layout: UpdateLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_pipeline(CONFIG, layout, torch_version=RIGHT)


def test_split_backward_is_refused_where_pytorch_gets_it_wrong() -> None:
    layout = UpdateLayout(pipeline=2, pipeline_schedule="zero_bubble")
    check_pipeline(CONFIG, layout, torch_version=RIGHT)
    with pytest.raises(ValueError, match="pipeline_schedule is zero_bubble, but PyTorch 2.11.0"):
        check_pipeline(CONFIG, layout, torch_version=TorchVersion("2.11.0"))


def test_what_fits_is_not_refused() -> None:
    check_pipeline(CONFIG, UpdateLayout())
    check_pipeline(CONFIG, UpdateLayout(pipeline=2))
    check_pipeline(CONFIG, UpdateLayout(pipeline=2, pipeline_schedule="zero_bubble"), torch_version=RIGHT)
