"""A pytest plugin that writes each test's outcome to the JSON file named in SWEBENCH_REPORT."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call":
        if hasattr(report, "wasxfail"):
            outcomes[report.nodeid] = "xfailed" if report.skipped else "xpassed"
        else:
            outcomes[report.nodeid] = report.outcome
    elif report.failed:
        outcomes[report.nodeid] = "error"
    elif report.skipped:
        outcomes[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else "skipped"


def pytest_sessionfinish() -> None:
    Path(os.environ["SWEBENCH_REPORT"]).write_text(json.dumps(outcomes), encoding="utf-8")
