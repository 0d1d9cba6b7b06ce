"""A tiny chat model whose turns are among a few texts, such as tool calls, as a trained one's are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file

from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import PRINTABLE_CHARS, MakeConfig

TEMPLATE = (
    "{% if tools %}<bos>system\n{{ tools | tojson }}<eos>{% endif %}{% for m in messages %}<bos>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
_HIDDEN = 128


def make_chat_model(
    folder: Path, turns: Sequence[str], max_positions: int = 1024, num_layers: int = 1, intermediate_size: int = 64
) -> Path:
    """Make a model that ends its prompts by one of these turns, each as likely as the others; layers hardly matter."""
    stand_ins = [chr(0x2460 + number) for number in range(len(turns))]
    make = MakeConfig(
        hidden_size=_HIDDEN, num_hidden_layers=num_layers, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions, chars=PRINTABLE_CHARS + "".join(stand_ins), tie_word_embeddings=False,
    )  # fmt: skip
    make_model_folder(folder, make, seed=0)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    for text, stand_in in zip(turns, stand_ins, strict=True):
        vocab[text] = vocab.pop(stand_in)
        same = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        content["added_tokens"].append({"id": vocab[text], "content": text, **same})
    path.write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # Zeros would make the gradients of layers so small that a core takes ten times as long for them.
            weight.mul_(0.01)
    weights["model.embed_tokens.weight"].zero_().fill_diagonal_(1.0)
    head = weights["lm_head.weight"].zero_()
    for text in turns:
        head[vocab[text], vocab["\n"]] = head[vocab["<eos>"], vocab[text]] = 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
