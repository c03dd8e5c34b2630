"""Random sequences of PEFT's calls with fixed seeds; ``python -m tests.seams.fuzz_adapters`` runs longer ones."""

import random
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the whole installation")

from tests.seams import fuzz_adapters
from tests.seams.fuzz_adapters import Divergence, World, play
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("seed", thinned(range(16), every=4))
def test_sequences_of_adapter_calls_do_not_diverge(seed: int) -> None:
    play(seed)


def test_a_divergence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(world: World, chosen: random.Random) -> Any:
        return float(hasattr(world.model, "_horizon"))

    monkeypatch.setattr(fuzz_adapters, "CALLS", {train: 1})
    with pytest.raises(Divergence, match="1 instead of 0"):
        play(0, length=1)
