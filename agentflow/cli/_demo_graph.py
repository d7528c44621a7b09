"""The demo's graph: a planner, a coder and a tester that write a small formula together.

The coder's formula is checked by a tool on a few cases. While it is wrong the tester says why and the coder
tries again, up to a limit. The task, the plan and the attempts are shared by the agents and only grow.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import RunnableConfig, RunnableLambda

from agentflow.engine.base import new_id
from agentflow.graph import Agent, AgentGraph, shared
from agentflow.tools import ToolExecutor, tool

__all__ = ["TASKS", "DemoState", "Task", "build_graph", "evaluate"]


@dataclass(frozen=True, slots=True)
class Task:
    """A formula to find: what it must do, and cases ``(x, y, result)``."""

    name: str
    text: str
    cases: tuple[tuple[int, int, float], ...]


TASKS = (
    Task("sum", "Add x and y.", ((1, 2, 3), (5, 7, 12))),
    Task("rectangle", "The area of a rectangle with the sides x and y.", ((2, 3, 6), (4, 5, 20))),
    Task("difference", "Subtract y from x.", ((9, 4, 5), (3, 8, -5))),
    Task("average", "The average of x and y.", ((2, 4, 3), (5, 6, 5.5))),
    Task("double", "Twice x, plus y.", ((1, 2, 4), (6, 1, 13))),
    Task("square", "The square of x, minus y.", ((3, 1, 8), (4, 6, 10))),
)


class DemoState(TypedDict, total=False):
    """A task and how far the agents are with it."""

    task: str
    cases: list[tuple[int, int, float]]
    plan: str
    formula: str
    report: str
    solved: bool
    attempts: Annotated[list[str], operator.add]


planner = Agent(
    "planner",
    "You are the planner of a small team that writes formulas. You read a task and say in one short sentence which"
    " operation solves it. The formula may use the variables x and y, whole numbers, and the operators plus, minus,"
    " times and divided by. You do not write the formula yourself. Example: for the task 'Three times x' you say"
    " 'Multiply x by three.' Example: for the task 'Half of y' you say 'Divide y by two.' Be brief and exact.",
    sampling={"max_tokens": 16, "stop": ("\n",)},
)
coder = Agent(
    "coder",
    "You are the coder of a small team that writes formulas. You read a task and a plan and answer with one formula"
    " in Python and nothing else. It may use the variables x and y, whole numbers, parentheses and the operators"
    " + - * and /. When earlier attempts are listed they were wrong: write another formula. Examples: for 'Three"
    " times x' the formula is 3*x and for 'Half of y' the formula is y/2 and for 'The sum of x and one' it is x+1.",
    # The form of the answer is held by a grammar; which formula it is, is the model's own choice.
    sampling={"max_tokens": 12, "regex": r"\(?[xy][+*/-][xy1-9]\)?([+*/-][xy1-9])?"},
)
tester = Agent(
    "tester",
    "You are the tester of a small team that writes formulas. You read a task, the formula that the coder wrote and a"
    " report on the cases that it was tried on. Every line of the report shows the values of x and y, the result that"
    " was expected and the one that came out. Say in one short sentence what is wrong with the formula, so that the"
    " coder can write a better one; if all cases are right, say that the formula is right.",
    sampling={"max_tokens": 16, "stop": ("\n",)},
)


@tool(timeout=5)
def try_formula(formula: str, cases: list[list[float]]) -> str:
    """Compute a formula in x and y for cases of x, y and the expected result."""
    lines = []
    for x, y, expected in cases:
        try:
            value = evaluate(formula, x=x, y=y)
        except (ArithmeticError, ValueError) as error:
            lines.append(f"x={x:g}, y={y:g}: expected {expected:g}, error: {error}")
            continue
        right = "right" if abs(value - expected) < 1e-9 else "wrong"
        lines.append(f"x={x:g}, y={y:g}: expected {expected:g}, got {value:g}, {right}")
    return "\n".join(lines)


def build_graph(*, attempts: int = 2) -> AgentGraph:
    """The graph; the coder has ``attempts`` tries."""
    executor = ToolExecutor([try_formula])

    def call_for(state: DemoState) -> list[Any]:
        args = {"formula": state["formula"], "cases": state["cases"]}
        return [{"name": try_formula.name, "args": args, "id": new_id("try"), "type": "tool_call"}]

    def tried(answer: Any) -> DemoState:
        report = str(answer.content)
        solved = answer.status != "error" and all(line.endswith("right") for line in report.splitlines())
        return {"report": report, "solved": solved}

    def check(state: DemoState, config: RunnableConfig) -> DemoState:
        return tried(executor.run(call_for(state), config=config)[0])

    async def acheck(state: DemoState, config: RunnableConfig) -> DemoState:
        return tried((await executor.arun(call_for(state), config=config))[0])

    def after_tester(state: DemoState) -> str:
        return "done" if state["solved"] or len(state["attempts"]) >= attempts else "again"

    graph = AgentGraph(DemoState)
    graph.add_agent(planner, prompt=lambda s: [_task(s), "\nWhich operation solves it?"], writes="plan")
    graph.add_agent(
        coder,
        prompt=lambda s: [*_so_far(s), "\nFormula:"],
        writes=lambda answer: {"formula": answer.text.strip()},
    )
    graph.add_node("try", RunnableLambda(check, afunc=acheck, name="try"))
    graph.add_agent(
        tester,
        prompt=lambda s: [*_so_far(s), f"\nNew formula: {s['formula']}\n{s['report']}\nWhat is wrong?"],
        writes=lambda answer, state: {"attempts": [f"{state['formula']} ({answer.text.strip()})"]},
    )
    graph.set_entry_point("planner")
    graph.add_edge("planner", "coder")
    graph.add_edge("coder", "try")
    graph.add_edge("try", "tester")
    graph.add_conditional_edges("tester", after_tester, {"again": "coder", "done": "__end__"})
    return graph


def _task(state: DemoState) -> dict[str, Any]:
    return shared("task", f"Task: {state['task']}")


def _so_far(state: DemoState) -> list[dict[str, Any]]:
    attempts = [shared("attempts", f"\nAttempt: {a}", producer="tester") for a in state.get("attempts", [])]
    return [_task(state), shared("plan", f"\nPlan: {state['plan']}", producer="planner"), *attempts]


_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def evaluate(formula: str, *, x: float, y: float) -> float:
    """The value of a formula made of ``x``, ``y``, numbers, ``+ - * / //`` and parentheses; nothing else is run.

    Squares may be written ``x**2``. Raises ``ValueError`` for anything else, ``ArithmeticError`` where there is no
    value.
    """
    if len(formula) > 200:
        raise ValueError("the formula is too long")
    try:
        tree = ast.parse(formula.strip(), mode="eval")
    except SyntaxError:
        raise ValueError("not a formula") from None

    def value(node: ast.AST) -> float:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.Name(id="x"):
                return x
            case ast.Name(id="y"):
                return y
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as power)) if 0 <= power <= 3:
                return float(value(left) ** power)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
        raise ValueError("only x, y, numbers and + - * / may be used")

    return value(tree)
