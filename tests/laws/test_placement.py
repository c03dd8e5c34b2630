"""Law: schedules, devices, threads, tiles and residency change no bit of a training."""

from typing import Any

import pytest
import torch

from horizon_lm.device.base import Task
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.errors import HorizonError
from horizon_lm.optim import update_tasks
from horizon_lm.schedule.ops import ScheduleError
from tests.laws.trainings import (
    MODELS,
    QUANTIZED,
    Folders,
    Outcome,
    Training,
    drawn,
    engine_of,
    of_models,
    of_optimizers,
    open_training,
    state_of,
    train,
)
from tests.support import tiny_models
from tests.support.threaded_device import ThreadedDevice

STEPS = range(3)
pytestmark = pytest.mark.filterwarnings("ignore::horizon_lm.errors.HeadWarning")  # of adapters of the head
RESIDENT = {"resident_blocks": 2, "resident_graphs": 1, "activation_checkpoints": "device"}


def placements(training: Training) -> dict[str, dict[str, Any]]:
    """Return settings that change no number, by their names."""
    found: dict[str, dict[str, Any]] = {
        "as late as possible": {"device": SimulatedDevice(0, eagerness=0.0), "activation_checkpoints": "host"},
        "in random order": {"device": SimulatedDevice(1, pieces=2), "activation_checkpoints": 1},
        "in threads": {"device": ThreadedDevice(1, delay=1e-4), **RESIDENT},
    }
    if training.can_update_in_backward:
        found["in backward"] = {"device": SimulatedDevice(2), "in_backward": True}
    if training.can_be_cut:
        found["in tiles"] = {"device": SimulatedDevice(3), "expert_tile": 3, "activation_checkpoints": "host"}
        found["in tiles of one"] = {"device": "cpu", "expert_tile": 1, "in_backward": training.can_update_in_backward}
    return found


def outcome(training: Training, folders: Folders, **placement: Any) -> tuple[list[float], Outcome]:
    model, optimizer = open_training(training, folders, **placement)
    return train(training, model, optimizer, STEPS), state_of(model, optimizer)


DRAWN = [pytest.param(drawn(seed), id=f"drawn {seed}", marks=[pytest.mark.slow] * (seed > 2)) for seed in range(300)]


@pytest.mark.parametrize("training", [*of_optimizers(), *of_models(), *DRAWN])
def test_bits_do_not_depend_on_placement(training: Training, folders: Folders) -> None:
    expected = outcome(training, folders)
    for name, placement in placements(training).items():
        losses, state = outcome(training, folders, **placement)
        assert losses == expected[0], name
        assert state == expected[1], name


ROUNDED: dict[str, dict[str, Any]] = {
    "micro-batches": {"device_micro_batch_size": 1},
    "two rows": {"device_micro_batch_size": 2, "grad_dtype": torch.float32},
    "whole head": {"head": "whole"},
    "small chunks": {"head_chunk_tokens": 5},
}


@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("name", ROUNDED)
def test_bits_do_not_depend_on_placement_in_parts(name: str, model: str, folders: Folders) -> None:
    """The same with settings that change the rounding of a step."""
    settings = ROUNDED[name]
    test_bits_do_not_depend_on_placement(Training(model, precision="float32", settings=settings), folders)


@pytest.mark.parametrize("training", of_optimizers())
def test_size_of_pieces_changes_no_bit(training: Training, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of a unit are cut into pieces for the threads: into one, or into several of different sizes."""
    found = []
    for smallest, enough in ((1 << 19, 64), (256, 4)):
        monkeypatch.setattr(update_tasks, "_PIECE_ELEMENTS", smallest)
        monkeypatch.setattr(update_tasks, "_ENOUGH_PIECES", enough)
        found.append(outcome(training, folders))
    assert found[0] == found[1]


# Controls


class Careless(SimulatedDevice):
    """A device that lets copies and updates run before what they wait for."""

    @staticmethod
    def _may_run(task: Task) -> bool:
        return task.moves is not None


@pytest.mark.parametrize("training", of_optimizers(keep=["float32"]))
def test_a_device_that_does_not_wait_is_noticed(training: Training, folders: Folders) -> None:
    expected = outcome(training, folders)
    found = []
    for seed in range(3):
        try:
            found.append(outcome(training, folders, device=Careless(seed, eagerness=1.0)))
        except (ScheduleError, HorizonError, ArithmeticError, RuntimeError):
            return
    assert any(each != expected for each in found)


def test_every_model_has_a_row() -> None:
    assert {row.values[0].model for row in of_models()} | {"llama"} == {*MODELS, *QUANTIZED}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_flipped_bit_of_a_base_is_noticed(kind: str, folders: Folders) -> None:
    """In the codes of a packed weight, and in its scales."""
    training = Training(kind)
    model, _ = open_training(training, folders)
    store = engine_of(model).store
    packed = store.packed(next(name for name in store.codecs if "layers.1." in name))
    before = model(**tiny_models.batch()).loss.detach()
    for place in (slice(5, 6), slice(-(len(packed) // 16), None)):
        packed[place] ^= 0x40
        assert not torch.equal(model(**tiny_models.batch()).loss.detach(), before)
        packed[place] ^= 0x40
    assert torch.equal(model(**tiny_models.batch()).loss.detach(), before)
