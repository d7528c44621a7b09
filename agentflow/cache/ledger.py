"""Who used which cached KV, and whether anybody may use it again.

The ledger follows workflows through their events and calls. A *thread* is one agent in one branch of one
workflow; its calls are numbered. A cached node remembers, per thread, the last call that touched it. The
node is **live** while some thread that touched it belongs to a workflow that is running or paused, and that
last touch was not superseded; otherwise it is **retired**: nothing that is known will use it again.

Every event costs O(1), whatever the number of nodes: state changes are written on the workflow or thread
and read when a node is asked about. All state is bounded (see :class:`Limits`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agentflow.events import (
    AgentEnded,
    AgentStarted,
    Event,
    StateSuperseded,
    ToolEnded,
    ToolStarted,
    WorkflowEnded,
    WorkflowPaused,
    WorkflowResumed,
    WorkflowStarted,
)

__all__ = ["EARLY", "CallRef", "Ledger", "Limits", "NodeRecord", "Thread", "Workflow", "WorkflowState"]

#: The branch of calls that are made before their agent is reached, and maybe never used.
EARLY = "early"

WorkflowState = Literal["running", "paused", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a ledger's state.

    Workflows beyond ``workflows`` push out ended ones first, then the longest silent. A running workflow of
    which nothing was heard for ``idle_seconds`` counts as ended, a paused one after ``paused_seconds``.
    """

    workflows: int = 10_000
    threads_per_workflow: int = 1_024
    tools_per_workflow: int = 1_024
    path_per_workflow: int = 64
    idle_seconds: float = 3_600.0
    paused_seconds: float = 86_400.0


class Workflow:
    """What is known of one workflow. ``tools`` maps the ids of calls that are out to (tool, agent, since)."""

    __slots__ = (
        "agent", "ended_as", "graph", "id", "last_request", "last_seen", "order", "path", "sends_events", "started",
        "state", "tenant", "threads", "tools",
    )  # fmt: skip

    def __init__(self, workflow_id: str, now: float) -> None:
        self.id = workflow_id
        self.state: WorkflowState = "running"
        self.ended_as = ""
        self.graph: str | None = None
        self.tenant: str | None = None
        #: The agent that runs now or ran last, and the agents so far (the newest ``path_per_workflow``).
        self.agent: str | None = None
        self.path: list[str] = []
        self.threads: dict[tuple[str | None, str | None], Thread] = {}
        self.tools: dict[str, tuple[str, str | None, float]] = {}
        self.started = now
        self.last_seen = now
        self.last_request = 0.0
        #: Whether any event of it was heard: its framework then tells of tools itself.
        self.sends_events = False
        #: (time, sequence number) of the newest lifecycle event, to tell late ones.
        self.order: tuple[float, int] = (0.0, -1)

    @property
    def live(self) -> bool:
        """Running or paused."""
        return self.state != "ended"


class Thread:
    """One agent in one branch of a workflow. Calls below ``floor`` are superseded."""

    __slots__ = ("agent", "branch", "calls", "floor", "requests", "workflow")

    def __init__(self, workflow: Workflow, agent: str | None, branch: str | None) -> None:
        self.workflow = workflow
        self.agent = agent
        self.branch = branch
        self.calls = 0
        self.floor = 0
        #: The newest requests of the thread and their call numbers, to supersede one by its id.
        self.requests: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class CallRef:
    """A call as the ledger knows it: its thread and its number there. ``thread`` is None for unknown callers.

    A higher ``priority`` is more important.
    """

    thread: Thread | None
    index: int = 0
    priority: int = 0


