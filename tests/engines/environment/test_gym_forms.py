"""Environments of SkyRL-gym and gymnasium, called as these libraries say; those of their own where installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.dataflow.stages.rollout.scripted import ended_row
from tests.support.tool_templates import renderer_of

from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.reward_config import EnvironmentConfig

FILE = Path(__file__).with_name("gym_forms.py")
PROMPT = [{"role": "user", "content": "Please."}]


def run(turns: list[str], columns: dict[str, Any], max_tokens: int = 1000, **form: str) -> tuple[str, Response]:
    """The text of a row in which the model writes these turns, and its response."""
    config = EnvironmentConfig(isolation="inline", **form)
    with EnvironmentPool(config) as pool:
        facts = pool.facts
    renderer = Renderer(renderer_of("qwen").tokenizer, None, facts.tools, has_openings=facts.has_openings)
    response, prompt_ids = ended_row(
        config, renderer, PROMPT, [f"{turn}<|im_end|>" for turn in turns], columns, max_tokens=max_tokens
    )
    return renderer.tokenizer.decode_all([*prompt_ids, *response.token_ids]), response


def rewards_of(response: Response) -> list[float]:
    """Rewards of turns, and the end's."""
    return [*filter(None, response.turn_rewards), response.outcome.reward]


@pytest.mark.parametrize("columns", [{"answer": "7"}, {"answer": None, "reward_spec": {"ground_truth": "7"}}])
def test_a_turn_is_a_step_of_skyrl_gym_with_its_messages_and_reward(columns):
    text, response = run(["3", "x", "7"], columns, skyrl=f"{FILE}:Guessing")
    assert "assistant\n3<|im_end|>\n<|im_start|>user\nnot 3<|im_end|>\n<|im_start|>assistant\nx<|im_end|>" in text
    assert rewards_of(response) == [0.25, 1.0] and response.turn_rewards.index(0.25) == response.turns.index(0) - 1
    assert run(["3"], {**columns, "max_turns": 1}, skyrl=f"{FILE}:Guessing")[1].outcome.reward == 0.25


def test_a_prompt_that_init_replaces_is_refused():
    _, response = run(["7"], {"answer": "7"}, skyrl=f"{FILE}:Rewriting")
    assert "environment.skyrl: ValueError: init gave the prompt" in response.outcome.error


def test_actions_of_gymnasium_are_the_last_numbers_of_turns():
    text, response = run(["1 or 2", "So: 7", "go 2"], {}, gymnasium=f"{FILE}:Corridor")
    assert "user\nPlease.\n..[2].<|im_end|>" in text
    assert rewards_of(response) == [1.0]


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"gymnasium": f"{FILE}:Boxed"}, r"environment\.gymnasium: .*its actions are of Box\(3\)"),
        ({"gymnasium": "gone:Corridor"}, "environment.gymnasium: 'gone:Corridor' can't be loaded"),
    ],
)
def test_forms_that_cannot_be_used_are_refused_at_the_start(form, problem):
    with pytest.raises(ValueError, match=problem):
        EnvironmentPool(EnvironmentConfig(isolation="inline", **form))


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    for form, package in (("skyrl", "skyrl-gym"), ("gymnasium", "gymnasium")):
        monkeypatch.setitem(__import__("sys").modules, package.replace("-", "_"), None)
        with pytest.raises(
            ValueError, match=f"environment.{form} needs {package} .*: pip install {package}, or name a"
        ):
            EnvironmentPool(EnvironmentConfig(isolation="inline", **{form: "some"}))
    monkeypatch.setitem(__import__("sys").modules, "mcp", None)
    with pytest.raises(ValueError, match=r"environment\.mcp needs mcp .*: pip install mcp$"):
        EnvironmentPool(EnvironmentConfig(isolation="inline", mcp=("server",)))


def test_skyrl_gyms_own_environment_answers():
    pytest.importorskip("skyrl_gym")
    columns = {"answer": "42", "max_turns": 3}
    text, response = run(["Hm #### 41", "So #### 42"], columns, skyrl="gsm8k_multi_turn")
    assert "in the exact format: '#### ANSWER'.<|im_end|>" in text
    assert rewards_of(response) == [pytest.approx(0.2 / 3), 1.0]


def test_gymnasiums_own_environments_answer():
    pytest.importorskip("gymnasium")
    text, response = run(["So 9", "Up: 0", "Far" + 500 * " 1"], {}, 700, gymnasium="CliffWalking-v1")
    assert "Please.\no  o" in text and text.count("\nx  o") == 1 and set(response.turn_rewards) == {0.0, -1.0}
    assert "No action was taken: end with its number, from 0 to 3." in text
    text, response = run(["0"], {}, gymnasium="Blackjack-v1")
    assert response.outcome.reward in (-1.0, 0.0, 1.0)
