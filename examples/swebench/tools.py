"""What the agents may do in the repository: run a command, change a file."""

from __future__ import annotations

from langchain_core.tools import BaseTool

from agentflow.tools import tool
from examples.swebench.workspace import Workspace

__all__ = ["make_tools"]


def make_tools(workspace: Workspace, *, command_seconds: float = 30.0, max_output: int = 10_000) -> list[BaseTool]:
    """``bash`` and ``edit`` for one workspace.

    A command gets ``command_seconds``; of its output the head and the tail, ``max_output`` characters together, are
    shown.
    """

    @tool(timeout=command_seconds + 10, max_output=max_output + 200)
    async def bash(command: str) -> str:
        """Run a bash command in the root of the repository and return its output and exit code."""
        done = await workspace.run(["bash", "-c", command], time_limit=command_seconds, max_output=max_output)
        if done.timed_out:
            return f"{done.output}\n[killed: it took longer than {command_seconds:g} seconds]"
        return f"{done.output}\n[exit code {done.code}]"

    @tool(timeout=10)
    def edit(path: str, old: str, new: str) -> str:
        """Replace the text old, which must occur exactly once in the file, by new. An empty old makes a new file."""
        try:
            file = workspace.resolve(path)
        except ValueError as error:
            return f"nothing was changed: {error}"
        if not old:
            if file.exists():
                return f"nothing was changed: {path} exists already; say in old what to replace"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(new, encoding="utf-8")
            return f"made {path}"
        if not file.is_file():
            return f"nothing was changed: there is no file {path}"
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
        count = text.count(old)
        if count != 1:
            return f"nothing was changed: old occurs {count} times in {path}, it must occur exactly once"
        file.write_text(text.replace(old, new), encoding="utf-8", errors="surrogateescape")
        return f"changed {path}"

    return [bash, edit]
