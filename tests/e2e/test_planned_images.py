"""Plans of runs whose rows have images, with the processor in the model's folder and without one."""

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlavaConfig, LlavaForConditionalGeneration, PixtralVisionConfig

from horizon_lm.cli.plan_arguments import Size, read_arguments
from horizon_lm.cli.planned_run import plan_one
from horizon_lm.errors import ConfigError, DoesNotFitError
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.render import plan_as_json, plan_lines, write_plan
from horizon_lm.planning.arithmetic.request import Limit, Machine, Saves
from horizon_lm.runs.admission.run_plan import Admission
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.data.ahead import BatchesAhead
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.loader import batch_from, collate
from horizon_lm.runs.data.token_dataset import TokenTable
from horizon_lm.runs.data.vision import Vision, vision_of
from horizon_lm.runs.run_files import read_plan
from horizon_lm.runs.training.rows import RunData, load_data
from tests.e2e.resuming import Runs
from tests.e2e.tiny import write_jsonl
from tests.support.image_models import picture, save_gemma3, save_llava, save_qwen2_5_vl

PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def planned(folder: Path, images: int | None, device: str = "rtx-4090", **settings: Any) -> Plan:
    """Plan a run, on another machine by default, as the command does."""
    values = {"max_length": 256, "per_device_train_batch_size": 2, "device_micro_batch_size": 1} | settings
    options = [token for name, value in values.items() for token in (f"--{name}", str(value))]
    run, hardware = read_arguments(options, str(folder), device, None)
    return plan_one(run, hardware, Size(), images).plan


def without_processor(folder: Path) -> Path:
    for name in PROCESSOR:
        (folder / name).unlink(missing_ok=True)
    return folder


def line_of(plan: Plan) -> str:
    return next(line for line in plan_lines(plan) if line.startswith("images"))


def test_a_config_and_a_processor_say_the_same(tmp_path: Path) -> None:
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    with_processor = planned(folder, 2, image_max_pixels=4096)
    from_config = planned(without_processor(folder), 2, image_max_pixels=4096)
    assert line_of(with_processor).split(maxsplit=1)[1] == "2 a row: 128 patches in the tower and 32 tokens of the row"
    assert line_of(with_processor) == line_of(from_config)
    uses = [device_use(each.step) for each in (with_processor, from_config)]
    assert uses[0] == uses[1]
    assert uses[0].images > device_use(planned(folder, 1, image_max_pixels=4096).step).images > 0


@pytest.mark.parametrize("save", [save_llava, save_gemma3])
def test_models_with_images_of_one_size(save: Any, tmp_path: Path) -> None:
    plan = planned(save(tmp_path / "model"), 1)
    assert plan.step.outline.images is not None
    assert (
        plan.step.outline.images.tokens >= 4
    )  # with line breaks and other tokens that the processor writes around them
    images = planned(without_processor(tmp_path / "model"), 1).step.outline.images
    assert images is not None
    assert images.tokens == 4
    assert "16 x 16 pixels" in images.note


def test_images_take_time(tmp_path: Path) -> None:
    """A frozen tower computes its forward pass alone, a trained one is recomputed and differentiated, too."""
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    seconds = []
    for images, frozen in ((0, True), (1, True), (4, True), (4, False)):
        plan = planned(folder, images, image_max_pixels=65536, freeze_vision_tower=frozen, max_length=2048)
        assert plan.time is not None
        seconds.append(plan.time.seconds)
        kind = plan.step.outline.kind(0)
        assert (kind.backward.at(2).products > 0) is (not frozen)
    assert seconds == sorted(set(seconds))


def test_what_a_plan_says(tmp_path: Path) -> None:
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    assert any("images_per_row" in line for line in plan_lines(planned(folder, None)))
    lines = list(plan_lines(planned(folder, 2, image_max_pixels=4096, max_length=24)))
    assert any("images take 32 tokens of a row, and max_length is 24" in line for line in lines)
    with pytest.raises(ConfigError, match="give --image_max_pixels"):
        planned(without_processor(folder), 1)


