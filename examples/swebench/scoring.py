"""SWE-bench's rule: a task is resolved when the tests that failed pass, and those that passed still do."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentflow.errors import SetupError
from examples.swebench.instance import Instance
from examples.swebench.sandbox import CommandResult
from examples.swebench.workspace import Workspace, open_workspace

__all__ = ["Score", "judge", "run_tests", "score_patch", "summarise", "test_files"]

_PLUGIN = Path(__file__).parent / "_plugin"
_PASSED = frozenset({"passed", "xfailed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a patch did. ``why`` says in a few words what decided."""

    instance_id: str
    resolved: bool
    why: str
    fixed: int = 0
    to_fix: int = 0
    broken: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The score as a JSON-ready dict."""
        return {**asdict(self), "broken": list(self.broken)}


def judge(instance: Instance, outcomes: Mapping[str, str]) -> Score:
    """Apply the rule to the outcomes of tests by id (pytest's words; a test that is missing did not run).

    Every FAIL_TO_PASS must pass, so a skipped or missing one counts as failed. Every PASS_TO_PASS must pass or be
    skipped. An expected failure counts as passed.
    """
    fixed = [t for t in instance.fail_to_pass if outcomes.get(t) in _PASSED]
    broken = tuple(t for t in instance.pass_to_pass if outcomes.get(t) not in _PASSED | {"skipped"})
    resolved = len(fixed) == len(instance.fail_to_pass) and not broken
    if resolved:
        why = "resolved"
    elif broken:
        why = f"broke {len(broken)} tests that passed"
    else:
        why = f"fixed {len(fixed)} of {len(instance.fail_to_pass)} tests"
    return Score(
        instance_id=instance.instance_id,
        resolved=resolved,
        why=why,
        fixed=len(fixed),
        to_fix=len(instance.fail_to_pass),
        broken=broken,
    )


async def score_patch(instance: Instance, patch: str, *, time_limit: float = 120.0) -> Score:
    """Apply a patch to a fresh copy of the repository, then the tests of the task, run them, and judge."""
    if not patch.strip():
        return _unresolved(instance, "empty patch")
    async with open_workspace(instance) as workspace:
        if not await workspace.apply(patch):
            return _unresolved(instance, "the patch does not apply")
        if not await workspace.apply_tests(instance.test_patch):
            return _unresolved(instance, "the task's tests do not apply on top of the patch")
        outcomes, result = await run_tests(workspace, test_files(instance), time_limit=time_limit)
        if result.timed_out:
            return _unresolved(instance, f"the tests took longer than {time_limit:g} seconds")
        return judge(instance, outcomes)


async def run_tests(
    workspace: Workspace, files: Sequence[str] = (), *, time_limit: float = 120.0, max_output: int = 10_000
) -> tuple[dict[str, str], CommandResult]:
    """Run pytest on ``files`` (all tests by default): each test's outcome, and how the run ended.

    Raises :class:`~agentflow.errors.SetupError` when pytest is not installed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise SetupError("the tasks' tests need pytest: install it beside agentflow")
    options = ["-q", "--tb=short", "--no-header", "-p", "no:cacheprovider", "-p", "swebench_report", "--rootdir=."]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        env = {"PYTHONPATH": str(_PLUGIN), "SWEBENCH_REPORT": str(report)}
        command = [sys.executable, "-m", "pytest", *options, *files]
        result = await workspace.run(command, time_limit=time_limit, max_output=max_output, env=env)
        outcomes = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return outcomes, result


def test_files(instance: Instance) -> list[str]:
    """The files that hold the tests that decide."""
    return sorted({t.split("::", 1)[0] for t in (*instance.fail_to_pass, *instance.pass_to_pass)})


def summarise(scores: Iterable[Mapping[str, Any]], *, total: int) -> dict[str, Any]:
    """Counts over all ``total`` tasks: those without a patch, or without a score, stay in the denominator."""
    scores = list(scores)
    resolved = sum(bool(s["resolved"]) for s in scores)
    return {
        "tasks": total,
        "scored": len(scores),
        "resolved": resolved,
        "empty_patches": sum(s["why"] == "empty patch" for s in scores),
        "resolved_share": resolved / total if total else 0.0,
    }


def _unresolved(instance: Instance, why: str) -> Score:
    return Score(instance_id=instance.instance_id, resolved=False, why=why, to_fix=len(instance.fail_to_pass))
