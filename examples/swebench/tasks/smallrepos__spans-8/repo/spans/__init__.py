"""Spans ``(start, end)`` of whole numbers, the end not included."""

from spans.core import gaps, merge, total

__all__ = ["gaps", "merge", "total"]