class NodeRecord:
    """What is known of one cached node: ``tokens`` tokens of KV on a path from the root.

    ``owners`` maps each thread that touched it to the number of the last call that did. ``anonymous`` says
    that some caller without a workflow touched it. Times are seconds of the ledger's clock. ``path_hash`` is
    a hash of all tokens from the root to the node's end. ``hits`` counts the calls that used the node, the one
    that made it included; ``priority`` is the highest of theirs, None before the first. ``demoted_by`` and
    ``prefetched_by`` are the numbers of the decisions that last moved it between tiers, or had it computed ahead, 0
    for none. ``anchor`` is the hash of the anchor that the node lies within, 0 for none.
    """

    __slots__ = (
        "anchor", "anonymous", "created", "demoted_by", "first_workflow", "hits", "id", "last_access", "last_anonymous",
        "owners", "path_hash", "prefetched_by", "priority", "prune_at", "shared", "tokens",
    )  # fmt: skip

    def __init__(self, node_id: int, tokens: int, now: float) -> None:
        self.id = node_id
        self.tokens = tokens
        self.created = now
        self.last_access = now
        self.hits = 0
        self.priority: int | None = None
        self.anonymous = False
        self.last_anonymous: CallRef | None = None
        #: Whether calls of two workflows or more touched it, and the first that did.
        self.shared = False
        self.first_workflow: str | None = None
        self.owners: dict[Thread, int] = {}
        self.prune_at = 32
        self.path_hash = 0
        self.demoted_by = 0
        self.prefetched_by = 0
        self.anchor = 0

    def split(self, new_id: int, tokens: int) -> NodeRecord:
        """The record of the node that takes over the first ``tokens`` tokens; this one keeps the rest."""
        head = NodeRecord(new_id, tokens, self.created)
        head.last_access = self.last_access
        head.hits = self.hits
        head.priority = self.priority
        head.anonymous = self.anonymous
        head.shared = self.shared
        head.first_workflow = self.first_workflow
        head.last_anonymous = self.last_anonymous
        head.owners = dict(self.owners)
        head.prune_at = self.prune_at
        head.demoted_by = self.demoted_by
        head.prefetched_by = self.prefetched_by
        head.anchor = self.anchor
        self.tokens -= tokens
        return head


