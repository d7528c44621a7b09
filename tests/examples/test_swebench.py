"""The SWE-bench example: its tasks, its scorer, its sandbox, and the agents' road with a scripted model."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentflow.engine.base import Call
from agentflow.engine.scripted import Answer, ScriptedEngine, tool_call
from agentflow.errors import EngineDied, UsageError
from agentflow.events import ToolEnded
from agentflow.tools import ToolExecutor
from examples.swebench.__main__ import main
from examples.swebench.instance import Instance, load_file, load_own
from examples.swebench.run import Limits, Solved, agents_solver, no_patch, oracle, predict, score
from examples.swebench.sandbox import run_command
from examples.swebench.scoring import judge, score_patch, summarise
from examples.swebench.tools import make_tools
from examples.swebench.workspace import Workspace, open_workspace

OWN = {i.instance_id: i for i in load_own()}
SPANS = OWN["smallrepos__spans-8"]
LITE = Path(__file__).parents[2].parent / "shared" / "data" / "swe-bench-lite" / "swe_bench_lite_first200.jsonl"

LOOK = tool_call("bash", command="cat spans/core.py")
SORT = tool_call(
    "edit",
    path="spans/core.py",
    old="    for start, end in spans:\n        if start > end:",
    new="    for start, end in sorted(spans):\n        if start > end:",
)
LONGEST = tool_call(
    "edit",
    path="spans/core.py",
    old="(min(start, merged[-1][0]), end)",
    new="(merged[-1][0], max(end, merged[-1][1]))",
)
ACCEPT = {"decision": "accept", "feedback": "good"}
REVISE = {"decision": "revise", "feedback": "a span inside another one is still cut"}


@pytest.fixture
async def workspace() -> AsyncIterator[Workspace]:
    async with open_workspace(SPANS) as made:
        yield made


# ---------------------------------------------------------------- tasks and scoring


def test_there_are_tasks_with_all_fields() -> None:
    assert len(OWN) >= 5
    for instance in OWN.values():
        row = instance.to_json()
        assert all(row[k] for k in row if k != "hints_text"), instance.instance_id
        assert json.loads(row["FAIL_TO_PASS"])


@pytest.mark.parametrize("instance", OWN.values(), ids=OWN)
async def test_base_commits_are_what_the_files_give(instance: Instance) -> None:
    async with open_workspace(instance) as made:
        assert made.base == instance.base_commit
        assert await made.diff() == ""


async def test_the_oracle_resolves_every_task_and_nothing_resolves_none() -> None:
    instances = list(OWN.values())
    for solver, expected in ((oracle, len(instances)), (no_patch, 0)):
        made = await predict(instances, solver, model="m", concurrency=2)
        patches = {r["instance_id"]: r["model_patch"] for r in made.batch.records}
        scores, errors = await score(instances, patches, concurrency=2)
        assert not errors
        summary = summarise(scores, total=len(instances))
        assert (summary["resolved"], summary["tasks"]) == (expected, len(instances)), scores


def outcomes(**changes: str) -> dict[str, str]:
    tests = [*SPANS.fail_to_pass, *SPANS.pass_to_pass]
    return {t: changes.get(t.split("::")[1], "passed") for t in tests}


@pytest.mark.parametrize(
    ("changes", "resolved"),
    [
        ({}, True),
        ({"test_order_does_not_matter": "failed"}, False),
        ({"test_order_does_not_matter": "skipped"}, False),
        ({"test_order_does_not_matter": "error"}, False),
        ({"test_order_does_not_matter": "xfailed"}, True),
        ({"test_gaps": "failed"}, False),
        ({"test_gaps": "error"}, False),
        ({"test_gaps": "skipped"}, True),
        ({"test_gaps": "xpassed"}, False),
    ],
)
def test_the_rule(changes: dict[str, str], resolved: bool) -> None:
    assert judge(SPANS, outcomes(**changes)).resolved is resolved


def test_tests_that_did_not_run_count_as_failed() -> None:
    some = outcomes()
    del some[SPANS.pass_to_pass[0]]
    assert not judge(SPANS, some).resolved
    assert judge(SPANS, {}).fixed == 0


def test_tasks_without_patch_stay_in_the_denominator() -> None:
    scores = [{"resolved": True, "why": "resolved"}, {"resolved": False, "why": "empty patch"}]
    assert summarise(scores, total=4)["resolved_share"] == 0.25
    assert summarise([], total=0)["resolved_share"] == 0.0


async def test_a_patch_that_breaks_other_tests_is_not_resolved() -> None:
    async with open_workspace(SPANS) as made:
        assert await made.apply(SPANS.patch)
        file = made.resolve("spans/core.py")
        file.write_text(file.read_text() + "\n\ndef gaps(spans):\n    return []\n")
        got = await score_patch(SPANS, await made.diff())
    assert (got.resolved, got.fixed, got.broken) == (False, 2, ("tests/test_spans.py::test_gaps",))


async def test_patches_cannot_change_the_tests_that_judge_them() -> None:
    async with open_workspace(SPANS) as made:
        made.resolve("tests/test_spans.py").write_text("def test_order_does_not_matter():\n    pass\n")
        cheat = await made.diff()
    got = await score_patch(SPANS, cheat)
    assert (got.resolved, got.fixed, got.broken) == (False, 0, ())


async def test_patches_that_do_not_apply_or_hang_are_scored() -> None:
    assert (await score_patch(SPANS, "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")).why == "the patch does not apply"
    assert (await score_patch(SPANS, "  \n")).why == "empty patch"
    async with open_workspace(SPANS) as made:
        made.resolve("spans/core.py").write_text("while True:\n    pass\n")
        hang = await made.diff()
    assert "longer than 2 seconds" in (await score_patch(SPANS, hang, time_limit=2)).why


# ---------------------------------------------------------------- public format


def test_lists_of_tests_may_be_json_strings(tmp_path: Path) -> None:
    rows = [SPANS.to_json(), {**SPANS.to_json(), "FAIL_TO_PASS": list(SPANS.fail_to_pass), "hints_text": None}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    for name in ("a.json", "a.jsonl"):
        first, second = load_file(tmp_path / name)
        assert first.fail_to_pass == second.fail_to_pass == SPANS.fail_to_pass
        assert first.problem_statement == SPANS.problem_statement
        assert not first.scorable


@pytest.mark.parametrize("text", ["{", "[1]", '[{"instance_id": "x"}]', '[{"FAIL_TO_PASS": "["}]', ""])
def test_bad_files_are_refused_or_empty(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    if text:
        with pytest.raises(UsageError, match=r"bad\.json"):
            load_file(file)
    else:
        assert load_file(file) == []
    with pytest.raises(UsageError, match="cannot read"):
        load_file(tmp_path / "missing.json")


@pytest.mark.skipif(not LITE.exists(), reason="the public data set is not here")
def test_the_public_data_set_loads() -> None:
    instances = load_file(LITE)
    assert len(instances) == 200
    assert len({i.instance_id for i in instances}) == 200
    assert all(i.patch.startswith("diff --git") and i.problem_statement for i in instances)


async def test_public_tasks_are_solved_on_clones(tmp_path: Path) -> None:
    async with open_workspace(SPANS) as made:
        await made.run(["git", "clone", "--quiet", ".", str(tmp_path / "smallrepos__spans")])
        base = made.base
    (tmp_path / "tasks.json").write_text(json.dumps([{**SPANS.to_json(), "base_commit": base}]))
    (instance,) = load_file(tmp_path / "tasks.json")
    async with open_workspace(instance, repos=tmp_path) as made:
        assert "spans/core.py" in await made.files()
        assert await made.apply(instance.patch)
        assert "+    for start, end in sorted(spans):" in await made.diff()
    with pytest.raises(UsageError, match="smallrepos__spans"):
        async with open_workspace(instance):
            pass


# ---------------------------------------------------------------- sandbox and tools


async def test_output_exit_code_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    done = await run_command(["bash", "-c", "echo out; echo err >&2; env; pwd; exit 3"], tmp_path)
    assert done.code == 3
    assert "out" in done.output
    assert "err" in done.output
    assert "SECRET_TOKEN" not in done.output
    assert f"HOME={tmp_path}" in done.output


async def test_a_command_over_its_time_limit_dies_with_its_children(tmp_path: Path) -> None:
    done = await run_command(
        ["bash", "-c", "sleep 1000 & echo $! > child; echo begun; sleep 1000"], tmp_path, time_limit=2
    )
    assert done.timed_out
    assert "begun" in done.output
    await gone(int((tmp_path / "child").read_text()))


async def test_children_left_behind_die_with_their_parent_and_hold_nothing_up(tmp_path: Path) -> None:
    done = await asyncio.wait_for(run_command(["bash", "-c", "sleep 1000 & echo $!"], tmp_path, time_limit=30), 20)
    assert done.code == 0
    await gone(int(done.output))


async def test_cancelling_kills_the_command(tmp_path: Path) -> None:
    pipe = tmp_path / "pid"
    running = asyncio.create_task(
        run_command(["bash", "-c", f"echo $$ > {pipe}.new; mv {pipe}.new {pipe}; sleep 1000"], tmp_path)
    )
    await until(pipe.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(int(pipe.read_text()))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not happen within ten seconds")


def ended(pid: int) -> bool:
    """Whether a process is gone, or killed and not yet collected by its new parent."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()[:1] in ("", "Z")


