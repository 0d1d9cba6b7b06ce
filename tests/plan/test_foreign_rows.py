from __future__ import annotations

import pytest
from tests.bench.plan.foreign_rows import MODELS, ForeignRow, planned_owners


@pytest.mark.slow
def test_a_row_without_a_fused_head_has_the_bytes_of_its_sizes():
    row = ForeignRow(0, "Qwen3-0.6B", 1, {}, fused_head=False)
    owners = planned_owners(row, 2048)
    # Queries and outputs, keys and values, three matrices, norms of both parts and of heads; and tied embeddings.
    layer = 2 * 1024 * 16 * 128 + 2 * 1024 * 8 * 128 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    parameters = 28 * layer + 151936 * 1024 + 1024
    assert owners["update_weights"] == pytest.approx(4 * parameters, rel=1e-3)
    assert owners["optimizer"] == pytest.approx(8 * parameters, rel=1e-3)
    assert owners["gradients"] == pytest.approx(4 * parameters, rel=1e-3)
    assert owners["activations"] == 28 * 2048 * 1024 * 2 + 16 * 2048 * 151936
    assert MODELS[row.model]["vocab_size"] == 151936
