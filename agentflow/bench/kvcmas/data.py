"""Prompts of the experiment: four agents, two shared slots, items out of gsm8k and HumanEval.

A prompt of an agent is ``[its own instructions] [question] [its own glue] [answer] [its own closing]``. The question
is shared behind a prefix that never changes, the answer behind one that changes with the question.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentflow.errors import UsageError

__all__ = ["AGENTS", "Agent", "Item", "SLOTS", "load_items", "near_duplicate"]

SLOTS = ("question", "answer")


@dataclass(frozen=True, slots=True)
class Agent:
    """What an agent says around the shared segments."""

    name: str
    instructions: str
    glue: str
    closing: str


@dataclass(frozen=True, slots=True)
class Item:
    """A question and an answer to it that some agent gave."""

    name: str
    question: str
    answer: str


AGENTS = (
    Agent(
        "planner",
        "You are the planner of a small team that solves tasks step by step. Read the task that the user brings and"
        " lay out a short plan for the others. Name what is given, what is asked, and which steps lead from one to"
        " the other. Do not carry out the steps yourself and do not guess a result; the solver does that after"
        " you. If something is missing from the task, say so in one sentence at the top of the plan.",
        "\n\nA colleague already worked on it and wrote:\n\n",
        "\n\nPlan:\n",
    ),
    Agent(
        "solver",
        "Role: solver. You get a task, sometimes with notes of colleagues. Work it out in full: show each"
        " calculation on its own line, or write complete Python when code is wanted. Keep your text short, never"
        " leave a step out, and finish with the result on the last line. A tester reads your work next and will"
        " run it, so it has to stand on its own. Units belong to every number. When the notes are wrong, say where"
        " and go your own way.",
        "\n\nNotes so far (they may contain errors):\n\n",
        "\n\nSolution:\n",
    ),
    Agent(
        "tester",
        "As the tester in this group, your job is to doubt. You look at the task and at what was proposed, try small"
        " cases and edge cases, and report every place where the two do not fit. You do not repair anything. Be"
        " concrete: give the input, what should come out, and what would come out instead.",
        "\n\nThe proposal under test:\n\n",
        "\n\nReport:\n",
    ),
    Agent(
        "reflector",
        "You are an experienced reviewer who has the last word. From the task and the discussion below, decide what"
        " the final answer is. Weigh the arguments, settle contradictions, and correct mistakes that the others"
        " made. Your answer goes to the user directly: it must be complete, correct, polite and free of references"
        " to the discussion. Do not mention the names of team members or that there was a team at all. Think about"
        " what the user needs to know and leave out the rest. Mathematical results are given with their unit, code"
        " as one block that runs as it is, and choices by their letter.",
        "\n\nDiscussion:\n\n",
        "\n\nFinal answer:\n",
    ),
)


def load_items(folder: Path, count: int, *, seed: int = 0, longest: int = 800) -> list[Item]:
    """``count`` items: every third from HumanEval while there are any, the others from gsm8k, each in random order.

    A longer list begins with the shorter one. Items of more than ``longest`` characters, question and answer together,
    are left out, which bounds the run time. Raises UsageError when the files are not there or hold too little.
    """
    maths, code = folder / "gsm8k" / "gsm8k_test_first660.jsonl", folder / "humaneval" / "humaneval_first100.jsonl"
    for path in (maths, code):
        if not path.is_file():
            raise UsageError(f"the experiment reads {path}, which is not there: give the folder that holds it (--data)")
    pick = random.Random(seed)
    problems = [_problem(n, json.loads(line)) for n, line in enumerate(maths.read_text("utf-8").splitlines())]
    tasks = [_task(json.loads(line)) for line in code.read_text("utf-8").splitlines()]
    problems, tasks = ([i for i in kind if len(i.question) + len(i.answer) <= longest] for kind in (problems, tasks))
    pick.shuffle(problems)
    pick.shuffle(tasks)
    if count > len(problems) + len(tasks):
        raise UsageError(f"{count} items asked for; there are {len(problems)} problems and {len(tasks)} coding tasks")
    items: list[Item] = []
    while len(items) < count:
        kind = tasks if (len(items) % 3 == 2 and tasks) or not problems else problems
        items.append(kind.pop())
    return items


def near_duplicate(text: str, *, seed: int = 0) -> str:
    """The text with its numbers changed and, without numbers, one word in twelve replaced by another of its words."""
    pick = random.Random(seed)
    changed = re.sub(r"\d+", lambda m: str(int(m.group()) + pick.randint(1, 9)), text)
    if changed != text:
        return changed
    words = text.split(" ")
    for n in range(0, len(words), 12):
        words[n] = pick.choice(words)
    return " ".join(words)


def _problem(number: int, found: dict[str, str]) -> Item:
    """A gsm8k answer without the marks of its calculator."""
    answer = re.sub(r"<<.*?>>", "", found["answer"]).replace("#### ", "The answer is ")
    return Item(f"gsm8k-{number}", found["question"], answer)


def _task(found: dict[str, str]) -> Item:
    """HumanEval's answer is what a tester would write: some of the task's own tests."""
    lines: Sequence[str] = found["test"].strip().splitlines()
    shown = [line for line in lines if "assert" in line][:6]
    answer = f"Tests for {found['entry_point']}:\ndef check(candidate):\n" + "\n".join(shown)
    return Item(found["name"], "Complete this function:\n" + found["prompt"].rstrip(), answer)
