"""`agentflow bench kvcmas`: an experiment on KV itself, with options and tables of its own."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from agentflow.cli.output import Output
from agentflow.errors import UsageError

__all__ = ["ENTRY", "add_options", "run_kvcmas_bench"]

#: How it is listed beside the comparisons.
ENTRY = {
    "name": "kvcmas",
    "title": "KV of a segment reused under another agent's prefix",
    "modes": ["model", "simulated"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that only this benchmark has."""
    parser.add_argument("--data", metavar="DIR", default="../shared/data", help="kvcmas: gsm8k and humaneval are here")
    parser.add_argument("--items", type=int, metavar="N", help="kvcmas: test N items instead (two segments each)")


def run_kvcmas_bench(args: argparse.Namespace, out: Output, target: Path | None) -> int:
    """Run it on the default model, show the tables, write all rows to ``target``.

    With ``--simulated`` only the cost model runs. Beside ``target`` a file ``.part`` keeps what is done, from which a
    run that was stopped goes on.
    """
    from agentflow.bench.kvcmas.run import QUICK, STANDARD, run_kvcmas, run_speed
    from agentflow.bench.kvcmas.show import shown

    size = QUICK if args.quick else STANDARD
    if args.items is not None:
        if args.items < 2:
            raise UsageError("--items is at least 2")
        size = replace(size, items=args.items)
    journal = None if target is None else target.with_name(target.name + ".part")
    with out.side.status("kvcmas: starting") if out.live else nullcontext() as status:

        def say(text: str) -> None:
            if status is not None:
                status.update(f"kvcmas: {text}")

        folder = Path(args.data)
        data = run_speed() if args.simulated else run_kvcmas(folder, size=size, journal=journal, say=say)
    if target is not None:
        target.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
        out.note(f"written to {target}")
    out.show(*(table.rich() for table in shown(data)))
    out.result({key: value for key, value in data.items() if key != "rows"})
    return 0
