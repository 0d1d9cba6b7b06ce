"""An indexer's weights are part of the model, and no update changes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.bench.layouts.layout_cases import UnevenWeights
from tests.engines.training.tiny import INDEXED, OPTIM, make_rows, weighted_nll, whole_weights
from tests.support.ranks import run_ranks

CASES = [
    (UpdateLayout(shard=2), torch.bfloat16),
    (UpdateLayout(data=2, shard=1), torch.float32),
    (UpdateLayout(shard=1, tensor=2), torch.float32),
]


def trained(world: World, cases: list[tuple[UpdateLayout, torch.dtype]]) -> list[dict[str, Tensor]]:
    """The weights after an update with weight decay, under each layout."""
    found = []
    for layout, dtype in cases:
        mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
        optim = replace(OPTIM, weight_decay=0.1)
        engine = TrainingEngine(INDEXED, TrainingConfig(), optim, mesh, world.device, compute_dtype=dtype)
        engine.load(UnevenWeights(INDEXED))
        engine.update(make_rows(12).select(list(range(12))[mesh.data.rank :: mesh.data.size]), weighted_nll)
        found.append(whole_weights(engine))
    return found


@pytest.mark.ranks
def test_updates_leave_an_indexers_weights_as_they_are_under_every_layout():
    source = UnevenWeights(INDEXED)
    before = {name: source.read(whole_slice(name, shape)) for name, shape in parameter_shapes(INDEXED).items()}
    for answers in run_ranks(2, trained, CASES):
        for case, weights in zip(CASES, answers, strict=True):
            same = {name for name, weight in weights.items() if weight.equal(before[name])}
            assert same == {name for name in before if ".indexer." in name} and len(same) == 5, case