async def gone(pid: int) -> None:
    try:
        await until(lambda: ended(pid))
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


async def test_output_is_clipped_to_head_and_tail(tmp_path: Path) -> None:
    done = await run_command(
        ["bash", "-c", "printf HEAD; head -c 300000 /dev/zero | tr '\\0' x; printf TAIL"], tmp_path
    )
    assert done.output.startswith("HEADx")
    assert done.output.endswith("xTAIL")
    assert len(done.output) < 10_100
    done = await run_command(["bash", "-c", "printf HEAD; head -c 30000 /dev/zero | tr '\\0' x; printf TAIL"], tmp_path)
    assert "20008 characters left out" in done.output
    done = await run_command(["bash", "-c", "yes"], tmp_path, time_limit=20)
    assert done.code != 0
    assert not done.timed_out, "the limit on file size ends endless output"


async def call(workspace: Workspace, name: str, *, seconds: float = 30, **args: Any) -> str:
    executor = ToolExecutor(make_tools(workspace, command_seconds=seconds))
    (answer,) = await executor.arun([{"name": name, "args": args, "id": "1", "type": "tool_call"}])
    return str(answer.content)


async def test_bash_and_edit(workspace: Workspace) -> None:
    assert await call(workspace, "bash", command="ls; exit 4") == "README.md\nspans\ntests\n\n[exit code 4]"
    assert "longer than 0.5 seconds" in await call(workspace, "bash", seconds=0.5, command="sleep 100")
    assert (
        await call(workspace, "edit", path="spans/core.py", old="merged = []", new="merged = list()")
        == "changed spans/core.py"
    )
    assert await call(workspace, "edit", path="new/a.txt", old="", new="hello") == "made new/a.txt"
    assert "occurs 0 times" in await call(workspace, "edit", path="spans/core.py", old="no such text", new="x")
    assert "occurs" in await call(workspace, "edit", path="spans/core.py", old="spans", new="x")
    assert "exists already" in await call(workspace, "edit", path="new/a.txt", old="", new="x")
    assert "no file" in await call(workspace, "edit", path="new/b.txt", old="a", new="x")
    patch = await workspace.diff()
    assert "+hello" in patch
    assert "+    merged = list()" in patch


