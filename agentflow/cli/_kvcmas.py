"""`agentflow bench kvcmas`: an experiment on KV itself, with options and tables of its own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from agentflow.cli.output import Output

__all__ = ["ENTRY", "add_options", "run_kvcmas_bench"]

#: How it is listed beside the comparisons.
ENTRY = {"name": "kvcmas", "title": "KV of a segment reused under another agent's prefix", "modes": ["model"]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that only this benchmark has."""
    parser.add_argument("--data", metavar="DIR", default="../shared/data", help="kvcmas: gsm8k and humaneval are here")


def run_kvcmas_bench(args: argparse.Namespace, out: Output, target: Path | None) -> int:
    """Run it on the default model, show the tables, write all rows to ``target``."""
    from agentflow.bench.kvcmas.run import QUICK, STANDARD, run_kvcmas
    from agentflow.bench.kvcmas.show import shown

    size = QUICK if args.quick else STANDARD
    if out.live:
        with out.side.status("kvcmas: starting") as status:
            data = run_kvcmas(Path(args.data), size=size, say=lambda text: status.update(f"kvcmas: {text}"))
    else:
        data = run_kvcmas(Path(args.data), size=size, say=lambda _text: None)
    if target is not None:
        target.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
        out.note(f"written to {target}")
    out.show(*(table.rich() for table in shown(data)))
    out.result({key: value for key, value in data.items() if key != "rows"})
    return 0
