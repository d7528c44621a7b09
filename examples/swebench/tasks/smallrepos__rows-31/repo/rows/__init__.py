"""Comma-separated lines."""

from rows.lines import format_line, parse_line

__all__ = ["format_line", "parse_line"]
