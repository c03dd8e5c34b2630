"""The state of transformers callbacks and of trackers, saved with a checkpoint and restored when a run goes on."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_RUN_ID = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID"}  # environment variables that continue a tracker's run


def callback_state(trainer_state: Any, control: Any, callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the states of a Trainer, its control, the callbacks and the trackers as plain data. Values that JSON lacks become texts."""
    states_by_class: dict[str, list[Any]] = {}  # a class may have several callbacks
    for each in callbacks:
        if hasattr(each, "state"):
            states_by_class.setdefault(type(each).__name__, []).append(each.state())
    content = {
        "trainer": dataclasses.asdict(trainer_state),
        "control": dataclasses.asdict(control),
        "callbacks": states_by_class,
        "trackers": _run_ids(),
        "tensorboard": next((each.logging_dir for each in callbacks if is_tensorboard(each)), None),
    }
    result: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return result


def restore_trainer_state(saved: Mapping[str, Any], trainer_state: Any) -> None:
    """Set the fields of a Trainer's state to their saved values."""
    for field in dataclasses.fields(trainer_state):
        if field.name in saved["trainer"]:
            setattr(trainer_state, field.name, saved["trainer"][field.name])


def restore_callbacks(saved: Mapping[str, Any], callbacks: Sequence[Any], step: int) -> list[str]:
    """Restore callbacks before training begins. Return the names of the user's callbacks that have attributes, but no saved state.

    Args:
        saved: what `callback_state` has returned.
        callbacks: instances of transformers callbacks.
        step: the number of steps that are done; TensorBoard drops later points.
    """
    without_state, saved_states = [], dict[str, Iterator[Any]]()
    for name, states in saved["callbacks"].items():  # by class, in the order of its callbacks
        saved_states[name] = iter(states if isinstance(states, list) else [states])  # older checkpoints have one state
    for callback in callbacks:
        name = type(callback).__name__
        if is_tensorboard(callback) and saved["tensorboard"] is not None:
            callback.logging_dir = saved["tensorboard"]
            from torch.utils.tensorboard import SummaryWriter

            callback.tb_writer = SummaryWriter(callback.logging_dir, purge_step=step + 1)
        elif (state := next(saved_states.get(name, iter(())), None)) is not None:
            for attribute, value in state.get("attributes", {}).items():
                setattr(callback, attribute, value)
        elif not type(callback).__module__.startswith("transformers.") and vars(callback):
            without_state.append(name)
    return without_state


@contextmanager
def tracker_environment(saved: Mapping[str, Any] | None, wandb_project: str | None) -> Iterator[None]:
    """Context manager: let trackers that start inside continue the runs in ``saved`` (`callback_state`), and wandb use this project."""
    changes = {_RUN_ID[name]: run for name, run in (saved or {}).get("trackers", {}).items() if run}
    if wandb_project is not None:
        changes["WANDB_PROJECT"] = wandb_project
    if "WANDB_RUN_ID" in changes:
        changes["WANDB_RESUME"] = "allow"
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # MLflow itself removes the variable of the run that it continues
            else:
                os.environ[name] = value


def is_tensorboard(callback: Any) -> bool:
    """Return whether a callback is transformers' tracker for TensorBoard."""
    return type(callback).__name__ == "TensorBoardCallback"


def _run_ids() -> dict[str, str | None]:
    """Return the run ids of the trackers that are in use."""
    run_ids: dict[str, str | None] = {}
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        run_ids["wandb"] = wandb.run.id
    if mlflow is not None and mlflow.active_run() is not None:
        run_ids["mlflow"] = mlflow.active_run().info.run_id
    return run_ids
