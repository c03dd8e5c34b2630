"""A run warns once if other programs use its cores, and not because of its own ranks, threads and processes."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import pytest

from horizon_lm.common.other_programs import CoreUse, cores_of_others, missing_cores
from horizon_lm.runs.training import busy_cores
from horizon_lm.runs.training.busy_cores import BusyCores

START = CoreUse("one", 8, 8, 1000.0, 100.0, 0.0)


class Machine:
    """A run on a machine with a clock of its own, on which others use cores, and ranks beside this one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, others: float, own: float, ranks: Sequence[CoreUse] = ()
    ) -> None:
        self.use, self.others, self._own, self._ranks = (
            replace(START, usable=8 - sum(each.usable for each in ranks if each.host == START.host)),
            others,
            own,
            ranks,
        )
        self.lines: list[str] = []
        session = SimpleNamespace(ranks=self, reporter=SimpleNamespace(print=self.lines.append))
        plan = SimpleNamespace(time=SimpleNamespace(seconds=4.0))
        self.part = BusyCores(SimpleNamespace(session=session, settings=SimpleNamespace(plan=plan)))  # type: ignore[arg-type]
        monkeypatch.setattr(CoreUse, "now", lambda: self.use)
        monkeypatch.setattr(busy_cores.time, "perf_counter", lambda: self.use.seconds)

    def exchange(self, place: str, value: Any) -> list[Any]:
        assert place
        return [value, *map(astuple, self._ranks)]

    def train(self, num_steps: int, seconds: float = 10.0) -> None:
        for step in range(1, num_steps + 1):
            with self.part.during_step(step):
                busy = (self.others + self._own) * seconds
                use = self.use
                self.use = replace(
                    use,
                    everybody=use.everybody + busy,
                    own=use.own + self._own * seconds,
                    seconds=use.seconds + seconds,
                )
            self.part.after_step(step, None)  # type: ignore[arg-type]


def test_other_programs_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, others=3.0, own=5.0)
    machine.train(2)
    assert machine.lines == []  # 20 seconds are too few
    machine.train(30)
    assert machine.lines == [
        "warning: other programs use 3.0 of 8 cores, which may slow this run: a step takes 10 s, and 4 s by the plan"
    ]


def test_cores_are_measured_during_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, others=3.0, own=5.0)
    machine.train(2)
    assert machine.part.cores_of_others is None
    machine.train(30)
    assert machine.part.cores_of_others == 3.0
    machine.others = 0.0
    machine.train(32)
    assert machine.part.cores_of_others == 1.5
    assert len(machine.lines) == 1


@pytest.mark.parametrize(("others", "own"), [(0.0, 8.0), (0.4, 7.6), (0.0, 0.5)])
def test_own_threads_do_not_count(monkeypatch: pytest.MonkeyPatch, others: float, own: float) -> None:
    machine = Machine(monkeypatch, others, own)
    machine.train(40)
    assert machine.lines == []


@pytest.mark.parametrize(
    ("host", "of_others", "problem"),
    [
        ("one", 0.0, ""),
        ("one", 160.0, "other programs use 4.0 of 8 cores, "),
        ("two", 0.0, "other programs use 4.0 of 8 cores of one, "),
    ],
)
def test_ranks_beside_this_one(monkeypatch: pytest.MonkeyPatch, host: str, of_others: float, problem: str) -> None:
    """A rank of the same machine is none of the other programs; one of another machine has its own."""
    beside = CoreUse(host, 8, 4 if host == "one" else 8, 320.0 + of_others, 160.0, 40.0)
    machine = Machine(monkeypatch, others=4.0, own=4.0, ranks=[beside])
    machine.train(4)
    assert [line.startswith(f"warning: {problem}") for line in machine.lines] == [True] * bool(problem)


def test_measured_times_include_processes_that_were_started() -> None:
    began = CoreUse.now()
    code = "import time\nwhile time.process_time() < 1: pass"
    running = subprocess.Popen([sys.executable, "-c", code + "\ninput()"], stdin=subprocess.PIPE)
    subprocess.run([sys.executable, "-c", code], check=True)
    while CoreUse.now().since(began).own < 2 - 0.05:
        time.sleep(0.05)
    running.communicate(b"\n")
    use = CoreUse.now().since(began)
    assert (use.cores, use.own >= 1.9) == (os.cpu_count(), True)
    assert cores_of_others([use]) <= use.everybody / use.seconds - use.own / use.seconds + 1e-6
    assert missing_cores([use]) == cores_of_others([use]) + use.usable - use.cores
