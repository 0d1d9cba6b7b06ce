"""A Hugging Face folder with the dequantised float32 weights of a GGUF file: gguf_to_folder.py FILE.gguf FOLDER.

The folder appears whole or not at all. Needs the extra `gguf`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main(source: Path, target: Path) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    model = without_quantization(packed)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    check_same(packed, AutoModelForCausalLM.from_pretrained(part), tokenizer)
    part.rename(target)


def without_quantization(packed: torch.nn.Module) -> torch.nn.Module:
    """The same weights in a model whose config has no `quantization_config`, which transformers refuses to save.

    Raises RuntimeError if weights are still in blocks.
    """
    config = type(packed.config).from_dict(
        {key: value for key, value in packed.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    return model


@torch.no_grad()
def check_same(expected: torch.nn.Module, found: torch.nn.Module, tokenizer: object) -> None:
    """Raise ValueError unless two models rate the same tokens alike."""
    ids = tokenizer("Calculate 35 - 3.", return_tensors="pt").input_ids
    distance = (expected(ids).logits - found(ids).logits).abs().max().item()
    # Not a number is no small distance.
    if not distance < 1e-4:
        raise ValueError(f"the saved model's logits differ by {distance:g} from those of the GGUF file")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
