"""Weights on their way to the generator when a fault comes: the switch is done again, or refused, never half done."""

from __future__ import annotations

from pathlib import Path

from tests.bench.faults.fault_jobs import FaultJobs, difference, outcome_of
from tests.bench.faults.fault_tally import Tally

_KINDS = ("sigkill", "exit", "raise", "sigterm", "hang", "corrupt")


def switches(root: Path, *, is_short: bool, part: tuple[int, int]) -> list[Tally]:
    """Each kind x two ranks, then the same command: it must come to what the undisturbed run came to."""
    kinds, ranks = (_KINDS[:1], (1,)) if is_short else (_KINDS, (0, 1))
    tally = Tally("switch", f"{', '.join(kinds)} in a switch of weights (reshard.verify), then the same command")
    jobs = FaultJobs(root, 2, "reshard.verify=true", "resources.stage_timeout_seconds=2")
    if not (end := jobs.run("whole")).is_done:
        raise RuntimeError(f"the undisturbed run failed: {end.screen[-400:]}")
    whole = outcome_of(root / "whole")
    for index, (kind, rank) in enumerate((kind, rank) for kind in kinds for rank in ranks):
        if index % part[1] == part[0]:
            with tally.timed(f"{kind} of rank {rank}") as problems:
                name = f"{kind}_{rank}"
                end = jobs.run(name, fault=f"reshard:{rank}:2:{kind}")
                again = jobs.run(name)
                if not any(end.codes):
                    problems.append("nothing came of the fault")
                elif not again.is_done:
                    problems.append(f"exit codes {again.codes}: {again.screen[-400:]}")
                elif problem := difference(whole, outcome_of(root / name)):
                    problems.append(problem)
    return [tally]