@pytest.mark.parametrize("path", ["../out.txt", "/etc/passwd", ".git/config", "link/x", "."])
async def test_edit_stays_inside_the_repository(workspace: Workspace, tmp_path: Path, path: str) -> None:
    (workspace.root / "link").symlink_to(tmp_path)
    assert "nothing was changed" in await call(workspace, "edit", path=path, old="", new="x")
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- the agents


def scripted(**scripts: Any) -> ScriptedEngine:
    return ScriptedEngine({"planner": ["Sort the spans in merge()."], **scripts})


async def test_the_agents_repair_a_task_at_the_second_attempt() -> None:
    engine = scripted(
        coder=[LOOK, SORT, "Sorted them.", LONGEST, "Kept the longer end."],
        tester=[REVISE, ACCEPT],
    )
    made = await predict([SPANS], agents_solver(engine, Limits()), model="scripted")
    engine.assert_consumed()
    assert made.batch.errors == {}
    done = made.solved[SPANS.instance_id]
    assert (done.attempts, done.stopped) == (2, "")
    assert (await score_patch(SPANS, done.patch)).resolved

    rows = {row.agent: row for row in done.rows}
    assert {name: row.calls for name, row in rows.items()} == {"planner": 1, "coder": 5, "tester": 2}
    assert rows["coder"].tool_calls == 3
    assert rows["coder"].tool_seconds > 0
    ended = [e for e in engine.events if isinstance(e, ToolEnded)]
    assert [(e.agent, e.tool, e.outcome) for e in ended] == [
        ("coder", "bash", "ok"),
        ("coder", "edit", "ok"),
        ("coder", "edit", "ok"),
    ]
    prompts = [engine.prompt(c) for c in engine.calls_of("coder")]
    assert "def merge(spans)" in prompts[1]
    assert REVISE["feedback"] in prompts[3]
    testers = [engine.prompt(c) for c in engine.calls_of("tester")]
    assert "+    for start, end in sorted(spans):" in testers[0]
    assert "5 passed" in testers[0]


