"""The CUDA device on an emulated GPU: the same numbers as on the CPU, correct order, and no waits inside a step."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.errors import PageLockWarning
from horizon_lm.planning.arithmetic.residency import Residency
from tests.census.inputs import text_batch
from tests.census.tiny_models import build
from tests.support import tiny_models
from tests.support.emulated_gpu import EmulatedGpu, OnGpu, emulated_gpu
from tests.support.thinned_cases import covering, thinned

SETTINGS: dict[str, dict[str, Any]] = {
    "planned": {},
    "boundaries on the host": {"activation_checkpoints": "host"},
    "micro-batches": {"activation_checkpoints": "host", "device_micro_batch_size": 2},
    "resident blocks": {"resident_blocks": 2, "resident_graphs": 1},
    "whole head": {"head": "whole"},
    "16 bits": {"precision": "fp32_master", "compute_dtype": torch.bfloat16},
}
# transformers reads a mask on the host to check for padding; `varlen` makes no mask.
LOOKS_AT_MASKS = ("falcon", "gemma2", "qwen3_next")


# A program that ends while a thread of the device is inside torch.
PROGRAM = """
import torch

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.device.cuda_link import CudaLink
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu

def land(*args, land=CudaLink.land):
    for _ in range(2000):
        torch.ones(10_000).exp()
    return land(*args)

CudaLink.land = land
with emulated_gpu():
    model = horizon_lm.stream(tiny_models.build("llama"), CudaDevice(), "float32", compile=False)
    model(**tiny_models.batch()).loss.backward()
"""


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


def _train(
    model: Any, padding: str, gpu: EmulatedGpu | None = None, max_grad_norm: float | None = None, optim: str = "AdamW"
) -> tuple[list[float], list[str]]:
    """Return the losses of four steps, and the waits of the host during the last two."""
    optimizer = getattr(horizon_lm, optim)(model, lr=1e-2, max_grad_norm=max_grad_norm)
    losses = []
    for seed in range(4):
        if gpu is not None and seed == 2:
            gpu.waits.clear()
        batch = tiny_models.batch(seed=seed, padding=padding)
        if padding == "none":
            del batch["attention_mask"]
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    waits = list(gpu.waits) if gpu is not None else []
    horizon_lm.synchronize(model)
    return [loss.item() for loss in losses], waits


def _assert_same_as_on_the_cpu(
    family: str, padding: str, gpu: EmulatedGpu, optim: str = "AdamW", **settings: Any
) -> list[str]:
    """Check that training on the emulated GPU and on the CPU gives the same bits. Return the host's waits on the
    emulated GPU.
    """
    settings = {"precision": "float32", "compile": False} | settings
    model = horizon_lm.stream(tiny_models.build(family), CudaDevice(), **settings)
    attention = model.config._attn_implementation
    losses, waits = _train(model, padding, gpu, optim=optim)
    reference = horizon_lm.stream(tiny_models.build(family), "cpu", **settings | {"attn_implementation": attention})
    expected, _ = _train(reference, padding, optim=optim)
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    return waits


@pytest.mark.parametrize(
    ("family", "padding"), thinned(itertools.product(tiny_models.FAMILIES, ("none", "right")), every=9)
)
def test_families(gpu: EmulatedGpu, family: str, padding: str) -> None:
    files = {wait.rpartition(":")[0].rpartition("/")[2] for wait in _assert_same_as_on_the_cpu(family, padding, gpu)}
    assert files <= ({"masking_utils.py"} if family in LOOKS_AT_MASKS else set())


@pytest.mark.parametrize(
    ("family", "settings"),
    covering(["llama", "gemma2"], SETTINGS),
)
def test_settings(gpu: EmulatedGpu, family: str, settings: str) -> None:
    _assert_same_as_on_the_cpu(family, "right", gpu, **SETTINGS[settings])


@pytest.mark.parametrize("settings", thinned(["16 bits", "planned", "micro-batches"], every=2))
def test_matrices_are_orthogonalized_there(gpu: EmulatedGpu, settings: str) -> None:
    assert _assert_same_as_on_the_cpu("llama", "none", gpu, optim="Muon", **SETTINGS[settings]) == []


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_host_never_waits_inside_a_dense_step(gpu: EmulatedGpu, settings: str) -> None:
    settings = {"precision": "float32", "compile": False} | SETTINGS[settings]
    model = horizon_lm.stream(tiny_models.build("llama"), CudaDevice(), **settings)
    _, waits = _train(model, "none", gpu, max_grad_norm=1.0)
    assert waits == []


def test_the_emulation_detects_mistakes(gpu: EmulatedGpu) -> None:
    """Negative control: mixing devices is an error, and each wait of the host is counted."""
    there = torch.ones(3, device="cuda")
    assert isinstance(there, OnGpu)
    with pytest.raises(RuntimeError, match="host memory and on the GPU"):
        there + torch.ones(3)
    assert gpu.waits == []
    there.sum().item()
    there[there > 0]
    there.cpu()
    torch.ones(3).copy_(there, non_blocking=True)  # not page-locked
    assert len(gpu.waits) == 4


def test_memory_that_cannot_be_page_locked(gpu: EmulatedGpu) -> None:
    """CUDA's error is reported, and cleared before the next operation."""
    device = CudaDevice()
    assert device.try_registering(2**20) is None
    assert gpu.num_locked() == 0  # nothing stays locked
    gpu.lockable = 2**20
    assert device.try_registering(2**21) == "out of memory"
    torch.ones(1, device="cuda")
    assert device.registration_error is None  # no operation uses that memory
    with pytest.warns(PageLockWarning, match=r"2.00 MiB of host memory \(2,097,152 bytes\).*out of memory"):
        assert not gpu.is_locked(device.host_buffer(2**21))
    assert device.registration_error == "out of memory"
    torch.ones(1, device="cuda")
    assert gpu.is_locked(device.host_buffer(2**20))
    assert gpu.lock(0, 2**21)
    with pytest.raises(RuntimeError, match="CUDA error"):  # negative control
        torch.ones(1, device="cuda")


