"""What an agent's step gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage

__all__ = ["AgentAnswer", "StopReason"]

#: ``answer``: the agent answered. ``tool_limit``: it still wanted tools after its last allowed round.
StopReason = Literal["answer", "tool_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """What came of one step of an agent.

    ``text`` is the answer as written; ``value`` the parsed output of an agent with ``output=``, else the text.
    ``messages`` are those new in this step: the prompt, the agent's messages and the tools' answers.
    """

    agent: str
    text: str
    value: Any
    message: AIMessage
    messages: Sequence[BaseMessage]
    tool_rounds: int = 0
    stopped: StopReason = "answer"