async def test_a_coders_prompt_only_grows_at_its_end() -> None:
    engine = scripted(coder=[LOOK, "Looked.", SORT, "Sorted."], tester=[REVISE, ACCEPT])
    await predict([SPANS], agents_solver(engine, Limits()), model="scripted")
    prompts = [list(c.token_ids) for c in engine.calls_of("coder")]
    for before, after in itertools.pairwise(prompts):
        same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        assert same >= len(before) - 8  # the generation prompt at the end may differ


async def test_attempts_are_bounded_and_the_last_patch_is_kept() -> None:
    engine = scripted(coder=[SORT, "Sorted.", "Nothing more."], tester=[REVISE, REVISE])
    done = await agents_solver(engine, Limits(attempts=2))(SPANS)
    engine.assert_consumed()
    assert done.attempts == 2
    assert "sorted(spans)" in done.patch
    assert not (await score_patch(SPANS, done.patch)).resolved


async def test_a_coder_that_repeats_one_call_for_ever_is_bounded() -> None:
    engine = scripted(coder=lambda call: LOOK, tester=lambda call: REVISE)
    done = await agents_solver(engine, Limits(attempts=2, rounds=3))(SPANS)
    assert done.attempts == 2
    assert done.patch == ""
    assert len(engine.calls_of("coder")) <= 2 * (3 + 1)


async def test_a_full_context_ends_the_task_and_keeps_the_changes() -> None:
    engine = ScriptedEngine({"planner": ["Sort."], "coder": [SORT, *[LOOK] * 50]}, context_length=2400)
    done = await agents_solver(engine, Limits(rounds=50))(SPANS)
    assert done.stopped.startswith("PromptTooLong")
    assert "sorted(spans)" in done.patch
    assert {row.agent for row in done.rows} == {"planner", "coder"}


