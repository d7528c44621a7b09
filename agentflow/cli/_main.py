"""Reads the command line, runs a command, and turns errors into one line and an exit code.

A new command is a module with a ``COMMAND``, listed here in ``COMMANDS``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from agentflow.cli._command import Command
from agentflow.cli.bench import COMMAND as BENCH
from agentflow.cli.demo import COMMAND as DEMO
from agentflow.cli.doctor import COMMAND as DOCTOR
from agentflow.cli.graph import COMMAND as GRAPH
from agentflow.cli.output import Output
from agentflow.cli.report import COMMAND as REPORT
from agentflow.cli.run import COMMAND as RUN
from agentflow.cli.train_predictor import COMMAND as TRAIN_PREDICTOR
from agentflow.errors import AgentflowError, UsageError

__all__ = ["COMMANDS", "main"]

COMMANDS: tuple[Command, ...] = (DEMO, RUN, GRAPH, DOCTOR, BENCH, REPORT, TRAIN_PREDICTOR)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    from importlib.metadata import version

    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object in place of text")
    common.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    parser = _Parser(
        prog="agentflow",
        description="Run LangGraph multi-agent graphs on an SGLang engine whose KV cache knows the workflow.",
        epilog="Start with `agentflow demo`; `agentflow doctor` tells what this machine can do.",
    )
    parser.add_argument("--version", action="version", version=f"agentflow {version('agentflow')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return its exit code.

    0: it went well; 1: it failed; 2: it was called wrongly; 130: interrupted.
    """
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else EXIT_USAGE
    if args.command is None:
        parser.print_help()
        return EXIT_USAGE
    out = Output(as_json=args.json)
    try:
        with out.alone():
            return _run(args, out)
    except BrokenPipeError:  # the reader of our output left
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(args: argparse.Namespace, out: Output) -> int:
    try:
        code: int = args.run(args, out)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        out.note("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        out.error(error, _describe(error, debug=args.debug))
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _describe(error: Exception, *, debug: bool) -> str:
    """One line on what happened, with the place in the user's code when it is not an error of ours."""
    text = " ".join(str(error).split())
    if isinstance(error, AgentflowError):
        return text or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    theirs = [
        f for f in frames if not os.path.abspath(f.filename).startswith(here) and "site-packages" not in f.filename
    ]
    place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    hint = "" if debug else "; --debug shows the whole traceback"
    return f"{type(error).__name__}: {text}{place}{hint}"
