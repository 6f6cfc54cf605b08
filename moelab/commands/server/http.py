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
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ...checkpoint import describe, shorten
from ...streaming.plan import memory_now
from .ask import Refused, total

SILENT_S = 30  # a client that sends no whole request, or takes nothing, for so long is dropped
KEEPALIVE_S = 10  # between the comments in a stream that has nothing to say
GRACE_S = 2  # at Ctrl-C, clients have so long to take what was written
MOST_NBYTES = 2**22  # of a request: 16 for each of 256k tokens
SMALL_NBYTES = 2**14  # larger ones are checked one after another, and refused if memory is short
TOKENS_NBYTES = 260  # memory that a tokenizer takes for each byte of a text
BODY = TypeAdapter(dict[str, Any])
UVICORN = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off", "log_config": None}
UVICORN |= {"timeout_keep_alive": SILENT_S, "timeout_graceful_shutdown": GRACE_S}


def app(engine: Any, served: Any, dialects: list[type], origins: list[str]) -> CORSMiddleware:
    """Make the application. Web pages of ``origins`` (CORS; * for all) may ask, too."""
    card = {"id": served.name, "object": "model", "owned_by": "moelab", "created": int(time.time())}
    fixed = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [card]}}
    fixed[f"/v1/models/{served.name}"] = card
    routes = [Route(path, JSONResponse(said), methods=["GET"]) for path, said in fixed.items()]
    for dialect in dialects:
        endpoint = _Endpoint(dialect, engine, served, origins)
        routes += [Route(path, endpoint, methods=["POST"]) for path in dialect.paths]

    async def refuse(request, error):
        words = f"{request.method} {shorten(request.scope['path'], 100)}: {error.detail}"
        return JSONResponse(*_error(dialects[0], Refused(words, status=error.status_code)))

    made = Starlette(routes=routes, exception_handlers={HTTPException: refuse})
    return CORSMiddleware(made, origins, allow_methods=["*"], allow_headers=["*"])


def _error(dialect, error):
    """What a client is told of an error, and the status."""
    passes = isinstance(error, MemoryError | asyncio.CancelledError)  # another try may succeed
    status = 503 if passes else getattr(error, "status", 500)
    words = describe(error) if status == 500 else str(error)[:1000]
    logging.log(logging.ERROR if status >= 500 else logging.INFO, words)
    return dialect.error(words, getattr(error, "param", None), status), status


class _Endpoint:
    """Answers the requests of a dialect (an application of ASGI)."""

    large = threading.Lock()  # one large request is checked at a time

    def __init__(self, dialect, engine, served, origins):
        self.dialect, self.engine, self.served, self.origins = dialect, engine, served, origins

    async def __call__(self, scope, receive, send):
        request, told, begun = Request(scope, receive), asyncio.Queue(), False
        loop = asyncio.get_running_loop()

        def tell(event, index=0):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, (event, index))

        async def write(*events, status=200, more=False):
            """Send a whole answer or, if there is more, begin a stream; a comment if it is idle."""
            nonlocal begun
            if not (begun or more):
                return await JSONResponse(*events, status)(scope, receive, send)
            if not begun:
                head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": status, "headers": head})
            begun, data = True, "".join(map(_encode, events)) or ": keepalive\n\n"
            await send({"type": "http.response.body", "body": data.encode(), "more_body": more})

        try:
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
        body, origin = bytearray(), request.headers.get("origin")
        async for part in request.stream():
            body += part[: most + 1 - len(body)]
        if origin and not {"*", origin}.intersection(self.origins):
            raise Refused(f"Origin: {origin[:100]} is not in --allowed-origins", status=403)
        if len(body) > most:
            raise Refused(f"body: expected at most {most} bytes, got more", status=413)
        return body

    def _check(self, body, tell):
        """Check a body, and put the request or the error on the queue."""
        try:
            with self.large if len(body) > SMALL_NBYTES else nullcontext():
                tell(self.dialect(BODY.validate_json(body), self.served))
        except ValidationError as error:
            tell(Refused(f"body: {error.errors()[0]['msg']}"))
        except Exception as error:
            tell(error)

    async def _answer(self, asked, write, told, tell):
        """Write an answer, whole or in parts."""
        events, texts = [*asked.begin()] if asked.stream else [], [[] for _ in asked.asks]
        with ExitStack() as begun:
            for index, ask in enumerate(asked.asks):
                number = self.engine.begin(ask, partial(tell, index=index))
                begun.callback(self.engine.cancel, number)
            while not all(parts and parts[-1].finish for parts in texts):
                part, index = await _next(told, KEEPALIVE_S if asked.stream else None)
                if part:
                    texts[index].append(part := asked.splitters[index].add(part))
                    events += asked.part(index, part) if asked.stream else ()
                if asked.stream:
                    await write(*events, more=True)
                    events = []
            texts = [*map(total, texts)]
            await write(*(asked.end(texts) if asked.stream else [asked.whole(texts)]))


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
    kind = f"event: {event['type']}\n" if "type" in event else ""
    data = event if isinstance(event, str) else json.dumps(event)
    return f"{kind}data: {data}\n\n"


def listen(host: str, port: int) -> socket.socket:
    """Listen, so that clients wait until there is a ``Server``; ValueError says why that fails."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"serve: --host {host} --port {port}: {error}. Give another.") from error


class Server(uvicorn.Server):
    """Answers at a socket until Ctrl-C, or until an error ends the engine of one of many ranks."""

    def __init__(self, app: CORSMiddleware, engine: Any, listening: socket.socket):
        super().__init__(uvicorn.Config(app, **UVICORN))
        self.engine, self.socket, self._silent, self._asked = engine, listening, {}, 0

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
        """End without an exception, at which MLX aborts; at the fourth Ctrl-C at once."""
        self.should_exit, self._asked = True, self._asked + 1
        if self._asked > 3:
            os._exit(130)

    async def on_tick(self, counter):
        """Drop silent clients: uvicorn waits for them without end. At Ctrl-C end all answers."""
        self.engine.check()
        for task in self.server_state.tasks if self.should_exit else ():
            task.cancel("the server was stopped")
        now, silent = time.monotonic(), {}
        for client in self.server_state.connections:
            cycle = client.cycle
            sends = cycle is None or cycle.response_complete or cycle.more_body
            if sends or client.flow.write_paused:
                # Another request, or something that was taken, makes it another wait.
                wait = client, cycle, client.transport.get_write_buffer_size()
                silent[wait] = self._silent.get(wait, now)
                if now - silent[wait] > SILENT_S:
                    client.transport.abort()
        self._silent = silent
        return await super().on_tick(counter)
