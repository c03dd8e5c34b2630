"""The processes of a run that torchrun has started, one for each device: what they agree on, and what each one does."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from horizon_lm.distributed.mesh import ALONE, Mesh, ProcessMesh
from horizon_lm.distributed.monitor import Monitor, leave_failures_to_monitor
from horizon_lm.distributed.rendezvous import init_process_group, is_first_of_machine, wait_for_others
from horizon_lm.engine.opening.options import device_of
from horizon_lm.errors import (
    ConfigError,
    DisagreementError,
    HorizonError,
    InterruptedRunError,
    RankLostError,
    first_line,
)
from horizon_lm.model.adapters import Adapters
from horizon_lm.runs.checkpoints.manifest import verify_copies
from horizon_lm.runs.config.rules import PerMachine
from horizon_lm.runs.config.run import RunConfig, settings_with
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.energy import Energy
from horizon_lm.runs.training.intervals import Control
from horizon_lm.runs.training.metrics import StepResult
from horizon_lm.runs.training.resume import find_resume_point, open_point, settings_of
from horizon_lm.runs.training.run_state import ResumePoint

_LONGEST_WAIT = timedelta(days=7)


class Ranks:
    """Context manager: the ranks of a run. Without torchrun there is one, and nothing is exchanged.

    Attributes:
        mesh: the mesh.
        rank, size: the rank of this process, and the number of ranks.
    """

    def __init__(self, mesh: Mesh = ALONE) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.rank, mesh.size
        self._owns_group = False
        self._monitor: Monitor | None = None

    @classmethod
    def start(cls, config: RunConfig) -> "Ranks":
        """Join the other processes of a run that torchrun has started.

        Raises:
            ConfigError: a setting is not supported with several processes.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1 or "RANK" not in os.environ:
            return cls()
        owns_group = not dist.is_initialized()  # otherwise the caller's, to be left as it is
        try:
            if owns_group:
                wait_for_others()
                if config.device.startswith("cuda"):
                    torch.cuda.set_device(config.device)
                    leave_failures_to_monitor()
                init_process_group("cpu:gloo,cuda:nccl" if config.device.startswith("cuda") else "gloo")
            mesh = _join(config, world)
        except HorizonError as error:  # which all ranks raise: one of each machine reports it
            error.is_reported = not is_first_of_machine()
            raise
        ranks = cls(mesh)
        ranks._owns_group, ranks._monitor = owns_group, Monitor(mesh, config.rank_timeout)
        mesh.connect()  # once the monitor runs, because a rank that is gone would never connect
        return ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report the end of this rank to the others, and leave them. Raise InterruptedRunError if one of them is lost."""
        reason_of_loss: str | None = None
        if self._monitor is not None:
            is_lost = isinstance(error, RankLostError)
            if is_lost:
                reason_of_loss = self._monitor.reason()
            # The loss of another rank is no failure of this one.
            failure = "" if error is None or is_lost else f"{type(error).__name__}: {first_line(error)}"
            first_reports_it = self._monitor.stop(failure)
            if isinstance(error, HorizonError):
                error.is_reported = first_reports_it and not is_first_of_machine()
        if self._owns_group and dist.is_initialized() and error is None:  # else it would wait for ranks that are gone
            dist.destroy_process_group()
        if reason_of_loss is not None:
            raise InterruptedRunError(
                f"{reason_of_loss}. Start the run again to go on from its last checkpoint"
            ) from error

    def watch_progress(self) -> None:
        """Let the monitor report a rank that stays behind, once all ranks do the same at the same time."""
        if self._monitor is not None:
            self._monitor.watches_progress = True

    @property
    def is_first(self) -> bool:
        """True for the rank that prints, and writes the folder of the run."""
        return self.rank == 0

    def find_resume_point(self, config: RunConfig) -> tuple[ResumePoint | None, list[str]]:
        """Return the checkpoint to go on from, and lines to print (`resume.find_resume_point`).

        The first rank searches, and verifies its copy on the way. Each other copy of the files is verified by one rank that sees it.

        Raises:
            ConfigError: as `resume.find_resume_point` raises it, on all ranks.
        """
        if self.size == 1:
            return find_resume_point(config)
        point, lines, problem = None, list[str](), ""
        if self.is_first:
            try:
                point, lines = find_resume_point(config)
            except ConfigError as error:
                problem = str(error)
        folder = None if point is None else str(point.folder)
        folder, lines, problem = self.of_first("the search for checkpoints", [folder, lines, problem])
        if problem:
            raise ConfigError(problem)
        if folder is None:
            return None, lines
        verify_copies(self.mesh, Path(folder), is_verified=True)
        return point or open_point(Path(folder), verifies=False), lines  # other ranks than the first open it here

    @contextmanager
    def first_of_each_machine_first(self) -> Iterator[None]:
        """Context manager: do the enclosed work on the first rank of each machine, then on its other ranks, which find the files made by it."""
        is_late = self.size > 1 and not is_first_of_machine()
        if is_late:
            self.wait_for_all("the files of the first rank of this machine")
        yield
        if not is_late:
            self.wait_for_all("the files of the first rank of this machine")

    def exchange(self, place: str, value: Any) -> list[Any]:
        """Return the values of all ranks, which are plain data, at the same place of the program."""
        return self.mesh.exchange(place, value)

    def wait_for_all(self, place: str) -> None:
        """Wait until all ranks are at the same place of the program."""
        self.exchange(place, None)

    def of_first(self, place: str, value: Any) -> Any:
        """Return the first rank's value, which is plain data."""
        return self.exchange(place, value)[0]

    @contextmanager
    def failing_with_first(self, place: str) -> Iterator[None]:
        """Context manager: if the enclosed work fails on the first rank, raise its error there and OSError on the others. Other ranks'
        errors are ignored, unless a rank is lost or all disagree.
        """
        problem: Exception | None = None
        try:
            yield
        except (RankLostError, DisagreementError):
            raise
        except Exception as error:
            problem = error
        text = self.of_first(place, "" if problem is None else f"{type(problem).__name__}: {first_line(problem)}")
        if problem is not None and self.is_first:
            raise problem
        if text:
            raise OSError(text)

    def agree(self, place: str, value: str) -> str:
        """Return the first text of the ranks that is not empty; an empty one if all are."""
        return next((each for each in self.exchange(place, value) if each), "")

    def agree_on_control(self, own: Control) -> Control:
        """Return the actions that are requested on any rank."""
        return Control.of_all(self.exchange("the requests of the parts", astuple(own)))

    def sum(self, place: str, value: float) -> float:
        """Return the sum of a number over all ranks, in their order."""
        return math.fsum(self.exchange(place, value))

    def with_totals(self, batch: Batch) -> Batch:
        """Return this rank's batch of a step, with the number of targets and the origins of the rows of the whole step."""
        if self.size == 1:
            return batch
        of_this_rank = [0 if batch.is_stand_in else batch.num_trained, batch.places]
        everyone = self.mesh.exchange("the rows of a step", of_this_rank)
        places = tuple(place for _, of_rank in everyone for place in of_rank)
        return replace(batch, num_trained_of_step=sum(number for number, _ in everyone), places_of_step=places)

    def require_same_rows(self, hashes: Mapping[str, tuple[int, str]]) -> None:
        """Raise ConfigError on all ranks if one of them has read other rows than the first.

        Args:
            hashes: the number of rows and their hash, by the name of each part of the data.
        """
        everyone = self.exchange("the rows", hashes)
        of_first = everyone[0]
        for rank, of_rank in enumerate(everyone):
            for name, (count, _hash) in of_first.items():
                if of_rank.get(name) != of_first[name]:
                    other, _hash = of_rank.get(name, (0, ""))
                    differ = f"{other:,} and {count:,}" if other != count else f"{count:,} each, with other content"
                    raise ConfigError(
                        f"{name}: rank {rank} has read other rows than rank 0 ({differ}); all processes must read the same files, with the "
                        "same tokenizer"
                    )

    def total(self, own: StepResult) -> StepResult:
        """Return the result of a step on all ranks: the mean of their losses, and the sums of everything else."""
        received = self.mesh.exchange("the result of a step", astuple(own))
        # `astuple` turns the energy, which is the last field, into a tuple, too.
        everyone = [replace(StepResult(*fields), energy=Energy(*joules)) for *fields, joules in received]
        return StepResult(
            value=sum(each.value / len(everyone) for each in everyone), weight=sum(each.weight for each in everyone),
            metrics={name: sum(each.metrics[name] for each in everyone) for name in own.metrics},
            token_sums={name: _sum_micro_batches([each.token_sums[name] for each in everyone]) for name in own.token_sums},
            num_rows=sum(each.num_rows for each in everyone), num_trained=sum(each.num_trained for each in everyone),
            num_tokens=sum(each.num_tokens for each in everyone), energy=sum((each.energy for each in everyone), Energy(0.0, 0.0)),
        )  # fmt: skip


