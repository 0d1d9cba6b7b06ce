"""A real MCP server's tools: listed, called, and started again where the server hangs or dies."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.dataflow.stages.rollout.scripted import ended_row
from tests.engines.environment.test_trl import call
from tests.support.tool_templates import renderer_of

from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.environment_runner import StepResult
from spmdrl.engines.environment.episode import Episode, ToolCall, Turn
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.workers.verdict import Verdict

pytest.importorskip("mcp", reason="needs pip install -e '.[mcp]'; bash launch/test_environments.sh installs it")

SERVER = (sys.executable, str(Path(__file__).with_name("mcp_server.py")))
PROMPT = [{"role": "user", "content": "Please."}]


def served(*command: str, **how: Any) -> EnvironmentConfig:
    return EnvironmentConfig(mcp=command or SERVER, **{"timeout_seconds": 60.0, **how})


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with EnvironmentPool(served()) as pool:
        yield pool


def step(pool: EnvironmentPool, *names: str, turns: tuple[Turn, ...] = (), **arguments: Any) -> StepResult:
    """A row's step with calls of these tools, after which the row ends."""
    calls = tuple(ToolCall(name, arguments) for name in names)
    pool.submit("row", Episode(PROMPT, {}, 0, turns, "", calls=calls))
    (result,) = pool.collect(["row"])
    pool.end()
    return result


def answers(result: StepResult) -> list[str]:
    assert result.observation is not None, result.error
    return [message["content"] for message in result.observation.messages]


def is_gone(pid: int) -> bool:
    """True once a process has ended, which is waited for."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                time.sleep(0.01)
                continue
        return True
    return False


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


def check_row(config: EnvironmentConfig) -> None:
    with EnvironmentPool(config) as pool:
        tools = pool.facts.tools
    renderer = Renderer(renderer_of("qwen").tokenizer, None, tools)
    turns = [call("add", a=2, b=3) + call("add", a="x") + call("sub"), call("picture")]
    response, prompt_ids = ended_row(config, renderer, PROMPT, [f"{turn}<|im_end|>" for turn in [*turns, "So."]])
    text = renderer.tokenizer.decode_all([*prompt_ids, *response.token_ids])
    assert '"description": "Add two numbers."' in text and '"required": ["a"]' in text
    read = [part.partition("</tool_response>")[0].strip() for part in text.split("<tool_response>")[1:]]
    assert (read[0], read[2]) == ("5", "{'error': 'Tool sub not found.'}")
    assert read[1].startswith("{'error': ") and "valid integer" in read[1]
    assert read[3] == "a dot:\n[image]" and len(read) == 4
    assert response.outcome is None and response.finish == "stop" and max(response.turns) == 3


def test_a_servers_tools_are_called_until_a_turn_has_no_call():
    check_row(served())


def test_a_server_is_reached_by_its_url(url):
    check_row(served(url))


def test_a_failure_counts_as_the_tools(pool):
    result = step(pool, "add", "refuse", a=1, name="you")
    assert answers(result) == ["2", "{'error': 'Error executing tool refuse: not for you'}"]
    figures = pool.take_figures()
    assert (figures["errors/refuse"], figures["errors/add"]) == ([1.0], [0.0])


def test_calls_of_a_turn_run_in_the_same_server_and_a_reopened_row_makes_none_again(pool):
    assert answers(step(pool, "count")) == ["1"]
    earlier = (Turn("x", "1", calls=(ToolCall("count", {}),)),)
    assert answers(step(pool, "count", turns=earlier)) == ["2"]


def test_a_server_that_dies_costs_its_row_and_is_started_again_once(pool):
    before = answers(step(pool, "pid"))
    lost = step(pool, "die", "add", a=1)
    assert lost.verdict is Verdict.CRASHED and "the MCP server was lost in a call of die" in str(lost.error)
    after = [answers(step(pool, "pid")) for _ in range(3)]
    assert before != after[0] and after[0] == after[1] == after[2], "it outlives the rows of its process"
    assert is_gone(int(before[0]))


def test_a_call_that_hangs_costs_its_row_and_no_server_is_left():
    with EnvironmentPool(served(timeout_seconds=8.0)) as pool:
        (first,) = answers(step(pool, "pid"))
        assert step(pool, "hang").verdict is Verdict.TIMED_OUT
        (second,) = answers(step(pool, "pid"))
        assert first != second and is_gone(int(first))
    assert is_gone(int(second))


def test_a_server_reached_by_url_may_go_and_come_back(url):
    with EnvironmentPool(served(url)) as pool:
        assert answers(step(pool, "add", a=1)) == ["2"]
        assert step(pool, "die").verdict is Verdict.CRASHED
        error = str(step(pool, "add", a=1).error)
        assert "no MCP server answers: All connection attempts failed" in error
        again = subprocess.Popen([*SERVER, re.findall(r":(\d+)/", url)[0]], stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while (result := step(pool, "add", a=1)).verdict is not None and time.monotonic() < deadline:
                time.sleep(0.1)
            assert answers(result) == ["2"]
        finally:
            again.kill()
            again.wait()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("no-such-server",), "'no-such-server' can't be built: .*No such file or directory: 'no-such-server'"),
        ((sys.executable, "-c", "pass"), "can't be built: .*no MCP server answers: Connection closed"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "it takes longer than environment.timeout_seconds"),
        ((sys.executable, "-c", "from mcp.server.mcpserver import MCPServer; MCPServer('x').run()"), "lists no tools"),
    ],
)
def test_what_serves_no_tools_is_refused_at_the_start(command, problem):
    seconds = 3.0 if "60" in command[-1] else 60.0
    with pytest.raises(ValueError, match=rf"environment\.mcp: .*{problem}"):
        EnvironmentPool(served(*command, timeout_seconds=seconds))


def test_a_server_gets_the_variables_that_the_environment_is_given(monkeypatch):
    monkeypatch.setenv("OF_THE_SERVER", "7")
    code = (
        "import os; from mcp.server.mcpserver import MCPServer; server = MCPServer('x')\n"
        "@server.tool()\ndef given() -> str:\n    return os.environ['OF_THE_SERVER']\nserver.run()"
    )
    with EnvironmentPool(served(sys.executable, "-c", code, variables=("OF_THE_SERVER",))) as pool:
        assert answers(step(pool, "given")) == ["7"]
