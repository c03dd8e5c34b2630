"""With micro-batches, a tower computes some of the images of a batch at a time, unless its blocks mix them."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock

from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.passes.micro_batches import run_block
from horizon_lm.engine.units import block_autograd, block_computation
from horizon_lm.errors import WholeTowerWarning
from tests.support.gradients import assert_close_gradients, losses_together
from tests.support.models_with_images import streamed, tiny
from tests.support.rows_with_images import Batch, batches_of
from tests.support.thinned_cases import thinned


def lengths_of(model: Any, monkeypatch: pytest.MonkeyPatch, dim: int = 0) -> dict[str, list[int]]:
    """Return the number of images or patches in each computation of a block of a tower from now on, by the name of the block."""
    parts, found = model._horizon.engine.parts, defaultdict[str, list[int]](list)
    names = {parts.block_names[index] for tower in parts.towers for index in tower}

    def watched(module: Any, args: Any, *rest: Any, **options: Any) -> Any:
        if module.name in names:
            found[module.name].append(args[0].shape[dim])
        return run_block(module, args, *rest, **options)

    for each in (block_computation, block_autograd):
        monkeypatch.setattr(each, "run_block", watched)
    return found


def require_same_step(model: Any, plain: Any, batch: Batch) -> None:
    loss = model(**batch).loss
    loss.backward()
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert_close_gradients(model, plain, tolerance=1e-5)
    for each in (model, plain):
        each.zero_grad()


# 40 patches in images of 16, 8, 8 and 8; four images; eight tiles, two of each image.
EXPECTED = {
    "qwen2_5_vl": [16, 8, 8, 8], "mistral3": [16, 8, 8, 8], "gemma3": [1, 1, 1, 1], "smolvlm": [1, 1, 1, 1], "internvl": [2, 2, 2, 2],
}  # fmt: skip


@pytest.mark.parametrize("kind", thinned(EXPECTED, every=5, keep=["mistral3"]))
def test_a_tower_computes_some_images_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny(kind)
    batch, _ = batches_of(plain)
    for size, expected in ((None, [sum(EXPECTED[kind])]), (1, EXPECTED[kind])):
        model = streamed(
            plain, device_micro_batch_size=size, head="chunked"
        )  # whose labels some towers hand to their blocks
        lengths = lengths_of(
            model, monkeypatch, dim=1 if kind == "mistral3" else 0
        )  # its hidden states are (1, patches, H)
        model(**batch).loss.backward()
        assert len(lengths) == 2
        assert all(each == 2 * expected for each in lengths.values())  # forward and backward


def test_windows_are_cut_within_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(tiny("qwen2_5_vl").config)
    config.vision_config.window_size = 8  # of four patches
    torch.manual_seed(0)
    plain = type(tiny("qwen2_5_vl"))(config).train()
    batch, _ = batches_of(plain, [[(4, 8)], []])
    model = streamed(plain, device_micro_batch_size=1)
    lengths = lengths_of(model, monkeypatch)
    require_same_step(model, plain, batch)
    assert [*lengths.values()] == [[16, 16] * 2, [32] * 2]


def test_a_tower_that_mixes_images_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it mixes them."""
    plain, forward = tiny("qwen2_5_vl"), Qwen2_5_VLVisionBlock.forward

    def mixing(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return forward(self, hidden_states + 1e-6 * hidden_states.mean(0), **options)

    monkeypatch.setattr(Qwen2_5_VLVisionBlock, "forward", mixing)
    batch, _ = batches_of(plain)
    model = streamed(plain, device_micro_batch_size=1)
    lengths = lengths_of(model, monkeypatch)
    with pytest.warns(WholeTowerWarning, match=r"visual\.blocks\.0: this block computes all images of a batch at once"):
        require_same_step(model, plain, batch)
    require_same_step(model, plain, batch)  # said once
    assert all(set(each) == {40} for each in lengths.values())


def test_a_block_that_needs_more_than_its_images_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts the patches that it gets."""
    plain, forward = tiny("qwen2_5_vl"), Qwen2_5_VLVisionBlock.forward

    def counting(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return forward(self, hidden_states, **options) * (len(hidden_states) / 40)

    monkeypatch.setattr(Qwen2_5_VLVisionBlock, "forward", counting)
    batch, _ = batches_of(plain)
    model = streamed(plain, device_micro_batch_size=1)
    with pytest.warns(WholeTowerWarning):
        require_same_step(model, plain, batch)


def test_several_batches_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny("qwen3_vl")
    batches = [batches_of(plain, rows)[0] for rows in ([[(4, 4)], [(2, 4)]], [[(4, 2)], [(4, 4), (2, 2)]])]
    model = streamed(plain, SimulatedDevice(), device_micro_batch_size=1, activation_checkpoints="host")
    lengths = lengths_of(model, monkeypatch)
    losses = losses_together(model, batches)
    expected = [plain(**batch, use_cache=False).loss / 2 for batch in batches]
    sum(expected).backward()
    assert losses == pytest.approx([each.item() for each in expected], rel=1e-5)
    assert_close_gradients(model, plain, tolerance=1e-5)
    assert all(each[:5] == [16, 8, 8, 16, 4] for each in lengths.values())


def test_with_checked_gradients_and_kept_graphs() -> None:
    plain = tiny("qwen3_vl")
    batch, _ = batches_of(plain)
    num_blocks = len(streamed(plain)._horizon.engine.parts.blocks)
    for settings in (
        {"check_recompute": False, "check_gradients": num_blocks},
        {"resident_blocks": num_blocks, "resident_graphs": num_blocks},
    ):
        model = streamed(plain, device_micro_batch_size=1, **settings)
        require_same_step(model, plain, batch)


class Reads(TorchFunctionMode):
    """Counts the calls outside of blocks that wait for a device, because the host needs values of a tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count, self._in_block = 0, False

        def counted_outside(*args: Any, **options: Any) -> Any:
            self._in_block = True
            try:
                return run_block(*args, **options)
            finally:
                self._in_block = False

        for each in (block_computation, block_autograd):
            monkeypatch.setattr(each, "run_block", counted_outside)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_mask = func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) == torch.bool
        if not self._in_block and (of_mask or getattr(func, "__name__", "") in READING):
            self.count += 1
        return func(*args, **kwargs or {})


