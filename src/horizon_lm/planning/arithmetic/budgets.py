"""The budgets of a plan: what a run needs on the device, in host memory and on disk, item by item."""

from collections.abc import Mapping

from horizon_lm.common.constants import BATCHES_AHEAD, DEVICE_MARGIN
from horizon_lm.common.quantities import counted, format_bytes
from horizon_lm.planning.arithmetic.device_memory import DeviceUse
from horizon_lm.planning.arithmetic.host_memory import (
    checkpoint_bytes,
    checkpoint_files_bytes,
    host_bytes,
    largest_file_bytes,
)
from horizon_lm.planning.arithmetic.request import Budget, Limit, Machine, PlannedBytes
from horizon_lm.planning.arithmetic.step import Step

IMAGES = "images"
"""Name of the bytes of images, on the device and in host memory."""

_WORKER_BYTES = 96 * 2**20  # bytes of a compiler process: torch, without the libraries of a run
# The name and the note of each kind of buffers in a plan.
_DEVICE_NAMES = {
    "weight_slots": ("weight slots", "double-buffered, sized for the largest block"),
    "packed_slots": ("codes and scales", "gathered from all ranks before they are decoded"),
    "resident_weights": ("resident weights", "blocks that stay on the device"),
    "grad_slots": ("gradient slots", "sized for the largest block"),
    "grad_accumulator": ("gradient accumulator", "fp32, sized for the largest block"),
    "tile_slots": ("expert slots", "double-buffered, sized for the largest tile of experts"),
    "tile_packed_slots": ("expert codes and scales", "of a tile, gathered from all ranks before they are decoded"),
    "tile_grad_slots": ("expert gradient slots", "sized for the largest tile of experts"),
    "head_weights": ("head weights", ""),
    "head_grads": ("head gradients", ""),
    "outer_weights": ("outer weights", "final norm and other small parameters"),
    "outer_grads": ("outer gradients", ""),
    "table_rows": ("embedding rows", "maximum that a step can read"),
    "table_row_grads": ("embedding row gradients", ""),
    "boundary_ring": ("activation checkpoint ring", "double buffer of transfers to and from the host"),
}


def device_budget(step: Step, use: DeviceUse, machine: Machine) -> Budget:
    """Return the device memory of a run; it is empty if the device computes in host memory."""
    if machine.on_host:
        return Budget.of([])
    return Budget.of([*_device_items(step, use), *_reserved_items(machine)], machine.device_limits)


def buffer_budget(step: Step, use: DeviceUse) -> Budget:
    """Return the memory of the engine's buffers on the device, which ``device_memory`` may limit."""
    limit = step.settings.device_memory
    return Budget.of(_buffer_items(use), [] if limit is None else [Limit("device_memory", limit)])


def _device_items(step: Step, use: DeviceUse) -> list[PlannedBytes]:
    """Return the bytes that a step takes on the device, without the driver's and other memory of the process."""
    settings, items = step.settings, _buffer_items(use)
    if use.checkpoints:
        sizes = set(map(step.boundary_of, step.staying))
        each = f", {format_bytes(sizes.pop())} each" if len(sizes) == 1 else ""
        note = f"inputs of {counted(len(step.staying), 'block')}{each}"
        items.append(PlannedBytes("activation checkpoints", use.checkpoints, note))
    largest = settings.slices[0]  # rows of the first micro-batch; no other one has more
    parts = [f"peak, {largest} × {step.outline.length:,} tokens in a block"]
    if settings.residency.graphs:
        parts.append(counted(settings.residency.graphs, "resident graph"))
    parts.append("all logits" if settings.chunk_tokens is None else f"logits of {settings.chunk_tokens:,} tokens")
    items.append(PlannedBytes("activations and head workspace", use.activations, ", ".join(parts)))
    items.append(PlannedBytes("masks and positions", use.shared, f"for {step.outline.attention} attention"))
    if (images := step.outline.images) is not None:
        note = f"pixels and features of {counted(images.per_row * settings.rows, 'image')}"
        items.append(PlannedBytes(IMAGES, use.images, note))
    return items


