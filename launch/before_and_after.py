"""Held-out questions with a run's first and last answers, and its model's in transformers: before_and_after.py RUN."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

NUM_SHOWN = 8


def main(run: Path) -> None:
    evaluations = sorted((run / "eval").glob("step_*.jsonl"))
    if len(evaluations) < 2:
        return
    before, after = read_lines(evaluations[0]), read_lines(evaluations[-1])
    shown = range(0, len(before), -(-len(before) // NUM_SHOWN))
    folder = json.loads((run / "summary.json").read_text())["checkpoint"]
    dtype, answers = answers_of(folder, [after[row]["prompt"] for row in shown])
    lines = [f"{'held-out question':24s} {'before':30s} {'after':30s} after, by transformers in {dtype} from {folder}"]
    for row, text in zip(shown, answers, strict=True):
        question = after[row]["id"].rpartition("#")[2]
        lines.append(f"{question:24s} {described(before[row]):30s} {described(after[row]):30s} {text!r}")
    sys.stdout.write("\n".join(["", *lines, ""]))


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def described(record: dict) -> str:
    return f"{record['response']!r} {'right' if record['reward'] else 'wrong'}"


@torch.no_grad()
def answers_of(folder: str, prompts: list[str]) -> tuple[torch.dtype, list[str]]:
    """The folder's dtype, which is the run's, and greedy answers in it to prompts that are rendered already."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # In float32 some answers would be others than those of the run.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    answers = []
    for prompt in prompts:
        tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        ids = model.generate(**tokens, do_sample=False, max_new_tokens=12)[0, tokens.input_ids.shape[1] :]
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    return model.dtype, answers


if __name__ == "__main__":
    main(Path(sys.argv[1]))
