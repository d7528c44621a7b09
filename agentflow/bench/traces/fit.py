"""Measure the constants of the generators from public runs: ``python -m agentflow.bench.traces.fit DATA_DIR``.

DATA_DIR holds the folders ``mini-swe-agent``, ``kv-cache-tester``, ``lmcache-agent-trace``, ``who-and-when``,
``continuum``, ``bfcl``, ``hover`` and ``gsm8k`` as their public repositories have them. What is printed is the
source of :mod:`agentflow.bench.traces.generators.measured`.

Texts of unknown tokenizer are counted as one token per ``CHARS_PER_TOKEN`` characters.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import numpy as np

from agentflow.bench.traces.generators._draw import PROBABILITIES
from agentflow.bench.traces.importers.mini_swe_agent import phase_of

__all__ = ["CHARS_PER_TOKEN", "fit", "main", "render"]

#: The usual rule of thumb for English and code in today's tokenizers.
CHARS_PER_TOKEN = 4.0

#: A measured constant: its value and where it was measured.
Fitted = tuple[Any, str]

#: A first prompt with more tokens of its own than this, or an answer longer than this, is a session that was
#: taken up again, or one that ran into its limit.
_FRESH, _RUNAWAY = 8_000, 4_000


def fit(data: Path) -> dict[str, Fitted]:
    """All constants of ``measured.py``, by name."""
    out: dict[str, Fitted] = {}
    for part in (
        _mini_swe,
        _continuum,
        _kv_cache_tester,
        _magagent,
        _who_and_when,
        _teams,
        _bfcl,
        _hover,
        _gsm8k,
        _humaneval,
    ):
        out.update(part(data))
    return out


def render(fitted: dict[str, Fitted]) -> str:
    """The constants as Python source."""
    lines = []
    for name, (value, source) in fitted.items():
        text = pformat(value, width=100, sort_dicts=False)
        lines.append(f"#: {source}.\n{name}: Final = {text}\n")
    return "\n".join(lines)


def _quantiles(values: Iterable[float], *, digits: int = 0) -> tuple[float, ...]:
    data = np.asarray(list(values), dtype=float)
    rounded = (round(float(np.quantile(data, p)), digits) for p in PROBABILITIES)
    return tuple(int(v) if digits == 0 else v for v in rounded)


def _shares(counts: Counter[Any]) -> dict[Any, float]:
    total = sum(counts.values())
    return {k: round(n / total, 3) for k, n in sorted(counts.items(), key=lambda item: str(item[0]))}


def _tokens(text: str) -> float:
    return len(text) / CHARS_PER_TOKEN


def _lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _mini_swe(data: Path) -> dict[str, Fitted]:
    folder = data / "mini-swe-agent"
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in _lines(folder / "steps_first400.jsonl.gz"):
        runs[row["instance_id"]].append(row)
    where = "mini-swe-agent, 400 runs, table of steps"
    tasks, observations, answers, lengths, waits = [], _by_phase(), _by_phase(), _by_phase(), _by_phase()
    second: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    third: dict[tuple[str, str, bool, int], Counter[str]] = defaultdict(Counter)
    failures: dict[int, list[bool]] = defaultdict(list)
    for steps in runs.values():
        steps.sort(key=lambda r: r["step"])
        tasks.append(steps[0]["prompt_tokens"])
        for a, b in itertools.pairwise(steps):
            phase = phase_of(a["action"])
            observations[phase].append(max(1, b["prompt_tokens"] - a["prompt_tokens"] - a["completion_tokens"]))
            answers[phase].append(a["completion_tokens"])
            # The shortest gaps seen are 2 s and 8.7 ms per token written: the model's own part of a gap.
            waits[phase].append(max(0.0, b["created"] - a["created"] - 2.0 - 0.0087 * a["completion_tokens"]))
        phases: list[tuple[str, int, bool]] = []
        for step in steps[:-1]:  # the last one hands the patch in
            phase, failed = phase_of(step["action"]), bool(step["returncode"])
            if phases and phases[-1][0] == phase:
                phases[-1] = (phase, phases[-1][1] + 1, failed)
            else:
                phases.append((phase, 1, failed))
        previous, checks = "start", 0
        for i, (phase, length, failed) in enumerate(phases):
            lengths[phase].append(length)
            follower = phases[i + 1][0] if i + 1 < len(phases) else "end"
            if phase == "tester":
                checks += 1
                failures[min(checks, 3)].append(failed)
            second[previous, phase][follower] += 1
            third[previous, phase, failed and phase == "tester", min(checks, 3)][follower] += 1
            previous = phase
    fixed = [
        _tokens(t["messages"][0]["content"]) + _tokens(t["info"]["config"]["agent"]["instance_template"])
        for t in _lines(folder / "trajs_sample50.jsonl.gz")
    ]
    system = round(float(np.median(fixed)))
    per_phase: Callable[[dict[str, list[float]]], dict[str, Any]]
    per_phase = lambda d: {k: _quantiles(v) for k, v in sorted(d.items())}  # noqa: E731
    seconds = {k: _quantiles(v, digits=1) for k, v in sorted(waits.items())}
    return {
        "SWE_KINDS": (
            _shares(Counter({k: len(v) for k, v in answers.items()})),
            f"{where}: shares of reading, editing and testing commands",
        ),
        "SWE_SYSTEM_TOKENS": (system, "mini-swe-agent, 50 trajectories: system and instance template, median"),
        "SWE_TASK_TOKENS": (_quantiles(max(1, t - system) for t in tasks), f"{where}: first prompt less the templates"),
        "SWE_OBSERVATION_TOKENS": (per_phase(observations), f"{where}: growth of the prompt beyond the answer"),
        "SWE_ANSWER_TOKENS": (per_phase(answers), f"{where}: completion tokens"),
        "SWE_PHASE_STEPS": (per_phase(lengths), f"{where}: commands of one kind in a row"),
        "SWE_TOOL_SECONDS": (seconds, f"{where}: gap between answers less the model's part (2 s + 8.7 ms a token)"),
        "SWE_CHECK_FAILS": (
            {k: round(float(np.mean(v)), 3) for k, v in sorted(failures.items())},
            f"{where}: share of 1st, 2nd, later test phases whose last command failed",
        ),
        "SWE_NEXT": (
            {k: _shares(v) for k, v in sorted(second.items())},
            f"{where}: (phase before, phase) -> next phase",
        ),
        "SWE_NEXT_BY_PATH": (
            {k: _shares(v) for k, v in sorted(third.items()) if sum(v.values()) >= 20},
            f"{where}: (phase before, phase, check failed, checks so far) -> next, if 20 times",
        ),
    }


def _by_phase() -> dict[str, list[float]]:
    return {"planner": [], "coder": [], "tester": []}


def _continuum(data: Path) -> dict[str, Fitted]:
    shell: list[float] = []
    editor: list[float] = []
    for run in json.loads((data / "continuum/trace_data/test.json").read_text(encoding="utf-8")):
        for message in json.loads(run["messages"]):
            for call in message.get("tool_calls") or ():
                seconds = call.get("execution_time_seconds")
                if seconds is not None:
                    (shell if call["function"]["name"] == "bash" else editor).append(seconds)
    where = "continuum, 5 coding-agent runs, execution_time_seconds"
    return {
        "SHELL_SECONDS": (_quantiles(shell, digits=2), f"{where} of bash"),
        "EDITOR_SECONDS": (_quantiles(editor, digits=4), f"{where} of the file editor"),
    }


def _kv_cache_tester(data: Path) -> dict[str, Fitted]:
    traces = _lines(data / "kv-cache-tester/traces_sample.jsonl.gz")
    where = "kv-cache-tester, 61 coding-agent sessions"
    main: list[float] = []
    largest: list[float] = []
    growth: list[float] = []
    answers: list[float] = []
    waits: list[float] = []
    people: list[float] = []
    system: list[float] = []
    own: list[float] = []
    sub_steps: list[float] = []
    sub_system: list[float] = []
    sub_growth: list[float] = []
    kept: list[float] = []
    spawn, cuts, waves = 0, 0, Counter[int]()
    for trace in traces:
        calls = [r for r in trace["requests"] if r["type"] != "subagent"]
        subs = [r for r in trace["requests"] if r["type"] == "subagent"]
        main.append(len(calls))
        largest.append(max(r["in"] for r in calls))
        system.append(trace["tool_tokens"] + trace["system_tokens"])
        if 0 < calls[0]["in"] - system[-1] < _FRESH:
            own.append(calls[0]["in"] - system[-1])
        spawn += bool(subs)
        ends, wave = -1.0, 0
        for sub in sorted(subs, key=lambda r: r["t"]):
            if sub["t"] >= ends:
                waves[wave] += wave > 0
                wave, ends = 0, -1.0
            wave, ends = wave + 1, max(ends, _end_of(sub))
            sub_steps.append(len(sub["requests"]))
            sub_system.append(sub["tool_tokens"] + sub["system_tokens"])
            sub_growth += _growth(sub["requests"])[0]
        waves[wave] += wave > 0
        up, down = _growth(calls)
        growth += up
        cuts += len(down)
        kept += down
        for a, b in itertools.pairwise(calls):
            answers.append(a["out"])
            if b.get("think_time") is not None:
                (waits if a["stop"] == "tool_use" else people).append(b["think_time"])
    return {
        "CODING_SYSTEM_TOKENS": (_quantiles(system), f"{where}: system and tool tokens"),
        "CODING_TASK_TOKENS": (_quantiles(own), f"{where}: first prompt less system and tools, where under 8,000"),
        "CODING_STEPS": (_quantiles(main), f"{where}: requests of the main agent"),
        "CODING_OBSERVATION_TOKENS": (_quantiles(growth), f"{where}: growth of the prompt beyond the answer"),
        "CODING_ANSWER_TOKENS": (_quantiles(answers), f"{where}: output tokens"),
        "CODING_WAIT_SECONDS": (
            _quantiles(waits, digits=1),
            f"{where}: think_time after a tool call (a person's approval included)",
        ),
        "USER_SECONDS": (_quantiles(people, digits=1), f"{where}: think_time after an answer without tool call"),
        "CODING_CONDENSE": (round(cuts / (cuts + len(growth)), 5), f"{where}: share of steps that cut 30 % or more"),
        "CODING_LARGEST_PROMPT": (_quantiles(largest), f"{where}: a session's largest prompt"),
        "CODING_CONDENSED_TO": (_quantiles(kept, digits=3), f"{where}: share of the prompt left by such a cut"),
        "SUB_AGENT_SESSIONS": (round(spawn / len(traces), 3), f"{where}: share with sub-agents"),
        "SUB_AGENT_WAVES": (
            _quantiles([_waves(t) for t in traces if _waves(t)]),
            f"{where}: times that sub-agents were started, in sessions that did",
        ),
        "SUB_AGENT_FAN_OUT": (
            _shares(Counter({k: n for k, n in waves.items() if k})),
            f"{where}: sub-agents running at once",
        ),
        "SUB_AGENT_STEPS": (_quantiles(sub_steps), f"{where}: requests of a sub-agent"),
        "SUB_AGENT_SYSTEM_TOKENS": (_quantiles(sub_system), f"{where}: system and tool tokens of a sub-agent"),
        "SUB_AGENT_OBSERVATION_TOKENS": (_quantiles(sub_growth), f"{where}: growth of a sub-agent's prompt"),
    }


def _growth(calls: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Growth of the prompt beyond the answer, and the shares of a prompt that cuts by 30 % or more left."""
    up, down = [], []
    for a, b in itertools.pairwise(calls):
        if b["in"] < 0.7 * a["in"]:
            down.append(b["in"] / a["in"])
        else:
            up.append(max(1, b["in"] - a["in"] - a["out"]))
    return up, down


