"""Trial of a model folder's tokenizer and chat templates in a child with limits, before a rank uses them.

Folders come from anywhere. A template is a program, and a normalizer can expand one character to a million: in the rank
itself either could exhaust memory or never end.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.runtime.workers.call_pool import CallPool, Unanswered
from spmdrl.runtime.workers.call_queue import Call
from spmdrl.runtime.workers.loading import Loaded
from spmdrl.runtime.workers.process import PendingCall, WorkerSetup
from spmdrl.runtime.workers.verdict import Verdict

MOST_GROWTH = 64
"""limit of a text's growth in a template or tokenizer"""
_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_RENDERING = "transformers.utils.chat_template_utils"
# Lines of 16 characters, so that one expanding character is seen beside all others.
_CHARACTERS = [*map(chr, (*range(32, 0x3100), 0x4E2D, 0xFDFA, *range(0x1F600, 0x1F650)))]
_LINES = ["".join(_CHARACTERS[start : start + 16]) for start in range(0, len(_CHARACTERS), 16)]
_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_ASKS, _ANSWERS = ({"role": role, "content": "It is 1 + 1. " * 8} for role in ("user", "assistant"))
_SYSTEM, _TOOL = ({"role": role, "content": "2"} for role in ("system", "tool"))
_CONVERSATIONS = (
    ([_ASKS], None),
    ([_SYSTEM, _ASKS, {**_ANSWERS, "tool_calls": [_CALL]}, _TOOL, _ANSWERS], _TOOLS),
    ([_ASKS, _ANSWERS] * 64 + [_ASKS], None),
)


def check_growth(rendered: str, template: str, messages: Any, tools: Any) -> None:
    """Raise ValueError for a text far longer than its messages, tools and the template explain."""
    if len(rendered) > 4096:
        given = len(json.dumps([messages, tools], default=str)) + len(template) * (1 + len(messages))
        if len(rendered) > MOST_GROWTH * given:
            raise ValueError(f"it renders {len(rendered)} characters of {given} of messages and template")


def try_folder(folder: Path, *, seconds: float = 20.0, memory_limit_gib: float = 2.0) -> None:
    """Raise ValueError, with the file's name, if a folder's tokenizer or template breaks or exceeds these limits.

    Templates may refuse the trial messages; that is for their rows to find out.
    """
    if not (names := [name for name in (_TOKENIZER, _SETTINGS, _TEMPLATE) if (folder / name).is_file()]):
        return
    key, faults = "model.path", _Faults(f"needs more than the limit of {memory_limit_gib:g} GiB or {seconds:g} s")
    setup = WorkerSetup("model", key, key, __name__, [str(folder)], (), memory_limit_gib, {"limits": faults.limits})
    pool = CallPool(setup, faults, num_workers=1, timeout_seconds=seconds)
    try:
        pool.submit([Call(name, {"name": name}) for name in names])
        found = dict(zip(names, pool.collect(names), strict=True))
    except Unanswered:
        raise ValueError(f"this process was asked to stop before {folder}'s tokenizer had been tried") from None
    finally:
        pool.close()
    for name, fault in found.items():
        if fault:
            raise ValueError(f"{folder / name} {fault}; repair the file, or download it again")


class _Faults:
    """A file's fault, or None, as the results of a pool."""

    def __init__(self, limits: str):
        self.limits = limits

    def read(self, answer: Any, call: PendingCall, seconds: float) -> str | None:
        return answer if isinstance(answer, str) else None

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> str:
        return self.limits if verdict is Verdict.TIMED_OUT else f"{self.limits}, or ends its process ({error})"


def load(folders: Sequence[str], settings: Mapping[str, str]) -> Loaded:
    """Return the function that tries a file of the folder. Runs in the child."""
    # A panic of the tokenizers library writes its backtrace to stderr, and its threads count as memory.
    os.environ |= {"USE_TORCH": "0", "TOKENIZERS_PARALLELISM": "false"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Before a file's time begins; all that is needed of transformers, as PyTorch would take seconds.
    for module in ("tokenizers", _RENDERING):
        importlib.import_module(module)
    folder = Path(folders[0])

    def answer(message: dict[str, Any]) -> str:
        try:
            _try_tokenizer(folder) if message["name"] == _TOKENIZER else _try_templates(folder, message["name"])
        except MemoryError:
            return settings["limits"]
        except BaseException as error:
            # A panic of the tokenizers library isn't an Exception.
            line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
            return f"can't be used ({type(error).__name__}{line}: {str(error).partition(chr(10))[0]:.300})"
        return ""

    return Loaded(answer)


def _try_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    for line, encoding in zip(_LINES, tokenizer.encode_batch(_LINES), strict=True):
        if len(encoding.ids) > MOST_GROWTH * len(line.encode()):
            raise ValueError(f"it makes {len(encoding.ids)} tokens of {len(line)} characters ({line!r})")
        tokenizer.decode(encoding.ids)


def _try_templates(folder: Path, name: str) -> None:
    from jinja2 import TemplateSyntaxError

    render = importlib.import_module(_RENDERING).render_jinja_template
    settings = json.loads(path.read_text(encoding="utf-8")) if (path := folder / _SETTINGS).is_file() else {}
    given = (folder / name).read_text(encoding="utf-8") if name == _TEMPLATE else settings.get("chat_template")
    marks = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()
             if key.endswith("_token")}  # fmt: skip
    for one in given if isinstance(given, list) else [given] if given else []:
        text = one["template"] if isinstance(one, dict) else one
        for messages, tools in _CONVERSATIONS:
            try:
                rendered = render([messages], tools, chat_template=text, add_generation_prompt=True, **marks)
            except (TemplateSyntaxError, MemoryError, RecursionError):
                raise
            except Exception:
                rendered = [[""]]
            check_growth(rendered[0][0], text, messages, tools)
