"""Memory of the CUDA device on an emulated GPU: page-locking, and device allocations."""

import gc
import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import horizon_lm
from horizon_lm.common.constants import PAGE
from horizon_lm.device import cuda_link, page_locks
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.device.cuda_link import CudaLink
from horizon_lm.device.page_locks import PageLocks
from horizon_lm.errors import PageLockWarning
from horizon_lm.memory.arena import Arena
from tests.support import tiny_models
from tests.support.emulated_gpu import EmulatedGpu, OnGpu, emulated_gpu
from tests.support.thinned_cases import thinned

PIECE = 3 * PAGE


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register and stage memory in small pieces, so that even the slabs of a tiny model need several pieces."""
    monkeypatch.setattr(page_locks, "REGISTER_PIECE", PIECE)
    monkeypatch.setattr(cuda_link, "_STAGING_BYTES", PAGE)


def train(device: Any, precision: str = "float32", steps: int = 2, **settings: Any) -> tuple[list[float], Any]:
    """Return the losses of a few steps, and the model."""
    model = horizon_lm.stream(
        tiny_models.build("llama"), device, precision, activation_checkpoints="host", compile=False, **settings
    )
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    losses = []
    for seed in range(steps):
        loss = model(**tiny_models.batch(seed=seed, padding="none")).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    horizon_lm.synchronize(model)
    return losses, model


# Page-locking


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("precision", "stride"),
    [("fp32_master", 7), *[pytest.param(each, 1, marks=pytest.mark.slow) for each in ("float32", "fp32_master")]],
)
def test_page_locking_that_fails_at_one_piece(gpu: EmulatedGpu, precision: str, stride: int) -> None:
    """The other pieces are locked, unlocked memory is staged, results do not change, and a warning names the bytes."""
    dtype = {"compute_dtype": torch.float32}
    expected, _ = train("cpu", precision, **dtype)
    losses, model = train(CudaDevice(), precision, **dtype)
    assert losses == expected
    pieces = gpu.asked
    everything = gpu.registered_bytes()
    del model
    gc.collect()
    assert pieces > 20
    assert gpu.registered_bytes() == 0
    for index in range(0, pieces, stride):
        gpu.asked, gpu.unlockable = 0, {index}
        with pytest.warns(PageLockWarning) as caught:
            losses, model = train(device := CudaDevice(), precision, **dtype)
        assert losses == expected
        missing = everything - gpu.registered_bytes()
        assert 0 < missing <= PIECE
        (warning,) = (each for each in caught if each.category is PageLockWarning)
        assert f"({missing:,} bytes)" in str(warning.message)
        assert device.registration_error == "out of memory"
        del model, device
        gc.collect()
    assert gpu.registered_bytes() == 0


def test_an_empty_range_is_not_locked(gpu: EmulatedGpu) -> None:
    """A rank may own nothing of a slab."""
    locks = PageLocks(OnGpu.device)
    empty = torch.zeros(8)[4:4]
    locks.lock(empty)
    locks.unlock(empty)
    assert (locks.error, gpu.asked) == (None, 0)


def test_adapters_added_later_leave_nothing_locked() -> None:
    """What the gradients and the checkpoints of the whole model took is unlocked."""
    pytest.importorskip("bitsandbytes")  # which PEFT imports, and which fails to import on an emulated GPU
    pytest.importorskip("peft")
    from tests.support.adapted_models import trained_with_adapters

    locked = []
    with emulated_gpu() as gpu:
        for late in (False, True):
            model = trained_with_adapters(late, device=CudaDevice())
            locked.append(gpu.registered_bytes())
            del model
            gc.collect()
            assert gpu.registered_bytes() == 0
    assert locked[0] == locked[1]


@pytest.mark.usefixtures("small_pieces")
def test_page_locking_that_always_fails(gpu: EmulatedGpu) -> None:
    """A warning is given for the weights and again at twice the bytes, but not for each buffer."""
    gpu.lockable = 0
    with pytest.warns(PageLockWarning) as caught:
        losses, model = train(CudaDevice())
    assert losses == train("cpu")[0]
    store = model._horizon.engine.store
    amounts = [int(str(each.message).split("(")[1].split()[0].replace(",", "")) for each in caught]
    assert amounts[0] == sum(slab.weights.numel() * 4 for slab in store.slabs)
    assert all(after >= 2 * before for before, after in itertools.pairwise(amounts))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("unlockable", [set(), {0}, {1}, {2}, {0, 2}, {0, 1, 2}], ids=str)
def test_copies_are_split_where_registrations_end(gpu: EmulatedGpu, unlockable: set[int]) -> None:
    """A buffer that is partly locked, or locked in several pieces, is not page-locked as a whole."""
    buffer = Arena(3 * PIECE).take(3 * PIECE // 4, torch.float32)
    buffer.copy_(torch.arange(buffer.numel()))
    locks = PageLocks(OnGpu.device)
    gpu.unlockable = unlockable
    locks.lock(buffer)
    assert locks.failed_bytes == PIECE * len(unlockable)
    assert gpu.is_half_locked(buffer) == (len(unlockable) < 3)
    link, size = CudaLink(OnGpu.device, locks), PIECE // 4
    for start, stop in (
        (0, 3 * size),
        (5, 3 * size - 7),
        (size - 1, size + 1),
        (size, 2 * size),
        (2 * size + 3, 3 * size),
    ):
        part = buffer[start:stop]
        parts = list(locks.parts(part))
        assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
        assert parts[-1][1] == part.numel()
        assert all(locked == gpu.is_locked(part[begin:end]) for begin, end, locked in parts)
        there = torch.empty(part.numel(), device="cuda")
        link.copy(there, part)
        values = part.clone()
        part.zero_()
        link.copy(part, there)
        assert torch.equal(part, values)
    locks.unlock(buffer)
    assert locks.failed_bytes == 0
    assert list(locks.parts(buffer)) == [(0, buffer.numel(), False)]


def test_a_copy_across_a_half_locked_buffer_fails(gpu: EmulatedGpu) -> None:
    """Negative control: like CUDA, the emulation rejects such a copy, although the first byte is page-locked."""
    buffer = torch.zeros(2 * PAGE, dtype=torch.uint8)
    gpu.lock(buffer.data_ptr(), PAGE)
    assert buffer.is_pinned()
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch.empty(2 * PAGE, dtype=torch.uint8, device="cuda").copy_(buffer, non_blocking=True)


def test_weights_are_locked_once_they_are_written(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of written weights exist, so the driver need not create them one by one in a single thread."""
    seen = []
    lock = PageLocks.lock

    def watch(self: PageLocks, buffer: torch.Tensor) -> None:
        if buffer.numel():
            seen.append(bool(buffer.count_nonzero()))
        lock(self, buffer)

    monkeypatch.setattr(PageLocks, "lock", watch)
    model = horizon_lm.stream(tiny_models.build("llama"), CudaDevice(), "float32", compile=False)
    assert len(seen) == len([slab for slab in model._horizon.engine.store.slabs if slab.weights.numel()])
    assert all(seen)


