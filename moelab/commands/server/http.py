"""The server's HTTP: routes, errors, and clients that hang up."""

import asyncio
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ... import interrupts
from ...checkpoint import describe, shorten
from ...streaming.plan import memory_now
from .agents import COUNT_TOKENS, MESSAGES, RESPONSES
from .ask import Refused, Served, total
from .completions import CHAT, COMPLETIONS
from .engine import Engine
from .requests import Asked, parsed

DIALECTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS)
KEEPALIVE_S = 4  # a stream that had no event for so long gets one that keeps it alive
GRACE_S = 2  # how long after Ctrl-C clients can still receive what was written
MOST_NBYTES = 2**22  # the longest body: 16 bytes for each of 256k tokens
LEAST_NBYTES = 2**14  # a body of so many bytes is taken even if memory is short
UVICORN = {"loop": "asyncio", "http": "h11", "ws": "none", "lifespan": "off", "log_config": None}
UVICORN |= {"timeout_keep_alive": 30, "timeout_graceful_shutdown": GRACE_S}


def app(engine: Engine, served: Served, origins: Sequence[str] = ()) -> CORSMiddleware:
    """Make the application. Web pages of ``origins`` (CORS; * for all) may ask, too."""
    card = {"id": served.name, "object": "model", "owned_by": "moelab", "created": int(time.time())}
    card |= {"max_model_len": served.positions, "context_length": served.positions}
    fixed = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [card]}}
    fixed[f"/v1/models/{served.name}"] = card
    ways = [(path, JSONResponse(said), "GET") for path, said in fixed.items()]
    ways += [(d.path, _Endpoint(d, engine, served, origins), "POST") for d in DIALECTS]
    ways += [(path.removeprefix("/v1"), *way) for path, *way in ways]  # base URLs may lack /v1
    routes = [Route(path, endpoint, methods=[method]) for path, endpoint, method in ways]

    async def refuse(request, error):
        words = f"{request.method} {shorten(request.scope['path'], 100)}: {error.detail}"
        return JSONResponse(*_error(CHAT, Refused(words, status=error.status_code)))

    made = Starlette(routes=routes, exception_handlers={HTTPException: refuse})
    return CORSMiddleware(made, origins, allow_methods=["*"], allow_headers=["*"])


def _error(dialect, error):
    """Log an error, and make the body and the status that tell a client of it."""
    passes = isinstance(error, MemoryError | asyncio.CancelledError)  # another try may succeed
    status = 503 if passes else getattr(error, "status", 500)
    words = describe(error) if status == 500 else shorten(error, 1000)
    logging.log(logging.ERROR if status >= 500 else logging.INFO, words)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return dialect.error(words, param, status, code), status


