"""The parts of a run whose state is in its checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from horizon_lm.errors import ConfigError
from horizon_lm.runs.training.best_model import BestModel
from horizon_lm.runs.training.run_state import ResumePoint, RunState, Value
from horizon_lm.runs.training.spikes import Spikes


def point(**state: Any) -> ResumePoint:
    return ResumePoint(Path("checkpoint-3"), None, state)  # type: ignore[arg-type]


def test_a_part_of_a_new_run_keeps_its_own_state() -> None:
    state = RunState(None)
    value, spikes = state.keep("finished", Value(True)), state.keep("spikes", Spikes())
    spikes.add(2.0, 1.0)
    value.value = False
    assert state.state_dict() == {"finished": False, "spikes": spikes.state_dict()}


def test_a_part_of_a_resumed_run_gets_the_state_that_it_had() -> None:
    before = Spikes()
    before.add(2.0, 1.0)
    state = RunState(point(spikes=before.state_dict(), finished=False))
    assert state.keep("spikes", Spikes()).state_dict() == before.state_dict()
    assert state.keep("finished", Value(True)).value is False


def test_a_part_that_an_older_checkpoint_does_not_have_begins_anew() -> None:
    state = RunState(point(finished=False))
    assert state.keep("deadline", Value(7)).value == 7
    assert state.state_dict() == {"deadline": 7}


@pytest.mark.parametrize("saved", [{}, {"best": {"metric": 1.0, "step": 2}}, {"best": []}])
def test_a_damaged_state_is_rejected_by_the_name_of_its_file(saved: dict[str, Any]) -> None:
    best = BestModel.__new__(BestModel)
    with pytest.raises(ConfigError, match=r"checkpoint-3/training_state\.json is damaged \("):
        RunState(point(**saved)).keep("best", best)