@pytest.mark.parametrize("index", [0, 1])
def test_only_the_device_that_trains_has_a_context(index: int) -> None:
    """Calls of any thread while another device is current would make a context there, which takes half a gigabyte."""
    with emulated_gpu(index=index) as gpu:
        losses, model = train(CudaDevice(f"cuda:{index}"))
        assert model._horizon.engine.device.torch_device == torch.device("cuda", index)
        assert gpu.contexts == {index}
        assert gpu.current_device() == 0
        del model
        gc.collect()
        assert gpu.registered_bytes() == 0
    assert losses == train("cpu")[0]


# Device memory


@pytest.mark.parametrize(
    ("name", "given", "set_up"),
    [
        ("", "", ["expandable_segments:True"]),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", ["max_split_size_mb:512,expandable_segments:True"]),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:512", ["max_split_size_mb:512,expandable_segments:True"]),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", []),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", []),
    ],
)
def test_segments_expand_unless_the_user_says_otherwise(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, name: str, given: str, set_up: list[str]
) -> None:
    for each in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, given)
    CudaDevice()
    assert gpu.settings == set_up


def test_cached_memory_is_freed_after_each_rehearsal(gpu: EmulatedGpu) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), CudaDevice(), "float32", compile=False)
    trims = []
    for length in (8, 8, 24, 16):
        model(**tiny_models.batch(length=length, padding="none")).loss.backward()
        model.zero_grad()
        trims.append(gpu.trims)
    assert trims == [1, 1, 2, 2]


