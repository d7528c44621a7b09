"""SGLang still has everything that agentflow relies on: the checks are in ``scripts/contract.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "contract.py"


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="SGLang is installed on Linux only")
def test_sglang_has_what_we_rely_on() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr
    results = json.loads(lines[0].removeprefix("RESULTS "))
    assert len(results) > 10
    assert {name: said for name, said in results.items() if said != "ok"} == {}
