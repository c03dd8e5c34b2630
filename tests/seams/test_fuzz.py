"""Random sequences of public calls with fixed seeds; ``python -m tests.seams.fuzz`` runs longer ones."""

import pytest

from tests.seams import fuzz, fuzz_calls
from tests.seams.fuzz import Call, Play, draw, fails, play, shrink
from tests.seams.fuzz_worlds import Setting, World
from tests.support.thinned_cases import thinned

SETTING = Setting("llama", "whole", "cpu", resident_blocks=0, resident_graphs=0, micro_batch=None, ours=True)


@pytest.mark.parametrize("seed", thinned(range(20), every=2))
def test_sequences_do_not_diverge(seed: int) -> None:
    play(draw(seed))


def test_a_divergence_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(world: World, chosen: object) -> float:
        number = world.model.__dict__.setdefault("number_of_forwards", 0) + 1
        world.model.number_of_forwards = number
        return number if hasattr(world.model, "_horizon") and number > 1 else 0

    monkeypatch.setitem(fuzz.CALLS, "forward", fuzz_calls.Kind(forward, 1, True))
    calls = [Call(name, 4) for name in ("forward", "accumulate", "zero_grad", "forward", "read")]
    small = shrink(Play(SETTING, tuple(calls)))
    assert [call.name for call in small.calls] == ["forward", "forward"]
    assert "2 instead of 0" in str(fails(small))


def test_a_needless_rejection_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    from horizon_lm.errors import StreamingError

    def evaluate(world: World, chosen: object) -> None:
        raise StreamingError("not today")

    monkeypatch.setitem(fuzz.CALLS, "evaluate", fuzz_calls.Kind(evaluate, 1, True))
    assert "rejected, but should work" in str(fails(Play(SETTING, (Call("evaluate", 4),))))
