"""What is known of each tool's duration, from the first call on: prior, then all tools, then the tool itself."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentflow.cache.ttl.durations import Distribution, Exponential, Samples

__all__ = ["Source", "ToolDurations", "ToolKey"]

Source = Literal["prior", "global", "tool", "variant"]
_FORMAT = "agentflow-tool-durations/1"


class ToolKey(NamedTuple):
    """A tool, and what kind of use of it (``pytest`` of a shell tool) where that is told."""

    tool: str
    variant: str | None = None


class ToolDurations:
    """Durations by tool and variant, bounded everywhere.

    :meth:`distribution` goes down a chain: fewer than ``enough`` complete observations in all give the
    exponential prior; fewer than ``enough_each`` of the variant give the tool's distribution, of the tool the
    global one. ``censored=False`` leaves out what is censored, as the paper does. At most ``tools`` tools and
    ``tools`` variants are kept, those unused for longest dropped first; ``window`` samples for each, four times
    as many in all; ``running`` calls that are out.
    """

    def __init__(
        self,
        *,
        prior_mean: float = 1.0,
        enough: int = 20,
        enough_each: int = 20,
        window: int = 256,
        tools: int = 256,
        running: int = 8_192,
        censored: bool = True,
    ) -> None:
        if not prior_mean > 0 or min(enough, enough_each) < 0 or min(window, tools, running) < 1:
            raise ValueError("prior_mean must be above 0, thresholds at least 0 and bounds at least 1")
        self.prior = Exponential(prior_mean)
        self.enough = enough
        self.enough_each = enough_each
        self.window = window
        self.tools = tools
        self.censored = censored
        self._limit_running = running
        #: Durations counted since the start.
        self.seen = 0
        self._all = Samples(4 * window, censored=censored)
        self._by_key: OrderedDict[ToolKey, Samples] = OrderedDict()
        self._running: OrderedDict[Hashable, tuple[ToolKey, float]] = OrderedDict()
        #: Ids of the calls of each tool that are out, in the order of their start.
        self._out: dict[str, dict[Hashable, float]] = {}

    @property
    def observations(self) -> int:
        """Complete observations in the global window."""
        return self._all.complete

    @property
    def running(self) -> int:
        """Calls that are out."""
        return len(self._running)

    def started(self, call_id: Hashable, key: ToolKey, now: float) -> None:
        """A call went out."""
        self._drop(call_id)
        self._running[call_id] = (key, now)
        self._out.setdefault(key.tool, {})[call_id] = now
        if len(self._running) > self._limit_running:
            self.gone(next(iter(self._running)), now)

    def ended(self, call_id: Hashable, tool: str, seconds: float, *, censored: bool = False) -> None:
        """A call came back after ``seconds``, or was stopped then (``censored``). Also without :meth:`started`."""
        started = self._drop(call_id)
        self.add(started[0] if started is not None and started[0].tool == tool else ToolKey(tool), seconds, censored)

    def gone(self, call_id: Hashable, now: float) -> None:
        """A call will not be heard of again: it counts as censored at its age."""
        started = self._drop(call_id)
        if started is not None:
            self.add(started[0], now - started[1], censored=True)

    def add(self, key: ToolKey, seconds: float, censored: bool = False) -> None:
        """Count a duration of a tool."""
        self.seen += 1
        self._all.add(seconds, censored=censored)
        self._samples(key if key.variant is None else ToolKey(key.tool)).add(seconds, censored=censored)
        if key.variant is not None:
            self._samples(key).add(seconds, censored=censored)

    def seed(self, durations: Iterable[tuple[str, float]]) -> None:
        """Learn from (tool, seconds) pairs of a trace."""
        for tool, seconds in durations:
            self.add(ToolKey(tool), seconds)

    def distribution(self, key: ToolKey, now: float) -> tuple[Distribution, Source]:
        """The best known distribution and where in the chain it comes from."""
        if self._all.complete < self.enough:
            return self.prior, "prior"
        if key.variant is not None:
            found = self._by_key.get(key)
            if found is not None and found.complete >= self.enough_each:
                return found.curve(), "variant"
        found = self._by_key.get(key if key.variant is None else ToolKey(key.tool))
        if found is not None and found.complete >= self.enough_each:
            return found.curve(lambda: self._ages(key.tool, now)), "tool"
        return self._all.curve(), "global"

    def mean(self, tool: str) -> float:
        """Mean duration of the tool's complete observations, in seconds; 0.0 for an unknown tool."""
        found = self._by_key.get(ToolKey(tool))
        return found.mean() if found is not None else 0.0

    def known(self) -> dict[str, int]:
        """Complete observations by tool."""
        return {k.tool: s.complete for k, s in self._by_key.items() if k.variant is None}

    # -- kept between runs -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict of all samples."""
        return {
            "format": _FORMAT,
            "all": self._all.to_json(),
            "tools": [[k.tool, k.variant, s.to_json()] for k, s in self._by_key.items()],
        }

    def load_json(self, data: Any) -> None:
        """Add what :meth:`to_json` wrote. Raises ValueError for anything else, with nothing added."""
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise ValueError(f"not tool durations: expected an object with format {_FORMAT!r}")
        try:
            everything = _pairs(data["all"])
            tools = [(ToolKey(str(t), None if v is None else str(v)), _pairs(s)) for t, v, s in data["tools"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"tool durations that cannot be read: {error}") from error
        self._all.load(everything)
        for key, samples in tools:
            self._samples(key).load(samples)

    def save(self, path: str | Path) -> None:
        """Write to a file, which is whole at any moment."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_text(json.dumps(self.to_json(), separators=(",", ":")), encoding="utf-8")
        part.replace(target)

    def load(self, path: str | Path) -> bool:
        """Add what a file holds; False when there is none. Raises ValueError for a file of something else."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        self.load_json(json.loads(text))
        return True

    # -- inside ----------------------------------------------------------------------------------------

    def _samples(self, key: ToolKey) -> Samples:
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = Samples(self.window, censored=self.censored)
            if len(self._by_key) > 2 * self.tools:
                self._by_key.popitem(last=False)
        else:
            self._by_key.move_to_end(key)
        return found

    def _drop(self, call_id: Hashable) -> tuple[ToolKey, float] | None:
        started = self._running.pop(call_id, None)
        if started is not None:
            tool = started[0].tool
            out = self._out[tool]
            del out[call_id]
            if not out:
                del self._out[tool]
        return started

    def _ages(self, tool: str, now: float) -> list[float]:
        """Ages of the oldest 64 calls of the tool that are out; one that started just now tells nothing."""
        out = self._out.get(tool, {})
        return [now - since for _, since in zip(range(64), out.values(), strict=False) if since < now]


def _pairs(data: Any) -> list[tuple[float, float]]:
    pairs = [(float(s), float(c)) for s, c in data]
    if any(math.isnan(s) or (s < 0 and s != -1.0) for s, _ in pairs):
        raise ValueError("a duration is negative or not a number")
    return pairs
