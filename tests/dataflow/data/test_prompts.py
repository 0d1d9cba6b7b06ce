"""Which prompts a step takes is a pure function of the seed and the step, and no prompt is dropped in silence."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.data.data_rows import Row, SourceRows
from spmdrl.dataflow.data.prompts import MixedOrder, PromptSource, random_order
from spmdrl.dataflow.data.records import BadRows
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.data_config import DataConfig, DataSource
from tests.support.letters import LetterTokenizer


def source_of(*prompts, path="a", weight=None):
    rows = tuple(Row(f"{path}:{i}", f"{path}:{i}", prompt, "1", {"answer": "1"}) for i, prompt in enumerate(prompts))
    return SourceRows(DataSource(path, weight), rows, (), {})


def prompts_of(*sources, seed=0, tokenizer=None, vocab_size=1 << 20, **settings):
    config = DataConfig(**settings)
    renderer = Renderer(tokenizer or LetterTokenizer(), config.template)
    return PromptSource(sources, renderer, config, seed, vocab_size=vocab_size)


LETTERS = [chr(ord("a") + i) for i in range(10)]


def test_an_epoch_holds_every_prompt_once_and_epochs_differ():
    prompts = prompts_of(source_of(*LETTERS))
    epochs = [[prompt.text for prompt in prompts.take(epoch, 10)] for epoch in range(3)]
    assert all(sorted(epoch) == LETTERS for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_steps_cut_one_endless_order_whatever_came_before():
    prompts = prompts_of(source_of(*LETTERS), seed=5)
    endless = [prompt.id for prompt in prompts.take(0, 40)]
    resumed = prompts_of(source_of(*LETTERS), seed=5)
    for step in (9, 3, 0, 7):
        assert [prompt.id for prompt in resumed.take(step, 4)] == endless[step * 4 : step * 4 + 4]
    assert [prompt.id for prompt in prompts_of(source_of(*LETTERS), seed=6).take(0, 40)] != endless


def test_the_order_is_this_one_on_every_machine_and_version():
    assert random_order(8, (0, 0)).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]


def test_without_shuffling_rows_come_in_the_order_of_the_files():
    prompts = prompts_of(source_of("a", "b"), source_of("c", path="b"), shuffle=False)
    assert [prompt.text for prompt in prompts.take(0, 6)] == ["a", "b", "c"] * 2
    assert [prompt.id for prompt in prompts.all()] == ["a#a:0", "a#a:1", "b#b:0"]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 10.0)), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 3),
)
def test_weights_share_out_every_epoch_and_each_source_stays_even(sources, is_shuffled, seed):
    sizes, weights = zip(*sources, strict=True)
    order = MixedOrder(sizes, weights, seed=seed, is_shuffled=is_shuffled)
    drawn = [order.at(position) for position in range(3 * order.epoch_size)]
    shares = Counter(source for source, _ in drawn)
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        expected = max(1, round(weight / sum(weights) * sum(sizes)))
        assert shares[source] == 3 * expected
        counts = Counter(dict.fromkeys(range(size), 0))
        counts.update(row for drawn_source, row in drawn if drawn_source == source)
        assert set(counts) == set(range(size))
        # Mid-epoch reads of a source's own epochs leave its rows at most two rounds apart.
        assert max(counts.values()) - min(counts.values()) <= 2


def test_every_epoch_mixes_its_sources_anew():
    order = MixedOrder((8, 8), (None, None), seed=0, is_shuffled=True)
    mixes = [tuple(order.at(epoch * 16 + place)[0] for place in range(16)) for epoch in range(4)]
    assert len(set(mixes)) == 4


def test_too_long_prompts_are_named_or_counted():
    sources = source_of("a", "abcdef", "b")
    with pytest.raises(BadRows, match="a:1: the prompt has 7 tokens, but data.max_prompt_length is 4"):
        prompts_of(sources, max_prompt_length=4)
    prompts = prompts_of(sources, max_prompt_length=4, on_bad_row="skip")
    assert len(prompts) == 2
    assert [bad.kind for bad in prompts.skipped] == ["prompt_too_long"]
    with pytest.raises(ValueError, match="no row that can be used, with data.max_prompt_length = 1"):
        prompts_of(source_of("abc"), max_prompt_length=1, on_bad_row="skip")


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("mode", "prompt", "text", "has_start_token"),
    [
        ("auto", "hi", "hi", True),
        ("auto", MESSAGES, "<user>hi<assistant>", False),
        ("always", "hi", "<user>hi<assistant>", False),
        ("never", MESSAGES, "hi", True),
    ],
)
def test_the_chat_template_is_used_as_configured(mode, prompt, text, has_start_token):
    (taken,) = prompts_of(source_of(prompt), chat_template=mode).take(0, 1)
    assert taken.text == text
    assert taken.prompt_ids == ((1,) if has_start_token else ()) + tuple(map(ord, text))
    assert taken.original == prompt


def test_messages_without_a_template_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match="set data.chat_template: never"):
        prompts_of(source_of(MESSAGES), tokenizer=LetterTokenizer(chat_template=None))


def test_prompts_with_tokens_that_the_model_has_no_embedding_for_are_named():
    rows = source_of("ab", "az", "b")
    problem = r"a:1.*it has token 122 \('z'\), but the model's vocabulary ends at 99"
    with pytest.raises(BadRows, match=problem):
        prompts_of(rows, vocab_size=100)
    kept = prompts_of(rows, vocab_size=100, on_bad_row="skip")
    assert ([bad.kind for bad in kept.skipped], len(kept)) == (["unknown_token"], 2)
    assert len(prompts_of(rows, vocab_size=123)) == 3


def test_prompts_that_a_template_could_make_and_does_not_are_named():
    assert prompts_of(source_of(MESSAGES)).warnings == []
    (line,) = prompts_of(source_of("hi", MESSAGES)).warnings
    assert line.startswith("WARNING: prompts are text, for which the chat template of")
    assert prompts_of(source_of("hi"), chat_template="never").warnings == []


def test_rows_that_a_template_refuses_are_bad_rows():
    calls = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}]
    with pytest.raises(BadRows, match=r"a:1: the prompt ends with the assistant's tool calls.*\[not_rendered\]"):
        prompts_of(source_of(MESSAGES, calls))
    assert len(prompts_of(source_of(MESSAGES, calls), on_bad_row="skip")) == 1


def test_prompts_with_other_tokens_have_another_digest():
    digests = [prompts_of(source_of(*texts)).digest for texts in (("ab", "c"), ("ab", "c"), ("a", "bc"), ("ab", "d"))]
    assert digests[0] == digests[1] and len(set(digests)) == 3
