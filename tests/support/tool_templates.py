"""Chat templates with tools in the forms that model families have, and folders of tokenizers with them: `TOOL_ZOO`."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken

from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from tests.support import zoo_tokenizers as tokenizers_of
from tests.support.tokenizer_zoo import ZOO, Specimen

_CALLS = "{% for c in m.tool_calls or [] %}{% set c = c.function %}"
# Parameters in tags; thoughts before the last question are left out, and contents trimmed.
CODER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ (m.reasoning_content or '') | trim }}\n</think>\n\n{% endif %}"
    "{{ m.content | trim }}" + _CALLS + "{{ '\n\n' if loop.first and m.content | trim else '\n' if not loop.first }}"
    "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content | trim }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Roles' marks end the turn before; keys and values in tags of their own.
KEYED = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>{{ m.reasoning_content }}"
    "</think>{% if m.content.strip() %}\n{{ m.content.strip() }}{% endif %}" + _CALLS + "\n<tool_call>{{ c.name }}\n"
    "{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# One call per turn as JSON without marks; results as JSON.
SINGLE = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "{{ c.name }}", "parameters": '
    "{{ c.arguments | tojson }}}<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# All calls of a turn in one list; ids have nine letters.
LISTED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson(ensure_ascii=True) }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] [" + _CALLS + '{"name": "{{ c.name }}", "arguments": '
    "{{ c.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# The name outside of JSON, arguments as text, content null beside calls; no start of a turn behind results.
FENCED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.tool_calls %}"
    "<｜Assistant｜>{{ m.content if m.content is not none }}<｜tool▁calls▁begin｜>" + _CALLS
    + "{{ '\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name + '\n```json\n' + c.arguments "
    "+ '\n```' }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{{ eos_token }}{% elif m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}<｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜>{% if loop.last or loop.nextitem.role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}{% else %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}"
)  # fmt: skip
# The last turn ends with another token than earlier ones; results name the function last called.
CHANNELS = (
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}"
    "{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}"
    "<|call|>{% elif m.role == 'assistant' %}{% if m.thinking and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% elif m.role == 'tool' %}<|start|>"
    "functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Calls in a notation of its own, results in the same turn, which goes on behind them.
QUOTED = (
    "{{ bos_token }}{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|tool_response>response:{{ m.name }}{value:<|\"|>{{ m.content }}<|\"|>}<tool_response|>{% set ns.open = true %}"
    "{% elif m.role == 'assistant' %}{% if not ns.open %}<|turn>model\n{% endif %}{{ m.content }}" + _CALLS
    + "<|tool_call>call:{{ c.name }}{% raw %}{{% endraw %}{% for k, v in c.arguments | items %}{{ k }}:"
    "{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v | tojson }}{% endif %}{{ ',' if not loop.last }}{% endfor %}"
    "}<tool_call|>{% endfor %}{% set ns.open = false %}{% if not m.tool_calls %}<turn|>\n{% endif %}{% else %}"
    "{% set ns.open = false %}<|turn>{{ m.role }}\n{{ m.content | trim }}<turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)  # fmt: skip

_SPECIAL = re.compile(
    r"<\|[A-Za-z_]+\|>|<｜[^｜<>]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\[/?[A-Za-z_]+\]"
    r"|</?(?:s|think|tool_call|tool_response|sop|bos|eos|start_of_turn|end_of_turn|end_of_utterance)>"
)
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|observation|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<|eot|>",
)  # fmt: skip


def specimen(name: str, template: str) -> Specimen:
    """Make a model folder of a template: its marks are special tokens, those that end turns in it end responses."""
    added = sorted({"<s>", "</s>", *_SPECIAL.findall(template)})
    ends = [end for end in _ENDS if end in added and not (end == "<|end|>" and "<|return|>" in added)]
    if "<|observation|>" in added:
        ends.append("<|user|>")
        added.append("<|user|>")
    # Marks of calls and thoughts are added, but not special, as in Qwen's and GLM's tokenizers.
    tokens = [
        AddedToken(one, special=False, normalized=False) if one.strip("</>").isidentifier() and len(one) > 4 else one
        for one in added
    ]
    return Specimen(name, name, tokenizers_of.byte_level_nfc, template, tokens, bos="<s>", stops=ends)


TOOL_ZOO = [
    specimen(name, template)
    for name, template in [
        ("coder", CODER), ("keyed", KEYED), ("single", SINGLE), ("listed", LISTED), ("fenced", FENCED),
        ("channels", CHANNELS), ("quoted", QUOTED),
    ]
]  # fmt: skip
# A folder of templates by others, such as TRL's `chat_templates`.
_FOREIGN = sorted(Path(os.environ.get("CHAT_TEMPLATES", "/nowhere")).glob("*.jinja"))
FOREIGN_ZOO = [specimen(path.name, path.read_text(encoding="utf-8")) for path in _FOREIGN]


@cache
def renderer_of(name: str) -> Renderer:
    """Load the renderer of a specimen of any zoo, once per process."""
    found = next(one for one in [*ZOO, *TOOL_ZOO, *FOREIGN_ZOO] if one.name == name)
    with TemporaryDirectory() as folder:
        # All is in memory once it is loaded.
        return Renderer(ModelTokenizer(found.make(Path(folder))))
