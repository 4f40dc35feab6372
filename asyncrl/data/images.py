"""Images that rows name: their bytes, and what PIL makes of them."""

from io import BytesIO
from pathlib import Path
from typing import Any

from asyncrl.data.dataset import Row
from asyncrl.errors import DataError
from asyncrl.extras import from_extra


def image_sources(row: Row, key: str, where: str) -> list[Any]:
    """Return the images that a row names: paths, or mappings with `bytes` or `path`. Raises DataError."""
    value = row.get(key)
    sources = value if isinstance(value, list) else [] if value is None else [value]
    for source in sources:
        place = source.get("bytes") or source.get("path") if isinstance(source, dict) else source
        if not isinstance(place, str | bytes):
            found = f"column `{key}` (data.images_key) holds a {type(source).__name__}"
            allowed = "allowed is a list of paths, or of mappings with `bytes` or `path`"
            raise DataError(f"{where}: {found}; {allowed}; correct the row")
    return sources


def image_bytes(row: Row, key: str, where: str, beside: Path) -> tuple[bytes, ...]:
    """Return the bytes of each image of a row; paths are relative to `beside`. Raises DataError."""
    found = []
    for source in image_sources(row, key, where):
        place = source.get("bytes") or source["path"] if isinstance(source, dict) else source
        try:
            found.append(place if isinstance(place, bytes) else (beside / place).read_bytes())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            cure = "give a file; paths are relative to the data file"
            raise DataError(f"{where}: image {beside / place} cannot be read ({reason}); {cure}") from error
    return tuple(found)


def picture_of(image: bytes, where: str, *, whole: bool = True) -> Any:
    """Return an image as PIL's, in RGB; only its header is read unless `whole`. Raises DataError."""
    with from_extra("data"):
        from PIL import Image
    try:
        opened = Image.open(BytesIO(image))
        return opened.convert("RGB") if whole else opened
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        text = f"{where}: an image of {len(image)} bytes is not one that PIL can read ({error})"
        raise DataError(f"{text}; replace the file, or remove the row") from error
