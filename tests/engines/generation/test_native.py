from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Response
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.engines.generation.support import (
    TINY,
    assert_same_answers,
    awake_engine,
    make_engine,
    prompt_of,
    request,
    run,
    small_rollout,
    wake,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LENGTHS = [1, 3, 4, 5, 9, 17]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_size,
        rms_norm_eps=TINY.rms_eps,
        max_position_embeddings=TINY.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": TINY.rope_theta},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def engine_of(model: PreTrainedModel, **rollout: object) -> NativeEngine:
    engine = make_engine(small_rollout(**rollout))
    engine.load_weights(model.named_parameters())
    engine.wake_cache()
    return engine


def full_sequence_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], response: Response, temperature: float):
    with torch.no_grad():
        logits_TV = model(torch.tensor([[*prompt, *response.token_ids]])).logits[0] / temperature
    logprobs_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]


@pytest.mark.on_device
@pytest.mark.parametrize("slots", [3, 64])
def test_greedy_tokens_equal_transformers_generate(model: PreTrainedModel, slots: int):
    prompts = [prompt_of(length) for length in LENGTHS]
    requests = [request(prompt, [2 * index, 2 * index + 1], GREEDY) for index, prompt in enumerate(prompts)]
    responses = run(engine_of(model, max_running_rows=slots), requests)
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected = tuple(tokens[0, len(prompt) :].tolist())
        for row in (2 * index, 2 * index + 1):
            assert responses[row].token_ids == expected
            assert responses[row].finish == "length"


