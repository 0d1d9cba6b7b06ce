"""What a run consists of follows from the algorithm's columns."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.made import latent_decoder

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.engines.models.make_model import decoder_config
from spmdrl.engines.models.rope_scaling import YarnScaling
from spmdrl.job.start.checked_rows import unread_columns
from spmdrl.job.start.checked_run import states_of
from spmdrl.job.start.model_checks import check_vllm, check_vllm_computes
from spmdrl.job.start.prepared import check_positions
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.roles import WorkerState as State
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.nouns.settings.model_sizes import ClampedGate, IndexerSizes
from spmdrl.runtime.launch import LaunchEnvironment

MODEL = ["model.make={}", "data.train=synthetic://addition?count=10"]
EXACT = ["debug.batch_invariant=true", "resources.device=cpu"]


def states(*overrides: str) -> list[State]:
    config = load_config([], [*MODEL, *overrides]).value
    return list(states_of(config, build_algorithm(config.algo)))


def test_no_pass_that_the_algorithm_does_not_need():
    assert states() == [State.GENERATION, State.REWARD, State.ADVANTAGE, State.UPDATE]


def test_more_updates_a_step_bring_the_old_logprobs_and_a_kl_term_the_reference():
    assert State.OLD_LOGPROBS in states("train.updates_per_step=2")
    assert State.OLD_LOGPROBS in states("train.epochs_per_step=2")
    assert State.REFERENCE in states("algo.kl_coef=0.1")
    in_reward = states("algo.kl_coef=0.1", "algo.kl_in=reward")
    assert in_reward.index(State.REFERENCE) < in_reward.index(State.ADVANTAGE)


def test_log_probs_that_agree_to_the_bit_need_no_second_pass():
    assert State.OLD_LOGPROBS not in states("train.updates_per_step=2", *EXACT)
    # What was begun in an earlier step has that step's log-probs.
    assert State.OLD_LOGPROBS in states("train.updates_per_step=2", *EXACT, "rollout.partial_max_rounds=2")


def test_the_configs_of_the_repository_are_right():
    root = Path(__file__).parents[2]
    files = sorted((root / "configs").rglob("*.yaml"))
    assert len(files) >= 4
    for path in files:
        data = [] if path.name == "quickstart.yaml" else ["data.train=synthetic://addition?count=10"]
        # Rows that a recipe's script makes.
        data += ["data.eval=null"] if (path.parent / "make_rows.py").exists() else []
        # A library that may be missing makes the rows, and scores them.
        data += ["data.eval=null", "reward.functions=[exact]"] if path.parent.name == "reasoning_gym" else []
        # What chooses an algorithm stands behind a config that has a model.
        before = [root / "configs/debug/quickstart.yaml"] if path.parent.name == "algorithms" else []
        # The paper's name their number of devices. Wherever these and engines are.
        ranks = int(path.stem.rpartition("_")[2]) if path.parent.name == "paper" else 1
        launch = LaunchEnvironment(world_size=ranks, local_world_size=ranks)
        check_run(load_config([*before, path], data), "train", launch=launch)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.updates_per_step=64"], "updates_per_step is 64.*prompts_per_step = 32"),
        (
            [*EXACT, "rollout.engine=vllm", "model.dtype=bfloat16"],
            "set model.dtype to float32, rollout.engine to native, or debug.batch_invariant to false",
        ),
        ([*EXACT, "lora={merge: true}"], "lora.merge is true.*set lora.merge to false, or debug"),
        (["rollout.cuda_graphs=true"], "cuda_graphs is true, but graphs are captured on cuda alone.*set it to null"),
        (["seed=-1"], "command line: seed is -1, but must be >= 0"),
        (["rollout.temperature=0"], "rollout.temperature is 0"),
        (
            ["rollout.partial_max_rounds=2", "debug.rollouts_to=x"],
            "set partial_max_rounds to 1 or leave out .*rollouts_to",
        ),
        (
            ["algo={name: dapo, filter_on: math, overlong_cache: 300}"],
            "is 300, .* = 256 tokens; lower it",
        ),
        (["algo.name=dapo", "rollout.partial_max_rounds=2"], "max_refills is 4, .*rounds is 2: .*refills to 0, or"),
        (["algo={name: dapo, filter_on: exact}"], "filter_on is 'exact', but reward.functions has math; name one"),
        (["rollout.partial_extra_prompts=4"], "partial_max_rounds is 1, .* raise partial_max_rounds"),
        (["rollout.partial_max_rounds=2", "rollout.partial_extra_prompts=33"], "between 1 and .* = 32"),
        (["debug.rollouts_from=x", "data.eval=synthetic://addition?count=5&split=test"], "set data.eval to null"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_run(load_config([], [*MODEL, *overrides]), "train")


CHAT = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}


def test_a_run_has_messages_alone_where_no_row_is_a_text(tmp_path):
    asked = CHAT["messages"][:1]
    pair = {"chosen": CHAT["messages"], "rejected": [*asked, {"role": "assistant", "content": "3"}]}
    contents = {"chat": [CHAT] * 5, "pairs": [pair] * 5, "text": [{"prompt": "1+1=", "answer": "2"}] * 5}
    contents["prompts"] = [{"prompt": asked, "answer": "2"}] * 5
    contents["mixed"] = contents["prompts"] + contents["text"]
    for name, rows in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))

    def are_messages(verb: str, **names: str) -> bool:
        settings = [f"data.{key}={tmp_path / name}.json" for key, name in names.items()]
        settings += [] if verb == "train" else [f"{verb}.max_steps=1"]
        return check_run(load_config([], ["model.make={}", *settings]), verb).prompts_are_messages

    assert are_messages("sft", train="chat", eval="prompts") and are_messages("preferences", train="pairs")
    assert are_messages("train", train="prompts") and not are_messages("train", train="mixed")
    assert not are_messages("train", train="prompts", eval="text") and not are_messages("train", train="text")


def test_each_verb_asks_of_rows_what_it_uses(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([CHAT] * 5))

    def check(verb, *overrides):
        steps = {"sft": ["sft.max_steps=1"], "preferences": ["preferences.max_steps=1"]}.get(verb, [])
        return check_run(load_config([], ["model.make={}", "data.chat_template=never", *steps, *overrides]), verb)

    train, held_out = f"data.train={path}", f"data.eval={path}"
    assert [row.completion for row in check("sft", train).train_rows[0].rows] == ["2"] * 5
    with pytest.raises(ConfigError, match="no answer in .* built-in reward functions need one"):
        check("train", train)
    with pytest.raises(ConfigError, match="no answer in .* built-in reward functions need one"):
        check("eval", held_out)
    # A model's answers to prompts are judged by nothing.
    assert len(check("generate", held_out).eval_rows[0].rows) == 5
    reward = tmp_path / "fn.py"
    reward.write_text("def fn(completions, **columns): return [0.0] * len(completions)\n")
    for verb, key in (("train", train), ("eval", held_out)):
        check(verb, key, f"reward.functions=[{reward}:fn]")
    path.write_text(json.dumps([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}]))
    with pytest.raises(ConfigError, match="nothing to learn") as refusal:
        check("sft", train)
    assert "reward" not in str(refusal.value)
    with pytest.raises(ConfigError, match="nothing to learn"):
        check("train", train, "sft.max_steps=3", f"reward.functions=[{reward}:fn]")
    path.write_text(json.dumps([CHAT]))
    assert check("sft", train, "reward.functions=[nowhere.py:fn]").train_rows
    with pytest.raises(ConfigError, match="sft.max_steps is 0, so the sft verb has nothing to do"):
        check("sft", train, "sft.max_steps=0")


@pytest.mark.parametrize(
    ("verb", "row", "taker"),
    [
        ("train", {"prompt": "1", "chosen": "2", "rejected": "3"}, "preferences"),
        ("sft", {"prompt": "1", "chosen": "2", "rejected": "3"}, "preferences"),
        ("train", CHAT, "sft"),
        ("preferences", {"prompt": "1", "answer": "2"}, "sft"),
        ("preferences", {"prompt": "1"}, None),
    ],
)
def test_rows_of_another_verb_are_refused_with_that_verbs_name(verb, row, taker, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row] * 5))
    with pytest.raises(ConfigError, match="5 of 5 rows can't be used") as refusal:
        check_run(load_config([], ["model.make={}", f"data.train={path}"]), verb)
    assert ("takes these rows" in str(refusal.value)) == (taker is not None)
    assert taker is None or f"`spmdrl check {taker}` takes these rows" in str(refusal.value)


@pytest.mark.parametrize(
    ("function", "unread"),
    [
        ("def fn(completions, answer): return [0.0] * len(completions)", ["level", "source"]),
        ("def fn(completions, level=0): return [0.0] * len(completions)", ["source"]),
        ("def fn(completions, **columns): return [0.0] * len(completions)", []),
        ("def fn(solution_str, ground_truth): return 0.0", ["level", "source"]),
    ],
)
def test_columns_are_unread_where_no_parameter_of_a_reward_function_takes_them(function, unread, tmp_path):
    path, reward = tmp_path / "rows.json", tmp_path / "reward.py"
    path.write_text(json.dumps([{"prompt": "1", "ground_truth": "2", "level": 3, "source": "x", "tools": []}]))
    reward.write_text(function + "\n")
    loaded = load_config([], ["model.make={}", f"data.train={path}", f"reward.functions=[{reward}:fn]"])
    assert unread_columns(check_run(loaded, "train")) == unread


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("resources.generation.expert=2", "cuts experts like other matrices"),
        ("resources.generation.tensor_stride=2", "takes consecutive ranks"),
        ("train.routing.replay=rollout", "doesn't return the experts"),
    ],
)
def test_what_vllm_cannot_do_is_refused(override, words):
    config = load_config([], [*MODEL, "rollout.engine=vllm", override]).value
    with pytest.raises(ValueError, match=words):
        check_vllm(config)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_that_vllm_reads_otherwise_than_transformers_is_refused_there(key, tmp_path):
    for factor, is_refused in ((0.878, True), (1, False), (None, False)):
        scaling = {"rope_type": "yarn", "factor": 4.0} | ({} if factor is None else {"attn_factor": factor})
        (tmp_path / "config.json").write_text(json.dumps({key: scaling}))
        expected = pytest.raises(ValueError, match="attn_factor 0.878, by which vLLM") if is_refused else nullcontext()
        with expected:
            check_vllm_computes(tmp_path, decoder_config(MakeConfig()))


def test_vllm_is_refused_for_quantized_weights(tmp_path: Path) -> None:
    content = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"weights in .* are quantized \(fp8\), .* set rollout.engine to native"):
        check_vllm_computes(tmp_path, decoder_config(MakeConfig()))


def test_parts_that_vllms_classes_do_not_read_from_a_config_are_refused_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for family in ("glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3"):
        with pytest.raises(ValueError, match=f"vLLM gives a {family} a head of its own.*tie_word_embeddings false"):
            check_vllm_computes(tmp_path, decoder_config(MakeConfig(model_type=family)))
        if family != "gpt_oss":
            check_vllm_computes(tmp_path, decoder_config(MakeConfig(model_type=family, tie_word_embeddings=False)))
    with pytest.raises(ValueError, match="vLLM gives a glm_moe_dsa a head of its own"):
        check_vllm_computes(tmp_path, replace(decoder_config(MakeConfig()), model_type="glm_moe_dsa"))
    made = decoder_config(MakeConfig(model_type="gpt_oss", tie_word_embeddings=False))
    usual = replace(made, rope_scaling=YarnScaling(32.0, original_positions=64))
    check_vllm_computes(tmp_path, usual)
    for other, words in [
        (made, "yarn scaling without attention_factor and mscale, which"),
        (replace(usual, rope_scaling=replace(usual.rope_scaling, attention_factor=2.0)), "yarn scaling without"),
        (replace(usual, window=replace(usual.window, layers=(1, 3))), "a window in every other layer"),
        (replace(usual, moe=replace(usual.moe, clamp=ClampedGate(5.0, 1.702))), "swiglu_limit 7.0"),
    ]:
        with pytest.raises(ValueError, match=f"every gpt_oss with {words}.*set rollout.engine to native"):
            check_vllm_computes(tmp_path, other)


def test_aliases_of_other_trainers_mean_the_same():
    loaded = load_config([], [*MODEL, "learning_rate=1e-5", "beta=0.2", "max_new_tokens=64"])
    assert loaded.value.optim.lr == 1e-5
    assert loaded.value.algo.kl_coef == 0.2
    assert loaded.value.rollout.max_completion_length == 64


class LongPrompts:
    """One prompt of 20 tokens."""

    def longer_than(self, num_tokens: int) -> list[tuple[int, str]]:
        return [(20, "rows.jsonl:7")]


def test_rows_in_which_sparse_attention_would_leave_tokens_out_are_refused_with_the_rule():
    made = latent_decoder(value_size=4, query_rank=8, max_position_embeddings=64)
    assert not made.position_rule
    indexer = IndexerSizes(num_heads=2, head_size=8, num_chosen=16, shared_layers=(), max_positions=64)
    decoder = replace(made, max_positions=16, latent=replace(made.latent, indexer=indexer))
    limit = (
        "it needs 24 positions, but the model has 16 positions .index_topk; beyond them, attention leaves out tokens"
    )
    with pytest.raises(
        ValueError, match=f"{limit}.*rows.jsonl:7; lower .*or leave them out by data.max_prompt_length=12"
    ):
        check_positions(LongPrompts(), "data.train", decoder, 4)
