"""What a command of the command line is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from agentflow.cli.output import Output

__all__ = ["Command"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: its name, one line of help, a description, its options, and what it does.

    ``run`` returns the exit code. Importing a command's module must be cheap: heavy imports belong into ``run``.
    """

    name: str
    help: str
    description: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]
