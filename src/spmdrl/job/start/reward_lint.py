"""Checks of reward functions: responses of known worth are scored on rows of the data.

A reference is the row's completion, solution or answer, in the tried form that scores best. Its reward must be higher
than that of worthless responses; calls must be repeatable, in any order, and fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spmdrl.dataflow.data.data_rows import Row, SourceRows
from spmdrl.engines.reward.calls import RewardCall, RewardResult, joined
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.start.machine_check import CheckLine
from spmdrl.nouns.settings.reward_config import RewardConfig
from spmdrl.runtime.workers.verdict import FAILURES

_MAX_ROWS = 16
_MAX_SECONDS_PER_RESPONSE = 0.5
_RESPONSES_PER_CALL = 8
_REFERENCE_COLUMNS = ("solution", "solutions", "canonical_solution", "code")
_FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "<answer>{}</answer>", "```python\n{}\n```")
# Worthless responses, the share of rows on which each may score as high as the reference, and the remedy otherwise.
_WORTHLESS: dict[str, tuple[float, str]] = {
    "an empty response": (0.1, "give a response without an answer the reward of a wrong one"),
    "a constant": (0.5, "compare with the row's answer; a form alone, or any number, isn't one"),
    "another row's answer": (
        0.5,
        "compare with the row's own answer (parameter `answer`), not with its form or length",
    ),
    "the prompt repeated": (
        0.25,
        "read the final answer of a response, instead of looking for the answer anywhere in it",
    ),
    "many answers at once": (0.25, "accept one final answer, instead of looking for the answer anywhere"),
    "half of the reference": (0.5, "score what has been answered; the beginning of an answer isn't one"),
}


@dataclass(frozen=True)
class _Probe:
    """The responses to one row and their results."""

    row: Row
    references: Sequence[str]
    worthless: Mapping[str, str]
    result: RewardResult
    """the references' rewards, then the others'"""
    again: Sequence[float | None]
    turned: Sequence[float | None]
    """rewards of a call in the opposite order, put back into this one"""
    seconds: float

    @property
    def reference(self) -> float | None:
        """Best reward of a reference."""
        values = [value for value in self.result.rewards[: len(self.references)] if value is not None]
        return max(values, default=None)


def lint_rewards(config: RewardConfig, sources: Sequence[SourceRows], *, has_turns: bool) -> list[CheckLine]:
    """Score probes of some rows with the run's functions; with `has_turns`, rewards get the turns of a row."""
    # They are spread over the first source that has any.
    found = next((source.rows for source in sources if source.rows), ())
    rows = list(found[:: max(1, len(found) // _MAX_ROWS)][:_MAX_ROWS])
    lines: list[CheckLine] = []
    with RewardPool(config, 1) as pool:
        probes = [_probe(pool, row, rows, has_turns=has_turns) for row in rows]
    for check in (_check_verdicts, _check_references, _check_worthless, _check_repeats, _check_order, _check_seconds):
        lines += check(probes, config)
    return lines


def _probe(pool: RewardPool, row: Row, rows: Sequence[Row], *, has_turns: bool) -> _Probe:
    references = _references(row)
    first = _scored(pool, row, references, has_turns=has_turns)
    if _has_failed(first):
        first = _each_scored(pool, row, references, has_turns=has_turns)
    usable = [value for value in first.rewards if value is not None]
    best = references[first.rewards.index(max(usable))] if usable else references[-1]
    worthless = _worthless(row, rows, best)
    responses = [*references, *worthless.values()]
    started = time.perf_counter()
    result = _scored(pool, row, responses, has_turns=has_turns)
    seconds = (time.perf_counter() - started) / len(responses)
    if _has_failed(result):
        started = time.perf_counter()
        alone = _each_scored(pool, row, responses, has_turns=has_turns)
        seconds = (time.perf_counter() - started) / len(responses)
        return _Probe(row, references, worthless, alone, alone.rewards, alone.rewards, seconds)
    again = _scored(pool, row, responses, has_turns=has_turns).rewards
    turned = _scored(pool, row, responses[::-1], has_turns=has_turns).rewards[::-1]
    return _Probe(row, references, worthless, result, again, turned, seconds)


def _each_scored(pool: RewardPool, row: Row, responses: Sequence[str], *, has_turns: bool) -> RewardResult:
    """Score each response in a call of its own, as one of them may fail the call of all."""
    alone = [_scored(pool, row, [response], has_turns=has_turns) for response in responses]
    return joined("lint", [((place,), one) for place, one in enumerate(alone)])


def _has_failed(result: RewardResult) -> bool:
    return any(verdict in FAILURES for verdict in result.verdicts)


def _references(row: Row) -> list[str]:
    texts = [row.completion, *(row.columns.get(name) for name in _REFERENCE_COLUMNS), row.answer]
    texts = [text[0] if isinstance(text, list) and text else text for text in texts]
    known = dict.fromkeys(text for text in texts if isinstance(text, str) and text.strip())
    return list(dict.fromkeys(form.format(text) for text in known for form in _FORMS)) or [""]


def _worthless(row: Row, rows: Sequence[Row], reference: str) -> dict[str, str]:
    prompt = (
        row.prompt if isinstance(row.prompt, str) else "\n".join(str(one.get("content") or "") for one in row.prompt)
    )
    others = [str(one.answer) for one in rows if one.answer is not None and one.answer != row.answer]
    found = {"an empty response": "", "a constant": "I don't know. 7.5", "the prompt repeated": prompt}
    if row.answer is not None and others:
        middle = len(others) // 2
        # In the reference's own form, so that the answer alone is wrong.
        other = others[middle]
        found["another row's answer"] = reference.replace(row.answer, other) if row.answer in reference else other
        found["many answers at once"] = "\n".join([*others[:middle], str(row.answer), *others[middle:]])
    if len(reference) > 1:
        found["half of the reference"] = reference[: len(reference) // 2]
    return found


def _scored(pool: RewardPool, row: Row, responses: Sequence[str], *, has_turns: bool) -> RewardResult:
    columns = {name: [value] * len(responses) for name, value in row.columns.items()}
    if has_turns:
        columns["turns"] = [[{"response": response, "observation": ""}] for response in responses]
    token_ids = [list(response.encode(errors="surrogatepass")) for response in responses]
    pool.submit({"lint": RewardCall([row.prompt] * len(responses), responses, token_ids, columns)})
    return pool.collect(["lint"])[0]


def _check_verdicts(probes: Sequence[_Probe], config: RewardConfig) -> Iterator[CheckLine]:
    """Check that no response makes a function fail."""
    for probe in probes:
        names = [*(f"the reference {text!r:.40}" for text in probe.references), *probe.worthless]
        for name, verdict in zip(names, probe.result.verdicts, strict=True):
            if verdict in FAILURES:
                yield CheckLine.failed(
                    f"{probe.row.place}: {name} is {verdict.name.lower()} ({probe.result.error})",
                    "return a finite number for any text, also an empty one, or None to leave it out",
                )
                return
    yield CheckLine.ok(f"every response to {len(probes)} rows was scored")


def _check_references(probes: Sequence[_Probe], config: RewardConfig) -> Iterator[CheckLine]:
    """Check that references have rewards, and higher ones than all others on average."""
    unscored = [probe for probe in probes if probe.reference is None]
    if unscored:
        yield CheckLine.failed(
            f"the reference of {unscored[0].row.place} has no reward, in any of the forms {list(_FORMS)}",
            "give a right answer a finite number (None leaves the row out)",
        )
        return
    mean = sum(probe.reference or 0.0 for probe in probes) / max(len(probes), 1)
    lowest = min((value for probe in probes for value in probe.result.rewards if value is not None), default=0.0)
    if probes and mean <= lowest:
        yield CheckLine.failed(
            f"references score {mean:.3g}, no more than anything else",
            "look at which form of an answer the functions want, and at "
            f"{probes[0].row.place} with the answer {probes[0].row.answer!r:.60}",
        )
        return
    yield CheckLine.ok(f"references score {mean:.3g}, other responses down to {lowest:.3g}")


def _check_worthless(probes: Sequence[_Probe], config: RewardConfig) -> Iterator[CheckLine]:
    """Check that worthless responses don't score as high as the reference."""
    for name, (most, fix) in _WORTHLESS.items():
        scored = [
            (probe.result.rewards[len(probe.references) + list(probe.worthless).index(name)], probe)
            for probe in probes
            if name in probe.worthless and probe.reference is not None
        ]
        high = [probe for value, probe in scored if value is not None and value >= (probe.reference or 0.0)]
        if scored and len(high) > most * len(scored):
            yield CheckLine.failed(
                f"{name} scores as high as the reference on {len(high)} of {len(scored)} rows, such as "
                f"{high[0].row.place}: {high[0].worthless[name]!r:.60}",
                fix,
            )
        elif scored:
            yield CheckLine.ok(f"{name} scores as high as the reference on {len(high)} of {len(scored)} rows")


def _check_repeats(probes: Sequence[_Probe], config: RewardConfig) -> Iterator[CheckLine]:
    """Check that the same call returns the same rewards."""
    changed = _first_difference(probes, lambda probe: probe.again)
    if changed:
        fix = "take randomness and state out of the functions, or seed it by the row"
        yield CheckLine.failed(f"{changed} when scored again", fix)
    else:
        yield CheckLine.ok("the same call gives the same rewards")


def _check_order(probes: Sequence[_Probe], config: RewardConfig) -> Iterator[CheckLine]:
    """Check that a response's reward doesn't depend on its place in the call."""
    changed = _first_difference(probes, lambda probe: probe.turned)
    if changed:
        fix = "score each response by itself, whatever its place in the call"
        yield CheckLine.failed(f"{changed} in the opposite order", fix)
    else:
        yield CheckLine.ok("rewards don't depend on the order of a call")


def _first_difference(probes: Sequence[_Probe], other: Callable[[_Probe], Sequence[float | None]]) -> str:
    for probe in probes:
        for value, changed in zip(probe.result.rewards, other(probe), strict=True):
            if value != changed:
                return f"a response to {probe.row.place} scores {value}, and {changed}"
    return ""


def _check_seconds(probes: Sequence[_Probe], config: RewardConfig) -> Iterator[CheckLine]:
    """Check that a call takes little of its time."""
    slowest = max((probe.seconds for probe in probes), default=0.0)
    most = min(_MAX_SECONDS_PER_RESPONSE, config.timeout_seconds / _RESPONSES_PER_CALL)
    if slowest > most:
        yield CheckLine.failed(
            f"a response takes {slowest:.2g} s, which training waits for (reward.timeout_seconds is "
            f"{config.timeout_seconds:g} for a call of several)",
            "make the functions faster, or raise reward.workers",
        )
    else:
        yield CheckLine.ok(f"a response takes {1000 * slowest:.2g} ms at most")
