"""Images that rows name: their bytes, and what PIL makes of them."""

import errno
import logging
import stat
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from asyncrl.data.row_files import Row
from asyncrl.errors import DataError, from_extra

log = logging.getLogger(__name__)

# Bounds of one image. Its pixels take three bytes each; processors of models make it far smaller.
MOST_BYTES, MOST_PIXELS = 32 << 20, 32 << 20
# Errors of a disk or a file system on a network that may be gone at another attempt; pauses before those.
PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE}
PAUSES_S = (0.1, 0.5, 2.0)
SMALLER = "store a smaller image: the model's processor makes it smaller in any case"


def image_sources(row: Row, key: str, where: str) -> list[bytes | str]:
    """Return the bytes or the path of each image that a row names. Raises DataError."""
    value = row.get(key)
    found: list[bytes | str] = []
    for source in value if isinstance(value, list) else [] if value is None else [value]:
        place = source
        if isinstance(source, dict):  # as `datasets` writes it
            content = source.get("bytes")
            place = content if isinstance(content, bytes) and content else source.get("path")
        if not place or not isinstance(place, str | bytes):
            what = f"column `{key}` (data.images_key) holds a {type(source).__name__}"
            what += f" of {', '.join(map(str, source))}" if isinstance(source, dict) else ""
            allowed = "allowed is a list of paths, or of mappings with `bytes` or `path`"
            raise DataError(f"{where}: {what}; {allowed}; correct the row")
        found.append(place)
    return found


def image_bytes(row: Row, key: str, where: str, beside: Path) -> tuple[bytes, ...]:
    """Return the bytes of each image of a row; paths are relative to `beside`. Raises DataError.

    An error of the disk or network that may pass is met again some seconds later, and only then raised.
    """
    found = []
    for place in image_sources(row, key, where):
        file = f"image {beside / place}" if isinstance(place, str) else "image in the row"
        image = place if isinstance(place, bytes) else _content(beside / place, f"{where}: {file}")
        _require_small(len(image), f"{where}: {file}")
        found.append(image)
    return tuple(found)


def _content(path: Path, where: str) -> bytes:
    """Return the content of a file. Raises DataError."""
    pauses = iter(PAUSES_S)
    while True:
        try:
            # What is no file might never end.
            if not stat.S_ISREG((found := path.stat()).st_mode):
                raise ValueError(f"it is {'a directory' if path.is_dir() else 'no regular file'}")
            _require_small(found.st_size, where)
            if image := path.read_bytes():
                return image
            raise ValueError("it has 0 bytes")
        except DataError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            pause_s = next(pauses, None) if getattr(error, "errno", None) in PASSING else None
            if pause_s is None:
                cure = "give a file; paths are relative to the data file or directory"
                raise DataError(f"{where} cannot be read ({reason}); {cure}") from error
            log.warning("%s cannot be read (%s), which is tried again in %g s", where, reason, pause_s)
            time.sleep(pause_s)


def _require_small(size_bytes: int, where: str) -> None:
    if size_bytes > MOST_BYTES:
        raise DataError(f"{where} has {size_bytes:,} bytes; allowed are {MOST_BYTES:,}; {SMALLER}")


def picture_of(image: bytes, where: str, *, whole: bool = True) -> Any:
    """Return an image as PIL's, in RGB; only its header is read unless `whole`. Raises DataError."""
    with from_extra("data"):
        from PIL import Image
    try:
        opened = Image.open(BytesIO(image))
        pixels = opened.width * opened.height
        picture = opened.convert("RGB") if whole and pixels <= MOST_PIXELS else opened
    except Exception as error:  # decoders raise anything
        text = f"{where}: an image of {len(image)} bytes is not one that PIL can read ({error})"
        raise DataError(f"{text}; replace the file, or remove the row") from error
    if pixels > MOST_PIXELS:
        found = f"{where}: an image has {opened.width:,} x {opened.height:,} pixels"
        raise DataError(f"{found}; allowed are {MOST_PIXELS:,}; {SMALLER}")
    return picture
