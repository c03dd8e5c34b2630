"""Steps on the device: the host never waits inside a step, memory is as planned, and nothing leaks."""

import gc
import threading
from typing import Any

import pytest
import torch

import horizon_lm
from tests.gpu.accelerator import Accelerator
from tests.support import tiny_models

pytestmark = pytest.mark.gpu

MIB = 2**20


def _sizes(accelerator: Accelerator, large: bool = False) -> dict[str, Any]:
    """Return sizes of a model whose activations matter on a GPU, or of a toy model for a CPU."""
    width = 128 if not accelerator.is_cuda else 1024 if large else 512
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": 8, "num_key_value_heads": 4}
    return sizes | {"vocab_size": 997 if not accelerator.is_cuda else 32_003}


def _batch(model: Any, accelerator: Accelerator, large: bool = False) -> dict[str, torch.Tensor]:
    shape = (4, 64) if not accelerator.is_cuda else (8, 2048) if large else (4, 512)
    ids = torch.randint(3, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    "settings",
    [{}, {"activation_checkpoints": "host"}, {"device_micro_batch_size": 2}, {"resident_blocks": 2, "resident_graphs": 1}, {"compile": True}],
    ids=str,
)  # fmt: skip
def test_the_host_never_waits_inside_a_step(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    model = horizon_lm.stream(
        tiny_models.build("llama", **_sizes(accelerator)), accelerator.open(), **{"compile": False} | settings
    ).train()
    optimizer = horizon_lm.AdamW(model, max_grad_norm=1.0)
    batch = _batch(model, accelerator)
    losses = [_step(model, optimizer, batch) for _ in range(3)]  # planning, compilation, cuBLAS
    with accelerator.without_synchronization():
        losses += [_step(model, optimizer, batch) for _ in range(3)]
    values = [loss.item() for loss in losses]
    assert values == sorted(values, reverse=True)  # the model trains on one batch


def test_the_guard_detects_a_synchronization(only_cuda: Accelerator) -> None:
    number = torch.ones((), device="cuda")
    with only_cuda.without_synchronization(), pytest.raises(RuntimeError, match="synchroniz"):
        number.item()


def _peak(accelerator: Accelerator, num_blocks: int, **settings: Any) -> tuple[int, Any]:
    """Return the peak device memory of the steps after the first two, and the model's streaming state."""
    built = tiny_models.build("llama", num_hidden_layers=num_blocks, **_sizes(accelerator, large=True))
    gc.collect()
    with accelerator.meter() as meter:
        model = horizon_lm.stream(built.bfloat16(), accelerator.open(), "bf16", **settings).train()
        batch = _batch(model, accelerator, large=True)
        peaks = []
        for _ in range(4):
            before = meter.current
            with accelerator.meter() as of_step:
                model(**batch).loss.backward()
                horizon_lm.synchronize(model)
                peaks.append(before + of_step.peak)
    return max(peaks[2:]), model._horizon


def test_peak_does_not_depend_on_depth(accelerator: Accelerator) -> None:
    settings = {"activation_checkpoints": "host", "resident_blocks": 0, "compile": False}
    few, many = (4, 16) if accelerator.is_cuda else (3, 8)
    shallow, deep = (_peak(accelerator, depth, **settings)[0] for depth in (few, many))
    print(f"{few} blocks {shallow / MIB:.1f} MiB, {many} blocks {deep / MIB:.1f} MiB")
    assert deep < 1.02 * shallow
    on_device, _ = _peak(accelerator, many, **settings | {"activation_checkpoints": "device"})
    assert on_device > 1.02 * deep  # negative control


@pytest.mark.parametrize(
    "settings",
    [{}, {"activation_checkpoints": "host"}, {"compile": True}, {"device_micro_batch_size": 2}, {"resident_blocks": 3, "resident_graphs": 3}],
    ids=str,
)  # fmt: skip
def test_peak_is_as_planned(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    peak, streaming = _peak(accelerator, 8, **{"compile": False} | settings)
    planned = streaming.planner.plan.peak
    print(f"{settings}: {streaming.engine.residency}, planned {planned / MIB:.1f} MiB, peak {peak / MIB:.1f} MiB")
    assert abs(peak / planned - 1) < (0.05 if accelerator.is_cuda else 0.1)  # a toy model allocates little


def test_nothing_leaks(accelerator: Accelerator) -> None:
    """Memory is the same after 200 steps, or after fewer steps of a toy model."""
    part = 50 if accelerator.is_cuda else 8
    model = horizon_lm.stream(
        tiny_models.build("llama"), accelerator.open(), "bf16", activation_checkpoints="host", compile=False
    ).train()  # fmt: skip
    optimizer = horizon_lm.AdamW(model, max_grad_norm=1.0)
    seen = []
    with accelerator.meter() as meter:
        for step in range(4 * part):
            _step(model, optimizer, tiny_models.batch(seed=step % 10, padding="none"))
            if step % part == part - 1:
                horizon_lm.synchronize(model)
                gc.collect()
                seen.append((meter.current, accelerator.host_bytes()))
    print([(device, round(host / MIB, 1)) for device, host in seen])
    assert abs(seen[-1][0] - seen[1][0]) < 100  # less than a byte per step
    assert seen[-1][1] - seen[1][1] < 4 * MIB


def test_a_deleted_model_leaves_no_memory(accelerator: Accelerator) -> None:
    def train() -> None:
        model = horizon_lm.stream(tiny_models.build("llama"), accelerator.open(), compile=False).train()
        optimizer = horizon_lm.AdamW(model)
        _step(model, optimizer, tiny_models.batch(padding="none"))
        horizon_lm.synchronize(model)

    def use() -> None:
        before = set(threading.enumerate())
        train()
        gc.collect()
        for thread in (
            set(threading.enumerate()) - before
        ):  # threads of the device, which hold its memory until they end
            thread.join(30)

    use()
    with accelerator.meter() as meter:
        use()
        assert meter.current == 0


def test_training_continues_after_out_of_memory(only_cuda: Accelerator) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), only_cuda.open(), "float32", compile=False).train()
    optimizer = horizon_lm.AdamW(model)
    batch = tiny_models.batch(padding="none")
    _step(model, optimizer, batch)
    hook = model.model.layers[1].register_forward_hook(lambda *_: torch.empty(2**48, device="cuda"))
    with pytest.raises(torch.OutOfMemoryError):
        model(**batch)
    hook.remove()
    optimizer.zero_grad()
    assert torch.isfinite(_step(model, optimizer, batch)).item()