class Ledger:
    """Follows workflows and answers whether a node is live. Not thread-safe: one owner drives it."""

    def __init__(self, *, clock: Callable[[], float], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.workflows: dict[str, Workflow] = {}
        self._clock = clock
        self.dropped_workflows = 0

    def observe(self, event: Event) -> None:
        """Take in an event. O(1); late, repeated and unknown ones are harmless."""
        now = self._clock()
        workflow = self.workflow(event.workflow, now)
        workflow.last_seen = now
        workflow.sends_events = True
        if isinstance(event, WorkflowStarted | WorkflowPaused | WorkflowResumed | WorkflowEnded):
            self._lifecycle(workflow, event)
        elif isinstance(event, StateSuperseded):
            self._supersede(workflow, event)
        elif isinstance(event, AgentStarted):
            self._entered(workflow, event.agent)
        elif isinstance(event, AgentEnded):
            if event.agent is not None:
                workflow.agent = event.agent
        elif isinstance(event, ToolStarted):
            workflow.tools[event.call_id] = (event.tool, event.agent, now)
            if len(workflow.tools) > self.limits.tools_per_workflow:
                del workflow.tools[next(iter(workflow.tools))]
        elif isinstance(event, ToolEnded):
            workflow.tools.pop(event.call_id, None)

    def workflow(self, workflow_id: str, now: float) -> Workflow:
        """The workflow of that id, made when it is new."""
        workflow = self.workflows.get(workflow_id)
        if workflow is None:
            workflow = Workflow(workflow_id, now)
            self.workflows[workflow_id] = workflow
            if len(self.workflows) > self.limits.workflows:
                self._drop_some()
        return workflow

    def call(
        self, workflow_id: str | None, agent: str | None, branch: str | None, request: str, *, priority: int = 0
    ) -> CallRef:
        """Register a call. A call of an ended workflow brings it back to life: it is evidently running."""
        if workflow_id is None:
            return CallRef(None, 0, priority)
        now = self._clock()
        workflow = self.workflow(workflow_id, now)
        workflow.last_seen = workflow.last_request = now
        workflow.state = "running"
        if workflow.agent != agent and branch != EARLY:
            self._entered(workflow, agent)
        key = (agent, branch)
        thread = workflow.threads.get(key)
        if thread is None:
            thread = workflow.threads[key] = Thread(workflow, agent, branch)
            if len(workflow.threads) > self.limits.threads_per_workflow:
                del workflow.threads[next(iter(workflow.threads))]
        index = thread.calls
        thread.calls += 1
        thread.requests[request] = index
        if len(thread.requests) > 16:
            del thread.requests[next(iter(thread.requests))]
        return CallRef(thread, index, priority)

    def touch(self, record: NodeRecord, call: CallRef) -> None:
        """Note that ``call`` used ``record``; to say it again for the same call counts once. O(1) amortised."""
        record.last_access = self._clock()
        if record.priority is None or call.priority > record.priority:
            record.priority = call.priority
        thread = call.thread
        if thread is None:
            record.anonymous = True
            if record.last_anonymous is not call:
                record.last_anonymous = call
                record.hits += 1
            return
        if record.first_workflow is None:
            record.first_workflow = thread.workflow.id
        elif record.first_workflow != thread.workflow.id:
            record.shared = True
        owners = record.owners
        if call.index > owners.get(thread, -1):
            owners[thread] = call.index
            record.hits += 1
        if len(owners) > record.prune_at:
            self._prune(record)

    def is_live(self, record: NodeRecord) -> bool:
        """Whether a workflow that is not over may use the node again. O(owners), mostly O(1).

        Nodes used by callers without a workflow count as live: nothing says that they are done.
        """
        if record.anonymous:
            return True
        now = self._clock()
        return any(
            index >= thread.floor and thread.workflow.state != "ended" and not self._expired(thread.workflow, now)
            for thread, index in record.owners.items()
        )

    def live_owners(self, record: NodeRecord) -> list[Thread]:
        """Threads that keep the node live."""
        now = self._clock()
        return [
            thread
            for thread, index in record.owners.items()
            if index >= thread.floor and thread.workflow.state != "ended" and not self._expired(thread.workflow, now)
        ]

    def retired_because(self, record: NodeRecord) -> str:
        """Why a node that is not live is retired, for people."""
        for thread, index in record.owners.items():
            if thread.workflow.live and index < thread.floor:
                return f"superseded state of workflow {thread.workflow.id}"
        for thread in record.owners:
            workflow = thread.workflow
            how = {"": "silent for too long", "done": "ended"}.get(workflow.ended_as, f"ended ({workflow.ended_as})")
            return f"workflow {workflow.id} {how}"
        return "used by no workflow"

    def counts(self) -> tuple[int, int]:
        """Workflows running and paused."""
        running = sum(w.state == "running" for w in self.workflows.values())
        paused = sum(w.state == "paused" for w in self.workflows.values())
        return running, paused

    def _expired(self, workflow: Workflow, now: float) -> bool:
        limit = self.limits.paused_seconds if workflow.state == "paused" else self.limits.idle_seconds
        if now - workflow.last_seen <= limit:
            return False
        workflow.state = "ended"
        workflow.ended_as = ""
        return True

    def _prune(self, record: NodeRecord) -> None:
        record.owners = {t: i for t, i in record.owners.items() if t.workflow.state != "ended" and i >= t.floor}
        record.prune_at = max(32, 2 * len(record.owners))

    def _lifecycle(self, workflow: Workflow, event: Event) -> None:
        order = (event.time, event.seq)
        if order <= workflow.order:
            return
        workflow.order = order
        if isinstance(event, WorkflowStarted):
            workflow.graph = event.graph or workflow.graph
            workflow.tenant = event.tenant or workflow.tenant
            workflow.state = "running"
        elif isinstance(event, WorkflowPaused):
            workflow.state = "paused"
        elif isinstance(event, WorkflowResumed):
            workflow.state = "running"
        elif isinstance(event, WorkflowEnded):
            workflow.state = "ended"
            workflow.ended_as = event.outcome
            workflow.tools.clear()
            # Late touches of its last calls stay retired; a later run of the same id makes new threads.
            workflow.threads.clear()

    def _supersede(self, workflow: Workflow, event: StateSuperseded) -> None:
        if event.request is not None:
            for thread in workflow.threads.values():
                index = thread.requests.get(event.request)
                if index is not None:
                    thread.floor = max(thread.floor, index + 1)
        elif event.branch is not None:
            for thread in workflow.threads.values():
                if thread.branch == event.branch:
                    thread.floor = thread.calls
        elif event.agent is not None:
            for thread in workflow.threads.values():
                if thread.agent == event.agent:
                    thread.floor = max(thread.floor, thread.calls - 1)

    def _entered(self, workflow: Workflow, agent: str | None) -> None:
        if agent is None:
            return
        workflow.agent = agent
        workflow.path.append(agent)
        if len(workflow.path) > self.limits.path_per_workflow:
            del workflow.path[0]

    def _drop_some(self) -> None:
        """Make room for a tenth of the limit at once, so that the scan is paid rarely."""
        ranked = sorted(self.workflows.values(), key=lambda w: (w.state != "ended", w.last_seen))
        for workflow in ranked[: max(1, self.limits.workflows // 10)]:
            if workflow.live:
                self.dropped_workflows += 1
            workflow.state = "ended"
            del self.workflows[workflow.id]
