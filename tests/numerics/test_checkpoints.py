"""A checkpoint has the bits of the moment in which it was asked for, while training goes on and is not disturbed."""

import random
import threading
import tracemalloc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("xxhash", reason="needs the whole installation")

import horizon_lm
from horizon_lm.common.disk import Disk
from horizon_lm.common.quantities import page_aligned
from horizon_lm.common.units import HEAD, OUTER, block
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.optim import update_tasks
from horizon_lm.runs.checkpoints import manifest
from horizon_lm.runs.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from horizon_lm.runs.checkpoints.plain_state import random_state
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import LastUse, Schedule, ScheduleError, Stream, Wait
from tests.support import tiny_models
from tests.support.checkpointed_training import BUFFERED, Digests, digest, opened
from tests.support.schedule_proofs import each_wait, without_wait
from tests.support.tensor_memory import StorageMeter
from tests.support.thinned_cases import thinned
from tests.support.threaded_device import ThreadedDevice
from tests.support.training_steps import step


def states(num_steps: int, device: Any = "cpu", **options: Any) -> list[Digests]:
    """Return what is in memory after each step, without checkpoints."""
    model, optimizer = opened(device, **options)
    found = []
    for number in range(num_steps):
        step(model, optimizer, number)
        found.append(digest(model, optimizer))
    return found


def train_and_save(device: Any, folder: Path, saved_after: tuple[int, ...], num_steps: int, **options: Any) -> Digests:
    """Train, write checkpoints while training goes on, and return what is in memory at the end."""
    model, optimizer = opened(device, **options)
    for number in range(num_steps):
        step(model, optimizer, number)
        if number in saved_after:
            saving = save_checkpoint(folder / f"after-{number}", model, optimizer, wait=False)
    saving.wait()
    return digest(model, optimizer)


def loaded(folder: Path, **options: Any) -> Digests:
    """Return what a new model has after a checkpoint is loaded."""
    model, optimizer = opened("cpu", **options | {"seed": 1})
    load_checkpoint(folder, model, optimizer)
    return digest(model, optimizer)


