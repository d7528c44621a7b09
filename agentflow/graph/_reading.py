"""What LangGraph's tags, paths, answers and errors say, in agentflow's terms."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.errors import GraphBubbleUp, GraphRecursionError
from langgraph.types import Send

from agentflow.errors import WorkflowStopped
from agentflow.events import WorkflowOutcome
from agentflow.graph._scopes import Binding, NodeScope

__all__ = ["agents_behind", "attempt_name", "destinations", "kind_of", "outcome_of", "own_branch", "superseded"]


def superseded(node: NodeScope, error: BaseException | None) -> list[str | None]:
    """Branches whose KV nobody will use again now that ``node`` is over; None stands for the agent's main line."""
    if isinstance(error, asyncio.CancelledError):
        return [node.branch] if node.own_branch is not None else []
    if error is not None or not node.failed_before:
        return []
    if node.own_branch is None:
        return [None]
    return [attempt_name(node.own_branch, attempt) for attempt in range(node.failed_before)]


def kind_of(tags: Sequence[str] | None) -> str:
    for tag in tags or ():
        if tag.startswith("graph:step:"):
            return "node"
        if tag.startswith("seq:step:"):
            return "branch"
    return ""


def own_branch(path: Any, task: str, outer: str | None) -> str | None:
    """A name for the fan-out task (``Send``) that a node runs as; None for a node on the main line."""
    if not (isinstance(path, tuple | list) and path and path[0] == "__pregel_push"):
        return None
    last = task.rpartition("|")[2]
    return f"{outer}/{last}"[-200:] if outer else last[-200:]


def attempt_name(branch: str, failed_before: int) -> str:
    """The branch name of one attempt; later attempts have names of their own."""
    return f"{branch}#{failed_before + 1}" if failed_before else branch


def destinations(chosen: Any, labels: Mapping[Any, str]) -> list[str]:
    """Names of the nodes that a branch function's answer, or a command's ``goto``, stands for."""
    items = chosen if isinstance(chosen, list | tuple) and not isinstance(chosen, Send) else [chosen]
    names: list[Any] = []
    for item in items:
        if isinstance(item, Send):
            names.append(item.node)
        elif isinstance(item, str | int):
            names.append(labels.get(item, item))
    return [n for n in names if isinstance(n, str)]


def agents_behind(target: str, binding: Binding) -> list[str]:
    """The agents that ``target`` leads to by plain edges; itself, when nobody said which nodes are agents."""
    if target.startswith("__"):
        return []
    if not binding.agents:
        return [target]
    found: list[str] = []
    seen = {target}
    todo = [target]
    while todo:
        node = todo.pop(0)
        if node in binding.agents:
            found.append(node)
            continue
        for after in binding.successors.get(node, ()):
            if after not in seen and not after.startswith("__"):
                seen.add(after)
                todo.append(after)
    return found


def outcome_of(error: BaseException | None) -> WorkflowOutcome:
    if error is None or isinstance(error, GraphBubbleUp):
        return "done"
    if isinstance(error, asyncio.CancelledError | GeneratorExit | KeyboardInterrupt):
        return "cancelled"
    if isinstance(error, GraphRecursionError | WorkflowStopped):
        return "limit"
    return "error"
