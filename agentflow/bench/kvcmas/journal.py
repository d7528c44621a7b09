"""Rows of a long run, written item by item, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Journal"]


class Journal:
    """A file of JSON lines: the run's settings, then each item's rows. ``path`` None keeps nothing.

    A file of other settings, or one that cannot be read, is begun anew. A half-written last line is ignored.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.done: dict[str, dict[str, list[dict[str, Any]]]] = {}
        if path is None:
            return
        head = json.dumps({"settings": settings}, sort_keys=True)
        if path.exists() and (lines := path.read_text("utf-8").split("\n"))[0] == head:
            for line in lines[1:-1]:  # what follows the last line break is a line cut short, or nothing
                found = json.loads(line)
                self.done[found["item"]] = found["rows"]
            path.write_text("\n".join([*lines[:-1], ""]), "utf-8")
        else:
            path.write_text(head + "\n", "utf-8")

    def add(self, item: str, rows: dict[str, list[dict[str, Any]]]) -> None:
        """Keep an item's rows."""
        self.done[item] = rows
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"item": item, "rows": rows}) + "\n")

    def rows(self, items: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """The rows of some items by kind, in the items' order; those not done yet are left out."""
        out: dict[str, list[dict[str, Any]]] = {}
        for item in items:
            for kind, rows in self.done.get(item, {}).items():
                out.setdefault(kind, []).extend(rows)
        return out

    def close(self) -> None:
        """The run is complete: drop the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