def test_loading_allocates_a_chunk_for_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read into the slabs to which their bytes belong, so a resumed run has the peak of a new one."""
    monkeypatch.setattr(manifest, "usable_cores", lambda: 2)  # threads, each with a buffer of a quarter of a MiB
    size = {"hidden_size": 256, "intermediate_size": 1024}
    (saved, optimizer), (model, another) = (opened(precision="fp32_master", size=size, seed=seed) for seed in (0, 1))
    save_checkpoint(tmp_path / "saved", saved, optimizer)
    smallest_block = min(path.stat().st_size for path in (tmp_path / "saved" / "units").glob("block*"))
    assert smallest_block > 8 << 20
    kept = horizon_lm.stats(model)["host_bytes"]
    load_checkpoint(tmp_path / "saved", saved, optimizer)  # whatever is imported for it
    tracemalloc.start()
    try:
        with StorageMeter() as meter:
            load_checkpoint(tmp_path / "saved", model, another)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert digest(model, another) == digest(saved, optimizer)
    assert horizon_lm.stats(model)["host_bytes"] == kept
    assert meter.peak + peak < smallest_block / 8


class WatchedDisk(Disk):
    """Writes once a gate is open, and keeps the addresses of what is written directly from memory."""

    def __init__(self) -> None:
        self.gate, self.written = threading.Event(), list[tuple[int, int]]()

    @contextmanager
    def create(self, path: Path, *, direct: bool = False) -> Iterator[Any]:  # type: ignore[override]
        with super().create(path, direct=direct) as file:
            yield SimpleNamespace(write=lambda data: self._write(file, data, direct))

    def _write(self, file: Any, data: Any, direct: bool) -> None:
        if direct:
            self.gate.wait()
            self.written.append((np.frombuffer(data, np.uint8).ctypes.data, len(data)))
        file.write(data)


def test_a_save_copies_nothing_and_delays_updates_alone(tmp_path: Path) -> None:
    """Each byte of the units is written from its slab; a pass runs on while nothing is written, and each update waits."""
    expected = states(2, precision="fp32_master")
    model, optimizer = opened(precision="fp32_master")
    engine, disk = model._horizon.engine, WatchedDisk()
    step(model, optimizer, 0)
    before = sum(engine.store.num_bytes.values())
    saving = save_checkpoint(tmp_path / "one", model, optimizer, wait=False, disk=disk)
    model(**tiny_models.batch(seed=1)).loss.backward()
    optimizer.step()
    waiting = {task.op.unit for task in engine.updates._running if any(not each.done for each in task.waits)}
    assert waiting == {OUTER, block(0), block(1), block(2), HEAD}
    assert not disk.written
    assert sum(engine.store.num_bytes.values()) == before
    disk.gate.set()
    optimizer.zero_grad()
    saving.wait()
    assert digest(model, optimizer) == expected[1]
    assert loaded(tmp_path / "one", precision="fp32_master") == expected[0]
    slabs = [
        (slab.data_ptr(), page_aligned(slab.numel() * slab.element_size()))
        for each in engine.store.slabs
        for slab in (each.weights, each.low, *(own.values for own in optimizer.moments.slabs[each].values()))
        if slab is not None
    ]
    copied = [size for at, size in disk.written if not any(start <= at < start + room for start, room in slabs)]
    assert len(copied) == len(list((tmp_path / "one" / "units").iterdir()))  # the files' headers
    assert max(copied) <= 4 * 4096


def test_state_arrays_and_random_generators_travel_with_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = opened()
    step(model, optimizer, 0)
    array = torch.arange(5.0)
    before = random_state()
    saving = save_checkpoint(tmp_path / "one", model, optimizer, state={"epoch": 3}, arrays={"kept": array}, wait=False)
    array.zero_()  # the checkpoint has the values of the call
    torch.rand(3), random.random()
    saving.wait()
    assert load_checkpoint(tmp_path / "one", model, optimizer) == {"epoch": 3}
    assert random_state() == before
    with safe_open(tmp_path / "one" / "arrays.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("kept"), torch.arange(5.0))


def test_settings_that_are_tensors_are_saved_as_numbers(tmp_path: Path) -> None:
    """A learning rate is a tensor in loops that compile, and a number of numpy if the function of a scheduler returns one."""
    model, optimizer = opened()
    (group,) = optimizer.param_groups
    group.update(lr=torch.tensor(0.5), weight_decay=np.float32(0.25), betas=(torch.tensor(0.5), np.float32(0.75)))
    save_checkpoint(tmp_path / "one", model, optimizer)
    group.update(lr=1.0, weight_decay=1.0, betas=(0.0, 0.0))
    load_checkpoint(tmp_path / "one", model, optimizer)
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.25, (0.5, 0.75))


def test_the_state_of_a_scheduler_is_that_of_its_numbers(tmp_path: Path) -> None:
    """MultiStepLR counts its milestones by their numbers, which are texts as keys in JSON, and would never come again."""
    model, _ = opened("cpu")
    optimizers = [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0) for _ in range(2)]
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(each, milestones=[3], gamma=0.5) for each in optimizers]
    own = {
        "a": Counter({3: 1}),
        "b": (1, [2.5, None]),
        "c": {4: "x"},
        "d": {"horizon_lm.type": True},
        "e": OrderedDict(f=1),
    }
    save_checkpoint(tmp_path / "one", model, state={"scheduler": schedulers[0].state_dict(), **own})
    found = load_checkpoint(tmp_path / "one", model)
    schedulers[1].load_state_dict(found.pop("scheduler"))
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        assert scheduler.get_last_lr() == [0.5]
    assert found == own
    assert type(found["a"]) is Counter
    with pytest.raises(ConfigError, match="the state of a checkpoint has a Tensor, which a checkpoint cannot hold"):
        save_checkpoint(tmp_path / "two", model, state={"tensor": torch.ones(1)})


def test_an_exported_model_has_the_files_of_its_tokenizer(tmp_path: Path) -> None:
    model, _ = opened("cpu")

    def add_files(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")

    save_checkpoint(tmp_path / "one", model, add_files=add_files)
    horizon_lm.export_checkpoint(tmp_path / "one", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert not (tmp_path / "out" / "units").exists()


def test_a_checkpoint_is_no_model_until_it_is_exported(tmp_path: Path) -> None:
    model, optimizer = opened()
    save_checkpoint(tmp_path / "one", model, optimizer)
    with pytest.raises(ConfigError, match=r"is a checkpoint of a run; .* horizon-lm export .*one OUT"):
        horizon_lm.from_pretrained(tmp_path / "one")


def test_weights_load_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = opened(precision="fp32_master")
    step(model, optimizer, 0)
    save_checkpoint(tmp_path / "one", model, optimizer)
    other = horizon_lm.stream(tiny_models.build("llama", 1), "cpu", precision="fp32_master")
    load_checkpoint(tmp_path / "one", other)
    for name in model._horizon.engine.store.unit_of:
        masters = [each._horizon.engine.store.master(name) for each in (model, other)]
        assert torch.equal(*masters), name


def test_a_model_without_optimizer_is_saved(tmp_path: Path) -> None:
    model, optimizer = opened()
    save_checkpoint(tmp_path / "one", model)
    with pytest.raises(ConfigError, match="moments None"):
        load_checkpoint(tmp_path / "one", model, optimizer)
    other, _ = opened(seed=1)
    load_checkpoint(tmp_path / "one", other)
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"precision": "float32"}, "precision bf16"),
    "moments": ({"moments": "8bit"}, "moments float32"),
    "family": ({"family": "gpt2"}, "another model"),
    "buffers": ({"family": BUFFERED}, "another model"),
    "tied": ({"tied": True}, "another model"),
    "frozen": ({"frozen": "layers.1"}, "other parameter"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_checkpoint_that_does_not_fit_changes_nothing(name: str, tmp_path: Path) -> None:
    changes, message = REJECTED[name]
    train_and_save("cpu", tmp_path, (0,), 1, precision="bf16")
    model, optimizer = opened(**{"precision": "bf16"} | changes)
    step(model, optimizer, 7)
    before, generators = digest(model, optimizer), random_state()
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path / "after-0", model, optimizer)
    assert digest(model, optimizer) == before
    assert random_state() == generators


def test_other_groups_are_rejected(tmp_path: Path) -> None:
    train_and_save("cpu", tmp_path, (0,), 1)
    model, _ = opened()
    params = list(model.parameters())
    optimizer = horizon_lm.AdamW(model, lr=1e-2, params=[{"params": params[:3]}, {"params": params[3:]}])
    before = digest(model, optimizer)
    with pytest.raises(ConfigError, match="other parameter groups"):
        load_checkpoint(tmp_path / "after-0", model, optimizer)
    assert digest(model, optimizer) == before


def test_a_checkpoint_inside_a_step_is_rejected(tmp_path: Path) -> None:
    """Some weights are updated and some are not: neither this step's state nor the last one's."""
    model, optimizer = opened(in_backward=True)
    model(**tiny_models.batch()).loss.backward()
    with pytest.raises(StreamingError, match=r"after optimizer\.step"):
        save_checkpoint(tmp_path / "one", model, optimizer)
    optimizer.step()
    save_checkpoint(tmp_path / "one", model, optimizer)


def test_loading_an_optimizer_state_waits_for_the_checkpoint(tmp_path: Path) -> None:
    model, optimizer = opened(SimulatedDevice(0, eagerness=0.0))
    step(model, optimizer, 0)
    earlier = dict(optimizer.state_dict())
    earlier["state"] = {k: {n: v.clone() for n, v in each.items()} for k, each in earlier["state"].items()}
    step(model, optimizer, 1)
    expected = digest(model, optimizer)
    saving = save_checkpoint(tmp_path / "one", model, optimizer, wait=False)
    assert not saving.done
    optimizer.load_state_dict(earlier)
    saving.wait()
    assert loaded(tmp_path / "one") == expected


@pytest.mark.parametrize("device", [CpuDevice, ThreadedDevice])
def test_an_update_that_fails_ends_the_checkpoint_that_waits_for_it(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit is never written, so waiting for its end must not last for ever."""
    model, optimizer = opened(device())
    step(model, optimizer, 0)
    save_checkpoint(tmp_path / "good", model, optimizer)
    model(**tiny_models.batch()).loss.backward()
    monkeypatch.setattr(update_tasks.Pieces, "run", _fail)
    optimizer.step()
    saving = save_checkpoint(tmp_path / "bad", model, optimizer, wait=False)
    with pytest.raises(RuntimeError, match="broken kernel"):
        saving.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good"]


