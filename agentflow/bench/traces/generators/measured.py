"""Constants of the generators, each measured on public runs: printed by ``python -m agentflow.bench.traces.fit``.

Distributions are quantiles at :data:`agentflow.bench.traces.generators._draw.PROBABILITIES`.
"""

from __future__ import annotations

from typing import Final

#: mini-swe-agent, 400 runs, table of steps: shares of reading, editing and testing commands.
SWE_KINDS: Final = {"coder": 0.248, "planner": 0.497, "tester": 0.256}

#: mini-swe-agent, 50 trajectories: system and instance template, median.
SWE_SYSTEM_TOKENS: Final = 1326

#: mini-swe-agent, 400 runs, table of steps: first prompt less the templates.
SWE_TASK_TOKENS: Final = (1, 35, 157, 344, 693, 1206, 1656, 3249)

#: mini-swe-agent, 400 runs, table of steps: growth of the prompt beyond the answer.
SWE_OBSERVATION_TOKENS: Final = {
    "coder": (1, 1, 17, 17, 44, 106, 183, 445),
    "planner": (1, 5, 37, 168, 444, 1014, 2187, 3693),
    "tester": (1, 17, 46, 110, 284, 805, 1611, 3459),
}

#: mini-swe-agent, 400 runs, table of steps: completion tokens.
SWE_ANSWER_TOKENS: Final = {
    "coder": (34, 68, 190, 398, 740, 1277, 1762, 3326),
    "planner": (1, 35, 50, 88, 212, 500, 791, 2158),
    "tester": (17, 20, 24, 32, 54, 164, 360, 1140),
}

#: mini-swe-agent, 400 runs, table of steps: commands of one kind in a row.
SWE_PHASE_STEPS: Final = {
    "coder": (1, 1, 1, 1, 1, 2, 2, 4),
    "planner": (1, 1, 1, 2, 3, 6, 8, 15),
    "tester": (1, 1, 1, 1, 1, 2, 3, 5),
}

#: mini-swe-agent, 400 runs, table of steps: gap between answers less the model's part (2 s + 8.7 ms a token).
SWE_TOOL_SECONDS: Final = {
    "coder": (0.0, 0.0, 0.3, 1.4, 3.3, 7.8, 12.9, 32.3),
    "planner": (0.0, 0.0, 0.2, 0.7, 2.2, 5.3, 9.5, 26.6),
    "tester": (0.0, 0.0, 0.7, 1.2, 2.8, 6.6, 11.4, 38.6),
}

#: mini-swe-agent, 400 runs, table of steps: share of 1st, 2nd, later test phases whose last command failed.
SWE_CHECK_FAILS: Final = {1: 0.321, 2: 0.175, 3: 0.177}

#: mini-swe-agent, 400 runs, table of steps: (phase before, phase) -> next phase.
SWE_NEXT: Final = {
    ("coder", "planner"): {"coder": 0.618, "end": 0.052, "tester": 0.331},
    ("coder", "tester"): {"coder": 0.477, "end": 0.003, "planner": 0.521},
    ("planner", "coder"): {"end": 0.001, "planner": 0.385, "tester": 0.614},
    ("planner", "tester"): {"coder": 0.349, "end": 0.065, "planner": 0.587},
    ("start", "planner"): {"coder": 0.95, "tester": 0.05},
    ("start", "tester"): {"coder": 0.5, "planner": 0.5},
    ("tester", "coder"): {"end": 0.001, "planner": 0.152, "tester": 0.847},
    ("tester", "planner"): {"coder": 0.508, "end": 0.19, "tester": 0.302},
}

#: mini-swe-agent, 400 runs, table of steps: (phase before, phase, check failed, checks so far) -> next, if 20 times.
SWE_NEXT_BY_PATH: Final = {
    ("coder", "planner", False, 0): {"coder": 0.796, "end": 0.039, "tester": 0.165},
    ("coder", "planner", False, 1): {"coder": 0.653, "tester": 0.347},
    ("coder", "planner", False, 2): {"coder": 0.632, "end": 0.026, "tester": 0.342},
    ("coder", "planner", False, 3): {"coder": 0.554, "end": 0.086, "tester": 0.36},
    ("coder", "tester", False, 1): {"coder": 0.316, "planner": 0.684},
    ("coder", "tester", False, 2): {"coder": 0.484, "planner": 0.516},
    ("coder", "tester", False, 3): {"coder": 0.456, "end": 0.005, "planner": 0.539},
    ("coder", "tester", True, 1): {"coder": 0.675, "planner": 0.325},
    ("coder", "tester", True, 2): {"coder": 0.571, "planner": 0.429},
    ("coder", "tester", True, 3): {"coder": 0.606, "planner": 0.394},
    ("planner", "coder", False, 0): {"planner": 0.224, "tester": 0.776},
    ("planner", "coder", False, 1): {"planner": 0.463, "tester": 0.537},
    ("planner", "coder", False, 2): {"planner": 0.51, "tester": 0.49},
    ("planner", "coder", False, 3): {"end": 0.003, "planner": 0.415, "tester": 0.582},
    ("planner", "tester", False, 1): {"coder": 0.5, "planner": 0.5},
    ("planner", "tester", False, 2): {"coder": 0.571, "planner": 0.429},
    ("planner", "tester", False, 3): {"coder": 0.298, "end": 0.094, "planner": 0.608},
    ("planner", "tester", True, 3): {"coder": 0.363, "end": 0.008, "planner": 0.629},
    ("start", "planner", False, 0): {"coder": 0.95, "tester": 0.05},
    ("tester", "coder", False, 1): {"planner": 0.197, "tester": 0.803},
    ("tester", "coder", False, 2): {"planner": 0.146, "tester": 0.854},
    ("tester", "coder", False, 3): {"end": 0.001, "planner": 0.145, "tester": 0.854},
    ("tester", "planner", False, 1): {"coder": 0.861, "end": 0.009, "tester": 0.13},
    ("tester", "planner", False, 2): {"coder": 0.757, "tester": 0.243},
    ("tester", "planner", False, 3): {"coder": 0.399, "end": 0.256, "tester": 0.345},
}

