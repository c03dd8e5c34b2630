"""The input of a plan: the settings of the run, the machine, and the bytes available in each place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horizon_lm.common.optimizers import ADAMW, OptimizerEntry
from horizon_lm.common.quantities import Item, format_bytes
from horizon_lm.common.streaming_options import StreamingOptions, chosen
from horizon_lm.memory.layout.ranks import WHOLE, Shard
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.interconnect import Interconnect


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """A number of bytes with one purpose. ``note``: an explanation, if the name does not suffice."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper bound on the bytes in one place."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes needed and available in one place.

    Attributes:
        items: bytes by purpose; empty if nothing is needed there, as on the device if it computes in host memory.
        bytes: their sum.
        available: the smallest of ``limits``; None if none is known.
        limits: upper bounds.
    """

    items: list[PlannedBytes]
    bytes: int
    available: int | None
    limits: list[Limit]

    @classmethod
    def of(cls, items: Sequence[PlannedBytes], limits: Sequence[Limit] = ()) -> "Budget":
        """Return the budget of these items."""
        available = min((limit.bytes for limit in limits), default=None)
        return cls(list(items), sum(item.bytes for item in items), available, list(limits))

    @property
    def table(self) -> list[Item]:
        """The bytes by purpose, to print."""
        return [Item(each.name, each.bytes, format_bytes, each.note) for each in self.items]

    @property
    def limit(self) -> Limit | None:
        """The smallest limit, or None if there is no limit."""
        return min(self.limits, key=lambda limit: limit.bytes, default=None)

    @property
    def deficit(self) -> int:
        """Number of missing bytes; 0 if the place suffices or has no limit."""
        return 0 if self.available is None else max(0, self.bytes - self.available)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """A batch without gradients: evaluation, DPO's reference, or a sample prompt.

    Attributes:
        rows: number of sequences.
        length: tokens of the longest sequence.
        setting: the setting that can reduce the rows; empty if there is none.
        kept_bytes: bytes of keys and values that stay on the device during the batch.
    """

    rows: int
    length: int
    setting: str = ""
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Saves:
    """The checkpoints of a run.

    Attributes:
        num: maximum number of checkpoints that are written over the run.
        of_best: number of these that are written only because an evaluation has found a better model.
        kept: maximum number of complete checkpoints on disk; one more is being written beside them.
        only_model: checkpoints are exports of the model, without the optimizer's state.
        with_model: checkpoints have an export of the model beside the state, like a Trainer's.
    """

    num: int = 0
    of_best: int = 0
    kept: int = 0
    only_model: bool = False
    with_model: bool = False


@dataclass(frozen=True, slots=True)
class SideFiles:
    """The bytes of the files of a run that hold no weights, gradients or moments.

    Attributes:
        model: bytes of a saved model: tokenizer, configs, and the headers of the weights.
        records: bytes of the run's records: settings, plan, metrics, samples and pictures.
    """

    model: int = 0
    records: int = 0


@dataclass(frozen=True)
class Request(StreamingOptions):
    """Settings of a run, with the names used there; None leaves the choice to the planner.

    Attributes:
        optimizer: the optimizer of the run.
        optimizers: the optimizers that may be proposed as remedies, by their names in run files.
        moments, update_in_backward: as in a run's settings. A plan's request has the moments that were chosen.
        grad_bytes: bytes of an element of the gradient store.
        compiled: blocks are compiled.
        forwards: batches without gradients.
        distinct_tokens: number of distinct tokens in all examples; None if unknown.
        shard: the range of each slab that this rank owns.
        num_ranks: number of ranks that train together.
        sequences: sequences of an example: two in a preference pair.
        tokens_per_step: tokens of a typical step, without padding; None for a step without padding.
        num_steps: optimizer steps of the run; None if unknown.
        export_bytes: bytes per element of the exported model.
        stored_bytes: bytes of the initial checkpoint.
        saves: checkpoints of the run.
        side_files: files without weights.
        download_bytes: bytes of the initial checkpoint; 0 if it is on this machine.
        skips_steps: steps with non-finite gradients are skipped.
        clips_gradients: gradients are clipped by their global norm.
    """

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    sequences: int = 1
    tokens_per_step: float | None = None
    num_steps: int | None = None
    export_bytes: int = 2
    stored_bytes: int = 0
    saves: Saves = Saves()
    side_files: SideFiles = SideFiles()
    download_bytes: int = 0
    skips_steps: bool = False
    clips_gradients: bool = False
    optimizer: OptimizerEntry = ADAMW
    optimizers: Mapping[str, OptimizerEntry] = field(default_factory=dict)
    moments: str = chosen("float32")
    grad_bytes: int = 2
    update_in_backward: bool = False
    compiled: bool = False
    forwards: tuple[ForwardBatch, ...] = ()
    distinct_tokens: int | None = None
    shard: Shard = WHOLE
    num_ranks: int = 1

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model."""
        return self.num_ranks // self.shard.count

    @property
    def rows(self) -> int:
        """Number of sequences in a step's batch, B."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.sequences


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a run.

    Attributes:
        name: display name.
        on_host: the device is the host's CPU and uses host memory.
        hardware: rates; None if unknown, in which case the plan has no times.
        host_limits, device_limits, disk_limits: upper bounds on the total bytes of the run.
        file_limit: the largest size of a file; None if there is no limit.
        download_limits: upper bounds on the disk of downloaded checkpoints, if that is a different disk.
        process_bytes: host bytes of the process: interpreter, libraries and dataset.
        device_context_bytes: device bytes of the driver and its libraries.
        scratch_bytes: maximum device bytes for transfers.
        collective_bytes: device bytes that collectives of several ranks take; 0 if they have taken them already.
        is_connected: the ranks are running, so their collectives have taken this memory, and the device's limits are without it.
        staging_bytes: bytes of page-locked host memory for transfers.
        page_lock_error: reason why host memory cannot be page-locked, so that transfers are staged; empty if it can.
        display_bytes: device bytes that the machine's own display takes.
        notes: further remarks for the run's log, as sentences.
        remarks: remarks about the machine's figures, for the details of a plan.
        compile_workers: number of compiler processes, if blocks are compiled.
        computing_threads: number of host threads that compute; None for all cores.
        num_processes: number of processes of a machine, which share it equally: what is described here is the share of one of them.
        interconnect: the links between the devices of several ranks; None for one rank, or if they are unknown.
    """

    name: str
    on_host: bool
    hardware: Hardware | None
    host_limits: Sequence[Limit] = field(default=())
    device_limits: Sequence[Limit] = field(default=())
    disk_limits: Sequence[Limit] = field(default=())
    file_limit: int | None = None
    download_limits: Sequence[Limit] = field(default=())
    process_bytes: int = 0
    device_context_bytes: int = 0
    scratch_bytes: int = 0
    collective_bytes: int = 0
    is_connected: bool = False
    staging_bytes: int = 0
    page_lock_error: str = ""
    display_bytes: int = 0
    notes: Sequence[str] = field(default=())
    remarks: Sequence[str] = field(default=())
    compile_workers: int = 0
    computing_threads: int | None = None
    num_processes: int = 1
    interconnect: Interconnect | None = None

    @property
    def reserved_bytes(self) -> int:
        """Device bytes that are in use beside a step."""
        return self.device_context_bytes + self.scratch_bytes + self.collective_bytes + self.display_bytes
