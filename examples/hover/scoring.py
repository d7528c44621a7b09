"""Scores of a run: were the gold articles found, and is the label right?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from examples.hover.data import Claim, title_key

__all__ = ["score_claim", "summarise"]


def score_claim(claim: Claim, found: Iterable[str], label: str | None) -> dict[str, Any]:
    """Scores of one claim.

    ``all_found`` is true when every gold title is among the titles ``found``; ``recall`` is the share of them
    that is; both are None for a claim without supporting facts, and ``label_right`` for one without a gold label.
    """
    gold = {title_key(t) for t in claim.titles}
    hit = gold & {title_key(t) for t in found}
    return {
        "all_found": hit == gold if gold else None,
        "recall": len(hit) / len(gold) if gold else None,
        "label_right": None if claim.label is None else label == claim.label,
    }


def summarise(claims: Iterable[Claim], records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Scores over all ``claims``, with counts; ``records`` holds :func:`score_claim` results by uid.

    A claim without a record (its run failed) counts as nothing found and a wrong label.
    """
    total = {"all": _Sums()}
    for claim in claims:
        record = records.get(claim.uid) or score_claim(claim, (), None)
        for group in ("all", f"{claim.num_hops} hops"):
            total.setdefault(group, _Sums()).add(record)
    ordered = sorted(total, key=lambda group: (group != "all", group))
    return {group: total[group].to_json() for group in ordered}


class _Sums:
    def __init__(self) -> None:
        self.claims = self.with_facts = self.all_found = self.labelled = self.right = 0
        self.recall = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        self.claims += 1
        if record["recall"] is not None:
            self.with_facts += 1
            self.all_found += bool(record["all_found"])
            self.recall += record["recall"]
        if record["label_right"] is not None:
            self.labelled += 1
            self.right += bool(record["label_right"])

    def to_json(self) -> dict[str, Any]:
        return {
            "claims": self.claims,
            "with_facts": self.with_facts,
            "all_found": self.all_found,
            "all_found_share": _share(self.all_found, self.with_facts),
            "recall": _share(self.recall, self.with_facts),
            "labelled": self.labelled,
            "label_right": self.right,
            "label_accuracy": _share(self.right, self.labelled),
        }


def _share(part: float, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