#: continuum, 5 coding-agent runs, execution_time_seconds of bash.
SHELL_SECONDS: Final = (0.44, 0.45, 0.46, 0.49, 0.51, 0.54, 0.55, 0.6)

#: continuum, 5 coding-agent runs, execution_time_seconds of the file editor.
EDITOR_SECONDS: Final = (0.0, 0.0, 0.0003, 0.0005, 0.0007, 0.0007, 0.0008, 0.0009)

#: kv-cache-tester, 61 coding-agent sessions: system and tool tokens.
CODING_SYSTEM_TOKENS: Final = (8427, 10065, 14730, 15189, 15422, 15771, 16799, 17538)

#: kv-cache-tester, 61 coding-agent sessions: first prompt less system and tools, where under 8,000.
CODING_TASK_TOKENS: Final = (223, 478, 1258, 3224, 4362, 6253, 6875, 7055)

#: kv-cache-tester, 61 coding-agent sessions: requests of the main agent.
CODING_STEPS: Final = (3, 5, 22, 61, 129, 254, 324, 413)

#: kv-cache-tester, 61 coding-agent sessions: growth of the prompt beyond the answer.
CODING_OBSERVATION_TOKENS: Final = (1, 1, 56, 318, 1158, 3333, 6853, 17259)

#: kv-cache-tester, 61 coding-agent sessions: output tokens.
CODING_ANSWER_TOKENS: Final = (15, 100, 152, 250, 465, 881, 1463, 4398)

#: kv-cache-tester, 61 coding-agent sessions: think_time after a tool call (a person's approval included).
CODING_WAIT_SECONDS: Final = (0.0, 4.0, 6.0, 10.0, 22.0, 95.0, 175.0, 635.0)

#: kv-cache-tester, 61 coding-agent sessions: think_time after an answer without tool call.
USER_SECONDS: Final = (3.0, 10.0, 61.0, 183.0, 948.8, 3219.0, 8045.0, 34997.0)

#: kv-cache-tester, 61 coding-agent sessions: share of steps that cut 30 % or more.
CODING_CONDENSE: Final = 0.01006

#: kv-cache-tester, 61 coding-agent sessions: a session's largest prompt.
CODING_LARGEST_PROMPT: Final = (20068, 59249, 119147, 149843, 162022, 243658, 294776, 527560)

#: kv-cache-tester, 61 coding-agent sessions: share of the prompt left by such a cut.
CODING_CONDENSED_TO: Final = (0.04, 0.135, 0.231, 0.322, 0.49, 0.637, 0.676, 0.686)

#: kv-cache-tester, 61 coding-agent sessions: share with sub-agents.
SUB_AGENT_SESSIONS: Final = 0.279

#: kv-cache-tester, 61 coding-agent sessions: times that sub-agents were started, in sessions that did.
SUB_AGENT_WAVES: Final = (1, 1, 1, 2, 3, 4, 6, 8)

#: kv-cache-tester, 61 coding-agent sessions: sub-agents running at once.
SUB_AGENT_FAN_OUT: Final = {1: 0.625, 2: 0.2, 3: 0.15, 4: 0.025}

#: kv-cache-tester, 61 coding-agent sessions: requests of a sub-agent.
SUB_AGENT_STEPS: Final = (2, 4, 7, 11, 13, 17, 22, 24)

#: kv-cache-tester, 61 coding-agent sessions: system and tool tokens of a sub-agent.
SUB_AGENT_SYSTEM_TOKENS: Final = (8366, 8415, 8475, 8684, 8800, 9868, 9998, 10075)

#: kv-cache-tester, 61 coding-agent sessions: growth of a sub-agent's prompt.
SUB_AGENT_OBSERVATION_TOKENS: Final = (25, 130, 650, 2259, 5582, 12975, 22041, 62744)

