"""One directory of a level: publish, adopt, drop, quarantine, scan, read.

Covers the order in which files become durable (DESIGN §5.3) and the account of what the directory takes on disk. The
directory belongs to this Level until `close`: it holds the lock. It does not decide what is kept or dropped, counts no
references, and starts no thread.

Writing (`write_segment` to `quarantine_manifest`) belongs to one thread per level; `scan` to a time when nothing is
written. Reading (`read_header`, `read_block`) shares no mutable state and may happen on any thread at the same time,
of another level's writer too; a file that is dropped meanwhile is read to its end or is missing.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

from strata.store import reading
from strata.store.account import Account, Vanished, WriteCounts
from strata.store.content import PendingFile, file_content, header_page
from strata.store.filesystem import Buffer, Filesystem, Lock
from strata.store.format import (
    CheckpointHeader,
    FileHeader,
    Manifest,
    SegmentHeader,
    decode_checkpoint_header,
    decode_header,
    encode_manifest,
)
from strata.store.fs import Disk
from strata.store.growing import GrowingFile
from strata.store.names import (
    MAX_STAGES,
    QUARANTINED,
    SEGMENT_DIR,
    TEMPORARY,
    checkpoint_path,
    manifest_name,
    segment_path,
    serial_in,
)
from strata.store.scan import Scan, Walk, read_scan, walk
from strata.store.volume import Volume
from strata.types import Key


class Level:
    """The files of one directory. Get one from `Level.open`."""

    def __init__(self, root: Path, name: str, fs: Filesystem, lock: Lock) -> None:
        self.root = root
        self.name = name
        self.volume = Volume(fs, root)
        self.counts = WriteCounts()
        self._fs = fs
        self._lock = lock
        self._account = Account({})
        self._serial = 0
        self._temporaries = itertools.count()
        self._folders_unsynced = True  # a process killed before may have left new ones without a sync

    @classmethod
    def open(cls, root: Path, *, name: str = "cold", fs: Filesystem | None = None) -> Level:
        """Make the directory if it is missing, lock it, and list it. Changes no file that is there.

        Raises LevelError, naming the path and a remedy, when it cannot be used or another process uses it.
        """
        fs = fs or Disk()
        fs.make_dir(root)
        lock = fs.lock(root)
        try:
            fs.make_dir(root / SEGMENT_DIR)
            level = cls(root, name, fs, lock)
            level._walk()
        except BaseException:
            lock.release()
            raise
        return level

    def __repr__(self) -> str:
        return f"Level({self.name!r}, {str(self.root)!r}, {self.used_bytes} bytes)"

    @property
    def used_bytes(self) -> int:
        """What the files in the directory take on disk, as far as this process knows; see `usage`."""
        return self._account.used_bytes

    def usage(self) -> int:
        """The same by walking the directory, as `du` does."""
        return walk(self._fs, self.root).used_bytes

    def next_serial(self) -> int:
        """A serial above every one seen in the directory or given out before."""
        self._serial += 1
        return self._serial

    def scan(self, identity: bytes) -> Scan:
        """Read every manifest and sort what is there; the account starts anew from it. Changes nothing on disk."""
        found = self._walk()
        return read_scan(self._fs, self.root, found, identity)

    def close(self) -> None:
        """Give up the lock; the files stay."""
        self._lock.release()

    # ------------------------------------------------------------------------------------------------------- writing

    def write_segment(self, header: FileHeader, payloads: Sequence[memoryview]) -> PendingFile:
        """Write one stage of a segment, or a checkpoint, under a temporary name: `publish` it, or `discard` it.

        `header` is what `plan_segment` or `plan_checkpoint` gave; digests that it lacks are filled in here, those it
        has are believed. One payload per block, at least as long as its entry says. A writable payload of whole pages
        that starts at a page goes to disk as it is (O_DIRECT); the bytes behind its length are set to zero.
        """
        return self.begin_segment(header, payloads)()

    def begin_segment(
        self, header: FileHeader, payloads: Sequence[memoryview], threads: Executor | None = None
    ) -> Callable[[], PendingFile]:
        """`write_segment` in two parts: the bytes are written on `threads`, and what this returns waits for that.

        It must be called, once, by the writing thread; the payloads are in use until it returns.
        """
        buffers = file_content(header, payloads)
        final, temporary = self._names_for(header)
        write = partial(self._fs.write, self.root / temporary, buffers)
        writing = threads.submit(write) if threads is not None else None

        def finish() -> PendingFile:
            size = write() if writing is None else writing.result()
            self._written(temporary, size)
            return PendingFile(temporary=temporary, final=final, size=size)

        return finish

    def begin_growing(self, header: FileHeader) -> GrowingFile:
        """A file whose blocks come one by one; `publish` what is pending of it once it is whole, or `discard` it."""
        final, temporary = self._names_for(header)
        self._write(temporary, [header_page(header)])
        return GrowingFile(self._fs, self.root, header, final, temporary, partial(self._written, n_files=0))

    def adopt_segment(self, giver: Level, key: Key, stage: int, *, may_link: bool) -> PendingFile:
        """Bring one stage's file of a segment from another level, under a temporary name like `write_segment`.

        A second name of the giver's file where that can be had (docs/decisions/0004); else a copy, each block verified
        on its way through a buffer of at most one block. `may_link` False always copies: for a file that the giver
        keeps. Raises DamagedFile or OSError naming the giver's file (FileNotFoundError) when it cannot be had from
        there, OSError naming one of this level when that cannot take it.
        """
        return self._adopt(giver, giver.read_header(key, stage), may_link=may_link)

    def adopt_checkpoint(self, giver: Level, key: Key, *, may_link: bool) -> PendingFile:
        """`adopt_segment` for a checkpoint's file."""
        return self._adopt(giver, giver.read_checkpoint_header(key), may_link=may_link)

    def _adopt(self, giver: Level, header: FileHeader, *, may_link: bool) -> PendingFile:
        final, temporary = self._names_for(header)
        if may_link and self._link(giver.root / final, temporary):
            return PendingFile(temporary=temporary, final=final, size=header.file_bytes, linked=True)
        size = self._write(temporary, reading.verified(giver._fs, giver.root, header))
        return PendingFile(temporary=temporary, final=final, size=size)

    def publish(self, pending: Sequence[PendingFile], threads: Executor | None = None) -> None:
        """Make pending files durable under their final names: all fsyncs, all renames, then each folder once.

        On `threads`, syncs run side by side, and the device takes them together: many cost hardly more than one.
        """
        self._sync_all(self._fs.fsync, [file.temporary for file in pending], threads)
        for file in pending:
            self._rename(file.temporary, file.final)
        folders = {file.final.rpartition("/")[0] for file in pending}
        if folders and self._folders_unsynced:
            folders.add(SEGMENT_DIR)
        self._sync_all(self._fs.sync_dir, sorted(folders), threads)
        if folders:
            self._folders_unsynced = False

    def discard(self, pending: Iterable[PendingFile]) -> None:
        """Remove what is still under a temporary name. Best effort: what stays is counted by the next scan."""
        for file in pending:
            with suppress(OSError):
                self._unlink(file.temporary)

    def put_manifest(self, manifest: Manifest) -> int:
        """Commit: what it names must be published. Returns what the file takes on disk, once it is durable.

        A manifest of the same serial is replaced. When this fails, the one there before is still there, or its newer
        version is.
        """
        name = manifest_name(manifest.serial)
        is_new = name not in self._account
        temporary = self._temporary(name)
        try:
            self._write(temporary, [encode_manifest(manifest)])
            self._fsync(temporary)
            self._rename(temporary, name)
            self._sync_dir("")
        except OSError:
            for leftover in (temporary, name) if is_new else (temporary,):
                with suppress(OSError):
                    self._unlink(leftover)
            raise
        return self._account.of(name)

    def require(self, manifest: Manifest) -> None:
        """Raises Vanished when a published file of it is not there any more: it must not be committed then.

        A directory that was removed or replaced is made and locked anew. LevelError when another process has it.
        """
        counts = (len(manifest.stages_of(i)) for i in range(len(manifest.keys)))
        files = zip(manifest.keys, counts, strict=True)
        paths = [segment_path(key, stage) for key, n_stages in files for stage in range(n_stages)]
        paths += map(checkpoint_path, manifest.checkpoint_keys)
        if self._lock.is_in_place() and all(map(self._exists, paths)):
            return
        self._fs.make_dir(self.root)
        if not self._lock.is_in_place():
            lock = self._fs.lock(self.root)
            self._lock.release()
            self._lock = lock
        self._fs.make_dir(self.root / SEGMENT_DIR)
        self._walk()
        self._folders_unsynced = True
        raise Vanished(errno.ENOENT, "files were removed while it was in use; what is missing is lost", str(self.root))

    def drop(self, serials: Iterable[int], keys: Iterable[Key], threads: Executor | None = None) -> int:
        """Remove manifests, durably, then segments and checkpoints that nothing else names, durably; the bytes freed.

        A power cut meanwhile may bring one of these back (as an orphan), never a manifest without what it names.
        """
        names = [manifest_name(serial) for serial in serials]
        paths = [path for key in keys for path in self._paths_of(key)]
        freed = sum(self._unlink(name) for name in names)
        if names:
            self._sync_dir("")
        freed += sum(self._unlink(path) for path in paths)
        self._sync_all(self._sync_if_there, sorted({path.rpartition("/")[0] for path in paths}), threads)
        return freed

    def remove_files(self, paths: Iterable[str]) -> int:
        """Remove files that no manifest names: what dead writers left (before the first write), or `quarantined`."""
        return sum(self._unlink(path) for path in paths)

    def quarantined(self) -> dict[str, int]:
        """The files that were set aside, and what each takes on disk."""
        return self._account.quarantined()

    def quarantine_segment(self, key: Key, stage: int) -> bool:
        """Set a damaged segment file aside; False when it is not there."""
        return self._set_aside(segment_path(key, stage))

    def quarantine_checkpoint(self, key: Key) -> bool:
        """Set a damaged checkpoint file aside; False when it is not there."""
        return self._set_aside(checkpoint_path(key))

    def quarantine_manifest(self, serial: int) -> bool:
        """Set a damaged manifest aside; False when it is not there."""
        return self._set_aside(manifest_name(serial))

    # ------------------------------------------------------------------------------------------------------- reading

    def read_header(self, key: Key, stage: int) -> SegmentHeader:
        """A segment file's header, checked against its name and size. DamagedFile, or OSError (FileNotFoundError)."""
        return reading.read_header(self._fs, self.root, segment_path(key, stage), decode_header)

    def read_checkpoint_header(self, key: Key) -> CheckpointHeader:
        """The same for a checkpoint's file."""
        return reading.read_header(self._fs, self.root, checkpoint_path(key), decode_checkpoint_header)

    def read_manifest(self, serial: int) -> Manifest:
        """A manifest, checked. DamagedFile, or OSError (FileNotFoundError)."""
        return reading.read_manifest(self._fs, self.root, serial)

    def read_block(self, header: FileHeader, index: int, view: memoryview) -> None:
        """Read the payload of one block into `view` and verify it. DamagedFile, or OSError (FileNotFoundError).

        A view of whole pages that starts at a page is read with O_DIRECT; its padding is overwritten.
        """
        reading.read_block(self._fs, self.root, header, index, view)

    # ----------------------------------------------------------------------------- one file, on disk and in the account

    def _walk(self) -> Walk:
        found = walk(self._fs, self.root)
        self._account = Account({path: entry.allocated_bytes for path, entry in found.files.items()})
        seen = (serial_in(path) for path in (*found.files, *found.misplaced))
        self._serial = max(self._serial, *seen, 0)
        return found

    def segment_bytes(self, key: Key) -> int:
        """What the files of a segment take on disk."""
        return sum(self._account.of(path) for path in self._paths_of(key))

    def stages_of(self, key: Key) -> list[int]:
        """The stages of a segment of which there are files."""
        return [stage for stage in range(MAX_STAGES) if segment_path(key, stage) in self._account]

    def has(self, what: int | Key) -> bool:
        """Whether the account has a file of a manifest, by serial, or of a segment or checkpoint."""
        return bool(self._paths_of(what)) if isinstance(what, bytes) else manifest_name(what) in self._account

    def _exists(self, path: str) -> bool:
        with suppress(FileNotFoundError):
            self._fs.stat(self.root / path)
            return True
        return False

    def _paths_of(self, key: Key) -> list[str]:
        names = (*(segment_path(key, stage) for stage in self.stages_of(key)), checkpoint_path(key))
        return [path for path in names if path in self._account]

    def _names_for(self, header: FileHeader) -> tuple[str, str]:
        """Final and temporary name; their folder is made."""
        self._make_folder_of(header.path)
        return header.path, self._temporary(header.path)

    def _temporary(self, final: str) -> str:
        return f"{final}.{os.getpid()}-{next(self._temporaries)}{TEMPORARY}"

    def _link(self, src: Path, path: str) -> bool:
        """Give a file of another level a name here; False when it cannot have one."""
        try:
            self._fs.link(src, self.root / path)
        except OSError:
            return False
        self._account.set(path, self._fs.stat(self.root / path).allocated_bytes)
        self.counts.files_linked += 1
        return True

    def _write(self, path: str, buffers: Iterable[Buffer]) -> int:
        size = self._fs.write(self.root / path, buffers)
        self._written(path, size)
        return size

    def _written(self, path: str, n_bytes: int, n_files: int = 1) -> None:
        self._account.set(path, self._fs.stat(self.root / path).allocated_bytes)
        self.counts.bytes_written += n_bytes
        self.counts.files_written += n_files

    def _make_folder_of(self, path: str) -> None:
        """Make a payload file's folder; `publish` syncs the new ones all at once."""
        if self._fs.make_dir((self.root / path).parent, durable=False):
            self._folders_unsynced = True

    def _sync_all(self, sync: Callable[[Path], None], paths: Sequence[str], threads: Executor | None) -> None:
        if threads is None or len(paths) < 2:
            for path in paths:
                sync(self.root / path)
        else:
            futures = [threads.submit(sync, self.root / path) for path in paths]
            wait(futures)  # all of them: after a failure nothing may still be at work on these files
            for future in futures:
                future.result()
        self.counts.fsyncs += len(paths)

    def _sync_if_there(self, folder: Path) -> None:
        with suppress(FileNotFoundError):  # someone cleared it away, with what was to be dropped
            self._fs.sync_dir(folder)

    def _fsync(self, path: str) -> None:
        self._fs.fsync(self.root / path)
        self.counts.fsyncs += 1

    def _sync_dir(self, path: str) -> None:
        self._fs.sync_dir(self.root / path)
        self.counts.fsyncs += 1

    def _rename(self, src: str, dst: str) -> None:
        try:
            self._fs.replace(self.root / src, self.root / dst)
        except IsADirectoryError:
            self._set_aside(dst)
            self._fs.replace(self.root / src, self.root / dst)
        self._account.drop(src)
        self._account.set(dst, self._fs.stat(self.root / dst).allocated_bytes)

    def _unlink(self, path: str) -> int:
        """Remove a file that may be gone already; returns what it took."""
        with suppress(FileNotFoundError):
            self._fs.unlink(self.root / path)
        return self._account.drop(path)

    def _set_aside(self, path: str) -> bool:
        names = (f"{path}.{n}{QUARANTINED}" for n in itertools.count())
        target = next(name for name in names if name not in self._account)
        try:
            self._fs.replace(self.root / path, self.root / target)
        except FileNotFoundError:
            return False
        self._account.set(target, self._account.drop(path))
        self._sync_dir(path.rpartition("/")[0])
        return True
