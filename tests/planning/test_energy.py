"""Energy from RAPL's files and from a stand-in for NVML."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_energy import joules_per_token, watts_at_rest

import horizon_lm
from horizon_lm.planning.arithmetic.energy import Prices, energy_as_json, energy_lines
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.request import Machine as PlannedMachine
from horizon_lm.planning.arithmetic.request import Request
from horizon_lm.runs.training.energy import Energy, EnergyMeter
from horizon_lm.runs.training.metrics import Metrics, StepResult
from horizon_lm.runs.training.ranks import Ranks
from tests.support import handmade_outlines

RANGE = 262_143_328_850  # microjoules, of a Xeon


class Machine:
    """The counters of a machine: files as RAPL has them, a clock, and a module like ``pynvml``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds, self.millijoules, self.lost = folder, 0.0, 5_000_000, False
        self.gpus = {"GPU-1b", "MIG-2c"}

    def zone(self, number: str, name: str, microjoules: int) -> Path:
        folder = self.folder / f"intel-rapl:{number}"
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        return folder / "energy_uj"

    def meter(self, gpu: str | None = None, with_host: bool = True) -> EnergyMeter:
        return EnergyMeter(gpu, with_host, self.folder, lambda: self.seconds)

    def nvml(self) -> SimpleNamespace:
        class NVMLError(Exception):
            pass

        def handle(uuid: str) -> str:
            if uuid not in self.gpus:
                raise NVMLError
            return uuid

        def energy(handle: str) -> int:
            if self.lost or handle.startswith("MIG"):
                raise NVMLError
            return self.millijoules

        return SimpleNamespace(
            NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=handle,
            nvmlDeviceGetTotalEnergyConsumption=energy,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", machine.nvml())
    return machine


def test_processors_and_memory_count_once(machine: Machine) -> None:
    """Cores are a part of their package, and ``psys`` contains the packages."""
    zones = {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1", "2": "psys"}
    for number, name in zones.items():
        machine.zone(number, name, 10_000_000)
    meter, machine.seconds = machine.meter(), 1.0
    for joules, (number, name) in enumerate(zones.items(), 1):
        machine.zone(number, name, 10_000_000 + joules * 1_000_000)
    assert meter.read() == Energy(host=1 + 3 + 4)
    assert meter.read() == Energy(host=0)


def test_a_counter_begins_anew(machine: Machine) -> None:
    machine.zone("0", "package-0", RANGE - 2_000_000)
    meter, machine.seconds = machine.meter(), 100.0
    machine.zone("0", "package-0", 3_000_000)
    assert meter.read() == Energy(host=5)


def test_energy_is_unknown_after_a_time_in_which_it_may_have_done_so_twice(machine: Machine) -> None:
    machine.zone("0", "package-0", 0)
    meter, machine.seconds = machine.meter(), 300.0
    machine.zone("0", "package-0", 3_000_000)
    assert meter.read() == Energy()
    machine.seconds = 301.0
    machine.zone("0", "package-0", 4_000_000)
    assert meter.read() == Energy(host=1)


def test_unreadable_counters(machine: Machine) -> None:
    """All of them, because some packages alone would pass for the whole machine."""
    machine.zone("0", "package-0", 0)
    machine.zone("1", "package-1", 0).unlink()
    assert machine.meter().read() == Energy()


def test_a_counter_that_disappears(machine: Machine) -> None:
    file = machine.zone("0", "package-0", 0)
    meter = machine.meter()
    file.unlink()
    assert meter.read() == Energy()


def test_gpu(machine: Machine) -> None:
    meter = machine.meter("1b")
    machine.millijoules += 700_500
    assert meter.read() == Energy(device=700.5)
    machine.lost = True
    assert meter.read() == Energy()


@pytest.mark.parametrize("uuid", ["2c", "3d", None])
def test_gpu_without_a_counter(machine: Machine, uuid: str | None) -> None:
    assert machine.meter(uuid).read() == Energy()


def test_without_nvidia_ml_py(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.meter("1b").read() == Energy()


def test_another_process_reads_the_host(machine: Machine) -> None:
    machine.zone("0", "package-0", 0)
    assert machine.meter(with_host=False).read() == Energy(host=0)


def test_sums() -> None:
    assert Energy(1, None) + Energy(2, 3) == Energy(3, None)
    assert Energy(1, None).total == 1
    assert Energy(1, 2).total == 3
    assert Energy().total is None


def result(tokens: int, energy: Energy) -> StepResult:
    return StepResult(1.0, 1.0, {}, {}, 1, tokens, tokens, energy)


def test_metrics_give_joules_of_a_token(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Energy of evaluations is not that of steps, and one unknown step makes that of its line unknown."""
    monkeypatch.setattr(horizon_lm, "stats", lambda model: {"device_bytes_peak": 0})
    one_byte = SimpleNamespace(bytes=1)
    step = SimpleNamespace(outline=SimpleNamespace(step_flops=lambda tokens: 1.0), tokens=1)
    plan: Any = SimpleNamespace(step=step, time=None, buffers=one_byte, host=one_byte)
    metrics = Metrics(10, 5, plan, machine.meter("1b", with_host=False))
    optimizer = SimpleNamespace(grad_norm=1.0, num_skipped=0)

    def line() -> tuple[float | None, float | None]:
        found = metrics.line(1, optimizer, None)
        return found["host_joules_per_token"], found["device_joules_per_token"]

    for _ in range(2):
        with metrics.exclude_from_timing():
            machine.millijoules += 10**9
        machine.millijoules += 400_000
        metrics.add(result(500, metrics.energy()), 1e-3)
    assert line() == (0, 0.8)
    metrics.add(result(500, Energy(1.0, None)), 1e-3)
    metrics.add(result(500, Energy(1.0, 2.0)), 1e-3)
    assert line() == (0.002, None)


def test_energy_of_all_ranks() -> None:
    mesh = SimpleNamespace(exchange=lambda place, own: [own, [*own[:-1], [0.0, 3.0]]])
    ranks: Any = SimpleNamespace(mesh=mesh)
    assert Ranks.total(ranks, result(5, Energy(7.0, 2.0))).energy == Energy(7.0, 5.0)


def plan(**changes: Any) -> Plan:
    request = Request(per_device_train_batch_size=16, tokens_per_step=40_000, activation_checkpoints=28)
    return make_plan(
        handmade_outlines.dense(), request, PlannedMachine("by hand", False, handmade_outlines.machine(**changes))
    )


def test_planned_energy_and_cost() -> None:
    """A token without padding takes its share of a step at the power limits."""
    planned = plan(watts={"device": 700, "host": 300})
    assert planned.time is not None
    seconds = planned.time.seconds
    got = energy_as_json(planned, Prices(per_hour=2.5, per_kwh=0.3))
    assert got["joules_per_step"] == pytest.approx(1000 * seconds)
    assert got["joules_per_token"] == pytest.approx(1000 * seconds / 40_000)
    assert got["rent_per_million_tokens"] == pytest.approx(2.5 * seconds / 3600 * 25)
    assert got["electricity_per_million_tokens"] == pytest.approx(0.3 * seconds / 3600 * 25)  # 1 kW
    energy, rent, electricity = energy_lines(planned, Prices(2.5, 0.3))
    assert "J/token, at the power limits of the GPU (700 W) and the processors (300 W)" in energy
    assert "at 2.5 per hour" in rent
    assert "at 0.3 per kWh" in electricity


def test_what_is_not_known_is_not_planned() -> None:
    assert len(list(energy_lines(plan(watts={"device": 700}), Prices()))) == 1
    assert list(energy_lines(plan(), Prices(per_kwh=0.3))) == []
    assert len(list(energy_lines(plan(), Prices(per_hour=2.5)))) == 1


# The benchmark


def test_energy_of_a_token_is_that_beyond_rest() -> None:
    """2 s at 60 and 400 W, at rest 50 and 100 W, for 1,000 tokens."""
    used, rest = Energy(120.0, 800.0), Energy(50.0, 100.0)
    assert joules_per_token(used, 2.0, rest, 1000) == "0.02 / 0.6"
    assert joules_per_token(Energy(None, 800.0), 2.0, rest, 1000) == " / 0.6"
    assert joules_per_token(Energy(), 2.0, rest, 1000) == ""


def test_watts_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    read = [Energy(0.0, None), Energy(25.0, None), Energy()]
    monkeypatch.setattr("gpu_energy.EnergyMeter", lambda gpu: SimpleNamespace(read=lambda: read.pop(0)))
    monkeypatch.setattr("gpu_energy.time.sleep", slept.append)
    assert watts_at_rest(torch.device("cpu"), 0.5) == Energy(50.0, None)
    assert watts_at_rest(torch.device("cpu"), 0.5) == Energy()
    assert slept == [0.5]  # nobody waits for counters that are not there
