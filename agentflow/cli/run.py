"""Run a graph of yours on an engine and show what it gave and used.

FILE:GRAPH names a graph in a Python file: an AgentGraph (its agents get the engine), any LangGraph graph (it
keeps its own models and reports to the engine), or a function that returns one; a function with a parameter named
engine is given it. The input is a JSON value, @FILE, or - for standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentflow.cli._command import Command
from agentflow.cli.engine_options import add_engine_options, open_engine
from agentflow.cli.output import Output
from agentflow.errors import UsageError

__all__ = ["COMMAND"]

DEFAULT_MAX_STEPS = 50


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("target", metavar="FILE:GRAPH", help="for example my_graph.py:graph")
    parser.add_argument(
        "--input", default="{}", metavar="JSON", help="the graph's input: JSON, @FILE, or - (default: {})"
    )
    parser.add_argument("--thread-id", metavar="ID", help="conversation, for graphs with a checkpointer")
    parser.add_argument(
        "--max-steps",
        type=int,
        metavar="N",
        help="stop after N steps of the graph (default: what the graph was compiled with, else 50)",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Run the graph."""
    from agentflow.cli._load import load_graph

    given = read_input(args.input)
    if args.max_steps is not None and args.max_steps < 1:
        raise UsageError(f"--max-steps must be at least 1, got {args.max_steps}")
    target = load_graph(args.target)  # before the engine starts, which takes a while
    with open_engine(args) as engine:
        return run_on(engine, target, given, args, out)


def read_input(text: str) -> Any:
    """The value that ``--input`` gives."""
    source = "--input"
    if text == "-":
        text, source = sys.stdin.read(), "standard input"
    elif text.startswith("@"):
        source = text[1:]
        try:
            text = Path(source).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot read {source}: {error.strerror}") from None
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{source} is not JSON: {error}") from None


def run_on(engine: Any, target: Any, given: Any, args: argparse.Namespace, out: Output) -> int:
    """Run ``target`` on an open engine, show the result and return the exit code."""
    from agentflow.cli._load import compiled
    from agentflow.report import agent_rows, agent_table, decision_rows, decision_table

    app = compiled(target, engine)
    own = (app.config or {}).get("recursion_limit")  # what the graph was compiled with
    max_steps = args.max_steps or own or DEFAULT_MAX_STEPS
    result = asyncio.run(app.arun(given, thread_id=args.thread_id, max_steps=max_steps))
    rows, decided = agent_rows([result.agents]), decision_rows(result.decisions)
    out.show(*(f"{key}: {_text(value)}" for key, value in result.state.items()))
    out.show("", agent_table(rows))
    if decided:
        out.show(decision_table(decided))
    if result.outcome == "limit":
        out.show(f"stopped after {result.max_steps} steps; what is shown is the state so far (--max-steps)")
    elif result.outcome == "paused":
        out.show("paused, waiting for input:", *(f"  {_text(i)}" for i in result.interrupts))
    error = result.error
    if error is not None and args.debug:
        raise error
    if error is not None:
        out.show(f"failed: {type(error).__name__}: {' '.join(str(error).split())}")
    out.result(
        {
            "outcome": result.outcome,
            "state": _jsonable(result.state),
            "interrupts": [_text(i) for i in result.interrupts],
            "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
            "agents": [row.to_json() for row in rows],
            "decisions": [d.to_json() for d in result.decisions],
        }
    )
    return 0 if result.outcome in ("done", "paused") else 1


def _text(value: Any) -> str:
    """A value of the state as a person reads it."""
    if isinstance(value, list):
        return "".join(f"\n  - {_text(item)}" for item in value) or "(none)"
    content = getattr(value, "content", None)
    if content is not None and hasattr(value, "type"):
        return f"{value.type}: {content}"
    return str(value)


def _jsonable(value: Any) -> Any:
    """A state as JSON-ready data: pydantic models and messages as dicts, what else is unknown as text."""
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


COMMAND = Command(name="run", help="run a graph of yours", description=__doc__ or "", configure=configure, run=run)
