"""The options with which a command line chooses an engine, shared by the commands and the examples."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from agentflow.engine.base import Engine
from agentflow.errors import UsageError

__all__ = ["add_engine_options", "open_engine"]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, ``--engine-url``, ``--policy``, ``--pool-tokens`` and ``--record``."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="MODEL", help="folder or Hugging Face id (default: the small built-in model)")
    group.add_argument(
        "--engine-url", metavar="URL", help="use the SGLang server at URL in place of an embedded engine"
    )
    group.add_argument(
        "--policy", action="append", metavar="NAME", help="cache policy (default: lifecycle); repeatable"
    )
    group.add_argument("--pool-tokens", type=int, metavar="N", help="size of the KV pool (default: what memory allows)")
    group.add_argument(
        "--record", type=Path, metavar="FILE", help="write a trace of the run to FILE (for train-predictor and bench)"
    )


@contextmanager
def open_engine(args: argparse.Namespace, *, pool_tokens: int | None = None) -> Iterator[Engine]:
    """The engine that ``args`` asks for, ready, and closed at the end; with ``--record`` its trace is on disk then.

    A person who watches sees how the start goes on. ``pool_tokens`` is the size of the pool when ``args`` names none.
    Raises before the engine starts for what it can tell of ``args``.
    """
    record: Path | None = args.record
    if record is not None:
        _check_writable(record)
    with _started(args, pool_tokens) as engine:
        if record is None:
            yield engine
            return
        from agentflow.bench.traces.record import recording

        with recording(engine, record, name=record.name.split(".")[0] or "recorded") as recorded:
            yield recorded


def _check_writable(record: Path) -> None:
    if not record.name or record.is_dir():
        raise UsageError(f"--record {record}: give the name of a file; nothing was run")
    if not record.parent.is_dir():
        raise UsageError(f"--record {record}: no such folder; nothing was run")
    if not os.access(record.parent, os.W_OK):
        raise UsageError(f"--record {record}: the folder is not writable; nothing was run")


def _started(args: argparse.Namespace, pool_tokens: int | None) -> Engine:
    embedded_only = {"--model": args.model, "--policy": args.policy, "--pool-tokens": args.pool_tokens}
    if args.engine_url:
        given = [name for name, value in embedded_only.items() if value is not None]
        if given:
            raise UsageError(f"{' and '.join(given)} cannot go with --engine-url: the server has chosen already")
        from agentflow.engine.remote import RemoteEngine

        return RemoteEngine(args.engine_url)
    if args.pool_tokens is not None and args.pool_tokens < 1:
        raise UsageError(f"--pool-tokens must be at least 1, got {args.pool_tokens}")
    from agentflow.engine.embedded import EmbeddedEngine

    options: dict[str, Any] = {"max_total_tokens": args.pool_tokens or pool_tokens}
    if args.policy:
        options["policies"] = tuple(args.policy)
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        return EmbeddedEngine(args.model, **options)
    with console.status("starting the engine") as status:
        return EmbeddedEngine(
            args.model, on_progress=lambda phase: status.update(f"starting the engine: {phase}"), **options
        )
