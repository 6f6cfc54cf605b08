"""The server of HTTP: routes, errors, and limits on what clients send and on their silence."""

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
from functools import partial
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError
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
from .text import Delta

SILENT_S = 30  # a client that sends no whole request, or takes nothing, for so long is dropped
KEEPALIVE_S = 10  # between the comments in a stream that has nothing to say
GRACE_S = 2  # at Ctrl-C, answers have so long to end
MOST_NBYTES = 2**22  # of a request: 16 for each of 256k tokens
SMALL_NBYTES = 2**14  # requests above are read one after another, and refused if memory is short
TOKENS_NBYTES = 260  # memory that a tokenizer takes for each byte of a text
BODY = TypeAdapter(dict[str, Any])
UVICORN = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off", "log_config": None}
UVICORN |= {"timeout_keep_alive": SILENT_S, "timeout_graceful_shutdown": GRACE_S}


def app(engine: Any, served: Any, dialects: list[type], origins: list[str]) -> Starlette:
    """Make the application. Web pages of ``origins`` (CORS; * for all) may ask, too."""
    card = {"id": served.name, "object": "model", "owned_by": "moelab", "created": int(time.time())}

    async def models(request):
        name = request.path_params.get("name")
        if name and name != served.name:
            raise HTTPException(404, f"expected the model {served.name!r}, got {name[:100]!r}")
        return _json(card if name else {"object": "list", "data": [card]})

    async def refuse(request, error):
        words = f"{request.method} {shorten(request.scope['path'], 100)}: {error.detail}"
        return _json(*_error(dialects[0], Refused(words, status=error.status_code)))

    routes = [Route(path, models) for path in ("/v1/models", "/v1/models/{name:path}")]
    routes, lock = [*routes, Route("/health", lambda _: _json({"status": "ok"}))], asyncio.Lock()
    for dialect in dialects:
        endpoint = _Endpoint(dialect, engine, served, origins, lock)
        routes += [Route(path, endpoint, methods=["POST"]) for path in dialect.paths]
    cors = Middleware(CORSMiddleware, origins, allow_methods=["*"], allow_headers=["*"])
    return Starlette(False, routes, [cors], {HTTPException: refuse})


def _json(value, status=200):
    return Response(json.dumps(value), status, media_type="application/json")


def _error(dialect, error):
    """What a client is told of an error, and the status."""
    if isinstance(error, asyncio.CancelledError):
        error = Refused("the server was stopped", status=503)
    status = 503 if isinstance(error, MemoryError) else getattr(error, "status", 500)
    words = describe(error) if status == 500 else str(error)[:1000]
    logging.log(logging.ERROR if status >= 500 else logging.INFO, words)
    return dialect.error(words, getattr(error, "param", None), status), status


