"""Runs the real `strata` command around a scripted server instead of a model; a program, not a test.

SCRIPT says what happens: "ok", "fails", "loads-forever", "stops-forever", "answers-forever", "http-fails".
"""

from __future__ import annotations

import asyncio
import os
import sys
import types
from collections.abc import AsyncGenerator, Callable
from typing import Any

from strata.config import Config
from strata.engine.protocol import Timing
from strata.errors import ModelError
from strata.serve.request import Admitted, CacheReport, Completed, Started, Text, TurnEvent, TurnRequest

SCRIPT = os.environ["SCRIPT"]
REPORT = CacheReport(source="none", reused=0, total=3)


class Server:
    model_name = "scripted"

    @classmethod
    def build(cls, config: Config) -> Server:
        return cls()

    async def start(self, on_loading: Callable[[str, float], None]) -> None:
        on_loading("model", 0.5)
        if SCRIPT == "fails":
            raise ModelError("model.gguf is damaged: bad magic")
        if SCRIPT == "loads-forever":
            await asyncio.Event().wait()

    async def stop(self) -> None:
        print("stop called", file=sys.stderr, flush=True)
        if SCRIPT == "stops-forever":
            await asyncio.Event().wait()

    async def turn(self, request: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        try:
            yield Admitted(prompt_tokens=3)
            yield Started(slot=0, cache=REPORT)
            yield Text(text="x", n_tokens=1)
            if SCRIPT == "answers-forever":
                await asyncio.Event().wait()
            timing = Timing(read_s=0.0, read_tokens=3, write_s=0.0, write_tokens=1)
            counts = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 1}
            yield Completed(reason="stop", cache=REPORT, timing=timing, **counts)
        finally:
            print("turn ended", file=sys.stderr, flush=True)

    def facts(self) -> dict[str, object]:
        return {"context_tokens": 2048, "mode": "two words"}

    def status(self) -> dict[str, object]:
        return self.facts()

    def health(self) -> tuple[bool, str]:
        return True, ""


async def failing_end(*_: object) -> None:
    raise OSError("the network is gone")


if __name__ == "__main__":
    wiring: Any = types.ModuleType("strata.serve.wiring")
    wiring.Server = Server
    sys.modules[wiring.__name__] = wiring
    import strata.cli.serve
    from strata.cli.main import main

    strata.cli.serve.GRACE_S = 1
    if SCRIPT == "http-fails":
        strata.cli.serve._Http.end = failing_end  # type: ignore[method-assign]
    main()
