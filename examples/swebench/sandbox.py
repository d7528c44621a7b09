"""Commands in a throw-away folder, with a time limit that holds.

This keeps accidents small: a command gets a clean environment, its folder as home, limits on processor time,
memory and file size, and its whole process group is killed when it ends, is too slow or is cancelled. It is no wall
against malice: the commands run with the rights of the user who started the program, network and files included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentflow.errors import SetupError

__all__ = ["CommandResult", "run_command"]

#: Kilobytes of address space, and of one file, that a command may use.
MEMORY_KB = 4 * 1024 * 1024
FILE_KB = 16 * 1024
_LIMITED = """
ulimit -c 0; ulimit -t "$1" 2>/dev/null; ulimit -f "$2" 2>/dev/null; ulimit -v "$3" 2>/dev/null
shift 3; exec "$@"
"""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended: its exit code (None when the time limit killed it) and its output, both streams mixed."""

    code: int | None
    output: str

    @property
    def timed_out(self) -> bool:
        """Whether the time limit killed it."""
        return self.code is None


async def run_command(
    command: Sequence[str],
    cwd: Path,
    *,
    time_limit: float = 30.0,
    max_output: int = 10_000,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    """Run a command in ``cwd`` for at most ``time_limit`` seconds.

    Of longer output the first and last ``max_output // 2`` characters are kept. ``env`` adds to a clean environment.
    Raises :class:`~agentflow.errors.SetupError` when ``bash`` is missing.
    """
    limits = [str(int(time_limit) + 1), str(FILE_KB), str(MEMORY_KB)]
    argv = ["bash", "-c", _LIMITED, "bash", *limits, *command]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as given:
        if stdin is not None:
            given.write(stdin.encode())
            given.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=cwd, env=_environment(cwd, env), stdin=given, stdout=out, stderr=out, start_new_session=True
            )
        except FileNotFoundError as error:
            raise SetupError("this example runs commands with bash, which is not installed here") from error
        code: int | None = None
        try:
            async with asyncio.timeout(time_limit):
                code = await process.wait()
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        return CommandResult(code, _ends(out.fileno(), max_output))


def _environment(cwd: Path, more: Mapping[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {
        "PATH": path,
        "HOME": str(cwd),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins installed beside agentflow are none of the repository's
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(cwd.parent),
        **(more or {}),
    }


def _ends(file: int, limit: int) -> str:
    """The text of a file, or its head and tail with a note between them."""
    size = os.fstat(file).st_size
    most = 4 * limit  # bytes that hold ``limit`` characters at least
    if size <= 2 * most:
        text = os.pread(file, size, 0).decode(errors="replace")
        if len(text) <= limit:
            return text
        head, tail, gone = text[: limit // 2], text[len(text) - limit // 2 :], f"{len(text) - limit} characters"
    else:
        head = os.pread(file, most, 0).decode(errors="replace")[: limit // 2]
        tail = os.pread(file, most, size - most).decode(errors="replace")[-(limit // 2) :]
        gone = f"about {size - limit} bytes"
    return f"{head}\n[... {gone} left out ...]\n{tail}"
