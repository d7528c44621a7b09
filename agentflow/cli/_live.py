"""A line per running workflow that tells which node it is in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from langchain_core.callbacks import BaseCallbackHandler
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Watch"]


class Watch:
    """A live display of workflows on ``console``; silent unless ``enabled``."""

    def __init__(self, console: Console, *, enabled: bool) -> None:
        self._bar = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.fields[workflow]}"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not enabled,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    @contextmanager
    def following(self, workflow: str, title: str) -> Iterator[BaseCallbackHandler]:
        """A LangChain callback handler that shows the nodes of one run while this is open."""
        row = self._bar.add_task(title, workflow=workflow, total=1)
        try:
            yield _Follower(lambda node: self._bar.update(row, description=f"{title} [{node}]"))
        finally:
            self._bar.update(row, completed=1, description=f"{title} done")


class _Follower(BaseCallbackHandler):
    run_inline = True

    def __init__(self, show: Any) -> None:
        self._show = show

    def on_chain_start(
        self,
        serialized: Any,
        inputs: Any,
        *,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if any(tag.startswith("graph:step:") for tag in tags or ()):
            self._show(str((metadata or {}).get("langgraph_node", "")))