def _buffer_items(use: DeviceUse) -> list[PlannedBytes]:
    return _named_items(use.buffers, _DEVICE_NAMES)


def _named_items(bytes_by_kind: Mapping[str, int], names: Mapping[str, tuple[str, str]]) -> list[PlannedBytes]:
    """Return an item for each kind of bytes, with the kind's name and note from ``names``, or named by its kind alone."""
    items = []
    for kind, num_bytes in bytes_by_kind.items():
        name, note = names.get(kind, (kind.replace("_", " "), ""))
        items.append(PlannedBytes(name, num_bytes, note))
    return items


_SOMETIMES = ("collectives", "display")  # left out of a plan if they take nothing


def _reserved_items(machine: Machine) -> list[PlannedBytes]:
    """Return the device memory that is not used by the step itself."""
    limits = [limit.bytes for limit in machine.device_limits]
    margin = int(min(limits) * DEVICE_MARGIN) if limits else 0
    items = [
        PlannedBytes("transfers", machine.scratch_bytes, "scratch space for dtype conversions, both directions"),
        PlannedBytes("collectives", machine.collective_bytes, "sums of gradients, and what NCCL takes (estimate)"),
        PlannedBytes("context", machine.device_context_bytes, "driver, libraries and their kernels (estimate)"),
        PlannedBytes(
            "display", machine.display_bytes, "of this desktop; nothing if no monitor is connected to the card"
        ),
        PlannedBytes("margin", margin, f"{DEVICE_MARGIN:.0%} of the device, for allocator fragmentation"),
    ]
    return [item for item in items if item.bytes or item.name not in _SOMETIMES]


_HOST_NAMES = {
    "weights": ("weights", "streamed to the device"),
    "packed_weights": ("quantized weights", "codes and scales, decoded on the device"),
    "low_halves": ("low halves", "the other 16 bits of the fp32 master weights"),
    "grads": ("gradients", ""),
    "landing": ("landing slots", "gradients until their update"),
    "boundaries": ("activation checkpoints", "block inputs, kept for the backward pass"),
}


def host_budget(step: Step, use: DeviceUse, machine: Machine) -> Budget:
    """Return the host memory of a run, and the device memory if the device computes in host memory."""
    optimizer = step.settings.optimizer
    names = {**_HOST_NAMES, "moments": ("moments", f"{optimizer.moments_held} ({optimizer.name})")}
    items = _named_items(host_bytes(step), names)
    if machine.on_host:
        items += [PlannedBytes(f"device: {item.name}", item.bytes, item.note) for item in _device_items(step, use)]
    workers = machine.compile_workers if step.settings.compiled else 0
    _, width = _exported_parameters(step)
    largest = _largest_export(step) * width
    # The export follows the last step, when the memory of activations is free again.
    export = max(0, largest - (use.activations if machine.on_host else 0))
    items += [
        PlannedBytes("staging", machine.staging_bytes, "page-locked transfer buffers"),
        PlannedBytes("export", export, "one unit while it is written"),
        PlannedBytes(
            IMAGES,
            _waiting_images(step, machine),
            f"pixels of a batch and of the next {BATCHES_AHEAD}, which are built meanwhile",
        ),
        PlannedBytes("process", machine.process_bytes, "interpreter, libraries and dataset"),
        PlannedBytes("compilers", workers * _WORKER_BYTES, f"{workers} torch.compile worker processes"),
    ]
    return Budget.of([item for item in items if item.bytes], machine.host_limits)


def _waiting_images(step: Step, machine: Machine) -> int:
    """Return the bytes of pixels in batches in host memory, at most. If the device computes there, it has those of the current one already."""
    images, settings = step.outline.images, step.settings
    if images is None:
        return 0
    num_current = 0 if machine.on_host else 1
    # During an evaluation, the next batches of the training wait, too. Only sample prompts, whose rows nothing reduces, have no images.
    evaluated = [
        images.pixels.at(each.rows) * (BATCHES_AHEAD + num_current) for each in settings.forwards if each.setting
    ]
    own = images.pixels.at(settings.rows)
    return BATCHES_AHEAD * own + max([num_current * own, *evaluated])


