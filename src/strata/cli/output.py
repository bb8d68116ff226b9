"""What is said on stdout and stderr, and that saying it never fails.

A full disk under the log, a `tee` that is gone or a closed terminal must neither keep a server from starting nor its
conversations from being put away. Whoever writes (print, logging, rich, a library), writes through this.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO, cast

_STDERR = 2


class Heedless:
    """A text stream that drops what it cannot write. All but writing is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __repr__(self) -> str:
        return f"Heedless({self._stream!r})"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed, or lacks the characters
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def never_fail() -> None:
    """From now on no message fails, neither this process's nor for want of a descriptor that others inherit."""
    _fill_standard_descriptors()
    sys.stdout = cast(TextIO, Heedless(sys.stdout or os.fdopen(1, "w")))
    sys.stderr = cast(TextIO, Heedless(sys.stderr or os.fdopen(_STDERR, "w")))


def _fill_standard_descriptors() -> None:
    """One that was closed (`2>&-`) becomes the null device: else the next file that is opened takes its place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