#: lmcache-agent-trace, 25 magagent sessions: (progress two turns ago, one turn ago) -> share of turns without progress.
STALL: Final = {(False, False): 0.48, (False, True): 0.211, (True, False): 0.364, (True, True): 0.121}

#: lmcache-agent-trace, 25 magagent sessions: output characters / 4, up to 4,000.
TEAM_ANSWER_TOKENS: Final = (11, 43, 303, 375, 431, 514, 690, 1195)

#: who-and-when, 126 runs: characters of an agent's system prompt / 4.
ROLE_TOKENS: Final = (0, 166, 239, 723, 950, 971, 1041, 1114)

#: BFCL v4 function docs: file size in characters / 4.
BFCL_API_TOKENS: Final = {
    "GorillaFileSystem": 3488,
    "VehicleControlAPI": 4386,
    "TradingBot": 3152,
    "TravelAPI": 4245,
    "MessageAPI": 1507,
    "TwitterAPI": 2643,
    "TicketAPI": 1662,
    "MathAPI": 2290,
}

#: BFCL v4 multi-turn base, 200 entries: APIs of an entry.
BFCL_API_SETS: Final = {
    ("GorillaFileSystem", "MathAPI"): 0.06,
    ("GorillaFileSystem", "MessageAPI"): 0.04,
    ("GorillaFileSystem", "TicketAPI"): 0.025,
    ("GorillaFileSystem", "TwitterAPI"): 0.06,
    ("GorillaFileSystem",): 0.065,
    ("MathAPI", "TradingBot"): 0.025,
    ("MathAPI", "TravelAPI"): 0.01,
    ("MathAPI", "VehicleControlAPI"): 0.03,
    ("MessageAPI", "TradingBot"): 0.065,
    ("MessageAPI", "TravelAPI"): 0.05,
    ("MessageAPI", "VehicleControlAPI"): 0.045,
    ("TicketAPI", "TradingBot"): 0.045,
    ("TicketAPI", "TravelAPI"): 0.075,
    ("TicketAPI", "VehicleControlAPI"): 0.01,
    ("TradingBot", "TwitterAPI"): 0.015,
    ("TradingBot",): 0.1,
    ("TravelAPI", "TwitterAPI"): 0.05,
    ("TravelAPI",): 0.065,
    ("TwitterAPI", "VehicleControlAPI"): 0.07,
    ("VehicleControlAPI",): 0.095,
}

#: BFCL v4 multi-turn base, 200 entries: user turns.
BFCL_TURNS: Final = {1: 0.015, 2: 0.2, 3: 0.25, 4: 0.25, 5: 0.215, 6: 0.06, 7: 0.01}

#: BFCL v4 multi-turn base, 200 entries: function calls of the answer to a turn (6: 6 or more).
BFCL_CALLS_PER_TURN: Final = {0: 0.004, 1: 0.646, 2: 0.213, 3: 0.091, 4: 0.027, 5: 0.015, 6: 0.004}

#: BFCL v4 multi-turn base, 200 entries: characters of a user turn / 4.
BFCL_QUESTION_TOKENS: Final = (4, 16, 30, 41, 56, 78, 92, 119)

#: BFCL v4 multi-turn base, 200 entries: characters of a call / 4.
BFCL_CALL_TOKENS: Final = (1, 4, 7, 10, 18, 27, 36, 46)

#: HoVer, 2,000 dev claims: hops.
HOVER_HOPS: Final = {2: 0.256, 3: 0.448, 4: 0.296}

#: HoVer, 2,000 dev claims: characters of a claim / 4.
HOVER_CLAIM_TOKENS: Final = (8, 18, 28, 35, 44, 53, 61, 78)

#: GSM8K, 660 test problems: question / 4.
SUM_QUESTION_TOKENS: Final = (18, 29, 42, 56, 72, 89, 100, 132)

#: GSM8K, 660 test problems: worked answer / 4.
SUM_ANSWER_TOKENS: Final = (15, 26, 46, 66, 91, 119, 137, 171)

#: who-and-when, 126 runs: expert -> next expert.
TEAM_NEXT: Final = {
    "expert1": {"end": 0.128, "expert1": 0.348, "expert2": 0.44, "expert3": 0.084},
    "expert2": {"end": 0.135, "expert1": 0.282, "expert2": 0.234, "expert3": 0.349},
    "expert3": {"end": 0.256, "expert1": 0.244, "expert2": 0.176, "expert3": 0.324},
    "start": {"expert1": 1.0},
}

#: who-and-when, 126 runs: characters of a question / 4.
TEAM_TASK_TOKENS: Final = (19, 23, 33, 50, 69, 121, 168, 312)

#: HumanEval (MultiPL-E), 100 tasks: prompt / 4.
CODE_TASK_TOKENS: Final = (30, 44, 77, 112, 153, 210, 252, 330)

#: HumanEval (MultiPL-E), 100 tasks: tests / 4.
CODE_TEST_TOKENS: Final = (37, 51, 66, 94, 119, 156, 171, 280)
