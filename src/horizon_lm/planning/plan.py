"""The plan of a run: every byte on host, device and disk, the chosen settings, and the time of a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horizon_lm.planning.budgets import (
    buffer_budget,
    device_budget,
    disk_budget,
    download_budget,
    file_problems,
    host_budget,
    transferred_bytes,
)
from horizon_lm.planning.catalog import Hardware
from horizon_lm.planning.choose import Choice, choose
from horizon_lm.planning.device_memory import device_use, memory_curve
from horizon_lm.planning.outline import ModelOutline
from horizon_lm.planning.plain import plain_reasons
from horizon_lm.planning.plan_file import PlannedMemory
from horizon_lm.planning.request import Budget, Machine, Request
from horizon_lm.planning.step import Step
from horizon_lm.planning.step_time import SaveTime, Simulation, StepTime, staged
from horizon_lm.planning.tile_sizes import require_tiles, tile_sizes
from horizon_lm.quantities import format_bytes

_NOTABLE_SHARE = 0.02  # of a step's duration, for which a choice of moments is worth a remark
_MOST_TILE_SIZES = 3  # that are simulated: the largest that fit
_SHARE_SAVED_BY_TILES = 0.1  # of a step, for which whole blocks that fit are cut: they would be compiled


@dataclass(frozen=True, slots=True)
class Plan:
    """The resources that a run needs, and whether they are available.

    Attributes:
        request, machine: inputs of the plan.
        step: a step with all settings chosen.
        reasons: reasons for the chosen settings, as sentences.
        host, device, disk: budgets. If the device computes in host memory, its bytes are in the host budget.
        buffers: the engine's buffers on the device, which ``device_memory`` may limit.
        download: budget of the checkpoint download, if it goes to another disk.
        time: time of a step; None if the machine's rates are unknown.
        save: time of a checkpoint; None if there are none, or the rate of the disk is unknown.
        problems: other obstacles, as sentences.
    """

    request: Request
    machine: Machine
    step: Step
    reasons: Sequence[str]
    host: Budget
    device: Budget
    disk: Budget
    buffers: Budget
    download: Budget
    time: StepTime | None
    save: SaveTime | None = None
    problems: Sequence[str] = ()

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budgets by the names of their places."""
        return {name: getattr(self, name) for name in ("host", "device", "buffers", "disk", "download")}

    @property
    def lacking(self) -> dict[str, Budget]:
        """The budgets of places that are too small."""
        return {place: budget for place, budget in self.budgets.items() if budget.deficit}

    @property
    def fits(self) -> bool:
        return not self.problems and not self.lacking

    @property
    def memory_deficit(self) -> bool:
        """True if memory is too small, not just the disk."""
        return bool(self.lacking.keys() - {"disk", "download"})

    @property
    def load_seconds(self) -> float | None:
        """Maximum expected seconds for reading the weights; None if unknown."""
        hardware = self.machine.hardware
        if hardware is None or not hardware.disk_read:
            return None
        return self.request.stored_bytes / self.request.shard.count / hardware.disk_read

    @property
    def curve(self) -> PlannedMemory | None:
        """Memory in use over a step; None without a simulated step."""
        return None if self.time is None else memory_curve(self.step, self.time.spans, self.host.bytes)


def make_plan(
    outline: ModelOutline, request: Request, machine: Machine, priced: bool = True, typical: ModelOutline | None = None
) -> Plan:
    """Return the plan of a run.

    Args:
        outline: the model with the longest sequences of the run.
        request: settings of the run.
        machine: the machine.
        priced: simulate a step, which takes a moment; otherwise the plan has no times.
        typical: the model with sequences of typical length, for times; None for ``outline``.
    """

    def plan(is_priced: bool = priced, **changes: Any) -> Plan:
        return make_plan(outline, replace(request, **changes), machine, is_priced, typical)

    if request.moments == "auto":
        return _with_chosen_moments(plan)
    if request.expert_tile == "auto":
        whole = _with_chosen_tile(plan, tile_sizes(outline, request), priced, typical)
        return replace(whole, request=request)
    require_tiles(outline, request)
    choice = choose(outline, request, machine)
    step, use = choice.step, device_use(choice.step)
    host = host_budget(step, use, machine)
    typical_step = step if typical is None else replace(step, outline=typical)
    simulation = _simulation(typical_step, machine) if priced else None
    time = None if simulation is None else simulation.step_time()
    is_saved = request.saves.num and not request.saves.only_model and machine.hardware and machine.hardware.disk_write
    return Plan(
        request,
        machine,
        step,
        list(_reasons(choice, typical_step, machine, host, time)),
        host=host,
        device=device_budget(step, use, machine),
        disk=disk_budget(step, machine),
        download=download_budget(step, machine),
        buffers=buffer_budget(step, use),
        time=time,
        save=simulation.save_time() if simulation is not None and is_saved else None,
        problems=file_problems(step, machine),
    )


def _simulation(step: Step, machine: Machine) -> Simulation | None:
    """Return the simulation of a step on a machine; None if the rates of the machine or the costs of the model are unknown."""
    hardware = machine.hardware
    if hardware is None or step.outline.unknown:
        return None
    if machine.page_lock_error:
        hardware = staged(hardware)
    return Simulation(step, hardware, machine.computing_threads, machine.interconnect)


