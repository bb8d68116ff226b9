"""One file of a level, read and verified: header, block, whole content, manifest. Any thread; no state of its own.

Whatever is wrong with a file raises DamagedFile that names it; what the operating system refuses, OSError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from strata.errors import DamagedFile
from strata.store.content import header_page, padded_payload
from strata.store.filesystem import Filesystem
from strata.store.format import MAX_MANIFEST_BYTES, FileHeader, Manifest, decode_manifest, digest
from strata.store.fs import aligned_buffer
from strata.store.names import manifest_name
from strata.types import PAGE, pad_to_page

H = TypeVar("H", bound=FileHeader)


def read_header(fs: Filesystem, root: Path, name: str, decode: Callable[[memoryview], H]) -> H:
    """The header of the payload file `name`, checked against its name and size."""
    path = root / name
    page = aligned_buffer(PAGE)
    with _damage_in(path):
        fs.read_into(path, 0, page)
        header = decode(page)
        if header.path != name:
            raise DamagedFile("key: the file holds something else than its name says", field="key")
        size = fs.stat(path).size
        if size != header.file_bytes:
            raise DamagedFile(f"size: {size} bytes instead of {header.file_bytes}", field="size")
    return header


def read_manifest(fs: Filesystem, root: Path, serial: int) -> Manifest:
    """A manifest, checked."""
    path = root / manifest_name(serial)
    with _damage_in(path):
        manifest = decode_manifest(fs.read(path, MAX_MANIFEST_BYTES))
        if manifest.serial != serial:
            raise DamagedFile(f"serial: {manifest.serial} instead of {serial}", field="serial")
    return manifest


def read_block(fs: Filesystem, root: Path, header: FileHeader, index: int, view: memoryview) -> None:
    """Read the payload of one block into `view` and verify it; see `Level.read_block`."""
    block = header.blocks[index]
    if len(view) < block.length:
        raise ValueError(f"a view of {len(view)} bytes for a block of {block.length}")
    path = root / header.path
    padded = pad_to_page(block.length)
    whole = view[: padded if len(view) >= padded else block.length]
    with _damage_in(path):
        fs.read_into(path, block.offset, whole)
        if digest(whole[: block.length]) != block.digest:
            raise DamagedFile(f"digest: block {index} does not match it", field="digest")


def verified(fs: Filesystem, root: Path, header: FileHeader) -> Iterator[memoryview]:
    """The content of a payload file, page by page and block by block: each is overwritten by the next."""
    yield header_page(header)
    view = aligned_buffer(max(pad_to_page(block.length) for block in header.blocks))
    for i, block in enumerate(header.blocks):
        read_block(fs, root, header, i, view)
        (padded,) = padded_payload(view, block.length)
        yield padded


@contextmanager
def _damage_in(path: Path) -> Iterator[None]:
    """Name the file in what its decoder says."""
    try:
        yield
    except DamagedFile as error:
        if str(path) in error.message:
            raise
        raise DamagedFile(f"{path}: {error.message}", field=error.field) from error