def _end_of(sub: dict[str, Any]) -> float:
    """When a sub-agent was done, in seconds of the session."""
    last = sub["requests"][-1]
    return float(sub["t"]) + max(float(last["t"]) + float(last.get("api_time") or 0), (sub["duration_ms"] or 0) / 1000)


def _waves(trace: dict[str, Any]) -> int:
    ends, waves = -1.0, 0
    for sub in sorted((r for r in trace["requests"] if r["type"] == "subagent"), key=lambda r: r["t"]):
        waves += sub["t"] >= ends
        ends = max(ends, _end_of(sub))
    return waves


def _magagent(data: Path) -> dict[str, Fitted]:
    """The orchestrator of this multi-agent team answers after each turn whether progress was made."""
    where = "lmcache-agent-trace, 25 magagent sessions"
    after: dict[tuple[bool, bool], list[bool]] = defaultdict(list)
    answers = []
    for path in sorted((data / "lmcache-agent-trace/magagent").glob("*.jsonl")):
        progress: list[bool] = []
        for row in sorted(_lines(path), key=lambda r: r["timestamp"]):
            answers.append(_tokens(row["output"]))
            found = re.search(r'"is_progress_being_made"\s*:\s*\{[^}]*?"answer"\s*:\s*(true|false)', row["output"])
            if found:
                progress.append(found[1] == "true")
        for two, one, now in zip([True, *progress], progress, progress[1:], strict=False):
            after[two, one].append(not now)
    return {
        "STALL": (
            {k: round(float(np.mean(v)), 3) for k, v in sorted(after.items())},
            f"{where}: (progress two turns ago, one turn ago) -> share of turns without progress",
        ),
        "TEAM_ANSWER_TOKENS": (
            _quantiles(a for a in answers if 0 < a < _RUNAWAY),
            f"{where}: output characters / 4, up to 4,000",
        ),
    }


