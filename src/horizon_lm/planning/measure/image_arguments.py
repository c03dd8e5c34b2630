"""Make the arguments of a model for rows with images from its config, for plans of models whose processor is not here.

Nothing is known of models by name: the model's own code is tried on zeros, and says how many tokens it reads for an image.
"""

import inspect
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from horizon_lm.errors import ConfigError, StreamingError, first_line
from horizon_lm.model.image_inputs import MARKS, image_token
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.skeletons import meta_copy
from horizon_lm.model.trial import TrialDoneError
from horizon_lm.planning.measure.block_probe import output_on_meta
from horizon_lm.planning.measure.image_costs import RowsWithImages, rows_with_images
from horizon_lm.planning.measure.meta_recorder import Recorder
from horizon_lm.planning.measure.pass_trial import PassTrial


def rows_from_config(parts: ModelParts, per_row: int, max_pixels: int | None) -> RowsWithImages:
    """Return rows with images for a model without a processor.

    Args:
        parts: parts of a skeleton.
        per_row: images of a row.
        max_pixels: pixels of an image, which is a square; None if the settings do not limit them.

    Raises:
        ConfigError: the size of images, or how the model takes them, is not known.
    """
    config, name = parts.model.config, type(parts.model).__name__
    token, vision = image_token(config), getattr(config, "vision_config", None)
    if token is None or vision is None:
        raise ConfigError(_unknown(name, "its config has no image token or no vision_config"))
    takes = inspect.signature(type(parts.model).forward).parameters
    one, note = _pixels(vision, "image_grid_thw" in takes, max_pixels, name)
    try:
        tokens = _num_tokens(parts, one)
    except Exception as error:  # the model's own code may raise any exception on arguments of another form
        raise ConfigError(_unknown(name, first_line(error))) from error

    def images_of(ids: torch.Tensor, _: torch.Tensor) -> dict[str, torch.Tensor]:
        marks = {each: (ids == token).long() for each in MARKS if each in takes}
        return marks | {key: torch.cat([value] * len(ids)) for key, value in one.items()}

    return rows_with_images(per_row, [[token] * tokens], images_of, note, per_row)


def _pixels(vision: Any, is_cut: bool, max_pixels: int | None, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return the arguments of a model for one image, and a note about what is assumed.

    Args:
        vision: the config of the model's tower.
        is_cut: images of any size are cut into patches, which the model gets with the numbers of their rows and columns.
        max_pixels: as in `rows_from_config`.
        name: class of the model.
    """
    channels = _number(vision, "in_channels", _number(vision, "num_channels", 3))
    patch, size = _number(vision, "patch_size", 0), _number(vision, "image_size", 0)
    if is_cut and patch:
        if max_pixels is None:
            raise ConfigError(
                f"images_per_row: {name} reads images of any size; give --image_max_pixels, such as 1003520"
            )
        merged = _number(vision, "spatial_merge_size", 1)
        sides = max(1, round(math.sqrt(max_pixels) / (patch * merged))) * merged
        width = channels * _number(vision, "temporal_patch_size", 1) * patch**2
        grid = torch.tensor([[1, sides, sides]])
        return {"pixel_values": torch.zeros(sides**2, width), "image_grid_thw": grid}, ""
    if not size:
        raise ConfigError(_unknown(name, "its vision_config has no image_size"))
    note = f"each image is planned as one picture of {size} x {size} pixels; with the processor in the model's folder, a plan cuts it as a run does"
    return {"pixel_values": torch.zeros(1, channels, size, size)}, note


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, list | tuple) else value
    return value if isinstance(value, int) else default


def _unknown(name: str, why: str) -> str:
    return (
        f"images_per_row: how {name} takes images is not known without its processor ({why}); plan a folder that has "
        "preprocessor_config.json and the tokenizer beside config.json"
    )


def _num_tokens(parts: ModelParts, pixels: dict[str, torch.Tensor]) -> int:
    """Return the number of tokens that the model reads for an image."""
    dtype, outputs = torch.float32, list[Any]()

    def output_of(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_float32 = parts.in_float32_inside(parts.block_names[index])
        return output_on_meta(meta_copy(parts.blocks[index]), args, kwargs, dtype, in_float32)

    def read(**arguments: Any) -> None:
        outputs.append(parts.model.get_image_features(**arguments))
        raise TrialDoneError

    with Recorder((), "cpu"), torch.random.fork_rng(devices=[]):
        PassTrial(parts, read, dtype, torch.device("cpu"), output_of, recording=False).run(pixels)
    features = getattr(outputs[0], "pooler_output", outputs[0])
    elements = sum(each.numel() for each in pytree.tree_leaves(features) if isinstance(each, torch.Tensor))
    tokens, rest = divmod(elements, parts.model.config.get_text_config().hidden_size)
    if not tokens or rest:
        raise StreamingError("its features of an image are no hidden states of tokens")
    return tokens
