"""A trained predictor as a file: safetensors, with a JSON header in its metadata. Nothing in it is executed."""

from __future__ import annotations

import errno
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from agentflow.cache.pbkv.graph_data import FEATURES, LIMIT, CallGraph
from agentflow.cache.pbkv.inputs import CONTEXT, LENGTH, PER_AGENT, RUNS
from agentflow.cache.pbkv.sage import Network, Shape
from agentflow.cache.pbkv.training import Trained
from agentflow.errors import UsageError

__all__ = ["FORMAT", "VERSION", "check_target", "load_trained", "read_header", "save_trained"]

FORMAT: Final = "agentflow-predictor"
#: Grows with every change after which older files cannot be used.
VERSION: Final = 1
#: A file with other sizes of inputs was made by another version of the code.
_INPUTS: Final = {"features": FEATURES, "context": CONTEXT, "per_agent": PER_AGENT, "length": LENGTH, "runs": RUNS}
_MAX_BYTES: Final = 256 * 1024 * 1024


def save_trained(trained: Trained, path: str | os.PathLike[str], *, meta: Mapping[str, Any] | None = None) -> None:
    """Write a predictor: its version, sizes, agents, report and ``meta`` in the header, then its tensors.

    The file appears whole or not at all. Raises :class:`~agentflow.errors.UsageError` where it cannot be written.
    """
    target = Path(path)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "inputs": _INPUTS,
        "shape": asdict(trained.network.shape),
        "agents": trained.graph.names,
        "report": dict(trained.report),
        "meta": dict(meta or {}),
    }
    tensors = {f"network.{k}": v.detach().contiguous() for k, v in trained.network.state_dict().items()}
    tensors |= {f"graph.{k}": torch.from_numpy(np.ascontiguousarray(v)) for k, v in trained.graph.arrays().items()}
    data = save(tensors, metadata={"agentflow": json.dumps(header)})
    temporary = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def check_target(path: str | os.PathLike[str]) -> None:
    """Raise :class:`~agentflow.errors.UsageError` where :func:`save_trained` could not write; leaves nothing behind."""
    target = Path(path)
    try:
        folder = next(p for p in target.absolute().parents if p.exists())
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a predictor's file; raises as :func:`load_trained`."""
    try:
        if Path(path).stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path}: larger than any predictor")
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; `agentflow train-predictor` makes one") from error
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: not a predictor's file, or broken ({error})") from error
    try:
        header = json.loads(metadata.get("agentflow", ""))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: a safetensors file, but not of a predictor") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError(f"{path}: a safetensors file, but not of a predictor")
    if header.get("version") != VERSION or header.get("inputs") != _INPUTS:
        raise UsageError(
            f"{path}: version {header.get('version')!r} of the format, this agentflow reads {VERSION}; train it again"
        )
    return header


def load_trained(path: str | os.PathLike[str]) -> Trained:
    """Read a predictor. Raises :class:`~agentflow.errors.UsageError` for a file that is missing, broken, or of
    another version; every tensor is checked before it is used."""
    header = read_header(path)
    try:
        shape = _shape(header["shape"])
        agents = header["agents"]
        if not isinstance(agents, list) or len(agents) > LIMIT or not all(isinstance(a, str) for a in agents):
            raise ValueError("agents are not a list of names")
        with safe_open(os.fspath(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        graph = CallGraph.restore(
            agents, {k.removeprefix("graph."): v.numpy() for k, v in tensors.items() if k.startswith("graph.")}
        )
        network = Network(shape)
        state = {k.removeprefix("network."): v for k, v in tensors.items() if k.startswith("network.")}
        for name, tensor in state.items():
            if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds numbers that are not finite")
        if (state["temperature"] <= 0).any():
            raise ValueError("a temperature is not above 0")
        network.load_state_dict(state)
        network.eval()
        report = {k: float(v) for k, v in header["report"].items()}
    except Exception as error:  # whatever a file can be broken in
        text = " ".join(str(error).split())[:300]
        raise UsageError(f"{path}: broken ({type(error).__name__}: {text}); train it again") from error
    return Trained(network, graph, report)


def _shape(data: Mapping[str, Any]) -> Shape:
    shape = Shape(**data)
    sizes = {"steps": (shape.steps, 16), "width": (shape.width, 1_024)}
    if shape.backbone not in ("sage", "rgcn") or any(
        type(v) is not int or not 1 <= v <= most for v, most in sizes.values()
    ):
        raise ValueError("no shape of a network")
    if type(shape.hidden) is not int or not 0 <= shape.hidden <= 65_536:
        raise ValueError("no shape of a network")
    if type(shape.dropout) not in (int, float) or not 0 <= shape.dropout < 1:
        raise ValueError("no shape of a network")
    return shape