def test_logprobs_equal_a_full_sequence_forward(model: PreTrainedModel):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=20)
    prompts = [prompt_of(length) for length in LENGTHS]
    requests = [request(prompt, range(4 * i, 4 * i + 4), sampling) for i, prompt in enumerate(prompts)]
    for row, response in run(engine_of(model), requests).items():
        expected = full_sequence_logprobs(model, prompts[row // 4], response, temperature=0.8)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-5, rtol=1e-5)


def test_a_rows_tokens_do_not_depend_on_the_rows_beside_it():
    sampling = SamplingParams(max_tokens=24, stop_token_ids=(7,))
    requests = [request(prompt_of(length), [3 * i, 3 * i + 1, 3 * i + 2], sampling) for i, length in enumerate(LENGTHS)]
    together = run(awake_engine(), requests)
    crowded = run(awake_engine(max_running_rows=4), requests[::-1])
    alone = [run(awake_engine(), [request(prompt_of(LENGTHS[row // 3]), [row], sampling)])[row] for row in (0, 4, 17)]
    assert len({response.token_ids for response in together.values()}) == len(together)
    for row, response in together.items():
        assert crowded[row].token_ids == response.token_ids
    for response in alone:
        assert response.token_ids == together[response.row].token_ids
        torch.testing.assert_close(response.logprobs, together[response.row].logprobs, atol=1e-5, rtol=0)


@pytest.mark.cpu_only(reason="elsewhere attention may round a row by what is beside it")
def test_decoding_rounds_a_row_alike_in_every_batch():
    # An even number: the last values of an activation function whose number is no multiple of 32 are rounded apart.
    requests = [request(prompt_of(6), [row], SamplingParams(max_tokens=30)) for row in range(8)]
    together, alone = run(awake_engine(), requests), run(awake_engine(max_running_rows=1), requests)
    assert together == alone


@pytest.mark.on_device
def test_siblings_copy_the_shared_block_before_writing_into_it():
    prompt, sampling = prompt_of(6), SamplingParams(max_tokens=10)
    rows = list(range(8))
    shared = run(awake_engine(), [request(prompt, rows, sampling)])
    separate = run(awake_engine(), [request(prompt, [row], sampling) for row in rows])
    assert_same_answers(shared, separate)
    assert len({response.token_ids for response in shared.values()}) == len(rows)


def test_a_group_larger_than_the_slots_gets_the_same_answers():
    prompt, sampling = prompt_of(7), SamplingParams(max_tokens=5)
    expected = run(awake_engine(), [request(prompt, range(10), sampling)])
    assert_same_answers(run(awake_engine(max_running_rows=3), [request(prompt, range(10), sampling)]), expected)


def test_a_small_cache_only_makes_rows_wait():
    requests = [request(prompt_of(length), [2 * i, 2 * i + 1], GREEDY) for i, length in enumerate(LENGTHS)]
    block_bytes = 2 * TINY.num_layers * 4 * TINY.num_kv_heads * TINY.head_size * 4
    small = awake_engine(kv_cache_gib=14 * block_bytes / 2**30)
    assert small.memory_bytes()["kv_cache"] == 14 * block_bytes
    tokens = {row: response.token_ids for row, response in run(small, requests).items()}
    assert tokens == {row: response.token_ids for row, response in run(awake_engine(), requests).items()}
    with pytest.raises(ValueError, match="can need 16 KV blocks .* the cache has 13; raise rollout.kv_cache_gib"):
        small.submit([request(prompt_of(40), [0], replace(GREEDY, max_tokens=24))])


def test_rows_may_join_while_others_run():
    sampling = SamplingParams(max_tokens=15)
    requests = [request(prompt_of(length), [i], sampling) for i, length in enumerate(LENGTHS)]
    expected = run(awake_engine(), requests)
    engine, responses = awake_engine(), []
    for joining in requests:
        engine.submit([joining])
        responses += engine.step()
    while engine.num_unfinished:
        responses += engine.step()
    tokens = {response.row: response.token_ids for response in responses}
    assert tokens == {row: response.token_ids for row, response in expected.items()}


def test_a_stop_token_ends_the_row_and_belongs_to_it():
    free = run(awake_engine(), [request(prompt_of(5), [0], GREEDY)])[0]
    stop = free.token_ids[3]
    sampling = replace(GREEDY, stop_token_ids=(stop,))
    stopped = run(awake_engine(), [request(prompt_of(5), [0], sampling)])[0]
    assert stopped.finish == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_responses_come_in_the_step_in_which_they_end():
    engine = awake_engine()
    lengths = {0: 1, 1: 3, 2: 6}
    engine.submit([request(prompt_of(4), [row], replace(GREEDY, max_tokens=n)) for row, n in lengths.items()])
    ended = [[response.row for response in engine.step()] for _ in range(5)]
    # The first step also decodes, so that it gives two tokens.
    assert ended == [[0], [1], [], [], [2]]


def test_each_token_carries_the_version_it_was_drawn_with():
    engine = awake_engine()
    engine.submit([request(prompt_of(4), [0], replace(GREEDY, max_tokens=5))])
    responses = []
    for version in (3, 4, 5, 6):
        engine.version = version
        responses += engine.step()
    assert responses[0].versions == (3, 3, 4, 5, 6)


@pytest.mark.on_device
def test_abort_returns_the_tokens_so_far_and_the_answer_can_go_on():
    sampling = SamplingParams(max_tokens=12)
    whole = run(awake_engine(), [request(prompt_of(6), [5], sampling)])[5]
    engine = awake_engine()
    engine.submit([request(prompt_of(6), [5], sampling)])
    engine.step()
    engine.step()
    (partial,) = engine.abort()
    assert partial.finish == "aborted" and partial.token_ids == whole.token_ids[:3]
    longer = request((*prompt_of(6), *partial.token_ids), [5], replace(sampling, max_tokens=9))
    assert run(engine, [longer])[5].token_ids == whole.token_ids[3:]


def test_a_sleeping_engine_refuses_work_and_holds_no_bytes():
    engine = make_engine(small_rollout())
    nothing = {"generation_weights": 0, "kv_cache": 0}
    assert engine.memory_bytes() == nothing
    with pytest.raises(RuntimeError, match="can't wake before the weights"):
        engine.wake_cache()
    wake(engine)
    before = run(engine, [request(prompt_of(5), [0], GREEDY)])
    kept_by_the_caller = engine.wake_weights()
    assert engine.memory_bytes()["generation_weights"] >= sum(w.nbytes for w in kept_by_the_caller.values())
    assert engine.memory_bytes()["kv_cache"] > 0
    engine.sleep()
    assert engine.memory_bytes() == nothing
    assert all(not weight.untyped_storage().nbytes() for weight in kept_by_the_caller.values())
    for use in (engine.step, lambda: engine.submit([request(prompt_of(5), [0], GREEDY)])):
        with pytest.raises(RuntimeError, match="sleeping engine"):
            use()
    assert run(wake(engine), [request(prompt_of(5), [0], GREEDY)]) == before


def test_an_engine_with_unfinished_rows_does_not_sleep():
    engine = awake_engine()
    engine.submit([request(prompt_of(5), [0, 1], GREEDY)])
    engine.step()
    with pytest.raises(RuntimeError, match="2 rows are unfinished"):
        engine.sleep()
    engine.abort()
    engine.sleep()


@pytest.mark.on_device
def test_weights_filled_in_place_are_the_ones_used():
    engine = make_engine(small_rollout())
    other = wake(make_engine(small_rollout()), seed=1)
    weights = engine.wake_weights()
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == engine.weight_shapes()
    for name, weight in other.wake_weights().items():
        weights[name].copy_(weight)
    engine.wake_cache()
    work = [request(prompt_of(5), [0, 1], SamplingParams(max_tokens=8))]
    assert run(engine, work) == run(other, work)


def test_wrong_weights_are_refused():
    engine = make_engine(RolloutConfig())
    with pytest.raises(ValueError, match=r"weight lm_head.weight of shape \(2, 2\)"):
        engine.load_weights([("lm_head.weight", torch.zeros(2, 2))])
    with pytest.raises(ValueError, match="weights are missing, such as model.embed_tokens.weight"):
        engine.load_weights([])


def test_weights_that_are_not_finite_stop_the_generation():
    engine = awake_engine()
    engine.wake_weights()["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(RuntimeError, match="policy version 0 aren't finite"):
        run(engine, [request(prompt_of(5), [0], GREEDY)])


def test_a_row_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="120 prompt .* 12 new tokens = 132, but the model was made for 128"):
        awake_engine().submit([request(prompt_of(120), [0], GREEDY)])


def test_engine_kwargs_are_refused_because_nothing_reads_them():
    with pytest.raises(ValueError, match=r"rollout.engine_kwargs has \['max_model_len'\]"):
        make_engine(RolloutConfig(engine_kwargs={"max_model_len": 5}))
