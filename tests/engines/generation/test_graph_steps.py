"""Decoding steps that run as graphs, started before the last one was read, answer as those run one by one do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from spmdrl.engines.generation.native.fixed_step import padded_rows, padded_width
from spmdrl.engines.generation.native.graph_steps import CAPTURES
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import PartialResponse, Request, Response
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.ops import TABLE
from spmdrl.nouns.settings.rollout_config import RolloutConfig, SamplingParams
from tests.engines.generation.recorded_graphs import RecordingCapture, run_in_pytorch
from tests.engines.generation.schedules import (
    FAMILIES,
    GREEDY,
    SCHEDULES,
    requests_with,
    responses_of,
    rollout_of,
    tokens_in,
    weights_of,
)
from tests.engines.generation.support import prompt_of, request, run
from tests.support.tuned import TunedRollout

pytestmark = pytest.mark.cpu_only(reason="the graphs that are recorded here are a CPU's")

# Rows that end one by one, in an order of their own.
SAMPLED = SamplingParams(max_tokens=14, stop_token_ids=(3, 4, 5))
QWEN = FAMILIES["qwen3"]


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[RecordingCapture]:
    """Graphs and paged attention on the CPU; returns what captured, one for each engine."""
    monkeypatch.setitem(CAPTURES, "cpu", RecordingCapture)
    run_in_pytorch(monkeypatch)
    monkeypatch.setattr(RecordingCapture, "made", [])
    return RecordingCapture.made


def engine_of(rollout: RolloutConfig, config: DecoderConfig = QWEN, *, graphs: bool = True) -> NativeEngine:
    # As on accelerators, where weights lie plain.
    rollout = replace(rollout, cuda_graphs=graphs, pack_weights=False)
    return NativeEngine(config, rollout, torch.device("cpu"), torch.float32)


def filled(engine: NativeEngine, scale: float = 1.0) -> NativeEngine:
    engine.load_weights((name, scale * weight) for name, weight in weights_of(engine._config).items())
    engine.wake_cache()
    return engine


def assert_same(found: dict[int, Response], expected: dict[int, Response]) -> None:
    assert tokens_in(found) == tokens_in(expected)
    for row, response in found.items():
        assert response.finish == expected[row].finish and response.versions == expected[row].versions
        torch.testing.assert_close(response.logprobs, expected[row].logprobs, atol=1e-4, rtol=0)


def answers_of(requests: Sequence[Request]) -> list[dict[int, Response]]:
    """Without graphs and with them."""
    return [run(filled(engine_of(TunedRollout(block_size=4), graphs=graphs)), requests) for graphs in (False, True)]


@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_draws_an_id_without_a_token(graphs: bool) -> None:
    rollout = TunedRollout(block_size=4, cuda_graphs=graphs, pack_weights=False)
    barred = tuple(range(6, QWEN.vocab_size, 2))
    engine = filled(NativeEngine(QWEN, rollout, torch.device("cpu"), torch.float32, ids_without_token=barred))
    for sampling in (SAMPLED, GREEDY):
        prompt = prompt_of(5)
        for response in run(engine, [request(prompt, range(8), sampling)]).values():
            assert response.token_ids and not set(barred) & set(response.token_ids)
            (scored,) = engine.score([[*prompt, *response.token_ids]])
            torch.testing.assert_close(list(response.logprobs), scored[len(prompt) - 1 :].tolist(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_schedule(how: str, sampling: SamplingParams, captures: list[RecordingCapture]) -> None:
    schedule = SCHEDULES[how]
    expected, found = (
        responses_of(filled(engine_of(rollout_of(QWEN, schedule, 1), graphs=graphs)), schedule, requests_with(sampling))
        for graphs in (False, True)
    )
    assert sum(capture.num_captured for capture in captures) > 0
    assert_same(found, expected)


@pytest.mark.parametrize("family", [name for name, config in FAMILIES.items() if config.moe is None])
def test_every_dense_family(family: str) -> None:
    # Rows wait for slots and blocks that others leave.
    rollout = TunedRollout(block_size=4, max_running_rows=4)
    expected, found = (
        run(filled(engine_of(rollout, FAMILIES[family], graphs=graphs)), requests_with(SAMPLED))
        for graphs in (False, True)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_rows_of_windows_and_slots_are_preempted_and_run_ahead(family: str) -> None:
    config, schedule = FAMILIES[family], SCHEDULES["preempted"]
    expected, found = (
        responses_of(
            filled(engine_of(rollout_of(config, schedule, 1), config, graphs=graphs)), schedule, requests_with(SAMPLED)
        )
        for graphs in (False, True)
    )
    assert_same(found, expected)


def test_full_slots_do_not_keep_steps_from_running_ahead() -> None:
    engine = filled(engine_of(TunedRollout(block_size=4, max_running_rows=3), FAMILIES["qwen3_5_text"]))
    engine.submit([request(prompt_of(5), [0, 1, 2], GREEDY)])
    engine.step(), engine.step()
    assert len(engine._steps.scheduler.running) == 3 and engine._pipeline.num_started == 1


def test_rows_leave_through_every_padded_size() -> None:
    lengths = range(1, 40)
    requests = [request(prompt_of(3 + n % 5), [n], SamplingParams(temperature=0.7, max_tokens=n)) for n in lengths]
    expected, found = (run(filled(engine_of(TunedRollout(block_size=4), graphs=graphs)), requests) for graphs in (0, 1))
    assert_same(found, expected)


def test_rows_of_different_sampling_and_filters() -> None:
    kinds = [SAMPLED, GREEDY, replace(SAMPLED, top_p=0.7, top_k=9), replace(SAMPLED, temperature=1.5, min_p=0.05)]
    requests = [request(prompt_of(4 + n), [n], kinds[n % 4]) for n in range(11)]
    expected, found = (run(filled(engine_of(TunedRollout(block_size=4), graphs=graphs)), requests) for graphs in (0, 1))
    assert_same(found, expected)


def test_weights_that_move_are_captured_anew(captures: list[RecordingCapture]) -> None:
    plain_engine, engine = (engine_of(TunedRollout(block_size=4), graphs=graphs) for graphs in (False, True))
    answers = []
    for scale in (1.0, -1.0, 0.5):
        expected, found = (run(filled(which, scale), requests_with(SAMPLED)) for which in (plain_engine, engine))
        assert_same(found, expected)
        answers.append(tokens_in(found))
        plain_engine.sleep(), engine.sleep()
    assert answers[0] != answers[1] != answers[2]
    assert len(captures) == 1 and captures[0].num_forgotten == 3


def test_weights_filled_again_while_rows_run_are_used() -> None:
    def answered(graphs: bool) -> dict[int, Response]:
        engine = filled(engine_of(TunedRollout(block_size=4), graphs=graphs))
        engine.submit(requests_with(GREEDY))
        # A step that the host hasn't read was run with the old weights.
        responses = engine.step() + engine.step() + (engine.step() if graphs else [])
        engine.version = 1
        for name, weight in engine.wake_weights().items():
            weight.copy_(-weights_of(QWEN)[name])
        while engine.has_work:
            responses += engine.step()
        return {response.row: response for response in responses}

    found, expected = answered(True), answered(False)
    assert {version for response in found.values() for version in response.versions} == {0, 1}
    assert found[0].versions.count(0) == 4 and expected[0].versions.count(0) == 3


def test_the_largest_step_is_captured_first(captures: list[RecordingCapture], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = filled(engine_of(TunedRollout(block_size=4, max_running_rows=20, kv_cache_gib=1e-3))), []
    inner = engine._pipeline._graphs._run
    monkeypatch.setattr(engine._pipeline._graphs, "_run", lambda shape: (sizes.append(shape.num_rows), inner(shape)))
    # The first step starts no more than a prompt of 30 tokens.
    engine._steps.scheduler._rollout = replace(engine._rollout, max_prefill_tokens=30)
    run(engine, [request(prompt_of(30, seed), [2 * seed, 2 * seed + 1], GREEDY) for seed in range(12)])
    order = list(dict.fromkeys(sizes))
    assert order[:2] == [24, 4] and len(captures) == 1 and captures[0].num_captured == len(order) <= 6


def test_padding_reaches_no_row() -> None:
    engines = [filled(engine_of(TunedRollout(block_size=4))) for _ in range(2)]
    requests = [request(prompt_of(7), [0, 1, 2, 3, 4], SAMPLED)]
    for engine, value in zip(engines, (0.0, 7.0), strict=True):
        for values in engine._cache.layer(0).store._stores:
            values[:, 0] = value
    first, second = (run(engine, requests) for engine in engines)
    assert first == second
    # Of the 8 rows of a step, 3 wrote into the scratch block, and nowhere else.
    alone = [
        run(filled(engine_of(TunedRollout(block_size=4))), [request(prompt_of(7), [n], SAMPLED)])[n] for n in range(5)
    ]
    assert [response.token_ids for response in alone] == [first[n].token_ids for n in range(5)]


def continued(requests: Sequence[Request], responses: Sequence[Response]) -> list[Request]:
    partial = {r.row: PartialResponse(r.token_ids, r.logprobs, r.versions) for r in responses if r.finish == "aborted"}
    return [
        replace(request, rows=(row,), seeds=(seed,), partial=(partial[row],))
        for request in requests
        for row, seed in zip(request.rows, request.seeds, strict=True)
        if row in partial
    ]


def test_aborted_rows_go_on_as_if_they_had_never_stopped() -> None:
    requests = requests_with(SAMPLED)
    expected = run(filled(engine_of(TunedRollout(block_size=4), graphs=False)), requests)
    engine, found = filled(engine_of(TunedRollout(block_size=4))), {}
    while requests:
        engine.submit(requests)
        responses = engine.step() + engine.step() + engine.step() + engine.abort()
        found |= {response.row: response for response in responses if response.finish != "aborted"}
        requests = continued(requests, responses)
    assert_same(found, expected)


def test_weights_that_are_not_finite_stop_the_generation() -> None:
    engine = filled(engine_of(TunedRollout(block_size=4)))
    engine.submit([request(prompt_of(5), [0], GREEDY)])
    engine.step()
    engine.wake_weights()["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(RuntimeError, match="policy version 0 aren't finite"):
        while engine.has_work:
            engine.step()
    (response,) = engine.abort()
    assert len(response.token_ids) in (1, 2)
    engine.sleep()


def test_graphs_are_in_the_memory_held_and_end_with_the_engine() -> None:
    engine = filled(engine_of(TunedRollout(block_size=4)))
    assert engine.memory_bytes()["decode_graphs"] == 0
    run(engine, requests_with(GREEDY))
    assert engine.memory_bytes()["decode_graphs"] > 1000
    engine.sleep()
    assert not any(engine.memory_bytes().values())


def test_padded_sizes() -> None:
    sizes = sorted({padded_rows(number) for number in range(1, 257)})
    assert sizes == [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(number <= padded_rows(number) < number * 1.5 + 4 for number in range(1, 2000))
    assert [padded_width(number) for number in (1, 16, 17, 65, 1024)] == [16, 16, 64, 256, 1024]


def test_what_cannot_be_captured_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(words: str, config: DecoderConfig = QWEN) -> None:
        with pytest.raises(ValueError, match=f"rollout.cuda_graphs is true, but .*{words}.*; set it to null"):
            engine_of(TunedRollout(block_size=4), config)
        left_out = NativeEngine(config, RolloutConfig(), torch.device("cpu"), torch.float32)
        assert left_out._pipeline is None

    refuse("the model is sparse", FAMILIES["qwen3_moe"])
    monkeypatch.setitem(TABLE["paged_attention"], "cpu", plain.paged_attention)
    refuse("needs Triton")
    monkeypatch.delitem(CAPTURES, "cpu")
    refuse("the device is cpu")


def test_a_capture_that_fails_has_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: RecordingCapture, run: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordingCapture, "capture", capture)
    with pytest.raises(RuntimeError, match="of 4 rows couldn't be captured.*set rollout.cuda_graphs to false"):
        run(filled(engine_of(TunedRollout(block_size=4))), [request(prompt_of(5), [0], GREEDY)])


def test_longer_tables_are_made_room_for_while_rows_run() -> None:
    longer = replace(SAMPLED, max_tokens=100)

    def answered(graphs: bool) -> dict[int, Response]:
        engine = filled(engine_of(TunedRollout(block_size=4), graphs=graphs))
        engine.submit([request(prompt_of(20), [0, 1], SAMPLED)])
        responses = engine.step() + engine.step()
        engine.submit([request(prompt_of(6), [2, 3], longer)])
        while engine.has_work:
            responses += engine.step()
        responses += run(engine, [request(prompt_of(9), [4], SAMPLED)]).values()
        return {response.row: response for response in responses}

    assert_same(answered(True), answered(False))


def test_a_row_may_end_with_the_token_that_is_on_its_way_when_blocks_run_out() -> None:
    block_bytes = 2 * QWEN.num_layers * 4 * QWEN.num_kv_heads * QWEN.head_size * 4
    # Eight blocks: the older row takes seven in the end, and the newer one two or three meanwhile.
    rollout = TunedRollout(block_size=4, kv_cache_gib=9 * block_bytes / 2**30)
    older, newer = replace(SAMPLED, max_tokens=20, stop_token_ids=()), replace(SAMPLED, stop_token_ids=())
    for num_tokens in range(2, 12):
        requests = [
            request(prompt_of(8), [0], older),
            request(prompt_of(6, num_tokens), [1], replace(newer, max_tokens=num_tokens)),
        ]
        expected, found = (run(filled(engine_of(rollout, graphs=graphs)), requests) for graphs in (False, True))
        assert_same(found, expected)