class _Endpoint:
    """Answers the requests of a dialect (an application of ASGI)."""

    def __init__(self, dialect, engine, served, origins, lock):
        self.dialect, self.engine, self.served = dialect, engine, served
        self.origins, self.lock = origins, lock  # one large request is in memory at a time

    async def __call__(self, scope, receive, send):
        request, told, begun = Request(scope, receive), asyncio.Queue(), False
        large = int(request.headers.get("content-length", MOST_NBYTES)) > SMALL_NBYTES
        loop = asyncio.get_running_loop()

        def tell(event, index=0):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, (event, index))

        async def write(*events, status=200, more=False):
            """Send a whole answer or, if there is more, begin a stream; a comment if it is idle."""
            nonlocal begun
            if not (begun or more):
                return await _json(*events, status)(scope, receive, send)
            if not begun:
                head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": status, "headers": head})
            begun, data = True, "".join(map(_encode, events)) or ": keepalive\n\n"
            await send({"type": "http.response.body", "body": data.encode(), "more_body": more})

        try:
            async with self.lock if large else nullcontext():
                body = await self._read(request)
                watch = asyncio.create_task(receive())  # it ends when the client is gone
                watch.add_done_callback(lambda _: tell(ClientDisconnect()))
                # A daemon: a template that never ends must not keep the process alive.
                threading.Thread(target=self._check, args=(body, tell), daemon=True).start()
                asked, _ = await _next(told)
            await self._answer(asked, write, told, tell)
        except ClientDisconnect:
            logging.info("%s: the client has gone", scope["path"])
        except (Exception, asyncio.CancelledError) as error:
            words, status = _error(self.dialect, error)
            with suppress(asyncio.CancelledError):  # of a client that takes nothing
                await write(words, status=status)

    async def _read(self, request):
        """Read a body to its end, also one that is too long: its client would lose the answer."""
        most = max(SMALL_NBYTES, min(MOST_NBYTES, memory_now()[1] // 2 // TOKENS_NBYTES))
        body, origin = bytearray(), request.headers.get("origin", "")[:100]
        async for part in request.stream():
            if len(body) <= most:
                body += part
        if origin and not {"*", origin}.intersection(self.origins):
            raise Refused(f"Origin: {origin} is not one of --allowed-origins", status=403)
        if len(body) > most:
            raise Refused(f"body: expected at most {most} bytes, got more", status=413)
        return body

    def _check(self, body, tell):
        """Check a body, and put the request or the error on the queue."""
        try:
            tell(self.dialect(BODY.validate_json(body), self.served))
        except ValidationError as error:
            tell(Refused(f"body: {error.errors()[0]['msg']}"))
        except Exception as error:
            tell(error)

    async def _answer(self, asked, write, told, tell):
        """Write an answer, whole or in parts."""
        numbers, texts = [], [Delta() for _ in asked.asks]
        events = [*asked.begin()] if asked.stream else []
        try:
            for index, ask in enumerate(asked.asks):
                numbers.append(self.engine.begin(ask, partial(tell, index=index)))
            while any(text.finish is None for text in texts):
                part, index = await _next(told, KEEPALIVE_S if asked.stream else None)
                if part:
                    delta = asked.splitters[index].add(part)
                    texts[index] += delta
                    events += asked.part(index, delta) if asked.stream else ()
                if asked.stream:
                    await write(*events, more=True)
                    events = []
            await write(*(asked.end(texts) if asked.stream else [asked.whole(texts)]))
        finally:
            for number in numbers:
                self.engine.cancel(number)


async def _next(told, within_s=None):
    """Return the next event of the queue, or None if none comes in time; raise an error."""
    event, index = None, None
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            event, index = await told.get()
    if isinstance(event, Exception):
        raise event
    return event, index


def _encode(event):
    if isinstance(event, str):
        return f"data: {event}\n\n"
    kind = f"event: {event['type']}\n" if "type" in event else ""
    return f"{kind}data: {json.dumps(event)}\n\n"


def listen(host: str, port: int) -> socket.socket:
    """Listen, so that clients wait until there is a ``Server``; ValueError says why that fails."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        words = f"cannot listen at --host {host} --port {port}: {error}. Give another."
        raise ValueError(f"serve: {words}") from error


class Server(uvicorn.Server):
    """Answers at a socket until Ctrl-C, or until an error ends the engine of one of many ranks."""

    def __init__(self, app: Starlette, engine: Any, listening: socket.socket):
        super().__init__(uvicorn.Config(app, **UVICORN))
        self.engine, self.socket, self._silent, self._patience = engine, listening, {}, 0
        # uvicorn says of bytes that are no HTTP that they are none, before it fails.
        failed = "protocol.data_received() call failed"
        logging.getLogger("asyncio").addFilter(lambda record: failed not in record.getMessage())

    def answer(self) -> None:
        """Run in the main thread, and stop the engine."""
        host, port = self.socket.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"moelab: http://{host}:{port}/v1 answers; Ctrl-C ends it", file=sys.stderr)
        signal.signal(signal.SIGINT, self.handle_exit)  # until the process ends
        try:
            self.run([self.socket])
        finally:
            self.engine.stop()

    def handle_exit(self, *_):
        """End. More Ctrl-C are ignored for some seconds: MLX aborts where its threads still run."""
        if self.should_exit and time.monotonic() > self._patience:
            os._exit(130)
        self._patience = self._patience or time.monotonic() + 2 * GRACE_S
        self.should_exit = True

    async def on_tick(self, counter):
        """Drop silent clients, for which uvicorn would wait for ever."""
        self.engine.check()
        if self.should_exit:  # what was begun ends with an error, or is cancelled after GRACE_S
            threading.Thread(target=self.engine.stop, daemon=True).start()
        now, silent = time.monotonic(), {}
        for client in self.server_state.connections:
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
