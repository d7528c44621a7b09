"""Draw a graph as Mermaid text.

FILE:GRAPH names a graph in a Python file: a LangGraph StateGraph, an AgentGraph, a compiled graph, or a function
that returns one. No engine is started. Paste the output into a Markdown block marked mermaid, or into any
Mermaid viewer.
"""

from __future__ import annotations

import argparse

from agentflow.cli._command import Command
from agentflow.cli.output import Output

__all__ = ["COMMAND"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("target", metavar="FILE:GRAPH", help="for example my_graph.py:graph")
    parser.add_argument("--xray", type=int, default=0, metavar="DEPTH", help="draw subgraphs too, so many levels deep")


def run(args: argparse.Namespace, out: Output) -> int:
    """Draw the graph."""
    from agentflow.cli._load import compiled, load_graph
    from agentflow.engine.scripted import ScriptedEngine

    # A drawn graph makes no call: an engine with nothing to say is enough.
    drawable = compiled(load_graph(args.target), ScriptedEngine([])).get_graph(xray=args.xray)
    mermaid = drawable.draw_mermaid()
    out.show(mermaid.rstrip("\n"))
    out.result(
        {
            "mermaid": mermaid,
            "nodes": list(drawable.nodes),
            "edges": [
                {"from": edge.source, "to": edge.target, "conditional": edge.conditional} for edge in drawable.edges
            ],
        }
    )
    return 0


COMMAND = Command(
    name="graph", help="draw a graph as Mermaid text", description=__doc__ or "", configure=configure, run=run
)
