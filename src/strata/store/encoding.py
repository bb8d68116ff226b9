"""What manifests and file headers have in common: the digest, magic and version, the page of a header, named checks.

Pure. Whatever fails a check raises DamagedFile, whose `field` names the culprit; nothing is allocated for a length
before it was bounded. All integers are little endian.
"""

from __future__ import annotations

import struct

import xxhash

from strata.errors import DamagedFile
from strata.types import PAGE, StageShape

MAX_TOKENS = 1 << 24
MAX_LAYERS = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 30
"""Of one segment's stage."""
DIGEST_BYTES = 16
NO_DIGEST = bytes(DIGEST_BYTES)
PREAMBLE = struct.Struct("<8sQ")  # magic, version


def digest(data: bytes | memoryview) -> bytes:
    """xxh3-128: the checksum of blocks, headers and manifests."""
    return xxhash.xxh3_128_digest(data)


def require(holds: bool, field: str, problem: str) -> None:
    if not holds:
        raise DamagedFile(f"{field}: {problem}", field=field)


def is_zero(data: bytes) -> bool:
    """Whether nothing but zeros is there. Compared at once: `any` would look at byte after byte."""
    return data == bytes(len(data))


def check_preamble(data: bytes | memoryview, magic: bytes, version: int, least: int) -> int:
    """The version found, which is at most `version`; at least `least` bytes are there."""
    require(len(data) >= least, "length", f"only {len(data)} bytes, at least {least} expected")
    found_magic, found_version = PREAMBLE.unpack_from(data)
    require(found_magic == magic, "magic", f"{found_magic!r} instead of {magic!r}")
    if found_version > version:
        problem = (
            f"{found_version} is newer than this Strata knows ({version}); use the Strata that wrote it, or a later one"
        )
        require(False, "version", problem)
    require(found_version > 0, "version", f"{found_version} instead of {version}")
    return int(found_version)


def seal_page(magic: bytes, version: int, fields: bytes) -> bytes:
    """A header's page: preamble, fields, zeros, and the digest of it all."""
    content = (PREAMBLE.pack(magic, version) + fields).ljust(PAGE - DIGEST_BYTES, b"\0")
    return content + digest(content)


def open_page(page: bytes | memoryview, magic: bytes, version: int) -> bytes:
    """What lies between the preamble and the digest of a header's page."""
    check_preamble(page, magic, version, PAGE)
    require(len(page) == PAGE, "length", f"{len(page)} bytes instead of {PAGE}")
    content = bytes(page[: PAGE - DIGEST_BYTES])
    require(digest(content) == bytes(page[PAGE - DIGEST_BYTES :]), "checksum", "the header does not match it")
    return content[PREAMBLE.size :]


def check_shape(shape: StageShape, field: str) -> None:
    require(0 <= shape.layer_first < shape.layer_end <= MAX_LAYERS, field, f"layers of {shape}")
    sane = 0 <= shape.base_bytes <= MAX_PAYLOAD_BYTES and 0 < shape.token_bytes <= MAX_PAYLOAD_BYTES
    require(sane, field, f"sizes of {shape}")
