"""The split of ranks into those that train and those that generate, by the seconds of a run's steps."""

from __future__ import annotations

from pathlib import Path

from spmdrl.observability.log import read_metrics


def split_line(folder: Path, num_training: int, num_generating: int, *, are_apart: bool) -> str | None:
    """Describe the split at which both sets of ranks would be busy for as long; None without steps to judge by.

    Work is taken to be shared out evenly over however many ranks there are.
    """
    history = [metrics for _, metrics in read_metrics(folder)][1:] if folder.is_dir() else []
    history = [metrics for metrics in history if ("time/wait_for_update" in metrics) == are_apart]
    num_ranks = num_training + num_generating if are_apart else num_training
    if not history or num_ranks < 2:
        return None

    def mean(*names: str) -> float:
        return sum(metrics.get(f"time/{name}", 0.0) for metrics in history for name in names) / len(history)

    step = mean("step")
    if are_apart:
        waits = mean("wait_for_generation"), mean("wait_for_update")
        work = (step - waits[0]) * num_training, (step - waits[1]) * num_generating
    else:
        generation = mean("generation", "reward")
        work = (step - generation) * num_ranks, generation * num_ranks
    even = min(max(round(num_ranks * work[1] / sum(work)), 1), num_ranks - 1)
    if are_apart:
        idle = [f"{wait / step:.0%}" for wait in waits]
        advice = (
            "which is as even as can be" if even == num_generating else f"resources.ranks.generation={even} is nearer"
        )
        return f"ranks that train waited {idle[0]} of the time, those that generate {idle[1]}: {advice}"
    return (
        f"of {step:.3g} s a step generated and rewarded for {generation:.3g} s: with rollout.lag=1 and "
        f"resources.ranks.generation={even} both sets would be as busy; fewer do if tools or rewards take long"
    )