def _fail(*_: Any) -> None:
    raise RuntimeError("broken kernel")


# Controls: without a wait, some order of copies, updates and writes gives another checkpoint

CONTROLS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "in backward": {"in_backward": True},
    "in backward, tied": {"in_backward": True, "tied": True},
}
_BUILDERS = ((build, "forward"), (build, "backward"), (between, "update"), (between, "save"))


class Eager(SimulatedDevice):
    """Runs the operations of one stream as soon as the schedule permits it, and all others as late as it permits."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._eager = stream

    def _interfere(self) -> None:
        queue = self._queues[self._eager]
        while queue and self._may_run(queue[0].task):
            self._run_piece(queue)

    def _run_piece(self, queue: Any) -> None:
        if not queue or not self._may_run(queue[0].task):  # what the caller saw has been run meanwhile
            return
        super()._run_piece(queue)
        if queue is not self._queues[self._eager]:
            self._interfere()


def waits_for_saves(schedule: Schedule, in_backward: bool) -> Iterator[tuple[int, Wait]]:
    """Yield the waits of saves for updates, and those of updates for saves.

    Left out are those that a save never meets, although the checker requires them: the host has waited in a backward pass for
    the first two units' updates, as others land in the same slots.
    """
    for index, wait in each_wait(schedule):
        if schedule.name == "save":
            if not (in_backward and schedule.ops[index].unit in (HEAD, block(2))):
                yield index, wait
        elif isinstance(wait, LastUse) and wait.stream == Stream.DISK:
            yield index, wait


def replace_passes(monkeypatch: pytest.MonkeyPatch, change: Callable[[Schedule], Schedule]) -> None:
    for module, function in _BUILDERS:
        original = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *args, original=original, **named: change(original(*args, **named))
        )


def save_and_go_on(device: Any, folder: Path, **options: Any) -> Digests:
    """Save after two steps and go on; the embedding is updated before the save, and by rows after it."""
    return train_and_save(device, folder, (0, 1), 4, **options)


@pytest.mark.parametrize("name", thinned(CONTROLS, every=3))
def test_each_dropped_wait_spoils_a_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = CONTROLS[name]
    expected = states(4, **options)
    seen: set[Schedule] = set()
    with monkeypatch.context() as patch:
        replace_passes(patch, lambda made: (seen.add(made), made)[1])
        assert not is_noticed(tmp_path / "whole", expected, options)
    in_backward = options.get("in_backward", False)
    drops = [(s, *drop) for s in sorted(seen, key=str) for drop in waits_for_saves(s, in_backward)]
    assert {schedule.name for schedule, *_ in drops} == {"save", "forward", "backward" if in_backward else "update"}
    missed = []
    for number, (schedule, op, wait) in enumerate(drops):
        broken = without_wait(schedule, op, wait)
        with monkeypatch.context() as patch:
            replace_passes(patch, lambda made, s=schedule, b=broken: b if made == s else made)
            if not is_noticed(tmp_path / str(number), expected, options):
                missed.append(f"{schedule.name} {schedule.ops[op]}: {wait}")
    assert missed == [], "\n".join(missed)


def is_noticed(folder: Path, expected: list[Digests], options: dict[str, Any]) -> bool:
    """Return whether an order gives another training or another checkpoint."""
    for stream in (Stream.HOST, Stream.DISK):
        device, target = Eager(stream), folder / stream
        try:
            if save_and_go_on(device, target, **options) != expected[3]:
                return True
            if any(loaded(target / f"after-{after}", **options) != expected[after] for after in (0, 1)):
                return True
        except (ScheduleError, ArithmeticError, RuntimeError, ConfigError):
            return True
    return False
