"""The plan of a run: every byte on host, device and disk, the settings that were left open, and how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from horizon_lm.constants import DEVICE_MARGIN
from horizon_lm.plan.catalog import Hardware
from horizon_lm.plan.choose import choose
from horizon_lm.plan.device_memory import Curve, DeviceUse, device_use, memory_curve
from horizon_lm.plan.memory import host_bytes, slab_elements
from horizon_lm.plan.outline import ModelOutline
from horizon_lm.plan.request import Budget, Item, Limit, Machine, Request
from horizon_lm.plan.step import Step
from horizon_lm.plan.step_time import StepTime, staged, step_time
from horizon_lm.quantities import format_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would take, and whether there is room for it.

    Attributes:
        request, machine: what was asked.
        step: with all settings.
        reasons: why the settings that were left open are as they are.
        host, device, disk: budgets. Where the device is the host, its bytes are the host's.
        buffers: of the engine on the device, which ``device_memory`` may limit.
        download: the checkpoint, where it goes to another disk.
        time: None where nothing is known of the machine's rates.
        problems: what else stands in the way, as sentences.
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
    problems: Sequence[str] = ()

    @property
    def budgets(self) -> Sequence[Budget]:
        return (self.host, self.device, self.buffers, self.disk, self.download)

    @property
    def fits(self) -> bool:
        return not self.problems and not any(budget.deficit for budget in self.budgets)

    @property
    def memory_deficit(self) -> bool:
        """Something other than the disk is too small."""
        return any(budget.deficit for budget in self.budgets if budget.place not in ("disk", "download"))

    @property
    def run_seconds(self) -> float | None:
        """Of all steps."""
        if self.time is None or self.request.num_steps is None:
            return None
        return self.time.seconds * self.request.num_steps

    @property
    def load_seconds(self) -> float | None:
        """Of reading the weights, at most."""
        hardware = self.machine.hardware
        if hardware is None or not hardware.disk_read:
            return None
        return self.step.outline.sizes.num_parameters * self.request.stored_bytes / hardware.disk_read

    @property
    def curve(self) -> Curve | None:
        """Memory over a step."""
        return None if self.time is None else memory_curve(self.step, self.time.spans, self.host.num_bytes)


def describe_deficit(budget: Budget) -> str:
    """What is missing in one place."""
    assert budget.limit is not None
    return (
        f"{budget.place}: {format_bytes(budget.num_bytes)} are needed, {format_bytes(budget.limit.num_bytes)} are there "
        f"({budget.limit.name}), {format_bytes(budget.deficit)} are missing ({budget.deficit:,} bytes)"
    )


def make_plan(
    outline: ModelOutline, request: Request, machine: Machine, priced: bool = True, usual: ModelOutline | None = None
) -> Plan:
    """The plan of a run.

    Args:
        outline: of the model, for the longest rows of the run.
        priced: simulate a step, which takes a moment; without it there are only bytes.
        usual: for rows of the usual length, where seconds are not those of the longest.
    """
    choice = choose(outline, request, machine)
    step, use = choice.step, device_use(choice.step)
    on_device = [*_device_items(step, use), *_beside(machine)]
    host = _host_items(step, use, request, machine)
    typical = step if usual is None else replace(step, outline=usual)
    hardware, time = machine.hardware, None
    if hardware is not None and machine.lock_refusal:
        hardware = staged(hardware)
    if priced and hardware is not None and not outline.unknown:
        time = step_time(typical, hardware, machine.computing_threads, request.tokens_per_step)
    download = Item("download", request.download_bytes, "of the checkpoint to start from")
    return Plan(
        request,
        machine,
        step,
        [
            *choice.reasons,
            *([f"allow_unproven_model: {outline.unproven}"] if outline.unproven else ()),
            *([f"head: whole, because {outline.whole_head_only}"] if outline.whole_head_only else ()),
            *_about_staging(host, machine),
            *machine.notes,
            *_shorter_steps(typical, hardware, machine.computing_threads, time),
            *([f"{outline.unknown}, so activations and seconds are left out"] if outline.unknown else []),
        ],
        host=Budget("host", [item for item in host if item.num_bytes], machine.host_limits),
        device=Budget("device", [] if machine.on_host else on_device, [] if machine.on_host else machine.device_limits),
        disk=Budget(
            "disk",
            [*_disk_items(step, request), *([] if machine.download_limits or not download.num_bytes else [download])],
            machine.disk_limits,
        ),
        download=Budget(
            "download", [download] if machine.download_limits and download.num_bytes else [], machine.download_limits
        ),
        buffers=Budget(
            "buffers",
            [Item(*_named(kind, num_bytes)) for kind, num_bytes in use.buffers.items()],
            [Limit("device_memory", request.device_memory)] if request.device_memory is not None else [],
        ),
        time=time,
    )


def _shorter_steps(
    step: Step, hardware: Hardware | None, computing_threads: int | None, time: StepTime | None
) -> list[str]:
    """Name what shortens steps whose updates do not hide."""
    if hardware is None or time is None or time.limited_by != "update" or step.settings.moments != "float32":
        return []
    lighter = replace(step, settings=replace(step.settings, moments="bfloat16"))
    other = step_time(lighter, hardware, computing_threads)
    saved = 1 - other.seconds / time.seconds
    if saved < _WORTH_SAYING:
        return []
    return [f"updates take longer than what hides them: moments: bfloat16 would make a step {saved:.0%} shorter"]


_WORTH_SAYING = 0.02  # of a step
_WORKER_BYTES = 96 * 2**20  # of a process that compiles: torch, without what a run loads

_DEVICE_NAMES = {
    "weight_slots": ("weight slots", "two of the largest block"),
    "held_weights": ("held weights", "of blocks whose weights stay"),
    "grad_slots": ("gradient slots", "of the largest block"),
    "grad_accumulator": ("gradient accumulator", "of the largest block, in fp32"),
    "head_weights": ("head weights", ""),
    "head_grads": ("head gradients", ""),
    "outer_weights": ("outer weights", "final norm and whatever else is small"),
    "outer_grads": ("outer gradients", ""),
    "table_rows": ("embedding rows", "as many as a step can read"),
    "table_row_grads": ("embedding row gradients", ""),
    "boundary_ring": ("boundary ring", "boundaries on their way to host memory and back"),
}


def _device_items(step: Step, use: DeviceUse) -> list[Item]:
    residency, settings = step.settings.residency, step.settings
    rows = settings.slices[0]
    named = [Item(*_named(kind, num_bytes)) for kind, num_bytes in use.buffers.items()]
    stay = f"inputs of {step.staying} blocks, {format_bytes(step.boundary)} each"
    return [
        *named,
        *([Item("boundaries", use.kept, stay)] if use.kept else []),
        Item(
            "activations and head workspace",
            use.for_a_while,
            f"at their most: {rows} x {step.outline.length} tokens in a block"
            + (f", {residency.graphs} kept graphs" if residency.graphs else "")
            + (f", {settings.head_chunk_tokens} tokens' logits" if settings.chunked_head else ", all logits"),
        ),
        Item("masks and positions", use.shared, f"for {step.outline.attention} attention"),
    ]


def _named(kind: str, num_bytes: int) -> tuple[str, int, str]:
    name, note = _DEVICE_NAMES[kind]
    return name, num_bytes, note


def _beside(machine: Machine) -> list[Item]:
    """What is on the device besides the step."""
    limits = [limit.num_bytes for limit in machine.device_limits]
    margin = int(min(limits) * DEVICE_MARGIN) if limits else 0
    return [
        Item("transfers", machine.scratch_bytes, "conversions of two links"),
        Item("context", machine.device_context_bytes, "driver, libraries and their kernels: an allowance"),
        Item("margin", margin, f"{DEVICE_MARGIN:.0%} of the device, for what its allocator cannot use"),
    ]


_HOST_NAMES = {
    "weights": ("weights", "what is streamed"),
    "low_halves": ("low halves", "16 bits that make an exact fp32 master"),
    "grads": ("gradients", ""),
    "moments": ("moments", "two of AdamW"),
    "landing": ("landing slots", "gradients until their unit is updated"),
    "boundaries": ("boundaries", "inputs of blocks until the backward"),
}


def _host_items(step: Step, use: DeviceUse, request: Request, machine: Machine) -> list[Item]:
    kept = host_bytes(step.outline.sizes, step.outline.trained, step.host_settings())
    items = [Item(_HOST_NAMES[kind][0], num_bytes, _HOST_NAMES[kind][1]) for kind, num_bytes in kept.items()]
    if machine.on_host:
        items += [Item(f"device: {item.name}", item.num_bytes, item.note) for item in _device_items(step, use)]
    # After the last step no activations are there any more.
    workers = machine.compile_workers if request.compiled else 0
    largest = max(map(slab_elements, step.outline.sizes.units)) * request.export_bytes
    export = max(0, largest - (use.for_a_while if machine.on_host else 0))
    return [
        *items,
        Item("staging", machine.staging_bytes, "page-locked, for transfers that need it"),
        Item("export", export, "one unit as it is written"),
        Item("process", machine.process_bytes, "interpreter, libraries and rows"),
        Item("compilers", workers * _WORKER_BYTES, f"{workers} processes beside this one"),
    ]


def _about_staging(host: Sequence[Item], machine: Machine) -> list[str]:
    if not machine.lock_refusal:
        return []
    travels = sum(item.num_bytes for item in host if item.name in {_HOST_NAMES[kind][0] for kind in _TRAVELS})
    return [
        f"{format_bytes(travels)} of host memory that travels cannot be page-locked ({machine.lock_refusal}), so transfers go "
        "through staging buffers, which is slower"
    ]


_TRAVELS = ("weights", "grads", "landing", "boundaries")


def _disk_items(step: Step, request: Request) -> list[Item]:
    exported = step.outline.sizes.num_parameters * request.export_bytes
    items = [Item("exported model", exported, f"{request.export_bytes} bytes per parameter")]
    if request.num_checkpoints:
        kept = f"{request.num_checkpoints} kept on the way; save_total_limit keeps fewer"
        items.append(Item("checkpoints", request.num_checkpoints * exported, kept))
    return items