@pytest.mark.parametrize("settings", [{}, {"precision": "fp32_master", "compute_dtype": torch.float32}], ids=str)
def test_threads_that_enqueue_copies_allocate_nothing(gpu: EmulatedGpu, settings: dict[str, Any]) -> None:
    """Threads that enqueue copies allocate neither device memory nor page-locked memory, except for sums of squares."""
    train(CudaDevice(), **settings)
    large = [(thread, numel) for thread, numel in gpu.allocations if numel > 1]
    assert len(large) > 6
    assert [each for each in large if each[0].startswith("horizon-")] == []


@pytest.mark.usefixtures("whole_installation")
def test_links_take_the_planned_memory(gpu: EmulatedGpu) -> None:
    from horizon_lm.runs.admission.this_machine import SCRATCH_BYTES, STAGING_BYTES

    device = CudaDevice()
    assert gpu.allocations == []  # planning looks at the device, but allocates nothing
    device.open_streams()
    assert sum(numel for _, numel in gpu.allocations) == SCRATCH_BYTES + STAGING_BYTES
    assert device.scratch_bytes == SCRATCH_BYTES


def test_cublas_workspaces_are_allocated_first_and_counted(gpu: EmulatedGpu) -> None:
    """Workspaces are allocated before planning, so that spare memory really is spare, and are part of the
    planned peak.
    """
    peaks = []
    for workspace in (0, 2**25):
        gpu.workspace = workspace
        gpu.multiplying.clear()
        model = horizon_lm.stream(tiny_models.build("llama"), CudaDevice(), "float32", compile=False)
        assert torch.cuda.memory_allocated() == workspace
        model(**tiny_models.batch(padding="none")).loss.backward()
        peaks.append(model._horizon.planner.plan.peak)
    assert peaks[1] - peaks[0] == 2**25


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="older rotary embeddings multiply matrices, in each thread",
)
@pytest.mark.parametrize("family", thinned(tiny_models.FAMILIES, every=6))
def test_threads_in_lock_step_need_no_workspace(gpu: EmulatedGpu, family: str) -> None:
    """cuBLAS would keep one for each batch of a step, a gigabyte for 32 of them: units are computed by the caller's thread."""
    model = horizon_lm.stream(tiny_models.build(family), CudaDevice(), "float32", compile=False)
    gpu.multiplying.clear()
    batch = tiny_models.batch(padding="none", rows=1)
    losses = horizon_lm.run_together([lambda: model(**batch).loss] * 3)
    torch.mm(*[torch.ones(2, 2, device="cuda")] * 2)
    assert gpu.multiplying == {threading.get_ident()}
    torch.stack(losses).sum().backward()


def test_a_limit_on_device_memory_limits_the_allocator(gpu: EmulatedGpu) -> None:
    """A run on a larger card then shows that a smaller one suffices. The limit ends with the device."""
    device = CudaDevice(capacity=250_000_000)
    assert gpu.fraction == 0.25
    assert device.spare_bytes() == 250_000_000
    smaller = CudaDevice(capacity=100_000_000)
    assert gpu.fraction == 0.1
    del smaller
    gc.collect()
    assert gpu.fraction == 0.25
    del device
    gc.collect()
    assert gpu.fraction == 1.0
    gpu.fraction = 0.2  # of the user
    CudaDevice(capacity=250_000_000)
    assert gpu.fraction == 0.2


def test_spare_memory_respects_the_limit_of_the_process(gpu: EmulatedGpu) -> None:
    device = CudaDevice()
    assert device.spare_bytes() == 10**9
    gpu.fraction = 0.25
    assert device.spare_bytes() == 250_000_000
    gpu.workspace = 50_000_000  # memory that is already taken does not become free
    gpu.multiplying.add(0)
    assert device.spare_bytes() == 200_000_000
    gpu.fraction = 0.01
    assert device.spare_bytes() == 0


def test_no_warning_if_all_memory_is_page_locked(gpu: EmulatedGpu) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, model = train(CudaDevice())
    assert model._horizon.engine.device.registration_error is None
