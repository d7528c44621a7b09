"""What the callback handler remembers of a running graph: the root run, its node runs, and where they belong."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from agentflow.engine.base import Coordinates, Engine, Reuse
from agentflow.engine.workflow import WorkflowRun
from agentflow.events import MAX_FIELD_CHARS, WorkflowResumed, WorkflowStarted
from agentflow.runtime.guards import Guards

__all__ = ["Binding", "NodeScope", "RootScope", "ToolScope", "Workflows", "workflows_of"]

#: Paused workflows that an engine's book keeps in this process; the longest paused are forgotten first. A
#: forgotten one still resumes, with a fresh report.
PAUSED_LIMIT = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """What was said when a graph was attached: where its events go, and what is known of it beforehand.

    ``model`` is the chat model for agents of nested graphs that were compiled without one. ``nodes`` are the
    graph's nodes, empty when not known; ``successors`` maps a node to those that its plain edges lead to,
    ``labels`` a node's branches to the nodes behind their labels; ``agents`` are the nodes known to be agents,
    empty when nobody said.
    """

    engine: Engine | None = None
    model: Any = None
    graph: str | None = None
    tenant: str | None = None
    nodes: frozenset[str] = frozenset()
    successors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    agents: frozenset[str] = frozenset()
    #: The policies that the framework drives in its runs, beside the engine's, and its agents' nodes by name.
    guards: Guards | None = None
    agent_nodes: Mapping[str, Any] = field(default_factory=dict)
    #: Whether its calls may use other agents' KV, corrected.
    reuse: Reuse = "exact"


#: Whether a root run begins its workflow, takes a paused one up again, or is in it beside another run.
Entry = Literal["started", "resumed", "joined"]


@dataclass(slots=True)
class _Live:
    """A running workflow, and how many root runs it has now."""

    run: WorkflowRun
    roots: int = 1


class Workflows:
    """The workflows of one engine in this process: running ones by id, and paused ones, a bounded number."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._paused: OrderedDict[str, WorkflowRun] = OrderedDict()
        #: Where the numbering of ended workflows goes on, should their id be used again.
        self._last_seq: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def enter(self, engine: Engine, root: RootScope) -> tuple[WorkflowRun, Entry]:
        """The run of ``root``'s workflow, and whether it begins or goes on; the caller emits the event.

        A workflow of another tenant is never joined: where one has the id already, ``root``'s gets another.
        """
        with self._lock:
            holder = self._live[root.workflow].run if root.workflow in self._live else self._paused.get(root.workflow)
            if holder is not None and holder.tenant != root.tenant:
                root.workflow = f"{root.workflow[: MAX_FIELD_CHARS // 2]} ({root.tenant})"[:MAX_FIELD_CHARS]
            live = self._live.get(root.workflow)
            if live is not None:
                live.roots += 1
                return live.run, "joined"
            known = self._paused.pop(root.workflow, None)
            after = self._last_seq.pop(root.workflow, 0)
            run = known or WorkflowRun(
                engine,
                root.workflow,
                tenant=root.tenant,
                after_seq=after,
                guards=root.binding.guards,
                reuse=root.binding.reuse,
            )
            self._live[root.workflow] = _Live(run)
        return run, "resumed" if known is not None or root.resumes else "started"

    def leave(self, run: WorkflowRun, *, paused: bool) -> bool:
        """One root run of the workflow is over. True when it was the last."""
        with self._lock:
            live = self._live.get(run.workflow)
            if live is None or live.run is not run:
                return False
            live.roots -= 1
            if live.roots:
                return False
            del self._live[run.workflow]
            if paused:
                self._paused[run.workflow] = run
                if len(self._paused) > PAUSED_LIMIT:
                    self._paused.popitem(last=False)
            return True

    def ended(self, root: RootScope, run: WorkflowRun) -> None:
        """Remember how far the events of an ended workflow were numbered, if its id may come again."""
        if root.workflow == str(root.run_id):
            return
        with self._lock:
            self._last_seq[root.workflow] = run.last_seq
            if len(self._last_seq) > PAUSED_LIMIT:
                self._last_seq.popitem(last=False)

    def counts(self) -> tuple[int, int]:
        """How many are running and how many paused."""
        with self._lock:
            return len(self._live), len(self._paused)


def workflows_of(engine: Engine) -> Workflows:
    """The engine's book of workflows; it lives as long as the engine does."""
    book = engine.__dict__.get("_agentflow_workflows")
    if book is None:
        book = engine.__dict__.setdefault("_agentflow_workflows", Workflows())
    assert isinstance(book, Workflows)
    return book


class RootScope:
    """One invocation of a graph from outside."""

    def __init__(
        self, run_id: UUID, binding: Binding, metadata: Mapping[str, Any], name: str | None, inputs: Any
    ) -> None:
        self.run_id = run_id
        self.binding = binding
        thread = metadata.get("thread_id")
        chosen = metadata.get("workflow_id") or thread or run_id
        self.workflow = str(chosen)[:MAX_FIELD_CHARS]
        tenant = metadata.get("tenant") or binding.tenant
        self.tenant = None if tenant is None else str(tenant)[:MAX_FIELD_CHARS]
        self.graph = (binding.graph or name or "graph")[:MAX_FIELD_CHARS]
        self.resumes = thread is not None and (inputs is None or getattr(inputs, "resume", None) is not None)
        self.interrupted = False
        #: Over, and over because nobody wants its results any more.
        self.ended = False
        self.cancelled = False
        self.runs: dict[int, WorkflowRun] = {}
        #: LangChain run ids below this one, to forget them with it.
        self.below: set[UUID] = set()
        #: Failed attempts of tasks that may be retried: checkpoint namespace -> how many.
        self.failed: dict[str, int] = {}
        #: The agent that ran last, per branch: tools that run on their own belong to it.
        self.last_agent: dict[str | None, tuple[str, int | None]] = {}
        self._lock = threading.Lock()

    def run_on(self, engine: Engine) -> WorkflowRun:
        """This workflow's run on ``engine``, begun at the first asking."""
        with self._lock:
            run = self.runs.get(id(engine))
            if run is None:
                run, entry = workflows_of(engine).enter(engine, self)
                self.runs[id(engine)] = run
                if entry == "resumed":
                    run.emit(WorkflowResumed)
                elif entry == "started":
                    run.emit(WorkflowStarted, graph=self.graph, tenant=self.tenant)
            return run


@dataclass(slots=True)
class NodeScope:
    """One run of a node of the graph, or of a graph nested in it."""

    root: RootScope
    run_id: UUID
    node: str
    agent: str
    branch: str | None
    task: str
    #: How many approvals were asked for in it.
    asked: int = 0
    #: Whether it is a node of a graph inside the one that was called.
    nested: bool = False
    #: How many attempts of the same task failed before this one, and the branch name without its attempt if the
    #: task is a fan-out task itself.
    failed_before: int = 0
    own_branch: str | None = None
    #: Where this node is announced as an agent's step: id of the workflow run -> step.
    steps: dict[int, int] = field(default_factory=dict)
    #: Nodes that this run's branches chose.
    route: list[str] = field(default_factory=list)
    #: Whether its run was cancelled; a node in a thread may not have noticed.
    cancelled: bool = False
    before: tuple[Coordinates, WorkflowRun | None, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolScope:
    """One call of a LangChain tool whose events the handler emits."""

    run: WorkflowRun
    node: NodeScope
    tool: str
    call_id: str
    agent: str | None
    step: int | None
    started: float
