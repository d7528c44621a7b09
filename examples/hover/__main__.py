"""``python -m examples.hover``: check claims, score the answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentflow.cli.engine_options import add_engine_options, open_engine
from agentflow.cli.output import Output
from agentflow.errors import AgentflowError, UsageError
from agentflow.report import agent_table
from examples.hover.data import OWN_CLAIMS, Claim, load_claims, load_passages, open_wiki
from examples.hover.retrieval import Index
from examples.hover.run import check_claims, oracle_engine, rows_of
from examples.hover.scoring import summarise


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.hover",
        description="Check claims against an encyclopedia with four agents on one engine, and score what they found.",
        epilog="Without --claims-file and --wiki the claims and passages that come with the example are used.",
    )
    parser.add_argument("--claims", type=int, metavar="N", help="check the first N claims (default: all)")
    parser.add_argument("--claims-file", type=Path, metavar="FILE", help="claims as a JSON file in HoVer's format")
    parser.add_argument("--wiki", type=Path, metavar="DB", help="SQLite database with a table documents(id, text)")
    parser.add_argument("--hops", type=int, default=4, metavar="H", help="searches per claim at most (default: 4)")
    parser.add_argument("--k", type=int, default=3, metavar="K", help="passages per search (default: 3)")
    parser.add_argument("--concurrency", type=int, default=4, metavar="K", help="claims at once (default: 4)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep results in FILE; a second run goes on there")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of tables")
    parser.add_argument("--oracle", action="store_true", help="no model: gold queries and labels, to prove the scorer")
    add_engine_options(parser)
    return parser


async def check(args: argparse.Namespace) -> tuple[list[Claim], dict[str, Any]]:
    """Check the claims that ``args`` ask for; returns them and the whole result, JSON-ready."""
    for name in ("claims", "hops", "k", "concurrency"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
    if args.oracle and args.record is not None:
        raise UsageError("--record records what an engine does; --oracle runs none")
    claims = load_claims(args.claims_file or OWN_CLAIMS, limit=args.claims)
    if not claims:
        raise UsageError("there is no claim to check")
    index = Index(open_wiki(args.wiki) if args.wiki else load_passages())
    with oracle_engine(claims) if args.oracle else open_engine(args) as engine:
        batch = await check_claims(
            claims, engine, index, hops=args.hops, k=args.k, concurrency=args.concurrency, results=args.results
        )
        model = engine.model
    return claims, {
        "model": model,
        "scores": summarise(claims, {r["uid"]: r for r in batch.records}),
        "agents": [row.to_json() for row in rows_of(batch.records)],
        "errors": batch.errors,
        "resumed": batch.resumed,
        "claims": batch.records,
    }


def score_table(scores: dict[str, Any]) -> Table:
    """Scores per number of hops."""
    table = Table(title="Scores", title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    table.add_column("claims with")
    for name in ("claims", "all titles found", "recall", "label right"):
        table.add_column(name, justify="right")
    for group, s in scores.items():
        found = "-" if not s["with_facts"] else f"{s['all_found']} of {s['with_facts']}"
        label = "-" if not s["labelled"] else f"{s['label_right']} of {s['labelled']}"
        table.add_row(group, str(s["claims"]), found, "-" if s["recall"] is None else f"{s['recall']:.2f}", label)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code. Claims that ended in an error make it 1, wrong answers do not."""
    args = build_parser().parse_args(argv)
    out = Output(as_json=args.json)
    try:
        _, result = asyncio.run(check(args))
    except AgentflowError as error:
        kept = f" (finished claims are kept in {args.results})" if args.results and args.results.exists() else ""
        out.error(error, " ".join(str(error).split()) + kept)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    out.show(score_table(result["scores"]), agent_table(rows_of(result["claims"])))
    for uid, message in result["errors"].items():
        out.show(f"{uid} failed: {message}")
    out.result(result)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
