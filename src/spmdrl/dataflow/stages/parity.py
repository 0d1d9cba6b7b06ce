"""How far what generated the tokens lies from what is trained on them: in log-probs, and in policy versions.

Shape letters: `R` packed response tokens of some rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from spmdrl.observability.metrics import Recorder

Agreement = Literal["measured", "checked", "used"]
"""What is done about generator and trainer agreeing: it is measured; any difference is an error; or, besides, the
generator's log-probs stand in for the trainer's own of before the update, and nothing computes these."""

OLD_LOGPROBS = "old_logprobs"
_MEASURED_COLUMNS = frozenset({"rollout_logprobs", "versions"})


def update_columns(columns_for_loss: Iterable[str], agreement: Agreement) -> frozenset[str]:
    """What the update reads: the columns of the loss, and those by which the two are measured."""
    columns = frozenset(columns_for_loss) | _MEASURED_COLUMNS
    return columns - {OLD_LOGPROBS} if agreement == "used" else columns


def check_agreement(largest: float, step: int) -> None:
    """Raise RuntimeError where the two differ, although they must not."""
    if largest > 0:
        raise RuntimeError(
            f"debug.batch_invariant: in step {step} a log-prob of the generator differs by {largest:.3g} from the "
            "trainer's; they run other arithmetic or hold other weights. Set debug.batch_invariant to false to go on"
        )


def mismatch(
    old_logprobs_R: Tensor, columns: Mapping[str, Tensor], version: int
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """How far the generator's log-probs lie from the trainer's: (sum, count) by name, and maxima.

    Of tokens that these very weights generated: for others a difference is no mismatch of two engines.
    """
    is_own_R = columns["versions"] == version
    difference_R = (columns["rollout_logprobs"] - old_logprobs_R).where(is_own_R, 0.0)
    distance_R = difference_R.abs()
    count = is_own_R.sum()
    # Below every distance: what is reported of no tokens at all.
    nothing = distance_R.new_full((1,), -torch.inf)
    furthest = torch.cat((nothing, distance_R.where(is_own_R, -torch.inf))).max()
    means = {"mismatch/kl": (difference_R.sum(), count), "mismatch/abs_mean": (distance_R.sum(), count)}
    return means, {"mismatch/abs_max": furthest}


def record_lags(recorder: Recorder, versions_R: Tensor, version: int) -> None:
    """Record by how many policy versions these tokens, which no other rank records, lag behind this one."""
    lags_R = version - versions_R
    if not lags_R.numel():
        return
    recorder.mean("off_policy/mean", float(lags_R.double().mean()), lags_R.numel())
    recorder.maximum("off_policy/max", float(lags_R.max()))
    lags, counts = lags_R.unique(return_counts=True)
    for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
        recorder.total(f"off_policy/lag_{lag}", count)
