"""Random edits of model folders: each folder computes here what transformers computes, or is refused.

SPMDRL_FUZZ=300 tries 300 folders, and SPMDRL_FUZZ_SEED=1 others.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as their_logging

from tests.engines.models.support import load_decoder, packed_logits, random_rows
from tests.engines.models.test_transformers_parity import CASES, tiny_model
from tests.engines.models.weight_folders import INDEX, ModelFolder, edited

NUM_FOLDERS = int(os.environ.get("SPMDRL_FUZZ", "24"))
SEED = int(os.environ.get("SPMDRL_FUZZ_SEED", "0"))
LENGTH = 40
# transformers checks their types and does nothing with them here.
WITHOUT_EFFECT = {
    "initializer_range", "attention_dropout", "output_router_logits", "router_aux_loss_coef", "use_cache",
    "pretraining_tp", "residual_dropout",
}  # fmt: skip
# What may be stored without a place in the model, beside layers for further tokens, which have an eh_proj.
LEFTOVERS = ("lm_head.weight", "score.weight", "rotary_emb.inv_freq", "eh_proj.weight")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[ModelFolder]:
    """Each family as transformers writes it, every second one in several files."""
    found = []
    for number, case in enumerate(CASES.values()):
        folder = tmp_path_factory.mktemp("model")
        tiny_model(case).save_pretrained(folder, max_shard_size="40KB" if number % 2 else "1GB")
        found.append(ModelFolder.read(folder))
    return found


def test_edited_folders_compute_what_transformers_computes_or_are_refused(
    folders: list[ModelFolder], tmp_path: Path
) -> None:
    their_logging.set_verbosity(50)
    their_logging.disable_progress_bar()
    failures, num_accepted = [], 0
    for number in range(NUM_FOLDERS):
        rng = Random(f"{SEED}:{number}")  # noqa: S311
        folder, edit = edited(rng.choice(folders), rng)
        folder.write(tmp_path / "folder")
        ours = logits_here(tmp_path / "folder")
        num_accepted += isinstance(ours, Tensor)
        if problem := problem_with(ours, tmp_path / "folder"):
            failures.append(f"{number} {folder.config.get('model_type')}: {edit}: {problem}")
        shutil.rmtree(tmp_path / "folder")
    assert not failures, "\n".join(failures)
    assert 0.1 * NUM_FOLDERS < num_accepted < 0.9 * NUM_FOLDERS


def row() -> Tensor:
    return random_rows([LENGTH], vocab_size=60)[0]


def logits_here(folder: Path) -> Tensor | Exception:
    """What the decoder computes of a folder, or why it doesn't."""
    try:
        decoder = load_decoder(folder)
        with torch.no_grad():
            return packed_logits(decoder, [row()])[0]
    except Exception as error:  # anything but a ValueError is judged below
        return error


def problem_with(ours: Tensor | Exception, folder: Path) -> str | None:
    """What is wrong with a refusal, or how transformers' own loading of the folder differs from ours."""
    if isinstance(ours, Exception):
        is_refusal = isinstance(ours, ValueError) and "\n" not in str(ours)
        return None if is_refusal else f"raised {ours!r} at {''.join(traceback.format_tb(ours.__traceback__)[-1:])}"
    try:
        theirs, report = logits_there(folder)
    except Exception as error:  # transformers raises whatever its config, its layers and safetensors raise
        return f"refused by transformers: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if report["missing_keys"] or report["mismatched_keys"]:
        return f"loaded with {report['missing_keys']} {report['mismatched_keys']}"
    if left_out := [name for name in report["unexpected_keys"] if not name.endswith(LEFTOVERS)]:
        return f"left out {left_out}"
    if theirs.shape != ours.shape:
        return f"logits of shape {tuple(theirs.shape)}, ours {tuple(ours.shape)}"
    difference = (theirs - ours).abs().max().item()
    return None if difference < 1e-4 else f"logits differ by {difference}"


def logits_there(folder: Path) -> tuple[Tensor, dict[str, Any]]:
    """What transformers computes of a folder, and its report of the loading.

    `WITHOUT_EFFECT` is left out, an index without metadata gets some, and a whole factor becomes a float.
    """
    content = json.loads((folder / "config.json").read_text())
    without = {key: value for key, value in content.items() if key not in WITHOUT_EFFECT}
    if isinstance(scale := without.get("routed_scaling_factor"), int):
        without["routed_scaling_factor"] = float(scale)
    (folder / "config.json").write_text(json.dumps(without))
    index = folder / INDEX
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, **json.loads(index.read_text())}))
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    with torch.no_grad():
        return model.eval()(row()[None]).logits[0], report
