"""The command ``serve``: mlx-lm's HTTP server with a streamed model (``answers``).

Requests that arrive together are computed as one batch; with a draft, ``--kv-bits`` or caches that
cannot be merged, one after another. mlx-lm's handler answers, ours checks requests and clients.
"""

import argparse
import io
import json
import logging
import os
import re
import select
import signal
import socket
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from http.server import ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from mlx_lm import server

from ..streaming.config import StreamConfig
from ..streaming.plan import memory_now
from ..streaming.ranks import joined
from ..streaming.room import RESERVE_NBYTES
from ..streaming.session import session_of
from . import arguments
from . import request_checks as checks
from .answers import GRACE_S, SEAMS, Generator, Prompts, Provider
from .argument_types import at_least, json_object, nbytes, not_empty, positive
from .stream_options import add_stream_options, streaming_given

SILENT_S = 30  # a client that sends or takes nothing for so long is dropped


class Handler(server.APIHandler):
    """One request over HTTP."""

    timeout = SILENT_S
    _begun = False  # whether the answer's headers were sent

    def do_POST(self):
        try:
            self.rfile = io.BytesIO(self._body())  # mlx-lm reads the request from there
            origin = self.headers.get("Origin")
            checks.check_origin(origin, self.response_generator.cli_args.allowed_origins)
            super().do_POST()
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            self._refuse(error)

    def _body(self):
        """Read the request's body; drop one that ``check_size`` refuses, and raise its error."""
        length = self.headers.get("Content-Length", "")
        size = int(length) if re.fullmatch("[0-9]{1,18}", length) else 0  # mlx-lm refuses others
        takes_images = self.response_generator.model_provider.processor is not None
        try:
            checks.check_size(size, takes_images, memory_now()[1])
        except Exception:
            # Read on: a client that still sends would lose the answer.
            while got := self.rfile.read(min(size, 1 << 20)):
                size -= len(got)
            raise
        return self.rfile.read(size)

    def _refuse(self, error):
        """Answer with an error, in the stream if that has begun."""
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        logging.error(text)
        answer = json.dumps({"error": text})
        if self._begun:
            answer = f"data: {answer}\n\n"
        else:
            self._headers_buffer = []
            self._set_completion_headers(checks.status_of(error))
            self.end_headers()
        self.wfile.write(answer.encode())

    def send_response(self, code, message=None):
        """Begin an answer; where mlx-lm answers an error with 404, give the error's own status."""
        error = sys.exception()
        if code == 404 and error is not None:
            logging.error("%s: %s", type(error).__name__, error)
            code = checks.status_of(error)
        super().send_response(code, message)

    def end_headers(self):
        super().end_headers()
        self._begun = True

    def handle_models_request(self):
        """Answer with a list of the one served model or, if its name is asked for, with itself."""
        name = self.response_generator.model_provider.name
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "moelab"}
        asked = unquote(urlsplit(self.path).path.removeprefix("/v1/models").strip("/"))
        if asked not in ("", name):
            said = f"expected the model {name!r}, got {asked[:100]!r}"
            return self._refuse(checks.Refused(said, 404))
        self._set_completion_headers()
        self.end_headers()
        answer = model if asked else {"object": "list", "data": [model]}
        self.wfile.write(json.dumps(answer).encode())

    def validate_model_parameters(self) -> None:
        """Run mlx-lm's checks, then check the fields that mlx-lm does not check or know."""
        provider, args = self.response_generator.model_provider, self.response_generator.cli_args
        drafted = self.num_draft_tokens
        if drafted == checks.AUTO:
            self.num_draft_tokens = 0
        try:
            super().validate_model_parameters()
        except (TypeError, OverflowError) as error:
            raise ValueError("logit_bias must be a dict of int to float") from error
        self.num_draft_tokens = drafted
        checks.check_body(self.body, provider.processor is not None)
        for name in checks.FLOATS:
            setattr(self, name, float(getattr(self, name)))
        checks.check_name("model", self.requested_model, provider.name, args.model)
        checks.check_name("draft_model", self.requested_draft_model, args.draft_model)
        checks.check_name("adapters", self.adapter, args.adapter_path, None)
        self.requested_model, self.requested_draft_model = provider.name, checks.DEFAULT
        self.adapter = None

    def handle_completion(self, request, stop_words):
        request.check_client = self._check_client
        super().handle_completion(request, stop_words)

    def _check_client(self):
        """Raise ConnectionAbortedError if the client has hung up; mlx-lm notices when it writes."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        # Poll first: on a socket with a timeout, ``recv`` waits if nothing has come.
        if poll.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError("it closed the connection")


class Server(ThreadingHTTPServer):
    """Listens once it is made, so that a busy port is reported before a model is loaded."""

    request_queue_size = 1024  # clients that wait to be accepted; with 5 some are reset

    def __init__(self, host: str, port: int):
        self._check = lambda: None
        try:
            self.address_family, *_, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            super().__init__(address, Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"serve: cannot listen at --host {host} --port {port}: {error}. Give another."
            ) from error

    def service_actions(self):
        self._check()

    def handle_error(self, request, client_address):
        error = sys.exception()
        if isinstance(error, ConnectionError):
            logging.info("Client %s has gone: %s", client_address[0], error)
        else:
            logging.error("%s: %s", type(error).__name__, error)

    def answer(self, generator: Generator) -> None:
        """Answer requests until Ctrl-C."""
        self.RequestHandlerClass, self._check = partial(Handler, generator), generator.check
        host, port = self.server_address[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"moelab: http://{host}:{port}/v1 answers; Ctrl-C ends it", file=sys.stderr)
        before = signal.signal(signal.SIGINT, _ctrl_c)
        try:
            with suppress(KeyboardInterrupt):
                self.serve_forever()
        finally:
            generator.stop_and_join()
            pressed = signal.getsignal(signal.SIGINT) is not _ctrl_c
            signal.signal(signal.SIGINT, signal.SIG_IGN if pressed else before)


def _ctrl_c(*_):
    """End the server at the first Ctrl-C and ignore more for some seconds.

    MLX aborts a process that ends before its threads do. If the server takes longer, one more
    Ctrl-C ends it at once.
    """
    patience = time.monotonic() + 2 * GRACE_S
    signal.signal(signal.SIGINT, lambda *_: os._exit(130) if time.monotonic() > patience else None)
    raise KeyboardInterrupt


def serve(args: argparse.Namespace, config: StreamConfig) -> None:
    """Answer requests until Ctrl-C; of several ranks, rank 0 listens and the others follow."""
    if missing := [name for name in SEAMS if not hasattr(server.ResponseGenerator, name)]:
        raise ValueError(
            f"serve: mlx-lm {server.__version__} has no server.ResponseGenerator.{missing[0]}, "
            "which this command builds on. Install mlx-lm 0.32."
        )
    group = joined()
    follows = group is not None and group.rank() > 0
    level = "ERROR" if follows else args.log_level
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(message).1000s")
    server.maybe_set_recommended_wired_limit()
    with nullcontext() if follows else Server(args.host, args.port) as listening:
        provider = Provider(args, config, group)
        provider.load_default()  # an error here ends the command
        generator = Generator(provider, _prompts(provider, args))
        if follows:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when to end
            generator.join()
            generator.check()
        else:
            listening.answer(generator)


def _prompts(provider, args):
    """Make the store of earlier prompts, with the memory that other texts and the draft leave."""
    plan, ranks = session_of(provider.model).plan, provider.ranks
    if args.prompt_cache_bytes is None:
        # The other texts may need their caches all at once.
        texts = args.prompt_concurrency + args.decode_concurrency - 2
        texts *= provider.is_batchable and args.kv_bits is None
        args.prompt_cache_bytes = (
            max(0, plan.all_caches_nbytes - texts * plan.caches_nbytes) if plan else sys.maxsize
        )
    if ranks:  # all keep the same prompts
        args.prompt_cache_bytes = min(ranks.gather(args.prompt_cache_bytes))
        arguments.compare_arguments(ranks, args)
    # Prompts leave free what is reserved for caches, and what ``Room`` keeps free in each call.
    free = plan.reserved_nbytes + RESERVE_NBYTES if plan and not ranks else 0
    return Prompts(args.prompt_cache_size, args.prompt_cache_bytes, free)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "python -m moelab serve [options] MODEL"
    parser.description = (
        "mlx-lm's HTTP server, with the experts on disk. By default only this machine may ask."
    )
    arguments.add_model(parser)
    who = "0.0.0.0: other machines may ask, without password (default: %(default)s)"
    parser.add_argument("--host", type=not_empty, metavar="NAME", default="127.0.0.1", help=who)
    parser.add_argument(
        "--allowed-origins",
        type=lambda text: text.split(","),
        metavar="URLS",
        default=[],
        help="of web pages that may ask (CORS), or * (default: none)",
    )
    arguments.add_number(parser, "--port", 8080, "0 takes a free one", at_least(0, 65535))
    arguments.add_draft(parser)
    arguments.add_number(parser, "--max-tokens", 512, "of an answer that does not say")
    arguments.add_sampling(parser)
    arguments.add_number(parser, "--prompt-cache-size", 10, "prompts and answers to keep")
    size = "their memory, as in 2GB (default: what slots auto leaves)"
    parser.add_argument("--prompt-cache-bytes", type=nbytes(), metavar="SIZE", help=size)
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    arguments.add_hidden(parser, "--chat-template", default="")
    arguments.add_hidden(parser, "--chat-template-args", type=json_object, default={})
    arguments.add_hidden(parser, "--decode-concurrency", type=positive, default=32)
    arguments.add_hidden(parser, "--log-level", choices=levels, default="INFO")
    arguments.add_hidden(parser, "--prompt-concurrency", type=positive, default=8)
    arguments.add_hidden(parser, "--use-default-chat-template", action="store_true")
    arguments.add_kv_cache(parser)
    arguments.add_loading(parser)
    arguments.add_refused(parser, arguments.NO_PIPELINE, "--pipeline")
    add_stream_options(parser, sampling=True)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    config = streaming_given(args)
    args.top_k = args.sampling_top_k  # the name in mlx-lm's server
    serve(args, config)
