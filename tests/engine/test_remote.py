"""The remote engine's HTTP: retries, time limits, streams and aborts, against a small server of our own.

What a real SGLang server does with it is tested in ``test_remote_sglang.py``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentflow.engine._scripted_tokenizer import ScriptedTokenizer
from agentflow.engine.base import Call, Coordinates, Sampling
from agentflow.engine.guard import forbid_real_engines
from agentflow.engine.remote import RemoteEngine
from agentflow.errors import (
    BadRequest,
    BadSampling,
    EmptyPrompt,
    EngineClosed,
    EngineFailure,
    EngineTimeout,
    ModelNotFound,
    PromptTooLong,
    RealEngineForbidden,
    RemoteError,
    UsageError,
)
from agentflow.events import WorkflowStarted

TOKENIZER = ScriptedTokenizer()
Reply = Callable[["Handler", dict[str, Any]], None]


class Server(ThreadingHTTPServer):
    """Answers ``/generate`` with the next of ``replies``, and notes what came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[Reply] = []
        self.requests: list[dict[str, Any]] = []
        self.batches: list[list[dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.aborted: dict[str, threading.Event] = {}
        self.plugin = True
        self.stock_cache = False
        self.incremental = False
        self.healthy = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def abort(self, rid: str) -> threading.Event:
        return self.aborted.setdefault(rid, threading.Event())


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        match self.path:
            case "/model_info":
                self.json({"model_path": "/models/m", "served_model_name": "m", "tokenizer_path": "/models/m"})
            case "/v1/models":
                self.json({"data": [{"max_model_len": 500}]})
            case "/server_info":
                self.json({"max_total_num_tokens": 400, "incremental_streaming_output": self.server.incremental})
            case "/health":
                self.json("", status=200 if self.server.healthy else 503)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/generate":
            self.server.requests.append(body)
            self.server.replies.pop(0)(self, body)
        elif self.path == "/abort_request":
            self.server.abort(body["rid"]).set()
            self.json("")
        elif not self.server.plugin:
            self.json({"detail": "Not Found"}, status=404)
        elif self.server.stock_cache:
            self.json({"error": "this engine runs SGLang's own cache"}, status=409)
        elif self.path == "/agentflow/events":
            self.server.batches.append(json.loads(body["batch"]))
            self.json({"replies": [{}]})
        elif self.path == "/agentflow/configure" and body["policies"] == ["no.such:Policy"]:
            self.json({"error": "the engine refused 'configure': unknown policy"}, status=409)
        elif self.path == "/agentflow/decisions":
            decision = {"seq": 3, "time": 1.0, "kind": "evict", "policy": "lru", "reason": "old"}
            self.json({"replies": [{"decisions": [decision] if body["since"] < 3 else []}]})
        else:
            self.json({"replies": [{"policy": "lru", "running": 2, "counters": {"evictions": 5}}]})

    def json(self, data: Any, *, status: int = 200, **headers: str) -> None:
        body = json.dumps(data).encode() if data != "" else b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def send(self, raw: bytes) -> None:
        self.wfile.write(raw)
        self.wfile.flush()


def message(text: str, *, finish: dict[str, Any] | None, prompt: int = 3) -> dict[str, Any]:
    ids = TOKENIZER.encode(text)
    meta = {"prompt_tokens": prompt, "completion_tokens": len(ids), "cached_tokens": 2, "finish_reason": finish}
    meta["cached_tokens_details"] = {"device": 1, "host": 1}
    return {"text": text, "output_ids": ids, "meta_info": meta}


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def answer(text: str, *, finish: str = "stop") -> Reply:
    def reply(handler: Handler, body: dict[str, Any]) -> None:
        if not body["stream"]:
            handler.json(message(text, finish={"type": finish}))
            return
        handler.begin_stream()
        handler.send(b": comment\n\n")
        words = TOKENIZER.pieces(text)
        for n in range(1, len(words) + 1):
            part = "".join(words[n - 1 : n] if handler.server.incremental else words[:n])
            raw = event(message(part, finish={"type": finish} if n == len(words) else None))
            handler.send(raw[: len(raw) // 2])  # the network cuts where it likes
            handler.send(raw[len(raw) // 2 :])
        handler.send(b"data: [DONE]\n\n")

    return reply


def status(code: int, error: Any = "busy", **headers: str) -> Reply:
    return lambda handler, _: handler.json({"error": {"message": error}}, status=code, **headers)


def drop(handler: Handler, _: dict[str, Any]) -> None:
    handler.close_connection = True


def broken_off(handler: Handler, _: dict[str, Any]) -> None:
    handler.begin_stream()
    handler.send(event(message("some words", finish=None)))


def until_aborted(handler: Handler, body: dict[str, Any]) -> None:
    if body["stream"]:
        handler.begin_stream()
        handler.send(event(message("some", finish=None)))
    assert handler.server.abort(body["rid"]).wait(20)
    last = message("some words", finish={"type": "abort", "message": "Abort in waiting queue"})
    handler.send(event(last)) if body["stream"] else handler.json(last)


def silent(handler: Handler, body: dict[str, Any]) -> None:
    assert handler.server.abort(body["rid"]).wait(20)
    handler.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def remote(server: Server) -> Iterator[RemoteEngine]:
    with RemoteEngine(server.url, TOKENIZER, retries=3) as made:
        yield made


def call(text: str = "a b c", **fields: Any) -> Call:
    sampling = fields.pop("sampling", Sampling(max_tokens=20))
    return Call(token_ids=TOKENIZER.encode(text), at=Coordinates(workflow="w", agent="a"), sampling=sampling, **fields)


# -- calls -----------------------------------------------------------------------------------------------------


def test_the_server_says_what_it_runs(remote: RemoteEngine) -> None:
    assert (remote.model, remote.context_length, remote.pool_tokens) == ("m", 500, 400)
    assert remote.has_plugin


@pytest.mark.parametrize("incremental", [False, True])
async def test_every_way_to_call(server: Server, incremental: bool) -> None:
    text = "Wörds with\u2028odd\x85line\u2029ends, and \x0b\x1c more."
    server.incremental = incremental
    server.replies += [answer(text)] * 4
    with RemoteEngine(server.url, TOKENIZER) as remote:
        chunks = [list(remote.stream(call())), [c async for c in remote.astream(call())]]
        done = [remote.generate(call()), await remote.agenerate(call())]
    for pieces in chunks:
        assert len(pieces) > 5
        assert all(c.completion is None for c in pieces[:-1])
        last = pieces[-1].completion
        assert last is not None
        assert "".join(c.text for c in pieces) == text
        assert [i for c in pieces for i in c.token_ids] == list(last.token_ids)
        assert 0 < last.timings.first_token <= last.timings.total
        done.append(last)
    for completion in done:
        assert completion.text == text
        assert completion.finish == "stop"
        assert completion.model == "m"
        assert completion.usage.prompt_tokens == 3
        assert (completion.usage.cached_device, completion.usage.cached_host) == (1, 1)
        assert TOKENIZER.decode(completion.token_ids) == text


def test_what_is_sent(server: Server, remote: RemoteEngine) -> None:
    server.replies.append(answer("x", finish="length"))
    asked = call(sampling=Sampling(max_tokens=5, stop=("END",), json_schema={"type": "object"}))
    assert remote.generate(asked).finish == "length"
    (sent,) = server.requests
    assert sent["rid"] == asked.request_id
    assert sent["input_ids"] == list(asked.token_ids)
    assert sent["sampling_params"]["max_new_tokens"] == 5
    assert json.loads(sent["sampling_params"]["json_schema"]) == {"type": "object"}
    payload = sent["kv_hints"]["actions"][-1]["payload"]
    assert (payload["workflow"], payload["agent"]) == ("w", "a")


def test_key_and_headers_are_sent(server: Server) -> None:
    RemoteEngine(server.url, TOKENIZER, api_key="secret", headers={"x-team": "t"}).close()
    assert all(h["authorization"] == "Bearer secret" and h["x-team"] == "t" for h in
               [{k.lower(): v for k, v in h.items()} for h in server.headers])  # fmt: skip


def test_bad_calls_are_refused_before_anything_is_sent(server: Server, remote: RemoteEngine) -> None:
    for wrong, error in (
        (call(""), EmptyPrompt),
        (call(sampling=Sampling(max_tokens=499)), PromptTooLong),
        (call(sampling=Sampling(max_tokens=398)), PromptTooLong),
        (call(sampling=Sampling(top_p=0)), BadSampling),
    ):
        with pytest.raises(error):
            remote.generate(wrong)
        with pytest.raises(error):
            list(remote.stream(wrong))
    assert server.requests == []


async def test_what_the_server_refuses_is_no_failure_of_the_server(server: Server, remote: RemoteEngine) -> None:
    server.replies += [status(400, "Failed to compile json grammar"), status(400, "other")]
    with pytest.raises(BadSampling, match="grammar"):
        await remote.agenerate(call())
    with pytest.raises(BadRequest, match="other"):
        await remote.agenerate(call())

    def refused(handler: Handler, _: dict[str, Any]) -> None:
        handler.begin_stream()
        handler.send(event({"error": {"message": "too long", "code": 400}}))

    server.replies.append(refused)
    with pytest.raises(BadRequest, match="too long"):
        list(remote.stream(call()))
    assert len(server.requests) == 3


# -- retries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("failure", [drop, status(502), status(503), status(504), status(429)])
def test_failures_that_pass_are_retried(server: Server, remote: RemoteEngine, failure: Reply, streamed: bool) -> None:
    server.replies += [failure, failure, answer("at last")]
    asked = call()
    done = list(remote.stream(asked))[-1].completion if streamed else remote.generate(asked)
    assert done is not None
    assert done.text == "at last"
    assert done.request_id == asked.request_id
    rids = [r["rid"] for r in server.requests]
    assert len(set(rids)) == 3  # a server may still hold the id of a broken connection
    assert all(server.abort(rid).wait(10) for rid in rids[:2])
    assert remote.stats().counters["remote_retries"] == 2


def test_retries_end(server: Server, remote: RemoteEngine) -> None:
    server.replies += [status(503, "loading")] * 10
    with pytest.raises(RemoteError, match=r"503: loading \(4 tries\)") as caught:
        remote.generate(call())
    assert caught.value.status == 503
    assert len(server.requests) == 4


def test_the_server_may_ask_for_a_pause(server: Server, remote: RemoteEngine) -> None:
    server.replies += [status(429, "slow down", retry_after="0.3"), answer("x")]
    assert remote.generate(call()).timings.total >= 0.3


@pytest.mark.parametrize(("code", "match"), [(500, "answered 500"), (401, "api_key"), (404, "answered 404")])
def test_other_failures_are_not_retried(server: Server, remote: RemoteEngine, code: int, match: str) -> None:
    server.replies += [status(code), answer("x")]
    with pytest.raises(RemoteError, match=match) as caught:
        remote.generate(call())
    assert caught.value.status == code
    assert len(server.requests) == 1


async def test_nothing_is_retried_once_tokens_came(server: Server, remote: RemoteEngine) -> None:
    server.replies += [broken_off, answer("never"), broken_off]
    stream = remote.stream(call())
    assert next(stream).text == "some words"
    with pytest.raises(RemoteError, match=r"had 4 tokens by then and was not tried again"):
        next(stream)
    assert len(server.requests) == 1
    assert server.abort(server.requests[0]["rid"]).wait(10)


def test_no_server() -> None:
    with pytest.raises(RemoteError, match=r"cannot reach the SGLang server at http://127.0.0.1:9.*\(2 tries\)"):
        RemoteEngine("http://127.0.0.1:9", TOKENIZER, retries=1)
    with pytest.raises(UsageError, match="http://"):
        RemoteEngine("127.0.0.1:30000", TOKENIZER)


def test_something_else_than_sglang(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.json({"hello": 1}))
    with pytest.raises(RemoteError, match="does not answer like an SGLang server"):
        RemoteEngine(server.url, TOKENIZER)


def test_the_tokenizer_named_by_the_server_is_not_here(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"'/models/m'.*give tokenizer="):
        RemoteEngine(server.url)


# -- time limits, aborts, the end --------------------------------------------------------------------------------


async def test_the_time_limit_holds_and_the_call_is_aborted(server: Server, remote: RemoteEngine) -> None:
    server.replies += [silent, until_aborted, silent, until_aborted]
    ways: list[Callable[[Call], Awaitable[Any]]] = [
        lambda c: asyncio.to_thread(remote.generate, c),
        lambda c: asyncio.to_thread(list, remote.stream(c)),
        remote.agenerate,
        lambda c: drained(remote.astream(c)),
    ]
    for way in ways:
        asked = call(time_limit=0.1)
        with pytest.raises(EngineTimeout, match=r"0.1 seconds"):
            await way(asked)
        assert await asyncio.to_thread(server.abort(asked.request_id).wait, 10)


async def drained(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


def test_the_limits_of_the_engine(server: Server) -> None:
    server.replies += [silent, silent, until_aborted]
    with RemoteEngine(server.url, TOKENIZER, time_limit=0.1) as remote, pytest.raises(EngineTimeout, match="complete"):
        remote.generate(call())
    with RemoteEngine(server.url, TOKENIZER, first_token_limit=0.1) as remote:
        with pytest.raises(EngineTimeout, match="no first token"):
            list(remote.stream(call()))
        remote.first_token_limit = 20
        asked = call(time_limit=1.0)
        stream = remote.stream(asked)
        assert next(stream).text == "some"
        with pytest.raises(EngineTimeout, match="complete"):
            next(stream)


async def test_cancelling_aborts_on_the_server(server: Server, remote: RemoteEngine) -> None:
    server.replies += [until_aborted, until_aborted]
    asked = call()
    task = asyncio.create_task(remote.agenerate(asked))
    await until(lambda: len(server.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(server.abort(asked.request_id).wait, 10)
    asked = call()
    stream = remote.stream(asked)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(server.abort(asked.request_id).wait, 10)


async def test_abort_gives_what_there_is(server: Server, remote: RemoteEngine) -> None:
    server.replies += [until_aborted, until_aborted]
    with ThreadPoolExecutor() as threads:
        asked = call()
        waiting = threads.submit(remote.generate, asked)
        await until(lambda: len(server.requests) == 1)
        remote.abort("unknown")
        remote.abort(asked.request_id)
        done = waiting.result(10)
    assert (done.finish, done.text) == ("abort", "some words")


async def test_abort_between_two_tries(server: Server, remote: RemoteEngine) -> None:
    server.replies += [status(429, "wait", retry_after="0.5"), answer("never")]
    asked = call()
    task = asyncio.create_task(remote.agenerate(asked))
    await until(lambda: len(server.requests) == 1)
    remote.abort(asked.request_id)
    done = await task
    assert (done.finish, done.text) == ("abort", "")
    assert len(server.requests) == 1


async def test_ids_that_begin_alike_are_refused(server: Server, remote: RemoteEngine) -> None:
    server.replies.append(until_aborted)
    task = asyncio.create_task(remote.agenerate(call(request_id="call-1")))
    await until(lambda: len(server.requests) == 1)
    with pytest.raises(BadRequest, match="begins like"):
        await remote.agenerate(call(request_id="call-12"))
    remote.abort("call-1")
    assert (await task).finish == "abort"


async def test_closing_fails_calls_in_flight(server: Server) -> None:
    server.replies += [until_aborted, until_aborted]
    remote = RemoteEngine(server.url, TOKENIZER)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(remote.generate, call())
        task = asyncio.create_task(remote.agenerate(call()))
        await until(lambda: len(server.requests) == 2)
        await asyncio.to_thread(remote.close)
        results = [await settle(task), await settle(asyncio.wrap_future(waiting))]
    assert all(isinstance(r, EngineClosed) or getattr(r, "finish", None) == "abort" for r in results)
    assert all(server.abort(r["rid"]).is_set() for r in server.requests)
    remote.close()
    for work in (lambda: remote.generate(call()), lambda: list(remote.stream(call())), remote.flush, remote.stats):
        with pytest.raises(EngineClosed):
            work()
    remote.emit(WorkflowStarted(workflow="w"))
    remote.abort("x")
    assert not remote.healthy()


async def settle(future: asyncio.Future[Any]) -> Any:
    try:
        return await future
    except EngineClosed as error:
        return error


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (the server is in another thread)
        await asyncio.sleep(0.001)


def test_two_event_loops_one_after_the_other(server: Server, remote: RemoteEngine) -> None:
    server.replies += [answer("one"), answer("two")]
    assert asyncio.run(remote.agenerate(call())).text == "one"
    assert asyncio.run(remote.agenerate(call())).text == "two"


def test_many_calls_at_once(server: Server, remote: RemoteEngine) -> None:
    server.replies += [answer("x")] * 64
    with ThreadPoolExecutor(16) as threads:
        assert [c.text for c in threads.map(remote.generate, [call() for _ in range(64)])] == ["x"] * 64


def test_forbidden_in_tests(server: Server, remote: RemoteEngine) -> None:
    with forbid_real_engines(), pytest.raises(RealEngineForbidden):
        remote.generate(call())


async def test_health(server: Server, remote: RemoteEngine) -> None:
    assert remote.healthy()
    assert await remote.ahealthy()
    server.healthy = False
    assert not remote.healthy()
    assert not await remote.ahealthy()


# -- events, statistics, policies --------------------------------------------------------------------------------


def started(seq: int) -> WorkflowStarted:
    return WorkflowStarted(workflow="w", seq=seq)


def test_events_go_along_with_the_next_call(server: Server, remote: RemoteEngine) -> None:
    server.replies.append(answer("x"))
    remote.emit(started(1))
    remote.generate(call())
    remote.flush()
    events = [e for b in server.batches for e in b]
    for action in server.requests[0]["kv_hints"]["actions"]:
        events += action["payload"].get("events", [])
    assert [e["seq"] for e in events] == [1]


async def test_events_between_calls_are_sent_in_order(server: Server, remote: RemoteEngine) -> None:
    for i in range(1, 6):
        remote.emit(started(i))
    await remote.aflush()
    assert [e["seq"] for b in server.batches for e in b] == [1, 2, 3, 4, 5]
    remote.emit(started(6))
    await until(lambda: len([e for b in server.batches for e in b]) == 6)


def test_events_of_a_call_that_did_not_arrive_are_kept(server: Server, remote: RemoteEngine) -> None:
    server.replies += [drop, answer("x")]
    remote._events._armed = True  # nothing is sent but what calls take along
    remote.emit(started(1))
    remote.generate(call())
    taken = [
        [e["seq"] for a in r["kv_hints"]["actions"] for e in a["payload"].get("events", [])] for r in server.requests
    ]
    assert taken == [[1], [1]]


async def test_statistics_decisions_and_policies(server: Server, remote: RemoteEngine) -> None:
    for stats in (remote.stats(), await remote.astats()):
        assert (stats.policy, stats.running, stats.counters["evictions"]) == ("lru", 2, 5)
        assert stats.counters["remote_retries"] == 0
    assert [d.seq for d in remote.decisions()] == [3]
    assert remote.decisions(since=3) == []
    remote.configure(policies=["lru"])
    with pytest.raises(EngineFailure, match="unknown policy"):
        await remote.aconfigure(policies=["no.such:Policy"])
    with pytest.raises(UsageError, match="unknown policy 'nonsense'; known: "):
        await remote.aconfigure(policies=["nonsense"])


@pytest.mark.parametrize("without", ["plugin", "cache"])
def test_a_server_without_the_plugin(server: Server, without: str, caplog: pytest.LogCaptureFixture) -> None:
    server.plugin = without != "plugin"
    server.stock_cache = without == "cache"
    server.replies.append(answer("works"))
    with caplog.at_level(logging.WARNING, "agentflow"), RemoteEngine(server.url, TOKENIZER) as remote:
        assert not remote.has_plugin
        remote.emit(started(1))
        assert remote.generate(call()).text == "works"
        remote.flush()
        assert remote.decisions() == []
        with pytest.raises(EngineFailure, match="without agentflow's plugin"):
            remote.configure(policies=["lru"])
        counters = remote.stats().counters
    assert counters["remote_events_left_out"] == 1
    assert counters["remote_plugin_missing"] >= 2
    assert len([r for r in caplog.records if "plugin" in r.message or "cache" in r.message]) == 1


async def test_policies_given_as_one_text_are_refused_in_words() -> None:
    from agentflow.engine.embedded import EmbeddedEngine

    with pytest.raises(UsageError, match=r"write \['lru'\]"):
        RemoteEngine.__new__(RemoteEngine).configure(policies="lru")
    with pytest.raises(UsageError, match=r"write \['lru'\]"):
        await EmbeddedEngine.__new__(EmbeddedEngine).aconfigure(policies="lru")
