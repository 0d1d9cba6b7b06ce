"""Comparison of updates in bfloat16 with float32 on the same device, and in float32 with the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.models.make_model import RandomWeights, decoder_config
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.verbs.doctor.stage_run import StageRun

_MODELS = {
    "full": decoder_config(
        MakeConfig(
            hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1536
        )
    ),
    "small": decoder_config(MakeConfig(hidden_size=64, num_hidden_layers=2, intermediate_size=192)),
}
_ROWS, _LONGEST = {"full": 16, "small": 8}, {"full": 512, "small": 64}
_NUM_UPDATES = 6
_OPTIM = OptimConfig(lr=1e-3)
# Float32 differs by the order of sums; bfloat16 has 8 bits.
_FLOAT32_TOLERANCE, _BFLOAT16_TOLERANCE = 1e-4, 2e-2
_LOGPROB_TOLERANCE = 0.05


@dataclass(frozen=True)
class TrainedModel:
    """A few updates of one model on the same rows."""

    losses: list[float]
    grad_norms: list[float]
    logprobs_R: Tensor
    """log-probs of the initial weights"""


def check_bfloat16(run: StageRun) -> None:
    """Check updates in bfloat16. Collective over the world."""
    rows = _random_rows(run)
    found = {dtype: _train(run, run.device, rows, dtype) for dtype in (torch.float32, torch.bfloat16)}
    exact, near = found[torch.float32], found[torch.bfloat16]
    if not run.device.is_cpu:
        _compare(
            run, "float32 beside the CPU", exact, _train(run, Device("cpu"), rows, torch.float32), _FLOAT32_TOLERANCE
        )
    _compare(run, "bfloat16 beside float32", near, exact, _BFLOAT16_TOLERANCE)
    distance = float((near.logprobs_R - exact.logprobs_R).abs().mean())
    run.require(distance < _LOGPROB_TOLERANCE, f"log-probs in bfloat16 are {distance:.3g} nats off on average")
    run.figures["logprob_distance"] = distance
    run.figures["first_loss"], run.figures["last_loss"] = near.losses[0], near.losses[-1]
    run.require(near.losses[-1] < near.losses[0], f"the loss doesn't fall in bfloat16: {near.losses}")
    run.figures["losses"] = {"float32": exact.losses, "bfloat16": near.losses}


def _random_rows(run: StageRun) -> TokenRows:
    """Make rows of many lengths, the same on every machine; a quarter of each is its prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(4, _LONGEST[run.scale] + 1, (_ROWS[run.scale],), generator=generator)
    return TokenRows(
        tokens_T=torch.randint(_MODELS[run.scale].vocab_size, (int(lengths_B.sum()),), generator=generator),
        offsets=offsets_of(lengths_B),
        prompt_lengths_B=lengths_B // 4,
    )


def _compare(run: StageRun, name: str, one: TrainedModel, other: TrainedModel, tolerance: float) -> None:
    """Compare the losses of all updates, and the norm of the first gradient."""
    for quantity, ours, theirs in (
        ("loss", one.losses, other.losses),
        ("gradient norm", one.grad_norms[:1], other.grad_norms[:1]),
    ):
        error = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        run.figures[f"{quantity.replace(' ', '_')}_error_{name.split()[0]}"] = error
        run.require(error <= tolerance, f"{name}: {quantity} differs by {error:.1e}, more than {tolerance:g}")


def _train(run: StageRun, device: Device, rows: TokenRows, dtype: torch.dtype) -> TrainedModel:
    config = _MODELS[run.scale]
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), run.world.size), device, run.world.rank)
    engine = TrainingEngine(config, TrainingConfig(), _OPTIM, mesh, device, compute_dtype=dtype)
    engine.load(RandomWeights(config, seed=0))
    logprobs_R = engine.score(rows).logprobs_R.cpu()

    def mean_loss(scores: Scores, micro: MicroBatch) -> LossTerms:
        return LossTerms(-scores.logprobs_R.sum() / (rows.num_response_tokens * run.world.size), {})

    updates = [engine.update(rows, mean_loss) for _ in range(_NUM_UPDATES)]
    return TrainedModel([update.loss for update in updates], [update.grad_norm for update in updates], logprobs_R)
