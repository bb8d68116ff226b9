"""The bytes of everything a level stores: manifests and the headers of segment and checkpoint files.

The layouts are in `manifest.py`, `segment_header.py` and `checkpoint_header.py`, what they share in `encoding.py` and
`file_header.py`; this offers them all. Pure: every check that can be made on the bytes without reading another file, no
I/O. Payloads are not looked at (their digests are in the headers, `level.py` compares them).
"""

from __future__ import annotations

from strata.store.checkpoint_header import (
    CHECKPOINT_VERSION,
    MAX_CHECKPOINT_BLOCKS,
    MAX_CHECKPOINT_BYTES,
    CheckpointBlock,
    CheckpointHeader,
    checkpoint_file_bytes,
    decode_checkpoint_header,
    plan_checkpoint,
)
from strata.store.encoding import MAX_LAYERS, MAX_PAYLOAD_BYTES, MAX_TOKENS, digest
from strata.store.file_header import Block, FileHeader
from strata.store.manifest import (
    MANIFEST_VERSION,
    MAX_CHECKPOINTS,
    MAX_MANIFEST_BYTES,
    MAX_NAME_CHARS,
    CheckpointEntry,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from strata.store.names import MAX_STAGES
from strata.store.segment_header import (
    MAX_BLOCKS,
    SEGMENT_VERSION,
    BlockEntry,
    SegmentHeader,
    decode_header,
    encode_header,
    plan_segment,
    segment_file_bytes,
)

__all__ = [
    "CHECKPOINT_VERSION",
    "MANIFEST_VERSION",
    "MAX_BLOCKS",
    "MAX_CHECKPOINTS",
    "MAX_CHECKPOINT_BLOCKS",
    "MAX_CHECKPOINT_BYTES",
    "MAX_LAYERS",
    "MAX_MANIFEST_BYTES",
    "MAX_NAME_CHARS",
    "MAX_PAYLOAD_BYTES",
    "MAX_STAGES",
    "MAX_TOKENS",
    "SEGMENT_VERSION",
    "Block",
    "BlockEntry",
    "CheckpointBlock",
    "CheckpointEntry",
    "CheckpointHeader",
    "FileHeader",
    "Manifest",
    "SegmentHeader",
    "checkpoint_file_bytes",
    "decode_checkpoint_header",
    "decode_header",
    "decode_manifest",
    "digest",
    "encode_header",
    "encode_manifest",
    "plan_checkpoint",
    "plan_segment",
    "segment_file_bytes",
]