def _with_chosen_moments(plan: Callable[..., Plan]) -> Plan:
    """Return the plan with moments in bfloat16 if its step is notably shorter, else the one in float32."""
    exact, lighter = plan(moments="float32"), plan(moments="bfloat16")
    if exact.time is None or lighter.time is None:
        return replace(exact, reasons=["moments: float32, because the time of a step is unknown", *exact.reasons])
    saved = 1 - lighter.time.seconds / exact.time.seconds
    if saved < _NOTABLE_SHARE:
        return replace(exact, reasons=["moments: float32, because updates are overlapped", *exact.reasons])
    reason = (
        f"moments: bfloat16, because updates are not fully overlapped: a step is {saved:.0%} shorter than with float32"
    )
    return replace(lighter, reasons=[reason, *lighter.reasons])


def _with_chosen_tile(
    plan: Callable[..., Plan], sizes: Sequence[int], priced: bool, typical: ModelOutline | None
) -> Plan:
    """Return the plan with whole blocks, or with tiles of experts if that does not fit or takes notably longer.

    Args:
        plan: makes the plan with a tile.
        sizes: sizes of tiles to try, largest first.
        priced, typical: as in `make_plan`.
    """
    whole = plan(False, expert_tile=None)
    must_be_cut, has_rates = whole.memory_deficit, priced and whole.machine.hardware is not None
    # Tiles can shorten a step of which more rows fit with them.
    may_save_time = has_rates and len(whole.step.settings.slices) > 1
    if not sizes or not (must_be_cut or may_save_time):
        return plan(expert_tile=None)
    fitting = [each for size in sizes if not (each := plan(False, expert_tile=size)).memory_deficit][:_MOST_TILE_SIZES]
    if not fitting:
        closest = min(whole, plan(False, expert_tile=sizes[-1]), key=_short)
        return plan(expert_tile=closest.step.settings.expert_tile)

    def seconds(tried: Plan) -> float:
        step = tried.step if typical is None else replace(tried.step, outline=typical)
        simulation = _simulation(step, tried.machine) if has_rates else None
        return 0.0 if simulation is None else simulation.estimated_seconds()

    best = min(fitting, key=seconds)
    saved = 0.0 if must_be_cut else 1 - seconds(best) / seconds(whole)
    if not must_be_cut and saved < _SHARE_SAVED_BY_TILES:
        return plan(expert_tile=None)
    why = (
        f"a step is {saved:.0%} shorter than with whole blocks" if saved else "whole blocks do not fit the device twice"
    )
    best = plan(expert_tile=best.step.settings.expert_tile)
    reason = f"expert_tile: {best.step.settings.expert_tile}, because {why}"
    return replace(best, reasons=[reason, *best.reasons])


def _short(plan: Plan) -> int:
    """Return the missing bytes of memory."""
    return plan.host.deficit + plan.device.deficit + plan.buffers.deficit


def _reasons(choice: Choice, typical: Step, machine: Machine, host: Budget, time: StepTime | None) -> Iterator[str]:
    """Yield the reasons for the settings, what is not proven or not possible, and what would make a step shorter.

    Args:
        choice: the step, with its settings.
        typical: the same step with sequences of typical length.
        machine: the machine.
        host: the host memory of the run.
        time: time of the typical step; None if unknown.
    """
    outline = choice.step.outline
    if outline.base_is_frozen:
        trained, total = outline.trained.num_parameters, outline.sizes.num_parameters
        yield f"adapters: {trained:,} parameters are trained, {trained / total:.2%} of {total:,}"
    yield from choice.reasons
    if outline.unproven:
        yield f"allow_unproven_model: {outline.unproven}"
    if outline.whole_head_only:
        yield f"head: whole, because {outline.whole_head_only}"
    if machine.page_lock_error:
        yield (
            f"{format_bytes(transferred_bytes(host))} of host memory cannot be page-locked ({machine.page_lock_error}); transfers "
            "use staging buffers, which are slower"
        )
    yield from machine.notes
    yield from _expert_reasons(outline, machine.hardware)
    yield from _shorter_step_reasons(typical, machine, time)
    yield from plain_reasons(typical, machine, time)
    if outline.unknown:
        yield f"{outline.unknown}, so activations and times are not included"


_GROUPED = (9, 10)  # major compute capabilities with torch's kernel for grouped products, in torch 2.11 to 2.13


def _expert_reasons(outline: ModelOutline, hardware: Hardware | None) -> list[str]:
    """Return a warning about experts on a GPU that has no kernel for all of them at once."""
    if not outline.experts or hardware is None or hardware.on_host or not hardware.capability:
        return []
    if int(hardware.capability) in _GROUPED:
        return []
    return [
        f"experts: with compute capability {hardware.capability}, torch multiplies the {outline.experts} experts of a block one by one, and the "
        "host waits for the device before each of their products, so a step takes longer than simulated"
    ]


def _shorter_step_reasons(step: Step, machine: Machine, time: StepTime | None) -> list[str]:
    """Return a change that would shorten a step limited by its optimizer updates, if there is one."""
    if time is None or time.limited_by != "update" or step.settings.moments != "float32":
        return []
    lighter = _simulation(replace(step, settings=replace(step.settings, moments="bfloat16")), machine)
    saved = 0.0 if lighter is None else 1 - lighter.step_time().seconds / time.seconds
    if saved < _NOTABLE_SHARE:
        return []
    return [f"optimizer updates are not fully overlapped: moments: bfloat16 would make a step {saved:.0%} shorter"]
