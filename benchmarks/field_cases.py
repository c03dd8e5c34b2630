"""MegaTrain's published figures as cases, simulated with its schedule and with ours on the same rows and machine."""

from dataclasses import dataclass, replace
from functools import cache

from field_schedule import FieldSettings, FieldStep, FieldTime, field_time, most_rows
from simulated_models import source_of

from horizon_lm.planning.arithmetic.catalog import Hardware, find_profile
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.planning.arithmetic.step_time import Simulation
from horizon_lm.runs.admission.inputs import RowShape
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config

LENGTH = 1024
PRECISIONS = ({}, {"precision": "bf16"}, {"precision": "bf16", "moments": "bfloat16"})  # ours: the first one that fits

GH200, A100 = find_profile("gh200"), find_profile("a100-pcie-80gb")
_DESKTOP = find_profile("rtx-3090")
_PCIE_3 = 12.5e9  # bytes per second each way
RTX_3090 = replace(
    _DESKTOP, link_in=_PCIE_3, link_out=_PCIE_3, link_both=_PCIE_3 * _DESKTOP.link_both / _DESKTOP.link_in,
    host_memory=251 * 10**9, host_bandwidth={"16": 100e9},
)  # fmt: skip
NAMES = {GH200.gpu: "GH200", A100.gpu: "A100 PCIe", RTX_3090.gpu: "RTX 3090"}
PEAK = {GH200.gpu: 990e12, A100.gpu: 312e12, RTX_3090.gpu: 71e12}  # dense bf16, from the datasheets


@dataclass(frozen=True)
class Case:
    """A published figure, in TFLOP/s. ``rows`` is None if they are unknown; then as many as fit."""

    hardware: Hardware
    model: str
    rows: int | None
    published: float
    length: int = LENGTH
    layers: int | None = None

    @property
    def machine(self) -> str:
        return NAMES[self.hardware.gpu]

    @property
    def name(self) -> str:
        return f"{self.machine} {self.model}"

    @property
    def outline(self) -> ModelOutline:
        return _outline(self.model, self.length, self.layers)

    @property
    def flops_per_token(self) -> float:
        """The operations per token by their formula. On GH200 their paper adds attention with all scores."""
        outline = self.outline
        attention = 12 * outline.num_blocks * outline.layout.hidden * self.length if self.machine == "GH200" else 0
        return 6 * outline.layout.num_parameters + attention

    def tflops(self, tokens: int, seconds: float) -> float:
        return self.flops_per_token * tokens / seconds / 1e12


@cache
def _outline(model: str, length: int, layers: int | None) -> ModelOutline:
    run = plan_config(model_name_or_path=model, device="cuda")
    return source_of(f"Qwen2.5-{model}", **_changes(layers)).outline(run, length=length, masked=False)


def _changes(layers: int | None) -> dict[str, int]:
    return {} if layers is None else {"num_hidden_layers": layers}


CASES = [
    Case(GH200, "7B", 158, 284.7), Case(GH200, "14B", 96, 264), Case(GH200, "32B", 96, 250),
    Case(A100, "7B", None, 128), Case(A100, "14B", None, 122), Case(A100, "32B", None, 114),
    Case(RTX_3090, "3B", 7, 33.18), Case(RTX_3090, "7B", 5, 35.09), Case(RTX_3090, "14B", 3, 30.19),
]  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """MegaTrain's simulated step of a case."""

    case: Case
    step: FieldStep
    time: FieldTime

    @property
    def tflops(self) -> float:
        return self.case.tflops(self.step.tokens, self.time.seconds)

    @property
    def ratio(self) -> float:
        return self.tflops / self.case.published

    @property
    def published_seconds(self) -> float:
        return self.time.seconds * self.ratio

    @property
    def computing_factor(self) -> float:
        """The factor on simulated computing time that would give the published figure, all else being equal."""
        return (self.published_seconds - self.time.optimizer - self.time.waiting) / self.time.computing

    @property
    def executed_share(self) -> float:
        """The operations executed at the published rate, as a fraction of the datasheet's peak."""
        return self.step.executed() / self.published_seconds / PEAK[self.case.hardware.gpu]

    @property
    def gib(self) -> float:
        return self.step.device_bytes() / 2**30


def theirs(case: Case, packing: float | None = None, **changes: object) -> Simulated:
    """Simulate their step of a case. ``packing``: as in `FieldStep.cost`; ``changes``: changes of `FieldSettings`."""
    rows = case.rows or most_rows(case.outline, case.hardware)
    step = FieldStep(case.outline, replace(FieldSettings(rows), **changes))
    return Simulated(case, step, field_time(step, case.hardware, packing))


def split_memory(case: Case) -> Case:
    """Return a case on one superchip of four: 120 GB of its own memory, the rest at 100 GB/s through their links."""
    share = min(1.0, 120e9 / (12 * case.outline.layout.num_parameters))
    rate = 1 / (share / GH200.host_rate + (1 - share) / 100e9)
    link_in, link_out = min(rate, GH200.link_in), min(rate, GH200.link_out)
    return replace(case, hardware=replace(GH200, host_bandwidth={"72": rate}, link_in=link_in, link_out=link_out))


def desktop_memory(case: Case) -> Case:
    """Return a case with the host memory of the profile."""
    return replace(case, hardware=replace(case.hardware, host_bandwidth=_DESKTOP.host_bandwidth))


@dataclass(frozen=True)
class Ours:
    """The seconds of our step of a case: with our schedule alone, and as planned."""

    plan: Plan
    precision: str
    alone: float
    planned: float


def ours(case: Case, rows: int) -> Ours:
    """Plan our step of a case in the first precision that fits."""
    model = f"Qwen2.5-{case.model}"
    source, machine = source_of(model, **_changes(case.layers)), other_machine(case.hardware, None)
    for settings in PRECISIONS:
        run = plan_config(model_name_or_path=model, device="cuda", per_device_train_batch_size=rows, **settings)
        plan = plan_run(run, source, machine, rows=RowShape(case.length, case.length, masked=False))
        if plan.fits:
            break
    assert plan.time is not None
    residency = Residency(plan.step.settings.residency.boundaries)
    as_theirs = replace(plan.step.settings.keeping(residency), compiled=False, precision="bf16", moments="float32")
    alone = Simulation(replace(plan.step, settings=as_theirs), case.hardware).step_time().seconds
    name = run.precision + ("" if run.moments == "float32" else ", bf16 moments") + ("" if plan.fits else ": too large")
    return Ours(plan, name, alone, plan.time.seconds)
