"""Make tokens and tensors of images with the processor of a model: `transformers` knows how each model writes images into its texts."""

import math
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from horizon_lm.errors import ConfigError, HorizonError, first_line
from horizon_lm.model.config_limits import require_sane_processor
from horizon_lm.model.image_inputs import takes_images
from horizon_lm.runs.data.answer_spans import Span
from horizon_lm.runs.data.conversations import RowError
from horizon_lm.runs.data.image_files import ImageBytes, ImageFiles, decode, require_pillow
from horizon_lm.runs.data.table_cache import digest

if TYPE_CHECKING:
    import torch

    from horizon_lm.model.source import ModelSource

_FILES = ("preprocessor_config.json", "processor_config.json")  # that say how images are processed
_VIDEOS = "video_preprocessor_config.json"  # read by transformers whenever it opens the whole processor
# How transformers says that a package is missing.
_MISSING = re.compile(
    r"requires the (\w+) library|Package `([\w-]+)` is required|Missing optional dependencies: ([\w-]+)"
)
_OFFSETS = "text_replacement_offsets"
_TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments of models for the kind of each token
_TEXT_INPUTS = ("input_ids", "attention_mask", *_TYPES, _OFFSETS)


@dataclass(frozen=True, slots=True)
class Expanded:
    """A text in which each image has as many tokens as its model reads for it.

    Attributes:
        text: the text.
        places: for each image, the span of its placeholder in the text before, and its span in this text.
    """

    text: str
    places: Sequence[tuple[Span, Span]] = ()

    def moved(self, span: Span) -> Span:
        """Return the span in this text of a span of the text before, which has no placeholder at its borders."""
        start, end = (
            position
            + sum(
                (after[1] - after[0]) - (before[1] - before[0])
                for before, after in self.places
                if before[1] <= position
            )
            for position in span
        )
        return start, end

    def token_spans(self, offsets: np.ndarray) -> list[Span]:
        """Return the tokens of each image, as the index of the first one and that behind the last. ``offsets``: as in `reaches_behind`."""
        spans = []
        for _, (start, end) in self.places:
            found = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            spans.append((int(found[0]), int(found[-1]) + 1))
        return spans


