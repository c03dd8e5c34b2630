"""Law: a training that goes on from a checkpoint, or from the states of model and optimizer, has the bits of one that went on."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("xxhash", reason="needs the whole installation")

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from tests.laws.trainings import (
    Folders,
    Outcome,
    Training,
    of_models,
    of_optimizers,
    open_training,
    state_of,
    train,
)
from tests.support.threaded_device import ThreadedDevice

SAVED, END = 2, 4
TRAININGS = [*of_optimizers(), *of_models()]
# Adapters in fp32_master are shown in float32, and their low halves do not come back with the optimizer's state.
WITH_STATES = [row for row in TRAININGS if not row.values[0].is_adapted or row.values[0].precision != "fp32_master"]
Ends = list[tuple[list[float], Outcome]]
# Low halves come with the state of the optimizer, after the weights.
pytestmark = [
    pytest.mark.filterwarnings("ignore::horizon_lm.errors.ForeignWriteWarning"),
    pytest.mark.filterwarnings("ignore::horizon_lm.errors.HeadWarning"),  # of adapters of the head
]


def elsewhere(training: Training, folders: Folders, **placement: Any) -> tuple[Any, Any]:
    """Return a training that went on with other batches, and has nothing of what is loaded into it."""
    model, optimizer = open_training(training, folders, **placement)
    train(training, model, optimizer, (98, 99, 97))
    return model, optimizer


def ends(training: Training, model: Any, optimizer: Any) -> Ends:
    """Return what a training is now, and what it is at its end."""
    now = state_of(model, optimizer)
    return [([], now), (train(training, model, optimizer, range(SAVED, END)), state_of(model, optimizer))]


def saved_while_going_on(training: Training, folders: Folders, folder: Path, **placement: Any) -> Ends:
    """Save a checkpoint in the middle of a training, which goes on meanwhile."""
    model, optimizer = open_training(training, folders, **placement)
    train(training, model, optimizer, range(SAVED))
    saving = horizon_lm.save_checkpoint(folder, model, optimizer, wait=False)
    going_on = train(training, model, optimizer, range(SAVED, END)), state_of(model, optimizer)
    saving.wait()
    return [going_on]


def placements(training: Training) -> list[dict[str, Any]]:
    """Return where a checkpoint is saved: trainings of each optimizer in two ways, of another model in one of them."""
    tile = {"expert_tile": 3} if training.can_be_cut else {}
    found = [
        {"device": SimulatedDevice(7, eagerness=0.5), "in_backward": training.can_update_in_backward},
        {"device": ThreadedDevice(7), **tile},
    ]
    return found if training.model == "llama" else found[1:] if tile else found[:1]


@pytest.mark.parametrize("training", TRAININGS)
def test_a_checkpoint_is_exact(training: Training, folders: Folders, tmp_path: Path) -> None:
    """While training goes on, and whatever device and tiles it is saved on and loaded for."""
    model, optimizer = open_training(training, folders)
    train(training, model, optimizer, range(SAVED))
    expected = ends(training, model, optimizer)
    for number, placement in enumerate(placements(training)):
        assert saved_while_going_on(training, folders, tmp_path / str(number), **placement) == expected[1:]
        tile = {"expert_tile": 1 + number} if training.can_be_cut else {}
        again, other = elsewhere(training, folders, **tile)
        horizon_lm.load_checkpoint(tmp_path / str(number), again, other)
        assert ends(training, again, other) == expected


@pytest.mark.parametrize("training", WITH_STATES)
def test_states_are_exact(training: Training, folders: Folders) -> None:
    """The states of model and optimizer, as torch saves them."""
    model, optimizer = open_training(training, folders)
    train(training, model, optimizer, range(SAVED))
    file = io.BytesIO()
    torch.save([own_state(training, model), optimizer.state_dict()], file)
    expected = ends(training, model, optimizer)
    again, other = elsewhere(training, folders)
    file.seek(0)
    weights, moments = torch.load(file, weights_only=True)
    again.load_state_dict(weights, strict=not training.is_adapted)
    other.load_state_dict(moments)
    assert ends(training, again, other) == expected


def own_state(training: Training, model: Any) -> dict[str, torch.Tensor]:
    """Return the state of a model, of which adapters alone change."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    return {name: each for name, each in model.state_dict().items() if not training.is_adapted or name in trained}


# Controls


@pytest.mark.parametrize("training", of_optimizers(keep=["fp32_master"]))
def test_what_is_left_out_is_missed(training: Training, folders: Folders) -> None:
    """Each part of the optimizer's state, without which a training ends in other bits."""
    model, optimizer = open_training(training, folders)
    train(training, model, optimizer, range(SAVED))
    state = optimizer.state_dict()["state"]
    parts = {key for each in state.values() for key in each}
    assert len(parts) > 1
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    saved = {param: {key: value.clone() for key, value in each.items()} for param, each in state.items()}
    groups = optimizer.state_dict()["param_groups"]
    end = ends(training, model, optimizer)[1]
    for part in ("", *sorted(parts)):
        again, other = open_training(training, folders)
        kept = {
            param: {key: torch.zeros_like(value) if key == part else value for key, value in each.items()}
            for param, each in saved.items()
        }
        again.load_state_dict(weights)
        other.load_state_dict({"state": kept, "param_groups": groups, "step": SAVED})
        assert (ends(training, again, other)[1] == end) == (not part), part
