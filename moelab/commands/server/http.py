"""The server of HTTP: routes, limits on what clients send and on their silence, errors.

The event loop only reads and sends. A request is checked in a thread of its own.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...checkpoint import describe, shorten
from ...streaming.plan import memory_now
from .ask import Part, Refused

SILENT_S = 30  # a client that sends or takes nothing for so long is dropped
KEEPALIVE_S = 10  # between the comments in a stream that has nothing to say
GRACE_S = 2  # at Ctrl-C, answers have so long to end
MOST_NBYTES = 2**22  # of a request: 16 for each of 256k tokens
SMALL_NBYTES = 2**14  # larger requests are read one by one
TOKENS_NBYTES = 260  # memory that a tokenizer takes for each byte


def app(engine: Any, served: Any, dialects: Iterable[type], origins: Iterable[str]) -> Starlette:
    """Make the application; web pages of ``origins`` (CORS; * for all) may ask it."""
    about = {"id": served.name, "object": "model", "created": int(time.time())}
    about |= {"owned_by": "moelab"}

    async def models(request):
        name = request.path_params.get("name")
        if name not in (None, "", served.name):
            raise Refused(f"expected the model {served.name!r}, got {name[:100]!r}", "model", 404)
        return JSONResponse(about if name else {"object": "list", "data": [about]})

    async def health(_):
        return JSONResponse({"status": "ok"})

    async def again(_, error):  # for ``_Polite``
        raise error

    lock, dialects = asyncio.Lock(), list(dialects)
    routes = [Route(path, models) for path in ("/v1/models", "/v1/models/{name:path}")]
    routes += [Route("/health", health)]
    for dialect in dialects:
        answer = partial(_begin, dialect, engine, served, lock)
        routes += [Route(path, answer, methods=["POST"]) for path in dialect.paths]
    cors = {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    middleware = [Middleware(CORSMiddleware, **cors), Middleware(_Polite, origins, dialects)]
    return Starlette(False, routes, middleware, {HTTPException: again})


class _Polite:
    """Refuses web pages that may not ask; says what is wrong in the form of the path's dialect."""

    def __init__(self, inner, origins, dialects):
        self.inner, self.origins, self.dialects = inner, origins, dialects

    async def __call__(self, scope, receive, send):
        begun, more = False, True

        async def take():
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)
            return message

        async def give(message):
            nonlocal begun
            begun = True
            await send(message)

        try:
            origin = Request(scope).headers.get("origin")
            if origin is not None and not {"*", origin}.intersection(self.origins):
                told = f"{origin[:100]} may not ask. Start the server with --allowed-origins"
                raise Refused(f"Origin: {told} {origin[:100]}", status=403)
            await self.inner(scope, take, give)
        except ClientDisconnect:
            logging.info("%s: the client has gone", scope["path"])
        except (Exception, asyncio.CancelledError) as error:
            status, told = self._refusal(scope, error)
            if begun:
                await send({"type": "http.response.body", "body": _event(told)})
                return
            # Read on: a client that still sends would lose the answer.
            while more:
                await take()
            await _response(told, status)(scope, take, send)

    def _refusal(self, scope, error):
        """The status of an error, and what the client is told."""
        status = 503 if isinstance(error, MemoryError) else 500
        status = getattr(error, "status", getattr(error, "status_code", status))
        said = describe(error) if status == 500 else str(error)
        if isinstance(error, asyncio.CancelledError):
            said = "the server was stopped"
        if isinstance(error, HTTPException):
            said = f"{scope['method']} {scope['path'][:100]}: {error.detail}"
        logging.error(said)
        form = next((d for d in self.dialects if scope["path"] in d.paths), self.dialects[0])
        return status, form.error(said[:1000], getattr(error, "param", None), status)


def _response(value, status=200):
    return Response(json.dumps(value), status, media_type="application/json")


