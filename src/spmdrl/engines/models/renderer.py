"""Conversion of text to tokens: prompts, answers and conversations, in the chat template or as plain text.

For every verb, the tokens of a prompt and its answer are those of the template's own text, through the token that ends
the turn.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from os.path import commonprefix
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from spmdrl.engines.models.hf.foreign_folder import check_growth
from spmdrl.engines.models.tokenizer import ModelTokenizer, StopToken
from spmdrl.nouns.settings.data_config import RowNotRendered, TemplateOptions, check_kwargs

Message = Mapping[str, Any]
Messages = Sequence[Message]
Answer = str | dict[str, Any]
"""text, or a message of the assistant with more than text, such as tool calls"""

COLUMNS_OF_TEMPLATES = ("tools", "chat_template_kwargs", "system_prompt")
_TOKENIZER_BATCH = 1024
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
# Words that templates leave unchanged, and that no template has of its own.
_PROBE = "Tangerine"
_CUT = "continued-from-here-7f3a"
_UNKNOWN = "\ue000"
_SET_BY_TRANSFORMERS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_OF_ABSENT_NAMES = ("defined", "undefined", "none", "default", "d")


@dataclass(frozen=True)
class MarkedTokens:
    """Token ids, and whether each is trained on."""

    ids: list[int]
    is_learnt: list[bool]

    @classmethod
    def of_answer(cls, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> MarkedTokens:
        """Join a prompt and its one answer."""
        return cls([*prompt_ids, *answer_ids], [False] * len(prompt_ids) + [True] * len(answer_ids))


@dataclass(frozen=True)
class TokenizedPrompts:
    """Texts with the token ids of each: row i holds `ids[offsets[i]:offsets[i + 1]]`."""

    texts: list[str]
    ids: np.ndarray
    offsets: np.ndarray
    problems: Mapping[int, str]
    """reasons for rows without tokens, which can't be rendered"""
    num_in_template: int = 0
    """number of rows rendered by the chat template"""

    def prompt_ids(self, row: int) -> tuple[int, ...]:
        return tuple(self.ids[self.offsets[row] : self.offsets[row + 1]].tolist())

    def length(self, row: int) -> int:
        return int(self.offsets[row + 1] - self.offsets[row])


