"""The blocks of a tower are streamed as those of the decoder, and a batch without images leaves them out."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.calls.pass_orders import PassOrders
from horizon_lm.engine.units.grad_sink import GradSink
from horizon_lm.errors import GradientMismatchError, StreamingError
from horizon_lm.model.components import Component
from horizon_lm.model.freezing import freeze
from horizon_lm.model.proven import IMAGES, _table
from horizon_lm.model.units import find_parts
from horizon_lm.schedule.ops import Kind
from tests.census.images import image_batch
from tests.support.gradients import assert_close_gradients, losses_together
from tests.support.models_with_images import KINDS, streamed, text_batch, tiny
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    found = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def step(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


def assert_same_step(model: Any, plain: Any, batch: dict[str, torch.Tensor]) -> None:
    (loss, found), (expected_loss, expected) = step(model, batch), step(plain, batch)
    assert torch.equal(loss, expected_loss)
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], grad, rtol=0.0, atol=0.0, msg=name)


def train_alike(models: Sequence[Any], optimizers: Sequence[Any], batches: Iterable[dict[str, torch.Tensor]]) -> None:
    for batch in batches:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def assert_same_weights(model: Any, other: Any) -> None:
    for each in (model, other):
        horizon_lm.synchronize(each)
    expected = dict(other.named_parameters())
    assert all(torch.equal(param, expected[name]) for name, param in model.named_parameters())


def computed_blocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kind, int]]:
    """The computations of blocks, in their order."""
    found: list[tuple[Kind, int]] = []
    cursor = model._horizon.engine.cursor
    compute = cursor.compute

    def watched(kind: Kind, unit: Any) -> Any:
        found.extend([(kind, unit.block_index)] if unit.is_block else [])
        return compute(kind, unit)

    monkeypatch.setattr(cursor, "compute", watched)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_autograd(kind: str) -> None:
    plain = tiny(kind)
    images, model = image_batch(plain), streamed(plain, SimulatedDevice(), activation_checkpoints="host")
    assert model._horizon.engine.parts.towers
    for batch in (images, text_batch(), images, images, text_batch()):
        assert_same_step(model, plain, batch)


@pytest.mark.parametrize("kind", thinned(KINDS, every=3))
def test_losses_in_chunks(kind: str) -> None:
    plain = tiny(kind)
    images, model = image_batch(plain), streamed(plain, head="chunked")
    for batch in (images, text_batch(), images):
        loss = model(**batch).loss
        loss.backward()
        expected = plain(**batch, use_cache=False).loss
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert_close_gradients(model, plain, tolerance=1e-6)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("kind", thinned(KINDS, every=3, keep=["qwen3_vl"]))
@pytest.mark.parametrize("activation_checkpoints", ["host", "device"])
def test_rows_with_images_are_cut_into_micro_batches(kind: str, activation_checkpoints: str) -> None:
    """The decoder computes a row at a time, and the tower the images of all rows."""
    plain = tiny(kind)
    images = image_batch(plain)
    images["attention_mask"][0, :2] = 0  # padding on the left
    settings = {"device_micro_batch_size": 1, "activation_checkpoints": activation_checkpoints}
    model = streamed(plain, SimulatedDevice(), **settings)
    for batch in (images, text_batch(), images):
        loss = model(**batch).loss
        loss.backward()
        expected = plain(**batch, use_cache=False).loss
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert_close_gradients(model, plain, tolerance=1e-5)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("kind", thinned(KINDS, every=4))
def test_with_resident_weights_and_graphs(kind: str) -> None:
    plain = tiny(kind)
    num_blocks = len(find_parts(plain).blocks)
    model = streamed(plain, SimulatedDevice(), resident_blocks=num_blocks, resident_graphs=num_blocks)
    images, apart = image_batch(plain), streamed(plain)
    optimizers = [horizon_lm.AdamW(each, lr=1e-3) for each in (model, apart)]
    train_alike((model, apart), optimizers, (images, text_batch(), images, text_batch(), images))
    assert_same_weights(model, apart)


@pytest.mark.parametrize("kind", thinned(KINDS, every=3))
@pytest.mark.parametrize("trained", ["vision|visual|tower", "proj|merger", "language_model"])
def test_one_part_is_trained_alone(kind: str, trained: str) -> None:
    plain = tiny(kind)
    for name, param in plain.named_parameters():
        param.requires_grad_(any(part in name for part in trained.split("|")) and "lm_head" not in name)
    model, images = streamed(plain), image_batch(plain)
    for _ in range(2):
        assert_same_step(model, plain, images)


def test_a_frozen_tower_is_computed_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny("llava")
    plain.model.vision_tower.requires_grad_(False)
    model = streamed(plain)
    tower = model._horizon.engine.parts.towers[0]
    computed = computed_blocks(model, monkeypatch)
    assert_same_step(model, plain, image_batch(plain))
    assert {index for kind, index in computed if kind == Kind.FORWARD and index in tower} == set(tower)
    assert not [index for kind, index in computed if kind == Kind.BACKWARD and index in tower]


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"head": "chunked", "head_chunk_tokens": 3},
        {"device_micro_batch_size": 1},
        {"resident_blocks": 9, "resident_graphs": 9},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_a_frozen_tower_is_computed_once_without_a_graph(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the computations of each block: one for each batch, or one for each of the two images of a batch that is cut."""
    plain, num_cuts = tiny(kind), 2 if "device_micro_batch_size" in settings else 1
    freeze(plain, None, [Component.VISION_TOWER])
    model, images = streamed(plain, **settings), image_batch(plain)
    parts = model._horizon.engine.parts
    tower = [parts.blocks[index] for index in parts.towers[0]]
    computed: list[Any] = []
    compute = type(tower[0]).forward

    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        output = compute(module, *args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        if not hidden.is_meta and not hidden.requires_grad:  # in a trial, before the first pass
            computed.append(module)
        return output

    monkeypatch.setattr(type(tower[0]), "forward", watched)
    for _ in range(2):
        model(**images).loss.backward()
    assert len(computed) == 2 * len(tower) * num_cuts
    losses_together(model, [images, text_batch(), images])
    assert len(computed) == 4 * len(tower) * num_cuts


def test_a_batch_of_text_leaves_the_tower_out(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny("qwen3_vl")
    model = streamed(plain)
    parts, computed = model._horizon.engine.parts, computed_blocks(model, monkeypatch)
    assert_same_step(model, plain, text_batch())
    assert {index for _, index in computed} == set(parts.decoder_blocks)
    moved = horizon_lm.stats(model)["moved_bytes"]
    assert not [name for name in moved if any(name.endswith(f":block{index}") for index in parts.towers[0])]


def test_the_last_block_of_a_tower_may_be_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA reads the last block but one."""
    plain = tiny("llava", vision_feature_layer=-2)
    model = streamed(plain)
    last, computed = model._horizon.engine.parts.towers[0][-1], computed_blocks(model, monkeypatch)
    assert_same_step(model, plain, image_batch(plain))
    assert [kind for kind, index in computed if index == last] == [Kind.FORWARD]


@pytest.mark.parametrize("kind", thinned(KINDS, every=3))
@pytest.mark.parametrize("first", ["images", "text"])
def test_batches_with_and_without_images_are_computed_together(kind: str, first: str) -> None:
    plain = tiny(kind)
    images, model = image_batch(plain), streamed(plain, SimulatedDevice())
    batches = [images, text_batch(), images] if first == "images" else [text_batch(), images]
    for _ in range(2):
        expected = []
        for batch in batches:
            loss = plain(**batch, use_cache=False).loss / len(batches)
            loss.backward()
            expected.append(loss.item())
        assert losses_together(model, batches) == pytest.approx(expected, rel=1e-6)
        assert_close_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("where", ["visual", "language_model", "visual|language_model"])
def test_adapters(where: str) -> None:
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    plain = tiny("qwen2_5_vl")
    images = image_batch(plain)
    adapted = rf".*({where})\..*(qkv|proj|q_proj|v_proj|down_proj)"
    plain = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=adapted, init_lora_weights=False))
    model = streamed(plain, SimulatedDevice(), activation_checkpoints="host")
    without_gradient = where == "visual"  # then rows of text train nothing
    for batch in (images, images if without_gradient else text_batch(), images):
        assert_same_step(model, plain, batch)


def test_a_kind_of_batch_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tried, find = tiny("llava"), list[Any](), PassOrders._find
    images, model = image_batch(plain), streamed(plain)
    monkeypatch.setattr(PassOrders, "_find", lambda self, *args: tried.append(args) or find(self, *args))
    for number, batch in enumerate([images, text_batch(), images, text_batch()]):
        model(**batch, num_items_in_batch=20 + number).loss.backward()
    assert len(tried) == 2


def test_evaluation_and_generation() -> None:
    plain = tiny("qwen2_5_vl").eval()
    model, images = streamed(plain).eval(), image_batch(plain)
    with torch.no_grad():
        assert torch.equal(model(**images).logits, plain(**images).logits)
    prompt = {name: value for name, value in images.items() if name != "labels"}
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**prompt, **options), plain.generate(**prompt, **options))
    assert_same_step(model, plain, images)


def test_update_in_backward() -> None:
    plain = tiny("qwen3_vl")
    images, model = image_batch(plain), streamed(plain, SimulatedDevice())
    apart = streamed(plain)
    optimizers = [horizon_lm.AdamW(model, lr=1e-3, update_in_backward=True), horizon_lm.AdamW(apart, lr=1e-3)]
    train_alike((model, apart), optimizers, (images, text_batch(), images, text_batch()))
    assert_same_weights(model, apart)


def test_checked_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower that is wrong is found; the check compares its first block."""
    plain = tiny("qwen3_vl")
    model, images = streamed(plain, check_recompute=False, check_gradients=1), image_batch(plain)
    step(model, images)
    wrong = streamed(plain, check_recompute=False, check_gradients=1)
    of_tower, close = wrong._horizon.engine.parts.towers[0], GradSink.close

    def alter(sink: Any) -> list[str]:
        names = close(sink)
        for buffer in sink._slot.buffers if sink._index in of_tower else []:
            buffer *= 1.1
        return names

    monkeypatch.setattr(GradSink, "close", alter)
    with pytest.raises(GradientMismatchError, match=r"visual\.blocks\.0"):
        wrong(**images).loss.backward()


def test_device_memory_does_not_depend_on_the_depth_of_the_tower() -> None:
    peaks, counted = {}, {}
    for depth in (4, 12):
        meter, plain = StorageMeter(), tiny("qwen2_5_vl")
        config = copy.deepcopy(plain.config)
        config.vision_config.depth = depth
        config.vision_config.fullatt_block_indexes = [1]
        model = horizon_lm.stream(type(plain)(config), "cpu", precision="float32", activation_checkpoints="host")
        images = image_batch(plain)
        with meter:
            for _ in range(2):
                model(**images).loss.backward()
        assert len(model._horizon.engine.parts.towers[0]) == depth
        peaks[depth], counted[depth] = meter.peak, horizon_lm.stats(model)["device_bytes_peak"]
    assert counted[4] == counted[12]
    assert peaks[4] == peaks[12]


def test_a_tower_that_is_called_twice_for_a_batch_is_named() -> None:
    plain = tiny("qwen2_5_vl")
    images, model = image_batch(plain), streamed(plain)
    video = {"pixel_values_videos": images["pixel_values"], "video_grid_thw": images["image_grid_thw"]}
    ids = torch.where(
        images["input_ids"] == plain.config.image_token_id, plain.config.video_token_id, images["input_ids"]
    )
    both = {
        name: torch.cat([value, ids if name == "input_ids" else value], 1)
        for name, value in images.items()
        if name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids")
    }
    rest = {name: value for name, value in images.items() if name not in both}
    with pytest.raises(StreamingError, match=r"visual\.blocks\.0: the model calls this block twice for one batch"):
        model(**both, **rest, **video)
    assert_same_step(model, plain, images)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, entry in _table()["types"].items() if IMAGES in entry["features"]])
def test_every_type_with_images(kind: str) -> None:
    plain = tiny(kind)
    images, model = image_batch(plain), streamed(plain, SimulatedDevice(), activation_checkpoints="host")
    for batch in (images, text_batch(), images):
        assert_same_step(model, plain, batch)
