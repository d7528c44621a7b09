"""The result as tables for a terminal, or as Markdown for a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["Shown", "shown"]


class Shown:
    """A table: title, column names, rows of text."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.title, self.columns, self.rows = title, tuple(columns), [tuple(r) for r in rows]

    def markdown(self) -> str:
        """As a Markdown table."""
        lines = [self.columns, ["---", *["--:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def rich(self) -> Any:
        """For the terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(title=self.title, title_justify="left", pad_edge=False, box=SIMPLE_HEAD)
        for n, name in enumerate(self.columns):
            table.add_column(name, justify="right" if n else "left", no_wrap=bool(n))
        for row in self.rows:
            table.add_row(*row)
        return table


def shown(data: Mapping[str, Any]) -> Iterator[Shown]:
    """All tables of a result of :func:`~agentflow.bench.kvcmas.run.run_kvcmas` or of its other parts."""
    if "tables" in data:
        yield from _measured(data)
    if "speed" in data:
        yield from _speed(data["speed"])
    if "tasks" in data:
        yield _tasks(data["tasks"])
    if not data["claims"]:
        return
    yield Shown(
        "Claims",
        ("claim", "target", "measured", "", "note"),
        [
            (c["name"], c["target"], f"{c['measured']:.3g}", "met" if c["met"] else "missed", c["note"])
            for c in data["claims"]
        ],
    )


def _tasks(rows: Sequence[Mapping[str, Any]]) -> Shown:
    return Shown(
        "Three task agents and a reflector: means [95 % interval]; p: sign test of its KL against FullShared's",
        (
            "method",
            "tasks",
            "KL",
            "agreement",
            "reflector's KL",
            "p",
            "same answer",
            "right",
            "same choice",
            "right choice",
        ),
        [
            (
                r["method"],
                str(r["tasks"]),
                _sure(r["kl"], ".4f"),
                f"{r['agreement'][0]:.3f}",
                _sure(r["reflector kl"], ".4f"),
                f"{r['p']:.2g}",
                *(f"{r[name][0]:.2f}" for name in ("same answer", "score", "same choice", "right choice")),
            )
            for r in rows
        ],
    )


def _speed(rows: Sequence[Mapping[str, Any]]) -> Iterator[Shown]:
    yield Shown(
        "Simulated: four agents, 32K shared tokens, 8 calls/s, reuse 0.8; seconds",
        ("model, accelerators", "way", "TTFT mean", "median", "corrected call", "NonShared / it", "anchors GB"),
        [
            (
                f"{r['model']}, {r['replicas']} x {r['hardware']}",
                r["way"],
                f"{r['mean']:.2f}",
                f"{r['median']:.2f}",
                f"{r['corrected']:.2f}",
                f"{r['speedup']:.2f}x",
                (f"{r['pool_bytes'] / 1e9:.1f}" if r["pool_bytes"] else "") + ("" if r["fits"] else " (does not fit)"),
            )
            for r in rows
        ],
    )


def _measured(data: Mapping[str, Any]) -> Iterator[Shown]:
    tables = data["tables"]
    yield Shown(
        "Methods: keys / values, medians; KL and agreement over 16 teacher-forced tokens, means [95 % interval]",
        ("method", "n", "error / C", "error / delta", "KL", "KL / FullShared", "KL better", "agreement", "recomputed"),
        [
            (
                m["method"],
                str(m["segments"]),
                _pair(m, "C"),
                _pair(m, "delta"),
                _sure(m["kl"], ".4f"),
                f"{m['kl_ratio']:.2f}",
                f"{100 * m['better'][0]:.0f} %",
                _sure(m["agreement"], ".3f"),
                f"{100 * m['recomputed']:.0f} %" if m["recomputed"] else "",
            )
            for m in tables["methods"]
        ],
    )
    yield Shown(
        "Token kernel with one anchor replaced",
        ("anchor", "error / C", "error / delta", "keys' interval", "values' interval"),
        [
            (m["anchor"], _pair(m, "C"), _pair(m, "delta"), _range(m["keys/delta"]), _range(m["values/delta"]))
            for m in tables["repeats"]
        ],
    )
    yield Shown(
        "Along four agents (token kernel): each estimate out of the one before, or out of dense KV",
        ("hops", "source", "error / C", "error / delta"),
        [(str(m["hops"]), m["source"], _pair(m, "C"), _pair(m, "delta")) for m in tables["chain"]],
    )
    yield Shown(
        "Signs of confidence: rank correlation with what turns out (token kernel, values)",
        ("sign", "error / C", "error / delta", "KL"),
        [
            (m["signal"], f"{m['values/C']:.2f}", f"{m['values/delta']:.2f}", f"{m['kl']:.2f}")
            for m in tables["signals"]
        ],
    )
    yield from _costs(data["costs"])


def _costs(costs: Mapping[str, Any]) -> Iterator[Shown]:
    dense = costs["dense"]
    yield Shown(
        f"Processor time of {costs['tokens']} tokens, 10 anchors of as many; dense prefill {1000 * dense:.0f} ms",
        ("method", "estimate ms", "+ 15 % recomputed ms", "of dense", "later: per anchor ms", "per fit ms"),
        [
            (
                m["method"],
                f"{1000 * m['estimate']:.0f}",
                f"{1000 * m['with_recompute']:.0f}",
                f"{m['estimate'] / dense:.2f} / {m['with_recompute'] / dense:.2f}",
                f"{1000 * m['anchor']:.0f}",
                f"{1000 * m['fit']:.0f}",
            )
            for m in costs["methods"]
        ],
    )
    size = costs["anchor_bytes"]
    yield Shown(
        f"An anchor of {size['tokens']} tokens",
        ("kept as", "MB"),
        [("low rank", f"{size['low_rank'] / 1e6:.1f}"), ("full dimension", f"{size['full'] / 1e6:.1f}")],
    )


def _pair(row: Mapping[str, Any], kind: str) -> str:
    return f"{row[f'keys/{kind}'][0]:.3f} / {row[f'values/{kind}'][0]:.3f}"


def _sure(found: Sequence[float], form: str) -> str:
    return f"{found[0]:{form}} [{found[1]:{form}}, {found[2]:{form}}]"


def _range(found: Sequence[float]) -> str:
    return f"[{found[1]:.3f}, {found[2]:.3f}]"
