"""The ``agentflow`` command."""

from agentflow.cli._main import main

__all__ = ["main"]
