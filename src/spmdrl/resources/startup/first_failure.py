"""Which rank failed first: what the others then meet, such as closed connections, are consequences of its failure."""

from __future__ import annotations

import json
import threading
import time

import torch.distributed as dist

from spmdrl.resources.startup.ending import FirstFailure, cause_of, is_consequence, stop_cause
from spmdrl.resources.watch.stop_request import Stopped, request

_COUNT = "failures"
_FIRST = "first failure"
# In which a rank that lost its connections looks for another rank's failure.
_CONSEQUENCE_SECONDS = 5.0
# In which rank 0 may be the first to publish what all ranks find alike.
_ALIKE_SECONDS = 2.0
_STORE_SECONDS = 3.0


def find_first(store: dist.Store, rank: int, failure: BaseException) -> FirstFailure:
    """The failure that came first on any rank: this one, or the one that the store holds already.

    A failure that may well be a consequence waits some seconds for its cause to be published.
    """
    own = FirstFailure(rank, cause_of(failure))
    patience = 0.0
    if is_consequence(failure):
        patience = _CONSEQUENCE_SECONDS
    elif rank != 0 and isinstance(failure, (ValueError, KeyboardInterrupt, Stopped)):
        patience = _ALIKE_SECONDS
    found = [own]
    # On a thread of its own, since the store may be gone or never answer.
    search = threading.Thread(target=_search, args=(store, own, patience, found), daemon=True)
    search.start()
    search.join(patience + _STORE_SECONDS)
    return found[-1]


def publish(store: dist.Store, failure: FirstFailure) -> bool:
    """Record a rank's failure as the first one, and return whether it was."""
    is_first = not store.check([_FIRST]) and store.add(_COUNT, 1) == 1
    if is_first:
        store.set(_FIRST, json.dumps([failure.rank, failure.cause]))
    return is_first


def wait_for_all(store: dist.Store, size: int, state: str, timeout_seconds: float) -> None:
    """Return once every rank has come here. `state`: what they are then, used once in a job.

    Raises RuntimeError if a rank has failed, or if some are missing after `timeout_seconds`.
    """
    store.add(state, 1)
    deadline, pause = time.monotonic() + timeout_seconds, 0.001
    while store.add(state, 0) < size:
        if store.check([_FIRST]):
            raise RuntimeError("Interrupted by another rank's failure")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{store.add(state, 0)} of {size} ranks are {state} after {timeout_seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _search(store: dist.Store, own: FirstFailure, patience: float, found: list[FirstFailure]) -> None:
    try:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not store.check([_FIRST]):
            time.sleep(0.05)
        if publish(store, own):
            return
        deadline = time.monotonic() + _STORE_SECONDS
        while time.monotonic() < deadline:
            if store.check([_FIRST]):
                found.append(FirstFailure(*json.loads(store.get(_FIRST))))
                return
            time.sleep(0.02)
    except (RuntimeError, ValueError, TypeError):
        # Rank 0, which keeps the store, has ended; the reason is in its own output, or was found before.
        if own.rank != 0:
            is_asked = own.is_interruption or own.is_stop
            cause = own.cause if is_asked else "it ended first; its output says why"
            found.append(FirstFailure(0, stop_cause(request.reason or "") if request.is_leaving else cause))
