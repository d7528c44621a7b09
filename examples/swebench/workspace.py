"""A throw-away copy of a task's repository, under git."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from agentflow.errors import SetupError, UsageError
from examples.swebench.instance import Instance
from examples.swebench.sandbox import CommandResult, run_command

__all__ = ["Workspace", "open_workspace"]

_BASE_ENV = {
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@example.org",
    "GIT_AUTHOR_DATE": "2024-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@example.org",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00+0000",
}
_OLD_FILE = re.compile(r"^--- a/(.+)$", re.MULTILINE)
_NEW_FILE = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)
#: Left out of every patch: what running Python leaves behind.
_EXCLUDED = ("__pycache__/", "*.pyc", ".pytest_cache/", ".bash_history", ".python_history", ".cache/")
_MAX_PATCH = 1_000_000


class Workspace:
    """A repository in ``root`` at the task's base commit."""

    def __init__(self, root: Path, base: str) -> None:
        self.root = root
        self.base = base

    def resolve(self, path: str) -> Path:
        """A path of the repository as a real one. Raises ``ValueError`` for one out of it, or among git's own files."""
        full = (self.root / path).resolve()
        if not full.is_relative_to(self.root) or ".git" in full.relative_to(self.root).parts or full == self.root:
            raise ValueError(f"{path!r} is not a file of the repository; give a path relative to its root")
        return full

    async def files(self) -> list[str]:
        """The repository's files, sorted."""
        listed = await self._git("ls-files", "--cached", "--others", "--exclude-standard")
        return sorted(listed.output.splitlines())

    async def diff(self) -> str:
        """All changes since the base commit as a patch, new files included; empty when there are none.

        Raises ``ValueError`` for a patch over a million characters.
        """
        await self._git("add", "--all")
        made = await self._git("diff", "--cached", "--no-color", "--no-ext-diff", self.base, max_output=_MAX_PATCH)
        if len(made.output) >= _MAX_PATCH:
            raise ValueError(f"the changes make a patch of more than {_MAX_PATCH:,} characters")
        return made.output

    async def apply(self, patch: str) -> bool:
        """Apply a patch; False, and nothing is changed, when it does not fit."""
        text = patch if patch.endswith("\n") else patch + "\n"
        done = await run_command(["git", "apply", "--whitespace=nowarn", "-"], self.root, stdin=text, time_limit=60)
        return done.code == 0

    async def apply_tests(self, patch: str) -> bool:
        """Apply a patch of tests, after putting the files it touches back to the base commit."""
        for name in {*_OLD_FILE.findall(patch), *_NEW_FILE.findall(patch)}:
            self.resolve(name).unlink(missing_ok=True)
            await run_command(["git", "checkout", "--quiet", self.base, "--", name], self.root)
        return await self.apply(patch)

    async def run(self, command: list[str], **options: object) -> CommandResult:
        """Run a command in the repository; see :func:`~examples.swebench.sandbox.run_command`."""
        return await run_command(command, self.root, **options)  # type: ignore[arg-type]

    async def _git(self, *args: str, max_output: int = 200_000) -> CommandResult:
        done = await run_command(["git", *args], self.root, time_limit=60, max_output=max_output, env=_BASE_ENV)
        if done.code != 0:
            raise SetupError(f"git {args[0]} failed in the task's folder: {done.output.strip()[:500]}")
        return done


@contextlib.asynccontextmanager
async def open_workspace(instance: Instance, *, repos: Path | None = None) -> AsyncIterator[Workspace]:
    """A fresh workspace for a task, removed at the end.

    Our own tasks bring their files. For others ``repos`` is a folder of git clones named ``owner__name``.
    Raises :class:`~agentflow.errors.UsageError` when the repository is not there, and
    :class:`~agentflow.errors.SetupError` when git is missing or fails.
    """
    if shutil.which("git") is None:
        raise SetupError("this example needs git on the PATH")
    folder = _new_folder()
    root = folder / "repo"
    try:
        workspace = Workspace(root, instance.base_commit)
        if instance.source is not None:
            skip = shutil.ignore_patterns("__pycache__", "*.pyc")
            await asyncio.to_thread(shutil.copytree, instance.source, root, ignore=skip)
            await _commit(workspace)
        else:
            await _clone(workspace, instance, repos)
        (root / ".git" / "info").mkdir(exist_ok=True)
        (root / ".git" / "info" / "exclude").write_text("\n".join(_EXCLUDED) + "\n", encoding="utf-8")
        yield workspace
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="swebench-")).resolve()


def _clone_of(repos: Path | None, name: str) -> Path | None:
    found = repos.resolve() / name if repos is not None else None
    return found if found is not None and found.is_dir() else None


async def _commit(workspace: Workspace) -> None:
    """Make the base commit; its time and author are fixed, so its id depends on the files alone."""
    for path in workspace.root.rglob("*"):
        if path.is_file():
            path.chmod(0o644)
    await workspace._git("init", "--quiet", "--object-format=sha1", "--initial-branch=main")
    await workspace._git("add", "--all")
    await workspace._git("commit", "--quiet", "--message", "base", "--no-gpg-sign")
    workspace.base = (await workspace._git("rev-parse", "HEAD")).output.strip()


async def _clone(workspace: Workspace, instance: Instance, repos: Path | None) -> None:
    name = instance.repo.replace("/", "__")
    source = _clone_of(repos, name)
    if source is None:
        raise UsageError(
            f"{instance.instance_id}: there is no clone of {instance.repo}; give a folder that holds one"
            f" named {name} with --repos"
        )
    workspace.root.mkdir()
    await workspace._git("clone", "--quiet", "--no-hardlinks", str(source), ".")
    await workspace._git("checkout", "--quiet", "--detach", instance.base_commit)
