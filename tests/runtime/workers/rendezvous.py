"""A runner for tests whose calls wait for other calls, so that they end only in a concurrent worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from spmdrl.runtime.workers.loading import Loaded


def load(specs: Sequence[str], settings: Mapping[str, Any]) -> Loaded:
    met: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def answer(message: dict[str, Any]) -> Any:
        if message["do"] == "meet":
            met[message["own"]].set()
            await met[message["other"]].wait()
        elif message["do"] == "block":
            time.sleep(60)
        elif message["do"] == "die":
            os._exit(3)
        return {"pid": os.getpid(), **message}

    return Loaded(answer)
