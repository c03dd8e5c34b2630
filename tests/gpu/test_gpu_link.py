"""Compare the transfers of the device with transfers within host memory, number by number."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device import cuda_link
from horizon_lm.device.cpu import HostLink
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.device.cuda_link import CudaLink
from tests.gpu.accelerator import Accelerator
from tests.support import tiny_models
from tests.support.emulated_gpu import GPU, emulated_gpu

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16]
SIZE = 100_003  # more than a piece, and not a multiple of a piece


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_link, "_PIECE_ELEMENTS", 1 << 15)
    monkeypatch.setattr(cuda_link, "_STAGING_BYTES", 1 << 18)


@pytest.fixture
def link(accelerator: Accelerator) -> Iterator[CudaLink]:
    with nullcontext() if accelerator.is_cuda else emulated_gpu():
        yield CudaLink(GPU)


def _host(values: torch.Tensor, pinned: bool) -> torch.Tensor:
    return values.pin_memory() if pinned else values.clone()


@pytest.mark.parametrize("pinned", [True, False], ids=["page-locked", "staged"])
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
def test_copies_equal_torch(link: CudaLink, of: torch.dtype, to: torch.dtype, pinned: bool) -> None:
    values = torch.randn(SIZE).to(of)
    on_device = torch.empty(SIZE, dtype=to, device=GPU)
    link.copy(on_device, _host(values, pinned))
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), values.to(to))
    back = _host(torch.empty(SIZE, dtype=of), pinned)
    link.copy(back, on_device)
    torch.cuda.synchronize()
    assert torch.equal(back, values.to(to).to(of))


@pytest.mark.parametrize("pinned", [True, False], ids=["page-locked", "staged"])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("of", DTYPES, ids=str)
def test_landing_equals_the_host(link: CudaLink, of: torch.dtype, to: torch.dtype, add: bool, pinned: bool) -> None:
    gradient, before = torch.randn(SIZE).to(of), torch.randn(SIZE).to(to)
    expected, got = before.clone(), _host(before, pinned)
    expected_squares = HostLink().land(expected, gradient, add)
    on_device = torch.empty(SIZE, dtype=of, device=GPU).copy_(gradient)
    found = link.land(got, on_device, add)
    torch.cuda.synchronize()
    assert torch.equal(got, expected)
    assert float(found) == pytest.approx(float(expected_squares), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_table_equal_the_host(link: CudaLink, dtype: torch.dtype) -> None:
    table, rows = torch.randn(3001, 64).to(dtype), torch.randperm(3001)[:2003]
    on_device = torch.empty(2003, 64, dtype=torch.float32, device=GPU)
    link.gather(on_device, table, rows)
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), table[rows].float())
    for add in (False, True):
        expected, got = (torch.zeros(3001, 64, dtype=dtype) if not add else table.clone() for _ in range(2))
        expected_squares = HostLink().land_rows(expected, on_device.cpu(), rows, add)
        found = link.land_rows(got, on_device, rows, add)
        assert torch.equal(got, expected)
        assert float(found) == pytest.approx(float(expected_squares), rel=1e-5, abs=1e-3)


class NoPageLocking(CudaDevice):
    """A device that cannot page-lock memory."""

    def register_host(self, buffers: Any) -> None:
        self.registration_error = "no page-locking"


def test_memory_that_cannot_be_page_locked(only_cuda: Accelerator) -> None:
    """Copies of memory that cannot be registered are staged, with the same result."""
    losses = []
    for device in (CudaDevice(), NoPageLocking()):
        model = horizon_lm.stream(
            tiny_models.build("llama"),
            device,
            compile=False,
            attn_implementation="eager",
            activation_checkpoints="host",
        )
        optimizer = horizon_lm.AdamW(model, lr=1e-2)
        for seed in range(3):
            loss = model(**tiny_models.batch(seed=seed, padding="none")).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        slabs = model._horizon.engine.store.slabs
        in_place = all(s.weights.is_pinned() and s.grads.is_pinned() for s in slabs if s.weights.numel())
        assert in_place == (device.registration_error is None)
        assert in_place or isinstance(device, NoPageLocking), device.registration_error
    assert losses[0] == losses[1]
