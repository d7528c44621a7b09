"""`agentflow bench policies`: each policy of the runtime layer against the same load without it."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from agentflow.cli.output import Output

__all__ = ["ENTRY", "run_policies_bench"]

#: How it is listed beside the comparisons.
ENTRY = {
    "name": "policies",
    "title": "each policy of the runtime layer on its own load",
    "modes": ["simulated", "engine"],
}


def run_policies_bench(args: argparse.Namespace, out: Output, target: Path | None) -> int:
    """Run the experiments, show what they found, write it to ``target``."""
    from agentflow.bench.comparisons.machine import machine
    from agentflow.bench.policies import run_experiments

    began = time.perf_counter()
    with out.side.status("policies: starting") if out.live else nullcontext() as status:

        def say(text: str) -> None:
            if status is not None:
                status.update(f"policies: {text}")

        found = run_experiments(
            engine=args.engine, quick=args.quick, repetitions=args.repetitions, only=args.only, say=say
        )
    data = {
        "benchmark": "policies",
        "mode": "engine" if args.engine else "simulated",
        "size": "quick" if args.quick else "standard",
        "seconds": round(time.perf_counter() - began, 1),
        "machine": machine(),
        "findings": [f.to_json() for f in found],
    }
    if target is not None:
        target.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
        out.note(f"written to {target}")
    out.show(_table(data))
    out.result(data)
    return 0


def _table(data: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title="Policies against the same load without them", title_justify="left", box=SIMPLE_HEAD)
    for name in ("policy", "where", "figure"):
        table.add_column(name)
    for name in ("with", "least to greatest", "without"):
        table.add_column(name, justify="right")
    table.add_column("aim")
    for finding in data["findings"]:
        first = True
        for name, (mine, base) in finding["figures"].items():
            spread = finding["spread"].get(name)
            table.add_row(
                finding["policy"] if first else "",
                finding["mode"] if first else "",
                name,
                f"{mine:.4g}",
                "" if spread is None or spread[0] == spread[1] else f"{spread[0]:.4g} to {spread[1]:.4g}",
                "" if base is None else f"{base:.4g}",
                f"{finding['aim']}: {'met' if finding['met'] else 'missed'}" if first else "",
            )
            first = False
    return table
