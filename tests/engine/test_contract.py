"""SGLang still has everything that agentflow relies on: the checks are in ``scripts/contract.py``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="SGLang is installed on Linux only")
def test_sglang_has_what_we_rely_on(contract: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in contract.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, contract.stderr
    results = json.loads(lines[0].removeprefix("RESULTS "))
    assert len(results) > 10
    assert {name: said for name, said in results.items() if said != "ok"} == {}
