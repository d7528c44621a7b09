"""What commands write: text or tables for people, one JSON object for programs, notes on standard error."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, RenderableType

from agentflow.report import plain_console

__all__ = ["Output"]


class Output:
    """Where a command's results go.

    With ``as_json`` only :meth:`result` and :meth:`error` write to standard output; inside :meth:`alone` that
    holds for whatever a user's graph or a child process prints, too. Notes and live displays appear on standard
    error, and only when it is a terminal.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.console = plain_console(sys.stdout)
        self.side = Console(stderr=True, highlight=False)
        self._stdout: TextIO | None = None

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
            stdout = self._stdout or sys.stdout
            stdout.write(_dumped(data) + "\n")
            stdout.flush()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """With ``--json``: what anything else writes to standard output meanwhile goes to standard error."""
        if not self.as_json:
            yield
            return
        with contextlib.ExitStack() as stack:
            self._stdout = _private_stdout(stack) or sys.stdout
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            try:
                yield
            finally:
                self._stdout = None

    def note(self, text: str) -> None:
        """Tell a watching person something that is no part of the result."""
        if self.live:
            self.side.print(text, markup=False)

    def error(self, error: Exception, message: str) -> None:
        """Tell what went wrong: one line on standard error, and an object with ``--json``."""
        sys.stderr.write(f"agentflow: error: {message}\n")
        self.result({"error": {"type": type(error).__name__, "message": message}})


def _private_stdout(stack: contextlib.ExitStack) -> TextIO | None:
    """A stream of ours to where standard output leads, which until ``stack`` ends leads to standard error.

    None where standard output is no file of the operating system (in a test, in a notebook).
    """
    try:
        if sys.stdout.fileno() != 1:
            return None
        side = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return None
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(side, 1)

    def restore() -> None:
        with contextlib.suppress(OSError):  # the reader has left; that was told where it was written
            sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)

    stack.callback(restore)
    stream = open(os.dup(kept), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115

    def close() -> None:
        with contextlib.suppress(OSError):
            stream.close()

    stack.callback(close)
    return stream


def _dumped(data: Any) -> str:
    """``data`` as JSON that every reader takes: numbers that JSON does not know (NaN, infinity) become null."""
    try:
        return json.dumps(data, indent=2, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), indent=2, ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
