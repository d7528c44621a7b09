"""Starts an engine and tells the process id of its host as soon as there is one. Killed by the test."""

import agentflow.engine._host_process as host_process
from agentflow.engine.embedded import EmbeddedEngine
from agentflow.engine.models import random_model

original = host_process.HostProcess._popen


def popen(self: host_process.HostProcess, *args: object) -> None:
    original(self, *args)  # type: ignore[arg-type]
    print(self.pid, flush=True)  # noqa: T201


host_process.HostProcess._popen = popen  # type: ignore[method-assign]
EmbeddedEngine(random_model().path, max_total_tokens=512)
