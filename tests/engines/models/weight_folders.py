"""Tiny model folders as transformers writes them, and seeded edits of their config, index, tensors and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class ModelFolder:
    """A model folder in memory; edits change it, `write` puts it on disk."""

    config: dict[str, Any]
    files: dict[str, dict[str, Tensor]]
    index: dict[str, Any] | None
    others: dict[str, str] = field(default_factory=dict)
    """JSON and other text files beside these."""
    cut: dict[str, int] = field(default_factory=dict)
    """Bytes that are cut off the end of a file once it is written."""

    @classmethod
    def read(cls, folder: Path) -> ModelFolder:
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                files[path.name] = {name: file.get_tensor(name) for name in file.keys()}
        index = folder / INDEX
        config = json.loads((folder / "config.json").read_text())
        return cls(config, files, json.loads(index.read_text()) if index.exists() else None)

    def copy(self) -> ModelFolder:
        """A copy whose tensors are shared: edits replace tensors, and never change one."""
        files = {name: dict(tensors) for name, tensors in self.files.items()}
        return ModelFolder(deepcopy(self.config), files, deepcopy(self.index))

    def write(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.index is not None:
            (folder / INDEX).write_text(json.dumps(self.index))
        for name, text in self.others.items():
            (folder / name).write_text(text)
        for name, tensors in self.files.items():
            path = folder / name
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path, {"format": "pt"})
            if name in self.cut:
                path.write_bytes(path.read_bytes()[: -self.cut[name]])


Edit = Callable[[ModelFolder, Random], str]
"""Changes a folder in memory and returns what it did."""


def edited(folder: ModelFolder, rng: Random) -> tuple[ModelFolder, str]:
    """A copy with one edit, or sometimes two."""
    folder = folder.copy()
    edits = rng.choices(list(EDITS), weights=list(EDITS.values()), k=rng.choice((1, 1, 1, 2)))
    return folder, "; ".join(edit(folder, rng) for edit in edits)


def change_value(folder: ModelFolder, rng: Random) -> str:
    """Another value of the same type for an entry of config.json or of its rotary parameters."""
    entries, key = _an_entry(folder, rng)
    value = entries[key]
    if isinstance(value, bool):
        entries[key] = not value
    elif isinstance(value, int):
        entries[key] = rng.choice((value + 1, value - 1, value * 2, value // 2, 0, -value))
    elif isinstance(value, float):
        entries[key] = rng.choice((value * 2, value / 2, value + 1, 0.0, -value, int(value)))
    elif isinstance(value, list):
        entries[key] = rng.choice((value[:-1], [*value, *value[:1]], [0], list(reversed(value))))
    elif isinstance(value, str):
        entries[key] = rng.choice(WORDS)
    elif isinstance(value, dict):
        entries[key] = {}
    else:
        entries[key] = rng.choice((1, 2, 7, True, "silu", 0.5))
    return f"{key} {value!r} -> {entries[key]!r}"


def change_type(folder: ModelFolder, rng: Random) -> str:
    entries, key = _an_entry(folder, rng)
    value = entries[key]
    entries[key] = rng.choice((None, str(value), [value], {"value": value}, 1.5, 3, True, False, "", []))
    return f"{key} {value!r} -> {entries[key]!r}"


def remove_entry(folder: ModelFolder, rng: Random) -> str:
    entries, key = _an_entry(folder, rng)
    return f"{key} {entries.pop(key)!r} removed"


def rename_entry(folder: ModelFolder, rng: Random) -> str:
    entries, key = _an_entry(folder, rng)
    name = rng.choice((key + "s", key.upper(), key[:-1], "model_" + key))
    entries[name] = entries.pop(key)
    return f"{key} renamed to {name}"


def add_entry(folder: ModelFolder, rng: Random) -> str:
    key = rng.choice(sorted(ADDED))
    folder.config[key] = rng.choice(ADDED[key])
    return f"{key} = {folder.config[key]!r}"


def change_activation(folder: ModelFolder, rng: Random) -> str:
    folder.config["hidden_act"] = rng.choice(("gelu", "relu", "swish", "gelu_pytorch_tanh", "silu", None, "SiLU"))
    return f"hidden_act = {folder.config['hidden_act']!r}"


def flip_tying(folder: ModelFolder, rng: Random) -> str:
    folder.config["tie_word_embeddings"] = not folder.config.get("tie_word_embeddings", False)
    return f"tie_word_embeddings = {folder.config['tie_word_embeddings']}"


def store_head(folder: ModelFolder, rng: Random) -> str:
    """Store a head that is the embedding, nearly so, or another one."""
    stored = [tensors for tensors in folder.files.values() if "model.embed_tokens.weight" in tensors]
    if not stored:
        return "no embedding left to store as the head"
    embedding = stored[0]["model.embed_tokens.weight"]
    kind = rng.choice(("same", "near", "other", "cut"))
    head = {"same": embedding, "near": embedding.clone(), "other": torch.randn(embedding.shape), "cut": embedding[1:]}
    head["near"][-1, -1] += 1
    _put(folder, rng, "lm_head.weight", head[kind])
    return f"lm_head.weight stored, {kind} as the embedding"


def remove_tensor(folder: ModelFolder, rng: Random) -> str:
    tensors, name = _a_tensor(folder, rng)
    del tensors[name]
    if folder.index is not None and rng.random() < 0.8:
        folder.index["weight_map"].pop(name, None)
    return f"{name} removed"


def rename_tensor(folder: ModelFolder, rng: Random) -> str:
    tensors, name = _a_tensor(folder, rng)
    new = rng.choice((name.removeprefix("model."), name.removesuffix(".weight"), name + "s", name.replace("0", "7"),
                      name.replace("proj", "projection"), "base_model." + name, name.upper()))  # fmt: skip
    tensors[new] = tensors.pop(name)
    if folder.index is not None:
        folder.index["weight_map"][new] = folder.index["weight_map"].pop(name, SINGLE)
    return f"{name} renamed to {new}"


def swap_tensors(folder: ModelFolder, rng: Random) -> str:
    (one, first), (other, second) = _a_tensor(folder, rng), _a_tensor(folder, rng)
    one[first], other[second] = other[second], one[first]
    return f"{first} and {second} swapped"


def reshape_tensor(folder: ModelFolder, rng: Random) -> str:
    tensors, name = _a_tensor(folder, rng)
    value = tensors[name]
    dim = rng.randrange(value.dim())
    shapes = (
        value.narrow(dim, 0, value.shape[dim] - 1), torch.cat((value, value.narrow(dim, 0, 1)), dim),
        value.mT if value.dim() > 1 else value[:0],
        value[None], value.flatten(), value[..., None], value.repeat_interleave(2, dim),
    )  # fmt: skip
    tensors[name] = rng.choice(shapes)
    return f"{name} {tuple(value.shape)} -> {tuple(tensors[name].shape)}"


def change_dtype(folder: ModelFolder, rng: Random) -> str:
    tensors, name = _a_tensor(folder, rng)
    dtype = rng.choice((torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
                        torch.float8_e4m3fn, torch.uint8))  # fmt: skip
    tensors[name] = tensors[name].to(dtype)
    return f"{name} as {dtype}"


def add_tensor(folder: ModelFolder, rng: Random) -> str:
    tensors, near = _a_tensor(folder, rng)
    num_layers = folder.config.get("num_hidden_layers", 3)
    value = tensors[near]
    names = (
        near.replace(".weight", ".bias"), f"model.layers.{num_layers}.mlp.up_proj.weight", "score.weight", "score.bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.q_norm.weight", "lm_head.bias",
        "model.layers.0.self_attn.q_proj.lora_A.weight", "v_head.weight", "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_proj.weight_scale_inv", "model.norm.bias",
        f"model.layers.{num_layers}.eh_proj.weight", "model.layers.1.mlp.experts.9.down_proj.weight", "weight",
    )  # fmt: skip
    name = rng.choice(names)
    _put(folder, rng, name, rng.choice((value, torch.ones(3), value[:1])).clone())
    return f"{name} added"


def change_index(folder: ModelFolder, rng: Random) -> str:
    if folder.index is None:
        folder.index = {"metadata": {}, "weight_map": dict.fromkeys(folder.files[SINGLE], SINGLE)}
    weights = folder.index["weight_map"]
    if not isinstance(weights, dict) or not weights:
        return "index: none left to change"
    first, second = rng.choice(sorted(weights)), rng.choice(sorted(weights))
    kind = rng.choice(("remove", "swap", "file", "name", "type", "empty", "both", "metadata", "none"))
    if kind == "remove":
        del weights[first]
    elif kind == "swap":
        weights[first], weights[second] = weights[second], weights[first]
    elif kind == "file":
        weights[first] = rng.choice(("absent.safetensors", "../a.safetensors", "", "config.json", ".", "/etc/passwd"))
    elif kind == "name":
        weights[first + "x"] = weights.pop(first)
    elif kind == "type":
        weights[first] = rng.choice((None, 1, [weights[first]]))
    elif kind == "empty":
        folder.index["weight_map"] = rng.choice(({}, [], None, "all"))
    elif kind == "both":
        folder.files[SINGLE] = {**folder.files.get(SINGLE, {}), **next(iter(folder.files.values()))}
    elif kind == "metadata":
        folder.index.pop("metadata", None)
    return f"index: {kind} {first}"


def cut_file(folder: ModelFolder, rng: Random) -> str:
    name = rng.choice(sorted(folder.files))
    folder.cut[name] = rng.choice((1, 8, 100, 1000))
    return f"{name} cut by {folder.cut[name]} bytes"


def add_file(folder: ModelFolder, rng: Random) -> str:
    name, text = rng.choice((
        ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "x", "r": 1}'),
        ("model-00009-of-00009.safetensors", "x"), ("pytorch_model.bin", "x"), ("generation_config.json", "{}"),
        ("other.safetensors", "x"),
    ))  # fmt: skip
    folder.others[name] = text
    return f"{name} added"


def _an_entry(folder: ModelFolder, rng: Random) -> tuple[dict[str, Any], str]:
    """An entry of config.json, or of a dict in it."""
    nested = [value for value in folder.config.values() if isinstance(value, dict) and value]
    entries = rng.choice(nested) if nested and rng.random() < 0.25 else folder.config
    return entries, rng.choice(sorted(entries))


def _a_tensor(folder: ModelFolder, rng: Random) -> tuple[dict[str, Tensor], str]:
    tensors = rng.choice([tensors for _, tensors in sorted(folder.files.items()) if tensors])
    return tensors, rng.choice(sorted(tensors))


def _put(folder: ModelFolder, rng: Random, name: str, value: Tensor) -> None:
    file = rng.choice(sorted(folder.files))
    folder.files[file][name] = value
    if folder.index is not None and isinstance(folder.index.get("weight_map"), dict):
        folder.index["weight_map"][name] = file


WORDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "mistral", "smollm3", "gemma", "yarn", "llama3",
         "linear", "default", "dynamic", "longrope", "gelu", "silu", "float16", "LlamaForCausalLM", "")  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ADDED: dict[str, list[Any]] = {
    "sliding_window": [4, 1000, 0, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 3],
    "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention", "sliding_attention"], []],
    "rope_scaling": [YARN, {"type": "linear", "factor": 2.0}, {**YARN, "attn_factor": 0.8}, {"rope_type": "default"},
                     {**YARN, "attention_factor": 0.7}, {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, {}, None,
                     {"type": "yarn", "factor": 2.0}, {**YARN, "factor": None}, {**YARN, "truncate": False}],
    "rope_parameters": [YARN, {"full_attention": YARN}, {"rope_type": "default", "rope_theta": 3.0}, None, []],
    "rope_theta": [3.0, 7, None, "10000"],
    "partial_rotary_factor": [0.5, 1.0, 1],
    "original_max_position_embeddings": [8, 64],
    "quantization_config": [{}, {"quant_method": "fp8"}, None, "awq"],
    "transformers_weights": ["other.safetensors", "model.safetensors"],
    "head_dim": [8, 16, None],
    "mlp_bias": [True, False],
    "attention_bias": [True, False],
    "num_local_experts": [4, 6, 8],
    "num_experts": [4, 6],
    "norm_topk_prob": [True, False],
    "num_nextn_predict_layers": [0, 1, 2],
    "num_mtp_layers": [1, 2],
    "scoring_func": ["softmax", "sigmoid"],
    "is_causal": [False],
    "pad_token_id": [0, 60, 61, 1000, -1],
    "eos_token_id": [3, [3, 4], 1000],
    "dtype": ["float16", "bfloat16", "float64", "int8", "nonsense"],
    "torch_dtype": ["float16"],
    "pretraining_tp": [2],
    "tie_word_embeddings": [True, False],
    "no_rope_layers": [[0, 0, 0], [1, 1, 1]],
    "rope_interleave": [True, False],
    "attn_logit_softcapping": [30.0],
    "logit_scale": [0.5],
    "auto_map": [{"AutoModelForCausalLM": "modeling.Model"}],
    "architectures": [["LlamaForSequenceClassification"], ["Other"], [], None],
    "per_layer_config": [{"0": {"head_dim": 4}}],
    "use_bidirectional_attention": [True],
    "chunk_size_feed_forward": [2],
    "pruned_heads": [{"0": [0]}],
    "attention_dropout": [0.5],
    "_attn_implementation": ["sdpa"],
    "vocab_size": [61, 64],
}  # fmt: skip
# How often each kind of edit is drawn.
EDITS: dict[Edit, int] = {
    change_value: 10, change_type: 6, remove_entry: 5, rename_entry: 2, add_entry: 10, change_activation: 1,
    flip_tying: 2, store_head: 3, remove_tensor: 3, rename_tensor: 3, swap_tensors: 2, reshape_tensor: 4,
    change_dtype: 3, add_tensor: 5, change_index: 4, cut_file: 1, add_file: 2,
}  # fmt: skip
