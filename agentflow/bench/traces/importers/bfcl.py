"""BFCL multi-turn: the user's turns and the function calls that answer them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from agentflow.bench.traces.importers._text import BYTES_PER_TOKEN
from agentflow.bench.traces.importing import Imported, ImportReport, json_lines
from agentflow.bench.traces.jsonl import OnError
from agentflow.bench.traces.model import Span, Trace, TraceCall, TraceTool, TraceWorkflow

__all__ = ["import_bfcl"]

#: The file of each API's documentation.
DOCS = {
    "GorillaFileSystem": "gorilla_file_system",
    "VehicleControlAPI": "vehicle_control",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "MathAPI": "math_api",
}


def import_bfcl(path: str | os.PathLike[str], *, result_tokens: int = 30, on_error: OnError = "skip") -> Imported:
    """The folder with ``BFCL_v4_multi_turn_base.json``, ``possible_answer/`` and ``multi_turn_func_doc/``.

    A record is an entry. The prompt begins with the documentation of the entry's APIs; each function call of the
    answer is a call of the model, whose result is taken to have ``result_tokens``, and each turn ends with one that
    is taken to be as long. Lengths are a token per four bytes; there are no times.
    """
    folder, report = Path(path), ImportReport(on_error)
    entries = "BFCL_v4_multi_turn_base.json"
    answers = {
        d.get("id"): d.get("ground_truth")
        for _, d in json_lines(folder / "possible_answer" / entries, ImportReport("refuse"))
    }
    docs = {
        api: Span(f"bfcl.{api}", _tokens((folder / "multi_turn_func_doc" / f"{stem}.json").read_text("utf-8")))
        for api, stem in DOCS.items()
        if (folder / "multi_turn_func_doc" / f"{stem}.json").exists()
    }
    workflows = []
    for where, data in json_lines(folder / entries, report):
        try:
            workflows.append(_entry(data, answers.get(data.get("id")), docs, result_tokens))
        except (ValueError, KeyError, TypeError) as error:
            report.reject(where, f"no entry that can be read ({type(error).__name__}: {error})")
            continue
        report.used += 1
    meta = {"source": folder.name, "format": "bfcl", "result_tokens": result_tokens}
    return Imported(Trace(name="bfcl", workflows=tuple(workflows), meta=meta), report)


def _entry(data: dict[str, Any], answer: Any, docs: dict[str, Span], result_tokens: int) -> TraceWorkflow:
    name = data["id"]
    if not isinstance(answer, list) or len(answer) != len(data["question"]):
        raise ValueError("no answer to each turn")
    missing = [api for api in data["involved_classes"] if api not in docs]
    if missing:
        raise ValueError(f"no documentation of {missing[0]}")
    prompt = [docs[api] for api in sorted(data["involved_classes"])]
    calls: list[TraceCall] = []
    for turn, (question, functions) in enumerate(zip(data["question"], answer, strict=True)):
        asked = sum(_tokens(m["content"]) for m in question)
        if asked:
            prompt.append(Span(f"{name}.{turn}.user", asked))
        tools: tuple[TraceTool, ...] = ()
        for i, function in enumerate([*functions, None]):
            output = Span(f"{name}.{turn}.{i}", result_tokens if function is None else _tokens(function))
            calls.append(
                TraceCall(
                    id=f"{name}-{len(calls)}",
                    agent="assistant",
                    prompt=tuple(prompt),
                    output=(output,),
                    wait_for=(calls[-1].id,) if calls else (),
                    tools=tools,
                )
            )
            prompt.append(output)
            tools = ()
            if function is not None:
                prompt.append(Span(f"{name}.{turn}.{i}.result", result_tokens))
                tools = (TraceTool(name=function.partition("(")[0]),)
    return TraceWorkflow(id=name, calls=tuple(calls), graph="bfcl")


def _tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
