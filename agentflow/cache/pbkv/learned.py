"""The learned predictor as policies use it: forecasts off the critical path, and a Markov chain when there are none.

``forecast`` answers at once with what a Markov chain says and leaves the question to a worker thread, which answers
all open questions in one pass; :meth:`Learned.answers` hands over what it found. With ``inline`` the network answers
at once, in the caller's thread: for simulators and tests, where the same input must give the same result.

Nothing here imports torch before a file was found to be there, and then it is the worker that does.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, cast

from agentflow.cache.pbkv.forecast import END, Hidden, Steps
from agentflow.cache.pbkv.markov import Markov
from agentflow.cache.pbkv.names import whole
from agentflow.errors import UsageError

if TYPE_CHECKING:
    from agentflow.cache.pbkv.forecaster import Forecaster
    from agentflow.cache.pbkv.sage import Network

__all__ = ["Answer", "Learned", "Rgcn", "Sage"]

logger = logging.getLogger("agentflow.pbkv")

#: Questions of one pass.
BATCH: Final = 64
#: Failures of the network after which it is left alone.
FAILURES: Final = 3
#: What was observed and not yet taken in by the worker, at most.
BACKLOG: Final = 20_000


_RUNNING: weakref.WeakSet[_Desk] = weakref.WeakSet()


class Answer(NamedTuple):
    """A forecast that the worker made for the newest path of a workflow."""

    workflow: str
    steps: Steps


class _Question(NamedTuple):
    number: int
    path: tuple[str, ...]
    horizon: int
    hidden: Hidden | None


class Learned:
    """A trained network with a Markov chain to stand in for it. ``path`` names the file.

    ``edges`` is the static graph; ``refresh`` has the network trained a little on recent runs after so many of
    them, 0 never. At most ``capacity`` questions wait; the oldest gives way, and the chain's forecast stays.
    A file that is missing, broken or of another version or backbone leaves the chain alone, with a warning and a
    count in ``counters``. One thread asks; the worker ends when the predictor is closed or forgotten.
    """

    name: ClassVar[str] = ""

    def __init__(
        self,
        *,
        path: str | None = None,
        inline: bool = False,
        edges: Mapping[str, Sequence[str]] | None = None,
        refresh: int = 0,
        capacity: int = 1_024,
        markov: Mapping[str, float] | None = None,
    ) -> None:
        whole("capacity", capacity, 1)
        whole("refresh", refresh, 0)
        self.inline = inline
        self._chain = Markov(edges=edges, **dict(markov or {}))  # type: ignore[arg-type]
        self._numbers: dict[str, int] = {}
        self._asked = 0
        self._desk = _Desk(self.name, path, refresh, capacity, inline)
        for agent, following in (edges or {}).items():
            self._desk.take_in(("prior", (agent, tuple(following))))
        if path is None or not Path(path).is_file():
            self._desk.degrade("no file is given" if path is None else f"{path}: no such file")
        elif inline:
            self._desk.load()
        else:
            weakref.finalize(self, self._desk.close)  # it starts when the predictor is first used

    @property
    def counters(self) -> Mapping[str, int]:
        """``degraded`` (the network is not used), ``failures``, ``passes``, ``answers``, ``dropped``, ``refreshes``."""
        return self._desk.counters

    @property
    def wants_hidden(self) -> bool:
        """Whether hidden states would be used. A file that is still being read may want them later."""
        self._desk.wake()
        return self._desk.hidden_size > 0

    @property
    def ready(self) -> bool:
        """Whether the network is loaded."""
        self._desk.wake()
        return self._desk.loaded.is_set() and not self._desk.degraded

    def learn(self, path: Sequence[str], following: str) -> None:
        self._chain.learn(path, following)
        self._desk.take_in(("learn", (tuple(path), following)))

    def prior(self, agent: str, following: Sequence[str]) -> None:
        self._chain.prior(agent, following)
        self._desk.take_in(("prior", (agent, tuple(following))))

    def sized(self, agent: str, prompt: int, output: int) -> None:
        self._desk.take_in(("sized", (agent, prompt, output)))

    def forecast(self, path: Sequence[str], horizon: int, *, workflow: str = "", hidden: Hidden | None = None) -> Steps:
        if not self._desk.degraded:
            if self.inline:
                found = self._desk.answer([_Question(0, tuple(path), horizon, hidden)])
                if found and found[0]:
                    return found[0]
            elif path:
                self._asked += 1
                self._numbers[workflow] = self._asked
                dropped = self._desk.ask(workflow, _Question(self._asked, tuple(path), horizon, hidden))
                if dropped is not None:
                    self._numbers.pop(dropped, None)
                if len(self._numbers) > 8 * BATCH + 8 * self._desk.capacity:
                    self._numbers.clear()  # of questions that were never answered
        chain = self._desk.chain_given()
        if chain is not None:
            self._chain.start_from(*chain)
        return self._chain.forecast(path, horizon, workflow=workflow, hidden=hidden)

    def answers(self) -> list[Answer]:
        """What the worker found since this was last asked, but for workflows asked of again since. Never waits."""
        out = []
        for workflow, number, steps in self._desk.answered():
            if self._numbers.get(workflow) == number:
                del self._numbers[workflow]
                out.append(Answer(workflow, steps))
        return out

    def settle(self, timeout: float = 60.0) -> bool:
        """Wait until the worker has no open question; for tests and for measuring. False when it took too long."""
        return self._desk.settle(timeout)

    def settle_refresh(self, timeout: float = 60.0) -> bool:
        """Wait until no refresh is under way; the next forecast uses what it made. False when it took too long."""
        thread = self._desk.refreshing
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """End the worker. The chain goes on forecasting."""
        self._desk.close()


class Sage(Learned):
    """GraphSAGE over the call graph, attention over the path, and the model's hidden state."""

    name: ClassVar[str] = "sage"


