"""How much memory may be taken now: the one door for asking the operating system.

Covers what the system has available and what the containers around this process (cgroup v2 and v1) leave of it; the
tighter one counts. Unknown is None, never 0. Not here: how much of it must stay free (rules/placement.py), and what the
process itself has reserved (store/arena.py). Nothing is kept between calls: limits change, processes are moved.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as the largest count of pages; what a machine can have is far below this."""


def available_memory() -> int | None:
    """Bytes that may be taken now: min(system, containers). None when unknown. Takes well below a millisecond."""
    try:
        if sys.platform.startswith("linux"):
            return linux_available(Path("/"))
        if sys.platform == "win32":
            return windows_available(ctypes.windll.kernel32.GlobalMemoryStatusEx)
        return int(psutil.virtual_memory().available)
    except (OSError, ValueError):
        return None


# -------------------------------------------------------------------------------------------------------------- Windows


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of sysinfoapi.h; `available_page_file` is what this process can still commit."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("memory_load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("available_physical", ctypes.c_uint64),
        ("total_page_file", ctypes.c_uint64),
        ("available_page_file", ctypes.c_uint64),
        ("total_virtual", ctypes.c_uint64),
        ("available_virtual", ctypes.c_uint64),
        ("available_extended_virtual", ctypes.c_uint64),
    )


def windows_available(fill: Callable[[object], int]) -> int:
    """The smaller of free physical memory and what may still be committed. `fill` is GlobalMemoryStatusEx."""
    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    if not fill(ctypes.byref(status)):
        raise ValueError("GlobalMemoryStatusEx failed")
    return int(min(status.available_physical, status.available_page_file))


# ---------------------------------------------------------------------------------------------------------------- Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """A mounted cgroup tree that may limit memory: its version, where it is mounted, and this process's place in it."""

    version: int
    mount: PurePosixPath
    place: PurePosixPath  # relative to the mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The files of one cgroup version, and the line of memory.stat that counts file cache nobody used lately."""

    limit: str
    usage: str
    inactive: bytes


NAMES = {
    1: Names(limit="memory.limit_in_bytes", usage="memory.usage_in_bytes", inactive=b"total_inactive_file "),
    2: Names(limit="memory.max", usage="memory.current", inactive=b"inactive_file "),
}


def linux_available(root: Path) -> int:
    """min(MemAvailable, headroom of every cgroup above this process). `root` is "/", but for tests.

    A cgroup file that is not there is no limit; one that is there and cannot be understood makes the answer unknown.
    """
    found = [_mem_available((root / "proc/meminfo").read_bytes())]
    groups, mounts = _read(root / "proc/self/cgroup"), _read(root / "proc/self/mountinfo")
    if groups is not None and mounts is not None:
        for hierarchy in hierarchies(groups.decode(errors="replace"), mounts.decode(errors="replace")):
            for folder in folders_above(root, hierarchy):
                headroom = _headroom(folder, NAMES[hierarchy.version])
                if headroom is not None:
                    found.append(headroom)
    return min(found)


def hierarchies(groups: str, mounts: str) -> Iterator[Hierarchy]:
    """The cgroup trees that may limit memory, out of the texts of /proc/self/cgroup and /proc/self/mountinfo."""
    places: dict[int, PurePosixPath] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            places[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            places[1] = PurePosixPath(path)
    for line in mounts.splitlines():
        mounted, _, described = line.partition(" - ")
        version = _version(described)
        if version in places:
            top, mount = mounted.split(" ")[3:5]
            # In a container the mount may show only a part of the tree, and the place may lie outside of that part:
            # then the mount itself is the nearest that can be seen.
            place = places[version]
            inside = ".." not in place.parts and place.is_relative_to(_unescaped(top))
            relative = place.relative_to(_unescaped(top)) if inside else PurePosixPath()
            yield Hierarchy(version=version, mount=PurePosixPath(_unescaped(mount)), place=relative)


def _version(described: str) -> int:
    """Which cgroup version limits memory in this mount; 0 for every other mount. `described`: type, source, options."""
    if described.startswith("cgroup2 "):
        return 2
    return 1 if described.startswith("cgroup ") and "memory" in described.split(" ")[-1].split(",") else 0


def folders_above(root: Path, hierarchy: Hierarchy) -> list[Path]:
    """The folders of the process's cgroup and of all its ancestors, up to the mount."""
    mount = root / hierarchy.mount.relative_to("/")
    return [mount / place for place in (hierarchy.place, *hierarchy.place.parents)]


def _headroom(folder: Path, names: Names) -> int | None:
    """What this cgroup still allows, in bytes; None when it sets no limit."""
    limit_text = _read(folder / names.limit)
    if limit_text is None or limit_text.strip() == b"max":
        return None
    limit = _number(limit_text)
    if limit >= NO_LIMIT:
        return None
    usage_text = _read(folder / names.usage)
    if usage_text is None:
        raise ValueError(f"{folder}: a limit, but no usage")
    # The kernel takes this cache back before it refuses memory; what is in use lately it would not give up so easily.
    stat = _read(folder / "memory.stat") or b""
    cache = [line for line in stat.splitlines() if line.startswith(names.inactive)]
    return max(0, limit - _number(usage_text) + sum(_number(line.removeprefix(names.inactive)) for line in cache))


def _mem_available(meminfo: bytes) -> int:
    for line in meminfo.splitlines():
        if line.startswith(b"MemAvailable:"):
            return _number(line.removeprefix(b"MemAvailable:").removesuffix(b"kB")) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable")


def _read(path: Path) -> bytes | None:
    """The file's content, or None when it does not exist. Other failures are the caller's "unknown"."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _number(text: bytes) -> int:
    if not re.fullmatch(rb"\s*[0-9]{1,20}\s*", text):
        raise ValueError(f"not a number of bytes: {text!r}")
    return int(text)


def _unescaped(path: str) -> str:
    """mountinfo writes space, tab, newline and backslash as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