def _who_and_when(data: Path) -> dict[str, Fitted]:
    prompts = []
    for path in sorted((data / "who-and-when").glob("*/*.json")):
        prompts += [_tokens(p) for p in json.loads(path.read_text(encoding="utf-8"))["system_prompt"].values()]
    return {"ROLE_TOKENS": (_quantiles(prompts), "who-and-when, 126 runs: characters of an agent's system prompt / 4")}


def _teams(data: Path) -> dict[str, Fitted]:
    """Who speaks after whom in a team, its experts numbered by their first word; the terminal's turns are tools."""
    following: dict[str, Counter[str]] = defaultdict(Counter)
    tasks = []
    for path in sorted((data / "who-and-when").glob("*/*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        tasks.append(_tokens(run["question"]))
        names: dict[str, str] = {}
        speakers = [m["name"] for m in run["history"] if m.get("name") != "Computer_terminal"]
        turns = [names.setdefault(s, f"expert{min(len(names) + 1, 3)}") for s in speakers]
        for a, b in itertools.pairwise(["start", *turns, "end"]):
            following[a][b] += 1
    where = "who-and-when, 126 runs"
    return {
        "TEAM_NEXT": ({a: _shares(n) for a, n in sorted(following.items())}, f"{where}: expert -> next expert"),
        "TEAM_TASK_TOKENS": (_quantiles(tasks), f"{where}: characters of a question / 4"),
    }


def _humaneval(data: Path) -> dict[str, Fitted]:
    problems = _lines(data / "humaneval/humaneval_first100.jsonl")
    where = "HumanEval (MultiPL-E), 100 tasks"
    return {
        "CODE_TASK_TOKENS": (_quantiles(_tokens(p["prompt"]) for p in problems), f"{where}: prompt / 4"),
        "CODE_TEST_TOKENS": (_quantiles(_tokens(p["test"]) for p in problems), f"{where}: tests / 4"),
    }


def _bfcl(data: Path) -> dict[str, Fitted]:
    entries = _lines(data / "bfcl/BFCL_v4_multi_turn_base.json")
    solutions = _lines(data / "bfcl/possible_answer/BFCL_v4_multi_turn_base.json")
    files = {
        "GorillaFileSystem": "gorilla_file_system",
        "VehicleControlAPI": "vehicle_control",
        "TradingBot": "trading_bot",
        "TravelAPI": "travel_booking",
        "MessageAPI": "message_api",
        "TwitterAPI": "posting_api",
        "TicketAPI": "ticket_api",
        "MathAPI": "math_api",
    }
    docs = {
        name: round((data / f"bfcl/multi_turn_func_doc/{stem}.json").stat().st_size / CHARS_PER_TOKEN)
        for name, stem in files.items()
    }
    where = "BFCL v4 multi-turn base, 200 entries"
    calls = [c for s in solutions for t in s["ground_truth"] for c in t]
    questions = [_tokens(m["content"]) for e in entries for t in e["question"] for m in t]
    return {
        "BFCL_API_TOKENS": (docs, "BFCL v4 function docs: file size in characters / 4"),
        "BFCL_API_SETS": (
            _shares(Counter(tuple(sorted(e["involved_classes"])) for e in entries)),
            f"{where}: APIs of an entry",
        ),
        "BFCL_TURNS": (_shares(Counter(len(e["question"]) for e in entries)), f"{where}: user turns"),
        "BFCL_CALLS_PER_TURN": (
            _shares(Counter(min(len(t), 6) for s in solutions for t in s["ground_truth"])),
            f"{where}: function calls of the answer to a turn (6: 6 or more)",
        ),
        "BFCL_QUESTION_TOKENS": (_quantiles(questions), f"{where}: characters of a user turn / 4"),
        "BFCL_CALL_TOKENS": (_quantiles(_tokens(c) for c in calls), f"{where}: characters of a call / 4"),
    }


def _hover(data: Path) -> dict[str, Fitted]:
    claims = json.loads((data / "hover/hover_dev_first2000.json").read_text(encoding="utf-8"))
    where = "HoVer, 2,000 dev claims"
    return {
        "HOVER_HOPS": (_shares(Counter(c["num_hops"] for c in claims)), f"{where}: hops"),
        "HOVER_CLAIM_TOKENS": (_quantiles(_tokens(c["claim"]) for c in claims), f"{where}: characters of a claim / 4"),
    }


def _gsm8k(data: Path) -> dict[str, Fitted]:
    problems = _lines(data / "gsm8k/gsm8k_test_first660.jsonl")
    where = "GSM8K, 660 test problems"
    return {
        "SUM_QUESTION_TOKENS": (_quantiles(_tokens(p["question"]) for p in problems), f"{where}: question / 4"),
        "SUM_ANSWER_TOKENS": (_quantiles(_tokens(p["answer"]) for p in problems), f"{where}: worked answer / 4"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the constants measured in the folder that the first argument names."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1 or not Path(given[0]).is_dir():
        sys.stderr.write("usage: python -m agentflow.bench.traces.fit DATA_DIR\n")
        return 2
    sys.stdout.write(render(fit(Path(given[0]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
