"""What is in a payload file, as buffers that O_DIRECT takes: the header's page, and payloads padded to whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.store.format import FileHeader, digest
from strata.store.fs import aligned_buffer
from strata.types import PAGE, pad_to_page

_ZEROS = bytes(PAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingFile:
    """A segment or checkpoint file that is written under a temporary name and not published yet."""

    temporary: str
    final: str
    size: int
    linked: bool = False  # a second name of another level's file


def header_page(header: FileHeader) -> memoryview:
    """The header as one page that O_DIRECT takes."""
    page = aligned_buffer(PAGE)
    page[:] = header.encode()
    return page


def file_content(header: FileHeader, payloads: Sequence[memoryview]) -> list[memoryview]:
    """The header's page, with its digests, and the padded payloads. ValueError for payloads that are too short."""
    buffers: list[memoryview] = []
    for block, payload in zip(header.blocks, payloads, strict=True):
        if len(payload) < block.length:
            raise ValueError(f"a payload of {len(payload)} bytes for a block of {block.length}")
        buffers += padded_payload(payload, block.length)
    if not header.has_digests:
        blocks = zip(header.blocks, payloads, strict=True)
        header = header.with_digests([digest(payload[: block.length]) for block, payload in blocks])
    return [header_page(header), *buffers]


def padded_payload(payload: memoryview, length: int) -> list[memoryview]:
    """The payload as whole pages whose rest is zero: another conversation's bytes may lie in the padding."""
    padded = pad_to_page(length)
    rest = memoryview(_ZEROS)[: padded - length]
    if len(payload) < padded or payload.readonly:
        return [payload[:length], rest]
    payload[length:padded] = rest
    return [payload[:padded]]