async def test_the_time_limit_ends_the_task_and_keeps_the_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[float | None, asyncio.Timeout] = {}
    plain_timeout = asyncio.timeout

    def noted(seconds: float | None) -> asyncio.Timeout:
        limits[seconds] = plain_timeout(seconds)
        return limits[seconds]

    monkeypatch.setattr("asyncio.timeout", noted)
    answers = iter([SORT, Answer(text="never", delay=1000)])

    def coder(call: Call) -> Any:
        answer = next(answers)
        if answer is not SORT:
            limits[500].reschedule(asyncio.get_running_loop().time())  # the task's limit passes now
        return answer

    engine = scripted(coder=coder)
    done = await agents_solver(engine, Limits(task_seconds=500))(SPANS)
    assert done.stopped == "stopped after 500 seconds"
    assert "sorted(spans)" in done.patch
    assert {row.agent for row in done.rows} == {"planner", "coder"}
    assert engine.stats().running == 0


async def test_several_tasks_run_at_once_without_mixing() -> None:
    def planner(call: Call) -> str:
        return f"plan for {call.at.workflow}"

    def coder(call: Call) -> Any:
        prompt = engine.prompt(call)
        assert f"plan for {call.at.workflow}" in prompt
        if "made note.txt" in prompt:
            return "done"
        return tool_call("edit", path="note.txt", old="", new=str(call.at.workflow))

    engine = ScriptedEngine({"planner": planner, "coder": coder, "tester": lambda call: ACCEPT})
    made = await predict(list(OWN.values()), agents_solver(engine, Limits()), model="scripted", concurrency=4)
    assert made.batch.errors == {}
    for name, done in made.solved.items():
        assert f"+swebench-{name}" in done.patch


# ---------------------------------------------------------------- predictions and the command line


def counting(solved: list[str], fail_at: str = "") -> Callable[[Instance], Any]:
    async def solver(instance: Instance) -> Solved:
        solved.append(instance.instance_id)
        if instance.instance_id == fail_at:
            raise EngineDied("gone")
        return Solved(instance.patch)

    return solver


async def test_predictions_resume_after_a_crash(tmp_path: Path) -> None:
    file, instances = tmp_path / "predictions.jsonl", list(OWN.values())
    solved: list[str] = []
    with pytest.raises(EngineDied):
        await predict(instances, counting(solved, instances[2].instance_id), model="m", file=file, concurrency=1)
    kept = [json.loads(line)["instance_id"] for line in file.read_text().splitlines()]
    assert kept[:2] == [i.instance_id for i in instances[:2]]
    assert instances[2].instance_id not in kept
    with file.open("a") as out:
        out.write('{"instance_id": "cut off')
    solved.clear()
    made = await predict(instances, counting(solved), model="m", file=file, concurrency=1)
    assert made.batch.resumed == len(kept)
    assert solved == [i.instance_id for i in instances if i.instance_id not in kept]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [set(r) for r in rows] == [{"instance_id", "model_name_or_path", "model_patch"}] * len(instances)
    with pytest.raises(UsageError, match="predictions of m"):
        await predict(instances, counting(solved), model="other", file=file)


def test_the_command_line_with_the_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    assert main(["--solver", "oracle", "--record", str(tmp_path / "trace.jsonl")]) == 2
    assert "--record records what an engine does" in capsys.readouterr().err
    assert main(["--solver", "oracle", "--tasks", "2", "--json", "--predictions", str(file)]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert shown.err == ""
    assert result["scores"] == {"tasks": 2, "scored": 2, "resolved": 2, "empty_patches": 0, "resolved_share": 1.0}
    assert main(["--solver", "oracle", "--tasks", "2", "--predictions", str(file)]) == 0
    assert "Resolved 2 of 2" in capsys.readouterr().out


def test_the_command_line_refuses_nonsense(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--tasks", "0"]) == 2
    assert "--tasks must be at least 1" in capsys.readouterr().err
    assert main(["--instances", str(tmp_path / "none.json"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"


@pytest.mark.skipif(not LITE.exists(), reason="the public data set is not here")
def test_public_tasks_are_predicted_but_not_scored_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--instances", str(LITE), "--tasks", "3", "--solver", "oracle", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["not_scored"] == 3
    assert [i["resolved"] for i in result["instances"]] == [None] * 3
