"""The call graph: which agents there are, what follows what, and what is known of an agent beyond its name.

No agent has an id of its own in the features, so that one never seen before is described like all others: by its
name, its place in the graph and how much it is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from agentflow.cache.pbkv.forecast import END, Hidden
from agentflow.cache.pbkv.names import AGENTS, Names

__all__ = ["FEATURES", "LIMIT", "CallGraph", "Run", "hashed_text"]

Floats = npt.NDArray[np.float32]

#: Agents that a graph holds at most.
LIMIT = AGENTS
#: Places for hashed pieces of the name, and of the instructions.
NAME, INSTRUCTIONS = 48, 16
#: Length of an agent's features: the two above, and nine numbers.
FEATURES = NAME + INSTRUCTIONS + 9
#: Characters of instructions that are read.
_READ = 2_000
#: Distances that a file may hold.
_FARTHEST = 16


def hashed_text(text: str, places: int) -> Floats:
    """The text's words and runs of three characters, hashed into ``places`` signed counts of length 1."""
    out = np.zeros(places, np.float32)
    plain = "".join(c.lower() if c.isalnum() else " " for c in text[:_READ])
    words = plain.split()
    padded = f" {' '.join(words)} "
    for piece in [*words, *(padded[i : i + 3] for i in range(len(padded) - 2))]:
        code = zlib.crc32(piece.encode("utf-8", "surrogatepass"))
        out[(code >> 1) % places] += 1.0 if code & 1 else -1.0
    norm = float(np.linalg.norm(out))
    return out / norm if norm else out