def _sum_micro_batches(ranks: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[float, int]]:
    """Add up the sums and numbers of targets of the ranks' first micro-batches, of their second ones, and so on, as in TRL."""
    at_same_time = zip_longest(*ranks, fillvalue=(0.0, 0))  # a rank may have fewer than others
    return [(sum(total for total, _ in each), sum(count for _, count in each)) for each in at_same_time]


def _join(config: RunConfig, world: int) -> ProcessMesh:
    """Return the mesh of a run. Raise ConfigError if it is not supported, or processes have other settings."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    # Ranks may wait for hours, while the first one reads rows. If a rank is gone, the monitor ends the ranks that wait for it.
    mesh = ProcessMesh(*mesh_shape(config, world, local), timeout=_LONGEST_WAIT, device=device_of(config.device))
    _require_same_settings(mesh, config)
    reject_unsupported(config, world)
    return mesh


def _require_same_settings(mesh: Mesh, config: RunConfig) -> None:
    """Raise ConfigError on all ranks if a setting that decides the training differs between them."""
    may_differ = settings_with(PerMachine())
    own = {name: value for name, value in settings_of(config).items() if name not in may_differ}
    everyone = mesh.exchange("the settings of the run", own)
    first = everyone[0]
    for rank, each in enumerate(everyone):
        for name in {**first, **each}:
            if first.get(name) != each.get(name):
                raise ConfigError(
                    f"{name} is {first.get(name)!r} for rank 0 and {each.get(name)!r} for rank {rank}; start all processes with the same run file"
                )


def mesh_shape(config: RunConfig, world: int, local: int) -> tuple[int, int]:
    """Return the numbers of copies of the model, and of ranges of each copy.

    Args:
        config: settings of the run.
        world: number of processes.
        local: number of processes of each machine.

    Raises:
        ConfigError: the settings do not give as many processes.
    """
    if config.dp_shard_size:
        shard = config.dp_shard_size
    elif config.dp_replicate_size:
        shard = world // config.dp_replicate_size
    else:
        shard = local  # a copy of the model on each machine
    replicate = config.dp_replicate_size or world // shard
    if replicate * shard == world:
        return replicate, shard
    sizes = {"dp_replicate_size": config.dp_replicate_size, "dp_shard_size": config.dp_shard_size}
    given = [f"{name} {size}" for name, size in sizes.items() if size]
    if len(given) == 2:
        raise ConfigError(f"{' x '.join(given)} is not the number of processes, {world}; change one of them")
    problem = given[0] if given else f"the number of processes of a machine, {local},"
    name = "dp_replicate_size" if config.dp_replicate_size else "dp_shard_size"
    raise ConfigError(f"{problem} does not divide the number of all processes, {world}; set a {name} that does")


def reject_unsupported(config: RunConfig, world: int) -> None:
    """Raise ConfigError for a setting that several processes do not support yet."""
    adapters = Adapters.of(config)
    if adapters is not None and adapters.setting_that_copies:
        name = adapters.setting_that_copies
        remedy = "save such adapters with one process, and go on with them (adapter_name_or_path)"
    elif config.check_gradients:
        name, remedy = "check_gradients", "check with one process"
    else:
        return
    raise ConfigError(f"{name} is not supported with {world} processes yet; {remedy}")
