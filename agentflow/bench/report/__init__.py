"""A page for people out of results of comparisons, and the same as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentflow.bench.report.page import page
from agentflow.bench.report.verdict import headline
from agentflow.errors import UsageError

__all__ = ["headline", "page", "rows_csv", "write_report"]


def write_report(results: Sequence[Mapping[str, Any]], out: str | Path) -> list[Path]:
    """Write the page to ``out``, and the rows and everything beside it, as ``.csv`` and ``.json`` of the same name.

    Returns the three paths. Raises :class:`~agentflow.errors.UsageError` where they cannot be written.
    """
    target = Path(out)
    beside = target.with_suffix(".json")
    data: Any = results[0] if len(results) == 1 else {"results": list(results)}
    try:
        target.write_text(page(results), encoding="utf-8")
        target.with_suffix(".csv").write_text(rows_csv(results), encoding="utf-8", newline="")
        beside.write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or target}: {error.strerror}") from None
    return [target, target.with_suffix(".csv"), beside]


def rows_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """All rows as CSV, one table: what a row does not have stays empty; ``[least, greatest]`` become two columns."""
    flat = [{"comparison": data["comparison"], **_flat(row)} for data in results for row in data["rows"]]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in row.items():
        if name == "spread":
            for figure, (low, high) in value.items():
                out |= {f"{figure}_least": low, f"{figure}_greatest": high}
        elif name == "against_lru":
            for figure, (median, low, high) in value.items():
                out |= {f"{figure}_vs_lru": median, f"{figure}_vs_lru_least": low, f"{figure}_vs_lru_greatest": high}
        else:
            out[name] = value
    return out
