"""`agentflow bench kvcmas`: an experiment on KV itself, with options and tables of its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentflow.cli.output import Output
from agentflow.errors import UsageError

__all__ = ["ENTRY", "add_options", "run_kvcmas_bench"]

#: How it is listed beside the comparisons.
ENTRY = {
    "name": "kvcmas",
    "title": "KV of a segment reused under another agent's prefix",
    "modes": ["model", "engine", "simulated"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that only this benchmark has."""
    parser.add_argument("--data", metavar="DIR", default="../shared/data", help="kvcmas: gsm8k and humaneval are here")
    parser.add_argument("--items", type=int, metavar="N", help="kvcmas: test N items instead (two segments each)")
    parser.add_argument("--tasks", type=int, metavar="N", help="kvcmas: run N multi-agent tasks instead")


def run_kvcmas_bench(args: argparse.Namespace, out: Output, target: Path | None) -> int:
    """Run it on the default model, show the tables, write all rows to ``target``.

    With ``--simulated`` only the cost model runs, with ``--tasks`` multi-agent tasks, with ``--engine`` the calls of
    four agents on the real one. Beside ``target`` a file ``.part`` keeps what is done, from which a run on the model
    that was stopped goes on.
    """
    from agentflow.bench.kvcmas.run import QUICK, STANDARD, run_kvcmas, run_speed, run_task_level
    from agentflow.bench.kvcmas.show import shown
    from agentflow.bench.kvcmas.summarise import engine_table

    size = QUICK if args.quick else STANDARD
    for name in ("items", "tasks"):
        if (value := getattr(args, name)) is not None and value < 2:
            raise UsageError(f"--{name} is at least 2")
    if args.items is not None:
        size = replace(size, items=args.items)
    journal = None if target is None else target.with_name(target.name + ".part")
    with out.side.status("kvcmas: starting") if out.live else nullcontext() as status:

        def say(text: str) -> None:
            if status is not None:
                status.update(f"kvcmas: {text}")

        folder = Path(args.data)
        if args.engine:
            data = _on_the_engine(args, folder, say)
        elif args.simulated:
            data = run_speed()
        elif args.tasks is not None:
            data = run_task_level(folder, tasks=args.tasks, say=say)
        else:
            data = run_kvcmas(folder, size=size, journal=journal, say=say)
    if target is not None:
        target.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
        out.note(f"written to {target}")
    out.show(*(table.rich() for table in ([engine_table(data)] if args.engine else shown(data))))
    out.result({key: value for key, value in data.items() if key != "rows"})
    return 0


def _on_the_engine(args: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    from agentflow.bench.kvcmas.engine import METHODS, QUICK, STANDARD, run_engine_bench

    if unknown := sorted(set(args.only) - set(METHODS)):
        raise UsageError(f"no method {', '.join(unknown)}; there are {', '.join(METHODS)}")
    size = QUICK if args.quick else STANDARD
    methods = [m for m in METHODS if m == METHODS[0] or not args.only or m in args.only]
    size = replace(size, repetitions=args.repetitions or size.repetitions)
    return run_engine_bench(folder, size=size, methods=methods, say=say)