@pytest.mark.parametrize("device", ["rtx-4090", "cpu"])
def test_the_json_of_a_plan_has_the_images(device: str, tmp_path: Path) -> None:
    """With the numbers of the text and of the budgets, and it is read back as a report does."""
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    plan = planned(folder, 3, device, image_max_pixels=4096)
    write_plan(plan, "auto", tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    images = content["images"]
    assert line_of(plan).endswith(
        f"{images['per_row']} a row: {images['patches']} patches in the tower and {images['tokens']} tokens of the row"
    )
    on_device, in_host = (
        {item["name"]: item["bytes"] for item in content[place]["items"]} for place in ("device", "host")
    )
    assert images["host_bytes"] == in_host["images"] > 0
    assert images["device_bytes"] == (in_host["device: images"] if device == "cpu" else on_device["images"]) > 0
    read = read_plan(tmp_path / "plan.json").images
    assert read is not None
    assert (read.per_row, read.tokens) == (3, 48)
    assert plan_as_json(planned(folder, 0), "auto")["images"] is None


def test_a_model_of_text_has_no_images(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"images_per_row: .* has no tower"):
        planned(model, 1)


def test_notes_about_frozen_parts_follow_the_images_that_a_plan_counts(tmp_path: Path) -> None:
    """Without images no tower is trained, and with them nothing is said of rows that have none."""
    folder = save_llava(tmp_path / "model")
    settings = {"freeze_vision_tower": "false", "freeze_multi_modal_projector": "false"}
    notes = {images: " ".join(planned(folder, images, **settings).machine.notes) for images in (None, 0, 1)}
    assert "if no row has an image, vision tower and projector are frozen, too" in notes[None]
    assert "vision tower and projector are frozen, because no row has an image" in notes[0]
    assert "image" not in notes[1].replace("images are", "")


def write_rows(file: Path, *images: int, size: tuple[int, int] = (64, 64)) -> Path:
    """Write rows with these numbers of images, which are squares of 64 x 64 pixels by default."""
    name = f"{file.stem}.png"
    picture(0, size).save(file.parent / name)
    rows = [
        {"prompt": "<image>" * num + "What is it?", "completion": "A star.", "images": [name] * num} for num in images
    ]
    return write_jsonl(file, rows)


def load_rows(folder: Path, **settings: Any) -> RunData:
    """Return the rows of a run as training reads them."""
    config = as_config(
        {"objective": "sft", "model_name_or_path": str(folder), "device": "cpu", "output_dir": "run", **settings}, {}
    )
    return load_data(
        config, AutoTokenizer.from_pretrained(folder), vision=Vision(folder, AutoConfig.from_pretrained(folder))
    )


class LiveImages:
    """The tensors of images that batches hold."""

    def __init__(self) -> None:
        self._tensors = list[weakref.ref[torch.Tensor]]()

    @contextmanager
    def batches(self, build: Callable[[int], Batch], end: int, rows: TokenTable) -> Iterator[BatchesAhead]:
        """Build batches as a run does."""

        def watched(number: int) -> Batch:
            batch = build(number)
            self._tensors += map(weakref.ref, pixels_of(batch))
            return batch

        with BatchesAhead(watched, end, rows) as batches:
            yield batches

    def num_bytes(self, *batches: BatchesAhead) -> int:
        """Return the bytes that are held once all batches that were begun are built."""
        for pending in (each for group in batches for each in group._pending.values()):
            pending.result()
        gc.collect()
        return sum(tensor.nbytes for each in self._tensors if (tensor := each()) is not None)


@pytest.mark.parametrize("save", [save_qwen2_5_vl, save_llava, save_gemma3])
def test_host_memory_has_the_images_of_batches_that_are_built_ahead(save: Any, tmp_path: Path) -> None:
    """During a step, and during an evaluation in which the next training batches wait. On a CPU, the current one is in the device's share."""
    folder = save(tmp_path / "model")
    data = load_rows(
        folder, datasets=[str(write_rows(tmp_path / "rows.jsonl", *[2] * 12))], per_device_train_batch_size=2,
        eval_datasets=[str(write_rows(tmp_path / "eval.jsonl", *[2] * 12))],
    )  # fmt: skip
    (eval_rows,), images = data.eval_sets.values(), LiveImages()
    with (
        images.batches(data.loader.batch, 6, data.training.packed) as training,
        images.batches(partial(evaluation_batch, eval_rows), 4, eval_rows) as evaluation,
    ):
        current = training.batch(0)
        in_step, of_current = images.num_bytes(training), sum(each.nbytes for each in pixels_of(current))
        del current
        current = evaluation.batch(0)
        in_evaluation = images.num_bytes(training, evaluation)
        of_evaluated = sum(each.nbytes for each in pixels_of(current))

    def host_images(**settings: Any) -> int:
        plan = planned(folder, 2, image_max_pixels=4096, **settings)
        return next(item.bytes for item in plan.host.items if item.name == "images")

    assert host_images() == in_step > 0
    assert host_images(device="cpu") == in_step - of_current
    evaluated = {
        "eval_datasets": str(tmp_path / "eval.jsonl"),
        "per_device_eval_batch_size": 3,
        "eval_strategy": "epoch",
        "max_steps": 6,
    }
    assert host_images(**evaluated) == in_evaluation > in_step
    assert host_images(device="cpu", **evaluated) == in_evaluation - of_evaluated
    assert not any(item.name == "images" for item in planned(folder, 0).host.items)


def evaluation_batch(rows: TokenTable, number: int) -> Batch:
    return batch_from(rows, 3 * number, 3)


def pixels_of(batch: Batch) -> list[torch.Tensor]:
    return [value for name, value in batch.image_inputs.items() if not name.endswith("token_type_ids")]


def write_run(folder: Path, *datasets: Path, **settings: Any) -> Path:
    """Write a run file with these data."""
    values = {
        "model_name_or_path": str(folder),
        "datasets": [str(each) for each in datasets],
        "output_dir": "run",
        "max_length": 256,
    }
    values |= {"per_device_train_batch_size": 2, "device_micro_batch_size": 1} | settings
    file = folder.parent / "run.yaml"
    file.write_text(json.dumps(values))  # which is YAML, too
    return file


def planned_file(file: Path, images: int | None = None) -> Plan:
    """Plan the run of a file, as the command does."""
    run, hardware = read_arguments([str(file)], None, "rtx-4090", None)
    return plan_one(run, hardware, Size(), images).plan


@pytest.mark.parametrize("save", [save_qwen2_5_vl, save_llava, save_gemma3])
def test_a_run_file_is_planned_with_the_images_of_its_rows(save: Any, tmp_path: Path) -> None:
    """The row with the most pixels counts, not the one with the most images; what it takes is what as many squares take."""
    folder = save(tmp_path / "model")
    small, large = write_rows(tmp_path / "small.jsonl", 0, 3, size=(16, 16)), write_rows(tmp_path / "large.jsonl", 1, 2)
    plan, same = planned_file(write_run(folder, small, large)), planned(folder, 2, image_max_pixels=4096)
    images, expected = plan.step.outline.images, same.step.outline.images
    assert images is not None
    assert expected is not None
    assert (images.per_row, images.patches, images.tokens) == (2, expected.patches, expected.tokens)
    assert line_of(plan) == f"{line_of(same)}; as in the one of the first 1,000 rows whose images have the most pixels"
    # But for masks of the tokens between images.
    assert device_use(plan.step).images == pytest.approx(device_use(same.step).images, rel=1e-3)
    assert device_use(plan.step).activations == device_use(same.step).activations
    assert images.pixels == expected.pixels
    overruled = planned_file(write_run(folder, small, large), 1).step.outline.images
    assert overruled is not None
    assert overruled.per_row == 1


def test_a_run_file_whose_images_cannot_be_read_is_planned_with_as_many(tmp_path: Path) -> None:
    """Without a processor, or with damaged pictures, which a run reports. If the size of images is not known, text is planned."""
    folder, rows = save_qwen2_5_vl(tmp_path / "qwen"), write_rows(tmp_path / "rows.jsonl", 1, 3)
    (tmp_path / "rows.png").write_bytes(b"no picture")
    damaged = planned_file(write_run(folder, rows, image_max_pixels=4096))
    assert line_of(damaged).endswith(
        "3 a row: 192 patches in the tower and 48 tokens of the row; as many as one of the first 1,000 rows has"
    )
    without_processor(folder)
    assert line_of(planned_file(write_run(folder, rows, image_max_pixels=4096))) == line_of(damaged)
    text = planned_file(write_run(folder, rows))
    assert text.step.outline.images is None
    assert any(
        "rows of text are planned, because" in line and "give --image_max_pixels" in line for line in plan_lines(text)
    )


def test_a_run_file_without_images_is_planned_for_text(tmp_path: Path, model: Path) -> None:
    folder, rows = save_llava(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", 0, 0)
    for other in (write_run(folder, rows), write_run(folder, write_rows(tmp_path / "images.jsonl", 1), packing=True)):
        plan = planned_file(other)
        assert plan.step.outline.images is None
        assert any("--images_per_row N counts images" in line for line in plan_lines(plan))
    assert not any("images" in line for line in plan_lines(planned_file(write_run(model, rows))))


@pytest.mark.parametrize("save", [save_qwen2_5_vl, save_llava])
def test_training_plans_the_images_with_the_most_tokens(save: Any, tmp_path: Path, runs: Runs) -> None:
    """Of all training and evaluation rows, with the bytes of two batches of that row."""
    folder = save(tmp_path / "model")
    small, large = write_rows(tmp_path / "small.jsonl", 0, 3, size=(16, 16)), write_rows(tmp_path / "large.jsonl", 1, 4)
    run = {
        "objective": "sft", "model_name_or_path": str(folder), "datasets": [str(small)], "eval_datasets": [str(large)], "device": "cpu",
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 1, "max_steps": 1, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    _, lines = runs.train(run)
    (data, plan) = (runs.loops[0].data, runs.loops[0].settings.plan)
    images, row = plan.step.outline.images, data.eval_sets["large"][1]
    assert images.per_row == 4
    assert images.tokens == sum(each.end - each.start for each in row.sequences[0].images)
    batch = collate([row, row])
    assert images.pixels.at(2) == sum(each.nbytes for each in pixels_of(batch))
    said = f"images: {line_of(plan).split(maxsplit=1)[1]}"
    assert said.endswith(f"as in {large}:2, whose images have the most tokens")
    assert said in lines
    assert read_plan(tmp_path / "run/plan.json").images.tokens == images.tokens


def test_the_largest_of_many_images_stands_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as their tokens need. It takes what they take themselves, but for what is rounded up."""
    folder = save_qwen2_5_vl(tmp_path / "qwen")
    picture(0, (64, 64)).save(tmp_path / "large.png")
    picture(1, (64, 32)).save(tmp_path / "small.png")
    row = {
        "prompt": "<image>" * 4 + "What?",
        "completion": "A star.",
        "images": ["small.png", "large.png", *["small.png"] * 2],
    }
    file = write_run(folder, write_jsonl(tmp_path / "rows.jsonl", [row]))
    tried = planned_file(file).step
    monkeypatch.setattr("horizon_lm.runs.admission.planned_images._TOKENS_TRIED", 24)
    instead = planned_file(file).step
    images, of_largest = tried.outline.images, instead.outline.images
    assert images is not None
    assert of_largest is not None
    assert (images.per_row, images.tokens) == (4, 16 + 3 * 8)
    assert (of_largest.per_row, of_largest.tokens) == (4, 3 * 16)
    assert 0.95 * 1.2 < device_use(instead).images / device_use(tried).images < 1.05 * 1.2


def test_towers_that_are_cut_may_take_less_than_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose plan assumes that a tower computes all images at once is admitted if it fits without images."""
    folder = save_qwen2_5_vl(tmp_path / "model")
    settings = {
        "model_name_or_path": str(folder), "datasets": [str(write_rows(tmp_path / "rows.jsonl", *[1] * 8))], "device": "cpu",
        "per_device_train_batch_size": 8, "device_micro_batch_size": 1, "freeze_vision_tower": False, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip

    def admitted(num_bytes: int) -> Plan:
        """Return the plan of a run on a device with so much memory."""
        machine = Machine("a device", on_host=False, hardware=None, device_limits=[Limit("device", num_bytes)])
        monkeypatch.setattr(Admission, "_machine", lambda self: machine)
        admission = Admission(as_config(settings, {}))
        vision = vision_of(admission.fetch_model())
        data = load_data(admission.run, AutoTokenizer.from_pretrained(folder), vision=vision)
        return admission.admit(data.loader, [], 1, Saves(), 0)

    def is_said(plan: Plan) -> bool:
        return any("they may not fit, and are not counted" in note for note in plan.machine.notes)

    with_images = admitted(10**9)
    assert with_images.step.outline.images is not None
    assert not is_said(with_images)
    plan = admitted(9 * 10**5)
    assert plan.step.outline.images is None
    assert is_said(plan)
    with pytest.raises(DoesNotFitError):
        admitted(10**5)


def test_training_goes_on_if_images_cannot_be_planned(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("of another form")

    monkeypatch.setattr("horizon_lm.planning.measure.model_outline.image_costs", fail)
    rows = write_rows(tmp_path / "rows.jsonl", 1)
    run = {
        "objective": "sft",
        "model_name_or_path": str(save_llava(tmp_path / "model")),
        "datasets": [str(rows)],
        "device": "cpu",
    }
    _, lines = runs.train({**run, "max_steps": 1, "output_dir": str(tmp_path / "run")})
    assert (tmp_path / "run/model").is_dir()
    assert any("images: rows of text are planned, because" in line and "of another form" in line for line in lines)


def test_a_mask_over_all_images_grows_with_the_square_of_their_number(tmp_path: Path) -> None:
    """Of rows and of images in a row alike."""
    folder = save_llava(tmp_path / "model")
    config = LlavaConfig.from_pretrained(folder)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    config.vision_config = PixtralVisionConfig(image_size=16, patch_size=8, **sizes)
    config.vision_feature_select_strategy = "full"
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    without_processor(folder)

    def peak(images: int, rows: int) -> int:
        step = planned(folder, images, per_device_train_batch_size=rows).step
        return step.outline.kind(0).forward_peak.at(rows)

    peaks = [peak(images, 1) for images in range(20, 25)]
    steps = [after - before for before, after in pairwise(peaks)]
    growth = {after - before for before, after in pairwise(steps)}
    assert len(growth) == 1
    assert growth.pop() > 0
    assert peak(24, 1) == peak(12, 2) == peak(6, 4)
