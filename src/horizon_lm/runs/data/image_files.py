"""Read the images of rows: from files beside the rows, from the rows themselves, or from the web; and decode them within limits.

Rows come from untrusted sources. A path may not leave the folder of the rows, an address is contacted only if the user allows it, and an image
is decoded only if its format is a plain one and its header names few pixels.
"""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PureWindowsPath
from typing import Any

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.data.conversations import RowError, describe_type
from horizon_lm.runs.data.downloads import download

_MAX_BYTES = 2**28  # of a file
_MAX_PIXELS = 89_478_485  # a quarter of a GiB in RGB, as pillow's own limit
_MAX_RATIO = 200  # of the sides: processors enlarge the shorter one, so a line of pixels would become gigabytes
_PILLOW = re.compile(r"PIL\.")  # its modules
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")  # pillow runs programs for some others
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # more than 8 bits a channel, which pillow cuts off


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """The content of an image.

    Attributes:
        content: the encoded image.
        name: the file or address that it is from; the kind of reference for others.
        file: the file that it was read from; None for others, which lie in the rows or were downloaded.
    """

    content: bytes
    name: str
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The images that the rows of a dataset refer to.

    Attributes:
        folder: the folder that paths are relative to, and may not leave; None if the rows are from the hub.
        allow_downloads: contact the addresses in rows.
    """

    folder: Path | None
    allow_downloads: bool = False

    @classmethod
    def beside(cls, path: str, allow_downloads: bool = False) -> "ImageFiles":
        """Return the images of rows in a file, a folder or, for any other path, on the hub."""
        place = Path(path).expanduser()
        folder = place if place.is_dir() else place.parent if place.is_file() else None
        return cls(folder, allow_downloads)

    def read(self, reference: Any) -> ImageBytes:
        """Return the content of the image that a row refers to; raise RowError if it cannot be read, or must not be."""
        if isinstance(reference, Mapping):
            if isinstance(content := reference.get("bytes"), bytes) and content:
                return ImageBytes(content, str(reference.get("path") or "bytes"))
            reference = reference.get("path") or reference.get("url")
        if isinstance(reference, bytes):
            return ImageBytes(reference, "bytes")
        if not isinstance(reference, str) or not reference:
            raise RowError(f"an image must be a path, bytes or a data URI, but is {describe_type(reference)}")
        if reference[:5].casefold() == "data:":
            return ImageBytes(_from_data_uri(reference), "data URI")
        if is_address(reference):
            return self._from_web(reference)
        return self._from_file(reference)

    def place_of(self, reference: Any) -> str:
        """Return the path of the file that a row refers to, which may be missing, or the address; empty for an image in the row."""
        if isinstance(reference, Mapping):
            reference = None if reference.get("bytes") else reference.get("path") or reference.get("url")
        if not isinstance(reference, str) or reference[:5].casefold() == "data:":
            return ""
        if is_address(reference):
            return reference
        return "" if self.folder is None else str(self.folder / reference)

    def _from_web(self, address: str) -> ImageBytes:
        if not self.allow_downloads:
            raise RowError(
                f"image {address!r} is on the web; download it beside the rows, or set allow_downloads: true", address
            )
        try:
            return ImageBytes(download(address, _MAX_BYTES), address)
        except (OSError, ValueError) as error:
            raise RowError(f"image {address!r} cannot be downloaded ({first_line(error)})", address) from error

    def _from_file(self, name: str) -> ImageBytes:
        """Return the content of a file in the folder of the rows; raise RowError for one that is elsewhere, missing or too large."""
        if self.folder is None:
            raise RowError(f"image {name!r} is a path, but rows of the hub have no folder; use their bytes", name)
        folder, is_absolute = self.folder.resolve(), Path(name).is_absolute() or PureWindowsPath(name).is_absolute()
        try:
            file = (folder / name).resolve()
            if is_absolute or "://" in name or ".." in Path(name).parts or not file.is_relative_to(folder):
                raise RowError(
                    f"image {name!r} is outside of the folder of the rows; copy it there, and name it relative to it",
                    name,
                )
            if not file.is_file():
                raise RowError(f"image {name!r} is missing; paths are relative to {self.folder}", name)
            if file.stat().st_size > _MAX_BYTES:
                raise RowError(f"image {name!r} has more than {_MAX_BYTES >> 20} MiB; scale it down", name)
            return ImageBytes(file.read_bytes(), name, file)
        except (OSError, ValueError, RuntimeError) as error:  # such as a null byte or a loop of links
            raise RowError(f"image {name!r} cannot be read ({first_line(error)})", name) from error


def is_address(place: str) -> bool:
    """Return whether a reference is an address of the web."""
    return place[:8].casefold().startswith(("http://", "https://"))


def _from_data_uri(reference: str) -> bytes:
    """Return the bytes in a data URI; raise RowError for one that is not in base64."""
    head, _, data = reference.partition(",")
    if not head.casefold().endswith(";base64"):
        raise RowError("a data URI of an image must be in base64: data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"the base64 text in a data URI of an image is not valid ({first_line(error)})") from error


def require_pillow() -> None:
    """Raise ConfigError if pillow, which decodes images, is not installed."""
    if find_spec("PIL") is None:
        raise ConfigError(
            "rows with images need pillow; install it with pip install pillow, or install Horizon-LM with the extra vision"
        )


def decode(image: ImageBytes) -> Any:
    """Return an image as a `PIL.Image.Image` in RGB: its first frame, turned as its EXIF data says.

    Raises:
        RowError: it is damaged, of another format, or too large to be decoded.
    """
    from PIL import Image, ImageOps

    _silence_pillow()
    try:
        opened = Image.open(io.BytesIO(image.content), formats=_FORMATS)
        _require_usable(opened, image)
        opened.load()
        return ImageOps.exif_transpose(opened).convert("RGB")
    except RowError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large(image) from error
    except Exception as error:  # decoders raise anything for damaged data
        raise RowError(
            f"image {image.name!r} cannot be decoded ({type(error).__name__}: {_without_address(error)}); save it again as PNG or JPEG",
            image.name,
        ) from error


def _require_usable(opened: Any, image: ImageBytes) -> None:
    """Raise RowError for an image whose header says that its shape or depth cannot be used."""
    width, height = opened.size
    if width * height > _MAX_PIXELS:
        raise _too_large(image)
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise RowError(
            f"image {image.name!r} has {width} x {height} pixels, and one side may be at most {_MAX_RATIO} times the other; crop it",
            image.name,
        )
    if opened.mode in _DEEP_MODES:
        raise RowError(f"image {image.name!r} has more than 8 bits a channel; convert it to 8 bits", image.name)


def _too_large(image: ImageBytes) -> RowError:
    return RowError(f"image {image.name!r} has more than {_MAX_PIXELS:,} pixels; scale it down", image.name)


def _silence_pillow() -> None:
    """Ignore pillow's warnings, which are about odd metadata. Images are decoded in threads, where `catch_warnings` is not safe."""
    if not any(module == _PILLOW for _, _, _, module, _ in warnings.filters):
        warnings.filterwarnings("ignore", module=_PILLOW.pattern)


def _without_address(error: Exception) -> str:
    """Return the first line of an error, without the address of an object in memory, which differs in each process."""
    return first_line(error).partition(" <")[0]