_TRANSFERRED = ("weights", "packed_weights", "grads", "landing", "boundaries")


def transferred_bytes(host: Budget) -> int:
    """Return the bytes of host memory that transfers to and from the device read or write."""
    names = {_HOST_NAMES[kind][0] for kind in _TRANSFERRED}
    return sum(item.bytes for item in host.items if item.name in names)


def disk_budget(step: Step, machine: Machine) -> Budget:
    """Return the disk space of a run: its exported model, checkpoints, records and, unless they go to another disk, its downloads."""
    _saved, width = _exported_parameters(step)
    exported, files = exported_bytes(step), step.settings.side_files
    of_adapters = " of the adapters" if step.outline.base_is_frozen else ""
    beside = f", and {format_bytes(files.model)} of tokenizer and configs" if files.model else ""
    items = [PlannedBytes("exported model", exported, f"{width} bytes per parameter{of_adapters}{beside}")]
    saves = step.settings.saves
    if saves.num:
        num_bytes = exported if saves.only_model or saves.with_model else files.model
        if not saves.only_model:
            num_bytes += checkpoint_bytes(step) + checkpoint_files_bytes(step)
        count = min(saves.num, saves.kept + 1)  # the oldest is deleted once the newest is complete
        note = f"{count} at once; {saves.num} x {format_bytes(num_bytes)} = {format_bytes(saves.num * num_bytes)} written over the run"
        items.append(PlannedBytes("checkpoints", count * num_bytes, note))
    if files.records:
        items.append(PlannedBytes("records", files.records, "settings, plan, metrics and pictures, at most"))
    if not machine.download_limits:
        items += _download_items(step)
    return Budget.of(items, machine.disk_limits)


def download_budget(step: Step, machine: Machine) -> Budget:
    """Return the disk space of the checkpoint download; it is empty unless it goes to another disk than the run."""
    return Budget.of(_download_items(step) if machine.download_limits else [], machine.download_limits)


def _download_items(step: Step) -> list[PlannedBytes]:
    num_bytes = step.settings.download_bytes
    return [PlannedBytes("download", num_bytes, "the checkpoint to start from")] if num_bytes else []


def _exported_parameters(step: Step) -> tuple[int, int]:
    """Return the number of parameters that are exported, and the bytes of each. With adapters, PEFT exports only these, in float32."""
    outline, layout = step.outline, step.outline.layout
    return (layout.num_trained, 4) if outline.base_is_frozen else (layout.num_parameters, step.settings.export_bytes)


def _largest_export(step: Step) -> int:
    """Return the exported elements of the unit that has the most; with a frozen base, of its trained ones."""
    units = step.outline.layout.units.values()
    if step.outline.base_is_frozen:
        return max(slab.grad_layout.numel for unit in units for slab in unit.of_weights)
    return max(buffer.numel for unit in units for buffer in unit.layout.buffers)


def exported_bytes(step: Step) -> int:
    """Return the bytes of the folder of the exported model."""
    saved, width = _exported_parameters(step)
    return saved * width + step.settings.side_files.model


_LARGEST_FILE = 50 * 10**9  # bytes of a file of an exported model; a larger model is cut into several files


def file_problems(step: Step, machine: Machine) -> list[str]:
    """Return a sentence for each kind of file that would exceed the limit on the size of a file, even with room on the disk."""
    if machine.file_limit is None:
        return []
    saved, width = _exported_parameters(step)
    files = [("the exported model", min(saved * width, _LARGEST_FILE))]
    if step.settings.saves.num and not step.settings.saves.only_model:
        files.append(("a checkpoint", largest_file_bytes(step)))
    return [
        f"A file may have at most {format_bytes(machine.file_limit)} (ulimit -f), and {name} needs one of {format_bytes(num_bytes)}; "
        "raise the limit: ulimit -f unlimited."
        for name, num_bytes in files
        if num_bytes > machine.file_limit
    ]
