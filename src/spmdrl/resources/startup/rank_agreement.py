"""Agreement of ranks on the job: each publishes its facts in the store, and rank 0 compares them.

No process group is needed, so ranks that differ are refused before any collective could hang.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from spmdrl.runtime.launch import LaunchEnvironment, StartRefused
from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.ending import reason_of_stop, stop_cause
from spmdrl.runtime.supervision.stop_request import Stopped, request

Facts = Mapping[str, str]
"""name of a fact that must be equal on all ranks -> its value; compared in this order"""

_REFUSAL = "refusal"
_VERDICT = "verdict"
_NOTICED = "noticed"
_AGREED = b"agreed"
_LONGEST_PAUSE_SECONDS = 0.2
# Time for which a refusing rank keeps the store open, so that others read the reason.
_NOTICE_SECONDS = 5.0
_GRACE_SECONDS = 10.0
# Number of ranks whose facts are compared in full; further differing ones would name nothing new.
_MOST_COMPARED = 8
_LONGEST_VALUE = 200


@dataclass(frozen=True)
class Alike:
    """Ranks with equal facts."""

    ranks: Sequence[int]
    facts: Facts


def difference(groups: Sequence[Alike]) -> str | None:
    """Describe the first differing fact, with each value and its ranks; None if all agree."""
    names = list(dict.fromkeys(name for group in groups for name in group.facts))
    differing = [name for name in names if len({group.facts.get(name) for group in groups}) > 1]
    if not differing:
        return None
    ranks_by_value: dict[str, list[int]] = {}
    for group in groups:
        ranks_by_value.setdefault(group.facts.get(differing[0], "missing"), []).extend(group.ranks)
    values = ", ".join(
        f"{value[:_LONGEST_VALUE]}{'...' * (len(value) > _LONGEST_VALUE)} on {_named(sorted(ranks))}"
        for value, ranks in ranks_by_value.items()
    )
    further = f" ({len(differing) - 1} more differ: {_some(differing[1:])})" if len(differing) > 1 else ""
    return (
        f"ranks disagree about {differing[0]}: {values}{further}; "
        "start all ranks with the same command, files and installation"
    )


def meet(
    store: dist.Store, launch: LaunchEnvironment, facts: Facts, *, timeout_seconds: float, refusal: str | None = None
) -> None:
    """Wait until all ranks are here and agree, in a store that only this attempt of the job has.

    Raises StartRefused on every rank if facts differ, if a rank passes a `refusal` (why it can't start; rank 0 has
    shown its own), or if ranks are missing after `timeout_seconds`; Stopped if one is asked to stop. All ranks call it,
    each at its own time.
    """
    if launch.world_size == 1:
        return
    own = dist.PrefixStore("start", store)
    try:
        if launch.rank == 0 and refusal is not None:
            _end_all(own, launch, refusal, min(_NOTICE_SECONDS, timeout_seconds))
            raise StartRefused(refusal, is_shown=True)
        if launch.rank == 0:
            _publish(own, launch.rank, facts, None)
            _judge(own, launch, timeout_seconds)
        else:
            waited = timeout_seconds if refusal is not None else _waited_by_others(timeout_seconds)
            _join(own, launch, facts, waited, refusal)
    except Stopped as stopped:
        if launch.rank == 0 and not stopped.is_agreed:
            _end_all(own, launch, stop_cause(stopped.reason))
        elif not stopped.is_agreed:
            own.set(_REFUSAL, stop_cause(stopped.reason))
            own.add(_NOTICED, 1)
        raise


def agree(store: dist.Store, launch: LaunchEnvironment, topic: str, facts: Facts, *, timeout_seconds: float) -> None:
    """Compare facts that are known only later, under a topic that is used once. Collective over all ranks.

    Raises StartRefused on every rank if they differ, or if ranks are missing after `timeout_seconds`.
    """
    if launch.world_size == 1:
        return
    own = dist.PrefixStore(topic, store)
    _publish(own, launch.rank, facts, None)
    if launch.rank == 0:
        _judge(own, launch, timeout_seconds)
        return
    if not _wait_until(lambda: own.check([_VERDICT]), _waited_by_others(timeout_seconds)):
        raise StartRefused(f"rank 0 has not compared {topic} after {timeout_seconds:g} s; look for its last output")
    _accept_verdict(own, launch)


def _publish(own: dist.Store, rank: int, facts: Facts, refusal: str | None) -> None:
    content = json.dumps(dict(facts))
    own.set(f"facts/{rank}", content)
    own.set(f"digest/{rank}", hashlib.sha256(content.encode()).hexdigest())
    if refusal is not None:
        own.set(_REFUSAL, f"rank {rank} can't start: {refusal}")
    own.add("published", 1)


def _judge(own: dist.Store, launch: LaunchEnvironment, timeout_seconds: float) -> None:
    """On rank 0, wait for all, compare, and publish the verdict."""
    size = launch.world_size
    complete = _wait_until(lambda: own.check([_REFUSAL]) or own.add("published", 0) >= size, timeout_seconds)
    if own.check([_REFUSAL]):
        problem: str | None = own.get(_REFUSAL).decode()
    elif not complete:
        missing = [rank for rank in range(size) if not own.check([f"digest/{rank}"])]
        have = "has" if len(missing) == 1 else "have"
        problem = (
            f"{_named(missing)} {have} not started after {timeout_seconds:g} s, {size - len(missing)} of {size} have; "
            "look at the output of the missing ranks, or raise resources.start_timeout_seconds if starting is slow"
        )
    else:
        problem = difference(_groups(own, size))
    if problem is None:
        own.set(_VERDICT, _AGREED.decode())
        return
    if reason_of_stop(problem) is None:
        # Before another rank can end with it, after which the launcher ends this one.
        show(f"spmdrl: {problem}", stream=sys.stderr)
    _end_all(own, launch, problem, min(_NOTICE_SECONDS, timeout_seconds))
    raise _end_by(problem, launch)


def _end_all(own: dist.Store, launch: LaunchEnvironment, problem: str, notice_seconds: float = _NOTICE_SECONDS) -> None:
    """Publish the reason for not starting, and return once all others have read it, or `notice_seconds` later."""
    # The launcher's request once another rank has ended isn't the cause.
    request.begin_leaving()
    own.set(_VERDICT, problem)
    _wait_until(lambda: own.add(_NOTICED, 0) >= launch.world_size - 1, notice_seconds)


def _end_by(problem: str, launch: LaunchEnvironment) -> StartRefused | Stopped:
    """Return each rank's exception. Rank 0 has shown it; srun's nodes share one screen, others have their own."""
    reason = reason_of_stop(problem)
    if reason is not None:
        return Stopped(reason, "", is_agreed=True)
    return StartRefused(problem, is_shown=launch.node_rank == 0 or launch.local_rank > 0 or launch.source == "srun")


def _groups(own: dist.Store, size: int) -> list[Alike]:
    ranks_by_digest: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(own.multi_get([f"digest/{rank}" for rank in range(size)])):
        ranks_by_digest.setdefault(bytes(digest), []).append(rank)
    compared = list(ranks_by_digest.values())[:_MOST_COMPARED]
    return [Alike(ranks, json.loads(own.get(f"facts/{ranks[0]}"))) for ranks in compared]


def _join(
    own: dist.Store, launch: LaunchEnvironment, facts: Facts, timeout_seconds: float, refusal: str | None
) -> None:
    """On any other rank, publish the facts and wait for the verdict."""
    try:
        _publish(own, launch.rank, facts, refusal)
        is_decided = _wait_until(lambda: own.check([_VERDICT]), timeout_seconds)
    except RuntimeError as error:
        # The store's host has ended.
        raise StartRefused("rank 0 or its launcher has ended; look at its output") from error
    if not is_decided:
        raise StartRefused(
            f"rank 0 has not started after {timeout_seconds:g} s; look at its output, "
            "or raise resources.start_timeout_seconds if starting is slow"
        )
    _accept_verdict(own, launch)


def _accept_verdict(own: dist.Store, launch: LaunchEnvironment) -> None:
    verdict = own.get(_VERDICT)
    own.add(_NOTICED, 1)
    if verdict != _AGREED:
        raise _end_by(verdict.decode(), launch)


def _waited_by_others(timeout_seconds: float) -> float:
    """Return a longer timeout than rank 0's, which names the missing ranks."""
    return timeout_seconds + min(timeout_seconds, _GRACE_SECONDS)


def _wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll with growing intervals; False after the timeout."""
    deadline, pause = time.monotonic() + timeout_seconds, 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True


def _named(ranks: Sequence[int]) -> str:
    """Name ranks, such as `rank 3`, or `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return ("rank " if len(ranks) == 1 else "ranks ") + _some(texts)


def _some(words: Sequence[str]) -> str:
    shown = ", ".join(words[:10])
    return f"{shown} and {len(words) - 10} more" if len(words) > 10 else shown
