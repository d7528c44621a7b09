"""The options with which a command line chooses an engine, shared by the commands and the examples."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from agentflow.engine.base import Engine
from agentflow.errors import UsageError

__all__ = ["add_engine_options", "open_engine"]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, ``--engine-url``, ``--policy`` and ``--pool-tokens``."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="MODEL", help="folder or Hugging Face id (default: the small built-in model)")
    group.add_argument(
        "--engine-url", metavar="URL", help="use the SGLang server at URL in place of an embedded engine"
    )
    group.add_argument(
        "--policy", action="append", metavar="NAME", help="cache policy (default: lifecycle); repeatable"
    )
    group.add_argument("--pool-tokens", type=int, metavar="N", help="size of the KV pool (default: what memory allows)")


def open_engine(args: argparse.Namespace, *, pool_tokens: int | None = None) -> Engine:
    """The engine that ``args`` asks for, ready. A person who watches sees how the start goes on.

    ``pool_tokens`` is the size of the pool when ``args`` names none.
    """
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
