"""Make rows with images without a processor, by trying arguments until the model accepts them."""

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from tests.census.tiny_models import CannotBuildError

ROWS, TEXT = 2, 5  # rows, each with one image between tokens of text
_MISMATCH = re.compile(r"tokens:? (\d+).*features:? (\d+)", re.DOTALL)


def image_batch(model: Any) -> dict[str, torch.Tensor]:
    """Return rows with one image each.

    Raises:
        CannotBuildError: no arguments that the model accepts were found.
    """
    token, reasons = _image_token(model.config), []
    if token is None:
        raise CannotBuildError("its config names no token that stands for an image")
    for pixels in _candidates(model):
        reason = _try(model, token, pixels)
        if isinstance(reason, dict):
            return reason
        reasons.append(reason)
    raise CannotBuildError("no arguments for images were found: " + "; ".join(dict.fromkeys(reasons))[:600])


def _try(model: Any, token: int, pixels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | str:
    """Return rows that the model accepts, or its error message, which contains the number of tokens per image."""
    arguments = inspect.signature(type(model).forward).parameters
    marks = [name for name in ("token_type_ids", "mm_token_type_ids") if name in arguments]
    number, width = 4, model.config.get_text_config().hidden_size
    for _ in range(3):
        batch = _rows(token, number, marks) | pixels
        try:
            with torch.random.fork_rng(), torch.no_grad():
                plain = copy.deepcopy(model)
                loss = plain(**batch, use_cache=False).loss
                other = plain(**batch | _other(pixels), use_cache=False).loss
            if not loss.isfinite():
                return "the loss is not finite"
            return "images change nothing" if torch.equal(loss, other) else batch
        except Exception as error:
            said = _MISMATCH.search(str(error))
            if said is None or int(said[2]) % ROWS:
                return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            tokens, features = int(said[1]), int(said[2]) // ROWS
            elements = tokens != number * ROWS or (tokens == 2 * features and features % width == 0)
            number = features // width if elements and features % width == 0 else features
    return "the number of tokens of an image was not found"


def _other(pixels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: -value for name, value in pixels.items() if value.is_floating_point()}


def _rows(token: int, number: int, marks: list[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    text = torch.randint(3, 70, (ROWS, 2 * TEXT), generator=generator)
    image = torch.full((ROWS, number), token)
    ids = torch.cat([text[:, :TEXT], image, text[:, TEXT:]], 1)
    labels = ids.masked_fill(ids == token, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels} | {
        name: (ids == token).long() for name in marks
    }


def _image_token(config: Any) -> int | None:
    for name in ("image_token_id", "image_token_index", "image_patch_id", "img_context_token_id"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return (getattr(config, "vocabulary_map", None) or {}).get("<image>")


def _candidates(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield arguments for images like those made by processors of transformers."""
    vision = next(
        (c for n, c in vars(model.config).items() if re.search(r"vision|vq", n) and hasattr(c, "to_dict")), None
    )
    patch = _number(vision, "patch_size", 4)
    size = _number(vision, "image_size", 4 * patch)
    channels = _number(vision, "num_channels", 3)
    torch.manual_seed(5)
    image = torch.randn(ROWS, channels, size, size)
    sizes = torch.tensor([[size, size]] * ROWS)
    grid = torch.tensor([[1, 4, 4]] * ROWS)
    temporal = _number(vision, "temporal_patch_size", _number(vision, "patch_temporal", 1))
    patches = torch.randn(ROWS * 16, channels * temporal * patch * patch)
    yield {"pixel_values": image}
    yield {"pixel_values": patches, "image_grid_thw": grid}
    yield {"pixel_values": torch.randn(ROWS * 16, channels, patch, patch), "image_grid_thw": grid}
    yield {"pixel_values": torch.randn(ROWS * 16, channels, patch, patch), "image_grid_hws": grid[:, 1:]}
    yield {"pixel_values": image, "image_sizes": sizes}
    yield {"pixel_values": image[:, None]}
    yield {"pixel_values": torch.stack([image, image], 1), "image_sizes": sizes}
    yield {"pixel_values": image[:, None], "pixel_attention_mask": torch.ones(ROWS, 1, size, size, dtype=torch.bool)}
    yield {"pixel_values": image, "pixel_mask": torch.ones(ROWS, size, size, dtype=torch.long)}
    flat = torch.randn(ROWS, 16, channels * patch * patch)
    full = torch.ones(ROWS, 16, dtype=torch.long)
    yield {"pixel_values": flat, "spatial_shapes": grid[:, 1:], "pixel_attention_mask": full}
    yield {"pixel_values": flat, "image_position_ids": _positions()}
    yield {"pixel_values": flat, "pixel_position_ids": _positions()}
    yield {"pixel_values": image, "high_res_pixel_values": torch.randn(ROWS, channels, 16, 16)}
    one = torch.ones(ROWS, 1, 1, dtype=torch.long)
    yield {"pixel_values": image[:, None, None], "aspect_ratio_ids": one[:, 0], "aspect_ratio_mask": one}
    yield {"pixel_values": image[:, None], "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.bool)}
    yield {"pixel_values": patches, "image_grid_thw": grid, "image_merge_sizes": torch.tensor([1] * ROWS)}
    yield {"pixel_values_images": image}
    yield {"pixel_values": image, "image_sizes": sizes, "target_sizes": grid[:, 1:]}


def _positions() -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], -1)[None].repeat(ROWS, 1, 1)


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) else value
    return value if isinstance(value, int) else default
