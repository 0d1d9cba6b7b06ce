"""Model folders without weights whose tokenizers and chat templates are of every kind, made by code: `ZOO`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tests.support import zoo_templates as templates
from tests.support import zoo_tokenizers as tokenizers_of


@dataclass(frozen=True)
class Specimen:
    """One tokenizer and template of a kind."""

    name: str
    kind: str
    """words for a table"""
    build: Callable[[Sequence[str | AddedToken]], Tokenizer]
    """makes the tokenizer with these added tokens"""
    template: str
    added: Sequence[str | AddedToken]
    """special tokens, and such as aren't"""
    bos: str | None = None
    eos: str = "</s>"
    around: str | None = None
    """what the tokenizer puts around text, such as `<s> $A </s>`"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """further entries of tokenizer_config.json"""
    stops: Sequence[str] = ()
    """further tokens that end an answer, of generation_config.json"""
    is_lossless: bool = True
    """whether text can be had back from its tokens"""

    def make(self, folder: Path) -> Path:
        """Write the files of a model folder but for config and weights."""
        tokens = self.build(self.added)
        if self.around is not None:
            marks = [mark for mark in self.around.split() if mark != "$A"]
            around = processors.TemplateProcessing(
                single=self.around, pair=None, special_tokens=[(mark, tokens.token_to_id(mark)) for mark in marks]
            )
            tokens.post_processor = around
        folder.mkdir(parents=True, exist_ok=True)
        tokens.save(str(folder / "tokenizer.json"))
        own = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": self.bos,
        }
        settings = {**own, "eos_token": self.eos, "pad_token": self.eos, **self.settings}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        stops = [tokens.token_to_id(stop) for stop in (self.eos, *self.stops)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
        return folder


def _plain(text: str, **how: bool) -> AddedToken:
    return AddedToken(text, special=False, normalized=how.pop("normalized", False), **how)


_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_S = ("<s>", "</s>")
_HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_COHERE = (
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
)  # fmt: skip
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GPT2 = functools.partial(tokenizers_of.byte_level, prefix_space=False)
_GPT2_SPACE = functools.partial(tokenizers_of.byte_level, prefix_space=True)
_FIRST, _ALWAYS, _NEVER = (
    functools.partial(tokenizers_of.byte_fallback, scheme=scheme) for scheme in ("first", "always", "never")
)
_NFC = tokenizers_of.byte_level_nfc
_GEMMA = functools.partial(tokenizers_of.byte_fallback, prepends=False)
_TOOL_MARKS = [_plain(mark) for mark in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")]

ZOO = [
    Specimen(
        "qwen",
        "byte-level BPE, ChatML with tools",
        _NFC,
        templates.CHATML,
        _IM,
        eos="<|im_end|>",
        settings={"pad_token": "<|endoftext|>"},
        stops=("<|endoftext|>",),
    ),
    Specimen(
        "qwen_base",
        "ChatML, eos isn't the end of turn",
        _NFC,
        templates.CHATML,
        _IM,
        eos="<|endoftext|>",
        stops=("<|im_end|>",),
    ),
    Specimen(
        "qwen3",
        "earlier thoughts are left out, thoughts' marks added, not special",
        _NFC,
        templates.QWEN3,
        [*_IM, *map(_plain, _THINK), *_TOOL_MARKS],
        eos="<|im_end|>",
    ),
    Specimen(
        "special_thoughts",
        "thoughts' marks are special tokens",
        _NFC,
        templates.QWEN3,
        [*_IM, *_THINK],
        eos="<|im_end|>",
    ),
    Specimen(
        "plain_thoughts",
        "thoughts' marks are plain text",
        _NFC,
        templates.QWEN3,
        _IM,
        eos="<|im_end|>",
    ),
    Specimen(
        "special_tools",
        "tools' marks are special tokens",
        _NFC,
        templates.CHATML,
        [*_IM, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
        eos="<|im_end|>",
    ),
    Specimen(
        "llama3",
        "byte-level BPE, BOS in tokenizer and template, content trimmed",
        _NFC,
        templates.LLAMA3,
        _HEADERS,
        bos=_HEADERS[0],
        eos=_HEADERS[1],
        around=f"{_HEADERS[0]} $A",
        stops=("<|eot_id|>",),
    ),
    Specimen(
        "llama3_cleaning",
        "clean_up_tokenization_spaces true",
        _NFC,
        templates.LLAMA3,
        _HEADERS,
        bos=_HEADERS[0],
        eos="<|eot_id|>",
        around=f"{_HEADERS[0]} $A",
        settings={"clean_up_tokenization_spaces": True},
    ),
    Specimen(
        "llama2",
        "byte fallback, ▁ by normalizers, [INST], no system",
        tokenizers_of.byte_fallback,
        templates.LLAMA2,
        _S,
        bos="<s>",
        around="<s> $A",
    ),
    Specimen(
        "mistral",
        "Metaspace first, strict turns",
        _FIRST,
        templates.MISTRAL,
        [*_S, "[INST]", "[/INST]"],
        bos="<s>",
        around="<s> $A",
    ),
    Specimen(
        "metaspace_always",
        "Metaspace always, Zephyr's template",
        _ALWAYS,
        templates.ZEPHYR,
        _S,
        bos="<s>",
        around="<s> $A",
    ),
    Specimen(
        "metaspace_never",
        "Metaspace never, Zephyr's template",
        _NEVER,
        templates.ZEPHYR,
        _S,
        bos="<s>",
        around="<s> $A",
    ),
    Specimen(
        "gemma",
        "byte fallback without a first space, role model, system refused",
        _GEMMA,
        templates.GEMMA,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        bos="<bos>",
        eos="<eos>",
        around="<bos> $A",
        stops=("<end_of_turn>",),
    ),
    Specimen(
        "deepseek",
        "byte-level, ｜ marks, eos per turn",
        _NFC,
        templates.DEEPSEEK,
        [*_DEEPSEEK, *_THINK],
        bos=_DEEPSEEK[0],
        eos=_DEEPSEEK[1],
        around=f"{_DEEPSEEK[0]} $A",
    ),
    Specimen(
        "phi",
        "byte fallback, marks that strip what follows and put a space there",
        tokenizers_of.byte_fallback,
        templates.PHI,
        [AddedToken(mark, special=True, rstrip=True, normalized=False) for mark in _PHI],
        bos="<|system|>",
        eos="<|endoftext|>",
        stops=("<|end|>",),
        is_lossless=False,
    ),
    Specimen(
        "lstrip",
        "marks that strip what precedes",
        _NFC,
        templates.CHATML,
        [_IM[0], "<|im_start|>", AddedToken("<|im_end|>", special=True, lstrip=True, normalized=False)],
        eos="<|im_end|>",
    ),
    Specimen(
        "normalized",
        "added tokens that are normalized",
        _NFC,
        templates.CHATML,
        [*_IM, _plain("<answer>", normalized=True), _plain("helpful", normalized=True)],
        eos="<|im_end|>",
    ),
    Specimen(
        "gpt2",
        "byte-level BPE by GPT-2's rule, Zephyr's template",
        _GPT2,
        templates.ZEPHYR,
        ["<|endoftext|>"],
        bos="<|endoftext|>",
        eos="<|endoftext|>",
    ),
    Specimen("gpt2_space", "byte-level BPE with a first space", _GPT2_SPACE, templates.ZEPHYR, _S, eos="</s>"),
    Specimen(
        "glm",
        "[gMASK]<sop>, a turn ends where the next begins",
        _NFC,
        templates.GLM,
        _GLM,
        eos="<|endoftext|>",
        around="[gMASK] <sop> $A",
        stops=("<|user|>", "<|observation|>"),
    ),
    Specimen(
        "command_r",
        "a mark per role",
        _NFC,
        templates.COHERE,
        _COHERE,
        bos=_COHERE[0],
        eos=_COHERE[2],
        around=f"{_COHERE[0]} $A",
    ),
    Specimen(
        "harmony",
        "channels, the last answer ends otherwise",
        _NFC,
        templates.HARMONY,
        _HARMONY,
        eos="<|return|>",
        stops=("<|call|>",),
    ),
    Specimen(
        "generation_marks",
        "{% generation %} in the template",
        _NFC,
        templates.MARKED,
        _IM,
        eos="<|im_end|>",
    ),
    Specimen(
        "trimming",
        "content trimmed, no newline after the turn",
        _NFC,
        templates.TRIMMED,
        _IM,
        eos="<|im_end|>",
    ),
    Specimen(
        "eos_behind",
        "BOS and EOS around text",
        _NFC,
        templates.ZEPHYR,
        _S,
        bos="<s>",
        around="<s> $A </s>",
        settings={"add_bos_token": True, "add_eos_token": True},
    ),
    Specimen(
        "eos_only",
        "EOS behind text",
        _GPT2,
        templates.CHATML,
        [*_S, *_IM],
        eos="</s>",
        around="$A </s>",
        stops=("<|im_end|>",),
    ),
    Specimen(
        "unigram",
        "Unigram with byte fallback",
        tokenizers_of.unigram,
        templates.CHATML,
        [*_S, *_IM],
        eos="</s>",
        around="$A </s>",
        stops=("<|im_end|>",),
    ),
    Specimen(
        "wordpiece",
        "WordPiece, lower case, [CLS] and [SEP]",
        tokenizers_of.wordpiece,
        templates.ZEPHYR,
        ["[CLS]", "[SEP]"],
        bos="[CLS]",
        eos="[SEP]",
        around="[CLS] $A [SEP]",
        is_lossless=False,
    ),
    Specimen(
        "words",
        "whole words, others unknown",
        tokenizers_of.whole_words,
        templates.CHATML,
        [*_S, *_IM],
        stops=("<|im_end|>",),
        is_lossless=False,
    ),
    Specimen(
        "letters",
        "one token per letter",
        tokenizers_of.letters,
        templates.CHATML,
        [*_S, *_IM],
        stops=("<|im_end|>",),
        is_lossless=False,
    ),
]


def table() -> str:
    """The zoo in Markdown, as docs/text.md has it."""
    rows = [f"| {specimen.name} | {specimen.kind} |" for specimen in ZOO]
    return "\n".join(["| name | tokenizer and template |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
