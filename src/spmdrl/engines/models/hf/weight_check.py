"""Opening a folder's weights for a decoder: each expected weight is present in its whole shape, and nothing else.

Every reader of a model folder's weights uses `open_weights`. Weights that transformers loads with just a warning
(missing, unexpected or reshaped ones) are refused, except harmless leftovers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import (
    count_prediction_layers,
    parameter_shapes,
    quantization_of,
    stored_forms,
)
from spmdrl.engines.models.hf.model_weights import VALUE_HEAD, WeightFiles
from spmdrl.nouns.batch import WeightSlice

_EMBEDDING = "model.embed_tokens.weight"
_LANGUAGE_HEAD = "lm_head.weight"
_DTYPES = ("F64", "F32", "F16", "BF16")
_ROWS_AT_A_TIME = 4096
_MOST_NAMED = 3


def open_weights(folder: str | Path, config: DecoderConfig) -> WeightFiles:
    """Return the weights of a folder whose config.json holds `config`; raises ValueError unless they fit exactly.

    Reads the headers of all files; values only of a tied head that is stored beside the embedding.
    """
    files = WeightFiles(folder, stored_forms(config), quantization_of(folder))
    stored, expected = set(files.names), parameter_shapes(config)
    _check_names(files, stored, expected, config)
    for name in sorted(expected):
        _check_weight(files, name, expected[name])
    # transformers uses a stored head, whatever the config has.
    if config.tied_head and _LANGUAGE_HEAD in stored and not _are_equal(files, _LANGUAGE_HEAD, _EMBEDDING):
        raise ValueError(
            f'config.json in {files.folder} says "tie_word_embeddings": true, but {_LANGUAGE_HEAD} and {_EMBEDDING} '
            "differ; set it to false to use the stored head, as transformers does, or remove that weight to use the "
            "embedding"
        )
    return files


def _check_names(files: WeightFiles, stored: set[str], expected: Iterable[str], config: DecoderConfig) -> None:
    lacking, extra = sorted(set(expected) - stored), sorted(stored.difference(expected))
    if extra:
        # DeepSeek-V3 stores layers that predict further tokens after the decoder's; their own projection distinguishes
        # them from surplus decoder layers.
        layers = range(config.num_layers, config.num_layers + count_prediction_layers(files.folder))
        prefixes = tuple(f"model.layers.{i}." for i in layers if f"model.layers.{i}.eh_proj.weight" in stored)
        extra = [name for name in extra if not name.startswith(prefixes) and not _is_harmless(name, config)]
    if not lacking and not extra:
        return
    problems = []
    if lacking:
        problems.append(f"lacks {_some(files, lacking)}")
    if extra:
        problems.append(f"holds {_some(files, extra)}, for which the config has no place")
    hint = "; do config.json and the weights belong together?"
    if lacking == [_LANGUAGE_HEAD]:
        hint = '; if the head is the embedding, set "tie_word_embeddings": true in config.json'
    raise ValueError(f"{files.folder} {' and '.join(problems)}{hint}")


def _some(files: WeightFiles, weights: list[str]) -> str:
    """Return the first few of the stored tensors that hold these weights."""
    names = [*dict.fromkeys(map(files.stored_name, weights))]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _is_harmless(name: str, config: DecoderConfig) -> bool:
    """Return True if omitting a stored weight changes nothing that this decoder computes."""
    # Old folders hold the rotary frequencies of each layer, which follow from config.json.
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    indexer = None if config.latent is None else config.latent.indexer
    if indexer is not None and ".self_attn.indexer." in name:
        return name.split(".")[2] in map(str, indexer.shared_layers)
    if config.head == "value":
        # Head of the original language model; the reader refuses a bias other than 0.
        return name in (_LANGUAGE_HEAD, "score.bias")
    # Head of a value model; a head beside a tied one is compared with the embedding.
    return name == VALUE_HEAD or (name == _LANGUAGE_HEAD and config.tied_head)


def _check_weight(files: WeightFiles, name: str, expected: tuple[int, ...]) -> None:
    if (shape := files.shape(name)) != expected:
        raise ValueError(
            f"{name} in {files.folder} has shape {shape}, but config.json makes it {expected}; do config.json and the "
            "weights belong together?"
        )
    if (dtype := files.dtype(name)) not in _DTYPES:
        raise ValueError(
            f"{name} in {files.folder} is stored as {dtype}, but weights are read as {', '.join(_DTYPES)} only; give "
            "the model's unquantized weights"
        )


def _are_equal(files: WeightFiles, one: str, other: str) -> bool:
    """Return True if two matrices have one shape and equal values; few rows of them are in memory at a time."""
    if files.shape(one) != files.shape(other):
        return False
    rows, columns = files.shape(one)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        box = (start, 0), (min(start + _ROWS_AT_A_TIME, rows), columns)
        values = [files.read(WeightSlice(name, *box)).to(torch.float64) for name in (one, other)]
        if not torch.equal(*values):
            return False
    return True
