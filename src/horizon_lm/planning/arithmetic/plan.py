"""The plan of a run: every byte on host, device and disk, the chosen settings, and the time of a step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from horizon_lm.common.quantities import format_bytes
from horizon_lm.planning.arithmetic.budgets import (
    buffer_budget,
    device_budget,
    disk_budget,
    download_budget,
    file_problems,
    host_budget,
    transferred_bytes,
)
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use, memory_curve
from horizon_lm.planning.arithmetic.faster import faster_reasons, plain_reasons
from horizon_lm.planning.arithmetic.float8 import require_float8
from horizon_lm.planning.arithmetic.items import PLACES
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.plan_file import PlannedMemory
from horizon_lm.planning.arithmetic.request import Budget, Machine, Request
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_time import SaveTime, Simulation, StepTime, staged
from horizon_lm.planning.arithmetic.tiles import require_tiles, tile_sizes

_NOTABLE_SHARE = 0.02  # of a step's duration, for which a choice of moments is worth a remark
_MOST_TILE_SIZES = 3  # that are compared: the largest that fit
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
        return {name: getattr(self, name) for name in PLACES}

    @property
    def bytes(self) -> dict[str, int]:
        """The needed bytes by the names of their places."""
        return {place: budget.bytes for place, budget in self.budgets.items()}

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
        """Seconds for reading a rank's part of the weights, or less if they are in the page cache; None if unknown."""
        hardware = self.machine.hardware
        if hardware is None or not hardware.disk_read:
            return None
        # A rank's share of its machine has a share of the disk's rate.
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
    return _Planner(outline, machine, priced, outline if typical is None else typical).plan(request)


class _Planner:
    """Plans requests for a model on a machine. The moments are settled first, then the tile of experts, then the settings of `choose`.

    Args:
        outline, machine, priced, typical: as in `make_plan`: memory is planned for the longest sequences, times for typical ones.
    """

    def __init__(self, outline: ModelOutline, machine: Machine, priced: bool, typical: ModelOutline) -> None:
        self._outline, self._machine, self._priced, self._typical = outline, machine, priced, typical

    def plan(self, request: Request) -> Plan:
        """Return the plan of a request. Moments left open are in bfloat16 if that makes a step notably shorter, else in float32."""
        if request.moments != "auto":
            return self._plan_with_tile(request)
        exact = self._plan_with_tile(replace(request, moments="float32"))
        lighter = self._plan_with_tile(replace(request, moments="bfloat16"))
        if exact.time is None or lighter.time is None:
            return _with_reason("moments: float32, because the time of a step is unknown", exact)
        saved = 1 - lighter.time.seconds / exact.time.seconds
        if saved < _NOTABLE_SHARE:
            return _with_reason("moments: float32, because updates are overlapped", exact)
        reason = f"moments: bfloat16, because updates are not fully overlapped: a step is {saved:.0%} shorter than with float32"
        return _with_reason(reason, lighter)

    def _plan_with_tile(self, request: Request) -> Plan:
        """Return the plan of a request whose moments are settled, and whose tile of experts may be left open."""
        if request.expert_tile != "auto":
            return self._timed_plan(request)
        tile, why = self._choose_tile(request)
        chosen = self._timed_plan(replace(request, expert_tile=tile))
        if why:
            chosen = _with_reason(f"expert_tile: {tile}, because {why}", chosen)
        # The plan keeps the request with the open tile: with the changes of a remedy, another tile may be the best.
        return replace(chosen, request=request)

    def _timed_plan(self, request: Request) -> Plan:
        """Return the plan of a request whose moments and tile are settled, with its times and all of its reasons."""
        plan, machine = self._untimed_plan(request), self._machine
        typical_step = self._typical_step(plan.step)
        simulation = _simulation(typical_step, machine) if self._priced else None
        time = None if simulation is None else simulation.step_time()
        has_checkpoints = request.saves.num > 0 and not request.saves.only_model
        is_disk_known = machine.hardware is not None and machine.hardware.disk_write > 0
        faster: Iterable[str] = ()
        if time is not None and not plan.memory_deficit:
            faster = faster_reasons(request, time, typical_step.tokens, self._rate_of)
        return replace(
            plan, time=time, reasons=list(_reasons(plan, typical_step, time, faster)),
            save=simulation.save_time() if simulation and has_checkpoints and is_disk_known else None,
        )  # fmt: skip

    def _untimed_plan(self, request: Request) -> Plan:
        """Return the plan of a request whose moments and tile are settled, without times, to compare it with others.

        Its reasons are those of `choose` alone.
        """
        require_tiles(self._outline, request)
        require_float8(request, self._machine, self._priced)
        machine, choice = self._machine, choose(self._outline, request, self._machine)
        step, use = choice.step, device_use(choice.step)
        return Plan(
            request=request, machine=machine, step=step, reasons=choice.reasons, host=host_budget(step, use, machine),
            device=device_budget(step, use, machine), buffers=buffer_budget(step, use), disk=disk_budget(step, machine),
            download=download_budget(step, machine), problems=file_problems(step, machine), time=None,
        )  # fmt: skip

    def _rate_of(self, request: Request) -> float | None:
        """Return the tokens per second of the request's typical step; None if it does not fit. Only for machines whose rates are known."""
        plan = self._untimed_plan(request)
        if plan.memory_deficit:
            return None
        step = self._typical_step(plan.step)
        simulation = _simulation(step, self._machine)
        assert simulation is not None
        return step.counted_tokens / simulation.seconds()

    def _typical_step(self, step: Step) -> Step:
        """Return the step with sequences of typical length."""
        return replace(step, outline=self._typical)

    # The search for a tile compares plans without times, by estimates of their seconds.

    def _choose_tile(self, request: Request) -> tuple[int | None, str]:
        """Return the number of experts in a tile, and the reason why blocks are cut; None and "" for whole blocks."""
        sizes = tile_sizes(self._outline, request)
        if not sizes:
            return None, ""
        whole = self._untimed_plan(replace(request, expert_tile=None))
        if whole.memory_deficit:
            return self._choose_tile_that_fits(request, sizes, whole)
        return self._choose_tile_that_saves_time(request, sizes, whole)

    def _choose_tile_that_fits(self, request: Request, sizes: Sequence[int], whole: Plan) -> tuple[int | None, str]:
        """Choose the tile with the shortest step, or the largest one if the rates are unknown. If none fits, choose what lacks the
        least memory, without a reason.
        """
        smallest = self._untimed_plan(replace(request, expert_tile=sizes[-1]))
        if smallest.memory_deficit:  # a larger tile takes no less
            return min(whole, smallest, key=_missing_memory).step.settings.expert_tile, ""
        fitting = self._largest_fitting(request, sizes)
        best = min(fitting, key=self._estimated_seconds) if self._has_rates else fitting[0]
        return best.step.settings.expert_tile, "whole blocks do not fit the device twice"

    def _choose_tile_that_saves_time(
        self, request: Request, sizes: Sequence[int], whole: Plan
    ) -> tuple[int | None, str]:
        """Choose the tile with the shortest step if it is notably shorter than that of whole blocks, which fit."""
        # Tiles leave room for larger and so fewer micro-batches, and for keeping the rest of a block on the device.
        fitting = self._largest_fitting(request, sizes) if self._has_rates else []
        if not fitting:
            return None, ""
        best = min(fitting, key=self._estimated_seconds)
        saved = 1 - self._estimated_seconds(best) / self._estimated_seconds(whole)
        if saved < _SHARE_SAVED_BY_TILES:
            return None, ""
        return best.step.settings.expert_tile, f"a step is {saved:.0%} shorter than with whole blocks"

    def _largest_fitting(self, request: Request, sizes: Sequence[int]) -> list[Plan]:
        """Return the plans with the largest tiles that fit, largest first."""
        plans = (self._untimed_plan(replace(request, expert_tile=size)) for size in sizes)
        return list(islice((plan for plan in plans if not plan.memory_deficit), _MOST_TILE_SIZES))

    @property
    def _has_rates(self) -> bool:
        return self._priced and self._machine.hardware is not None and not self._typical.unknown

    def _estimated_seconds(self, plan: Plan) -> float:
        """Return approximately the seconds of a typical step of a plan. Call this only if `_has_rates`."""
        simulation = _simulation(self._typical_step(plan.step), self._machine)
        assert simulation is not None
        return simulation.estimated_seconds()


