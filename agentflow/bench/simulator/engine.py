"""One simulated engine: SGLang's scheduler on the simulated tree.

A step is what SGLang does between two forward passes: transfers that are done release what they held, a
prefill cut in chunks goes on, waiting requests are admitted while memory is foreseen for them, and prefill goes
before decode. Decode steps in which nothing can change are taken at once: their time is a sum in closed form,
and an arrival cuts them at the step boundary that follows it, as in the engine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from agentflow.bench.simulator.anchors import Anchors
from agentflow.bench.simulator.config import EngineSpec
from agentflow.bench.simulator.cost import Cost, Prefill
from agentflow.bench.simulator.effects import carry_out
from agentflow.bench.simulator.request import Request
from agentflow.bench.simulator.transfers import Transfers
from agentflow.bench.simulator.tree import Tree
from agentflow.cache.policy import HOLD, CallArrived, CallFinished, PoolState, WaitingCall, WarmUp
from agentflow.events import Event
from agentflow.runtime import Runtime

__all__ = ["Engine", "Request"]


class Engine:
    """Runs requests. The simulation calls ``arrive``, ``observe`` and ``advance``, and asks ``due`` when to advance."""

    def __init__(
        self, spec: EngineSpec, cost: Cost, runtime: Runtime, finished: Callable[[Request, float], None]
    ) -> None:
        self.spec = spec
        self.cost = cost
        self.runtime = runtime
        self.tree = Tree(spec, runtime)
        self.anchors = Anchors()
        self.waiting: list[Request] = []
        self._held: list[Request] = []
        self.running: list[Request] = []
        #: When the pass in progress ends, or when there is something to look at; None when idle.
        self.due: float | None = None
        self.decode_steps = 0
        self.prefill_tokens = 0
        self.passes = 0
        self.retractions = 0
        self.busy_seconds = 0.0
        self._finished = finished
        self._batch: list[Request] = []
        self._chunked: Request | None = None
        self._full = False
        self._ratio = spec.new_token_ratio
        self._refreshes = 0
        self._mode: Literal["idle", "prefill", "decode"] = "idle"
        self._began = 0.0
        self._planned = 0
        self._kv = 0
        #: (decode step count at which it ends, tie, request) of the running requests.
        self._ends: list[tuple[int, int, Request]] = []
        self._ties = 0
        self._transfers = Transfers(self.tree, cost)

    # -- what the simulation tells ---------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> None:
        """Take in an event of the framework."""
        self.runtime.observe(event)
        self.tree.changed(event.workflow)
        if self.runtime.acts:
            self._wake(now)

    def arrive(self, request: Request, workflow: str, agent: str, branch: str | None, now: float) -> None:
        """A request joins the waiting queue, or is refused when it is empty or can never fit."""
        spec = self.spec
        most = spec.pool_tokens - 1
        if not 0 < request.prompt < most - 5:
            request.outcome = "rejected"
            request.finished = now
            self._finished(request, now)
            return
        request.target = max(1, min(request.target, most - request.prompt - 1))
        limit = request.target if spec.max_new_tokens is None else max(spec.max_new_tokens, request.target)
        request.token_limit = min(limit, most - request.prompt - 1)
        request.call = self.runtime.call(workflow, agent, branch, request.rid)
        if self.runtime.watches_nodes:
            request.anchor = (self.anchors.seen(request.content, request.anchor[1]), request.anchor[1])
            self.runtime.observe(CallArrived(request.rid, request.call, request.prompt, *request.anchor))
        self.tree.changed(workflow)
        self.waiting.append(request)
        if not self._full or not self.running:
            self._wake(now)

    def advance(self, now: float) -> None:
        """The pass in progress is over, or there is something to look at: take its result and start the next."""
        mode, self._mode = self._mode, "idle"
        self.due = None
        if mode == "prefill":
            self.busy_seconds += now - self._began
            self._prefilled(now)
        elif mode == "decode":
            self.busy_seconds += now - self._began
            self._decoded(now)
        self._step(now)

    # -- one step --------------------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        self._began = now
        self._turn(now)
        self._transfers.settle(now)
        if self._chunked is not None:
            self._checkpoint(self._chunked, self._chunked.filled, now)
            self._transfers.write(now)
        joining = [r for r in self._batch if r is not self._chunked and r.finished < 0]
        if len(joining) < len(self._batch) or not self.running:
            self._full = False
        for request in joining:
            self._join(request)
        self._batch = []
        seconds = self._prefill(now)
        if seconds is not None:
            self._mode = "prefill"
            self.passes += 1
            self.due = now + seconds
            return
        if self.running:
            self._decode(now)
            if self.running:
                return
        self._ratio = self.spec.new_token_ratio
        self._idle(now)

    def _turn(self, now: float) -> None:
        """The policies' turn between two steps. Effects take slots that a prefill under way, or one that waits, was
        promised, so they are asked for only while there is none."""
        runtime = self.runtime
        for workflow in runtime.rescored():
            self.tree.changed(workflow)
        if runtime.watches_pool:
            runtime.observe(self._pool())
        if runtime.acts and not self.waiting and self._chunked is None:
            load = partial(self._transfers.load, now=now)
            carry_out(self.tree, runtime.act(), load, partial(self._warm_up, now=now))

    def _warm_up(self, effect: WarmUp, now: float) -> bool:
        ahead = self.anchors.ahead(self.tree, effect)
        if ahead is None:
            return False
        rid, content, tokens = ahead
        request = Request(rid, content, tokens, 1, now, anchor=tokens)
        request.anchor = (effect.anchor, tokens)
        request.internal = True
        self.waiting.append(request)
        return True

    def _pool(self) -> PoolState:
        spec, tree = self.spec, self.tree
        return PoolState(
            total=spec.pool_tokens,
            free=tree.free,
            held=spec.pool_tokens - tree.free - tree.evictable,
            running=len(self.running),
            waiting=len(self.waiting),
            host_total=spec.host_tokens,
            host_free=tree.host_free,
        )

    def _idle(self, now: float) -> None:
        """Look again when a transfer is done that waiting requests wait for, or to ask policies for effects."""
        if self.waiting:
            pending = self._transfers.next_done
            if pending is None:
                head = self.waiting[0]
                raise RuntimeError(
                    f"request {head.rid} of {head.prompt} + {head.token_limit} tokens cannot start in an idle engine:"
                    f" {self.tree.free} free, {self.tree.evictable} evictable, {self.tree.protected} held"
                )
            self.due = max(now, pending)
        elif self.runtime.acts and len(self.tree.host_leaves) and self.spec.poll_seconds > 0:
            self.due = now + self.spec.poll_seconds

    def _wake(self, now: float) -> None:
        """Something came: start when idle, or stop after the decode step that runs now."""
        if self._mode == "idle":
            self.due = now
        elif self._mode == "decode":
            steps = self._steps_until(now - self._began)
            if steps < self._planned:
                self._planned = steps
                self.due = self._began + self.cost.decode(len(self.running), self._kv, steps)

    def _steps_until(self, seconds: float) -> int:
        """The least number of planned decode steps, at least 1, that take ``seconds`` or longer."""
        low, high = 1, self._planned
        batch = len(self.running)
        while low < high:
            middle = (low + high) // 2
            if self.cost.decode(batch, self._kv, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low

    # -- prefill ---------------------------------------------------------------------------------------

    def _prefill(self, now: float) -> float | None:
        """Admit what can be admitted. Returns the seconds of the pass, or None when there is none."""
        spec = self.spec
        if not self.running:
            self._full = False
        if (self._full or not self.waiting) and self._chunked is None:
            return None
        room = spec.max_running - len(self.running)
        if room <= 0 and self._chunked is None:
            self._full = True
            return None
        self._order()
        try:
            return self._admit(room, now)
        finally:
            self.waiting[:0] = self._held
            self._held = []

    def _admit(self, room: int, now: float) -> float | None:
        """Admit waiting requests in their order, at most ``room``."""
        spec, tree = self.spec, self.tree
        offset = self._reserved()
        chunk = spec.chunked_prefill
        left = spec.max_prefill_tokens
        batch: list[tuple[Request, int]] = []
        load_until = now
        current = 0

        chunked = self._chunked
        if chunked is not None:
            assert chunk is not None
            available = min(chunk, int(tree.free + tree.evictable - offset))
            if available <= 0:
                available = chunk
            remaining = chunked.limit - chunked.filled
            new = min(available, remaining)
            chunked.prefix = chunked.filled
            batch.append((chunked, new))
            offset += new + 1 + (0 if new < remaining else min(chunked.token_limit, spec.clip_new_tokens))
            current += new + 1
            left -= new
            chunk -= new
            if new == remaining:
                self._chunked = None

        for request in self.waiting:
            if left <= 0 or (chunk is not None and chunk <= 0):
                break
            if len(batch) >= room:
                self._full = True
            if self._full:
                break
            request.limit = request.prompt + request.produced
            found = tree.match(request.content, request.limit - 1)
            request.prefix = found.device
            request.node = found.node
            tree.lock(found.node)
            try:
                most = min(max(request.token_limit - request.produced, 0), spec.clip_new_tokens)
                total = request.limit - found.device + most + 1
                if not total < tree.free + tree.evictable - offset:
                    self._full = bool(batch or self.running)
                    break
                host = 0
                if found.host:
                    tree.cause = request.rid
                    host = tree.load_back(found.best)
                    tree.cause = None
                    if host:
                        load_until = max(load_until, self._transfers.load(found.best, host, now))
                        request.node = found.best
                        request.prefix += host
                    elif not total < tree.free + tree.evictable - offset:
                        self._full = bool(batch or self.running)
                        break
                new = request.limit - request.prefix
                cut = chunk is not None and new > chunk
                if cut:
                    assert chunk is not None
                    new = chunk
                elif chunk is None and batch and new >= left:
                    break
                assert request.node is not None
                tree.lock(request.node)
            finally:
                tree.unlock(found.node)
            request.protected = request.prefix
            request.private = 0
            if request.admitted < 0:
                request.admitted = now
                request.cached_device = found.device
                request.cached_host = host
            batch.append((request, new))
            if cut:
                self._chunked = request
            offset += new + 1 + (0 if cut else min(request.token_limit, spec.clip_new_tokens))
            current += new + 1
            left -= new
            if chunk is not None:
                chunk -= new
            there = tree.free + tree.evictable
            if not (there > offset and there > current):
                self._full = bool(batch or self.running)
                break
        if not batch:
            return None
        admitted = {id(r) for r, _ in batch}
        self.waiting = [r for r in self.waiting if id(r) not in admitted]
        return self._run_prefill(batch, load_until, now)

    def _run_prefill(self, batch: Sequence[tuple[Request, int]], load_until: float, now: float) -> float:
        tree = self.tree
        tokens = sum(new for _, new in batch)
        tree.cause = batch[0][0].rid
        if not tree.make_room(tokens):
            raise RuntimeError(f"a prefill of {tokens} tokens was admitted without room for it")
        tree.cause = None
        tree.free -= tokens
        work = []
        for request, new in batch:
            request.private += new
            request.filled = request.prefix + new
            work.append(Prefill(new, request.prefix))
        self._batch = [r for r, _ in batch]
        self.prefill_tokens += tokens
        seconds = self.cost.prefill(work)
        loading = load_until - now
        return max(seconds, loading) if self.cost.load_overlaps else seconds + loading

    def _reserved(self) -> float:
        """Tokens that running requests are expected to need still."""
        spec = self.spec
        ratio = 1.0 if spec.ignore_eos else self._ratio
        clip, steps = spec.clip_new_tokens, self.decode_steps
        return ratio * sum(min(r.token_limit - r.produced - (steps - r.joined), clip) for r in self.running)

    def _order(self) -> None:
        """Order the waiting requests by the policies, and keep what they will read from being evicted first."""
        spec, runtime = self.spec, self.runtime
        waiting = self.waiting
        if waiting:
            if self._refreshes % spec.refresh_waiting_every == 0:
                for request in reversed(waiting[: spec.refresh_waiting_most]):
                    self.tree.match(request.content, request.prompt + request.produced)
            self._refreshes += 1
        if not runtime.ranks_calls:
            return
        ranked = []
        for place, request in enumerate(waiting):
            call = WaitingCall(
                request=request.rid,
                call=request.call,
                tokens=request.prompt,
                cached_tokens=request.prefix,
                arrived=request.arrived,
                preempted=request.produced > 0,
                anchor=request.anchor[0],
            )
            ranked.append(((*runtime.score_call(call), float(place)), request))
        ranked.sort(key=lambda pair: pair[0])
        held = [request for score, request in ranked if HOLD in score]
        if held and len(held) == len(ranked) and not self.running and self._chunked is None:
            del held[0]
        runtime.counters["calls_held"] += len(held)
        kept = set(map(id, held))
        self.waiting = [request for _, request in ranked if id(request) not in kept]
        self._held = held

    def _prefilled(self, now: float) -> None:
        for request in self._batch:
            if request is self._chunked:
                continue
            request.produced += 1
            if request.first_token < 0:
                request.first_token = now
            if request.produced >= request.target:
                self._release(request, now)
            else:
                self._checkpoint(request, request.filled, now)
        self._transfers.write(now)

    # -- decode ----------------------------------------------------------------------------------------

    def _join(self, request: Request) -> None:
        request.joined = self.decode_steps
        self.running.append(request)
        self._kv += request.limit
        self._ties += 1
        request.tie = self._ties
        heapq.heappush(self._ends, (self.decode_steps + request.target - request.produced, request.tie, request))

    def _decode(self, now: float) -> None:
        """Plan as many decode steps as can pass before anything changes."""
        tree, batch = self.tree, len(self.running)
        tree.cause = self.running[0].rid
        if not tree.make_room(batch):
            self._retract(now)
            batch = len(self.running)
            if not batch:
                tree.cause = None
                return
        tree.cause = None
        while self._ends[0][1] != self._ends[0][2].tie:
            heapq.heappop(self._ends)
        steps = min(self._ends[0][0] - self.decode_steps, tree.free // batch)
        if self.waiting and not self._full:
            steps = 1
        if self.runtime.acts:
            steps = min(steps, self.spec.act_steps)
        self._planned = max(1, steps)
        self._mode = "decode"
        self.due = now + self.cost.decode(batch, self._kv, self._planned)

    def _decoded(self, now: float) -> None:
        steps, batch = self._planned, len(self.running)
        self.passes += steps
        self.decode_steps += steps
        self.tree.free -= steps * batch
        self._kv += steps * batch
        self._ratio = max(
            self._ratio
            - steps * (self.spec.new_token_ratio - self.spec.min_new_token_ratio) / self.spec.ratio_decay_steps,
            self.spec.min_new_token_ratio,
        )
        ended: list[tuple[int, Request]] = []
        while self._ends and self._ends[0][0] <= self.decode_steps:
            _, tie, request = heapq.heappop(self._ends)
            if request.tie == tie:
                ended.append((tie, request))
        if not ended:
            return
        for _, request in sorted(ended, key=lambda pair: pair[0]):
            self._leave(request)
            self._release(request, now)
        gone = {id(r) for _, r in ended}
        self.running = [r for r in self.running if id(r) not in gone]
        self._full = False
        self._transfers.write(now)

    def _leave(self, request: Request) -> None:
        """Write down what the running batch counted for all: tokens produced, slots taken, context held."""
        steps = self.decode_steps - request.joined
        request.produced += steps
        request.private += steps
        self._kv -= request.limit + steps
        request.tie = 0

    def _retract(self, now: float) -> None:
        """Send the requests with the fewest tokens produced back to the queue until a decode step fits."""
        tree = self.tree
        steps = self.decode_steps
        order = sorted(self.running, key=lambda r: (r.produced + steps - r.joined, -r.prompt), reverse=True)
        first = True
        back: list[Request] = []
        while len(order) > 1 and (first or not tree.make_room(len(order))):
            first = False
            request = order.pop()
            self._give_up(request)
            tree.make_room(len(order) * self.spec.retract_steps)
            request.retracted += 1
            self.retractions += 1
            back.append(request)
        aborted: Request | None = None
        if len(order) == 1 and not tree.make_room(1):
            aborted = order.pop()
            self._give_up(aborted)
        kept = {id(r) for r in order}
        self.running = [r for r in self.running if id(r) in kept]
        produced = sum(r.produced + steps - r.joined for r in self.running)
        asked = sum(r.token_limit for r in self.running)
        self._ratio = min(1.0, (produced + self.spec.retract_steps * len(self.running)) / (asked + 1))
        self.waiting += back
        self._full = False
        if aborted is not None:
            aborted.outcome = "aborted"
            self._done(aborted, now)

    def _give_up(self, request: Request) -> None:
        """Free a running request's own slots and unlock what it used."""
        self._leave(request)
        self.tree.free += request.private
        request.private = 0
        assert request.node is not None
        self.tree.unlock(request.node)
        request.node = None
        request.inserted = request.protected = 0

    # -- the tree --------------------------------------------------------------------------------------

    def _checkpoint(self, request: Request, end: int, now: float) -> None:
        """Put what a request has computed into the tree, and lock that in place of what was locked."""
        tree = self.tree
        assert request.node is not None
        node, _ = tree.insert(
            request.content, end, protected=request.protected, inserted=request.inserted, known=request.node
        )
        request.inserted = max(request.inserted, end)
        tree.lock(node)
        tree.unlock(request.node)
        if request.prompt < end:
            tree.cut(node, request.prompt)
        request.node = node
        request.private -= end - request.protected
        request.protected = end
        if request.internal:
            tree.warmed(node, request.anchor)
        else:
            tree.touch(node, request.call, request.anchor)

    def _release(self, request: Request, now: float) -> None:
        """A request is over: its KV joins the tree and nothing holds it any more."""
        self._checkpoint(request, request.prompt + request.produced - 1, now)
        assert request.node is not None
        self.tree.unlock(request.node)
        request.node = None
        self._done(request, now)

    def _done(self, request: Request, now: float) -> None:
        request.finished = now
        if request.internal:
            return
        if self.runtime.watches_nodes:
            began = request.first_token >= 0
            self.runtime.observe(
                CallFinished(
                    request.rid,
                    request.call,
                    tokens=request.prompt,
                    cached_tokens=request.cached_device + request.cached_host,
                    output_tokens=request.produced,
                    host_tokens=request.cached_host,
                    queue_seconds=max(0.0, request.admitted - request.arrived),
                    prefill_seconds=request.first_token - request.admitted if began else 0.0,
                    reload_seconds=self.cost.transfer(request.cached_host) if request.cached_host else 0.0,
                )
            )
        if request.call.thread is not None:
            self.tree.changed(request.call.thread.workflow.id)
        self._finished(request, now)