class Rgcn(Learned):
    """A relational graph network of the current agent alone: relations are how many steps lie between two agents."""

    name: ClassVar[str] = "rgcn"


@atexit.register
def _end_workers() -> None:
    """Let workers finish before the interpreter goes away under them."""
    running = list(_RUNNING)
    for desk in running:
        desk.close()
    for desk in running:
        if desk.worker is not None:
            desk.worker.join(10.0)


class _Desk:
    """What the asking thread and the worker share, under one lock."""

    def __init__(self, backbone: str, path: str | None, refresh: int, capacity: int, inline: bool) -> None:
        self.inline = inline
        self.backbone = backbone
        self.path = path
        self.counters: Counter[str] = Counter()
        self.loaded = threading.Event()
        self.degraded = False
        self.hidden_size = 0
        self._every = refresh
        self.capacity = capacity
        self._forecaster: Forecaster | None = None
        self._changed = threading.Condition()
        self._open: dict[str, _Question] = {}
        self._answers: deque[tuple[str, int, Steps]] = deque(maxlen=4 * capacity)
        self._news: deque[tuple[str, tuple[object, ...]]] = deque(maxlen=BACKLOG)
        self._chain: tuple[list[str], list[tuple[int, int, float]]] | None = None
        self._closed = False
        self._busy = False
        self._runs = 0
        self._fresh: Network | None = None
        self.refreshing: threading.Thread | None = None
        self.worker: threading.Thread | None = None

    # -- the asking thread -------------------------------------------------------------------------------

    def take_in(self, news: tuple[str, tuple[object, ...]]) -> None:
        if not self.degraded:
            self._news.append(news)  # a deque's append is atomic; the worker looks when it is asked something

    def ask(self, workflow: str, question: _Question) -> str | None:
        """Leave a question, in place of an older one; returns the workflow whose question had to give way."""
        dropped = None
        self.wake()
        with self._changed:
            self._open.pop(workflow, None)
            self._open[workflow] = question
            if len(self._open) > self.capacity:
                dropped = next(iter(self._open))
                del self._open[dropped]
                self.counters["dropped"] += 1
            self._changed.notify()
        return dropped

    def answered(self) -> list[tuple[str, int, Steps]]:
        out = []
        while self._answers:
            out.append(self._answers.popleft())
        return out

    def chain_given(self) -> tuple[list[str], list[tuple[int, int, float]]] | None:
        """The transitions of the file's runs, once, for the chain to start from."""
        chain, self._chain = self._chain, None
        return chain

    def settle(self, timeout: float) -> bool:
        self.wake()
        with self._changed:
            return self._changed.wait_for(lambda: (not self._open and not self._busy) or self.degraded, timeout)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Start the worker, once, unless all is inline. A predictor that is only made, to check options, has none."""
        if self.worker is not None or self.inline or self.degraded or self._closed:
            return
        self._busy = True  # until the file is read
        self.worker = threading.Thread(target=self._work, name="agentflow-predictor", daemon=True)
        self.worker.start()
        _RUNNING.add(self)

    # -- the worker, or the asking thread where all is inline --------------------------------------------

    def load(self) -> None:
        """Read the file; leaves the chain alone when that fails."""
        try:
            from agentflow.cache.pbkv.forecaster import Forecaster
            from agentflow.cache.pbkv.saved import load_trained

            trained = load_trained(self.path or "")
            if trained.network.shape.backbone != self.backbone:
                raise UsageError(f"{self.path}: of backbone {trained.network.shape.backbone!r}, not {self.backbone!r}")
            self._forecaster = Forecaster(trained)
            self.hidden_size = self._forecaster.hidden_size
            self._chain = self._forecaster.graph.flow()
            self.loaded.set()
        except Exception as error:  # no file may harm the engine
            self.degrade(str(error) or type(error).__name__)

    def degrade(self, reason: str) -> None:
        """Leave the network alone from now on."""
        logger.warning("the %s predictor is not used, a Markov chain stands in for it: %s", self.backbone, reason)
        with self._changed:
            self.counters["degraded"] += 1
            self.degraded = True
            self.hidden_size = 0
            self._open.clear()
            self._news.clear()
            self._forecaster = None
            self._changed.notify_all()

    def answer(self, questions: Sequence[_Question]) -> list[Steps]:
        """One pass over the questions; no steps where what it gave is no distribution, nothing when it failed."""
        try:
            forecaster = self._forecaster
            if forecaster is None:
                return []
            self._catch_up(forecaster)
            found: list[Steps] = [()] * len(questions)
            for horizon in {q.horizon for q in questions}:
                mine = [i for i, q in enumerate(questions) if q.horizon == horizon]
                steps = forecaster.forecast_many(
                    [questions[i].path for i in mine], horizon, hidden=[questions[i].hidden for i in mine]
                )
                for i, step in zip(mine, steps, strict=True):
                    found[i] = step
            self.counters["passes"] += 1
            self.counters["answers"] += sum(map(bool, found))
            if not all(found):
                self._failed("a forecast is no distribution; a Markov chain stands in for it")
            return found
        except Exception:
            self._failed("a forecast failed; a Markov chain stands in for it", exc_info=True)
            return []

    def _failed(self, what: str, *, exc_info: bool = False) -> None:
        self.counters["failures"] += 1
        logger.error(what, exc_info=exc_info)
        if self.counters["failures"] >= FAILURES:
            self.degrade(f"it failed {FAILURES} times")

    def _catch_up(self, forecaster: Forecaster) -> None:
        for _ in range(len(self._news)):
            kind, args = self._news.popleft()
            if kind == "learn":
                path, following = cast("tuple[tuple[str, ...], str]", args)
                forecaster.learn(path, following)
                self._runs += following == END
            elif kind == "prior":
                forecaster.prior(*cast("tuple[str, tuple[str, ...]]", args))
            else:
                forecaster.graph.sized(*cast("tuple[str, int, int]", args))
        if self._every and self._runs >= self._every and self.refreshing is None:
            self._runs = 0
            if self.inline:
                self._refresh(forecaster.refresher())
            else:
                # Not a daemon: it ends by itself, and torch must not be cut off in the middle.
                self.refreshing = threading.Thread(target=self._refresh, args=(forecaster.refresher(),))
                self.refreshing.start()
        if self._fresh is not None:
            forecaster.use(self._fresh)
            self._fresh = None
            self.counters["refreshes"] += 1

    def _refresh(self, make: Callable[[], Network]) -> None:
        try:
            self._fresh = make()
        except Exception:
            self.counters["failures"] += 1
            logger.exception("a refresh of the predictor failed; it goes on as it was")
        finally:
            self.refreshing = None

    def _work(self) -> None:
        self.load()
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._open) or self._closed or self.degraded)
                if self._closed or self.degraded:
                    return
                asked = dict(list(self._open.items())[:BATCH])
                for workflow in asked:
                    del self._open[workflow]
                self._busy = True
            found = self.answer(list(asked.values()))
            for (workflow, question), steps in zip(asked.items(), found, strict=False):
                if steps:
                    self._answers.append((workflow, question.number, steps))
