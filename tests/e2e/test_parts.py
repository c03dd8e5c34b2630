"""A part acts at the moments of the loop, what it requests is done, and a step that was interrupted is finished once."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import horizon_lm
from horizon_lm.errors import InterruptedRunError
from horizon_lm.runs.training.intervals import Control
from horizon_lm.runs.training.loop import Loop
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.ranks import Ranks
from horizon_lm.runs.training.run_state import Value
from horizon_lm.runs.training.saver import Saver
from tests.e2e import resuming
from tests.e2e.resuming import Runs


class Recorder(Part):
    """Records its moments, and requests a save after the first step and an end after the second."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    @property
    def control(self) -> Control:
        return Control(save=self.moments[-1:] == ["after step 1"], stop=self.moments[-1:] == ["after step 2"])

    def before_step(self, step: int) -> None:
        self.moments.append(f"before step {step}")

    @contextmanager
    def during_step(self, step: int) -> Iterator[None]:
        self.moments.append(f"step {step} begins")
        yield
        self.moments.append(f"step {step} ends")

    def before_update(self) -> None:
        self.moments.append("before update")

    def after_update(self, step: int, loss: float, batch: Any) -> None:
        assert loss > 0
        assert len(batch.places) == 3
        self.moments.append(f"after update {step}")

    def after_step(self, step: int, due: Any) -> None:
        self.moments.append(f"after step {step}")

    def finish(self, step: int) -> None:
        self.moments.append(f"finish {step}")

    def end(self) -> None:
        self.moments.append("end")


class Interrupting(TrainerCallback):
    """Lets a signal arrive at the end of a step, before the evaluation that follows it."""

    def __init__(self, runs: Runs, at: int) -> None:
        self._runs, self._at, self.steps = runs, at, list[int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self._at:
            self._runs.loops[-1].interrupts.requested = "SIGTERM"


class Leaving(Part):
    """Requests an end after a step that the run can be resumed from."""

    def __init__(self, at: int) -> None:
        self._at, self._is_over = at, False

    @property
    def control(self) -> Control:
        return Control(interrupt="the test" if self._is_over else "")

    def after_step(self, step: int, due: Any) -> None:
        self._is_over = step == self._at


def add_part(part: Part, monkeypatch: pytest.MonkeyPatch, state: Value[int] | None = None) -> None:
    """Let the loops of all runs have one more part, before the others, and its state if it has one."""
    build = Loop.__init__

    def with_part(loop: Loop, run: Any, training: Any) -> None:
        build(loop, run, training)
        loop.parts.insert(0, part)
        if state is not None:
            training.state.keep("of the part", state)

    monkeypatch.setattr(Loop, "__init__", with_part)


def steps_alone(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that neither evaluates nor answers prompts."""
    return {
        name: value
        for name, value in settings.items()
        if not name.startswith(("eval", "sample", "per_device_eval", "test"))
    }


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> dict[str, Any]:
    return resuming.settings(tmp_path, model) | {"output_dir": str(tmp_path / "run"), "per_device_eval_batch_size": 1}


def test_a_part_acts_at_its_moments(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    add_part(recorder, monkeypatch, state=Value(7))
    result = horizon_lm.train(settings, print_fn=lambda line: None)
    of_step = "before step {0}|step {0} begins|before update|after update {0}|step {0} ends|after step {0}"
    assert recorder.moments == [*of_step.format(1).split("|"), *of_step.format(2).split("|"), "finish 2", "end"]
    assert result.num_steps == 2
    state = json.loads((tmp_path / "run" / "checkpoint-1" / "training_state.json").read_text())["state"]
    assert (state["of the part"], state["finished"]) == (7, True)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_step_that_was_interrupted_is_finished_once(runs: Runs, settings: dict[str, Any], tmp_path: Path) -> None:
    expected, _ = runs.train(settings | {"output_dir": str(tmp_path / "whole")})
    first, second = Interrupting(runs, at=3), Interrupting(runs, at=99)
    runs.interrupt(settings, stop_after=99, callbacks=[first])
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "training_state.json").read_text())["state"]
    assert not state["finished"]
    outcome, _ = runs.train(settings, callbacks=[second])
    assert (first.steps, second.steps) == ([1, 2, 3], [4, 5, 6, 7, 8])
    assert outcome == expected


class Evaluating(TrainerCallback, ExportableState):
    """Requests an evaluation after a step, whose number is its state."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate |= state.global_step == self.at

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"at": self.at}}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_requests_and_states_of_callbacks_go_on(runs: Runs, settings: dict[str, Any], tmp_path: Path) -> None:
    """The evaluation that the first of three equal callbacks has requested is interrupted."""
    callbacks = [Evaluating(2), Evaluating(4), Evaluating(5)]
    expected, _ = runs.train(settings | {"output_dir": str(tmp_path / "whole")}, callbacks=callbacks)
    runs.interrupt(settings, stop_after=99, callbacks=[*callbacks, Interrupting(runs, at=2)])
    outcome, _ = runs.train(settings, callbacks=[Evaluating(), Evaluating(), Evaluating()])
    evaluated = [line["step"] for line in expected["metrics"] if "eval_loss" in line]
    assert evaluated == [0, 2, 3, 4, 5, 6, 8]
    assert [line["step"] for line in outcome["metrics"] if "eval_loss" in line] == evaluated
    assert outcome["memory"] == expected["memory"]


@pytest.mark.parametrize("step", [2, 3])  # 3 is interrupted in the evaluation that follows it
def test_a_part_ends_a_run_that_goes_on_later(
    runs: Runs, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    expected, _ = runs.train(settings | {"output_dir": str(tmp_path / "whole")})
    save, folder = Saver.save_before_deadline, tmp_path / "run"

    def save_despite_a_signal(saver: Saver, step: int) -> None:
        signal.raise_signal(signal.SIGTERM)  # the first signal: it does not cut off the checkpoint
        save(saver, step)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save_before_deadline", save_despite_a_signal)
        add_part(Leaving(at=step), patch)
        with pytest.raises(
            InterruptedRunError, match=rf"after step {step} of 8 by the test\. Kept: .*checkpoint-{step}\."
        ):
            horizon_lm.train(settings, print_fn=lambda line: None)
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert not (folder / "model").exists()
    outcome, _ = runs.train(settings)
    assert outcome == expected


def test_a_part_cannot_interrupt_a_run_after_its_last_step(
    runs: Runs, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_part(Leaving(at=8), monkeypatch)
    outcome, _ = runs.train(steps_alone(settings))
    assert outcome["result"][0] == 8


def test_a_signal_while_the_ranks_agree_ends_the_run_a_step_later(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    agree, num_calls = Ranks.agree, 0

    def agree_as_a_signal_arrives(ranks: Ranks, place: str, value: str) -> str:
        nonlocal num_calls
        num_calls += 1
        agreed = agree(ranks, place, value)
        if num_calls == 1:
            signal.raise_signal(signal.SIGTERM)
        return agreed

    monkeypatch.setattr(Ranks, "agree", agree_as_a_signal_arrives)
    with pytest.raises(InterruptedRunError, match=r"after step 1 of 8 by SIGTERM"):
        horizon_lm.train(steps_alone(settings), print_fn=lambda line: None)
