"""Every exception agentflow raises.

::

    AgentflowError
    +-- UsageError                  the caller's code is wrong; retrying cannot help
    |   +-- BadRequest              a generate call that can never run
    |   |   +-- EmptyPrompt
    |   |   +-- PromptTooLong       longer than the context or than the KV pool
    |   |   +-- BadSampling
    |   +-- EngineClosed            used after close()
    |   +-- RealEngineForbidden     a test tried to start or call a real engine
    |   +-- ScriptError             a ScriptedEngine's script does not fit the calls made
    +-- SetupError                  this machine or installation cannot do it
    |   +-- ModelNotFound
    |   +-- PlatformUnsupported
    |   +-- NotEnoughMemory
    +-- EngineFailure               the engine broke while running; restart() or retry may help
    |   +-- EngineDied              the engine's processes are gone
    |   +-- EngineTimeout           no answer within the time limit
    |   +-- RemoteError             the remote server answered with an error
    +-- CallAborted                 the call was stopped by abort(); nothing is wrong with the engine
    +-- EventError                  an event or hint that cannot be read
    +-- TraceError                  a trace file that cannot be read or written
    +-- OutputError                 the model's answer does not fit what was asked for
    |   +-- OutputTruncated         cut at the token limit before it was complete
    |   +-- OutputInvalid           complete, but not of the asked form
    +-- ToolFailure                 a tool call that failed; ``kind`` says how
    +-- WorkflowStopped             a workflow ended by a limit; carries what was done so far

The base classes are chosen so that LangGraph's default ``RetryPolicy`` retries :class:`EngineFailure`
(a plain ``Exception``) and never retries a :class:`UsageError` (a ``ValueError``).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AgentflowError",
    "BadRequest",
    "BadSampling",
    "CallAborted",
    "EmptyPrompt",
    "EngineClosed",
    "EngineDied",
    "EngineFailure",
    "EngineTimeout",
    "EventError",
    "ModelNotFound",
    "NotEnoughMemory",
    "OutputError",
    "OutputInvalid",
    "OutputTruncated",
    "PlatformUnsupported",
    "PromptTooLong",
    "RealEngineForbidden",
    "RemoteError",
    "ScriptError",
    "SetupError",
    "ToolFailure",
    "TraceError",
    "UsageError",
    "WorkflowStopped",
]


class AgentflowError(Exception):
    """Base of all errors raised by agentflow."""


class UsageError(AgentflowError, ValueError):
    """The calling code is wrong; the message says what to change."""


class BadRequest(UsageError):
    """A generate call that can never run on this engine."""


class EmptyPrompt(BadRequest):
    """The prompt holds no token."""


class PromptTooLong(BadRequest):
    """The prompt does not fit the model's context or the engine's KV pool."""


class BadSampling(BadRequest):
    """A sampling value is outside its range."""


class EngineClosed(UsageError):
    """The engine was used after ``close()``."""


class RealEngineForbidden(UsageError):
    """``forbid_real_engines()`` is on and a real engine was started or called."""


class ScriptError(UsageError):
    """A scripted engine ran out of script, or was closed with script left."""


class SetupError(AgentflowError):
    """This machine or installation cannot do what was asked; the message says what is missing."""


class ModelNotFound(SetupError):
    """The model is neither a folder with a model, nor a known name, nor on the hub."""


class PlatformUnsupported(SetupError):
    """The embedded engine does not run on this operating system or Python."""


class NotEnoughMemory(SetupError):
    """The model or its KV pool does not fit this machine's memory."""


class EngineFailure(AgentflowError):
    """The engine broke while it was working."""


class EngineDied(EngineFailure):
    """The engine's scheduler is gone; calls in flight got no answer."""


class EngineTimeout(EngineFailure):
    """No answer within the time limit; the request was aborted."""


class RemoteError(EngineFailure):
    """The remote server answered with an error. ``status`` is the HTTP status, 0 when none came."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class CallAborted(AgentflowError, RuntimeError):
    """The call was stopped by ``abort()`` before its answer was complete. Not retried by LangGraph."""


class EventError(AgentflowError):
    """An event or hint that cannot be read. Receivers count it and go on."""


class TraceError(AgentflowError):
    """A trace file that cannot be read or written; the message names the file, and the line where it is one."""


class OutputError(AgentflowError):
    """The model's answer does not fit what was asked for. ``text`` is the answer as it came."""

    def __init__(self, message: str, *, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class OutputTruncated(OutputError):
    """The answer was cut at the token limit before it was complete."""


class OutputInvalid(OutputError):
    """The answer is complete but not of the asked form."""


class ToolFailure(AgentflowError):
    """A tool call that failed. ``kind`` is one of :data:`agentflow.tools.TOOL_ERROR_KINDS`."""

    def __init__(self, message: str, *, kind: str, tool: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.tool = tool


class WorkflowStopped(AgentflowError, RuntimeError):
    """A workflow was ended by a limit. ``state`` is the last complete state, ``reason`` the limit: ``max_steps``, or
    one that a policy holds. Not retried by LangGraph."""

    def __init__(self, message: str, *, reason: str, state: Any = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.state = state
