"""Packed rows with images give what each row gives by itself, with positions of their own; models for which they would not are rejected."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import attention
from horizon_lm.model.skeletons import build_skeleton
from horizon_lm.model.units import find_parts
from horizon_lm.planning.measure.packable import require_packable, require_packable_images
from tests.census.images import image_batch
from tests.support.gradients import assert_close_gradients
from tests.support.models_with_images import streamed, tiny
from tests.support.rows_with_images import Batch, batches_of, packed_of
from tests.support.thinned_cases import thinned

KINDS = (
    "qwen2_5_vl", "qwen3_vl", "glm4v", "glm46v", "gemma4", "llava", "llava_onevision", "internvl", "smolvlm", "mistral3",
)  # fmt: skip
# Positions of images, tiles that depend on the images of a row, and images of several rows that are padded together.
DEFAULT = (("qwen2_5_vl", "sdpa"), ("qwen3_vl", "varlen"), ("llava_onevision", "varlen"), ("smolvlm", "sdpa"))
REJECTED = (
    ("qwen3_5", "sdpa", "block 0 .* gets no mask"),  # a recurrent state
    ("gemma3", "varlen", "their tokens see later ones"),
    ("hunyuan_vl", "varlen", "cannot be tried on packed rows"),
    ("hunyuan_vl", "sdpa", "cannot be tried on packed rows"),  # it takes no positions of texts before those of the axes
)


def losses_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the losses of the trained tokens of a batch, one row after the other."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return losses[batch["labels"][:, 1:] != -100]


def require_possible(plain: Any, used: str) -> None:
    """Raise ModelNotSupportedError if rows with images cannot be packed."""
    attention.register()
    parts = find_parts(build_skeleton(plain.config))
    require_packable(parts, used)
    inputs = batches_of(plain)[0], packed_of(plain)
    require_packable_images(parts, used, *({k: v for k, v in each.items() if k != "labels"} for each in inputs))


@pytest.mark.parametrize(("kind", "used"), thinned(product(KINDS, ("sdpa", "varlen")), every=20, keep=DEFAULT))
def test_packed_rows_are_rows_by_themselves(kind: str, used: str) -> None:
    plain = tiny(kind)
    require_possible(plain, used)
    _, rows = batches_of(plain)
    expected = torch.cat([losses_of(plain, row) for row in rows])
    expected.mean().backward()
    model = streamed(plain, attn_implementation=used)
    packed = packed_of(plain)
    with torch.no_grad():
        torch.testing.assert_close(losses_of(model, packed), expected, rtol=1e-5, atol=1e-5)
    model(**packed).loss.backward()
    assert_close_gradients(model, plain, tolerance=1e-5)


@pytest.mark.parametrize(("kind", "used", "reason"), REJECTED)
def test_models_that_compute_packed_images_in_another_way_are_rejected(kind: str, used: str, reason: str) -> None:
    plain = tiny(kind)
    with pytest.raises(ModelNotSupportedError, match=reason):
        require_possible(plain, used)


@pytest.mark.parametrize("used", ["sdpa", "varlen"])
def test_positions_that_are_found_in_another_way_are_rejected(used: str) -> None:
    attention.register()
    parts = find_parts(build_skeleton(tiny("qwen2_5_omni_thinker").config))
    with pytest.raises(ModelNotSupportedError, match=r"cannot be tried on packed rows .*; remove packing"):
        require_packable(parts, used)


def test_gemma3_is_rejected_if_its_packed_images_are_computed_in_another_way() -> None:
    """transformers 5.24 applies the mask for the images of the first row to all others; 5.17 does not."""
    plain = tiny("gemma3")
    with torch.no_grad():
        expected = torch.cat([losses_of(plain, row) for row in batches_of(plain)[1]])
        is_same = torch.allclose(losses_of(plain, packed_of(plain)), expected, atol=1e-3)
    if is_same:
        require_possible(plain, "sdpa")
        return
    with pytest.raises(ModelNotSupportedError, match=r"block 0 .* gets other attention_mask for images"):
        require_possible(plain, "sdpa")


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_varlen_computes_batches_with_images(kind: str) -> None:
    """Towers attend in both directions, by another implementation."""
    plain = tiny(kind)
    batch, rows = batches_of(plain)
    model = streamed(plain, attn_implementation="varlen", device_micro_batch_size=2)
    expected = torch.cat([losses_of(plain, row) for row in rows])
    torch.testing.assert_close(losses_of(model, batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4_unified"])  # with a tower, and without
def test_varlen_rejects_images_whose_tokens_see_later_ones(kind: str) -> None:
    plain = tiny(kind)
    model = streamed(plain, attn_implementation="varlen")
    with pytest.raises(
        ModelNotSupportedError, match="not possible for images: their tokens see later ones; choose sdpa"
    ):
        model(**image_batch(plain))


@pytest.mark.parametrize("change", ["positions", "borders"])
def test_other_positions_of_packed_rows_are_found(change: str) -> None:
    plain = tiny("qwen2_5_vl")
    parts = find_parts(build_skeleton(plain.config))
    apart, packed = batches_of(plain)[0], packed_of(plain)
    positions = packed["position_ids"]
    if change == "positions":  # of one axis of a token of an image
        positions[2, 0, int((packed["mm_token_type_ids"][0] == 1).nonzero()[0])] += 1
    else:  # rows that are not kept apart
        positions[0] = torch.arange(positions.shape[2])
    with pytest.raises(ModelNotSupportedError, match="remove packing"):
        require_packable_images(
            parts, "sdpa", *({k: v for k, v in each.items() if k != "labels"} for each in (apart, packed))
        )
