"""Starting, dying, restarting and ending: scripts with an engine of their own, so that the shared one survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from agentflow.engine.embedded import EmbeddedEngine

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.engine, pytest.mark.skipif(sys.platform != "linux", reason="the embedded engine needs Linux")]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while left := [p for p in pids if alive(p)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def test_an_engine_dies_is_restarted_and_is_closed(lives: subprocess.CompletedProcess[str]) -> None:
    """One script: no ``__main__`` guard, kill -9 of the host and of the scheduler, Ctrl-C, use after close."""
    done = lives
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # nothing is said at exit
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    by_step = {s["step"]: s for s in seen}
    assert list(by_step) == ["started", "host killed", "restarted", "interrupted", "scheduler killed", "closed"]
    for step in ("host killed", "scheduler killed"):
        assert by_step[step]["errors"] == ["EngineDied"] * 3
        assert by_step[step]["seconds"] < 5.0
        assert by_step[step]["later"] == "EngineDied"
        assert not by_step[step]["alive"]
    assert "signal 9" in by_step["scheduler killed"]["message"]
    assert by_step["restarted"]["text"] == by_step["started"]["text"]
    assert by_step["interrupted"] == {"step": "interrupted", "error": "KeyboardInterrupt", "idle": True}
    assert by_step["closed"]["errors"] == ["EngineClosed"] * 4
    wait_until_gone([pid for s in seen for pid in s.get("pids", [])])


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    script = subprocess.Popen([sys.executable, SCRIPTS / "starts.py"], stdout=subprocess.PIPE, text=True)
    try:
        assert script.stdout is not None
        host = int(script.stdout.readline())
        assert alive(host)
    finally:
        os.kill(script.pid, signal.SIGKILL)
        script.wait()
        script.stdout.close()
    wait_until_gone([host])


def test_a_pool_beyond_this_machine_is_refused_with_the_numbers() -> None:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model
    from agentflow.errors import NotEnoughMemory

    with pytest.raises(NotEnoughMemory, match=r"GB .* for weights.*lower max_total_tokens"):
        EmbeddedEngine(random_model().path, max_total_tokens=10**12)


def test_threads_of_the_engine_do_not_spin_while_they_wait(engine: EmbeddedEngine) -> None:
    environment = Path(f"/proc/{engine.health().host_pid}/environ").read_text().split("\0")
    if "GOMP_SPINCOUNT" not in os.environ:
        assert f"OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'passive')}" in environment


@pytest.mark.slow
def test_what_sglang_refuses_at_the_start_is_told_with_its_words() -> None:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model
    from agentflow.errors import SetupError

    with pytest.raises(SetupError, match="no_such_argument"):
        EmbeddedEngine(random_model().path, no_such_argument=True)


def test_a_start_that_takes_too_long_is_given_up() -> None:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.engine.models import random_model
    from agentflow.errors import EngineTimeout

    phases: list[str] = []
    begun = time.monotonic()
    with pytest.raises(EngineTimeout, match="start_timeout"):
        EmbeddedEngine(random_model().path, start_timeout=1.0, on_progress=phases.append)
    assert time.monotonic() - begun < 10
    assert phases[0].startswith("starting")
    assert "ready" not in phases


def test_another_system_is_told_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentflow.engine.embedded import EmbeddedEngine
    from agentflow.errors import PlatformUnsupported

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PlatformUnsupported, match="RemoteEngine"):
        EmbeddedEngine()
