"""What a rank says of the progress of the others."""

from types import SimpleNamespace
from typing import Any

import pytest

from horizon_lm.distributed import monitor
from horizon_lm.distributed.monitor import Progress

LIMIT = 10.0


def messages(progress: Progress, counts: list[tuple[int, int]]) -> list[str]:
    """Return what is found in each second, given the numbers of agreements that two ranks have reached by then."""
    return [
        progress.find_hanging({rank: (count, f"step {count}") for rank, count in enumerate(pair)}, float(second))
        for second, pair in enumerate(counts)
    ]


def test_a_rank_that_does_not_go_on_hangs() -> None:
    found = messages(Progress(LIMIT), [(5, 5)] + [(7, 6)] * 12)
    assert found[:12] == [""] * 12
    assert found[12] == "rank 1 hangs: it has been at step 6 for 10 s, and others are further"


def test_a_rank_that_goes_on_does_not_hang() -> None:
    """The last beat of another rank is up to a second old, so it always looks as if that one were behind."""
    assert messages(Progress(LIMIT), [(4 * second + 3, 4 * second) for second in range(30)]) == [""] * 30


def test_all_ranks_may_wait_together() -> None:
    assert messages(Progress(LIMIT), [(5, 5)] * 30) == [""] * 30


def test_time_in_which_ranks_are_not_watched_does_not_count() -> None:
    progress = Progress(LIMIT)
    assert messages(progress, [(7, 6)] * 5) == [""] * 5
    assert progress.find_hanging({}, 5.0) == ""
    assert progress.find_hanging({0: (7, "a step"), 1: (6, "a step")}, 50.0) == ""


@pytest.mark.parametrize("limit", [None, 100.0])
def test_no_limit_and_a_longer_one_are_kept(limit: float | None) -> None:
    assert messages(Progress(limit), [(7, 6)] * 30) == [""] * 30


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> monitor.Monitor:
    """The monitor of the first of two ranks, of which the other one sends no beat."""
    monkeypatch.setattr(monitor, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(monitor, "_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(monitor, "_END_SECONDS", 0.1)
    mesh: Any = SimpleNamespace(rank=0, size=2, progress=3, place="a step", exchange=lambda place, value: [value, 0])
    return monitor.Monitor(mesh, hang_seconds=None, end=lambda code: None)


def test_a_rank_that_dies_before_its_first_beat_is_named(watching: monitor.Monitor) -> None:
    assert "rank 1 has died" in watching.reason()
    watching.stop("rank 1 is gone")


def test_a_rank_that_has_finished_before_its_first_beat_has_not_died(watching: monitor.Monitor) -> None:
    watching._store.set("done/1", "1")
    assert watching.reason() == "another rank has ended"
    watching.stop()