def _with_reason(reason: str, plan: Plan) -> Plan:
    """Return the plan with one more reason, before its others."""
    return replace(plan, reasons=[reason, *plan.reasons])


def _simulation(step: Step, machine: Machine) -> Simulation | None:
    """Return the simulation of a step on a machine; None if the rates of the machine or the costs of the model are unknown."""
    hardware = machine.hardware
    if hardware is None or step.outline.unknown:
        return None
    if machine.page_lock_error:
        hardware = staged(hardware)
    return Simulation(step, hardware, machine.computing_threads, machine.interconnect)


def _missing_memory(plan: Plan) -> int:
    """Return the missing bytes of memory."""
    return plan.host.deficit + plan.device.deficit + plan.buffers.deficit


def _reasons(plan: Plan, typical: Step, time: StepTime | None, faster: Iterable[str]) -> Iterator[str]:
    """Yield sentences about the settings, about limits of model and machine, and about changes that would make a step shorter.

    Args:
        plan: a plan with the reasons for its choices.
        typical: its step with sequences of typical length.
        time: time of the typical step; None if unknown.
        faster: sentences about changes that make the step shorter.
    """
    outline, machine = plan.step.outline, plan.machine
    if outline.base_is_frozen:
        trained, total = outline.layout.num_trained, outline.layout.num_parameters
        yield f"adapters: {trained:,} parameters are trained, {trained / total:.2%} of {total:,}"
    yield from plan.reasons
    if outline.unproven:
        yield f"allow_unproven_model: {outline.unproven}"
    if outline.whole_head_only:
        yield f"head: whole, because {outline.whole_head_only}"
    if machine.page_lock_error:
        yield (
            f"{format_bytes(transferred_bytes(plan.host))} of host memory cannot be page-locked ({machine.page_lock_error}); transfers "
            "use staging buffers, which are slower"
        )
    yield from (*machine.notes, *machine.remarks)
    yield from _expert_reasons(outline, machine.hardware)
    yield from faster
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
