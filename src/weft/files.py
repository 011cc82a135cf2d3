"""Writing files so that nobody ever meets half of one."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from weft.errors import OutputError


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replace a file in one step: a failure leaves the old one.

    Text is written as UTF-8; what cannot be encoded, as half a surrogate pair, becomes a question mark.
    """
    target = Path(path)
    content = data.encode("utf-8", "replace") if isinstance(data, str) else data
    partial = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with partial.open("xb") as file:
            file.write(content)
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from None
