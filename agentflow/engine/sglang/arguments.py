"""SGLang's server arguments for this machine, for the embedded engine and as a command line.

On a CPU: the portable platform, float32, torch's own attention. With an accelerator SGLang keeps its own
choices. In both cases our radix cache, a host tier, cache reports and forced tokens are on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["POLICIES_ENV", "RADIX_CACHE", "ServerOptions", "command_line", "server_arguments"]

#: Name of our radix cache in SGLang's registry.
RADIX_CACHE = "agentflow"
#: Policies of a scheduler that starts, comma-separated, strongest first.
POLICIES_ENV = "AGENTFLOW_POLICIES"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the caller of an engine may choose.

    ``max_total_tokens`` is the size of the device pool in tokens, ``host_ratio`` that of the host tier in
    device pools (0 for no host tier). ``stock_cache`` leaves SGLang's own radix cache in place, for
    comparisons. ``extra`` holds further SGLang arguments by their Python names; they win.
    """

    model_path: str
    max_total_tokens: int | None = None
    context_length: int | None = None
    host_ratio: float = 2.0
    stock_cache: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


def server_arguments(options: ServerOptions, *, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine``. ``cpu`` says that our CPU platform runs it."""
    out: dict[str, Any] = {
        "model_path": options.model_path,
        "log_level": "error",
        "enable_cache_report": True,
        "enable_custom_logit_processor": True,
        "constrained_json_disable_any_whitespace": True,
        "sleep_on_idle": True,
        "random_seed": 0,
    }
    if options.max_total_tokens is not None:
        out["max_total_tokens"] = options.max_total_tokens
    if options.context_length is not None:
        out["context_length"] = options.context_length
    if not options.stock_cache:
        out["radix_cache_backend"] = RADIX_CACHE
    if options.host_ratio > 0:
        out |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": options.host_ratio,
            "hicache_write_policy": "write_through",
        }
    if cpu:
        out |= {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.2,
        }
        if options.host_ratio > 0:
            out |= {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
    out.update(options.extra)
    return out


def command_line(options: ServerOptions, *, cpu: bool) -> list[str]:
    """The same as flags for ``python -m sglang.launch_server``; ``host`` and ``port`` come in ``extra``."""
    flags: list[str] = []
    for name, value in server_arguments(options, cpu=cpu).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags
