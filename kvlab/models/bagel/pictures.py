"""Pictures as clients have them: PIL images, files and arrays, all turned into one kind of pixels, uint8 RGB.

What a file looked like is forgotten here: the turn in its EXIF data is applied, transparency is pasted on white, palettes,
grey and 16-bit values become RGB of 8 bits. So equal pixels are one picture, whatever they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvlab.errors import InputError, missing_extra

Pixels: TypeAlias = NDArray[np.uint8]  # [height, width, 3]

WHITE = (255, 255, 255)
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # PIL's modes of more than 8 bits a value, all grey
ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")


def is_picture(part: Any) -> bool:
    """True for what ``read_picture`` would read: a path, a PIL image, an array or a tensor, and no text or list of ids."""
    return isinstance(part, PathLike) or _is_image(part) or hasattr(part, "__array__")


def read_picture(source: Any) -> Pixels:
    """Return the pixels of a picture.

    Args:
        source: A path, a PIL image, or an array or tensor [height, width] or [height, width, 1, 3 or 4 channels] of uint8,
            uint16 (0 to 65535), bool, or floats from 0 to 1. An array of one type shows the same picture as one of another
            type with the values scaled to its range.

    Raises:
        InputError: no picture, a damaged file, no pixels, or an array of another shape, type or range.
        MissingExtraError: Pillow is not installed.

    Shapes:
        result: [height, width, 3] uint8.
    """
    if isinstance(source, PathLike):
        return _read_file(Path(source))
    if _is_image(source):
        return flatten(source)
    if hasattr(source, "__array__"):
        return _read_array(source)
    raise InputError(f"a picture is a PIL image, a pathlib.Path or an array; got {type(source).__name__}")


def flatten(image: Any) -> Pixels:
    """Return the pixels of a PIL image: upright, transparency pasted on white.

    Raises:
        InputError: no pixels, or a file that ends too early.
    """
    from PIL import Image, ImageOps

    if 0 in image.size:
        raise InputError(f"the picture is {image.width} x {image.height} pixels; it has none to look at")
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
    except Exception as e:  # decoders raise what their authors chose
        raise InputError(f"the picture cannot be read to its end ({e}); the file is damaged or cut off, get it again") from e
    if image.mode in DEEP_MODES:
        return _read_array(_within(np.asarray(image), 0, 65535).astype(np.uint16))
    if image.mode == "F":
        return _read_array(np.asarray(image))
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")  # PIL has no direct way from La
        white = Image.new("RGB", image.size, WHITE)
        white.paste(image, mask=image.getchannel("A"))
        image = white
    return np.array(image.convert("RGB"))


def require_pillow() -> Any:
    """Return the module PIL.Image.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as e:
        raise missing_extra("Pillow", "bagel", "to read and resize pictures") from e
    return Image


def _is_image(source: Any) -> bool:
    try:
        from PIL.Image import Image
    except ImportError:
        return False
    return isinstance(source, Image)


def _read_file(path: Path) -> Pixels:
    pillow = require_pillow()
    try:
        with pillow.open(path) as image:
            return flatten(image)
    except InputError as e:
        raise InputError(f"{path}: {e}") from e
    except Exception as e:  # what is wrong with a file has many names
        raise InputError(f"the picture {path} cannot be read ({e}); give a whole PNG, JPEG or the like") from e


# -- arrays ------------------------------------------------------------------------------------------------------------


def _read_array(source: Any) -> Pixels:
    if hasattr(source, "detach"):  # a tensor; numpy knows no bfloat16
        source = source.detach().cpu()
        source = source.float() if str(source.dtype) == "torch.bfloat16" else source
    values = np.asarray(source)
    if values.ndim == 2:
        values = values[:, :, None]  # [height, width, 1]
    if values.ndim != 3 or values.shape[2] not in (1, 3, 4):
        hint = "; the channels come last" if values.ndim == 3 and values.shape[0] in (1, 3, 4) else ""
        raise InputError(
            f"an array of shape {tuple(np.shape(source))} is no picture; give [height, width] or [height, width, 1, 3 or 4 "
            f"channels]{hint}"
        )
    if 0 in values.shape:
        raise InputError(f"the picture is {values.shape[1]} x {values.shape[0]} pixels; it has none to look at")
    pixels = _to_uint8(values)
    if pixels.shape[2] == 1:
        return np.repeat(pixels, 3, axis=2)  # [height, width, 3]
    if pixels.shape[2] == 4:
        return flatten(require_pillow().fromarray(pixels))
    return pixels.copy()


def _to_uint8(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale values to 0..255; a float v/255 and a 16-bit 257 v show what the 8-bit v shows."""
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(255)
    if values.dtype == np.uint16:
        return np.rint(values / 257).astype(np.uint8)
    if np.issubdtype(values.dtype, np.floating):
        return np.rint(_within(values.astype(np.float64), 0.0, 1.0) * 255).astype(np.uint8)
    raise InputError(f"an array of {values.dtype} is no picture; give uint8, uint16, bool, or floats from 0 to 1")


def _within(values: NDArray[Any], low: float, high: float) -> NDArray[Any]:
    if not bool(((values >= low) & (values <= high)).all()):  # a NaN is in no range
        raise InputError(
            f"the picture's {values.dtype} values go from {np.min(values)} to {np.max(values)}; they must lie from {low} to "
            f"{high}"
        )
    return values


# -- identity ----------------------------------------------------------------------------------------------------------


def picture_digest(modality: str, preprocessing: str, pixels: NDArray[Any], params: Sequence[Any], noise: Any) -> bytes:
    """Name what an encoder makes of a picture, in full length and over all pixels.

    Args:
        modality: Which encoder reads it.
        preprocessing: Identity of how pictures are prepared.
        pixels: The picture, flattened.
        params: Every setting that changes what the encoder sees; True and "True" are two settings.
        noise: Identity of the noise that enters, None where none does.
    """
    fields = [modality, preprocessing, pixels.shape, pixels.dtype.str, pixels.tobytes(), len(params), *params, noise]
    digest = sha256()
    for field in fields:
        data = field if isinstance(field, bytes) else repr(field).encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
