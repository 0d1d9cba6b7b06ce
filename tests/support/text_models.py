"""Model folders without weights: tokenizers and chat templates in the shapes that people have."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_CORPUS = ["What is 12 + 30? The answer is 42.", "user assistant system tool You are a helper.", "0123456789+-=*/"] * 20

# Tools, thoughts and tool calls, as Qwen's.
CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools' }}{%- for t in tools %}{{- '\n' + (t | tojson) }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{%- endif %}{{- m.content }}{%- for c in m.tool_calls or [] %}{{- '\n<tool_call>' + (c | tojson) }}"
    "{{- '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<pad>")


def byte_level_folder(folder: Path, template: str | None = None, *, post: str | None = None, eos: str = "</s>") -> Path:
    """Bytes merged to words; `post` is what is put around text, such as `<s> $A </s>`."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=list(SPECIALS), show_progress=False
    )
    tokens.train_from_iterator(_CORPUS, trainer)
    return _written(folder, tokens, template, post, eos)


def byte_fallback_folder(folder: Path, template: str | None = None) -> Path:
    """As Llama 2's: a space before text, spaces as U+2581, bytes for what isn't in the vocabulary."""
    tokens = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokens.decoder = decoders.Sequence(pieces)
    given = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for line in set(_CORPUS) for word in line.split()] * 5
    tokens.train_from_iterator(words, trainers.BpeTrainer(vocab_size=340, special_tokens=given, show_progress=False))
    content = json.loads(tokens.to_str())
    # Bytes are plain tokens, not added ones.
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] in ("<unk>", *SPECIALS)]
    return _written(folder, Tokenizer.from_str(json.dumps(content)), template, "<s> $A", "</s>")


def _written(folder: Path, tokens: Tokenizer, template: str | None, post: str | None, eos: str) -> Path:
    if post:
        added = [(name, tokens.token_to_id(name)) for name in post.split() if name != "$A"]
        tokens.post_processor = processors.TemplateProcessing(single=post, pair=None, special_tokens=added)
    folder.mkdir(parents=True, exist_ok=True)
    tokens.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
