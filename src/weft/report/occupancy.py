"""Per-SM occupancy as an image in the page: one row of pixels per SM, one column per time bin."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_COMPUTE_RGB, _COMM_RGB = (68, 119, 170), (221, 170, 51)  # the page's colours of compute and communication
_MIN_OPACITY = 0.12  # opacity of a single resident block, so that it is visible


@dataclass(frozen=True)
class Picture:
    """An image with its caption; `uri` is a data URI."""

    title: str
    caption: str
    uri: str


def picture(
    title: str, total_s: float, compute: npt.NDArray[np.float64], comm: npt.NDArray[np.float64], most: float
) -> Picture:
    """Draw resident blocks by SM and time. An SM with `most` blocks is opaque, so that pictures compare."""
    blocks = compute + comm
    share = np.divide(comm, blocks, out=np.zeros_like(comm), where=blocks > 0)[..., None]
    colours = (1 - share) * np.array(_COMPUTE_RGB) + share * np.array(_COMM_RGB)
    shade = np.where(blocks > 0, _MIN_OPACITY + (1 - _MIN_OPACITY) * np.minimum(1, blocks / max(most, 1)), 0)
    shade = np.maximum(shade, np.clip(comm, 0, 1))  # a collective's block almost fills its SM
    pixels = np.concatenate((colours, 255 * shade[..., None]), axis=2).round().astype(np.uint8)
    caption = (
        f"{len(blocks)} SMs over {1e3 * total_s:.2f} ms; on average {compute.mean():.1f} compute blocks "
        f"per SM, a collective on {100 * (comm > 0.5).mean():.0f}% of the SM time"
    )
    return Picture(title, caption, "data:image/png;base64," + base64.b64encode(png(pixels)).decode())


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file from an array of shape (rows, columns, 4): RGBA."""
    height, width, _ = pixels.shape
    lines = np.concatenate((np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