READING = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__", "__float__")
# By type, the tensors with borders in a pass: of all images and of windows; of all images; a mask.
BORDERS = {"qwen2_5_vl": 2, "qwen3_vl": 1, "mistral3": 1}


@pytest.mark.parametrize("kind", BORDERS)
def test_borders_are_read_once_in_a_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However deep the tower is, in the forward pass and in the recomputation."""
    counts = {}
    for depth in (2, 5):
        config = copy.deepcopy(tiny(kind).config)
        config.vision_config.depth = config.vision_config.num_hidden_layers = depth
        torch.manual_seed(0)
        plain = type(tiny(kind))(config).train()
        batch, _ = batches_of(plain)
        for size in (None, 1):
            model = streamed(plain, device_micro_batch_size=size, check_recompute=False)
            model(**batch).loss.backward()  # finds out how the tower is cut
            model.zero_grad()
            lengths = lengths_of(model, monkeypatch, dim=1 if kind == "mistral3" else 0)
            model(**batch).loss.backward()
            assert [*map(len, lengths.values())] == [2 * (1 if size is None else 4)] * depth
            with Reads(monkeypatch) as reads:
                model(**batch).loss.backward()
            counts[depth, size] = reads.count
    # One more: the seeds of micro-batches, which are drawn on the host.
    assert {counts[depth, 1] - counts[depth, None] for depth in (2, 5)} == {BORDERS[kind] + 1}, counts
