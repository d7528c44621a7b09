"""Splitting a formula into tokens."""

import re

_TOKEN = re.compile(r"\s*(\d+\.\d+|\d+|[-+*/^()])")


def tokenize(text: str) -> list[str]:
    """Numbers, operators and parentheses, in order. Raises ValueError for anything else."""
    tokens = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"cannot read {text[position:]!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens
