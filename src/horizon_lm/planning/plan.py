"""The plan of a run: every byte on host, device and disk, the chosen settings, and the time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from horizon_lm.constants import DEVICE_MARGIN
from horizon_lm.planning.catalog import Hardware
from horizon_lm.planning.choose import choose
from horizon_lm.planning.device_memory import Curve, DeviceUse, device_use, memory_curve
from horizon_lm.planning.host_memory import checkpoint_bytes, host_bytes, largest_file_bytes
from horizon_lm.planning.model_sizes import ModelSizes
from horizon_lm.planning.outline import ModelOutline
from horizon_lm.planning.plain import plain_reasons
from horizon_lm.planning.request import Budget, Item, Limit, Machine, Request
from horizon_lm.planning.step import Step
from horizon_lm.planning.step_time import SaveTime, StepTime, estimated_seconds, save_time, staged, step_time
from horizon_lm.planning.tile_sizes import require_tiles, tile_sizes
from horizon_lm.quantities import counted, format_bytes
from horizon_lm.slabs import slab_elements


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
    def run_seconds(self) -> float | None:
        """Expected seconds of all steps; None if unknown."""
        if self.time is None or self.request.num_steps is None:
            return None
        return self.time.seconds * self.request.num_steps

    @property
    def load_seconds(self) -> float | None:
        """Maximum expected seconds for reading the weights; None if unknown."""
        hardware = self.machine.hardware
        if hardware is None or not hardware.disk_read:
            return None
        return self.request.stored_bytes / self.request.shard.count / hardware.disk_read

    @property
    def curve(self) -> Curve | None:
        """Memory in use over a step; None without a simulated step."""
        return None if self.time is None else memory_curve(self.step, self.time.spans, self.host.num_bytes)


def describe_deficit(budget: Budget) -> str:
    """Return the needed, available and missing bytes of one place as a sentence."""
    assert budget.limit is not None
    return (
        f"{budget.place}: {format_bytes(budget.num_bytes)} needed, {format_bytes(budget.limit.num_bytes)} available "
        f"({budget.limit.name}), {format_bytes(budget.deficit)} short ({budget.deficit:,} bytes)"
    )


def make_plan(
    outline: ModelOutline, request: Request, machine: Machine, priced: bool = True, usual: ModelOutline | None = None
) -> Plan:
    """Return the plan of a run.

    Args:
        outline: the model with the longest sequences of the run.
        request: settings of the run.
        machine: the machine.
        priced: simulate a step, which takes a moment; otherwise the plan has no times.
        usual: the model with sequences of typical length, for times; None for ``outline``.
    """
    if request.moments == "auto":
        return _with_chosen_moments(outline, request, machine, priced, usual)
    if request.expert_tile == "auto":
        return _with_chosen_tile(outline, request, machine, priced, usual)
    require_tiles(outline, request)
    choice = choose(outline, request, machine)
    step, use = choice.step, device_use(choice.step)
    on_device = [*_device_items(step, use), *_reserved_items(machine)]
    host = _host_items(step, use, machine)
    typical = step if usual is None else replace(step, outline=usual)
    hardware = machine.hardware
    if hardware is not None and machine.page_lock_error:
        hardware = staged(hardware)
    time, save = None, None
    if priced and hardware is not None and not outline.unknown:
        time, save = _times(typical, hardware, machine)
    num_bytes = request.download_bytes
    download = [Item("download", num_bytes, "the checkpoint to start from")] if num_bytes else []
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
            *_shorter_step_reasons(typical, hardware, machine, time),
            *plain_reasons(typical, machine, time),
            *([f"{outline.unknown}, so activations and times are not included"] if outline.unknown else []),
        ],
        host=Budget("host", [item for item in host if item.num_bytes], machine.host_limits),
        device=Budget("device", [] if machine.on_host else on_device, [] if machine.on_host else machine.device_limits),
        disk=Budget("disk", [*_disk_items(step), *([] if machine.download_limits else download)], machine.disk_limits),
        download=Budget("download", download if machine.download_limits else [], machine.download_limits),
        buffers=Budget(
            "buffers",
            _buffer_items(use),
            [Limit("device_memory", request.device_memory)] if request.device_memory is not None else [],
        ),
        time=time,
        save=save,
        problems=_file_problems(step, machine),
    )


def _times(typical: Step, hardware: Hardware, machine: Machine) -> tuple[StepTime, SaveTime | None]:
    """Return the time of a step with sequences of typical length, and of a checkpoint if there are any."""
    settings, threads, interconnect = typical.settings, machine.computing_threads, machine.interconnect
    time = step_time(typical, hardware, threads, interconnect)
    is_saved = settings.saves.num and not settings.saves.only_model and hardware.disk_write
    return time, save_time(typical, hardware, threads, interconnect) if is_saved else None


def _with_chosen_moments(
    outline: ModelOutline, request: Request, machine: Machine, priced: bool, usual: ModelOutline | None
) -> Plan:
    """Return the plan with moments in bfloat16 if its step is notably shorter, else the one in float32."""
    exact, lighter = (
        make_plan(outline, replace(request, moments=moments), machine, priced, usual)
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
    outline: ModelOutline, request: Request, machine: Machine, priced: bool, usual: ModelOutline | None
) -> Plan:
    """Return the plan with whole blocks, or with tiles of experts if that does not fit or takes notably longer. Its request leaves
    the choice open.
    """

    def plan(tile: int | None, is_priced: bool) -> Plan:
        return make_plan(outline, replace(request, expert_tile=tile), machine, is_priced, usual)

    whole, sizes = plan(None, False), tile_sizes(outline, request)
    must_be_cut, hardware = whole.memory_deficit, machine.hardware
    # Tiles can shorten a step of which more rows fit with them.
    if not sizes or not (must_be_cut or (priced and hardware and len(whole.step.settings.slices) > 1)):
        return replace(plan(None, priced), request=request)
    fitting = [each for size in sizes if not (each := plan(size, False)).memory_deficit][:_MOST_TILE_SIZES]
    if not fitting:
        return replace(min(whole, plan(sizes[-1], False), key=_short), request=request)

    def seconds(tried: Plan) -> float:
        typical = tried.step if usual is None else replace(tried.step, outline=usual)
        return estimated_seconds(typical, hardware, machine.computing_threads) if priced and hardware else 0.0

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


_MOST_TILE_SIZES = 3  # that are simulated: the largest that fit
_SHARE_SAVED_BY_TILES = 0.1  # of a step, for which whole blocks that fit are cut: they would be compiled


def _short(plan: Plan) -> int:
    """Return the missing bytes of memory."""
    return plan.host.deficit + plan.device.deficit + plan.buffers.deficit


def _model_reasons(outline: ModelOutline) -> list[str]:
    unproven = [f"allow_unproven_model: {outline.unproven}"] if outline.unproven else []
    whole_head = [f"head: whole, because {outline.whole_head_only}"] if outline.whole_head_only else []
    return unproven + whole_head


def _adapter_reasons(outline: ModelOutline) -> list[str]:
    if not outline.base_is_frozen:
        return []
    trained, total = outline.trained.num_parameters, outline.sizes.num_parameters
    return [f"adapters: {trained:,} parameters are trained, {trained / total:.2%} of {total:,}"]


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


_NOTABLE_SHARE = 0.02  # of a step's duration
_WORKER_BYTES = 96 * 2**20  # bytes of a compiler process: torch, without the libraries of a run

_DEVICE_NAMES = {
    "weight_slots": ("weight slots", "double-buffered, sized for the largest block"),
    "packed_slots": ("codes and scales", "gathered from all ranks before they are decoded"),
    "resident_weights": ("resident weights", "blocks that stay on the device"),
    "grad_slots": ("gradient slots", "sized for the largest block"),
    "grad_accumulator": ("gradient accumulator", "fp32, sized for the largest block"),
    "tile_slots": ("expert slots", "double-buffered, sized for the largest tile of experts"),
    "tile_grad_slots": ("expert gradient slots", "sized for the largest tile of experts"),
    "head_weights": ("head weights", ""),
    "head_grads": ("head gradients", ""),
    "outer_weights": ("outer weights", "final norm and other small parameters"),
    "outer_grads": ("outer gradients", ""),
    "table_rows": ("embedding rows", "maximum that a step can read"),
    "table_row_grads": ("embedding row gradients", ""),
    "boundary_ring": ("activation checkpoint ring", "double buffer of transfers to and from the host"),
}


def _device_items(step: Step, use: DeviceUse) -> list[Item]:
    residency, settings = step.settings.residency, step.settings
    rows = settings.slices[0]
    stay = f"inputs of {counted(step.staying, 'block')}, {format_bytes(step.boundary)} each"
    return [
        *_buffer_items(use),
        *([Item("activation checkpoints", use.checkpoints, stay)] if use.checkpoints else []),
        Item(
            "activations and head workspace",
            use.activations,
            f"peak, {rows} × {step.outline.length:,} tokens in a block"
            + (f", {counted(residency.graphs, 'resident graph')}" if residency.graphs else "")
            + (", all logits" if settings.chunk_tokens is None else f", logits of {settings.chunk_tokens:,} tokens"),
        ),
        Item("masks and positions", use.shared, f"for {step.outline.attention} attention"),
    ]


def _buffer_items(use: DeviceUse) -> list[Item]:
    return [Item(_DEVICE_NAMES[kind][0], num_bytes, _DEVICE_NAMES[kind][1]) for kind, num_bytes in use.buffers.items()]


_COLLECTIVES = "sums of gradients, and what NCCL takes (estimate)"


def _reserved_items(machine: Machine) -> list[Item]:
    """Return the device memory that is not used by the step itself."""
    limits = [limit.num_bytes for limit in machine.device_limits]
    margin = int(min(limits) * DEVICE_MARGIN) if limits else 0
    return [
        Item("transfers", machine.scratch_bytes, "scratch space for dtype conversions, both directions"),
        *([Item("collectives", machine.collective_bytes, _COLLECTIVES)] if machine.collective_bytes else []),
        Item("context", machine.device_context_bytes, "driver, libraries and their kernels (estimate)"),
        Item("margin", margin, f"{DEVICE_MARGIN:.0%} of the device, for allocator fragmentation"),
    ]


_HOST_NAMES = {
    "weights": ("weights", "streamed to the device"),
    "packed_weights": ("quantized weights", "codes and scales, decoded on the device"),
    "low_halves": ("low halves", "the other 16 bits of the fp32 master weights"),
    "grads": ("gradients", ""),
    "landing": ("landing slots", "gradients until their update"),
    "boundaries": ("activation checkpoints", "block inputs, kept for the backward pass"),
}


def _host_items(step: Step, use: DeviceUse, machine: Machine) -> list[Item]:
    kept = host_bytes(step.outline.sizes, step.outline.trained, step.host_settings())
    optimizer = step.settings.optimizer
    count = "one" if optimizer.num_moments == 1 else "two"
    count = "one of matrices, two of others" if optimizer.orthogonalizes else f"{count} per parameter"
    names = {**_HOST_NAMES, "moments": ("moments", f"{count} ({optimizer.name})")}
    items = [Item(names[kind][0], num_bytes, names[kind][1]) for kind, num_bytes in kept.items()]
    if machine.on_host:
        items += [Item(f"device: {item.name}", item.num_bytes, item.note) for item in _device_items(step, use)]
    workers = machine.compile_workers if step.settings.compiled else 0
    saved, width = _exported(step)
    largest = max(map(slab_elements, saved.units)) * width
    # The export follows the last step, when the memory of activations is free again.
    export = max(0, largest - (use.activations if machine.on_host else 0))
    return [
        *items,
        Item("staging", machine.staging_bytes, "page-locked transfer buffers"),
        Item("export", export, "one unit while it is written"),
        Item("process", machine.process_bytes, "interpreter, libraries and dataset"),
        Item("compilers", workers * _WORKER_BYTES, f"{workers} torch.compile worker processes"),
    ]


def _staging_reasons(host: Sequence[Item], machine: Machine) -> list[str]:
    if not machine.page_lock_error:
        return []
    moved = sum(item.num_bytes for item in host if item.name in {_HOST_NAMES[kind][0] for kind in _TRANSFERRED})
    return [
        f"{format_bytes(moved)} of host memory cannot be page-locked ({machine.page_lock_error}); transfers use staging buffers, "
        "which are slower"
    ]


_TRANSFERRED = ("weights", "packed_weights", "grads", "landing", "boundaries")


def _exported(step: Step) -> tuple[ModelSizes, int]:
    """Return the parameters of the exported model, and their bytes. PEFT saves the adapters alone, in float32."""
    outline = step.outline
    return (outline.trained, 4) if outline.base_is_frozen else (outline.sizes, step.settings.export_bytes)


def _disk_items(step: Step) -> list[Item]:
    saved, width = _exported(step)
    exported = saved.num_parameters * width
    of_adapters = " of the adapters" if step.outline.base_is_frozen else ""
    items = [Item("exported model", exported, f"{width} bytes per parameter{of_adapters}")]
    saves = step.settings.saves
    if saves.num:
        each = exported if saves.only_model or saves.with_model else 0
        if not saves.only_model:
            each += checkpoint_bytes(step.outline.sizes, step.outline.trained, step.host_settings())
        count = min(saves.num, saves.kept + 1)  # the oldest is deleted once the newest is complete
        note = f"{count} at once; {saves.num} x {format_bytes(each)} = {format_bytes(saves.num * each)} written over the run"
        items.append(Item("checkpoints", count * each, note))
    return items


_LARGEST_FILE = 50 * 10**9  # of an exported model, which is cut into several above that


def _file_problems(step: Step, machine: Machine) -> list[str]:
    """Return why the run could not write a file, although there is room on the disk."""
    saved, width = _exported(step)
    files = [("the exported model", min(saved.num_parameters * width, _LARGEST_FILE))]
    if step.settings.saves.num and not step.settings.saves.only_model:
        files.append(
            ("a checkpoint", largest_file_bytes(step.outline.sizes, step.outline.trained, step.host_settings()))
        )
    return [
        f"A file may have at most {format_bytes(machine.file_limit)} (ulimit -f), and {name} needs one of {format_bytes(num_bytes)}; "
        "raise the limit: ulimit -f unlimited."
        for name, num_bytes in files
        if machine.file_limit is not None and num_bytes > machine.file_limit
    ]
