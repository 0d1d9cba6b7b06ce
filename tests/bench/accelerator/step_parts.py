"""The parts of a step of a whole job, and what is left beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from spmdrl.verbs.doctor.stage_run import StageRun
from spmdrl.verbs.doctor.whole_jobs import Settings, step_settings, train

_CACHES: Mapping[str, Settings] = {"full": {}, "small": {"rollout.kv_cache_gib": 0.02}}
_PARTS = {"rollout": "generation", "logprobs": "old_logprobs", "update": "update", "switch": "resharding"}


def check_step(run: StageRun) -> None:
    """Train a few steps of a random model, and show the share of each part in a step."""
    steps = train(run, run.folder / "run", {**step_settings(run), "rollout.engine": "native", **_CACHES[run.scale]})
    whole = statistics.median(step["time/step"] for step in steps)
    run.figures["seconds_per_step"] = whole
    for part, stage in _PARTS.items():
        run.figures[f"{part}_share"] = statistics.median(step.get(f"time/{stage}", 0.0) for step in steps) / whole
    run.figures["other_share"] = 1 - sum(run.figures[f"{part}_share"] for part in _PARTS)
    run.figures["tokens_per_second"] = statistics.median(step["perf/tokens_per_second"] for step in steps)
    run.figures["times"] = {
        name: statistics.median(step[name] for step in steps) for name in steps[0] if name.startswith(("time/", "mem/"))
    }