class _Endpoint:
    """An ASGI application that answers a dialect's requests."""

    def __init__(self, dialect, engine, served, origins):
        self.dialect, self.engine, self.served, self.origins = dialect, engine, served, origins

    async def __call__(self, scope, receive, send):
        request, told, begun = Request(scope, receive), asyncio.Queue(), False
        loop = asyncio.get_running_loop()

        def tell(event, index=0):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(told.put_nowait, (event, index))

        async def write(*events, status=200, more=False):
            """Send a whole answer; the first call with ``more`` begins a stream of events."""
            nonlocal begun
            if not (begun or more):
                return await JSONResponse(*events, status)(scope, receive, send)
            if not begun:
                head = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": status, "headers": head})
            begun, data = True, "".join(map(_encode, events))
            await send({"type": "http.response.body", "body": data.encode(), "more_body": more})

        try:
            check = threading.Thread(target=self._check, args=(await self._read(request), tell))
            check.daemon = True  # the process ends without waiting for a template without end
            check.start()
            asked, _ = await _next(told)
            if await request.is_disconnected():
                raise ClientDisconnect
            watch = asyncio.create_task(receive())  # this ends when the client is gone
            watch.add_done_callback(lambda _: tell(ClientDisconnect()))
            await self._answer(asked, write, told, tell)
        except ClientDisconnect:
            logging.info("%s: the client has gone", scope["path"])
        except (Exception, asyncio.CancelledError) as error:
            words, status = _error(self.dialect, error)
            with suppress(asyncio.CancelledError):  # the client can get no answer any more
                await write(words, status=status)

    async def _read(self, request):
        """Read all of a body, even of a refused one: else the client would lose the answer."""
        parts, body, origin = request.stream(), bytearray(), request.headers.get("origin")
        free = memory_now()[1] // 2 // 260  # a tokenizer takes 260 bytes for each byte of a text
        longest = max(LEAST_NBYTES, min(MOST_NBYTES, free))
        try:
            if origin and not {"*", origin}.intersection(self.origins):
                raise Refused(f"Origin: {origin[:100]} is not in --allowed-origins", status=403)
            async for part in parts:
                body += part
                if len(body) > longest:
                    raise Refused(f"body: expected at most {longest} bytes, got more", status=413)
            return body
        except Refused:
            body = part = b""
            async for _ in parts:
                pass
            raise

    def _check(self, body, tell):
        """Check a body, and put the request or the error on the queue."""
        try:
            tell(Asked(self.dialect, parsed(body), self.served))
        except Exception as error:
            tell(error)

    async def _answer(self, asked, write, told, tell):
        """Write an answer, whole or in parts."""
        texts, said_s, answer = [[] for _ in asked.asks], time.monotonic(), asked.answer
        if asked.stream:
            await write(*answer.begin(), more=True)
        with ExitStack() as begun:
            for index, ask in enumerate(asked.asks):
                begun.callback(self.engine.begin(ask, partial(tell, index=index)))
            while not all(parts and parts[-1].finish for parts in texts):
                part, index = await _next(told, KEEPALIVE_S if asked.stream else None)
                events = []
                if part:
                    texts[index].append(part := asked.splitters[index].add(part))
                    events = [*answer.part(index, part)] if asked.stream else []
                # No event comes while a prompt is read, nor while a tool call is incomplete.
                if asked.stream and not events and time.monotonic() - said_s >= KEEPALIVE_S:
                    events = [answer.idle()]
                if events:
                    await write(*events, more=True)
                    said_s = time.monotonic()
            texts = [*map(total, texts)]
            await write(*(answer.end(texts) if asked.stream else [answer.whole(texts)]))


async def _next(told, within_s=None):
    """Return the next event, or None if none comes in time; raise an event that is an error."""
    event, index = None, None
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            event, index = await told.get()
    if isinstance(event, Exception):
        raise event
    return event, index


def _encode(event):
    if event is None:
        return ": keepalive\n\n"  # an SSE comment, which clients skip
    kind = f"event: {event['type']}\n" if "type" in event else ""
    data = event if isinstance(event, str) else json.dumps(event)
    return f"{kind}data: {data}\n\n"


def listen(host: str, port: int) -> socket.socket:
    """Listen, so that clients wait for the ``Server``; ValueError says why listening failed."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"serve: --host {host} --port {port}: {error}. Choose others.") from error


class Server(uvicorn.Server):
    """Answers at a socket until Ctrl-C, or until an error ends the engine or another rank's."""

    def __init__(self, app: CORSMiddleware, engine: Engine, listening: socket.socket):
        super().__init__(uvicorn.Config(app, **UVICORN))
        self.engine, self.socket, self._asked = engine, listening, 0

    def answer(self) -> None:
        """Answer requests in the main thread until the end, then stop the engine."""
        host, port = self.socket.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"moelab: http://{host}:{port}/v1 answers; Ctrl-C ends it", file=sys.stderr)
        # These handlers stay until the process ends.
        for ends in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(ends) is not signal.SIG_IGN:  # nohup ignores a hang-up
                signal.signal(ends, self.handle_exit)
        try:
            self.run([self.socket])
        finally:
            self.engine.stop()

    def handle_exit(self, *_):
        """Let the server end: an exception would abort MLX. The fourth signal ends the process."""
        self.should_exit, self._asked = True, self._asked + 1
        if self._asked > 3:
            interrupts.end()

    async def on_tick(self, counter):
        """End all answers after Ctrl-C. If the engine ends with an error, the server ends."""
        self.engine.check()
        for task in self.server_state.tasks if self.should_exit else ():
            task.cancel("the server was stopped")
        return await super().on_tick(counter)
