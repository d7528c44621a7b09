"""Numbers for names, however many come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from agentflow.errors import UsageError

__all__ = ["AGENTS", "Names", "Seen", "whole"]

#: Agents that are told apart.
AGENTS = 256


class Seen(NamedTuple):
    """A name's number. ``new`` says that what was kept under the number is another's, or nothing."""

    number: int
    new: bool


class Names:
    """Numbers from 0 for at most ``limit`` names. When all are taken, a new name gets that of the one unseen for
    longest, which is forgotten.

    All methods cost O(1). Iteration is by number.
    """

    def __init__(self, limit: int = AGENTS) -> None:
        self.limit = limit
        self.names: list[str] = []
        #: Names that got a number so far, again ones included.
        self.given = 0
        self._numbers: OrderedDict[str, int] = OrderedDict()  # the longest unseen first

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    @property
    def room(self) -> bool:
        """Whether a new name would push out none."""
        return len(self.names) < self.limit

    def find(self, name: str) -> int | None:
        """The name's number, if it has one. This is not to see it."""
        return self._numbers.get(name)

    def see(self, name: str) -> Seen:
        """The name's number, given to it when it has none."""
        number = self._numbers.get(name)
        if number is not None:
            self._numbers.move_to_end(name)
            return Seen(number, False)
        if self.room:
            number = len(self.names)
            self.names.append(name)
        else:
            _, number = self._numbers.popitem(last=False)
            self.names[number] = name
        self._numbers[name] = number
        self.given += 1
        return Seen(number, True)


def whole(name: str, value: object, least: int) -> int:
    """``value`` if it is a whole number of at least ``least``; else raises UsageError, which calls it ``name``."""
    if type(value) is not int or value < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value