@pytest.mark.parametrize("objective", ["loss", "log-probabilities"])
def test_chunked_head_with_a_vocabulary_of_152k(only_cuda: Accelerator, objective: str) -> None:
    """A chunked head takes a fraction of the memory that the logits of 8k tokens would take."""
    sizes = _sizes(only_cuda) | {"vocab_size": 151_936, "num_hidden_layers": 2}
    model = horizon_lm.stream(
        tiny_models.build("llama", **sizes).bfloat16(), only_cuda.open(), "bf16", compile=False, head_chunk_tokens=512
    ).train()
    ids = torch.randint(3, 151_936, (4, 2048))
    logits = ids.numel() * 151_936 * 4
    for _ in range(2):
        model.zero_grad()
        with only_cuda.meter() as meter:
            if objective == "loss":
                model(input_ids=ids, labels=ids).loss.backward()
            else:
                horizon_lm.token_logprobs(model, input_ids=ids, labels=ids).logprobs.sum().backward()
            horizon_lm.synchronize(model)
    print(f"{objective}: {meter.peak / MIB:.0f} MiB more than before; logits in fp32 {logits / MIB:.0f} MiB")
    assert meter.peak < 0.4 * logits


def test_random_weights_are_drawn_on_the_device(accelerator: Accelerator) -> None:
    config = tiny_models.build("llama", **_sizes(accelerator)).config
    torch.manual_seed(0)
    device = accelerator.open()
    model = horizon_lm.from_config(config, device, "bf16")
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight").float()
    assert weight.device.type == "cpu"
    assert abs(weight.std().item() / config.initializer_range - 1) < 0.1
    assert torch.isfinite(_step(model.train(), horizon_lm.AdamW(model), _batch(model, accelerator))).item()
