"""What a picture's file says of its pixels: which side is up, what is transparent, how many bits are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from hetero_strategy.data.media_file import reading
from hetero_strategy.errors import DataError

SCALED = ("PNG", "PPM")
"""Formats of which Pillow's mode I has 16 bits."""
UPRIGHT = dict(enumerate(map(Image.Transpose, (0, 3, 1, 5, 4, 6, 2)), 2))
"""Orientation in EXIF -> what turns the image upright, as `ImageOps.exif_transpose` does."""
FEW = 4096
"""A 16-bit picture of fewer grey values than so many between its darkest and its brightest shows next to nothing."""


def open_picture(path: str | Path) -> Image.Image:
    """Open a picture without decoding it. Raises DataError, also where its numbers have no known range."""
    image = reading(path, "image", Image.open)
    if image.format == "TIFF":  # else Pillow maps its pixels into memory, in the wrong shape where it is turned
        image.filename = ""
    if image.mode == "F" or (image.mode == "I" and image.format not in SCALED):
        image.close()
        raise DataError(
            f"{path}: its pixels are 32-bit numbers (Pillow's mode {image.mode}), of no known range; scale them and"
            " save 8 or 16 bits per channel",
            "32-bit pixels",
        )
    return image


def stored_as(image: Image.Image) -> str:
    """Return how a picture that is not decoded yet is stored, in Pillow's words, such as L;2 or RGB;16B."""
    tiles = getattr(image, "tile", None)  # none of what a plugin decodes at once
    args = tiles[0].args if tiles else ""
    return str(args[0] if isinstance(args, tuple) else args)


def on_white(image: Image.Image, stored: str) -> Image.Image:
    """Composite a decoded picture on white, if any of it is transparent."""
    if not image.has_transparency_data:
        return image
    colour = image.info.get("transparency")  # of a PNG as in its file, where pixels are of 8 bits now
    if isinstance(colour, int) and image.mode == "L":
        image.info["transparency"] = colour * {"L;2": 85, "L;4": 17}.get(stored, 1)
    elif isinstance(colour, tuple) and ";16" in stored:
        image.info["transparency"] = tuple(channel >> 8 for channel in colour)
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def narrow_range(image: Image.Image) -> str | None:
    """Return a warning about a decoded 16-bit picture that uses a small part of its range."""
    scale = 1 if image.mode.startswith("I") else 256  # of 16 bits a channel Pillow keeps the upper 8
    ends = np.array(image.getextrema(), np.int64).reshape(-1, 2)
    seen = ends[[band != "A" for band in image.getbands()]]
    low, high = int(seen.min()) * scale, int(seen.max()) * scale
    if not 0 < high - low < FEW or getattr(image, "tag_v2", {}).get(258, (16,))[0] < 16:
        return None
    return (
        f"its pixels are {low} to {high} of 0 to 65535, next to {'black' if high < FEW else 'one colour'} for a model;"
        " scale them to the whole range, or save them with 8 bits"
    )


def orientation(image: Image.Image) -> int:
    """Return how the camera was held, of formats that say so once opened; 1, upright, also where EXIF is damaged."""
    try:
        # Not image.getexif(): where a PNG has said nothing yet, that decodes it.
        exif = Image.Image.getexif(image) if image.format in ("JPEG", "MPO", "WEBP", "AVIF", "PNG") else {}
        turned = exif.get(0x0112, 1)
    except Exception:  # SyntaxError, struct.error, ...
        return 1
    return turned if isinstance(turned, int) and turned in UPRIGHT else 1
