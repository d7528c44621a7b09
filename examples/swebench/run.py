"""Solving many tasks at once, and scoring what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig

from agentflow.batch import BatchResult, ResultsFile, run_batch
from agentflow.engine.base import Engine
from agentflow.engine.workflow import WorkflowRun
from agentflow.errors import BadRequest, OutputError, UsageError
from agentflow.graph.handler import collected_runs
from agentflow.report import AgentRow, agent_rows
from examples.swebench.agents import build_graph, start_state
from examples.swebench.instance import Instance
from examples.swebench.scoring import score_patch
from examples.swebench.workspace import open_workspace

__all__ = ["Limits", "Predictions", "Solved", "Solver", "agents_solver", "no_patch", "oracle", "predict", "score"]


@dataclass(slots=True)
class Solved:
    """A solver's patch for one task; ``stopped`` says what ended the agents early, ``rows`` what each used."""

    patch: str
    stopped: str = ""
    attempts: int = 0
    rows: list[AgentRow] = field(default_factory=list)


Solver = Callable[[Instance], Awaitable[Solved]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one task: the coder's attempts, its rounds of tools per attempt, and seconds."""

    attempts: int = 2
    rounds: int = 8
    task_seconds: float = 900.0
    command_seconds: float = 30.0


async def oracle(instance: Instance) -> Solved:
    """The gold patch: with it every task must be resolved, which proves the scorer."""
    return Solved(instance.patch)


async def no_patch(instance: Instance) -> Solved:
    """Nothing: with it no task may be resolved."""
    return Solved("")


def agents_solver(engine: Engine, limits: Limits, *, repos: Path | None = None) -> Solver:
    """The agents on an engine. What stops them early (no room left in the context, an answer cut short, the time)
    ends the task with the changes made so far."""
    # About a quarter of the context in characters, so that a few outputs fit into it.
    max_output = max(400, min(10_000, engine.context_length // 2))

    async def solve(instance: Instance) -> Solved:
        async with open_workspace(instance, repos=repos) as workspace:
            graph = build_graph(
                workspace,
                attempts=limits.attempts,
                rounds=limits.rounds,
                max_output=max_output,
                command_seconds=limits.command_seconds,
            )
            app = graph.compile(engine=engine, max_steps=3 * limits.attempts + 3, name="swebench")
            config: RunnableConfig = {"metadata": {"workflow_id": f"swebench-{instance.instance_id}"}}
            solved = Solved("")
            runs: list[WorkflowRun] = []
            token = collected_runs.set(runs)
            try:
                async with asyncio.timeout(limits.task_seconds):
                    start = await start_state(instance, workspace)
                    async for state in app.astream(start, config, stream_mode="values"):
                        solved.attempts = state.get("attempts", 0)
            except TimeoutError:
                solved.stopped = f"stopped after {limits.task_seconds:g} seconds"
            except (BadRequest, OutputError) as error:
                solved.stopped = f"{type(error).__name__}: {error}"
            finally:
                collected_runs.reset(token)
            solved.rows = agent_rows([run.agents for run in runs])
            solved.patch = await workspace.diff()
            return solved

    return solve


@dataclass(slots=True)
class Predictions:
    """What a run predicted: the batch with its records, and how the tasks solved in this run went, by id."""

    batch: BatchResult
    solved: dict[str, Solved]


async def predict(
    instances: Sequence[Instance], solver: Solver, *, model: str, file: Path | None = None, concurrency: int = 4
) -> Predictions:
    """Solve tasks, at most ``concurrency`` at once.

    ``file`` gets a line ``{instance_id, model_name_or_path, model_patch}`` per finished task, SWE-bench's format;
    tasks that it holds already are not solved again. A task that fails for a reason outside the agents is not written.
    Raises :class:`~agentflow.errors.UsageError` for a file with predictions of another model.
    """
    if file is not None:
        _refuse_others(file, model)
    solved: dict[str, Solved] = {}

    async def work(instance: Instance) -> dict[str, Any]:
        done = solved[instance.instance_id] = await solver(instance)
        return {"instance_id": instance.instance_id, "model_name_or_path": model, "model_patch": done.patch}

    batch = await run_batch(
        instances,
        work,
        key=lambda instance: instance.instance_id,
        concurrency=concurrency,
        results=file,
        key_field="instance_id",
        title="solving",
    )
    return Predictions(batch, solved)


def _refuse_others(file: Path, model: str) -> None:
    if not file.exists():
        return
    with ResultsFile(file, key_field="instance_id") as known:
        others = sorted({str(r.get("model_name_or_path")) for r in known.records.values()} - {model})
    if others:
        raise UsageError(f"{file} holds predictions of {', '.join(others)}, not of {model}: give another file")


async def score(
    instances: Sequence[Instance], patches: Mapping[str, str], *, concurrency: int = 4
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Score patches by instance id: the scores, and errors by id. A task without a patch scores as an empty one."""

    async def work(instance: Instance) -> dict[str, Any]:
        return (await score_patch(instance, patches.get(instance.instance_id, ""))).to_json()

    batch = await run_batch(
        instances,
        work,
        key=lambda instance: instance.instance_id,
        concurrency=concurrency,
        key_field="instance_id",
        title="scoring",
    )
    return batch.records, batch.errors
