"""Tasks in SWE-bench's format: those that come with the example, or a file of the public format."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentflow.errors import UsageError

__all__ = ["OWN_TASKS", "Instance", "load_file", "load_own"]

#: The example's own tasks, a folder each.
OWN_TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One task, with SWE-bench's fields. ``source`` is the folder with its repository's files, if it is one of ours."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    problem_statement: str
    test_patch: str = ""
    hints_text: str = ""
    created_at: str = ""
    version: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    environment_setup_commit: str = ""
    source: Path | None = None

    @property
    def scorable(self) -> bool:
        """Whether it says which tests decide, and its repository is here to run them."""
        return self.source is not None and bool(self.fail_to_pass)

    def to_json(self) -> dict[str, Any]:
        """The task with the names and types of the public format (the two lists as JSON strings)."""
        return {
            "instance_id": self.instance_id,
            "repo": self.repo,
            "base_commit": self.base_commit,
            "patch": self.patch,
            "test_patch": self.test_patch,
            "problem_statement": self.problem_statement,
            "hints_text": self.hints_text,
            "created_at": self.created_at,
            "version": self.version,
            "FAIL_TO_PASS": json.dumps(list(self.fail_to_pass)),
            "PASS_TO_PASS": json.dumps(list(self.pass_to_pass)),
            "environment_setup_commit": self.environment_setup_commit,
        }


def load_own(folder: Path = OWN_TASKS) -> list[Instance]:
    """The tasks of a folder, by name: each is a folder of its own.

    It holds ``task.toml``, ``problem.md``, ``fix.patch``, ``tests.patch``, and the files of the
    repository at its base commit in ``repo``.
    """
    return [_own(path.parent) for path in sorted(folder.glob("*/task.toml"))]


def load_file(path: Path) -> list[Instance]:
    """Tasks of a JSON or JSON Lines file in the public format.

    The two lists of tests may be lists or JSON strings; fields that a file leaves out are empty.
    Raises :class:`~agentflow.errors.UsageError` for a file that cannot be read, and names the entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the tasks in {path}: {error}") from error
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise UsageError(f"{path} is neither JSON nor JSON Lines: {error}") from error
    return [_public(row, f"{path}, entry {number}") for number, row in enumerate(rows, 1)]


def _own(folder: Path) -> Instance:
    meta = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    read = {"problem_statement": "problem.md", "patch": "fix.patch", "test_patch": "tests.patch"}
    texts = {field: (folder / name).read_text(encoding="utf-8") for field, name in read.items()}
    return Instance(
        instance_id=folder.name,
        repo=meta["repo"],
        base_commit=meta["base_commit"],
        hints_text=meta.get("hints_text", ""),
        created_at=meta["created_at"],
        version=meta["version"],
        fail_to_pass=tuple(meta["FAIL_TO_PASS"]),
        pass_to_pass=tuple(meta["PASS_TO_PASS"]),
        environment_setup_commit=meta["base_commit"],
        source=folder / "repo",
        **texts,
    )


def _public(row: Any, where: str) -> Instance:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: a task is an object, not {type(row).__name__}")
    missing = [n for n in ("instance_id", "repo", "base_commit", "patch", "problem_statement") if n not in row]
    if missing:
        raise UsageError(f"{where}: the fields {missing} are missing")
    return Instance(
        instance_id=str(row["instance_id"]),
        repo=str(row["repo"]),
        base_commit=str(row["base_commit"]),
        patch=row["patch"] or "",
        problem_statement=row["problem_statement"] or "",
        test_patch=row.get("test_patch") or "",
        hints_text=row.get("hints_text") or "",
        created_at=str(row.get("created_at") or ""),
        version=str(row.get("version") or ""),
        fail_to_pass=_tests(row.get("FAIL_TO_PASS"), where),
        pass_to_pass=_tests(row.get("PASS_TO_PASS"), where),
        environment_setup_commit=str(row.get("environment_setup_commit") or ""),
    )


def _tests(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UsageError(f"{where}: a list of tests is no JSON: {error}") from error
    if value is not None and not isinstance(value, list):
        raise UsageError(f"{where}: tests must be a list, not {type(value).__name__}")
    return tuple(map(str, value or ()))
