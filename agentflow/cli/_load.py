"""Finding a user's graph: ``FILE:GRAPH`` on the command line."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agentflow.errors import UsageError

if TYPE_CHECKING:
    from agentflow.engine.base import Engine
    from agentflow.graph import AgentApp

__all__ = ["compiled", "is_graph", "load_graph", "split_target"]


def split_target(target: str) -> tuple[str, str | None]:
    """``FILE:GRAPH`` as its two parts; GRAPH is None when it was left out."""
    file, colon, name = target.rpartition(":")
    # A lone drive letter before the colon is part of a Windows path.
    if not colon or (len(file) == 1 and name.startswith(("\\", "/"))):
        return target, None
    if not file or not name:
        raise UsageError(f"{target!r}: write FILE:GRAPH, for example my_graph.py:graph")
    return file, name


def load_graph(target: str) -> Any:
    """The object that ``FILE:GRAPH`` names: a graph, or a function that makes one.

    FILE is a Python file, or the dotted name of a module. Without ``:GRAPH`` the file must hold exactly one graph.
    The file's folder is importable while it runs, as it is under ``python FILE``.
    Raises :class:`~agentflow.errors.UsageError` with one line that says what to change.
    """
    file, name = split_target(target)
    module = _module(file)
    if name is None:
        return _only_graph(module, file)
    try:
        return _checked(getattr(module, name))
    except AttributeError:
        graphs = _graphs(module)
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        known = f"; graphs in it: {', '.join(graphs)}" if graphs else "; it holds no graph"
        guess = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{file} has no {name!r}{guess or known}") from None


def _checked(value: Any) -> Any:
    """``value`` if it is a graph or a function that can be called for one."""
    if is_graph(value):
        return value
    if not callable(value):
        raise UsageError(f"that is no graph but a {type(value).__name__}: name a graph, or a function that returns one")
    if inspect.iscoroutinefunction(value):
        raise UsageError("the function is async: give a plain function that returns the graph")
    parameters = inspect.signature(value).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if rest := [name for name in needed if name != "engine"]:
        raise UsageError(
            f"the function must be callable without arguments, or with engine alone; it also needs {', '.join(rest)}"
        )
    return value


def _module(file: str) -> ModuleType:
    path = Path(file)
    if path.is_dir():
        raise UsageError(f"{file} is a folder: give the Python file that holds the graph")
    if not path.exists():
        if path.suffix == ".py" or "/" in file or "\\" in file:
            raise UsageError(f"there is no file {file}")
        return _run(lambda: _dotted(file), file)
    if path.suffix != ".py":
        raise UsageError(f"{file} is no Python file (its name must end in .py)")
    name = (
        path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"agentflow_user_{abs(hash(path))}"
    )
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules[name] = module  # as import does: dataclasses and pickles look their module up

    def execute() -> ModuleType:
        loader.exec_module(module)
        return module

    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return _run(execute, file)


def _dotted(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the current folder, as `python -m` finds them
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"there is no file and no module {name!r}") from None
        raise


def _run(execute: Callable[[], ModuleType], file: str) -> ModuleType:
    try:
        return execute()
    except UsageError:
        raise
    except SyntaxError as error:
        raise UsageError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except SystemExit as error:
        raise UsageError(
            f"{file} ends the program while it is imported: put that code under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else file
        raise UsageError(f"{file} cannot be imported: {type(error).__name__}: {error} ({place})") from error


def is_graph(value: Any) -> bool:
    """Whether ``value`` is a graph, compiled or not."""
    from langgraph.graph import StateGraph
    from langgraph.pregel import Pregel

    from agentflow.graph import AgentApp

    return isinstance(value, StateGraph | Pregel | AgentApp)


def _graphs(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if not name.startswith("_") and is_graph(value)]


def _only_graph(module: ModuleType, file: str) -> Any:
    graphs = _graphs(module)
    if len(graphs) == 1:
        return getattr(module, graphs[0])
    if not graphs:
        raise UsageError(f"{file} holds no graph at its top level; name what makes one: {file}:FUNCTION")
    raise UsageError(f"{file} holds several graphs ({', '.join(graphs)}): name one, as in {file}:{graphs[0]}")


def compiled(target: Any, engine: Engine) -> AgentApp:
    """``target`` (a graph, or a function that makes one) ready to run on ``engine``.

    A function is called, with ``engine`` if it has a parameter of that name. An app that was compiled for an
    engine of its own keeps it.
    """
    from langgraph.graph import StateGraph
    from langgraph.graph.state import CompiledStateGraph

    from agentflow.graph import AgentApp, AgentGraph, attach

    if callable(target) and not is_graph(target):
        target = target(engine=engine) if "engine" in inspect.signature(target).parameters else target()
    if isinstance(target, AgentGraph):
        return target.compile(engine=engine)
    if isinstance(target, StateGraph):
        target = target.compile()
    if isinstance(target, AgentApp) and target.handler is not None:
        return target
    if isinstance(target, CompiledStateGraph):
        return attach(target, engine)
    raise UsageError(f"the function returned no graph but a {type(target).__name__}")
