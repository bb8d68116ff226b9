"""What a server process asks of the system: its port, its signals, its event loop, and enough open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from strata.errors import StrataError

_SWITCH_INTERVAL_S = 0.0002
_HANGUP: int | None = getattr(signal, "SIGHUP", None)  # the terminal was closed; unknown to Windows


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StrataError that names --host or --port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StrataError(f"--host {host}: {error.strerror}", field="--host") from None
    listener = socket.socket(family, kind, protocol)
    if os.name == "posix":  # elsewhere the option lets two servers share the port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StrataError(
                f"--port {port}: another program listens on {host}:{port} already; choose another port", field="--port"
            ) from None
        raise StrataError(f"cannot listen on {host}:{port}: {error.strerror}", field="--host") from None
    return listener


@contextlib.contextmanager
def signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP sets `stop`; a second SIGINT or SIGTERM ends the process, whatever it does.

    A SIGHUP is nobody's impatience: kernel and shell both send one when a terminal is closed, and a service manager may
    add a SIGTERM. So it never counts as the first of two. One that is ignored (`nohup`) stays so.
    """
    loop = asyncio.get_running_loop()
    told = False

    def begin(number: int) -> None:
        nonlocal told
        told = told or number != _HANGUP
        stop.set()

    def on_signal(number: int, _: FrameType | None) -> None:
        if told and number != _HANGUP:
            os._exit(128 + number)
        loop.call_soon_threadsafe(begin, number)

    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if _HANGUP is not None and signal.getsignal(_HANGUP) is not signal.SIG_IGN:
        numbers.append(_HANGUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def share_the_interpreter() -> None:
    """Lets a thread that waits for the GIL have it after 0.2 ms instead of 5.

    Threads that read, hash and write files come back for it between two calls, several times a block (measured: a
    restore of 300 MB takes a third less).
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which makes a streamed token cheaper; None (asyncio's own) where it does not exist, as on Windows."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def raise_descriptor_limit() -> None:
    """Lets the process open as many files as the system allows: segments and clients are many."""
    if sys.platform == "win32":
        return
    import resource  # POSIX only

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports "no limit" and then refuses it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
