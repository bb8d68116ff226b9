"""What the engine process finds in its environment: how its OpenMP threads wait and how its C library allocates."""

from __future__ import annotations

from collections.abc import Mapping

from strata.store.arena import NO_LARGE_PAGES

_OPENMP_SPINS = "500"
_TUNABLES = "GLIBC_TUNABLES"
_LARGE_PAGES = "glibc.malloc.hugetlb=1"
_VECTOR_COPIES = "glibc.cpu.x86_rep_movsb_threshold=0x10000000"


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: as inherited, with defaults that llama.cpp lacks.

    OpenMP threads that wait at a barrier spin for milliseconds by default; as soon as another process wants one of the
    cores, a step takes 100 times as long (3,000 ms a token). A short spin avoids that: the writer's and the readers'
    threads want those cores too. Measured through HTTP on two cores, for 500, 2,000, 5,000 and 20,000 spins: 9.7, 8.6,
    8.5, 8.6 ms a token (medians of 3, those of 500 from 8.7 to 10.2), and beside one busy process 25, 38, 52, 45.

    glibc is told to ask for large pages, which the K/V cache then lies in (measured: captures a fifth faster without
    flash attention, whose V is read in pieces all over it), and to copy by vector moves: a blob's rows lie 12 bytes
    beside any alignment, where `rep movsb` is slow (measured in pieces of 98 KB: captures a tenth faster). What the
    user's own GLIBC_TUNABLES say goes first. Other C libraries and processors ignore it.
    """
    defaults = {"GGML_NO_BACKTRACE": "1"}  # an abort must end the process at once, not start a debugger first
    if "OMP_WAIT_POLICY" not in inherited:
        defaults["GOMP_SPINCOUNT"] = _OPENMP_SPINS
    tunables = [text for text in inherited.get(_TUNABLES, "").split(":") if text]
    given = {text.partition("=")[0] for text in tunables}
    wanted = [_VECTOR_COPIES] if inherited.get(NO_LARGE_PAGES) == "1" else [_LARGE_PAGES, _VECTOR_COPIES]
    tunables += [text for text in wanted if text.partition("=")[0] not in given]
    return defaults | dict(inherited) | {_TUNABLES: ":".join(tunables)}
