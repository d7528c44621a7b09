"""Run a comparison of cache policies and show what it found.

NAME is a comparison; --list tells which there are. --simulated needs nothing but a CPU; --engine starts a real
engine on a tiny random model and replays the same calls there. The figures are medians over repetitions with the
least and greatest in brackets. --json or --out gives all rows and claims for programs, and for `agentflow report`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentflow.cli import _kvcmas, _policies
from agentflow.cli._command import Command
from agentflow.cli.output import Output
from agentflow.errors import UsageError

__all__ = ["COMMAND", "show_results"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="the comparison, for example baselines")
    parser.add_argument("--list", action="store_true", help="tell which comparisons there are")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--engine", action="store_true", help="measure on the real engine")
    mode.add_argument("--simulated", action="store_true", help="measure in the simulator")
    parser.add_argument("--quick", action="store_true", help="a first look: smaller loads, one repetition")
    parser.add_argument("--repetitions", type=int, metavar="N", help="repetitions (default: what the comparison says)")
    parser.add_argument("--out", metavar="FILE", help="write the results to FILE as JSON")
    _kvcmas.add_options(parser)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="policies: this policy alone; kvcmas --engine: this method beside nonshared; may be repeated",
    )


def run(args: argparse.Namespace, out: Output) -> int:
    """Run the comparison."""
    from agentflow.bench.comparisons import Options, comparison, comparison_names, run_comparison

    if args.list:
        found = [comparison(name) for name in comparison_names()]
        for one in found:
            out.show(f"{one.name:<10} {one.title} ({' or '.join(one.modes)})")
        out.show(f"{'kvcmas':<10} {_kvcmas.ENTRY['title']} (model, simulated or engine)")
        out.show(f"{'policies':<10} {_policies.ENTRY['title']} ({' or '.join(_policies.ENTRY['modes'])})")
        listed = [{"name": c.name, "title": c.title, "modes": list(c.modes)} for c in found]
        out.result({"comparisons": [*listed, _kvcmas.ENTRY, _policies.ENTRY]})
        return 0
    if args.name is None:
        raise UsageError(f"which comparison? There are {', '.join(comparison_names())}, kvcmas, policies")
    for option, owners in (("items", ["kvcmas"]), ("tasks", ["kvcmas"]), ("only", ["kvcmas", "policies"])):
        if getattr(args, option) not in (None, []) and args.name not in owners:
            raise UsageError(f"--{option} is an option of {' and '.join(owners)}, not of {args.name}")
    if args.name == "kvcmas" and args.only and not args.engine:
        raise UsageError("--only chooses methods of kvcmas --engine")
    if args.name == "kvcmas":
        return _kvcmas.run_kvcmas_bench(args, out, _writable(args.out) if args.out else None)
    if args.name == "policies":
        return _policies.run_policies_bench(args, out, _writable(args.out) if args.out else None)
    asked = comparison(args.name)
    mode: Any = "engine" if args.engine else "simulated" if args.simulated else asked.modes[0]
    target = _writable(args.out) if args.out else None
    with out.side.status(f"{args.name}: starting") if out.live else _Quiet() as status:
        options = Options(
            mode=mode,
            size="quick" if args.quick else "standard",
            repetitions=args.repetitions,
            say=lambda text: status.update(f"{args.name}: {text}"),
        )
        data = run_comparison(args.name, options).to_json()
    if target is not None:
        target.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
        out.note(f"written to {target}; `agentflow report {target} --out report.html` shows it")
    show_results(data, out)
    out.result(data)
    return 0


class _Quiet:
    """Nobody watches."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def update(self, text: str) -> None:
        """Say nothing."""


def _writable(name: str) -> Path:
    """The file's path; raises before any work is done if its folder is not there."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"cannot write {name}: {'it is a folder' if path.is_dir() else 'there is no such folder'}")
    return path


def show_results(data: Mapping[str, Any], out: Output) -> None:
    """Rows and claims as tables."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows: Sequence[Mapping[str, Any]] = data["rows"]
    axes = [a for a in ("intensity", "noise") if any(r.get(a) is not None for r in rows)]
    hosts = any(r["host_tokens"] for r in rows)
    modes = len({r["mode"] for r in rows}) > 1
    table = Table(title=data["title"], title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    table.add_column("load")
    for name in ("pressure", *(["host"] if hosts else []), *axes):
        table.add_column(name, justify="right")
    table.add_column("policy")
    if modes:
        table.add_column("mode")
    for name in ("hit rate %", "of oracle %", "ttft p50 s", "e2e mean s", "job mean s", "hits vs lru", "e2e vs lru"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        spread = row["spread"]
        cells = [row["load"], f"{row['pressure']:g}"]
        if hosts:
            cells.append("yes" if row["host_tokens"] else "no")
        cells += ["" if row.get(a) is None else f"{row[a]:g}" for a in axes]
        cells.append(row["policy"])
        if modes:
            cells.append(row["mode"])
        cells += [
            _with_spread(row["hit_rate"], spread["hit_rate"], 100.0, ".1f"),
            f"{100 * row['share_of_oracle']:.1f}",
            *(_with_spread(row[n], spread[n], 1.0, ".3g") for n in ("ttft_p50", "e2e_mean", "job_mean")),
            *(_ratio(row["against_lru"].get(n)) for n in ("hit_rate", "e2e_mean")),
        ]
        table.add_row(*cells)
    claims = Table(title="Claims", title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
    for name in ("claim", "target", "measured", "", "note"):
        claims.add_column(name)
    for claim in data["claims"]:
        measured = "not measured" if claim["measured"] is None else f"{claim['measured']:.3g}"
        claims.add_row(claim["name"], claim["target"], measured, "met" if claim["met"] else "missed", claim["note"])
    out.show(table, claims)


def _with_spread(value: float, spread: Sequence[float], times: float, form: str) -> str:
    text = f"{times * value:{form}}"
    if spread[0] == spread[1]:
        return text
    return f"{text} [{times * spread[0]:{form}}-{times * spread[1]:{form}}]"


def _ratio(values: Sequence[float] | None) -> str:
    return "" if values is None else f"{values[0]:.2f}x"


COMMAND = Command(name="bench", help="compare cache policies", description=__doc__ or "", configure=configure, run=run)