@pytest.mark.usefixtures("whole_installation")
def test_a_plan_for_the_current_gpu(gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan fits the free memory reported by the driver, chooses residency, and reports memory that cannot be
    page-locked.
    """
    from horizon_lm.runs.admission.inputs import open_source
    from horizon_lm.runs.admission.run_plan import apply_plan, plan_run
    from horizon_lm.runs.admission.this_machine import this_machine
    from horizon_lm.runs.config import plan_config

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "model"
    tiny_models.build("llama", vocab_size=600).save_pretrained(folder)
    run = plan_config(
        model_name_or_path=str(folder),
        device="cuda",
        max_length=16,
        per_device_train_batch_size=2,
        output_dir=str(tmp_path),
    )
    plan = plan_run(run, open_source(run), this_machine(run))
    free, _ = torch.cuda.mem_get_info()
    assert plan.device.available is not None
    assert free <= plan.device.available
    assert plan.step.settings.compiled
    assert plan.step.settings.residency == Residency(3, 3, 3)  # a tiny model fits completely
    settled = apply_plan(run, plan)
    assert (settled.activation_checkpoints, settled.resident_blocks, settled.resident_graphs) == (3, 3, 3)
    assert not [reason for reason in plan.reasons if "page-locked" in reason]
    limited = run.model_copy(update={"device_memory": 7 * 10**8})  # of all that torch allocates, not of buffers alone
    assert plan_run(limited, open_source(run), this_machine(limited)).device.available == 7 * 10**8
    gpu.lockable = 2**20
    assert [reason for reason in plan_run(run, open_source(run), this_machine(run)).reasons if "page-locked" in reason]


def test_ids_changed_by_other_code_are_read_again(gpu: EmulatedGpu) -> None:
    """The caller's ids on the host are used, unless other code wrote to the ids on the device."""

    def change(module: Any, args: Any) -> None:
        args[0][:, 2] = 5

    losses = []
    for device in (CudaDevice(), "cpu"):
        model = horizon_lm.stream(
            tiny_models.build("llama"), device, "float32", compile=False, attn_implementation="varlen"
        )
        model.model.embed_tokens.register_forward_pre_hook(change)
        losses.append(_train(model, "none")[0])
    assert losses[0] == losses[1]


def test_clean_interpreter_exit() -> None:
    """A thread inside torch at the end of the interpreter would abort the process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_head_in_float32_beside_blocks_in_16_bits(tmp_path: Path) -> None:
    """The weights of hy_v4 that transformers keeps in float32 are converted on the device."""
    model, batch = build("hy_v4"), text_batch("hy_v4")
    model.bfloat16().save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    tiny_models.attending_as_streamed(plain)
    expected = plain(**batch, use_cache=False).loss
    expected.backward()
    options = {"compute_dtype": torch.bfloat16, "grad_dtype": torch.float32, "compile": False}
    with emulated_gpu():
        streamed = horizon_lm.from_pretrained(tmp_path, CudaDevice(), "fp32_master", **options).train()
        loss = streamed(**batch).loss
        loss.backward()
        horizon_lm.synchronize(streamed)
        assert float(loss.detach().cpu()) == pytest.approx(float(expected.detach()), rel=1e-6)
        grads = {n: p.grad.tolist() for n, p in streamed.named_parameters() if p.grad is not None}
    off = [n for n, p in plain.named_parameters() if p.grad is not None and grads[n] != p.grad.float().tolist()]
    assert off == []
