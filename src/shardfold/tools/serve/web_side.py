"""The sockets, in a thread of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardfold.errors import ConfigError, UsageError

__all__ = ["WebSide"]

HEAD_SECONDS = 20.0
"""That a client has to say what it asks, up to the body."""
STALL_SECONDS = 60.0
"""In which a client has to read something of what it was sent."""
HEAD_BYTES = 32 * 2**10
MOST_CONNECTIONS = 2000
STARTS = 30.0  # seconds until the thread is there, on a loaded machine
ENDS = 3  # seconds for what is being sent when all answers are whole


class _ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, but who does not say what it asks, or does not read what it is told, is not waited
    for."""

    _patience: asyncio.TimerHandle | None = None
    _reads: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._end_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _stall(self, left: int) -> None:
        self._reads = self.loop.call_later(STALL_SECONDS, self._look, left)

    def _look(self, before: int) -> None:
        """At what is left of what was to be read then: a connection that is closed waits for it, too."""
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._stall(left)
        else:
            self.transport.abort()

    def _end_stall(self) -> None:
        if self._reads is not None:
            self._reads.cancel()
            self._reads = None

    def _wait(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_wait(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class WebSide:
    """Listens from the begin on, and answers between :meth:`start` and :meth:`stop`.

    Args:
        app: of ASGI.
        port: 0: one that is free.

    Attributes:
        url: where it is.

    Raises:
        ConfigError: the address is taken, or is none of this machine.
    """

    def __init__(self, app: Any, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(1024)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"--host {host} --port {port} cannot be listened at: {error.strerror}.") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http=_ImpatientProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=ENDS,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self._app, self._server = app, uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="shardfold-serve", daemon=True)
        self._there = threading.Event()

    def start(self) -> None:
        """
        Raises:
            UsageError: the thread does not start.
        """
        self._thread.start()
        if not self._there.wait(STARTS):
            raise UsageError(f"the thread that listens at {self.url} did not start within {STARTS:g} s.")

    def stop(self) -> None:
        """No more connections; what is being sent is sent, for some seconds."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._app.attach(asyncio.get_running_loop())
        self._there.set()
        await self._server.serve(sockets=[self._socket])  # off the main thread it leaves signals alone
