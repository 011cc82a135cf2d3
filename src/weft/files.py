"""Writing files so that nobody ever meets half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from weft.errors import InputError


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replace a file in one step: a failure leaves the old one.

    Text is written as UTF-8; what cannot be encoded, as half a surrogate pair, becomes a question mark.
    """
    target = Path(path)
    content = data.encode("utf-8", "replace") if isinstance(data, str) else data
    partial = ""
    try:
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(partial).chmod(0o666 & ~umask)  # as any new file, not as a private temporary one
        Path(partial).replace(target)
    except OSError as error:
        if partial:
            Path(partial).unlink(missing_ok=True)
        raise InputError(f"cannot write {target}: {error.strerror or error}") from None
