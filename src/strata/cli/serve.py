"""The process behind `strata serve`: port, progress while the model loads, HTTP, signals, an orderly end.

The order matters: the port is taken before the model is loaded, so that a second server fails at once; HTTP answers
"loading" from the first moment; at the end HTTP closes before the conversations are put away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Generator, Iterator

import uvicorn
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import strata
from strata.cli.process import bind, loop_factory, raise_descriptor_limit, share_the_interpreter, signals
from strata.config import Config, info_line
from strata.serve.wiring import Server
from strata.web.app import Doorway, create_app

GRACE_S = 10
"""How long a stopping server waits for answers in progress."""

_log = logging.getLogger("strata")


def serve(config: Config) -> int:
    """Runs the server until a signal ends it; returns the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    for warning in config.warnings:
        _log.warning("%s", warning)
    raise_descriptor_limit()
    share_the_interpreter()
    with bind(config.host, config.port) as listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(config, listener))


async def _run(config: Config, listener: socket.socket) -> int:
    url = _url(config.host, listener.getsockname()[1])
    server, doorway = Server.build(config), Doorway()
    http = _Http(doorway)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    stop = asyncio.Event()
    with signals(stop):
        stopping = asyncio.create_task(stop.wait())
        try:
            loaded = await _load(server, doorway, stopping)
            if loaded:
                doorway.open(create_app(server, config.api_key, names=_names(config.host)))
                _announce(config, server, url)
                await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            return 0
        finally:
            if stop.is_set():
                print(f"stopping; answers in progress get {GRACE_S} s (a second signal ends at once)", file=sys.stderr)
            stopping.cancel()
            try:
                await http.end(serving)
            finally:  # what memory alone has is put away, whatever became of HTTP
                await server.stop()


async def _load(server: Server, doorway: Doorway, stopping: asyncio.Task[bool]) -> bool:
    """Starts the server; False when a signal came first. Raises StrataError when it cannot start."""

    def on_loading(stage: str, fraction: float) -> None:
        doorway.doing = f"{stage} {fraction:.0%}"
        show(stage, fraction)

    with _progress() as show:
        loading = asyncio.create_task(server.start(on_loading=on_loading))
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            return True
        loading.cancel()
        await asyncio.wait({loading})
        return False


class _Http(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process before the conversations are put away."""

    def __init__(self, doorway: Doorway) -> None:
        self._doorway = doorway
        super().__init__(
            uvicorn.Config(
                doorway,
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2 * GRACE_S,  # the backstop; `end` comes first
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def end(self, serving: asyncio.Task[None]) -> None:
        """Stops accepting, gives the answers in progress their time, then cuts them off; returns when all are done."""
        self.should_exit = True
        done, _ = await asyncio.wait({serving}, timeout=GRACE_S)
        if not done:
            self._doorway.cut_off_answers()
        await serving


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Shows how far loading is on stderr: bars on a terminal, else a line whenever a stage begins."""
    console = Console(stderr=True)
    stages: dict[str, TaskID] = {}
    if not console.is_terminal:

        def say(stage: str, _: float) -> None:
            if stage not in stages:
                stages[stage] = TaskID(len(stages))
                print(f"loading: {stage}", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("loading {task.description:10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:

        def show(stage: str, fraction: float) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=1.0)
            bars.update(stages[stage], completed=fraction)

        yield show


def _announce(config: Config, server: Server, url: str) -> None:
    _log.info("%s", info_line({"version": strata.__version__, **config.public(), **server.facts()}))
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    print(
        f"\nStrata serves {server.model_name} at {url}\n\nTry it, in another terminal:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        """    -d '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}'\n""",
        flush=True,
    )
    for line in _kept(config):
        print(line)
    if config.last_dir_in_use is not None:
        print(
            "Stop the server (Ctrl-C), start it again and send a conversation's next turn: `cached_tokens` in the\n"
            "answer says how much of it was not read again."
        )
    print(flush=True)


def _kept(config: Config) -> Iterator[str]:
    """Every folder that this server writes to, a line each."""
    folders = {
        "Conversations are kept in": config.warm_dir_in_use or config.cold_dir_in_use,
        "and, when that is full, in": config.cold_dir_in_use if config.warm_dir_in_use else None,
        "what they drop goes to": config.archive_dir_in_use,
        "System prompts are kept in": config.system_prompt_dir_in_use,
        "Sessions that are saved lie in": config.slot_save_path,
    }
    for what, folder in folders.items():
        if folder is not None:
            yield f"{what} {folder}"


def _names(host: str) -> set[str]:
    """What this server is called: as it was told to listen, and this machine's own name where others can connect."""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return {host}
    return {host, socket.gethostname(), f"{socket.gethostname()}.local"}


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
