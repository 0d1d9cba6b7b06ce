"""Tries a model folder's tokenizer and chat templates in a child with limits, before a rank uses them.

Folders come from anywhere. A template is a program, and a normalizer can make a million characters of one: in the rank
itself either could take all memory or never end.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.engines.models.hf.template_growth import MOST_GROWTH, check_growth
from spmdrl.engines.workers.call_pool import CallPool, Unanswered
from spmdrl.engines.workers.call_queue import Call
from spmdrl.engines.workers.process import PendingCall, WorkerSetup
from spmdrl.engines.workers.verdict import Verdict

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# Lines of 16 characters, so that one character that grows is seen beside all others.
_CHARACTERS = [chr(code) for code in (*range(32, 0x3100), 0x4E2D, 0xFDFA, *range(0x1F600, 0x1F650))]
_LINES = ["".join(_CHARACTERS[start : start + 16]) for start in range(0, len(_CHARACTERS), 16)]
_ADD = {"name": "add", "arguments": {"a": 1}}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}, "required": ["a"]}
_TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": _PARAMETERS}}]
_ASKS: dict[str, Any] = {"role": "user", "content": "What is 1 + 1? " * 8}
_ANSWERS: dict[str, Any] = {"role": "assistant", "content": "It is 2. " * 8}
_CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([_ASKS], None),
    ([{"role": "system", "content": "Be brief."}, _ASKS, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": _ADD}]}, {"role": "tool", "content": "2"}, _ANSWERS], _TOOLS),
    ([_ASKS, _ANSWERS] * 64 + [_ASKS], None),
]  # fmt: skip


def try_folder(folder: Path, *, seconds: float = 20.0, memory_limit_gib: float = 2.0) -> None:
    """Raise ValueError, with the file's name, where a folder's tokenizer or template breaks or is over these limits.

    Templates may refuse the messages that they are tried with; that's for their rows to find out.
    """
    names = [name for name in (_TOKENIZER, _SETTINGS, _TEMPLATE) if (folder / name).is_file()]
    if not names:
        return
    key, settings = "model.path", {"memory_limit_gib": memory_limit_gib}
    setup = WorkerSetup("model", key, key, __name__, [str(folder)], (), memory_limit_gib, settings)
    pool = CallPool(setup, _Faults(seconds, memory_limit_gib), num_workers=1, timeout_seconds=seconds)
    try:
        pool.submit([Call(name, {"name": name}) for name in names])
        faults = pool.collect(names)
    except Unanswered:
        raise ValueError(f"this process was asked to stop before {folder}'s tokenizer had been tried") from None
    finally:
        pool.close()
    for name, fault in zip(names, faults, strict=True):
        if fault:
            raise ValueError(f"{folder / name} {fault}; mend the file, or get it again from where it is sound")


class _Faults:
    """What is wrong with a file, or nothing, as the answers of a pool."""

    def __init__(self, seconds: float, memory_limit_gib: float):
        self._limits = seconds, memory_limit_gib

    def read(self, answer: Any, call: PendingCall) -> str | None:
        return answer if isinstance(answer, str) else None

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> str:
        seconds, gib = self._limits
        if verdict is Verdict.TIMED_OUT:
            return f"takes more than the limit of {seconds:g} s"
        return f"needs more than the limit of {gib:g} GiB of memory, or ends the process that reads it ({error})"


def load(folders: Sequence[str], settings: Mapping[str, Any]) -> tuple[Callable[[dict[str, Any]], str], None]:
    """Return the function that tries a file of the folder. Runs in the child."""
    # Of transformers only the part for templates is needed, which needs no PyTorch. A panic of the tokenizers library
    # writes its backtrace to stderr, and its threads count as memory.
    os.environ |= {"USE_TORCH": "0", "TOKENIZERS_PARALLELISM": "false"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Before a file's time begins.
    for name in ("tokenizers", "transformers.utils.chat_template_utils"):
        importlib.import_module(name)
    folder = Path(folders[0])
    tries = {_TOKENIZER: _try_tokenizer, _SETTINGS: _try_settings, _TEMPLATE: _try_template_file}

    def answer(message: dict[str, Any]) -> str:
        try:
            tries[message["name"]](folder)
        except MemoryError:
            return f"needs more than the limit of {settings['memory_limit_gib']:g} GiB of memory"
        except ValueError as error:
            return str(error)
        except BaseException as error:
            # A panic of the tokenizers library isn't an Exception.
            return f"can't be read ({type(error).__name__}: {str(error)[:300]})"
        return ""

    return answer, None


def _try_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
    for line, encoding in zip(_LINES, tokenizer.encode_batch(_LINES), strict=True):
        if len(encoding.ids) > MOST_GROWTH * len(line.encode()):
            raise ValueError(f"makes {len(encoding.ids)} tokens of {len(line)} characters ({line!r})")
        tokenizer.decode(encoding.ids)


def _try_settings(folder: Path) -> None:
    settings = _read_settings(folder)
    given = settings.get("chat_template")
    for template in given if isinstance(given, list) else [given]:
        _try_template(template.get("template") if isinstance(template, dict) else template, settings)


def _try_template_file(folder: Path) -> None:
    settings = _read_settings(folder) if (folder / _SETTINGS).is_file() else {}
    _try_template((folder / _TEMPLATE).read_text(encoding="utf-8"), settings)


def _read_settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"holds a {type(settings).__name__}, but must hold one JSON object")
    return settings


def _try_template(template: object, settings: Mapping[str, Any]) -> None:
    if not isinstance(template, str):
        return
    marks = {key: value["content"] if isinstance(value, dict) else value for key, value in settings.items()
             if key.endswith("_token") and isinstance(value, str | dict)}  # fmt: skip
    for messages, tools in _CONVERSATIONS:
        check_growth(_rendered(template, messages, tools, marks), template, messages, tools)


def _rendered(template: str, messages: list[Any], tools: list[Any] | None, marks: Mapping[str, Any]) -> str:
    """The messages in the template, or nothing where it refuses them."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        found: Any = render_jinja_template(
            [messages], tools, chat_template=template, add_generation_prompt=True, **marks
        )
    except TemplateSyntaxError as error:
        raise ValueError(f"is no template ({type(error).__name__}: {error.message}, line {error.lineno})") from None
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return ""
    return found[0][0]