class Vision:
    """The processor of a model that reads images, opened when the first image is processed.

    Args:
        folder: the folder of the model.
        config: the model's config, of transformers.
        max_pixels, min_pixels: pixels to which images with more or fewer are scaled, with the ratio of their sides; None for no limit.
        trust_remote_code: run code of the folder, if its processor asks for it.
        rope_index: as from `packed_positions.rope_index_of`.

    Attributes:
        dependencies: all that tokens and tensors depend on besides the images, as JSON-like values.
    """

    def __init__(
        self, folder: Path, config: Any, max_pixels: int | None = None, min_pixels: int | None = None,
        trust_remote_code: bool = False, rope_index: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self._rope_index = rope_index
        self._folder, self._config, self._trust_remote_code = folder, config, trust_remote_code
        self._max_pixels, self._min_pixels = max_pixels, min_pixels
        self._lock = threading.Lock()  # a tokenizer raises an error if two threads set its padding
        files = [(folder / name).read_bytes() if (folder / name).is_file() else b"" for name in _FILES]
        self.dependencies = [max_pixels, min_pixels, [xxhash.xxh3_128(content).hexdigest() for content in files]]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the processor, which each process opens for itself, and the model, which no other process needs."""
        return {name: value for name, value in vars(self).items() if name not in ("processor", "_lock", "_rope_index")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), _rope_index=None)

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers, without its parts for videos and audio."""
        require_pillow()
        for path in (self._folder / name for name in _FILES):
            if path.is_file():
                require_sane_processor(path)
        try:
            # trust_remote_code is passed even if it is False: without it, transformers asks on standard input.
            opened = _images_only(self._config)
            processor = opened.from_pretrained(self._folder, trust_remote_code=self._trust_remote_code)
        except HorizonError:
            raise
        except Exception as error:  # the parsers of transformers raise anything
            if package := _missing_package(error):
                fitting = ", in the build that fits torch" if package == "torchvision" else ""
                raise ConfigError(
                    f"the processor of images in {self._folder} needs {package}; install it with pip install {package}{fitting}"
                ) from error
            problem = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
            raise ConfigError(
                f"{self._folder} has no processor of images that can be read ({problem}); copy {' and '.join(_FILES)} into it"
            ) from error
        if not isinstance(getattr(processor, "image_token", None), str):
            raise ConfigError(
                f"{type(processor).__name__} does not say where images stand in texts, so rows with images are not supported for {self._folder}"
            )
        if processor.tokenizer.pad_token is None:  # needed for texts of different lengths, of which nothing is used
            processor.tokenizer.pad_token = processor.image_token
        return processor

    @property
    def token_ids(self) -> list[int]:
        """The tokens that stand for images in the model's config, which needs no processor."""
        names = ("image_token_id", "image_token_index")
        return [value for name in names if isinstance(value := getattr(self._config, name, None), int)]

    def copy_files(self, folder: Path) -> None:
        """Copy the files that say how images, and videos, are processed into a folder of the model."""
        for path in (self._folder / name for name in (*_FILES, _VIDEOS)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)

    def scaled(self, image: Any) -> Any:
        """Return an image whose number of pixels is within the limits of the run."""
        num_pixels = image.width * image.height
        if self._max_pixels is not None and num_pixels > self._max_pixels:
            factor = math.sqrt(self._max_pixels / num_pixels)
            return image.resize([max(1, math.floor(side * factor)) for side in image.size])
        if self._min_pixels is not None and num_pixels < self._min_pixels:
            factor = math.sqrt(self._min_pixels / num_pixels)
            return image.resize([math.ceil(side * factor) for side in image.size])
        return image

    def expand(self, text: str, images: Sequence[Any]) -> Expanded:
        """Return a text with all tokens of its images.

        Args:
            text: the text, with the token of the processor at the place of each image.
            images: the images in their order.

        Raises:
            RowError: the text has more or fewer placeholders than images, or the processor rejects an image.
        """
        if not images:
            return Expanded(text)
        num_places = text.count(self.processor.image_token)
        if num_places != len(images):
            raise RowError(
                f"the rendered text has {num_places} times {self.processor.image_token!r}, but {len(images)} images; the chat template must "
                "write it once for each image, and no other text may have it"
            )
        try:
            made = self.processor(
                text=[text], images=[[*images]], return_text_replacement_offsets=True, add_special_tokens=False, return_tensors=None,
            )  # fmt: skip
        except Exception as error:  # a processor's own code
            raise RowError(f"the processor rejects the images of the row: {first_line(error)}") from error
        if _OFFSETS not in made:
            raise ConfigError(
                f"{type(self.processor).__name__} of this transformers does not say where images stand in texts; use a newer one"
            )
        pieces, places, last, position = [], [], 0, 0
        for entry in made[_OFFSETS][0]:
            start, end = entry["span"]
            pieces += [text[last:start], entry["replacement"]]
            position += start - last
            places.append(((start, end), (position, position + len(entry["replacement"]))))
            last, position = end, position + len(entry["replacement"])
        return Expanded("".join([*pieces, text[last:]]), places)

    def inputs(
        self, images: Sequence[Sequence[Any]], input_ids: "torch.Tensor", attention_mask: "torch.Tensor",
        position_ids: "torch.Tensor | None" = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the arguments of the model for images, and for the tokens (B, T) that stand for them; none without images, unless the model
        gives images positions of their own, which it does not find in packed rows.

        Args:
            images: the images of each sequence; of packed rows, those of each row that is packed.
            input_ids, attention_mask: the sequences, shape (B, T).
            position_ids: positions (B, T) that restart with each packed row; None for other rows.
        """
        found = self._tensors(images, input_ids, attention_mask) if any(images) else {}
        if position_ids is not None and self._rope_index is not None:
            from horizon_lm.model.packed_positions import packed_positions

            found["position_ids"] = packed_positions(self._rope_index, input_ids, position_ids, found)
        return found

    def _tensors(
        self, images: Sequence[Sequence[Any]], input_ids: "torch.Tensor", attention_mask: "torch.Tensor"
    ) -> dict[str, Any]:
        """Return what the processor makes of images, of which there is at least one."""
        import torch

        # Each sequence by itself, since some processors cut an image into crops only if it is the only one.
        groups = [[*group] for group in images if group]
        with self._lock:  # also while it is opened
            texts = [" ".join([self.processor.image_token] * len(group)) for group in groups]
            made = self.processor(
                text=texts, images=groups, add_special_tokens=False, padding=True, return_tensors="pt"
            )
        found = {name: value for name, value in made.items() if name not in _TEXT_INPUTS}
        if self.processor.return_mm_token_type_ids:
            name = next((name for name in _TYPES if name in self.processor.model_input_names), _TYPES[0])
            found[name] = torch.tensor(self.processor.create_mm_token_type_ids(input_ids.tolist())) * attention_mask
        return found


def _missing_package(error: Exception) -> str:
    """Return the package that is missing according to an error of transformers or of an import; empty if it is about something else."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.partition(".")[0]
    found = _MISSING.search(str(error))
    return "" if found is None else next(filter(None, found.groups())).lower()


def _images_only(config: Any) -> Any:
    """Return the processor class of a model, without its parts for videos, which need torchvision even where only images are processed, and
    for audio.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    known: Any = PROCESSOR_MAPPING[type(config)]
    names = known.get_attributes()
    parts = [name for name in names if "image_processor" in name or "tokenizer" in name]
    others = dict.fromkeys(set(names) - set(parts))

    class ImagesOnly(known):
        """The class with fewer parts."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return parts

        @classmethod
        def from_args_and_dict(cls, args: Sequence[Any], processor_dict: dict[str, Any], **kwargs: Any) -> Any:
            opened = dict(zip(parts, args, strict=True))
            return super().from_args_and_dict([], processor_dict, **opened, **others, **kwargs)

    ImagesOnly.__name__ = known.__name__
    return ImagesOnly


def vision_of(model: "ModelSource", max_pixels: int | None = None, min_pixels: int | None = None) -> Vision | None:
    """Return the processor of the images of a model whose files are on this machine; None if it reads only text. For the limits, see
    `Vision`.
    """
    from horizon_lm.model.packed_positions import rope_index_of

    assert model.folder is not None
    if not takes_images(model.skeleton()):
        return None
    rope_index = rope_index_of(model.skeleton())
    return Vision(model.folder, model.config, max_pixels, min_pixels, model.trust_remote_code, rope_index)


@dataclass(frozen=True, slots=True)
class ImageOrigin:
    """The identity of an image of a row.

    Attributes:
        hash: a hash of the encoded image and of how it is processed.
        file: the file that it was read from; empty if it is in the row.
        state: size and time of the file.
        name: its name in messages.
    """

    hash: str
    file: str
    state: str
    name: str


@dataclass(frozen=True, slots=True)
class LoadedImage(ImageOrigin):
    """An image of a row, decoded.

    Attributes:
        pixels: the image, in RGB and within the limits of the run.
    """

    pixels: Any


@dataclass(frozen=True, slots=True)
class TokenImage(ImageOrigin):
    """An image in a tokenized sequence.

    Attributes:
        start, end: the index of its first token, and that behind its last one.
    """

    start: int
    end: int


def token_images(images: Sequence[LoadedImage], places: Sequence[Span]) -> list[TokenImage]:
    """Return the images of a sequence with their tokens, which are at ``places``."""
    return [
        TokenImage(each.hash, each.file, each.state, each.name, *place)
        for each, place in zip(images, places, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Pictures:
    """The images of the rows of a dataset, for a model.

    Attributes:
        vision: the processor of the model.
        files: the files of the images.
    """

    vision: Vision
    files: ImageFiles

    def load(self, references: Sequence[Any], expected: Sequence[TokenImage] | None = None) -> list[LoadedImage]:
        """Return the images that a row refers to.

        Args:
            references: of the row.
            expected: the images as they were when the row was tokenized; None if it has not been.

        Raises:
            RowError: one cannot be read, must not be, or has changed.
        """
        if references:
            require_pillow()
        hashes = [None] * len(references) if expected is None else [image.hash for image in expected]
        return [self._load(*each) for each in zip(references, hashes, strict=True)]

    def _load(self, reference: Any, expected: str | None) -> LoadedImage:
        try:
            image: ImageBytes = self.files.read(reference)
            content = self._hash(image)
            name = image.name if len(image.name) < 80 else f"{image.name[:77]}..."
            if expected not in (None, content):  # before it is decoded: a file that is being written is no picture
                raise RowError(f"image {name!r} has changed since the run began; restore it, or begin a new run")
            pixels = self.vision.scaled(decode(image))
        except RowError as error:
            error.file = self.files.place_of(reference)
            raise
        state = "" if image.file is None else file_state(image.file)
        return LoadedImage(content, str(image.file or ""), state, name, pixels)

    def _hash(self, image: ImageBytes) -> str:
        content = xxhash.xxh3_128(image.content)
        content.update(digest(self.vision.dependencies).encode())
        return content.hexdigest()


def file_state(file: Path) -> str:
    """Return the size and the time of the last change of a file; empty if there is none."""
    try:
        found = file.stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"
