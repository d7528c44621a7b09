"""The standard set of comparisons: ``python -m agentflow.bench.standard`` runs it and writes ``docs/benchmarks.md``.

The page holds the machine, the commands, and medians with their spread; the JSON of each comparison and the report
go into a folder of their own. A comparison that fails is told on the page, and the others run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentflow.bench.comparisons import Options, run_comparison
from agentflow.bench.comparisons.machine import machine
from agentflow.bench.comparisons.model import Mode
from agentflow.bench.report import headline, write_report
from agentflow.bench.report.verdict import is_told, standings
from agentflow.errors import AgentflowError

__all__ = ["STANDARD", "Part", "main", "markdown", "run_standard"]


class Part(NamedTuple):
    """One comparison of the set, in one mode: the loads of the quick size so many times, else of the standard one."""

    comparison: str
    mode: Mode
    quick: int | None = None

    def settings(self, options: Options) -> Options:
        """Its own, as far as ``options`` asks for no other."""
        quick = self.quick is not None and options.size == "standard"
        return Options(
            mode=self.mode,
            size="quick" if quick else options.size,
            repetitions=options.repetitions or (self.quick if quick else None),
            engine_factory=options.engine_factory,
        )

    def command(self, options: Options) -> str:
        """How to run it alone."""
        given = self.settings(options)
        flags = " --quick" if given.size == "quick" else ""
        flags += f" --repetitions {given.repetitions}" if given.repetitions else ""
        return f"agentflow bench {self.comparison} --{self.mode}{flags}"


#: All of them in under 20 minutes on two cores; in standard size they take longer.
STANDARD = (
    Part("parity", "engine"),
    Part("baselines", "simulated", quick=3),
    Part("pbkv", "simulated", quick=2),
    Part("ttl", "simulated", quick=2),
    Part("cachesage", "simulated", quick=3),
)


def run_standard(parts: Sequence[Part], folder: Path, options: Options) -> list[dict[str, Any]]:
    """Run the parts; the results of each go to ``folder`` at once. A part that failed has ``error``, and no rows."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for part in parts:
        began = time.perf_counter()
        command = part.command(options)
        options.say(f"{command} ...")
        try:
            data = run_comparison(part.comparison, part.settings(options)).to_json()
        except AgentflowError as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            data = {"comparison": part.comparison, "mode": part.mode, "error": message}
        data["command"] = command
        options.say(f"{command}: {time.perf_counter() - began:.0f} s{', failed' if 'error' in data else ''}")
        (folder / f"{part.comparison}-{part.mode}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
        found.append(data)
    whole = [data for data in found if "error" not in data]
    if whole:
        write_report(whole, folder / "report.html")
    return found


def markdown(found: Sequence[Mapping[str, Any]], *, command: str, facts: Mapping[str, Any] | None = None) -> str:
    """The page, in Markdown."""
    facts = facts or machine()
    parts = [
        "# Benchmarks",
        "",
        "Written by `make bench`; do not edit. How to read the figures and run single comparisons:",
        "[guide to benchmarks](guides/benchmarks.md).",
        "",
        f"Machine: {', '.join(f'{k} {v}' for k, v in facts.items())}.",
        "",
        f"Command: `{command}`",
    ]
    for data in found:
        parts += ["", f"## {data['comparison']}, {data['mode']}", "", f"`{data['command']}`"]
        if "error" in data:
            parts += ["", f"Failed: {data['error']}"]
            continue
        first, more = headline(data)
        parts += [
            "",
            f"{data['title']}. Size {data['size']}, {data['seconds']:.0f} s, {data['setting'].get('model', '')}.",
            "",
            f"**{first}** {' '.join(m for m in more if m)}",
        ]
        if data["claims"]:
            parts += ["", *_claims(data["claims"])]
        if found_against := _standings(data["rows"]):
            parts += ["", *found_against]
        parts += ["", *_rows(data["rows"])]
    return "\n".join(parts) + "\n"


def _claims(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| claim | target | measured | | note |", "| --- | --- | ---: | --- | --- |"]
    for c in claims:
        measured = "not measured" if c["measured"] is None else f"{c['measured']:.3g}"
        word = "met" if c["met"] else "**missed**"
        lines.append(f"| {_cell(c['name'])} | {_cell(c['target'])} | {measured} | {word} | {_cell(c['note'])} |")
    return lines


def _standings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every policy against lru over all places; the range is that of single runs."""
    speed = {s.policy: s for s in standings(rows, "e2e_mean")}
    jobs = {s.policy: s for s in standings(rows, "job_mean")}
    hits = {s.policy: s for s in standings(rows, "hit_rate")}
    if len(speed) < 2:
        return []
    lines = [
        "Against lru, geometric means over all places and the range of single runs; above 1 is better.",
        "",
        "| policy | hits | speed of calls | speed of workflows |",
        "| --- | ---: | ---: | ---: |",
    ]
    for policy in speed:
        name = f"{policy} (told the future)" if is_told(policy) else policy
        cells = (f"{s.mean:.2f}x ({s.low:.2f}-{s.high:.2f})" for s in (hits[policy], speed[policy], jobs[policy]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    axes = [a for a in ("intensity", "noise") if any(r.get(a) is not None for r in rows)]
    modes = ["mode"] if len({r["mode"] for r in rows}) > 1 else []
    hosts = ["host_tokens"] if any(r["host_tokens"] for r in rows) else []
    head = ["load", "pressure", *hosts, *axes, "policy", *modes]
    figures = ["hit rate %", "of oracle %", "TTFT p50 s", "e2e mean s", "job mean s", "runs"]
    lines = [f"| {' | '.join([*head, *figures])} |", f"|{' --- |' * len(head)}{' ---: |' * len(figures)}"]
    for row in rows:
        cells = ["" if row.get(name) is None else f"{row[name]}" for name in head]
        spread = row["spread"]
        cells += [
            _spread(row["hit_rate"], spread["hit_rate"], 100.0, ".1f"),
            _spread(row["share_of_oracle"], spread["share_of_oracle"], 100.0, ".1f"),
            *(_spread(row[n], spread[n], 1.0, ".3g") for n in ("ttft_p50", "e2e_mean", "job_mean")),
            f"{row['repetitions']}",
        ]
        lines.append(f"| {' | '.join(_cell(c) for c in cells)} |")
    return lines


def _spread(value: float, spread: Sequence[float], times: float, form: str) -> str:
    text = f"{times * value:{form}}"
    return text if spread[0] == spread[1] else f"{text} ({times * spread[0]:{form}}-{times * spread[1]:{form}})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 1 when a comparison failed."""
    parser = argparse.ArgumentParser(prog="python -m agentflow.bench.standard", description=__doc__)
    parser.add_argument("--out", default="docs/benchmarks.md", help="the page")
    parser.add_argument("--folder", default="out/benchmarks", help="where JSON and the report go")
    parser.add_argument("--quick", action="store_true", help="smaller loads, one repetition")
    parser.add_argument("--simulated", action="store_true", help="only what needs no engine")
    given = parser.parse_args(arguments)
    parts = [p for p in STANDARD if p.mode == "simulated" or not given.simulated]

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    options = Options(size="quick" if given.quick else "standard", say=say)
    found = run_standard(parts, Path(given.folder), options)
    flags = "".join(f" --{name}" for name in ("quick", "simulated") if getattr(given, name))
    page = markdown(found, command=f"python -m agentflow.bench.standard{flags}" if flags else "make bench")
    Path(given.out).write_text(page, encoding="utf-8")
    return int(any("error" in data for data in found))


if __name__ == "__main__":
    sys.exit(main())
