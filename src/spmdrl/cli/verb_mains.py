"""The main function of each verb; its module, with PyTorch and all that it imports, is imported only when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def own_main(verb: str) -> Callable[[Sequence[str]], int] | None:
    """Return the main of a verb that reads its arguments itself; None for the other verbs."""
    if verb == "report":
        from spmdrl.observability.report.report import main as report

        return report
    if verb == "doctor":
        from spmdrl.verbs.doctor.doctor import main as doctor

        return doctor
    if verb == "replay":
        from spmdrl.verbs.replay_rows import main as replay

        return replay
    if verb == "init":
        from spmdrl.cli.init_command import main as init

        return init
    if verb == "convert":
        from spmdrl.cli.convert_command import main as convert

        return convert
    if verb == "explain":
        from spmdrl.cli.explain import main as explain

        return explain
    return None


def configured_main(verb: str, prompts: Sequence[str], question: dict[str, Any]) -> Callable[[Any], int]:
    """Return the verb's own main, with PyTorch and all else that it imports."""
    if verb == "train":
        from spmdrl.verbs.train import main as train

        return partial(train, plan_device=question["plan_device"])
    if verb in ("sft", "preferences", "reward-model"):
        from spmdrl.verbs.supervised import main as supervised

        return partial(supervised, **question)
    if verb == "eval":
        from spmdrl.verbs.evaluate import main as evaluate

        return evaluate
    if verb == "generate":
        from spmdrl.verbs.generate import main as generate

        return partial(generate, prompts=prompts)
    if verb in ("plan", "dry-run"):
        from spmdrl.verbs.planning import dry_run
        from spmdrl.verbs.planning import main as plan

        return partial(plan if verb == "plan" else dry_run, **question)
    from spmdrl.verbs.check import main as check

    return partial(check, prompts=prompts, **question)
