"""Rows of tiny models with different numbers of images, of different sizes: as one batch, and one by one."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

from horizon_lm.model.packed_positions import packed_positions, rope_index_of
from tests.census.images import _image_token

Size = tuple[int, int]  # height and width of an image in patches
Batch = dict[str, torch.Tensor]

# One image, two of other sizes, none, and one: each with text around it.
ROWS: Sequence[Sequence[Size]] = ([(4, 4)], [(2, 4), (4, 2)], [], [(4, 2)])
_PATCH, _SIDE, _SHORTEST, _LONGEST = 4, 16, 2, 4  # pixels of a patch and of an image; tokens of a piece of text


def batches_of(model: Any, rows: Sequence[Sequence[Size]] = ROWS) -> tuple[Batch, list[Batch]]:
    """Return some rows as one batch, padded on the right, and each row as a batch without padding.

    The images of a row are tensors as the processor of the model makes them. Image tokens and padding have no labels.

    Args:
        model: a tiny model of `tests/support/models_with_images.py`.
        rows: the sizes of the images of each row.
    """
    generator = torch.Generator().manual_seed(9)
    images = [[_image(model, size, generator) for size in row] for row in rows]
    ids = [_ids(model, each, generator) for each in images]
    return _batch(model, ids, images), [_batch(model, [row], [own]) for row, own in zip(ids, images, strict=True)]


def packed_of(model: Any, rows: Sequence[Sequence[Size]] = ROWS) -> Batch:
    """Return the rows of `batches_of` packed into one row, with positions that restart with each of them. Nothing predicts its first token."""
    apart, _ = batches_of(model, rows)
    mask = apart["attention_mask"].bool()
    positions = mask.cumsum(1)[mask][None] - 1
    packed = {name: tokens[mask][None] for name, tokens in apart.items() if tokens.shape == mask.shape}
    packed |= {name: tensor for name, tensor in apart.items() if name not in packed}
    del packed["attention_mask"]
    packed["labels"].masked_fill_(positions == 0, -100)
    rope_index = rope_index_of(model)
    if rope_index is not None:
        positions = packed_positions(rope_index, packed["input_ids"], positions, packed)
    return packed | {"position_ids": positions}


def _batch(model: Any, ids: Sequence[torch.Tensor], images: Sequence[Sequence[Batch]]) -> Batch:
    """Return rows as arguments of the model: tokens (T,) of each, and the tensors of its images."""
    length, token = max(map(len, ids)), _image_token(model)
    padded = torch.stack([pad(row, (0, length - len(row))) for row in ids])
    mask = torch.stack([pad(torch.ones_like(row), (0, length - len(row))) for row in ids])
    labels = padded.masked_fill((padded == token) | (mask == 0), -100)
    found = {"input_ids": padded, "attention_mask": mask, "labels": labels}
    arguments = inspect.signature(type(model).forward).parameters
    kinds = {name: (padded == token).long() for name in ("token_type_ids", "mm_token_type_ids") if name in arguments}
    return found | kinds | _joined(model, images)


def _ids(model: Any, images: Sequence[Batch], generator: torch.Generator) -> torch.Tensor:
    """Return text with the tokens of each image between two pieces of it, shape (T,)."""
    token, pieces = _image_token(model), [_text(generator)]
    assert token is not None
    for image in images:
        pieces += [torch.full((_num_tokens(model, image, len(images)),), token), _text(generator)]
    return torch.cat(pieces)


def _text(generator: torch.Generator) -> torch.Tensor:
    length = int(torch.randint(_SHORTEST, _LONGEST + 1, (), generator=generator))
    return torch.randint(3, 60, (length,), generator=generator)


def _num_tokens(model: Any, image: Batch, count: int) -> int:
    """Return how many tokens a model reads for an image in a row with ``count`` images, on which that may depend."""
    with torch.no_grad():
        features = model.get_image_features(**_joined(model, [[image] * count]), return_dict=True).pooler_output
    width = model.config.get_text_config().hidden_size
    return sum(each.numel() for each in features) // width // count


def _image(model: Any, size: Size, generator: torch.Generator) -> Batch:
    """Return the tensors of an image, whose first dimension is that of images or of patches."""
    height, width = size
    pixels = torch.randn(1, 3, height * _PATCH, width * _PATCH, generator=generator)
    square = torch.randn(1, 3, _SIDE, _SIDE, generator=generator)
    sizes = torch.tensor([[height * _PATCH, width * _PATCH]])
    kind = model.config.model_type
    if kind in ("llava", "gemma3"):  # images of one size
        return {"pixel_values": square}
    if kind == "internvl":  # tiles
        return {"pixel_values": torch.randn(max(height, width) // 2, 3, _SIDE, _SIDE, generator=generator)}
    if kind == "llava_onevision":  # a small image, and its tiles if it is the only one of its row
        count = image_size_to_num_patches(sizes[0], model.config.image_grid_pinpoints, _SIDE)
        tiles = torch.randn(1, count, 3, _SIDE, _SIDE, generator=generator)
        return {"pixel_values": tiles, "image_sizes": sizes}
    if kind == "smolvlm":
        shown = torch.zeros(1, _SIDE, _SIDE, dtype=torch.bool)
        shown[:, : height * _PATCH, : width * _PATCH] = True
        return {"pixel_values": square * shown, "pixel_attention_mask": shown}
    if kind == "mistral3":
        return {"pixel_values": pixels, "image_sizes": sizes}
    if kind == "gemma4":
        rest = _SIDE - height * width
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
        patches = torch.randn(1, _SIDE, 3 * _PATCH**2, generator=generator)
        return {"pixel_values": patches, "image_position_ids": pad(places, (0, 0, 0, rest), value=-1)[None]}
    patches = torch.randn(height * width, 2 * 3 * _PATCH**2, generator=generator)  # two frames
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, height, width]])}


def _joined(model: Any, images: Sequence[Sequence[Batch]]) -> Batch:
    """Return the tensors of the images of some rows as arguments of the model; none if no row has an image."""
    names = list(dict.fromkeys(name for row in images for image in row for name in image))
    kind = model.config.model_type
    if kind == "smolvlm" and names:  # (rows, images of a row, ...), with images of zeros as padding
        most = max(map(len, images))
        empty = {name: torch.zeros_like(next(image[name] for row in images for image in row)) for name in names}
        filled = [[*row, *[empty] * (most - len(row))] for row in images]
        return {name: torch.stack([_cat([image[name] for image in row]) for row in filled]) for name in names}
    joined = {name: _cat([image[name] for row in images for image in row]) for name in names}
    if kind == "llava_onevision" and names:
        joined["batch_num_images"] = torch.tensor([len(row) for row in images])
    return joined


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after the other in the first dimension, padded to the largest in all others."""
    shape = [max(sizes) for sizes in zip(*(each.shape[1:] for each in tensors), strict=True)]
    return torch.cat(
        [
            pad(
                each,
                [n for want, have in reversed([*zip(shape, each.shape[1:], strict=True)]) for n in (0, want - have)],
            )
            for each in tensors
        ]
    )
