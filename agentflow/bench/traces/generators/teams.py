"""Teams of agents on the tasks of five well-known benchmarks: long instructions that never change, short tasks that do.

``gsm8k``, ``humaneval`` and ``gaia`` are built from data: lengths of tasks and answers of GSM8K and HumanEval, and who
speaks after whom in the multi-agent runs of Who&When (whose tasks are GAIA's and AssistantBench's), with the lengths of
their agents' instructions, answers and tasks. ``mmlu`` and ``mtbench`` have no data here; what they assume is named.
Every agent begins with its instructions (lengths of Who&When's) and the documentation of its tools (BFCL's).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

from agentflow.bench.traces.generators import measured as m
from agentflow.bench.traces.generators._build import Context, WorkflowBuilder
from agentflow.bench.traces.generators._draw import Quantiles, choose, count, draw, share
from agentflow.bench.traces.generators._plan import Plan, make
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool

__all__ = ["TEAMS", "team"]

#: Assumed for MMLU: a question with its four choices, and a short reasoned answer.
MMLU_QUESTION_TOKENS: Quantiles = (30, 40, 60, 85, 140, 260, 350, 600)
MMLU_ANSWER_TOKENS: Quantiles = (10, 20, 40, 70, 110, 160, 200, 300)
#: MMLU's own: its 57 subjects by field.
MMLU_FIELDS = {"stem": 19 / 57, "humanities": 13 / 57, "social": 12 / 57, "other": 13 / 57}
#: Assumed for MT-Bench: a turn of the user, and an answer. Its own: eight categories of equal size, two turns.
MTBENCH_QUESTION_TOKENS: Quantiles = (15, 20, 40, 65, 110, 250, 350, 500)
MTBENCH_ANSWER_TOKENS: Quantiles = (40, 80, 150, 260, 380, 480, 550, 700)
MTBENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
#: Assumed: how often a checker sends the work back.
SENT_BACK = 0.25
#: Assumed: rounds after which the work stands as it is.
MAX_ROUNDS = 4

#: Agents of each team, with the APIs whose documentation they carry.
AGENTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mmlu": {"router": (), **{f: () for f in MMLU_FIELDS}, "critic": (), "answer": ()},
    "gsm8k": {"planner": (), "solver": ("MathAPI",), "checker": ("MathAPI",), "answer": ()},
    "humaneval": {"analyst": (), "coder": ("GorillaFileSystem",), "tester": ("GorillaFileSystem",)},
    "gaia": {"expert1": ("MessageAPI",), "expert2": ("GorillaFileSystem",), "expert3": ("TravelAPI",), "answer": ()},
    "mtbench": {"router": (), **{c: () for c in MTBENCH_CATEGORIES}, "editor": ()},
}
TEAMS = tuple(AGENTS)
#: Who may follow whom.
EDGES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mmlu": {
        "router": tuple(MMLU_FIELDS),
        **{f: ("critic",) for f in MMLU_FIELDS},
        "critic": (*MMLU_FIELDS, "answer"),
        "answer": (),
    },
    "gsm8k": {"planner": ("solver",), "solver": ("checker",), "checker": ("solver", "answer"), "answer": ()},
    "humaneval": {"analyst": ("coder",), "coder": ("tester",), "tester": ("coder",)},
    "gaia": {
        **{e: ("expert1", "expert2", "expert3", "answer") for e in ("expert1", "expert2", "expert3")},
        "answer": (),
    },
    "mtbench": {
        "router": MTBENCH_CATEGORIES,
        **{c: ("editor",) for c in MTBENCH_CATEGORIES},
        "editor": ("router",),
    },
}


class _Team:
    """One run of a team: who says what, and who reads it."""

    def __init__(
        self, flow: WorkflowBuilder, rng: random.Random, plan: Plan, anchors: Mapping[str, Span], task: Quantiles
    ) -> None:
        self.flow = flow
        self.rng = rng
        self.plan = plan
        text = flow.text(count(rng, task, scale=plan.scale))
        self.contexts = {a: Context().private(s).shared("task", text) for a, s in anchors.items()}
        self.last: list[TraceCall] = []
        self.cut = False

    def ask(self, agent: str, answer: Quantiles, *, tool: str | None = None, readers: tuple[str, ...] = ()) -> None:
        """The agent speaks; ``readers`` (its own context included) read it from then on."""
        context = self.contexts[agent]
        if self.cut or self.flow.over(context):
            self.cut = True
            return
        tools: tuple[TraceTool, ...] = ()
        if tool is not None and self.last:  # nobody has called one before the first answer
            tools = (TraceTool(name=tool, duration=draw(self.rng, m.SHELL_SECONDS) * self.plan.tool_scale),)
        tokens = count(self.rng, answer, scale=self.plan.scale)
        call = self.flow.call(agent, context, tokens, after=self.last, tools=tools)
        for reader in (agent, *readers):
            if reader == agent:
                self.contexts[reader].private(*call.output)
            else:
                self.contexts[reader].shared(agent, *call.output, producer=agent)
        self.last = [call]


def _mmlu(t: _Team) -> None:
    field = choose(t.rng, MMLU_FIELDS)
    t.ask("router", (2, 3, 4, 6, 8, 10, 12, 16), readers=(field,))
    for _ in range(MAX_ROUNDS):
        t.ask(field, MMLU_ANSWER_TOKENS, readers=("critic", "answer"))
        t.ask("critic", MMLU_ANSWER_TOKENS, readers=(field, "answer"))
        if not share(t.rng, SENT_BACK):
            break
    t.ask("answer", (1, 2, 3, 4, 6, 8, 10, 16))


def _gsm8k(t: _Team) -> None:
    t.ask("planner", m.SUM_ANSWER_TOKENS, readers=("solver", "checker"))
    for _ in range(MAX_ROUNDS):
        t.ask("solver", m.SUM_ANSWER_TOKENS, readers=("checker", "answer"))
        t.ask("checker", m.SUM_ANSWER_TOKENS, tool="calculate", readers=("solver", "answer"))
        if not share(t.rng, SENT_BACK):
            break
    t.ask("answer", m.SUM_ANSWER_TOKENS)


def _humaneval(t: _Team) -> None:
    t.ask("analyst", m.SUM_ANSWER_TOKENS, readers=("coder", "tester"))
    for _ in range(MAX_ROUNDS):
        t.ask("coder", m.CODE_TASK_TOKENS, readers=("tester",))
        t.ask("tester", m.CODE_TEST_TOKENS, tool="run", readers=("coder",))
        if not share(t.rng, SENT_BACK):
            break


def _gaia(t: _Team) -> None:
    experts = ("expert1", "expert2", "expert3")
    agent = choose(t.rng, m.TEAM_NEXT["start"])
    while agent != "end":
        t.ask(agent, m.TEAM_ANSWER_TOKENS, tool="terminal", readers=(*(e for e in experts if e != agent), "answer"))
        if t.cut:
            return
        agent = choose(t.rng, m.TEAM_NEXT[agent])
    t.ask("answer", m.SUM_ANSWER_TOKENS)


def _mtbench(t: _Team) -> None:
    category = t.rng.choice(MTBENCH_CATEGORIES)
    for turn in range(2):
        if turn:
            again = t.flow.text(count(t.rng, MTBENCH_QUESTION_TOKENS, scale=t.plan.scale))
            for context in t.contexts.values():
                context.shared("task", again)
        t.ask("router", (2, 3, 4, 6, 8, 10, 12, 16), readers=(category,))
        t.ask(category, MTBENCH_ANSWER_TOKENS, readers=("editor",))
        t.ask("editor", MTBENCH_ANSWER_TOKENS, readers=(category, "router"))


_RUNS = {"mmlu": _mmlu, "gsm8k": _gsm8k, "humaneval": _humaneval, "gaia": _gaia, "mtbench": _mtbench}
_TASKS: Mapping[str, Quantiles] = {
    "mmlu": MMLU_QUESTION_TOKENS,
    "gsm8k": m.SUM_QUESTION_TOKENS,
    "humaneval": m.CODE_TASK_TOKENS,
    "gaia": m.TEAM_TASK_TOKENS,
    "mtbench": MTBENCH_QUESTION_TOKENS,
}


def team(name: str, plan: Plan | None = None) -> Trace:
    """Runs of the team for the benchmark ``name``, one of :data:`TEAMS`."""
    plan = plan or Plan()
    roles = random.Random(f"{name} roles")  # instructions belong to the graph, not to a seed
    anchors = {}
    for agent, apis in AGENTS[name].items():
        tools = round(sum(m.BFCL_API_TOKENS[a] for a in apis) * plan.scale)
        anchors[agent] = Span(f"{name}.{agent}", count(roles, m.ROLE_TOKENS, scale=plan.scale, least=16) + tools)

    def one(rng: random.Random, flow: WorkflowBuilder) -> bool:
        running = _Team(flow, rng, plan, anchors, _TASKS[name])
        _RUNS[name](running)
        return not running.cut

    return make(f"team-{name}", plan, EDGES[name], one)


#: Generators by name, for the table of all.
GENERATORS = {f"team-{name}": partial(team, name) for name in TEAMS}
