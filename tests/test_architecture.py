"""The rules on how the package is built, checked on its source: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "agentflow"

#: Layers from the bottom up. A module may import its own layer and those before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("agentflow.errors",),
    ("agentflow.events",),
    ("agentflow.cache",),
    ("agentflow.runtime",),
    ("agentflow.engine.sglang",),
    ("agentflow.engine",),
    ("agentflow.tools",),
    ("agentflow.graph",),
    ("agentflow.batch", "agentflow.report", "agentflow.bench"),
    ("agentflow.cli",),
)
#: What engines share and no engine owns: the protocol, and the channel between an engine and its host process.
PROTOCOL = frozenset({"agentflow.engine.base", "agentflow.engine._channel"})

#: The chat model and the modules that are parts of it.
CHAT_MODEL = ("agentflow.engine.chat_model", "agentflow.engine._messages", "agentflow.engine._structured")
#: The command line looks at users' graphs and machines, as a user's own program would.
CLI = ("agentflow.cli",)
#: Who may import which outside package.
RESERVED: dict[str, tuple[str, ...]] = {
    "sglang": ("agentflow.engine.sglang", "agentflow.engine.embedded"),
    "torch_geometric": ("agentflow.cache.pbkv.geometric",),
    "torch": (
        "agentflow.cache.pbkv",
        "agentflow.cache.kvcmas",
        "agentflow.bench.kvcmas",
        "agentflow.bench.predictor_eval",
        "agentflow.engine.sglang",
        "agentflow.engine._gguf",
        "agentflow.engine._random_llama",
        *CLI,
    ),
    "langgraph": ("agentflow.graph", "agentflow.engine.chat_model", "agentflow.bench.overhead", *CLI),
    "langchain_core": ("agentflow.graph", "agentflow.tools", *CHAT_MODEL, *CLI, "agentflow.bench.overhead"),
    "langchain": ("agentflow.graph",),
}

MAX_LINES = 600


def modules() -> list[tuple[str, Path]]:
    out = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        out.append((".".join(parts), path))
    return out


NAMES = frozenset(name for name, _ in modules())


def imports(name: str, path: Path, *, typing_too: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of every import in a module, inside functions too.

    ``typing_too`` also yields those under ``if TYPE_CHECKING:``.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if not typing_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(inner for statement in node.body for inner in ast.walk(statement))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, base]) if base else ".".join(above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in NAMES else base


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def layer(name: str) -> int | None:
    """The number of a module's layer, taken from the longest prefix that a layer names."""
    best: tuple[int, int] | None = None
    for number, prefixes in enumerate(LAYERS):
        for prefix in prefixes:
            if within(name, prefix) and (best is None or len(prefix) > best[0]):
                best = (len(prefix), number)
    return None if best is None else best[1]


def test_every_module_has_a_layer() -> None:
    homeless = [name for name, _ in modules() if name != "agentflow" and layer(name) is None]
    assert not homeless, f"give these modules a layer in LAYERS: {homeless}"


def test_arrows_point_down() -> None:
    wrong = []
    for name, path in modules():
        own = layer(name)
        if own is None:  # the package itself names its public API lazily
            continue
        for line, target in imports(name, path, typing_too=True):
            other = layer(target)
            if other is not None and other > own and target not in PROTOCOL:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name} imports {target} from a layer above its own")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(RESERVED))
def test_outside_packages_stay_in_their_place(package: str) -> None:
    wrong = []
    for name, path in modules():
        if any(within(name, prefix) or name.startswith(prefix + "_") for prefix in RESERVED[package]):
            continue
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: {name} imports {target}"
            for line, target in imports(name, path, typing_too=True)
            if within(target, package)
        ]
    assert not wrong, "\n".join(wrong)


def test_no_circles() -> None:
    graph = {
        name: {t for _, t in imports(name, path, typing_too=False) if t in NAMES and t not in {name, "agentflow"}}
        for name, path in modules()
        if name != "agentflow"
    }
    state: dict[str, str] = {}
    circles: list[str] = []

    def visit(name: str, road: list[str]) -> None:
        state[name] = "open"
        for target in sorted(graph.get(name, ())):
            if state.get(target) == "open":
                circles.append(" -> ".join([*road[road.index(target) :], target]))
            elif target not in state:
                visit(target, [*road, target])
        state[name] = "closed"

    for name in sorted(graph):
        if name not in state:
            visit(name, [name])
    assert not circles, "\n".join(circles)


def test_files_stay_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for folder in ("agentflow", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    ]
    assert not long, f"split these along their ideas (limit {MAX_LINES} lines): {long}"


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
