"""Systems that train the same model on the same rows: ours, a model resident on the device, and other offloaders.

A function creates each system from a `Case`. Packages are imported inside, because each process needs only its own.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_cases import NO_OPTIMIZER, Case
from gpu_models import make_config, random_model

LEARNING_RATE, MAX_GRAD_NORM = 1e-6, 1.0


@dataclass
class System:
    """A system that trains.

    Attributes:
        step: trains on token ids (rows, length) and returns the loss, which may still be being computed.
        finish: blocks until all steps are finished.
        model: the model, if the benchmark reads more from it.
    """

    step: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[], None] = lambda: None
    model: Any = None


def horizon(case: Case) -> System:
    """Create Horizon-LM: weights, gradients and optimizer in host memory, clipping by the global norm."""
    import horizon_lm

    model, optimizer = _streamed(case)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return System(step, lambda: horizon_lm.synchronize(model), model)


def horizon_sft(case: Case) -> System:
    """Create Horizon-LM with the steps of ``horizon-lm train``: a mask, statistics of tokens, and a loss that is read."""
    import horizon_lm
    from horizon_lm.runs.data.batch import Batch
    from horizon_lm.runs.objective.sft import nll

    model, optimizer = _streamed(case)

    def step(ids: torch.Tensor) -> torch.Tensor:
        num_trained = ids.shape[0] * (ids.shape[1] - 1)
        loss = nll(model, Batch(ids, torch.ones_like(ids), None, ids, num_trained, ids.numel(), rows=(), places=()))
        loss.value.backward()
        loss.value.item()  # a run checks that it is finite
        optimizer.step()
        for sums in loss.token_metrics.values():
            sums.of_micro_batches(case.rows)
        optimizer.zero_grad()
        return loss.value.detach()

    return System(step, lambda: horizon_lm.synchronize(model), model)


def _streamed(case: Case) -> tuple[Any, Any]:
    from gpu_plan import planned_options

    import horizon_lm

    config = make_config(case.model, case.length)
    options = {"device_memory": case.device_bytes} | planned_options(case) | case.options
    model = horizon_lm.from_config(config, device=case.device, **options).train()
    return model, horizon_lm.AdamW(model, lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM, **case.optimizer)


def resident(case: Case, checkpointing: bool = True, compiles: bool = True) -> System:
    """Create a bound on systems that recompute: bf16 weights and gradients on the device, and no optimizer."""
    model = _resident_model(case, checkpointing, compiles)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = _accumulate(model, ids.to(case.torch_device), case)
        model.zero_grad(set_to_none=False)
        return loss

    return System(step, model=model)


def resident_masters(case: Case) -> System:
    """Create what has room for it: nothing recomputed, bf16 weights and gradients, and fused AdamW on float32 masters."""
    return _training(case, _resident_model(case, checkpointing=False), FusedMasters)


def resident_bf16(case: Case) -> System:
    """Create what takes the least memory: recomputed blocks, and fused AdamW on bf16 weights with bf16 moments, without masters."""

    def fused(parameters: Iterable[torch.nn.Parameter]) -> Any:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    return _training(case, _resident_model(case, checkpointing=True), fused)


class FusedMasters:
    """AdamW with torch's fused kernels on float32 copies of bf16 weights, some tensors at a time, so that gradients in float32 take
    little memory.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float = LEARNING_RATE) -> None:
        self._parameters = list(parameters)
        self._groups = []
        for start in range(0, len(self._parameters), 16):
            group = self._parameters[start : start + 16]
            masters = [param.detach().float().requires_grad_() for param in group]
            self._groups.append((group, masters, torch.optim.AdamW(masters, lr=lr, weight_decay=0.0, fused=True)))

    def step(self) -> None:
        for group, masters, optimizer in self._groups:
            for param, master in zip(group, masters, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_([param.detach() for param in group], masters)

    def zero_grad(self) -> None:
        for param in self._parameters:
            param.grad = None


def _resident_model(case: Case, checkpointing: bool, compiles: bool = True) -> Any:
    model = random_model(make_config(case.model, case.length), torch.bfloat16, case.torch_device, case.torch_device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiles:
        _compile_blocks(model)
    return model


def _training(case: Case, model: Any, make_optimizer: Callable[[Iterable[torch.nn.Parameter]], Any]) -> System:
    """Return a system that clips by the global norm and updates the weights, as ours does. Its loss is compiled, which saves most of
    the memory of logits in float32.
    """
    model.loss_function = torch.compile(model.loss_function, backend=_backend())
    optimizer = make_optimizer(model.parameters())

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = _accumulate(model, ids.to(case.torch_device), case)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return System(step, model=model)


def fsdp2(case: Case) -> System:
    """Create PyTorch's fully_shard with parameters and optimizer on the CPU in fp32, and compiled blocks in bf16."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _one_process()
    on_gpu = case.torch_device.type == "cuda"
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(case.torch_device.type, (1,))
    model = random_model(make_config(case.model, case.length), torch.float32, case.torch_device, torch.device("cpu"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
    }
    _compile_blocks(model)
    for block in model.model.layers:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = _accumulate(model, ids.to(case.torch_device), case, model.set_requires_gradient_sync)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return System(step, distributed.destroy_process_group, model)


def zero3(case: Case) -> System:
    """Create DeepSpeed ZeRO-3 with parameters and its CPU Adam on the CPU, computing in bf16."""
    import deepspeed

    _one_process()
    on_gpu = case.torch_device.type == "cuda"
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo")
    model = random_model(make_config(case.model, case.length), torch.bfloat16, case.torch_device, torch.device("cpu"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    offload = {"device": "cpu", "pin_memory": on_gpu}
    config = {
        "train_micro_batch_size_per_gpu": case.rows_at_once,
        "gradient_accumulation_steps": case.rows // case.rows_at_once,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        losses = []
        for rows in ids.to(case.torch_device).split(case.rows_at_once):
            loss = engine(input_ids=rows, labels=rows, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return System(step, model=engine)


SYSTEMS: dict[str, Callable[[Case], System]] = {
    "horizon": horizon,
    "horizon, SFT": horizon_sft,
    NO_OPTIMIZER: resident,
    "resident, nothing recomputed, no optimizer": partial(resident, checkpointing=False),
    "resident, nothing recomputed, fused AdamW on fp32 masters": resident_masters,
    "resident, recomputed, pure bf16 AdamW": resident_bf16,
    "FSDP2 CPU offload": fsdp2,
    "ZeRO-3 offload": zero3,
}


def _compile_blocks(model: Any) -> None:
    for block in model.model.layers:
        block.compile(backend=_backend())


def _backend() -> str:
    """Return how to compile. A toy on a CPU would take longer to compile than all of its steps."""
    return "inductor" if torch.cuda.is_available() else "aot_eager"


def _accumulate(
    model: Any, ids: torch.Tensor, case: Case, syncs: Callable[[bool], None] = lambda is_last: None
) -> torch.Tensor:
    """Run forward and backward of a batch in micro-batches, and return the mean loss over all tokens.

    ``syncs`` is called with True before the last one.
    """
    parts = ids.split(case.rows_at_once)
    losses = []
    for number, rows in enumerate(parts):
        syncs(number == len(parts) - 1)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss / len(parts)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _one_process() -> None:
    """Set the environment of torch.distributed for a world of one process."""
    settings = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
