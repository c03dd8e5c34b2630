"""Make rows with images without a processor, by trying arguments until the model accepts them."""

import copy
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.census.image_layouts import Layout, layouts_of
from tests.census.shrink import NUM_PLAIN_TOKENS
from tests.census.tiny_models import CannotBuildError

ONE, SEVERAL, MIXED = (1, 1), (1, 2), (0, 1)  # the number of images of each row of a batch
TEXT = 5  # tokens of text before, between and after images
_POSITIONS = "image_embeds_position_mask"
_MISMATCH = re.compile(r"tokens:? (\d+).*features:? (\d+)", re.DOTALL)


@dataclass(frozen=True)
class Images:
    """How rows with images are given to a model.

    Attributes:
        token: the token that stands for an image.
        num_tokens: how often it stands in a row for one image.
        marks: arguments of shape (B, T) that are 1 where a token stands for an image, and otherwise 0.
        layout: the arguments with the images.
    """

    token: int
    num_tokens: int
    marks: Sequence[str]
    layout: Layout

    def batch(self, counts: Sequence[int] = ONE, seed: int = 4) -> dict[str, torch.Tensor]:
        """Return rows with so many images each, between tokens of text; shorter rows are padded on the right."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(3, 70, (len(counts), TEXT * (max(counts) + 1)), generator=generator)
        length = text.shape[1] + max(counts) * self.num_tokens
        ids, mask = (torch.zeros(len(counts), length, dtype=torch.long) for _ in range(2))
        for row, count in enumerate(counts):
            image = [self.token] * self.num_tokens
            tokens = text[row, :TEXT].tolist()
            for number in range(1, count + 1):
                tokens += image + text[row, number * TEXT : (number + 1) * TEXT].tolist()
            ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        labels = ids.masked_fill((ids == self.token) | (mask == 0), -100)
        marks = {name: (ids == self.token).long() for name in self.marks}
        pixels = self.layout(counts, generator) if any(counts) else {}
        return {"input_ids": ids, "attention_mask": mask, "labels": labels} | marks | pixels


def image_batch(model: Any) -> dict[str, torch.Tensor]:
    """Return rows with one image each. Raise as `find_images`."""
    return find_images(model).batch()


def find_images(model: Any) -> Images:
    """Return how a model takes images; several in a row and rows without, if it takes these.

    Raises:
        CannotBuildError: no arguments that the model accepts were found.
    """
    token, reasons, found = _image_token(model), list[str](), list[Images]()
    if token is None:
        raise CannotBuildError("its config names no token that stands for an image")
    for layout in layouts_of(model):
        each = _try(model, token, layout)
        if isinstance(each, str):
            reasons.append(each)
            continue
        if not any(why_not(model, each, counts) for counts in (SEVERAL, MIXED)):
            return each
        found.append(each)
    if found:
        return found[0]
    raise CannotBuildError("no arguments for images were found: " + "; ".join(dict.fromkeys(reasons))[:600])


def _try(model: Any, token: int, layout: Layout) -> Images | str:
    """Return images in a layout that the model accepts, or why it does not accept them.

    Its error message contains the number of tokens of an image.
    """
    arguments = inspect.signature(type(model).forward).parameters
    marks = [name for name in ("token_type_ids", "mm_token_type_ids", _POSITIONS) if name in arguments]
    number, width, rows = 4, model.config.get_text_config().hidden_size, len(ONE)
    for _ in range(3):
        images = Images(token, number, marks, layout)
        reason = why_not(model, images, ONE)
        if not reason:
            return images
        said = _MISMATCH.search(reason)
        if said is None or int(said[2]) % rows:
            return reason[:140]
        tokens, features = int(said[1]), int(said[2]) // rows
        elements = tokens != number * rows or (tokens == 2 * features and features % width == 0)
        number = features // width if elements and features % width == 0 else features
    return "the number of tokens of an image was not found"


def why_not(model: Any, images: Images, counts: Sequence[int]) -> str:
    """Return why a model does not take rows with so many images each; empty if it takes them, and they change its loss."""
    batch, others = images.batch(counts), images.layout(counts, torch.Generator().manual_seed(9))
    try:
        with torch.random.fork_rng(), torch.no_grad():
            plain = copy.deepcopy(model)
            loss = plain(**batch, use_cache=False).loss
            other = plain(**batch | others, use_cache=False).loss
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not loss.isfinite():
        return "the loss is not finite"
    return "images change nothing" if torch.equal(loss, other) else ""


def _image_token(model: Any) -> int | None:
    config = model.config
    for name in ("image_token_id", "image_token_index", "image_patch_id", "img_context_token_id", "video_token_index"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    if _POSITIONS in inspect.signature(type(model).forward).parameters:
        return NUM_PLAIN_TOKENS  # any token, as its place is given apart
    return (getattr(config, "vocabulary_map", None) or {}).get("<image>")
