"""The other end of a `Peer`: replies of a process that a bench started, one line of JSON each.

Needs nothing but the standard library, so that it runs in an environment of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable


def open_replies() -> Callable[[object], None]:
    """Returns the function that sends a reply. What libraries print to stdout goes to stderr from here on."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(reply: object) -> None:
        replies.write(json.dumps(reply) + "\n")

    return send
