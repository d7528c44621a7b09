"""What commands write: text or tables for people, one JSON object for programs, notes on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, RenderableType

from agentflow.report import plain_console

__all__ = ["Output"]


class Output:
    """Where a command's results go.

    With ``as_json`` only :meth:`result` and :meth:`error` write to standard output. Notes and live displays
    appear on standard error, and only when it is a terminal.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = plain_console(sys.stdout)
        self.side = Console(stderr=True, highlight=False)

    @property
    def live(self) -> bool:
        """Whether somebody is watching: standard error is a terminal."""
        return self.side.is_terminal

    def show(self, *things: RenderableType) -> None:
        """Write text or tables for people; nothing with ``--json``."""
        if not self.as_json:
            for thing in things:
                self.console.print(thing, markup=False)

    def result(self, data: Any) -> None:
        """Write the JSON object; nothing without ``--json``."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n")

    def note(self, text: str) -> None:
        """Tell a watching person something that is no part of the result."""
        if self.live:
            self.side.print(text, markup=False)

    def error(self, error: Exception, message: str) -> None:
        """Tell what went wrong: one line on standard error, and an object with ``--json``."""
        sys.stderr.write(f"agentflow: error: {message}\n")
        self.result({"error": {"type": type(error).__name__, "message": message}})