class Renderer:
    """Renderer of rows for one tokenizer. A row's columns in COLUMNS_OF_TEMPLATES go to the template."""

    def __init__(
        self, tokenizer: ModelTokenizer, options: TemplateOptions | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None, *, has_openings: bool = False,
        has_own_prompts: bool = False,
    ):  # fmt: skip
        """`tools` are schemas of functions that every row has, beside those of its column; even without any, an
        environment that gives them needs the chat template.

        With `has_openings`, an environment adds to the last message of each prompt, behind which it is cut; with
        `has_own_prompts` it gives whole conversations, of which a prompt is the beginning that all have.
        """
        self.options, self.own_tools = options or TemplateOptions(), tools
        self.has_openings, self.has_own_prompts = has_openings, has_own_prompts
        own = self.options.own_template()
        self.tokenizer = tokenizer if own is None else tokenizer.with_template(own)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.raw.chat_template)

    def uses_template(self, prompt: str | Messages) -> bool:
        """Return True if the chat template renders this prompt. Raises ValueError if it must, but there is none."""
        is_text = isinstance(prompt, str)
        is_plain = self.options.use == "never" or (self.options.use == "auto" and is_text)
        if is_plain and not self.has_own_prompts:
            return False
        if not self.has_template:
            raise ValueError(
                f"data.chat_template is '{self.options.use}' and a prompt is {'text' if is_text else 'messages'}, but "
                "the tokenizer has no chat template; set data.chat_template: never or data.chat_template_file, or use "
                "a model that has one"
            )
        return True

    def prompts(self, prompts: Sequence[str | Messages], columns: Sequence[Mapping[str, Any]] = ()) -> TokenizedPrompts:
        """Tokenize prompts; a row that can't be rendered has no tokens, and its problem is recorded."""
        texts, problems = [""] * len(prompts), {}
        for row, prompt in enumerate(prompts):
            try:
                texts[row] = self.prompt_text(prompt, columns[row] if columns else {})
            except RowNotRendered as problem:
                problems[row] = str(problem)
        ids: list[list[int]] = []
        for start in range(0, len(texts), _TOKENIZER_BATCH):
            ids += self.tokenizer.encode_all(texts[start : start + _TOKENIZER_BATCH])
        in_template = [self.uses_template(prompt) for prompt in prompts]
        for row, from_template in enumerate(in_template):
            ids[row] = [] if row in problems else ids[row] if from_template else self.tokenizer.begun(ids[row])
        offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        flat = np.fromiter((token for row_ids in ids for token in row_ids), dtype=np.int32, count=int(offsets[-1]))
        return TokenizedPrompts(texts, flat, offsets, problems, sum(in_template))

    def prompt_text(self, prompt: str | Messages, columns: Mapping[str, Any]) -> str:
        """Return the text before the answer or opening; if messages end with an assistant's one, it is continued."""
        if self.has_own_prompts:
            return _beginning(self)
        if self.has_openings:
            return self.cut(prompt, columns)[0]
        if not self.uses_template(prompt):
            return _plain_prompt(prompt, self.own_tools)
        messages = self.messages(prompt, columns)
        if messages[-1]["role"] != "assistant":
            return self.rendered(messages, columns, add_generation_prompt=True)
        *before, last = messages
        begun = last.get("content") or ""
        if last.get("tool_calls"):
            raise RowNotRendered("the prompt ends with the assistant's tool calls; add the tools' results")
        text, mark, _ = self.rendered([*before, {**last, "content": begun + _CUT}], columns).rpartition(_CUT)
        if not mark or not text.endswith(begun.lstrip()):
            raise RowNotRendered(
                f"the chat template of {self.place} doesn't write all of the assistant's last message, which the "
                "prompt ends with, so that it can't be continued"
            )
        return text

    def cut(self, prompt: str | Messages, columns: Mapping[str, Any]) -> tuple[str, str]:
        """Return a prompt's text through the content of its last message, the user's, and the text behind it."""
        if not self.uses_template(prompt):
            return _plain_prompt(prompt, self.own_tools), ""
        *before, last = self.messages(prompt, columns)
        if last["role"] != "user":
            raise RowNotRendered(
                f"the environment adds to the user's message that ends a prompt, but this one ends with the role "
                f"'{last['role']}'; end it with the user's"
            )
        probe = unused_word([*before, last])
        text = self.rendered([*before, lengthened(last, probe)], columns, add_generation_prompt=True)
        if text.count(probe) != 1:
            raise RowNotRendered(
                f"the chat template writes the user's last message {text.count(probe)} times, so that nothing can be "
                "added to its end; let the environment answer turns only"
            )
        head, _, after = text.partition(probe)
        return head, after

    def answer(self, prompt: str | Messages, answer: str | Message, columns: Mapping[str, Any]) -> MarkedTokens:
        """Return a prompt and its answer through the template's end of turn; for plain text, through the first stop
        token. A text continues a prompt that ends with the assistant's message."""
        encode = self.tokenizer.encode
        if not self.uses_template(prompt):
            answer_ids = self._ended(encode(answer if isinstance(answer, str) else _plain_text(answer)))
            return MarkedTokens.of_answer(self.tokenizer.begun(encode(self.prompt_text(prompt, columns))), answer_ids)
        *before, last = self.messages(prompt, columns)
        message: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        if last["role"] == "assistant" and isinstance(answer, str):
            message = {**last, "content": f"{last.get('content') or ''}{answer}"}
            begun = self.prompt_text(prompt, columns)
        else:
            before.append(last)
            begun = self.rendered(before, columns, add_generation_prompt=True)
        text, is_ended = self._turn(begun, before, message, columns)
        prompt_ids, ids = encode(begun), encode(begun + text.rstrip())
        # The model can't generate a token that spans both.
        is_prefix = ids[: len(prompt_ids)] == prompt_ids
        answer_ids = ids[len(prompt_ids) :] if is_prefix else encode(text.rstrip())
        return MarkedTokens.of_answer(prompt_ids, answer_ids if is_ended else self._ended(answer_ids))

    def conversation(self, messages: Messages, columns: Mapping[str, Any]) -> MarkedTokens:
        """Return the conversation in the chat template, with the assistant's tokens marked.

        Marks come from the template's `{% generation %}`, if it has one. Else from the conversation's prefixes that end
        before and after each of the assistant's messages: the text between them is marked, through the token that ends
        the turn. Raises ValueError if that is ambiguous, or the first token would be trained on.
        """
        messages = self.messages(messages, columns)
        if _GENERATION.search(self._template(self.tools_of(columns))):
            how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            rendered = self._apply(messages, columns, **how)
            marked = MarkedTokens(list(rendered["input_ids"]), [mask == 1 for mask in rendered["assistant_masks"]])
        else:
            marked = self._by_prefixes(messages, columns)
        if not any(marked.is_learnt):
            raise RowNotRendered("the chat template marks no token as the assistant's, so there is nothing to learn")
        if marked.is_learnt[0]:
            raise RowNotRendered(
                "the first token is the assistant's, which no token precedes; begin with a user's message"
            )
        return marked

    @cached_property
    def end_of_turn(self) -> StopToken | None:
        """Special token that the chat template puts after an answer; None without such a token."""
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        for messages in (asked, [{"role": "system", "content": "?"}, *asked]):
            # Templates may raise anything of their own, such as a demand for a system message.
            try:
                _, probe, after = self.rendered(self.messages(messages, {}), {}).rpartition(_PROBE)
            except ValueError:
                continue
            return self.tokenizer.first_special(after) if probe else None
        return None

    def warnings(self, num_texts: int, num_in_template: int, columns: Collection[str] = ()) -> list[str]:
        """Return warnings about unused or contradictory options, columns and tokenizer settings.

        `columns` are those of COLUMNS_OF_TEMPLATES that rows have.
        """
        lines: list[str] = []
        if num_in_template:
            lines += filter(None, (self._end_of_turn_warning(), self._names_warning()))
        if num_texts and self.options.use == "auto" and self.has_template:
            lines.append(
                f"WARNING: prompts are text, for which the chat template of {self.place} isn't used; set "
                "data.chat_template: always, or never for a model that takes plain text"
            )
        unused = [*self.options.named, *(f"the column {name}" for name in columns)]
        if unused and num_texts:
            lines.append(f"WARNING: {', '.join(unused)}: not used for prompts without the chat template")
        if "tools" in columns and num_in_template and "tools" not in self._template([{}]):
            lines.append(f"WARNING: the column tools isn't used: the chat template of {self.place} has no tools")
        return lines

    def _end_of_turn_warning(self) -> str | None:
        end, tokenizer = self.end_of_turn, self.tokenizer
        if end is None or end.token_id in tokenizer.stop_token_ids:
            return None
        stops = ", ".join(map(str, tokenizer.stop_tokens))
        ids = [*tokenizer.stop_token_ids, end.token_id]
        return (
            f"WARNING: the chat template ends answers with {end}, but responses stop at {stops} only and run on past "
            f'their end; set "eos_token_id": {ids} in {tokenizer.folder / "generation_config.json"}'
        )

    def _names_warning(self) -> str | None:
        """Name variables that a user's template prints though nothing sets them, and options that no template reads."""
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701
        try:
            tree = environment.parse(_GENERATION_TAG.sub("", self._template(None)))
        except TemplateSyntaxError:
            return None
        read = meta.find_undeclared_variables(tree) - environment.globals.keys()
        template, kwargs = f"the chat template of {self.place}", self.options.kwargs.keys()
        if unread := sorted(kwargs - read):
            return f"WARNING: {template} doesn't read {', '.join(unread)} of data.chat_template_kwargs"
        if self.options.file is None:
            return None
        # A variable that is tested before it is printed may be absent.
        asked = [*(one.test for one in tree.find_all(nodes.If)), *(one.test for one in tree.find_all(nodes.CondExpr))]
        asked += [one.node for one in tree.find_all((nodes.Test, nodes.Filter)) if one.name in _OF_ABSENT_NAMES]
        optional = {one.name for node in asked for one in (node, *node.find_all(nodes.Name)) if type(one) is nodes.Name}
        optional |= {one.name for one in tree.find_all(nodes.Name) if one.ctx == "store"}
        unset = sorted(read - optional - kwargs - _SET_BY_TRANSFORMERS - self.tokenizer.raw.special_tokens_map.keys())
        return f"WARNING: {template} reads {', '.join(unset)}, which only rows' kwargs could set" if unset else None

    def _by_prefixes(self, messages: list[dict[str, Any]], columns: Mapping[str, Any]) -> MarkedTokens:
        whole, encode = self.rendered(messages, columns), self.tokenizer.encode
        ids = encode(whole)
        is_learnt = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise RowNotRendered("the first message is the assistant's; begin with a user's message")
            begun = self.rendered(messages[:number], columns, add_generation_prompt=True)
            text = self._turn(begun, messages[:number], message, columns)[0] if whole.startswith(begun) else ""
            before, through = encode(begun), encode(begun + text)
            if not len(before) < len(through) or ids[: len(before)] != before or ids[: len(through)] != through:
                raise RowNotRendered(
                    f"the chat template writes messages[{number}] or what precedes it otherwise in the whole "
                    "conversation than where it ends there, so what the assistant wrote is ambiguous; mark it by "
                    "{% generation %} in the template, or set sft.turns to last"
                )
            is_learnt[len(before) : len(through)] = [True] * (len(through) - len(before))
        return MarkedTokens(ids, is_learnt)

    def _turn(self, begun: str, before: Messages, message: Message, columns: Mapping[str, Any]) -> tuple[str, bool]:
        """Return an answer's text after `begun`, the rendered prompt, through its end of turn; True if it has one."""
        whole = self.rendered([*before, _without_null(message)], columns)
        last = str(before[-1].get("content") or "").strip() if before else ""
        tail = begun[begun.rfind(last) :] if last and last in begun else ""
        if whole.startswith(begun):
            text = whole[len(begun) :]
        elif tail and whole.count(tail) == begun.count(tail):
            # Templates may render the preceding messages differently once answered, such as the system's.
            text = whole.rpartition(tail)[2]
        else:
            text = self._behind_a_thought(begun, before, message, columns)
        end, stops = self.end_of_turn, tuple(stop.text for stop in self.tokenizer.stop_tokens)
        if end is not None and end.text in text:
            return text[: text.rindex(end.text) + len(end.text)], True
        return text, text.rstrip().endswith(stops)

    def _behind_a_thought(self, begun: str, before: Messages, message: Message, columns: Mapping[str, Any]) -> str:
        """Return an answer after a generation prompt with an ending that conversations lack, such as `<think>`."""
        known = self.rendered([*before, {"role": "assistant", "content": _UNKNOWN}], columns)
        more, content = begun[len(commonprefix([begun, known])) :], str(message.get("content") or "")
        text = content.removeprefix(more).removeprefix(more.strip())
        names = re.findall(r"<(\w+)>", more)
        is_closed = names and all(f"</{name}>" in more + text for name in names)
        if not is_closed or self.end_of_turn is None or set(_without_null(message)) - {"role", "content"}:
            raise RowNotRendered(
                f"the chat template of {self.place} begins an answer with {more[-80:]!r}, but writes none so in a "
                "conversation; give the answer as one text that goes on from there"
            )
        return text + self.end_of_turn.text

    def _ended(self, ids: list[int]) -> list[int]:
        stops = self.tokenizer.stop_token_ids
        return ids if ids and ids[-1] in stops else [*ids, *stops[:1]]

    def messages(self, prompt: str | Messages, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return messages for the template: with the row's or the job's system prompt, and without null entries."""
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in given):
            raise RowNotRendered("a message must be an object with the texts 'role' and 'content'")
        messages = [_without_null(message) for message in given]
        system = columns.get("system_prompt")
        system = self.options.system_prompt if system is None else system
        if not isinstance(system, str | None):
            raise RowNotRendered(f"'system_prompt' is {system!r:.60}, but must be a text; rename it otherwise")
        if system is not None and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def tools_of(self, columns: Mapping[str, Any]) -> list[Any] | None:
        """Return the functions of a row: the environment's, and those of its column `tools`; None without any."""
        tools = [*(self.own_tools or ()), *_tools_of(columns)]
        names = Counter(tool.get("function", tool).get("name") for tool in tools)
        if self.own_tools and (twice := [name for name, count in names.items() if count > 1]):
            raise RowNotRendered(
                f"'tools' and the environment both have functions named {', '.join(map(str, twice))}; rename one, or "
                "drop the column"
            )
        return tools or None

    def _template(self, tools: list[Any] | None) -> str:
        return self.tokenizer.raw.get_chat_template(tools=tools)

    def rendered(self, messages: Messages, columns: Mapping[str, Any], *, add_generation_prompt: bool = False) -> str:
        return self._apply(messages, columns, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply(self, messages: Messages, columns: Mapping[str, Any], **how: Any) -> Any:
        tools, kwargs = self.tools_of(columns), _without_null(columns.get("chat_template_kwargs") or {})
        check_kwargs(kwargs, "chat_template_kwargs")
        how |= {**self.options.kwargs, **kwargs, "tools": tools}
        try:
            rendered = self.tokenizer.raw.apply_chat_template(list(messages), **how)
            if isinstance(rendered, str):
                check_growth(rendered, self._template(tools), messages, tools)
            return rendered
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template of {self.place}, line {error.lineno}, is broken: {error}") from None
        except Exception as error:
            # Templates may raise anything of their own, such as a demand for alternating roles.
            kind = type(error).__name__
            raise RowNotRendered(
                f"the chat template of {self.place} doesn't take its first {len(messages)} messages ({kind}: {error})"
            ) from None

    @property
    def place(self) -> str:
        """File that holds the template."""
        folder = self.tokenizer.folder
        named = folder / "chat_template.jinja"
        return str(self.options.file or (named if named.is_file() else folder / "tokenizer_config.json"))


@cache
def _beginning(renderer: Renderer) -> str:
    """Return the text of the token with which all conversations begin. Raises ValueError without the template."""
    use = renderer.options.use
    if not renderer.has_template or use == "never":
        raise ValueError(
            "the environment gives conversations, which the chat template writes, but data.chat_template is "
            f"'{use}' and the tokenizer has {'a' if renderer.has_template else 'no'} template; set data.chat_template: "
            "auto, and use a model that has one or data.chat_template_file"
        )
    text = renderer.rendered(renderer.messages("?", {}), {}, add_generation_prompt=True)
    return renderer.tokenizer.decode_all(renderer.tokenizer.encode_behind(text)[:1])


def lengthened(message: Message, text: str) -> dict[str, Any]:
    """Return a message with a text behind its content."""
    content = message.get("content") or ""
    added = f"{content}{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return {**message, "content": added}


def unused_word(messages: Messages) -> str:
    """Return a word that templates leave unchanged and these messages lack."""
    text, number = json.dumps(list(messages), default=str), 0
    while f"{_PROBE}{number}" in text:
        number += 1
    return f"{_PROBE}{number}"


def _tools_of(columns: Mapping[str, Any]) -> list[Any]:
    """Return the functions that a row's column `tools` lists, as objects or as JSON."""
    given = columns.get("tools")
    try:
        tools = json.loads(given) if isinstance(given, str) and given.strip() else given or None
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools or []]
    except (TypeError, ValueError):
        tools = [None]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise RowNotRendered(
            f"'tools' is {given!r:.60}, but must be a list of functions, or JSON of one; rename it otherwise"
        )
    return [_without_null(tool) for tool in tools]


def _without_null(value: Any) -> Any:
    """Remove null entries: columns of structs have all keys in each row, and templates would write them."""
    if isinstance(value, Mapping):
        return {key: _without_null(entry) for key, entry in value.items() if entry is not None}
    return [_without_null(entry) for entry in value] if isinstance(value, list) else value


def _plain_prompt(prompt: str | Messages, tools: Sequence[Mapping[str, Any]] | None) -> str:
    if tools is not None:
        raise RowNotRendered(
            "the environment has tools or answers with messages, which chat templates alone write, but the prompt is "
            "plain text; set data.chat_template: always"
        )
    return prompt if isinstance(prompt, str) else "\n".join(map(_plain_text, prompt))


def _plain_text(message: Message) -> str:
    if message.get("tool_calls"):
        raise RowNotRendered("a message has tool_calls, which chat templates alone write; set data.chat_template: auto")
    return str(message.get("content") or "")
