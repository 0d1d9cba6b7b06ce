"""The head in config.json: a language model's, or the value head of a critic or reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from spmdrl.engines.models.hf.config_values import entries, values, whole_number

_LANGUAGE_MODEL = "ForCausalLM"
_VALUE_MODEL = "ForSequenceClassification"
_VALUE_MODELS = (_VALUE_MODEL, "ForTokenClassification")


def read_head(raw: Mapping[str, Any]) -> Literal["vocab", "value"]:
    """Which head transformers' class has; raises ValueError for a classifier of anything but one label."""
    classifiers = [name for name in values(raw, "architectures", str) if name.endswith(_VALUE_MODELS)]
    if not classifiers:
        return "vocab"
    num_labels = _num_labels(raw)
    if num_labels != 1:
        raise ValueError(
            f"architectures names {classifiers[0]} with {num_labels} labels, but a value head says one number a "
            "token; give a model with num_labels 1"
        )
    return "value"


def _num_labels(raw: Mapping[str, Any]) -> int:
    """transformers writes the labels' names unless they are two; their number is an older key."""
    return len(entries(raw, "id2label")) or whole_number(raw, "num_labels", 2)


def write_head(language_model: str, head: Literal["vocab", "value"]) -> dict[str, Any]:
    """The entries of config.json, from the name of the family's language model class."""
    if head == "vocab":
        return {"architectures": [language_model]}
    return {
        "architectures": [language_model.removesuffix(_LANGUAGE_MODEL) + _VALUE_MODEL],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
