"""The input of a plan: the settings of a run, the machine, and the bytes available in each place."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from horizon_lm.plan.catalog import Hardware


@dataclass(frozen=True, slots=True)
class Item:
    """What some bytes are for. ``note``: how they come about, if the name does not say it."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """What bounds the bytes of a place."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of one place.

    Attributes:
        place: ``host``, ``device``, ``buffers`` (the engine's, on the device) or ``disk``.
        limits: what bounds them; none if nothing is known.
    """

    place: str
    items: Sequence[Item]
    limits: Sequence[Limit] = field(default=())

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def limit(self) -> Limit | None:
        """The smallest."""
        return min(self.limits, key=lambda limit: limit.num_bytes, default=None)

    @property
    def available(self) -> int | None:
        return None if self.limit is None else self.limit.num_bytes

    @property
    def deficit(self) -> int:
        """Bytes that are missing; 0 if it fits, or nothing bounds it."""
        return 0 if self.available is None else max(0, self.num_bytes - self.available)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A batch of which no gradients are wanted: held-out rows, rows of which a reference is needed, a sample prompt.

    Attributes:
        rows: sequences of tokens.
        length: tokens of the longest.
        setting: of a run, by which there may be fewer rows; empty if there is none.
        kept_bytes: that stay on the device meanwhile: keys and values.
    """

    rows: int
    length: int
    setting: str = ""
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSettings:
    """What of a run's settings and rows is not the plan's to choose, and shapes a step.

    Attributes:
        precision, moments, update_in_backward: as in a run's settings.
        grad_bytes: of an element of the gradient store.
        compiled: blocks are compiled.
        forwards: other batches of the run.
        distinct_tokens: that there are in all rows; None if that is not known.
    """

    precision: str = "fp32_master"
    moments: str = "float32"
    grad_bytes: int = 2
    update_in_backward: bool = False
    compiled: bool = False
    forwards: tuple[ForwardBatch, ...] = ()
    distinct_tokens: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """These alone, by name."""
        return {each.name: getattr(self, each.name) for each in fields(FixedSettings)}


@dataclass(frozen=True, slots=True)
class Request(FixedSettings):
    """Settings of a run, with the names that they have there; None where the plan is to choose.

    Attributes:
        sequences: of tokens in a row: two in a preference.
        tokens_per_step: without padding, as steps go; None for as many as there are places.
        num_steps: None if it is not known.
        export_bytes, stored_bytes: of an element of the exported model, and of the checkpoint to start from.
        num_checkpoints: exports on the way that are there at once.
        download_bytes: of the checkpoint to start from, if it has to be fetched.
        has_grad_dtype: the run says how gradients are kept.
        skips_steps: a step with a gradient that is not finite is left out.
    """

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    sequences: int = 1
    device_micro_batch_size: int | None = None
    head: str = "chunked"
    head_chunk_tokens: int | None = None
    activation_checkpoints: str | int = "auto"
    resident_blocks: int | None = None
    resident_graphs: int | None = None
    device_memory: int | None = None
    tokens_per_step: float | None = None
    num_steps: int | None = None
    export_bytes: int = 2
    stored_bytes: int = 2
    num_checkpoints: int = 0
    download_bytes: int = 0
    has_grad_dtype: bool = False
    skips_steps: bool = False

    @property
    def rows(self) -> int:
        """Sequences of a step: rows of its batch."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.sequences


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the run would be.

    Attributes:
        name: for people.
        on_host: the device is the host's cores, and its memory is the host's.
        hardware: rates; None if nothing is known, and then a plan has no seconds.
        host_limits, device_limits, disk_limits: bytes that the run may come to take in all.
        download_limits: the same of the disk that a checkpoint is fetched to, where that is another one.
        process_bytes: what the process takes besides the run: the interpreter, libraries, rows.
        device_context_bytes: what the driver and the libraries on it take on the device.
        scratch_bytes: of the device, that transfers take at most.
        staging_bytes: of page-locked host memory for transfers.
        lock_refusal: why host memory cannot be page-locked, so that transfers are staged; empty if it can.
        notes: what else a run would want to know of it, as sentences.
        compile_workers: processes that compile, where blocks are compiled.
        computing_threads: that computation takes on the host; None for all cores.
    """

    name: str
    on_host: bool
    hardware: Hardware | None
    host_limits: Sequence[Limit] = field(default=())
    device_limits: Sequence[Limit] = field(default=())
    disk_limits: Sequence[Limit] = field(default=())
    download_limits: Sequence[Limit] = field(default=())
    process_bytes: int = 0
    device_context_bytes: int = 0
    scratch_bytes: int = 0
    staging_bytes: int = 0
    lock_refusal: str = ""
    notes: Sequence[str] = field(default=())
    compile_workers: int = 0
    computing_threads: int | None = None
