"""The documentation's Python blocks are run as they stand.

Every page has one namespace, in which its blocks run from top to bottom, in a folder of their own. A real
engine is forbidden, so what a block shows runs anywhere. A block that needs the real thing has the word
``engine`` after ``python`` on its fence (```` ```python engine ````) and finds a running engine under the
name ``engine``; one that is only to be read has ``noqa`` there.
"""

from __future__ import annotations

import asyncio
import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import agentflow
from agentflow.engine.guard import forbid_real_engines

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WORDS = {"engine", "noqa"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    words: frozenset[str]
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, frozenset(found[1].split()), found[2])
        for found in FENCE.finditer(text)
    ]


def run(block: Block, namespace: dict[str, Any]) -> None:
    # The source is made known, so that a traceback shows the line and inspect finds the code of functions.
    padded = "\n" * block.line + block.code
    linecache.cache[block.place] = (len(padded), None, padded.splitlines(keepends=True), block.place)
    code = compile(padded, block.place, "exec", flags=_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, namespace)
    if asyncio.iscoroutine(result):
        asyncio.run(result)


_TOP_LEVEL_AWAIT = 0x2000  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=_names(PAGES))
def test_marks_are_known(page: Path) -> None:
    for block in blocks(page):
        assert block.words <= WORDS, f"{block.place}: unknown words after ```python: {sorted(block.words - WORDS)}"


PLAIN = [p for p in PAGES if any(not b.words for b in blocks(p))]


@pytest.mark.parametrize("page", PLAIN, ids=_names(PLAIN))
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    with forbid_real_engines():
        for block in blocks(page):
            if not block.words:
                run(block, namespace)


REAL = [p for p in PAGES if any("engine" in b.words for b in blocks(p))]


@pytest.mark.engine
@pytest.mark.parametrize("page", REAL, ids=_names(REAL))
def test_blocks_run_on_a_real_engine(page: Path, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if "noqa" not in block.words:
            if "engine" in block.words:  # a block before may have given the name to a scripted one
                namespace["engine"] = engine
            run(block, namespace)


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=_names(PAGES))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [t for t in LINK.findall(text) if "://" not in t and not t.startswith("mailto:")]
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to files that do not exist: {missing}"


def test_the_readme_shows_code() -> None:
    assert blocks(ROOT / "README.md"), "README.md has no Python block"


def test_every_public_name_is_in_the_guide() -> None:
    text = (ROOT / "docs" / "guides" / "api.md").read_text(encoding="utf-8")
    assert [n for n in agentflow.__all__ if f"`{n}`" not in text and n != "__version__"] == []
