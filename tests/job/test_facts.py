"""Two ranks of which one differs in a config key, code, data, rewards or model are refused, with what differs named."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from tests.support.jobs import ON_DEVICES, ROOT, environment, run_job, tiny_config
from tests.support.ranks import HOST, rank_environment, run_ranks
from torch.distributed import PrefixStore, TCPStore

import spmdrl
from spmdrl.algorithms.table import ALGORITHMS
from spmdrl.config.config import Config, load_config
from spmdrl.config.given import value_leaves
from spmdrl.config.key_schema import bare, schema, schema_keys
from spmdrl.config.reader import ConfigError
from spmdrl.job.model.model_source import model_facts
from spmdrl.job.start import rank_facts
from spmdrl.job.start.rank_facts import start_facts
from spmdrl.job.start.start_checks import check_run
from spmdrl.resources.startup.rank_agreement import Alike, difference, meet
from spmdrl.resources.world import World
from spmdrl.runtime.launch import StartRefused

NUM_WHOLE_JOBS = int(os.environ.get("SPMDRL_FUZZ", "2"))

# Keys whose other values need more than themselves, or more than their type says.
OVERRIDES = {
    "model.make": ["model.make.hidden_size=64"],
    "model.path": ["model.path=elsewhere", "model.make=null"],
    "model.revision": ["model.revision=main", "model.path=elsewhere", "model.make=null"],
    "data.train": ["data.train=synthetic://addition?low=0&high=9&count=41"],
    "data.eval": ["data.eval=synthetic://addition?low=0&high=9&count=41"],
    "data.chat_template_file": [f"data.chat_template_file={__file__}"],
    "algo.divergence_bounds": ["algo.divergence_bounds=[0.1, 0.2]"],
    "optim.betas": ["optim.betas=[0.8, 0.9]"],
    "checkpoint.save_by": ["checkpoint.save_by=1:00:00"],
    "sft.optim.betas": ["sft.optim.betas=[0.8, 0.9]"],
    "critic.optim.betas": ["critic.optim.betas=[0.8, 0.9]"],
    "preferences.optim.betas": ["preferences.optim.betas=[0.8, 0.9]"],
    "reward_model.optim.betas": ["reward_model.optim.betas=[0.8, 0.9]"],
    "lora.targets": ["lora.targets=[q_proj]"],
    "reward.code.readable": ["reward.code.readable=[/usr/share]"],
    "log.backends": ["log.backends=[jsonl]"],
    "log.alerts": ["log.alerts={kl: '> 1'}"],
    "log.alert_command": ["log.alert_command=[true]"],
    "reward.functions": ["reward.functions=[exact]"],
    "reward.judge.pattern": ["reward.judge.pattern='([01])'"],
    "reward.judge.template": ["reward.judge.template='{response}'"],
    "reward.weights": ["reward.weights=[2.0]"],
    "eval.pass_at": ["eval.pass_at=[1]"],
    "resume": ["resume=never"],
}
# What both ranks need so that a key has a second value at all.
SETTINGS = (
    [],
    ["model.make.model_type=deepseek_v3"],
    ["model.make.model_type=gemma3_text"],
    ["rollout.partial_max_rounds=2"],
    ["resources.ranks.generation=1"],
    ["resources.ranks.generation=1", "rollout.lag=1"],
    ["algo.rollout_is=tis"],
    ["algo.rollout_is=seq-mask-tis"],
    ["critic={}"],
    ["algo.name=opd", "teacher.path=here"],
    ["reward.model.path=here"],
    ["reward.judge.path=here"],
    ["lora={}"],
    ["algo.kl_coef=0.1", "reference.layout={}"],
    ["critic={}", "critic.layout={}"],
    ["algo.name=opd", "teacher.path=here", "teacher.layout={}"],
    ["reward.model.path=here", "reward.model.layout={}"],
    ["reward.judge.path=here", "reward.judge.layout={}"],
    *([f"algo.name={config().name}", "critic={}"] for config in ALGORITHMS),
    ["algo={name: ppo, kl_coef: 0.1, kl_target: 1.0}", "critic={}"],
    ["algo={name: pf_ppo, filter: power}", "critic={}"],
)


def kinds_of_keys() -> Iterator[tuple[str, Any]]:
    """Every key that holds a value and no section, with its type."""
    return ((key.name, key.kind) for key in schema(Config) if not key.sections)


def other_values(kind: Any, value: Any) -> Iterator[str]:
    """Texts that the type takes, most likely valid ones first."""
    kind = bare(kind)
    family = get_origin(kind) or kind
    if family in (Union, types.UnionType):
        for member in get_args(kind):
            yield from other_values(member, value)
    elif family is Literal:
        yield from map(str, get_args(kind))
    elif family is bool:
        yield from ("true", "false")
    elif family in (int, float):
        number = value if isinstance(value, (int, float)) else 1
        yield from map(str, (number + 1, number + 2, 2 * number, 1, 0, 4))
        if family is float:
            yield from map(str, (number / 2, number + 0.01, 0.5, 0.25))
    elif family is str:
        yield "another"
    elif family in (tuple, list):
        yield from ("[another]", "[2]", "[0.5]")
    elif family is dict or kind is Any:
        yield "{another: 1}"


@dataclass(frozen=True)
class Change:
    """Overrides of both ranks, and those of rank 1 that change the key."""

    both: list[str]
    one: list[str]


@cache
def changes(config: Path) -> dict[str, Change]:
    """For every key that has another valid value, how to set it."""
    found = {key: change_of(key, kind, config) for key, kind in kinds_of_keys()}
    return {key: change for key, change in found.items() if change is not None}


def change_of(key: str, kind: Any, config: Path) -> Change | None:
    for both in SETTINGS:
        base = values_of(config, *both)
        if key not in base:
            continue
        values = [OVERRIDES[key]] if key in OVERRIDES else [[f"{key}={text}"] for text in other_values(kind, base[key])]
        for one in values:
            with suppress(ConfigError):
                if dict(values_of(config, *both, *one)) != base:
                    return Change(both, one)
    return None


@cache
def values_of(config: Path, *overrides: str) -> dict[str, Any]:
    # Below a section that is null there is nothing.
    return dict(value_leaves(loaded(config, *overrides)))


@cache
def loaded(config: Path, *overrides: str) -> Config:
    return load_config([config], overrides).value


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_config(tmp_path_factory.mktemp("config"))


def test_every_key_of_the_schema_has_another_valid_value(config):
    keys = {key for key, _ in kinds_of_keys()}
    sections = {key for key in schema_keys(Config) if any(name.startswith(f"{key}.") for name in keys)}
    assert keys | sections == set(schema_keys(Config))
    unchanged = keys - set(changes(config))
    assert unchanged == set(), "write another value into OVERRIDES"


def refused_one_by_one(world: World, config: Path, changed: dict[str, Change]) -> list[tuple[str, str, float]]:
    """For each key, what this rank is refused with where rank 1 has another value, and after how many seconds."""
    rows = check_run(load_config([config], []), "train").train_rows

    @cache
    def facts_with(*overrides: str) -> dict[str, str]:
        return start_facts(load_config([config], overrides).value, "train", rows)

    outcomes = []
    for key, change in changed.items():
        facts = facts_with(*change.both, *(change.one if world.rank == 1 else []))
        started, told = time.monotonic(), ""
        try:
            meet(PrefixStore(f"trial/{key}", world.store), world.launch, facts, timeout_seconds=20)
        except StartRefused as refusal:
            told = str(refusal)
        outcomes.append((key, told, time.monotonic() - started))
    return outcomes


def test_every_config_key_that_differs_is_named(config):
    rows = check_run(load_config([config], []), "train").train_rows
    facts = cache(lambda *overrides: start_facts(loaded(config, *overrides), "train", rows))
    for key, change in changes(config).items():
        ranks = [Alike([0], facts(*change.both)), Alike([1], facts(*change.both, *change.one))]
        assert key in str(difference(ranks))


@pytest.mark.ranks
def test_config_keys_that_differ_are_named_on_both_ranks(config):
    chosen = dict(list(changes(config).items())[::8])
    per_rank = run_ranks(2, refused_one_by_one, config, chosen, timeout=120)
    for told in per_rank:
        silent = [key for key, text, _ in told if key not in text]
        assert silent == []
        assert max(seconds for _, _, seconds in told) < 10


@pytest.mark.ranks
@pytest.mark.slow
def test_whole_jobs_with_one_differing_key_end_at_once_with_its_name(tmp_path, config):
    # Some keys are set for jobs on devices anyway.
    set_already = {word.partition("=")[0] for word in ON_DEVICES}
    every = sorted((key, change) for key, change in changes(config).items() if key not in set_already)
    failed = []
    for key, change in random.Random(7).sample(every, min(NUM_WHOLE_JOBS, len(every))):
        started = time.monotonic()
        job = run_job(
            "train", config, f"run.dir={tmp_path / 'run'}", *change.both, ranks=2, timeout=60, only_on={1: change.one}
        )
        seconds = time.monotonic() - started
        print(f"{key}: code {job.returncode} after {seconds:.1f} s: {job.stderr.strip()}")
        if job.returncode != 2 or key not in job.stderr or job.stderr.count("spmdrl: ") != 1 or seconds > 10:
            failed.append((key, job.returncode, seconds, job.stderr))
    assert failed == []
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
def test_what_only_one_rank_finds_wrong_is_said_before_that_rank_ends(tmp_path, config):
    # The launcher ends rank 0 once rank 1 has failed: repeated, as it's a matter of milliseconds.
    said = "spmdrl: rank 1 can't start: resources.update.expert is 2, but the model has no experts; set it to 1\n"
    for _ in range(3):
        job = run_job(
            "train", config, f"run.dir={tmp_path / 'run'}", ranks=2, timeout=60,
            only_on={1: ["resources.update.expert=2"]},
        )  # fmt: skip
        assert (job.returncode, job.stderr) == (2, said)


@pytest.mark.ranks
@pytest.mark.parametrize("trusting", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ranks_that_would_meet_in_two_places_are_refused(tmp_path, config, trusting):
    override = {trusting: ["resources.trusted_network=true"]}
    job = run_job("train", config, f"run.dir={tmp_path / 'run'}", ranks=2, timeout=60, only_on=override)
    assert job.returncode == 2
    assert "ranks disagree about resources.trusted_network" in job.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_with_other_source_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    shutil.copytree(ROOT / "src" / "spmdrl", tmp_path / "src" / "spmdrl", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "src" / "spmdrl" / "nouns" / "__init__.py", "a") as file:
        file.write("# Another version.\n")
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "spmdrl", "train", str(config), f"run.dir={tmp_path / 'run'}"]
    processes = []
    for rank, source in enumerate((ROOT / "src", tmp_path / "src")):
        own = environment(**rank_environment(rank, 2, 2, store.port), PYTHONPATH=str(source))
        processes.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True, cwd=tmp_path))
    told = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert ["ranks disagree about the source of spmdrl: " in text for text in told] == [True, False], told


def test_an_edited_module_is_another_source(tmp_path, monkeypatch):
    module = tmp_path / "package" / "nouns" / "rows.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(spmdrl, "__file__", str(tmp_path / "package" / "__init__.py"))
    # Not the one that this process has computed before.
    monkeypatch.setattr(rank_facts, "_package_digest", rank_facts._package_digest.__wrapped__)
    config, facts = tiny_config(tmp_path), []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        module.write_text(text)
        facts.append(facts_of(config))
    assert facts[0] == facts[2]
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"the source of spmdrl"}


def facts_of(config: Path, *overrides: str, verb: str = "train", **environ: str) -> dict[str, str]:
    loaded = load_config([config], list(overrides))
    return start_facts(loaded.value, verb, check_run(loaded, "train").train_rows, environ)


def test_reward_files_rows_verb_and_environment_are_compared(tmp_path):
    config = tiny_config(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    data = f"data.train={rows}"
    before = facts_of(config, data)
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + "# Another version.\n")
    rows.write_text('{"prompt": "1+1=", "answer": "3"}\n')
    after = facts_of(config, data, verb="sft", LOCAL_WORLD_SIZE="2")
    assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == {
        "the verb", f"the rows of {rows} (0)", f"the file of {tmp_path}/reward.py:share_of_digits",
        "the variable LOCAL_WORLD_SIZE",
    }  # fmt: skip


def test_the_text_of_a_template_is_compared_wherever_it_lies(tmp_path):
    config = load_config([tiny_config(tmp_path)], []).value
    facts = []
    for folder, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.jinja").write_text(text)
        data = replace(config.data, chat_template_file=str(tmp_path / folder / "mine.jinja"))
        facts.append(start_facts(replace(config, data=data), "train", [])["the chat template's options"])
    assert facts[0] == facts[1] != facts[2]


def test_a_reward_in_a_module_is_compared_without_running_it(tmp_path, monkeypatch):
    package = tmp_path / "rewards_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('nobody may run this')\n")
    (package / "exact.py").write_text("def fn(completions): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config([tiny_config(tmp_path)], []).value
    spec = "rewards_of_mine.exact:fn"
    facts = start_facts(replace(config, reward=replace(config.reward, functions=(spec,))), "train", [])
    assert f"the file of {spec}" in facts


def test_models_are_compared_by_what_their_folders_hold(tmp_path):
    from spmdrl.engines.models.make_model import make_model_folder

    make = load_config([tiny_config(tmp_path)], []).value.model.make
    assert make is not None
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model_folder(tmp_path / name, make, seed)
    same, other = [[Alike([0], model_facts(tmp_path / "a")), Alike([1], model_facts(tmp_path / x))] for x in "bc"]
    assert difference(same) is None
    assert "ranks disagree about the model's weights" in str(difference(other))


def prepared(world: World, folders: list[Path]) -> str:
    try:
        world.agree(lambda: model_facts(folders[world.rank]))
    except StartRefused as refusal:
        return str(refusal)
    return "agreed"


@pytest.mark.ranks
def test_ranks_that_find_another_model_are_refused_after_the_start(tmp_path):
    from spmdrl.engines.models.make_model import make_model_folder

    make = load_config([tiny_config(tmp_path)], []).value.model.make
    assert make is not None
    for seed in (0, 1):
        make_model_folder(tmp_path / str(seed), make, seed)
    told = run_ranks(2, prepared, [tmp_path / "0", tmp_path / "1"])
    assert told[0] == told[1] and "the model's weights" in told[0]
