"""The plan of a run: every byte on host, device and disk, the chosen settings, and the time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
from horizon_lm.planning.choose import choose
from horizon_lm.planning.device_memory import device_use, memory_curve
from horizon_lm.planning.outline import ModelOutline
from horizon_lm.planning.plain import plain_reasons
from horizon_lm.planning.plan_file import PlannedMemory
from horizon_lm.planning.request import Budget, Machine, Request
from horizon_lm.planning.step import Step
from horizon_lm.planning.step_time import SaveTime, StepTime, estimated_seconds, save_time, staged, step_time
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
    def budgets(self) -> Sequence[Budget]:
        return (self.host, self.device, self.buffers, self.disk, self.download)

    @property
    def fits(self) -> bool:
        return not self.problems and not any(budget.deficit for budget in self.budgets)

    @property
    def memory_deficit(self) -> bool:
        """True if memory is too small, not just the disk."""
        return any(budget.deficit for budget in self.budgets if budget.place not in ("disk", "download"))

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
        return None if self.time is None else memory_curve(self.step, self.time.spans, self.host.num_bytes)


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
    if request.moments == "auto":
        return _with_chosen_moments(outline, request, machine, priced, typical)
    if request.expert_tile == "auto":
        return _with_chosen_tile(outline, request, machine, priced, typical)
    require_tiles(outline, request)
    choice = choose(outline, request, machine)
    step, use = choice.step, device_use(choice.step)
    host = host_budget(step, use, machine)
    typical_step = step if typical is None else replace(step, outline=typical)
    hardware = machine.hardware
    if hardware is not None and machine.page_lock_error:
        hardware = staged(hardware)
    time, save = None, None
    if priced and hardware is not None and not outline.unknown:
        time, save = _times(typical_step, hardware, machine)
    return Plan(
        request,
        machine,
        step,
        [
            *_adapter_reasons(outline),
            *choice.reasons,
            *_model_reasons(outline),
            *_staging_reasons(host, machine),
            *machine.notes,
            *_expert_reasons(outline, hardware),
            *_shorter_step_reasons(typical_step, hardware, machine, time),
            *plain_reasons(typical_step, machine, time),
            *([f"{outline.unknown}, so activations and times are not included"] if outline.unknown else []),
        ],
        host=host,
        device=device_budget(step, use, machine),
        disk=disk_budget(step, machine),
        download=download_budget(step, machine),
        buffers=buffer_budget(step, use),
        time=time,
        save=save,
        problems=file_problems(step, machine),
    )


def _times(typical: Step, hardware: Hardware, machine: Machine) -> tuple[StepTime, SaveTime | None]:
    """Return the time of a step with sequences of typical length, and of a checkpoint if there are any."""
    settings, threads, interconnect = typical.settings, machine.computing_threads, machine.interconnect
    time = step_time(typical, hardware, threads, interconnect)
    is_saved = settings.saves.num and not settings.saves.only_model and hardware.disk_write
    return time, save_time(typical, hardware, threads, interconnect) if is_saved else None


def _with_chosen_moments(
    outline: ModelOutline, request: Request, machine: Machine, priced: bool, typical: ModelOutline | None
) -> Plan:
    """Return the plan with moments in bfloat16 if its step is notably shorter, else the one in float32."""
    exact, lighter = (
        make_plan(outline, replace(request, moments=moments), machine, priced, typical)
        for moments in ("float32", "bfloat16")
    )
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
    outline: ModelOutline, request: Request, machine: Machine, priced: bool, typical: ModelOutline | None
) -> Plan:
    """Return the plan with whole blocks, or with tiles of experts if that does not fit or takes notably longer. Its request leaves
    the choice open.
    """

    def plan(tile: int | None, is_priced: bool) -> Plan:
        return make_plan(outline, replace(request, expert_tile=tile), machine, is_priced, typical)

    whole, sizes = plan(None, False), tile_sizes(outline, request)
    must_be_cut, hardware = whole.memory_deficit, machine.hardware if priced else None
    # Tiles can shorten a step of which more rows fit with them.
    may_save_time = hardware is not None and len(whole.step.settings.slices) > 1
    if not sizes or not (must_be_cut or may_save_time):
        return replace(plan(None, priced), request=request)
    fitting = [each for size in sizes if not (each := plan(size, False)).memory_deficit][:_MOST_TILE_SIZES]
    if not fitting:
        return replace(min(whole, plan(sizes[-1], False), key=_short), request=request)

    def seconds(tried: Plan) -> float:
        if hardware is None:
            return 0.0
        typical_step = tried.step if typical is None else replace(tried.step, outline=typical)
        return estimated_seconds(typical_step, hardware, machine.computing_threads, machine.interconnect)

    best = min(fitting, key=seconds)
    saved = 0.0 if must_be_cut else 1 - seconds(best) / seconds(whole)
    if not must_be_cut and saved < _SHARE_SAVED_BY_TILES:
        return replace(plan(None, priced), request=request)
    why = (
        f"a step is {saved:.0%} shorter than with whole blocks" if saved else "whole blocks do not fit the device twice"
    )
    best = plan(best.step.settings.expert_tile, priced)
    reason = f"expert_tile: {best.step.settings.expert_tile}, because {why}"
    return replace(best, request=request, reasons=[reason, *best.reasons])


def _short(plan: Plan) -> int:
    """Return the missing bytes of memory."""
    return plan.host.deficit + plan.device.deficit + plan.buffers.deficit


def _model_reasons(outline: ModelOutline) -> list[str]:
    """Return what is not proven for the model, or not possible with it."""
    unproven = [f"allow_unproven_model: {outline.unproven}"] if outline.unproven else []
    whole_head = [f"head: whole, because {outline.whole_head_only}"] if outline.whole_head_only else []
    return unproven + whole_head


def _adapter_reasons(outline: ModelOutline) -> list[str]:
    """Return how many parameters are trained beside a frozen base."""
    if not outline.base_is_frozen:
        return []
    trained, total = outline.trained.num_parameters, outline.sizes.num_parameters
    return [f"adapters: {trained:,} parameters are trained, {trained / total:.2%} of {total:,}"]


def _staging_reasons(host: Budget, machine: Machine) -> list[str]:
    """Return why transfers are staged, if they are."""
    if not machine.page_lock_error:
        return []
    return [
        f"{format_bytes(transferred_bytes(host))} of host memory cannot be page-locked ({machine.page_lock_error}); transfers use "
        "staging buffers, which are slower"
    ]


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


def _shorter_step_reasons(step: Step, hardware: Hardware | None, machine: Machine, time: StepTime | None) -> list[str]:
    """Return a change that would shorten a step limited by its optimizer updates, if there is one."""
    if hardware is None or time is None or time.limited_by != "update" or step.settings.moments != "float32":
        return []
    lighter = replace(step, settings=replace(step.settings, moments="bfloat16"))
    other = step_time(lighter, hardware, machine.computing_threads, machine.interconnect)
    saved = 1 - other.seconds / time.seconds
    if saved < _NOTABLE_SHARE:
        return []
    return [f"optimizer updates are not fully overlapped: moments: bfloat16 would make a step {saved:.0%} shorter"]
