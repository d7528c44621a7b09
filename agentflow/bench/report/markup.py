"""Markup whose text is always escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["Markup", "el", "joined", "text"]


class Markup(str):
    """A piece of HTML or SVG that is safe to put into a page as it is."""

    __slots__ = ()


_EMPTY = frozenset({"meta", "br", "circle", "line", "path", "rect", "polyline", "polygon"})


def text(value: object) -> Markup:
    """Any value as text."""
    return value if isinstance(value, Markup) else Markup(escape(str(value), quote=True))


def el(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. ``_`` in an attribute's name is ``-``, a trailing one is dropped; attributes that are None are left
    out. Children that are not :class:`Markup` are escaped."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """Pieces one after another."""
    return Markup("".join(text(p) for p in parts))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value), quote=True)
