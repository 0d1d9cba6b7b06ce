"""Tools of an MCP server as an environment: one connection per worker process serves all rows there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from spmdrl.engines.environment.episode import End, Reply, Row, Turn
from spmdrl.engines.environment.trl import FunctionSession, ToolsLost
from spmdrl.runtime.workers.loading import load_optional

# Codes of JSON-RPC errors for a connection that has ended, and for a session that the server has forgotten.
_LOST = (-32000, -32600)


def load_mcp(key: str, specs: Sequence[str]) -> Callable[[], McpTools]:
    """Import the client of a server's command or URL; the result connects, and builds the environment."""
    mcp = load_optional("mcp", "mcp", key, instead="")
    command, *arguments = specs
    server: Any = command
    if arguments or not command.startswith(("http://", "https://")):
        # Else the client would pass on a few variables of its own choice.
        server = mcp.StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
    return partial(McpTools, partial(mcp.Client, server), mcp.MCPError)


class McpTools:
    """Environment of the tools that an MCP server lists when it is built."""

    keeps_processes = True

    def __init__(self, make_client: Callable[[], Any], error: Any):
        self._make_client, self._error = make_client, error
        self._loop = asyncio.new_event_loop()
        self._client: Any = None
        self.connect()
        listed = self._loop.run_until_complete(self._listed())
        self._functions = {tool.name: partial(self._call, tool.name) for tool in listed}
        self.tools = [
            {"type": "function", "function": {
                "name": tool.name, "description": tool.description or "", "parameters": tool.input_schema,
            }}
            for tool in listed
        ]  # fmt: skip
        if not listed:
            raise ValueError("the server lists no tools")

    def open(self, row: Row) -> McpSession:
        return McpSession(self, self._functions, self._loop)

    def connect(self) -> None:
        """Start the server, or connect to it, unless that is done."""
        if self._client is None:
            self._loop.run_until_complete(self._connect())

    def disconnect(self) -> None:
        """End the connection, with the server's processes if it was started here."""
        self._client = None
        self._leave.set()
        self._loop.run_until_complete(asyncio.gather(self._holder, return_exceptions=True))

    async def _connect(self) -> None:
        self._leave, connected = asyncio.Event(), self._loop.create_future()
        self._holder = self._loop.create_task(self._hold(connected))
        await asyncio.wait([connected, self._holder], return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            error = self._holder.exception()
            while parts := getattr(error, "exceptions", ()):
                error = parts[0]
            raise ToolsLost(f"no MCP server answers: {error}")
        self._client = connected.result()

    async def _hold(self, connected: asyncio.Future[Any]) -> None:
        # The client must be left in the task that entered it, which steps of rows aren't.
        async with self._make_client() as client:
            connected.set_result(client)
            await self._leave.wait()

    async def _listed(self) -> list[Any]:
        page = await self._client.list_tools()
        tools = list(page.tools)
        while page.next_cursor is not None:
            page = await self._client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    async def _call(self, name: str, /, **arguments: Any) -> str:
        try:
            result = await self._client.call_tool(name, arguments)
        except self._error as error:
            if error.code in _LOST:
                raise ToolsLost(f"the MCP server was lost in a call of {name}: {error}") from error
            raise
        text = "\n".join(map(_text_of, result.content))
        if result.is_error:
            raise RuntimeError(text)
        return text


class McpSession(FunctionSession):
    """Session of a row that calls a server's tools; what they keep is the server's, and of all rows."""

    def __init__(self, server: McpTools, *tools: Any):
        super().__init__(*tools)
        self._server = server

    def step(self, turn: Turn) -> Reply | End:
        """Run the turn's calls; where the server was lost, the next row's step starts it again."""
        self._server.connect()
        try:
            return super().step(turn)
        except ToolsLost:
            self._server.disconnect()
            raise


def _text_of(part: Any) -> str:
    """Return the text of a result's part, or its kind if it has none."""
    text = getattr(getattr(part, "resource", part), "text", None)
    return f"[{part.type}]" if text is None else str(text)
