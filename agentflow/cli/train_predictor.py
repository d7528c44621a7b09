"""Train PBKV's predictor of the next agents on recorded runs.

TRACES are trace files of agentflow (a recording, or one written by the benchmarks), public ones as FORMAT=PATH (for
example who-and-when=FOLDER), or generated ones as generate=NAME:COUNT (for example generate=hover:200). Use the file
with the policies pbkv-he and pbkv: {"name": "pbkv", "backbone": "sage", "predictor": {"path": FILE}}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from agentflow.cli._command import Command
from agentflow.cli.output import Output
from agentflow.errors import UsageError

__all__ = ["COMMAND"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("traces", nargs="+", metavar="TRACES", help="a file, FORMAT=PATH, or generate=NAME:COUNT")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the predictor's file, for example agents.safetensors"
    )
    parser.add_argument("--backbone", choices=("sage", "rgcn"), default="sage", help="the network (default: sage)")
    parser.add_argument("--steps", type=_between(1, 16), default=4, metavar="K", help="steps to forecast (default: 4)")
    parser.add_argument("--epochs", type=_between(1, 1_000), default=60, help="epochs at most (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed and runs give the same file (default: 0)")
    parser.add_argument("--hidden", metavar="FILE", help="hidden states of the calls' prompts, by id of call")


def run(args: argparse.Namespace, out: Output) -> int:
    """Train, write the file, and tell how well runs that were set aside are forecast."""
    from agentflow.bench.predictor_data import load, read_hidden, runs_of
    from agentflow.cache.pbkv.sage import Shape
    from agentflow.cache.pbkv.saved import check_target, save_trained
    from agentflow.cache.pbkv.training import Settings, train

    check_target(args.out)
    hidden = read_hidden(args.hidden) if args.hidden else {}
    traces, left_out = [], []
    for source in args.traces:
        reasons: list[str] = []
        traces.append(load(source, left_out=reasons))
        if reasons:
            left_out.append({"trace": source, "count": len(reasons), "first": reasons[0]})
            told = (
                f"{len(reasons)} lines or records could not be read and are left out, the first for this: {reasons[0]}"
            )
            sys.stderr.write(f"agentflow: {source}: {told}\n")
    runs = [run for trace in traces for run in runs_of(trace, hidden)]
    edges: dict[str, set[str]] = {}
    for trace in traces:
        for agent, following in trace.edges.items():
            edges.setdefault(agent, set()).update(following)
    size = max((len(v) for r in runs for v in r.hidden if v is not None), default=0)
    if args.hidden and not size:
        raise UsageError(f"{args.hidden}: holds none of the calls of these traces")
    shape = Shape(backbone=args.backbone, steps=args.steps, hidden=size, dropout=0.3, use_path=args.backbone == "sage")
    out.note(f"training on {len(runs)} runs")
    trained = train(
        runs,
        Settings(shape=shape, epochs=args.epochs, seed=args.seed),
        edges={a: sorted(f) for a, f in sorted(edges.items())},
    )
    save_trained(trained, args.out, meta={"traces": [t.name for t in traces], "seed": args.seed})
    report = dict(trained.report)
    out.show(
        f"{args.out}: {len(runs)} runs, {len(trained.graph)} agents, best at epoch {report['epochs']:.0f}",
        "of runs set aside:",
        *(
            f"  step {k}: right {report[f'top1_{k}']:.3f}, log-loss {report[f'log_loss_{k}']:.3f},"
            f" calibration error {report[f'ece_{k}']:.3f}"
            for k in range(1, args.steps + 1)
        ),
    )
    out.result({"file": args.out, "agents": trained.graph.names, "report": report, "left_out": left_out})
    return 0


def _between(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, got {value}")
        return value

    read.__name__ = "number"
    return read


COMMAND = Command(
    name="train-predictor",
    help="train PBKV's predictor of the next agents",
    description=__doc__ or "",
    configure=configure,
    run=run,
)