@dataclass(frozen=True, slots=True)
class Run:
    """A workflow that is over: its agents in the order of their calls.

    ``hidden`` holds, per call, the hidden state of its prompt's last token, where it was recorded; ``sizes`` the
    tokens that it read and wrote.
    """

    agents: tuple[str, ...]
    hidden: tuple[Hidden | None, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()


class CallGraph:
    """Counts of transitions between agents, with the edges of static graphs as a prior, and features of agents.

    ``counts[a, b]`` counts ``b`` after ``a``, ``counts[a, LIMIT]`` workflows that were over after ``a``. At most
    ``LIMIT`` agents are held; for a new one that unseen for longest is forgotten. ``far[d]`` counts what came ``d + 2``
    steps later. ``version`` grows with every new agent or edge. One owner, one thread.
    """

    def __init__(self, *, distances: int = 3) -> None:
        self.agents = Names(LIMIT)
        self.version = 0
        self.counts = np.zeros((LIMIT, LIMIT + 1), np.float32)
        self.far = np.zeros((distances, LIMIT, LIMIT), np.float32)
        self.edges = np.zeros((LIMIT, LIMIT + 1), bool)
        self._texts = np.zeros((LIMIT, NAME + INSTRUCTIONS), np.float32)
        self._sizes = np.zeros((LIMIT, 3))  # calls, tokens read, tokens written

    def __len__(self) -> int:
        return len(self.agents)

    @property
    def names(self) -> list[str]:
        """The agents by number."""
        return self.agents.names

    def number(self, agent: str) -> int:
        """The agent's number. A new agent gets one, that of the agent unseen for longest where there is no room."""
        number, new = self.agents.see(agent)
        if new:
            self.counts[number] = self.counts[:LIMIT, number] = 0.0
            self.far[:, number] = self.far[:, :, number] = 0.0
            self.edges[number] = self.edges[:LIMIT, number] = False
            self._texts[number, :NAME], self._texts[number, NAME:] = hashed_text(agent, NAME), 0.0
            self._sizes[number] = 0.0
            self.version += 1
        return number

    def find(self, agent: str, *, add: bool = True) -> int:
        """The agent's number; -1 when it has none, and there is no room or it is not to ``add`` it."""
        found = self.agents.find(agent)
        if found is None:
            return self.number(agent) if add and self.agents.room else -1
        return found

    def describe(self, agent: str, instructions: str) -> None:
        """Give the agent's instructions, of which the features then speak too."""
        self._texts[self.number(agent), NAME:] = hashed_text(instructions, INSTRUCTIONS)
        self.version += 1

    def prior(self, agent: str, following: Iterable[str], *, displace: bool = True) -> None:
        """The static graph lets ``following`` come after ``agent``; nothing, or :data:`END`, is the end.

        Unless they may ``displace`` others, agents for which there is no room are left out.
        """
        of = self.number if displace else self.find
        for follower in list(following) or [END]:
            number, target = of(agent), LIMIT if follower == END else of(follower)
            if number >= 0 and target >= 0 and not self.edges[number, target]:
                self.edges[number, target] = True
                self.version += 1

    def learn(self, path: Sequence[str], following: str, amount: float = 1.0) -> None:
        """After ``path`` came ``following``; a negative ``amount`` takes it back."""
        if not path:
            return
        of = self.number if amount > 0 else partial(self.find, add=False)
        target, source = LIMIT if following == END else of(following), of(path[-1])
        if source < 0 or target < 0:
            return
        if amount > 0 and self.counts[source, target] == 0:
            self.version += 1
        self.counts[source, target] = max(0.0, self.counts[source, target] + amount)
        if target < LIMIT:
            for d, earlier in enumerate(reversed(path[-1 - len(self.far) : -1])):
                before = self.find(earlier, add=amount > 0)
                if before >= 0:
                    self.far[d, before, target] = max(0.0, self.far[d, before, target] + amount)

    def learn_run(self, path: Sequence[str], amount: float = 1.0) -> None:
        """A whole workflow, over after the last agent of ``path``."""
        for i, agent in enumerate(path):
            self.learn(path[max(0, i - len(self.far) - 1) : i], agent, amount)
        self.learn(path, END, amount)

    def sized(self, agent: str, prompt: int, output: int) -> None:
        """A call of the agent read ``prompt`` tokens and wrote ``output``."""
        self._sizes[self.number(agent)] += (1.0, prompt, output)

    @property
    def known(self) -> npt.NDArray[np.bool_]:
        """Which agents were seen, or are in a static graph; the others are mere names."""
        n = len(self.names)
        flow, edges = self.counts[:n], self.edges[:n]
        found: npt.NDArray[np.bool_] = (
            (flow.sum(1) > 0) | (self.counts[:n, :n].sum(0) > 0) | edges.any(1) | self.edges[:n, :n].any(0)
        )
        return found

    def transitions(self, *, prior: float = 1.0, smoothing: float = 0.5) -> npt.NDArray[np.float64]:
        """A stochastic matrix of ``len + 1`` states, the last of which is the end.

        A row mixes the counts with ``prior`` pseudo-counts spread over the agent's static edges, and with
        ``smoothing`` of what follows agents in general.
        """
        n = len(self.names)
        counts = np.zeros((n + 1, n + 1))
        edges = np.zeros((n, n + 1))
        counts[:n, :n], counts[:n, n] = self.counts[:n, :n], self.counts[:n, LIMIT]
        edges[:, :n], edges[:, n] = self.edges[:n, :n], self.edges[:n, LIMIT]
        counts[:n] += prior * edges / np.maximum(edges.sum(1, keepdims=True), 1.0)
        general = counts[:n].sum(0) + 0.1
        general /= general.sum()
        rows: npt.NDArray[np.float64] = counts + smoothing * general
        rows /= rows.sum(1, keepdims=True)
        rows[n] = 0.0
        rows[n, n] = 1.0
        return rows

    def features(self) -> Floats:
        """The agents' features, of shape (agents, ``FEATURES``)."""
        n = len(self.names)
        counts, edges = self.counts[:n], self.edges[:n] | (self.counts[:n] > 0)
        out = counts.sum(1)
        into = self.counts[:n, :n].sum(0)
        total = max(1.0, float(out.sum()))
        calls = np.maximum(self._sizes[:n, 0], 1.0)
        numbers = np.stack(
            [
                np.log1p(edges[:, :LIMIT].sum(1)),
                np.log1p(edges[:, :n].sum(0)),
                np.log1p(1_000.0 * out / total) / 7.0,
                np.log1p(1_000.0 * into / total) / 7.0,
                counts[:, LIMIT] / np.maximum(out, 1.0),
                np.diagonal(self.counts)[:n] / np.maximum(out, 1.0),
                np.log1p(self._sizes[:n, 1] / calls) / 10.0,
                np.log1p(self._sizes[:n, 2] / calls) / 10.0,
                (self._sizes[:n, 0] > 0).astype(float),
            ],
            axis=1,
        ).astype(np.float32)
        return np.concatenate([self._texts[:n], numbers], axis=1)

    def edge_lists(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Edges (2, e) as pairs of source and target, and their relation: the distance less 1, 0 for neighbours."""
        n = len(self.names)
        near = np.argwhere((self.counts[:n, :n] > 0) | self.edges[:n, :n])
        pairs, kinds = [near], [np.zeros(len(near), np.int64)]
        for d, counted in enumerate(self.far):
            found = np.argwhere(counted[:n, :n] > 0)
            pairs.append(found)
            kinds.append(np.full(len(found), d + 1, np.int64))
        return np.concatenate(pairs).T.astype(np.int64), np.concatenate(kinds)

    def flow(self) -> tuple[list[str], list[tuple[int, int, float]]]:
        """The agents, and what came after what how often: (agent, agent or ``len``, the end, count)."""
        n = len(self.names)
        pairs = [(int(a), int(b)) for a, b in np.argwhere(self.counts[:n] > 0)]
        return list(self.names), [(a, min(b, n), float(self.counts[a, b])) for a, b in pairs]

    # -- saved -------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that :meth:`restore` needs besides the names."""
        n = len(self.names)
        return {
            "counts": np.concatenate([self.counts[:n, :n], self.counts[:n, LIMIT:]], axis=1),
            "far": np.ascontiguousarray(self.far[:, :n, :n]),
            "edges": np.concatenate([self.edges[:n, :n], self.edges[:n, LIMIT:]], axis=1).astype(np.uint8),
            "texts": self._texts[:n].copy(),
            "sizes": self._sizes[:n].astype(np.float64),
        }

    @classmethod
    def restore(cls, names: Sequence[str], arrays: Mapping[str, npt.NDArray[Any]]) -> CallGraph:
        """The graph that :meth:`arrays` and ``names`` describe; raises ValueError for what does not fit."""
        n = len(names)
        distances = len(arrays["far"]) if arrays["far"].ndim else 0
        shapes = {
            "counts": (n, n + 1),
            "far": (distances, n, n),
            "edges": (n, n + 1),
            "texts": (n, NAME + INSTRUCTIONS),
            "sizes": (n, 3),
        }
        for name, shape in shapes.items():
            found = arrays[name]
            if found.dtype.kind not in "fiu" or found.shape != shape or not np.isfinite(found).all():
                raise ValueError(f"{name} of the call graph should be finite numbers of shape {shape}")
            if name != "texts" and (found < 0).any():
                raise ValueError(f"{name} of the call graph should not be negative")
        if distances > _FARTHEST:
            raise ValueError(f"at most {_FARTHEST} distances can be held")
        if n > LIMIT or len(set(names)) != n:
            raise ValueError(f"{n} agents, of which at most {LIMIT} can be held and no two be called the same")
        graph = cls(distances=distances)
        for name in names:
            graph.number(name)
        graph.counts[:n, :n], graph.counts[:n, LIMIT] = arrays["counts"][:, :n], arrays["counts"][:, n]
        graph.edges[:n, :n], graph.edges[:n, LIMIT] = arrays["edges"][:, :n] > 0, arrays["edges"][:, n] > 0
        graph.far[:, :n, :n] = arrays["far"]
        graph._texts[:n] = arrays["texts"]
        graph._sizes[:n] = arrays["sizes"]
        return graph
