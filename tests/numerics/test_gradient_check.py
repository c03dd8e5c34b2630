"""check_gradients: correct gradients pass, and a wrong gradient is named."""

from itertools import product
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.errors import ConfigError, GradientMismatchError
from horizon_lm.model.block_template import StreamedBlock
from tests.support.thinned_cases import thinned
from tests.support.tiny_models import FAMILIES, batch, build
from tests.support.wrong_gradients import wrong_slot

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "micro-batches": {"device_micro_batch_size": 1},
    "bfloat16": {
        "precision": "bf16", "compute_dtype": torch.bfloat16, "device_micro_batch_size": 2, "activation_checkpoints": "host",
    },
    "graphs": {"resident_blocks": 2, "resident_graphs": 1},
    "simulated": {"device": "simulated"},
}  # fmt: skip


@pytest.mark.parametrize(("family", "settings"), thinned(product(FAMILIES, SETTINGS)))
def test_correct_gradients_pass(family: str, settings: str) -> None:
    model = horizon_lm.stream(build(family), check_gradients=2, **SETTINGS[settings])
    model(**batch()).loss.backward()
    assert model._horizon.blocks.gradient_check is None  # the check compared one step and has ended


def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a block compute something different from its code, like a wrong kernel of a compiler."""
    forward = StreamedBlock.forward

    def alter(block: Any, *args: Any, uncompiled: bool, **kwargs: Any) -> Any:
        output = forward(block, *args, uncompiled=uncompiled, **kwargs)
        return output if uncompiled else output * 1.01

    monkeypatch.setattr(StreamedBlock, "forward", alter)


@pytest.mark.parametrize("breaks", [wrong_slot, wrong_kernel])
@pytest.mark.parametrize("settings", ["float32", "micro-batches"])
def test_a_wrong_gradient_is_named(breaks: Any, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch)
    model = horizon_lm.stream(build("llama"), check_gradients=3, **SETTINGS[settings])
    with pytest.raises(
        GradientMismatchError, match=r"check_gradients: model\.layers\.2.* differs from plain autograd by"
    ):
        model(**batch()).loss.backward()


def test_masks_need_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that rejects a mask with a gradient is checked, too."""
    forward, needed = StreamedBlock.forward, []

    def watch(block: Any, *args: Any, **kwargs: Any) -> Any:
        needed.append(kwargs["attention_mask"].requires_grad)
        return forward(block, *args, **kwargs)

    monkeypatch.setattr(StreamedBlock, "forward", watch)
    model = horizon_lm.stream(build("gpt_oss"), check_gradients=2, attn_implementation="eager")
    model(**batch()).loss.backward()
    assert set(needed) == {False}


def test_blocks_are_spread_over_the_model() -> None:
    model = horizon_lm.stream(build("llama", num_hidden_layers=7), check_gradients=3)
    assert model._horizon.blocks.gradient_check.indices == {0, 3, 6}


def test_a_negative_number_of_blocks_is_rejected() -> None:
    with pytest.raises(ConfigError, match="check_gradients is -1"):
        horizon_lm.stream(build("llama"), check_gradients=-1)
