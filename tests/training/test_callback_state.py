"""What trackers find in the environment when they begin, what is left there, and the states of callbacks that are read."""

import os
from typing import Any

import pytest

from horizon_lm.runs.training.callback_state import restore_callbacks, tracker_environment

SAVED = {"trackers": {"wandb": "one", "mlflow": "two"}}


def test_trackers_find_their_runs_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_PROJECT", "days")
    with tracker_environment(SAVED, "nights"):
        assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("one", "allow")
        assert os.environ["MLFLOW_RUN_ID"] == "two"
        assert os.environ["WANDB_PROJECT"] == "nights"
    assert not os.environ.keys() & {"WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_ID"}
    assert os.environ["WANDB_PROJECT"] == "days"


def test_a_tracker_may_remove_its_run_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlflow.start_run` does so once it has read the run that it continues."""
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    with tracker_environment(SAVED, None):
        del os.environ["MLFLOW_RUN_ID"]
    assert "MLFLOW_RUN_ID" not in os.environ


class Counting:
    """A callback with a number as its state."""

    def __init__(self) -> None:
        self.count = 0


@pytest.mark.parametrize("saved", [{"attributes": {"count": 3}}, [{"attributes": {"count": 3}}]], ids=["older", "list"])
def test_states_of_older_checkpoints_are_read(saved: Any) -> None:
    """They have one state of each class, of which there may be several callbacks."""
    first, second = Counting(), Counting()
    restore_callbacks({"callbacks": {"Counting": saved}, "tensorboard": None}, [first, second], step=1)
    assert (first.count, second.count) == (3, 0)
