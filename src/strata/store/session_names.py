"""What a session may be called: names that mean one file in one folder, on every system that a session may move to.

Pure. A name is taken literally (no percent-decoding, no Unicode folding); what could be read as anything but a plain
file name somewhere is refused, with the reason.
"""

from __future__ import annotations

import re
import unicodedata

MAX_NAME_BYTES = 200

_SEPARATORS = "/\\:\u2044\u2215\u2216\u29f5\u29f8\u29f9\ufe55\ufe68\uff0f\uff1a\uff3c"
"""Also the letters that look like separators: some systems fold them into real ones."""
_FORBIDDEN = '<>"|?*'
_CONTROL = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_DEVICE = re.compile(r"(?:CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(?:COM|LPT)[0-9¹²³])\s*(?:\.|$)", re.IGNORECASE)


def session_name_problem(name: str) -> str:
    """Why `name` is refused, to be read behind "filename: "; empty when it is fine."""
    if not name:
        return "it must not be empty"
    if any(unicodedata.category(char) in _CONTROL for char in name):
        return "it must not contain control or invisible characters"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"it has {len(name.encode())} bytes, at most {MAX_NAME_BYTES} are allowed"
    if any(char in _SEPARATORS for char in name):
        return "it must be a plain name: no slash, backslash, colon, or letters that look like them"
    if any(char in _FORBIDDEN for char in name):
        return f"it must not contain any of {_FORBIDDEN}"
    if name.startswith("."):
        return "it must not begin with a dot"
    if name.endswith((".", " ")) or name != name.strip():
        return "it must not begin with a space, nor end with a dot or a space"
    if _DEVICE.match(name):
        return "it is the name of a device on Windows"
    return ""
