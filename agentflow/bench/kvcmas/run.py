"""Run all of it on the default model and give one JSON-ready result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from agentflow.bench.kvcmas.costs import measure_costs
from agentflow.bench.kvcmas.data import load_items
from agentflow.bench.kvcmas.dense import DenseModel
from agentflow.bench.kvcmas.experiment import Experiment, Size
from agentflow.bench.kvcmas.journal import Journal
from agentflow.bench.kvcmas.speed import speed_claims, speed_table
from agentflow.bench.kvcmas.summary import claims, tables
from agentflow.bench.kvcmas.tasks import TaskSize, run_tasks, task_table

__all__ = ["QUICK", "STANDARD", "run_kvcmas", "run_speed", "run_task_level"]

STANDARD = Size()
QUICK = Size(anchors=5, items=6, brief=4, repeats=3, chains=2)


def run_kvcmas(
    folder: Path,
    *,
    size: Size = STANDARD,
    model: str | None = None,
    seed: int = 2,
    journal: Path | None = None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The experiment and the costs over data in ``folder``. ``say`` hears of progress.

    With ``journal``, a run that was stopped goes on from the items done; the file goes when all is done.

    The standard size takes about 30 minutes of one core of the machine that the guide's figures come from. Raises
    UsageError when the data is not there, and ModelNotFound.
    """
    from agentflow.engine.models import resolve_model

    items = load_items(folder, size.needed, seed=seed)
    began = time.perf_counter()
    found = resolve_model(model, on_progress=say)
    dense = DenseModel(str(found.path))
    kept = Journal(journal, {"model": found.name, "anchors": size.anchors, "seed": seed})
    rows = Experiment(dense, say).run(items, size, kept)
    measured = measure_costs(dense, items[: size.anchors] * 4, say, repeats=1 if size is QUICK else 3)
    kept.close()
    speed = speed_table()
    return {
        "title": "KV of a shared segment under another agent's prefix",
        "model": found.name,
        "size": asdict(size),
        "seed": seed,
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - began,
        "tables": tables(rows),
        "costs": measured,
        "speed": speed,
        "claims": [*claims(rows, measured), *speed_claims(speed)],
        "rows": rows,
    }


def run_task_level(
    folder: Path, *, tasks: int, model: str | None = None, seed: int = 2, say: Callable[[str], None]
) -> dict[str, Any]:
    """Multi-agent tasks under every way: about a minute of one core for each. Raises as :func:`run_kvcmas`."""
    from agentflow.engine.models import resolve_model

    size = TaskSize(tasks=tasks)
    items = load_items(folder, size.anchors + size.tasks, seed=seed)
    found = resolve_model(model, on_progress=say)
    rows = run_tasks(DenseModel(str(found.path)), items, size, say)
    return {
        "title": "Three task agents and a reflector",
        "model": found.name,
        "size": asdict(size),
        "seed": seed,
        "tasks": task_table(rows),
        "claims": [],
        "rows": rows,
    }


def run_speed() -> dict[str, Any]:
    """The simulated part alone: seconds, no model, no data."""
    speed = speed_table()
    return {"title": "KVCMAS at 32K tokens, by a cost model", "speed": speed, "claims": speed_claims(speed)}
