"""An MCP server with tools of every kind: python mcp_server.py [PORT, for streamable HTTP in place of stdio]."""

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools")
called = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def refuse(name: str) -> str:
    """Fail."""
    raise ToolError(f"not for {name}")


@server.tool()
def picture() -> list:
    """Draw a dot."""
    return ["a dot:", Image(data=b"\x89PNG", format="png")]


@server.tool()
def count() -> int:
    """Count this tool's calls."""
    called.append(1)
    return len(called)


@server.tool()
def pid() -> int:
    """Return the server's process."""
    return os.getpid()


@server.tool()
def hang() -> None:
    """Never return."""
    time.sleep(600)


@server.tool()
def die() -> None:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
