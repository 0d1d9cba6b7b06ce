"""A whole job whose policy is rewarded for programs."""

from __future__ import annotations

import json

from tests.support.jobs import finished, metrics_of, run_job, tiny_config


def test_responses_without_a_program_are_wrong_and_counted_and_no_failure(tmp_path):
    rows = [{"prompt": f"{n}+1=", "test_list": [f"assert add({n}) == {n + 1}"]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [f"data.train={tmp_path / 'rows.jsonl'}", "reward.functions=[code]", f"run.dir={tmp_path / 'run'}"]
    finished(run_job("train", tiny_config(tmp_path), *settings, "train.max_steps=1"))
    (step,) = metrics_of(tmp_path / "run")
    # Some of a random model's digits and signs may be Python that defines nothing.
    failed = {name: value for name, value in step.items() if name.startswith("reward/programs/")}
    assert sum(failed.values()) <= 32 and failed["reward/programs/no_program"] > 20
    assert step["rewards/code/mean"] == 0 and step["reward/unscored_ratio"] == 0
    assert not any(name.startswith("reward/errors/") for name in step)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["verdict"] for sample in samples} <= {"no_program", "wrong", "program_crashed"}
