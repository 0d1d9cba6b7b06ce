"""spmdrl from Python: training, evaluation and answers by one call each, and finished runs as rows.

Each function takes a configuration as the command line does, as a file, a mapping or both, and runs in this process:
one rank, or a launcher's ranks if it started the script. Wrong input is a ValueError with all faults.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import yaml

from spmdrl.config.config import Config, load_config
from spmdrl.config.given import inline, shortened
from spmdrl.config.reader import LoadedConfig
from spmdrl.observability.jsonl import read_jsonl, write_atomic
from spmdrl.observability.summary import read_summary
from spmdrl.runtime.launch import read_launch_environment
from spmdrl.runtime.supervision.stop_request import request

Settings: TypeAlias = "str | Path | Mapping[str, Any] | Sequence[str | Path] | None"
"""a YAML file, several, or a mapping of keys, with or without their sections"""


@dataclass(frozen=True)
class RunRecord:
    """A run's folder, read as rows: pandas.DataFrame(record.metrics) is a table of its steps."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each step."""
        return list(read_jsonl(self.folder / "metrics.jsonl"))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Prompts, responses and rewards of the steps that kept them."""
        return list(read_jsonl(self.folder / "samples.jsonl"))

    @property
    def summary(self) -> dict[str, Any]:
        """Results of the run, empty before its end."""
        return dict(read_summary(self.folder))

    @property
    def model(self) -> Path:
        """Folder of the newest model, which transformers opens too."""
        found = sorted(self.folder.glob("checkpoints/step_*/model"))
        if not found:
            raise ValueError(f"{self.folder} has no checkpoint; one is saved at the end, or every checkpoint.interval")
        return found[-1]


def read_run(folder: str | Path) -> RunRecord:
    """Return a run's record. Raises ValueError if the folder is none of a run's."""
    path = Path(folder).expanduser()
    if not (path / "config.resolved.yaml").is_file():
        raise ValueError(f"{path} is no run's folder: it has no config.resolved.yaml; runs are in runs/NAME or run.dir")
    return RunRecord(path)


def train(config: Settings = None, **settings: Any) -> RunRecord:
    """Train with rewards, as `spmdrl train` does; calling it again resumes from the newest checkpoint.

    `settings` are sections or keys, those of other trainers too: optim={"lr": 1e-6}, num_generations=8. A reward may be
    a Python function: reward={"functions": [score]}.
    """
    from spmdrl.verbs.train import main

    loaded = _loaded("train", config, settings)
    with _stopping():
        main(loaded)
    return read_run(loaded.value.run.folder)


def evaluate(config: Settings = None, **settings: Any) -> dict[str, Any]:
    """Return mean reward, accuracy and the other results of a model on data.eval, as `spmdrl eval` writes them."""
    from spmdrl.verbs.evaluate import evaluated

    return evaluated(_loaded("eval", config, settings))


def generate(prompts: Sequence[str], config: Settings = None, **settings: Any) -> list[str]:
    """Return a model's responses to prompts, eval.num_samples for each, sampled as the section rollout says."""
    with Policy(_loaded("generate", config, settings)) as policy:
        return policy.generate(prompts)


class Policy:
    """A model that answers, open until `close` or the end of a `with` block."""

    def __init__(self, loaded: LoadedConfig[Config]):
        """Open the model. Collective over all ranks."""
        from spmdrl.job.rollouts.open_model import open_model

        self._stack = ExitStack()
        self._model = self._stack.enter_context(open_model(loaded))

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> Policy:
        """Open a model folder, a checkpoint's or a run's, with settings as those of `spmdrl generate`."""
        return cls(_loaded("generate", {"model.path": str(path)}, settings))

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """Return the responses to prompts in their order, eval.num_samples for each."""
        return self._model.answers(prompts)

    def close(self) -> None:
        """Give memory and connections back."""
        self._stack.close()

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loaded(verb: str, config: Settings, settings: Mapping[str, Any]) -> LoadedConfig[Config]:
    """Load a configuration from files and mappings, the later of which win."""
    several = [config] if isinstance(config, str | Path | Mapping) else config or []
    words = [word for given in (*several, settings) if isinstance(given, Mapping) for word in _words(given)]
    return load_config([Path(file) for file in several if not isinstance(file, Mapping)], words, verb)


def _words(given: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield a mapping's values as on the command line; functions by the files that they are in."""
    for name, value in given.items():
        key = f"{section}.{name}" if section else name
        if isinstance(value, Mapping) and value:
            yield from _words(value, key)
        else:
            try:
                word = inline(_written(value))
            except yaml.YAMLError:
                must = "text, a number, a function, or a list or mapping of these"
                raise ValueError(f"{key} is {shortened(repr(value))}, but must be {must}") from None
            yield f"{key}={word}"


def _written(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _written(item) for name, item in value.items()}
    # Scalars and arrays of numpy and torch.
    value = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if isinstance(value, Path) else _spec(value) if callable(value) else value


def _spec(function: Callable[..., Any]) -> str:
    """Return MODULE:NAME of a function, whose own process imports it; one typed in a notebook is written to a file.

    Raises ValueError for one without a name or text of its own, or that needs more than its text.
    """
    name, module = getattr(function, "__qualname__", repr(function)), function.__module__
    if not name.isidentifier():
        raise ValueError(f"{name} has no name of its own to import it by; define it by def, at the top of a module")
    if module != "__main__":
        return f"{module}:{name}"
    # Types of parameters, which nothing reads, need no import.
    text = "from __future__ import annotations\n\n\n"
    try:
        text += textwrap.dedent(inspect.getsource(function))
        used = sorted(_names_from_outside(text))
    except (OSError, TypeError, SyntaxError) as error:
        way_out = "put it into a file, and name that, as in rewards.py:score"
        raise ValueError(f"{name} can't be copied ({error}); {way_out}") from error
    if used:
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is not None and "__main__" in Path(file).read_text(encoding="utf-8"):
            return f"{Path(file).absolute()}:{name}"
        raise ValueError(
            f"{name} uses {', '.join(used)} from outside of it; import or define it inside the function, or put both "
            "into a file of their own and name that, as in rewards.py:score"
        )
    # Not in /tmp, where others could put a file of that name; the same on all ranks, which compare their settings.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spmdrl" / "functions"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = cache / f"{name}_{sha256(text.encode()).hexdigest()[:16]}.py"
    write_atomic(path, text)
    return f"{path}:{name}"


def _names_from_outside(text: str) -> set[str]:
    """Return the names that a module's text reads, in its functions too, and neither it nor Python defines."""
    codes = [compile(text, "<text>", "exec")]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    steps = [step for code in codes for step in dis.get_instructions(code)]
    read = {step.argval for step in steps if step.opname in ("LOAD_NAME", "LOAD_GLOBAL")}
    written = {step.argval for step in steps if step.opname in ("STORE_NAME", "STORE_GLOBAL")}
    return {name for name in read - written if not hasattr(builtins, name) and not name.startswith("__")}


@contextmanager
def _stopping() -> Iterator[None]:
    """Save and end on signals, as the command does, where this thread may handle them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with request.handling_signals(read_launch_environment(os.environ).rank):
        request.begin_set_up()
        yield
