"""Make one page out of results of `agentflow bench`: what won, plots, tables, claims.

The page is a single HTML file without anything from outside; it can be printed, mailed and read on a phone. The
rows are written beside it as CSV and everything as JSON.
"""

from __future__ import annotations

import argparse

from agentflow.cli._command import Command
from agentflow.cli.output import Output
from agentflow.errors import UsageError

__all__ = ["COMMAND"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    parser.add_argument("results", metavar="RESULTS.json", nargs="+", help="files of `agentflow bench --out`")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default: report.html)")


def run(args: argparse.Namespace, out: Output) -> int:
    """Write the page."""
    from agentflow.bench.comparisons.model import read_results
    from agentflow.bench.report import write_report

    if not args.out.endswith((".html", ".htm")):
        raise UsageError(f"--out must name an .html file, got {args.out}")
    files = write_report([read_results(name) for name in args.results], args.out)
    for path in files:
        out.show(str(path))
    out.result({"files": [str(path) for path in files]})
    return 0


COMMAND = Command(
    name="report", help="make a page out of results", description=__doc__ or "", configure=configure, run=run
)
