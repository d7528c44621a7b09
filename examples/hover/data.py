"""Claims in HoVer's format, and the passages to check them against."""

from __future__ import annotations

import json
import sqlite3
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentflow.errors import UsageError

__all__ = [
    "Claim",
    "LABELS",
    "OWN_CLAIMS",
    "OWN_PASSAGES",
    "Passage",
    "load_claims",
    "load_passages",
    "open_wiki",
    "title_key",
]

LABELS = ("SUPPORTED", "NOT_SUPPORTED")

_DATA = Path(__file__).parent / "data"
#: Twenty claims and 88 passages written for this example; every fact that a claim needs is among them.
OWN_CLAIMS = _DATA / "claims.json"
OWN_PASSAGES = _DATA / "passages.jsonl"


@dataclass(frozen=True, slots=True)
class Passage:
    """An encyclopedia article's opening."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, its label (None where the file has none) and the sentences that decide it.

    ``supporting_facts`` holds pairs of an article's title and a sentence number in it, from 0.
    """

    uid: str
    claim: str
    supporting_facts: tuple[tuple[str, int], ...]
    label: str | None
    num_hops: int
    hpqa_id: str = ""

    @property
    def titles(self) -> tuple[str, ...]:
        """The gold titles, each once, in the order of the supporting facts."""
        return tuple(dict.fromkeys(title for title, _ in self.supporting_facts))


def title_key(title: str) -> str:
    """A title in the form in which titles are compared: Unicode NFC, no outer space, no case."""
    return unicodedata.normalize("NFC", title).strip().casefold()


def load_claims(path: Path = OWN_CLAIMS, *, limit: int | None = None) -> list[Claim]:
    """Read claims from a JSON list with HoVer's fields; ``limit`` keeps the first so many.

    Raises :class:`~agentflow.errors.UsageError` when the file is missing or not of that form.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no claims file at {path}: give the path of a HoVer JSON file") from None
    except OSError as error:
        raise UsageError(f"cannot read the claims in {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise UsageError(f"{path} must hold a JSON list of claims, it holds a {type(rows).__name__}")
    return [_claim(row, path, i) for i, row in enumerate(rows[:limit])]


def _claim(row: Any, path: Path, index: int) -> Claim:
    try:
        label = row.get("label")
        if label is not None and label not in LABELS:
            raise ValueError(f"label {label!r} is none of {LABELS}")
        facts = tuple((str(title), int(sentence)) for title, sentence in row.get("supporting_facts", ()))
        hops = int(row.get("num_hops") or len({t for t, _ in facts}))
        return Claim(str(row["uid"]), str(row["claim"]), facts, label, hops, str(row.get("hpqa_id", "")))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}, claim {index}: not in HoVer's form ({type(error).__name__}: {error})") from None


def load_passages(path: Path = OWN_PASSAGES) -> list[Passage]:
    """Read passages from JSON lines with ``title`` and ``sentences`` (or ``text``)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UsageError(f"no passages file at {path}") from None
    out: list[Passage] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["text"] if "text" in row else " ".join(row["sentences"])
            out.append(Passage(str(row["title"]), text))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}, line {number}: no passage ({type(error).__name__}: {error})") from None
    if not out:
        raise UsageError(f"{path} holds no passage")
    return out


def open_wiki(path: Path) -> Iterator[Passage]:
    """Passages of a SQLite database with a table ``documents(id, text)``, where ``id`` is the title."""
    if not path.is_file():
        raise UsageError(f"no wiki database at {path}")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        for title, text in connection.execute("SELECT id, text FROM documents ORDER BY rowid"):
            yield Passage(str(title), str(text).replace("[SENT]", " "))
    except sqlite3.DatabaseError as error:
        raise UsageError(f"{path} is no database with a table documents(id, text): {error}") from None
    finally:
        connection.close()
