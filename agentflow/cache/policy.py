"""The policy interface and the registry of policies by name.

A policy is one class on four primitives: it *observes* what happens, *scores* items, *predicts* what agents
will do, and *acts* by asking for effects. The same objects are driven by the engine's scheduler and by the
simulator. A policy knows neither SGLang nor LangGraph.

Retention needs no effect of its own: a policy that wants to keep a node scores it higher. Such pins are soft
by construction: when nothing else is left the node goes, so the pool can never wedge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from agentflow.cache.decision import DecisionKind
from agentflow.cache.ledger import CallRef, Ledger, NodeRecord
from agentflow.errors import UsageError
from agentflow.events import Event

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "CallArrived",
    "CallFinished",
    "Effect",
    "Evicted",
    "Explanation",
    "Forecast",
    "HOLD",
    "Item",
    "LoadAdapter",
    "Loaded",
    "Note",
    "Observation",
    "Policy",
    "PolicySpec",
    "PoolState",
    "Prefetch",
    "Prefilled",
    "Score",
    "Touched",
    "WaitingCall",
    "WarmUp",
    "check_policies",
    "make_policies",
    "policy_names",
    "register_policy",
    "spec_name",
    "split_policies",
]


class Touched(NamedTuple):
    """A call used a cached node (found it, or computed it)."""

    node: NodeRecord
    call: CallRef


class CallArrived(NamedTuple):
    """A request reached the scheduler. ``tokens`` is the length of its prompt.

    ``anchor`` is a hash of its first ``anchor_tokens`` tokens (the agent's system prompt and tools), 0 when not
    known. ``adapter`` names the LoRA adapter that it asks for.
    """

    request: str
    call: CallRef
    tokens: int
    anchor: int = 0
    anchor_tokens: int = 0
    adapter: str | None = None


class Prefilled(NamedTuple):
    """A request's prompt was computed. ``hidden`` is the model's hidden state of its last token after the last norm
    (float32, of the model's hidden size), for policies that want it."""

    request: str
    call: CallRef
    hidden: npt.NDArray[np.float32]


class CallFinished(NamedTuple):
    """A request left the scheduler, done or aborted. Tokens are those of its prompt, of those the cached
    ones, and of its answer.

    ``host_tokens`` of the cached ones were loaded from the host, which took ``reload_seconds``. It waited
    ``queue_seconds`` until it first ran, and its prompt was computed in ``prefill_seconds``. Seconds are 0.0
    where the engine does not tell. ``tool`` is the tool that its answer calls, as recognised from the text, for
    callers that send no events; ``variant`` is what kind of use of it.
    """

    request: str
    call: CallRef
    tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    host_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    reload_seconds: float = 0.0
    tool: str | None = None
    variant: str | None = None


class Evicted(NamedTuple):
    """A node left a tier: ``device`` or ``host``. ``kept`` says that it is still on the host."""

    node: NodeRecord
    tier: str
    kept: bool = False


class Loaded(NamedTuple):
    """A node on the host is on the device again, or on its way there."""

    node: NodeRecord


class PoolState(NamedTuple):
    """The KV pool at a scheduling step, in tokens: its size, what is free, what running calls hold."""

    total: int
    free: int
    held: int = 0
    running: int = 0
    waiting: int = 0
    host_total: int = 0
    host_free: int = 0


@dataclass(slots=True)
class WaitingCall:
    """A request in the scheduler's waiting queue, as policies score it. ``arrived`` is in seconds, ``anchor`` as in
    :class:`CallArrived`."""

    request: str
    call: CallRef
    tokens: int
    cached_tokens: int
    arrived: float
    preempted: bool = False
    anchor: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one workflow will do next.

    ``steps[k]`` maps agents to the probability that step ``k + 1`` from now invokes them; what is missing to
    1.0 is the probability that the workflow is over by then.
    """

    workflow: str
    steps: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Load a node's KV from the host to the device; ``value`` ranks them.

    ``displace`` says what may give way to it: ``nothing`` (free space only), ``retired`` nodes, or ``active`` ones too.
    """

    node: int
    reason: str
    value: float = 0.0
    displace: Literal["nothing", "retired", "active"] = "nothing"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Compute the KV of an anchor ahead of its next use, by a call of the engine's own that holds nothing else.

    ``anchor`` is as in :class:`CallArrived`; the engine remembers the tokens of those it saw. ``displace`` is as in
    :class:`Prefetch`.
    """

    anchor: int
    reason: str
    value: float = 0.0
    displace: Literal["nothing", "retired", "active"] = "retired"


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Have the LoRA adapter ``adapter`` in device memory before a call asks for it; ``value`` ranks them."""

    adapter: str
    reason: str
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """Write a decision that moves no KV (a pin, a release) into the decision log; the runtime does it."""

    kind: DecisionKind
    reason: str
    tokens: int = 0
    workflow: str | None = None
    agent: str | None = None
    terms: Mapping[str, float] = field(default_factory=dict)


Observation = Event | Touched | CallArrived | Prefilled | CallFinished | Evicted | PoolState | Loaded
Item = NodeRecord | WaitingCall
#: What the engine carries out.
Effect = Prefetch | WarmUp | LoadAdapter
#: A tuple of floats of fixed length per policy and kind of item; the lowest node is evicted first, the
#: lowest waiting call runs first. () means no opinion.
Score = tuple[float, ...]
#: The score of a waiting call that is not to run now. The engine holds it back for as long as anything else runs or
#: can run.
HOLD = math.inf


@dataclass(slots=True)
class Explanation:
    """Why an item has its score, for people, with the numbers it came from."""

    reason: str
    terms: Mapping[str, float] = field(default_factory=dict)


class Policy:
    """Base of all policies; every method has a default that does nothing.

    A subclass may take options as keyword-only arguments of JSON-ready types. One owner drives a policy from
    one thread. ``ledger`` is shared by the policies of a runtime and is up to date when a policy's method is
    called. An exception in any method is counted and logged, and the policy's opinion is left out from then
    on; the request is not affected.
    """

    #: The name by which it is chosen.
    name: ClassVar[str] = ""
    #: Where it stands among others, lowest first, whatever the order in which they were chosen; equals keep that order.
    precedence: ClassVar[int] = 100
    #: Where it is driven: in the engine's scheduler, or in the framework, on the way of model and tool calls.
    side: ClassVar[Literal["engine", "framework"]] = "engine"
    #: ``score_node`` depends only on who touched the node and on what is known of their workflows. A score then
    #: stays valid until the node is touched again or one of those workflows is heard of (an event, a call), and
    #: the leaves in question need not all be scored again at every eviction.
    scores_by_owner: ClassVar[bool] = False
    #: Whether it observes :class:`PoolState`, which is made at every scheduling step for those that do.
    wants_pool_state: ClassVar[bool] = False
    #: Whether it observes :class:`Prefilled`. Asked before every prefill: a policy may come to want it.
    wants_hidden: bool = False

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.ledger = ledger
        self.clock = clock

    def observe(self, observation: Observation) -> None:
        """Take in what happened. Must cost no more than a few microseconds."""

    def score_node(self, node: NodeRecord) -> Score:
        """How much the node is worth keeping. Called for every evictable leaf when room is needed."""
        return ()

    def score_call(self, call: WaitingCall) -> Score:
        """When the waiting call should run. Called for every waiting call at every scheduling step."""
        return ()

    def predict(self, horizon: int) -> Sequence[Forecast]:
        """What the live workflows will do in the next ``horizon`` steps."""
        return ()

    def act(self) -> Sequence[Effect | Note]:
        """Effects wanted now, and decisions to log. Called between scheduler steps, off the critical path."""
        return ()

    def rescored(self) -> Sequence[str]:
        """Workflows whose nodes' scores changed since this was last asked, other than by what was observed: by what
        the policy computed in the background. Asked between scheduler steps; must cost next to nothing."""
        return ()

    def explain(self, node: NodeRecord) -> Explanation | None:
        """Why the node has its score; called when it is evicted."""
        return None

    def stats(self) -> Mapping[str, float]:
        """What the policy has learned and counted, by name, for people."""
        return {}


#: Makes a policy: ``factory(ledger, clock, **options)``.
PolicyFactory = Callable[..., Policy]
#: A policy's name, or a mapping with ``name`` and its options (JSON-ready, so that it can travel).
PolicySpec = str | Mapping[str, Any]
_REGISTRY: dict[str, PolicyFactory] = {}
#: Where agentflow's own policies are; each is imported when it is asked for.
_BUILTIN: Mapping[str, str] = {
    "adapters": "agentflow.runtime.policies.adapters:AdapterPreload",
    "admission": "agentflow.runtime.policies.admission:Admission",
    "autellix": "agentflow.cache.baselines:Autellix",
    "belady": "agentflow.cache.baselines:Belady",
    "by-workflow": "agentflow.cache.by_workflow:ByWorkflow",
    "cachesage": "agentflow.runtime.policies.cachesage:CacheSage",
    "continuum": "agentflow.cache.baselines:Continuum",
    "continuum-preview": "agentflow.cache.baselines:ContinuumPreview",
    "fairness": "agentflow.runtime.policies.fairness:Fairness",
    "fifo": "agentflow.cache.baselines:FIFO",
    "hedging": "agentflow.runtime.policies.hedging:Hedging",
    "infercept": "agentflow.cache.baselines:InferCept",
    "kvflow": "agentflow.cache.baselines:KVFlow",
    "kvflow-oracle": "agentflow.cache.baselines:KVFlowOracle",
    "lfu": "agentflow.cache.baselines:LFU",
    "lifecycle": "agentflow.cache.lifecycle:Lifecycle",
    "lru": "agentflow.cache.baselines:LRU",
    "memo": "agentflow.runtime.policies.memo:Memo",
    "pbkv": "agentflow.cache.pbkv.policy:PBKV",
    "pbkv-aggressive": "agentflow.cache.pbkv.policy:PBKVAggressive",
    "pbkv-he": "agentflow.cache.pbkv.policy:PBKVEvict",
    "pbkv-lae": "agentflow.cache.lifecycle:Lifecycle",
    "pbkv-queue": "agentflow.cache.pbkv.queue:PBKVQueue",
    "priority": "agentflow.cache.baselines:Priority",
    "safety": "agentflow.runtime.policies.safety:Safety",
    "session": "agentflow.cache.baselines:SessionReferenced",
    "shaping": "agentflow.runtime.policies.shaping:Shaping",
    "slru": "agentflow.cache.baselines:SLRU",
    "speculation": "agentflow.runtime.policies.speculation:Speculation",
    "ttl": "agentflow.cache.ttl:TTL",
}


def register_policy(name: str, factory: PolicyFactory) -> None:
    """Make ``factory`` (a Policy class, mostly) available as ``name``. A name can be taken once."""
    if not name:
        raise UsageError("a policy needs a name")
    if name in _BUILTIN or _REGISTRY.get(name, factory) is not factory:
        raise UsageError(f"a policy named {name!r} is already registered")
    _REGISTRY[name] = factory


def policy_names() -> list[str]:
    """Names that :func:`make_policies` knows."""
    return sorted({*_REGISTRY, *_BUILTIN})


def spec_name(spec: PolicySpec) -> str:
    """The name in a policy's specification."""
    return spec if isinstance(spec, str) else str(spec.get("name", ""))


def make_policies(specs: Sequence[PolicySpec], ledger: Ledger, clock: Callable[[], float]) -> list[Policy]:
    """Policies in order of precedence, from names or mappings of ``name`` and options.

    Those of lower :attr:`Policy.precedence` come first; equals keep the order given. ``module:Class`` names a policy
    class of the user's own. Raises :class:`~agentflow.errors.UsageError` for an
    unknown name or options that the policy does not take.
    """
    out: list[Policy] = []
    for spec in specs:
        name = spec_name(spec)
        factory = _REGISTRY.get(name) or _import(_BUILTIN.get(name, name))
        if factory is None:
            raise UsageError(f"unknown policy {name!r}; known: {', '.join(policy_names())}, or module:Class")
        options = {} if isinstance(spec, str) else {k: v for k, v in spec.items() if k != "name"}
        try:
            out.append(factory(ledger, clock, **options))
        except (TypeError, ValueError) as error:
            raise UsageError(f"policy {name!r} does not take these options: {error}") from error
    out.sort(key=lambda policy: policy.precedence)
    return out


def split_policies(specs: Sequence[PolicySpec]) -> tuple[list[PolicySpec], list[PolicySpec]]:
    """The policies for an engine's scheduler, and those that the framework drives (:attr:`Policy.side`).

    What cannot be imported here is left to the engine, whose process may find other modules.
    """
    engine: list[PolicySpec] = []
    framework: list[PolicySpec] = []
    for spec in specs:
        name = spec_name(spec)
        try:
            factory = _REGISTRY.get(name) or _import(_BUILTIN.get(name, name))
        except UsageError:
            factory = None
        (framework if getattr(factory, "side", "engine") == "framework" else engine).append(spec)
    return engine, framework


def check_policies(specs: Sequence[PolicySpec]) -> None:
    """Raise :class:`~agentflow.errors.UsageError` for names and options that no engine would take.

    Classes named as ``module:Class`` are left to the engine, whose process may find other modules.
    """
    if isinstance(specs, str):
        raise UsageError(f"policies are a list of names: write [{specs!r}]")
    make_policies([s for s in specs if ":" not in spec_name(s)], Ledger(clock=time.time), time.time)


def _import(name: str) -> PolicyFactory | None:
    module, _, attribute = name.partition(":")
    if not attribute:
        return None
    import importlib

    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"policy {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UsageError(f"policy {name!r} is not a subclass of agentflow.cache.policy.Policy")
    return found
