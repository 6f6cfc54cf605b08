"""The server of HTTP: routes, errors, and limits on what clients send and on their silence.

The event loop only reads and sends. Each request is checked in a thread of its own.
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
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ...checkpoint import describe, shorten
from ...streaming.plan import memory_now
from .ask import Refused

SILENT_S = 30  # a client that sends no whole request, or takes nothing, for so long is dropped
KEEPALIVE_S = 10  # between the comments in a stream that has nothing to say
GRACE_S = 2  # at Ctrl-C, answers have so long to end
MOST_NBYTES = 2**22  # of a request: 16 for each of 256k tokens
SMALL_NBYTES = 2**14  # requests above are read one after another, and refused if memory is short
TOKENS_NBYTES = 260  # memory that a tokenizer takes for each byte of a text
UVICORN = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off", "log_config": None}
UVICORN |= {"proxy_headers": False, "timeout_graceful_shutdown": GRACE_S, "backlog": 1024}


def app(engine: Any, served: Any, dialects: list[type], origins: list[str]) -> Starlette:
    """Make the application. Web pages of ``origins`` (CORS; * for all) may ask, too."""
    about = {"id": served.name, "object": "model", "owned_by": "moelab"}
    about["created"] = int(time.time())

    async def health(_):
        return _json({"status": "ok"})

    async def models(request):
        name = request.path_params.get("name")
        if name in (None, "", served.name):
            return _json(about if name else {"object": "list", "data": [about]})
        raise HTTPException(404, f"expected the model {served.name!r}, got {name[:100]!r}")

    async def refuse(request, error):
        words = f"{request.method} {shorten(request.scope['path'], 100)}: {error.detail}"
        return _json(*_error(dialects[0], Refused(words, status=error.status_code)))

    routes = [Route(path, models) for path in ("/v1/models", "/v1/models/{name:path}")]
    routes, lock = [*routes, Route("/health", health)], asyncio.Lock()
    for dialect in dialects:
        endpoint = _Endpoint(dialect, engine, served, origins, lock)
        routes += [Route(path, endpoint, methods=["POST"]) for path in dialect.paths]
    cors = {"allow_origins": origins, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    return Starlette(False, routes, [Middleware(CORSMiddleware, **cors)], {HTTPException: refuse})


def _json(value, status=200):
    return Response(json.dumps(value), status, media_type="application/json")


def _error(dialect, error):
    """What a client is told of an error, and the status."""
    if isinstance(error, asyncio.CancelledError):
        error = RuntimeError("the server was stopped")
    status = 503 if isinstance(error, MemoryError) else getattr(error, "status", 500)
    words = describe(error) if status == 500 else str(error)[:1000]
    logging.error(words)
    return dialect.error(words, getattr(error, "param", None), status), status


@dataclass
class _Endpoint:
    """Answers the requests of a dialect (an application of ASGI)."""

    dialect: type
    engine: Any
    served: Any
    origins: list[str]
    lock: asyncio.Lock  # one large request is in memory at a time

    async def __call__(self, scope, receive, send):
        request, stream, watch = Request(scope, receive), None, None
        large = int(request.headers.get("content-length", MOST_NBYTES)) > SMALL_NBYTES
        told, loop = asyncio.Queue(), asyncio.get_running_loop()

        def tell(event, index=0):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, (event, index))

        try:
            async with self.lock if large else nullcontext():
                body = await self._read(request)
                watch = asyncio.create_task(_cancel_if_gone(receive, asyncio.current_task()))
                # A daemon: a template that never ends must not keep the process alive.
                threading.Thread(target=self._check, args=(body, tell), daemon=True).start()
                asked, _ = await _next(told)
            stream = _Stream(asked, send) if asked.stream else None
            texts = await self._answer(asked, stream, told, tell)
            if stream:
                await stream.write(*asked.end(texts), more=False)
            else:
                await _json(asked.whole(texts))(scope, receive, send)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, ClientDisconnect) or (watch and watch.done()):
                return logging.info("%s: the client has gone", scope["path"])
            words, status = _error(self.dialect, error)
            with suppress(asyncio.CancelledError):  # of a client that takes nothing
                if stream and stream.begun:
                    await stream.write(words, more=False)
                else:
                    await _json(words, status)(scope, receive, send)
        finally:
            if watch:
                watch.cancel()

    async def _read(self, request):
        """Read a body to its end, also one that is too long: its client would lose the answer."""
        most = max(SMALL_NBYTES, min(MOST_NBYTES, memory_now()[1] // 2 // TOKENS_NBYTES))
        body, size = bytearray(), 0
        async for part in request.stream():
            size += len(part)
            if size <= most:
                body += part
        origin = request.headers.get("origin", "")[:100]
        if origin and not {"*", origin}.intersection(self.origins):
            words = f"{origin} may not ask. Start the server with --allowed-origins {origin}"
            raise Refused(f"Origin: {words}", status=403)
        if size > most:
            raise Refused(f"body: expected at most {most} bytes, got {size}", status=413)
        return body

    def _check(self, body, tell):
        """Tell the dialect's request, or what is wrong with it, which is its client's mistake."""
        try:
            body = json.loads(body)
            if not isinstance(body, dict):
                raise ValueError(f"expected an object, got {shorten(body, 100)}")
            tell(self.dialect(body, self.served))
        except Refused as error:
            tell(error)
        except Exception as error:
            is_wrong = isinstance(error, (ValueError, RecursionError))
            tell(Refused(f"body: {error}") if is_wrong else error)

    async def _answer(self, asked, stream, told, tell):
        """Send what is written of each text, and return the sum of each."""
        numbers, texts, left = [], [[] for _ in asked.asks], len(asked.asks)
        try:
            for index, ask in enumerate(asked.asks):
                numbers.append(self.engine.begin(ask, partial(tell, index=index)))
            while left:
                event, index = await _next(told, KEEPALIVE_S if stream else None)
                if event is None:
                    await stream.write(None)
                    continue
                part = asked.splitters[index].add(event)
                texts[index].append(part)
                left -= event.finish is not None
                if stream:
                    await stream.write(*asked.part(index, part))
            return [_sum(parts) for parts in texts]
        finally:
            for number in numbers:
                self.engine.cancel(number)


def _sum(parts):
    """Add up by halves; one after another, each addition would copy all the text before it."""
    middle = len(parts) // 2
    return _sum(parts[:middle]) + _sum(parts[middle:]) if middle else parts[0]


async def _next(told, within_s=None):
    """Wait for what a thread tells, and raise it if it is an error; None if nothing comes."""
    event, index = None, None
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            event, index = await told.get()
    if isinstance(event, BaseException):
        raise event
    return event, index


async def _cancel_if_gone(receive, task):
    """Cancel a task if the client hangs up; its request was read, so that nothing else comes."""
    await receive()
    task.cancel()


class _Stream:
    """The answer to a request that asks for a stream."""

    def __init__(self, asked, send):
        self.asked, self.send, self.begun = asked, send, False

    async def write(self, *events, more=True):
        """Send some events; before the first, what begins a stream."""
        if not self.begun:
            self.begun, events = True, [*self.asked.begin(), *events]
            head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self.send({"type": "http.response.start", "status": 200, "headers": head})
        data = "".join(map(_encode, events)).encode()
        await self.send({"type": "http.response.body", "body": data, "more_body": more})


def _encode(event):
    """An event in a stream; None is one that says nothing."""
    if event is None:
        return ": keepalive\n\n"
    if isinstance(event, str):
        return f"data: {event}\n\n"
    kind = f"event: {event['type']}\n" if "type" in event else ""
    return f"{kind}data: {json.dumps(event)}\n\n"


def listen(host: str, port: int) -> socket.socket:
    """Listen, so that clients wait until there is a ``Server``; ValueError says why that fails."""
    try:
        kind = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
        family, *_, address = socket.getaddrinfo(host, port, **kind)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        words = f"cannot listen at --host {host} --port {port}: {error}. Give another."
        raise ValueError(f"serve: {words}") from error


class Server(uvicorn.Server):
    """Answers at a socket until Ctrl-C, or until an error ends the engine of one of many ranks."""

    def __init__(self, app: Starlette, engine: Any, listening: socket.socket):
        super().__init__(uvicorn.Config(app, timeout_keep_alive=SILENT_S, **UVICORN))
        self.engine, self.socket, self._silent, self._patience = engine, listening, {}, 0

    def answer(self) -> None:
        """Run in the main thread, and stop the engine."""
        host, port = self.socket.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"moelab: http://{host}:{port}/v1 answers; Ctrl-C ends it", file=sys.stderr)
        before = signal.signal(signal.SIGINT, self.handle_exit)
        try:
            self.run([self.socket])
        finally:
            self.engine.stop()
            signal.signal(signal.SIGINT, signal.SIG_IGN if self.should_exit else before)

    def handle_exit(self, *_):
        """End. More Ctrl-C are ignored for some seconds: MLX aborts where its threads still run."""
        if self.should_exit and time.monotonic() > self._patience:
            os._exit(130)
        self._patience = self._patience or time.monotonic() + 2 * GRACE_S
        self.should_exit = True

    async def startup(self, sockets=None):
        """Log what fails outside of requests (bytes that are no HTTP, too many files) in a line."""

        def log(_, told):
            logging.error("%s: %s", told["message"], describe(told.get("exception")))

        asyncio.get_running_loop().set_exception_handler(log)
        await super().startup(sockets)

    async def on_tick(self, counter):
        """Drop silent clients, for which uvicorn would wait for ever."""
        self.engine.check()
        now, silent = time.monotonic(), {}
        for client in list(self.server_state.connections):
            cycle, flow = client.cycle, client.flow
            sends = cycle is None or cycle.response_complete or cycle.more_body
            if flow.write_paused or (sends and not flow.read_paused):
                # Another request, or something that was taken, makes it another wait.
                wait = client, cycle, client.transport.get_write_buffer_size()
                silent[wait] = self._silent.get(wait, now)
                if now - silent[wait] > SILENT_S:
                    client.transport.abort()
        self._silent = silent
        return await super().on_tick(counter)

    async def shutdown(self, sockets=None):
        """Let the engine end what was begun; the rest is cancelled after ``GRACE_S``."""
        threading.Thread(target=self.engine.stop, daemon=True).start()
        await super().shutdown(sockets)
