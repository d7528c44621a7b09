"""Importing agentflow is quick and loads none of the heavy packages."""

from __future__ import annotations

import json
import subprocess
import sys

import agentflow

HEAVY = ["torch", "sglang", "transformers", "langgraph", "langchain_core", "pydantic", "httpx", "rich"]
PROBE = f"""
import json, sys, time
began = time.perf_counter()
import agentflow
took = time.perf_counter() - began
print(json.dumps({{"took": took, "loaded": [m for m in {HEAVY!r} if m in sys.modules]}}))
"""


def _fresh_import() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_import_is_quick_and_light() -> None:
    seen = [_fresh_import() for _ in range(3)]
    assert all(s["loaded"] == [] for s in seen)
    assert min(float(str(s["took"])) for s in seen) < 0.5


def test_every_public_name_can_be_had() -> None:
    for name in agentflow.__all__:
        assert getattr(agentflow, name) is not None
    assert set(agentflow._HOMES) | {"__version__"} == set(agentflow.__all__)


def test_no_public_name_loads_torch_or_sglang() -> None:
    code = (
        "import agentflow, sys\n"
        "for name in agentflow.__all__: getattr(agentflow, name)\n"
        "print([m for m in ('torch', 'sglang', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