def _event(event):
    """An event of a stream as bytes."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    kind = f"event: {event['type']}\n" if "type" in event else ""
    return f"{kind}data: {json.dumps(event)}\n\n".encode()


async def _begin(dialect, engine, served, lock, request):
    """Read and check a request; large ones one by one, since they take memory."""
    size = request.headers.get("content-length")
    async with nullcontext() if int(size or MOST_NBYTES) < SMALL_NBYTES else lock:
        body = await _body(request)
        checked = await _unless_gone(request.receive, _in_thread(_check, dialect, body, served))
    return partial(_answer, engine, checked)


async def _body(request):
    most = max(SMALL_NBYTES, min(MOST_NBYTES, memory_now()[1] // 2 // TOKENS_NBYTES))
    body, size = bytearray(), int(request.headers.get("content-length", 0))
    async for part in request.stream():
        body += part
        if (size := max(size, len(body))) > most:
            raise Refused(f"Content-Length: expected at most {most} bytes, got {size}", status=413)
    return body


def _check(dialect, body, served):
    """Make a dialect's request of a body; all that is wrong with it is its client's mistake."""
    try:
        body = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"body: expected JSON, got {describe(error)}") from None
    if not isinstance(body, dict):
        raise Refused(f"body: expected a JSON object, got {shorten(body, 100)}")
    try:
        return dialect(body, served)
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, Refused) else Refused(str(error)) from error


async def _answer(engine, asked, scope, receive, send):
    """Answer a checked request, as its texts come or when they are whole."""
    loop, events, numbers, sums = asyncio.get_running_loop(), asyncio.Queue(), [], {}
    begun = False

    def tell(index, event):
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(events.put_nowait, (index, event))

    async def stream(*data, more=True):
        nonlocal begun
        if not begun:
            begun, data = True, [*map(_event, asked.begin()), *data]
            head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"".join(data), "more_body": more})

    async def write():
        open_ = len(asked.asks)
        while open_:
            try:
                index, event = await asyncio.wait_for(events.get(), KEEPALIVE_S)
            except TimeoutError:
                if asked.stream:
                    await stream(b": keepalive\n\n")
                continue
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Part):
                delta = asked.splitters[index].add(event)
                sums[index] = sums[index] + delta if index in sums else delta
                open_ -= event.finish is not None
                if asked.stream:
                    await stream(*map(_event, asked.part(index, delta)))
        deltas = [sums[i] for i in range(len(sums))]
        if asked.stream:
            await stream(*map(_event, asked.end(deltas)), more=False)
        else:
            await _response(asked.whole(deltas))(scope, receive, send)

    try:
        for index, ask in enumerate(asked.asks):
            numbers.append(engine.begin(ask, partial(tell, index)))
        await _unless_gone(receive, write())
    finally:
        for number in numbers:
            engine.cancel(number)


async def _in_thread(function, *given):
    """Call a function in a thread that, if it never ends, does not keep the process alive."""
    future = Future()
    future.set_running_or_notify_cancel()

    def call():
        try:
            future.set_result(function(*given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(future)


async def _unless_gone(receive, work):
    """Do some work; cancel it and raise ClientDisconnect if the client hangs up before."""
    tasks = gone, work = [asyncio.ensure_future(task) for task in (receive(), work)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        gone.cancel()
        work.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address; clients wait until there is a ``Server``. ValueError says why not."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"serve: cannot listen at --host {host} --port {port}: {error}. Give another."
        ) from error


class Server(uvicorn.Server):
    """Answers the requests that come to a socket, until Ctrl-C or an error that ends the engine."""

    def __init__(self, app: Starlette, engine: Any, listening: socket.socket):
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                proxy_headers=False,
                backlog=1024,  # clients that wait to be accepted; others are reset
                timeout_keep_alive=SILENT_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self.engine, self._socket, self._waiting, self._patience = engine, listening, {}, 0

    def answer(self) -> None:
        """Run in the main thread."""
        host, port = self._socket.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"moelab: http://{host}:{port}/v1 answers; Ctrl-C ends it", file=sys.stderr)
        before = signal.signal(signal.SIGINT, self.handle_exit)
        try:
            self.run([self._socket])
        finally:
            self.engine.stop()
            signal.signal(signal.SIGINT, signal.SIG_IGN if self.should_exit else before)

    def handle_exit(self, *_):
        """End at the first Ctrl-C; ignore more for some seconds.

        MLX aborts a process that ends before its threads do. If the server takes longer, one more
        Ctrl-C ends it at once.
        """
        if self.should_exit and time.monotonic() > self._patience:
            os._exit(130)
        self._patience = self._patience or time.monotonic() + 2 * GRACE_S
        self.should_exit = True

    async def on_tick(self, counter):
        """Drop clients that are silent; uvicorn would wait for ever."""
        self.engine.check()
        now, waiting = time.monotonic(), {}
        for client in list(self.server_state.connections):
            cycle, flow = client.cycle, client.flow
            idle = cycle is None or cycle.response_complete
            if idle or flow.write_paused or (cycle.more_body and not flow.read_paused):
                # Nobody waits for a client that has taken something.
                state = client, cycle, client.transport.get_write_buffer_size()
                waiting[state] = self._waiting.get(state, now)
                if now - waiting[state] > SILENT_S:
                    client.transport.abort()
        self._waiting = waiting
        return await super().on_tick(counter)

    async def shutdown(self, sockets=None):
        """Let the engine end what was begun; after ``GRACE_S`` the rest is cancelled."""
        stopping = asyncio.ensure_future(_in_thread(self.engine.stop))
        await super().shutdown(sockets)
        stopping.cancel()
