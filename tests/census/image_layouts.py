"""The arguments with which models of transformers take images, such as their processors make them."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

# Takes the number of images of each row, and returns the arguments with all of them.
Layout = Callable[[Sequence[int], torch.Generator], dict[str, torch.Tensor]]


def layouts_of(model: Any) -> Iterator[Layout]:
    """Yield layouts of the size of a model's images: first those of all images one after the other, then those by row."""
    vision = next(
        (c for n, c in vars(model.config).items() if re.search(r"vision|vq", n) and hasattr(c, "to_dict")), None
    )
    patch = _number(vision, "patch_size", 4)
    size = _number(vision, "image_size", 4 * patch)
    channels = _number(vision, "num_channels", 3)
    temporal = _number(vision, "temporal_patch_size", _number(vision, "patch_temporal", 1))
    frame = (channels, size, size)
    flat = _one_after_the_other
    grid, square = torch.tensor([1, 4, 4]), torch.tensor([size, size])
    patches, cut = (16, channels * temporal * patch * patch), (16, channels, patch, patch)
    one = torch.ones(1, dtype=torch.long)
    full = torch.ones(16, dtype=torch.long)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).flatten(0, 1)
    yield flat({"pixel_values": frame})
    yield flat({"pixel_values": patches}, {"image_grid_thw": grid}, joined=0)
    yield flat({"pixel_values": cut}, {"image_grid_thw": grid}, joined=0)
    yield flat({"pixel_values": cut}, {"image_grid_hws": grid[1:]}, joined=0)
    yield flat({"pixel_values": frame}, {"image_sizes": square})
    yield _by_row({"pixel_values": frame})
    yield flat({"pixel_values": (1, *frame)})
    yield flat({"pixel_values": (2, *frame)}, {"image_sizes": square})
    yield _by_row({"pixel_values": frame}, {"pixel_attention_mask": torch.ones(size, size, dtype=torch.bool)})
    yield flat({"pixel_values": frame}, {"pixel_mask": torch.ones(size, size, dtype=torch.long)})
    flattened = (16, channels * patch * patch)
    yield flat({"pixel_values": flattened}, {"spatial_shapes": grid[1:], "pixel_attention_mask": full})
    yield flat({"pixel_values": flattened}, {"image_position_ids": places})
    yield flat({"pixel_values": flattened}, {"pixel_position_ids": places})
    yield flat({"pixel_values": frame, "high_res_pixel_values": (channels, 16, 16)})
    yield _by_row({"pixel_values": (1, *frame)}, {"aspect_ratio_ids": one[0], "aspect_ratio_mask": one})
    yield _by_row({"pixel_values": frame}, {"pixel_attention_mask": torch.tensor(True)})
    yield flat({"pixel_values": patches}, {"image_grid_thw": grid, "image_merge_sizes": one[0]}, joined=0)
    yield flat({"pixel_values_images": frame})
    yield _with_places(flat({"flattened_patches": flattened}))
    yield flat({"pixel_values": (1, channels, patch, 16 * patch)}, {"target_sizes": grid[1:]}, joined=3)
    yield _pooled(flat({"pixel_values": flattened}, {"image_grids": torch.tensor([2, 2, 0, 0])}))
    words = torch.tensor([3, 4, 5])
    yield flat({"pixel_values": frame}, {"qformer_input_ids": words})
    yield flat({"pixel_values": (1, *frame)}, {"qformer_input_ids": words})
    yield flat({"pixel_values": frame}, {"image_sizes": square, "target_sizes": grid[1:]})


def _one_after_the_other(
    shapes: dict[str, tuple[int, ...]], others: dict[str, torch.Tensor] | None = None, joined: int | None = None
) -> Layout:
    """Return a layout of all images of a batch. ``joined``: the dimension of an image in which the next one follows; None for a new one."""

    def layout(counts: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        join = torch.stack if joined is None else partial(torch.cat, dim=joined)
        drawn = {n: [torch.randn(each, generator=generator) for _ in range(sum(counts))] for n, each in shapes.items()}
        same = {name: torch.stack([value] * sum(counts)) for name, value in (others or {}).items()}
        return {name: join(each) for name, each in drawn.items()} | same

    return layout


def _with_places(layout: Layout) -> Layout:
    """Return a layout in which each patch begins with its row and its column."""
    places = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0))

    def placed(counts: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        patches = layout(counts, generator)
        return {name: torch.cat([places.expand(len(each), -1, -1), each], -1) for name, each in patches.items()}

    return placed


def _pooled(layout: Layout) -> Layout:
    """Return a layout with the four patches that each token of an image pools, numbered in the batch."""
    places = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)

    def pooled(counts: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        numbered = torch.cat([places + 16 * image for image in range(sum(counts))])
        return layout(counts, generator) | {"image_token_pooling": numbered}

    return pooled


def _by_row(shapes: dict[str, tuple[int, ...]], others: dict[str, torch.Tensor] | None = None) -> Layout:
    """Return a layout of a row's images in each row; zeros stand for images that a row does not have."""

    def layout(counts: Sequence[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        has = torch.arange(max(counts)) < torch.tensor(counts)[:, None]  # (B, images)
        drawn = {n: torch.randn(*has.shape, *shape, generator=generator) for n, shape in shapes.items()}
        ones = {name: value.expand(*has.shape, *value.shape) for name, value in (others or {}).items()}
        return {name: each * has.view(*has.shape, *[1] * (each.ndim - 2)) for name, each in (drawn | ones).items()}

    return layout


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, int) else default
