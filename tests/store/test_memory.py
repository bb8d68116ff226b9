"""Memory telemetry: /proc/meminfo, nested cgroups of both versions, Windows, and what is unknown."""

import ctypes
import sys
import time

import psutil
import pytest

from strata.store import memory
from strata.store.memory import MemoryStatus, available_memory, hierarchies, linux_available, windows_available

KIB = 1024
GIB = 1 << 30
V1_NO_LIMIT = "9223372036854771712\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
)


class Machine:
    """A made-up root with /proc and /sys/fs/cgroup; 8 GiB are available."""

    def __init__(self, root):
        self.root = root
        self.put(
            "proc/meminfo", f"MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // KIB} kB\nBuffers: 1 kB\n"
        )

    def put(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, place, *, limit, usage=None, stat=None, place_of_process=None):
        self.put("proc/self/cgroup", f"0::{place_of_process or place}\n")
        self.put("proc/self/mountinfo", V2_MOUNT)
        self._group("sys/fs/cgroup" + place.rstrip("/"), ("memory.max", limit), ("memory.current", usage), stat)

    def v1(self, place, *, limit, usage=None, stat=None, place_of_process=None, top="/"):
        self.put("proc/self/cgroup", f"5:devices:/\n4:memory,hugetlb:{place_of_process or place}\n0::/\n")
        self.put("proc/self/mountinfo", V1_MOUNTS.format(top=top))
        folder = "sys/fs/cgroup/memory" + place.rstrip("/")
        self._group(folder, ("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", usage), stat)

    def _group(self, folder, limit, usage, stat):
        for name, text in (limit, usage, ("memory.stat", stat)):
            if text is not None:
                self.put(f"{folder}/{name}", f"{text}\n")

    def available(self):
        return linux_available(self.root)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def unknown(machine, monkeypatch):
    """Whether the public function says None of this machine, whatever it is tested on."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", "linux")
        patched.setattr(memory, "Path", lambda _: machine.root)
        return available_memory() is None


def test_without_cgroups_the_system_counts(machine):
    assert machine.available() == 8 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_s_headroom_counts_when_it_is_tighter(machine, version):
    put = getattr(machine, version)
    put("/a", limit=5 * GIB, usage=2 * GIB)
    assert machine.available() == 3 * GIB
    put("/a", limit=50 * GIB, usage=2 * GIB)
    assert machine.available() == 8 * GIB
    put("/a", limit=GIB, usage=2 * GIB)
    assert machine.available() == 0


@pytest.mark.parametrize(("version", "line"), [("v1", "total_inactive_file"), ("v2", "inactive_file")])
def test_cache_that_the_kernel_takes_back_is_no_use(machine, version, line):
    stat = f"anon 7\ninactive_file_x 5\nactive_file 9\n{line} 4096\nslab 1"
    getattr(machine, version)("/a", limit=GIB, usage=GIB, stat=stat)
    assert machine.available() == 4096


@pytest.mark.parametrize(("version", "no_limit"), [("v1", V1_NO_LIMIT), ("v2", "max")])
def test_the_tightest_of_all_ancestors_counts(machine, version, no_limit):
    put = getattr(machine, version)
    put("/", limit=6 * GIB, usage=GIB, place_of_process="/a/b/c")
    put("/a", limit=no_limit, place_of_process="/a/b/c")
    put("/a/b/c", limit=no_limit)
    assert machine.available() == 5 * GIB
    put("/a/b", limit=4 * GIB, usage=GIB, place_of_process="/a/b/c")
    assert machine.available() == 3 * GIB
    put("/a/b/c", limit=2 * GIB, usage=GIB)
    assert machine.available() == GIB
    put("/a/b/other", limit=1, usage=1, place_of_process="/a/b/c")
    assert machine.available() == GIB


@pytest.mark.parametrize(("version", "no_limit"), [("v1", V1_NO_LIMIT), ("v2", "max")])
def test_no_limit_is_not_a_number(machine, version, no_limit):
    getattr(machine, version)("/a", limit=no_limit)
    assert machine.available() == 8 * GIB


def test_a_container_that_sees_only_its_own_part_of_the_tree(machine):
    machine.v1("/", limit=GIB, usage=0, place_of_process="/docker/1f", top="/docker/1f")
    assert machine.available() == GIB
    machine.v1("/x", limit=KIB, usage=0, place_of_process="/docker/1f/x", top="/docker/1f")
    assert machine.available() == KIB


@pytest.mark.parametrize("place", ["/../../elsewhere", "/deleted/meanwhile"])
def test_a_place_that_cannot_be_seen_leaves_the_mount(machine, place):
    machine.v2("/", limit=GIB, usage=0, place_of_process=place)
    assert machine.available() == GIB


def test_both_versions_mounted(machine):
    machine.v1("/a", limit=2 * GIB, usage=GIB)
    mounts = (machine.root / "proc/self/mountinfo").read_text()
    machine.put("proc/self/mountinfo", mounts + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    machine.put("sys/fs/cgroup/unified/cgroup.procs", "1\n")
    assert machine.available() == GIB
    machine.put("sys/fs/cgroup/unified/memory.max", "4096\n")
    machine.put("sys/fs/cgroup/unified/memory.current", "0\n")
    assert machine.available() == 4096


def test_a_mount_with_a_space_in_its_name():
    (found,) = hierarchies("0::/a\n", "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n")
    assert str(found.mount) == "/my groups"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("proc/meminfo", "MemTotal: 1 kB\n"),
        ("proc/meminfo", "MemAvailable: lots kB\n"),
        ("proc/meminfo", "MemAvailable:\n"),
        ("proc/meminfo", ""),
        ("proc/self/cgroup", "nonsense\n"),
        ("proc/self/mountinfo", "30 - cgroup2 x y\n"),
        ("sys/fs/cgroup/a/memory.max", "unlimited\n"),
        ("sys/fs/cgroup/a/memory.max", ""),
        ("sys/fs/cgroup/a/memory.max", "-1\n"),
        ("sys/fs/cgroup/a/memory.current", "1e9\n"),
        ("sys/fs/cgroup/a/memory.stat", "inactive_file many\n"),
        ("sys/fs/cgroup/memory.max", "half\n"),
    ],
)
def test_what_cannot_be_understood_is_unknown(machine, monkeypatch, path, text):
    machine.v2("/a", limit=5 * GIB, usage=2 * GIB)
    assert not unknown(machine, monkeypatch)
    machine.put(path, text)
    assert unknown(machine, monkeypatch)


@pytest.mark.parametrize("path", ["proc/meminfo", "sys/fs/cgroup/a/memory.current"])
def test_what_is_missing_where_it_is_needed_is_unknown(machine, monkeypatch, path):
    machine.v2("/a", limit=5 * GIB, usage=2 * GIB)
    (machine.root / path).unlink()
    assert unknown(machine, monkeypatch)


def test_a_file_that_is_there_and_cannot_be_read_is_unknown(machine, monkeypatch):
    machine.v2("/a", limit=5 * GIB, usage=2 * GIB)
    (machine.root / "sys/fs/cgroup/a/memory.max").unlink()
    (machine.root / "sys/fs/cgroup/a/memory.max").mkdir()
    assert unknown(machine, monkeypatch)


def test_the_layout_of_memorystatusex():
    assert ctypes.sizeof(MemoryStatus) == 64
    assert (MemoryStatus.available_physical.offset, MemoryStatus.available_page_file.offset) == (16, 32)


@pytest.mark.parametrize(("physical", "commit", "available"), [(5, 7, 5), (7, 5, 5), (0, 9, 0)])
def test_windows_has_what_is_free_and_may_be_committed(physical, commit, available):
    def fill(reference):
        status = reference._obj
        assert status.length == 64
        status.available_physical, status.available_page_file = physical, commit
        return 1

    assert windows_available(fill) == available


def test_windows_refusing_to_say_is_an_error_that_means_unknown():
    with pytest.raises(ValueError, match="GlobalMemoryStatusEx"):
        windows_available(lambda reference: 0)


def test_elsewhere_psutil_is_asked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    available = available_memory()
    assert available is not None
    assert 0 < available <= psutil.virtual_memory().total


def test_this_machine_answers_quickly():
    available = available_memory()
    assert available is not None
    assert 0 <= available <= psutil.virtual_memory().total

    def once():
        begin = time.perf_counter()
        available_memory()
        return time.perf_counter() - begin

    assert min(once() for _ in range(20)) < 0.001
