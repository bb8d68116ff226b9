"""Where the `strata` command begins. What it does is in command.py, whose imports take a third of a second.

Until a server has begun and taken the signals over, Ctrl-C ends the process at once and without a traceback.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def main() -> NoReturn:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as under nohup
        signal.signal(signal.SIGINT, _end)
    from strata.cli.command import run

    run()


if __name__ == "__main__":
    main()
