"""How a scheduler corrects KV: read from the control request ``configure`` or the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from agentflow.errors import UsageError

__all__ = ["CORRECTION_VARIABLE", "CorrectionOptions"]

#: Environment variable with the options to start with, as a JSON object.
CORRECTION_VARIABLE = "AGENTFLOW_CORRECTION"
#: No correction at all: every call is computed as an exact one.
NONSHARED = "nonshared"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """``method`` is a name of :data:`~agentflow.engine.sglang.correction.methods.PRESETS`, ``nonshared``, or one of
    :data:`~agentflow.cache.kvcmas.methods.METHODS`.

    ``minimum`` is the shortest run of tokens that is worth it, ``source_bytes`` bounds the caches that corrections
    start from. ``check`` is the share of corrected calls that an idle engine runs again densely, those with prompts
    of at most ``check_tokens``; with ``enforce`` edges that drift are turned off. ``faults`` is a share of estimates
    that are made to fail, for tests. ``corrector``
    holds further arguments of :class:`~agentflow.cache.kvcmas.corrector.Corrector`.
    """

    method: str = "default"
    minimum: int = 16
    source_bytes: int = 512_000_000
    check: float = 0.05
    check_tokens: int = 1024
    enforce: bool = True
    faults: float = 0.0
    corrector: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: Any) -> CorrectionOptions:
        """From a mapping or a preset's name. Raises :class:`~agentflow.errors.UsageError` for what does not exist."""
        if raw is None:
            return cls()
        if isinstance(raw, str):
            raw = {"method": raw}
        if not isinstance(raw, Mapping):
            raise UsageError(f"correction must be a method's name or an object, got {raw!r}")
        known = {f.name: f for f in fields(cls)}
        if unknown := sorted(set(raw) - set(known)):
            raise UsageError(f"correction takes no {', '.join(unknown)}; known are {', '.join(known)}")
        for name, kind, low, high in (
            ("minimum", int, 1, 1 << 30),
            ("source_bytes", int, 0, 1 << 50),
            ("check", float, 0, 1),
            ("check_tokens", int, 0, 1 << 30),
            ("faults", float, 0, 1),
        ):
            value = raw.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value <= high:
                raise UsageError(f"correction option {name} must be a number from {low} to {high}, got {value!r}")
        for name, wanted in (("method", str), ("enforce", bool), ("corrector", Mapping)):
            if name in raw and not isinstance(raw[name], wanted):
                raise UsageError(f"correction option {name} is of the wrong type: {raw[name]!r}")
        return cls(**raw)

    @classmethod
    def from_environment(cls) -> CorrectionOptions:
        """What :data:`CORRECTION_VARIABLE` says; a method's name may stand there without quotes."""
        raw = os.environ.get(CORRECTION_VARIABLE, "").strip()
        return cls.read(json.loads(raw) if raw.startswith("{") else raw or None)

    def alike(self, other: CorrectionOptions) -> bool:
        """Whether both correct in the same way: they differ in checks and faults at most."""
        return (
            replace(
                self, check=other.check, check_tokens=other.check_tokens, enforce=other.enforce, faults=other.faults
            )
            == other
        )

    @property
    def off(self) -> bool:
        """Whether nothing is corrected."""
        return self.method == NONSHARED
