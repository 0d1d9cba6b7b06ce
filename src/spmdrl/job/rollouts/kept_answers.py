"""Responses of `generate`, stored as they end: a job that dies loses none, and repeating the command continues.

absent -> begun: a file per replica, a line per response -> complete, gathered -> absent
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from spmdrl.config.config import Config
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.stages.reward import turns_record
from spmdrl.dataflow.stages.rollout.requests import row_seed
from spmdrl.engines.generation.protocol import Request, Response
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.training.checkpoints.manifest import sync_file
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import Replica
from spmdrl.nouns.settings.rollout_config import SamplingParams
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.world import World

FOLDER = "generated.parts"
_IDENTITY = "identity.json"
_PARTS = "rank_*.jsonl"


class KeptAnswers:
    """Responses so far of one `generate`, JSON objects that have a `row`, in append-only files.

    Ranks needn't see each other's files. A rank that generates appends to its own.
    """

    def __init__(self, results: Path, identity: Mapping[str, object], world: World):
        """`identity` must not change between the parts of one `generate`; the main rank's holds. Collective."""
        self.folder = results / FOLDER
        self._identity = json.loads(gather_bytes(json.dumps(identity).encode())[0])
        self._world = world
        self._file: BinaryIO | None = None

    def put_aside(self) -> None:
        """Move an interrupted `generate`'s files out of the way; nothing is deleted. Collective."""
        number = 1
        while (aside := self.folder.with_name(f"{FOLDER}.{number}")).exists():
            number += 1
        # If ranks see the same folder, one of them moves it.
        with contextlib.suppress(FileNotFoundError):
            self.folder.rename(aside)
        barrier()

    def rows(self) -> set[int]:
        """Return the finished rows. Collective.

        Raises ValueError on every rank if the folder holds responses to something else.
        """
        differences = [item.decode() for item in gather_bytes(self._difference().encode()) if item]
        if differences:
            raise ValueError(
                f"{self.folder} holds the answers of an interrupted `generate` with other settings: {differences[0]}; "
                "give it the same ones to go on, another run.dir, or resume=never to start anew"
            )
        return set().union(*self._rows_by_rank())

    def add(self, answers: Sequence[Mapping[str, object]]) -> None:
        """Append responses to this rank's file, where they survive any end of this process."""
        if self._file is None:
            self._file = self._opened()
        self._file.write("".join(f"{json.dumps(answer)}\n" for answer in answers).encode())
        self._file.flush()

    def gathered(self) -> list[str]:
        """Return all lines in row order, on the main rank; none on the others. Collective."""
        if self._file is not None:
            self._file.close()
        rows_by_rank = self._rows_by_rank()
        # The main rank reads the files that are visible to it; each other row comes from the first rank that finds it.
        found_before = set().union(*rows_by_rank[: self._world.rank])
        brought = "".join(line for row, line in self._lines() if row not in found_before) if self._world.rank else ""
        gathered = gather_bytes(brought.encode())
        if not self._world.is_main:
            return []
        lines = dict(self._lines())
        for part in gathered:
            lines |= {json.loads(line)["row"]: line for line in part.decode().splitlines(keepends=True)}
        return [lines[row].rstrip("\n") for row in sorted(lines)]

    def drop(self) -> None:
        """Delete the files, once their responses are stored elsewhere. Collective."""
        barrier()
        if self._world.local_rank == 0:
            # Another node may delete the same folder.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _rows_by_rank(self) -> list[set[int]]:
        """Return the rows whose responses each rank finds."""
        own = json.dumps([row for row, _ in self._lines()])
        return [set(json.loads(part)) for part in gather_bytes(own.encode())]

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield row and line of each whole response; a killed rank may leave half a line, and a disk a damaged one."""
        for path in sorted(self.folder.glob(_PARTS)):
            with path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n") and (row := _row_of(line)) is not None:
                        yield row, line.decode("ascii")

    def _difference(self) -> str:
        path = self.folder / _IDENTITY
        try:
            before = json.loads(path.read_bytes()) if path.is_file() else self._identity
        except (ValueError, RecursionError):
            before = None
        if not isinstance(before, dict):
            return f"{path} is damaged"
        return "; ".join(
            f"{key} was {before.get(key)!r} and is {value!r}"
            for key, value in self._identity.items()
            if before.get(key) != value
        )

    def _opened(self) -> BinaryIO:
        """Open this rank's file, without half a line at its end, beside a record of the identity."""
        self.folder.mkdir(parents=True, exist_ok=True)
        identity = self.folder / _IDENTITY
        if not identity.exists():
            unfinished = self.folder / f"{_IDENTITY}.{self._world.rank}"
            unfinished.write_text(json.dumps(self._identity))
            sync_file(unfinished)
            unfinished.replace(identity)
        path = self.folder / _PARTS.replace("*", f"{self._world.rank:05d}")
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        return path.open("ab")


def _row_of(line: bytes) -> int | None:
    """Return the row of a response, or None for a line that `add` can't have written."""
    try:
        # Written text is ASCII, so another byte is damage.
        content = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):
        return None
    row = content.get("row") if isinstance(content, dict) else None
    return row if type(row) is int and row >= 0 else None


def open_requests(
    config: Config, prompts: Sequence[Prompt], replica: Replica, sampling: SamplingParams, done: set[int],
    max_positions: int,
) -> list[Request]:  # fmt: skip
    """Return this replica's requests: its prompts' unfinished rows. Answers end at the model's last position."""
    size, requests = config.eval.num_samples, []
    for number in replica.share_of(len(prompts)):
        rows = tuple(row for row in range(number * size, (number + 1) * size) if row not in done)
        seeds = tuple(row_seed(config.seed, 0, row) for row in rows)
        prompt_ids = tuple(prompts[number].prompt_ids)
        # A prompt that fills all positions is refused by the engine, with its length.
        num_left = max(1, max_positions - len(prompt_ids))
        limited = replace(sampling, max_tokens=num_left) if num_left < sampling.max_tokens else sampling
        if rows:
            requests.append(Request(rows, prompt_ids, seeds, limited))
    return requests


def identity_of_answers(config: Config, source: ModelSource, prompts: Sequence[Prompt]) -> dict[str, object]:
    """Return the settings and inputs that answers depend on; those of an interrupted run must be the same."""
    rollout = config.rollout
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(source.folder.iterdir())]
    adapters = "" if source.adapters is None else f", adapters {source.adapters.digest}"
    return {
        "the model": f"{source.folder}, files {_digest(files)}{adapters}",
        "the prompts": f"{len(prompts)}, tokens {_digest([prompt.prompt_ids for prompt in prompts])}",
        "seed": config.seed,
        "eval.num_samples": config.eval.num_samples,
        "rollout.temperature": rollout.temperature,
        "rollout.top_p": rollout.top_p,
        "rollout.top_k": rollout.top_k,
        "rollout.min_p": rollout.min_p,
        "rollout.max_completion_length": rollout.max_completion_length,
        "rollout.stop": list(rollout.stop),
        "rollout.ignore_eos": rollout.ignore_eos,
        **({config.environment.key: ", ".join(config.environment.specs)} if config.environment.key else {}),
    }


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def answer_record(prompt: Prompt, response: Response, tokenizer: ModelTokenizer) -> dict[str, object]:
    return {
        "row": response.row,
        "prompt": prompt.text,
        "response": tokenizer.decode(response.token_ids),
        "finish": response.finish,
        "logprob": sum(response.logprobs),
        **turns_record(response, tokenizer.decode),
    }
