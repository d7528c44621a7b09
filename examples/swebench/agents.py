"""The graph: planner -> coder -> tests -> tester, and back to the coder while the tester is not content.

The coder keeps its conversation from attempt to attempt, so its prompt only grows at the end. The problem and the
plan stand first in the other agents' prompts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from langchain_core.messages import AnyMessage
from langgraph.graph import END, START
from langgraph.graph.message import add_messages
from pydantic import BaseModel, Field

from agentflow.graph import Agent, AgentGraph, shared
from examples.swebench.instance import Instance
from examples.swebench.scoring import run_tests
from examples.swebench.tools import make_tools
from examples.swebench.workspace import Workspace

__all__ = ["RepairState", "Verdict", "build_graph", "start_state"]


class RepairState(TypedDict, total=False):
    """A problem, and how far the agents are with it."""

    problem: str
    files: str
    plan: str
    report: str
    patch: str
    verdict: Verdict
    attempts: int
    coder_messages: Annotated[list[AnyMessage], add_messages]


class Verdict(BaseModel):
    """The tester's judgement of the changes."""

    decision: Literal["accept", "revise"] = Field(description="accept only if the problem is solved")
    feedback: str = Field(max_length=300, description="what is still wrong, in one sentence")


PLANNER = (
    "You plan how to fix a bug in a small Python repository. Name the file and the function to change and say in at"
    " most three short sentences what is wrong there."
)
CODER = (
    "You fix a bug in a small Python repository. Use the tool bash to look at files (cat, grep) and to run the tests"
    " (python -m pytest -q), and the tool edit to change a file. Change no tests. When the bug is fixed, answer with"
    " one sentence on what you changed, without calling a tool."
)
TESTER = (
    "You judge whether changes to a small Python repository solve a problem. You see the problem, the changes and how"
    " the tests that exist went. Decide accept if the problem is solved and the tests pass, else revise, and say in one"
    " sentence what is still wrong."
)


def build_graph(
    workspace: Workspace, *, attempts: int = 2, rounds: int = 8, max_output: int = 10_000, command_seconds: float = 30.0
) -> AgentGraph:
    """The graph on one workspace.

    The coder has ``attempts`` attempts of at most ``rounds`` rounds of tools. ``max_output`` bounds, in characters,
    what one tool call, the changes or the test report may add to a prompt.
    """
    tools = make_tools(workspace, command_seconds=command_seconds, max_output=max_output)
    planner = Agent("planner", PLANNER, sampling={"max_tokens": 96})
    coder = Agent("coder", CODER, tools=tools, max_tool_rounds=rounds, sampling={"max_tokens": 256})
    tester = Agent("tester", TESTER, output=Verdict, sampling={"max_tokens": 160})

    async def test(state: RepairState) -> RepairState:
        """Run the repository's own tests on what the coder left."""
        _, result = await run_tests(workspace, time_limit=2 * command_seconds, max_output=max_output // 2)
        report = "the tests took too long" if result.timed_out else result.output.strip()
        return {"report": report, "patch": await workspace.diff(), "attempts": state.get("attempts", 0) + 1}

    def after_tester(state: RepairState) -> str:
        if state["verdict"].decision == "accept" or state["attempts"] >= attempts:
            return "done"
        return "again"

    graph = AgentGraph(RepairState)
    graph.add_agent(planner, prompt=lambda s: [_problem(s), "\nWhat has to change?"], writes="plan")
    graph.add_agent(coder, prompt=_coder_prompt, writes=lambda answer: {}, history="coder_messages")
    graph.add_node("tests", test)
    graph.add_agent(tester, prompt=lambda s: _tester_prompt(s, max_output // 2), writes="verdict")
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "coder")
    graph.add_edge("coder", "tests")
    graph.add_edge("tests", "tester")
    graph.add_conditional_edges("tester", after_tester, {"again": "coder", "done": END})
    return graph


async def start_state(instance: Instance, workspace: Workspace) -> RepairState:
    """The state that a run begins with."""
    hints = f"\nHints: {instance.hints_text.strip()}" if instance.hints_text.strip() else ""
    files = await workspace.files()
    shown = "\n".join(files[:200]) + (f"\n... and {len(files) - 200} more" if len(files) > 200 else "")
    return {"problem": instance.problem_statement.strip() + hints, "files": shown}


def _problem(state: RepairState) -> dict[str, Any]:
    return shared("problem", f"Problem:\n{state['problem']}\n\nFiles:\n{state['files']}\n")


def _coder_prompt(state: RepairState) -> list[Any]:
    if "verdict" in state:
        feedback = shared("feedback", state["verdict"].feedback, producer="tester")
        return ["The tests say:\n" + state["report"], "\nThe tester says: ", feedback, "\nGo on."]
    return [_problem(state), shared("plan", f"\nPlan:\n{state['plan']}", producer="planner"), "\nFix the bug."]


def _tester_prompt(state: RepairState, limit: int) -> list[Any]:
    changes = state["patch"][:limit] or "(none)"
    plan = shared("plan", f"\nPlan:\n{state['plan']}", producer="planner")
    return [_problem(state), plan, f"\nChanges:\n{changes}\nTests:\n{state['report']}\nAre the changes good?"]
