"""Systems that train the same model on the same rows: ours, the model that stays on the device, and other offloaders.

Each is made by a function from a `Case` and steps through whole batches. Imports are inside, because none of these
processes needs what the others do.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_models import make_config, random_model

LEARNING_RATE, MAX_GRAD_NORM = 1e-6, 1.0


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        system: a key of `SYSTEMS`.
        model: settings of the model's config.
        rows, length: of a step's batch.
        rows_at_once: rows in one forward and backward; the others follow, and gradients add up. Ours takes all.
        options: further arguments of `horizon_lm.stream`.
    """

    system: str
    name: str
    model: dict[str, Any]
    rows: int
    length: int
    rows_at_once: int
    device: str
    steps: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


@dataclass
class System:
    """Something that trains.

    Attributes:
        step: train on token ids (rows, length); returns the loss, which may still be on its way.
        finish: block until everything that steps began is done.
        model: what was made, for systems that can say more about themselves.
    """

    step: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[], None] = lambda: None
    model: Any = None


def horizon(case: Case) -> System:
    """Horizon-LM: weights, gradients and optimizer in host memory, clipping by the global norm."""
    import horizon_lm

    config = make_config(case.model, case.length)
    model = horizon_lm.from_config(config, device=case.device, **case.options).train()
    optimizer = horizon_lm.AdamW(model, lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return System(step, lambda: horizon_lm.synchronize(model), model)


def resident(case: Case, checkpointing: bool = True) -> System:
    """The ceiling: weights and gradients stay on the device, blocks are recomputed, there is no optimizer."""
    config = make_config(case.model, case.length)
    model = random_model(config, torch.bfloat16, case.torch_device, case.torch_device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = _accumulate(model, ids.to(case.torch_device), case)
        model.zero_grad(set_to_none=False)
        return loss

    return System(step, model=model)


def resident_compiled(case: Case, checkpointing: bool = True) -> System:
    """The same with blocks compiled."""
    system = resident(case, checkpointing)
    _compile_blocks(system.model)
    return system


def resident_kept(case: Case) -> System:
    """The same with nothing recomputed: as fast as it gets where activations have room as well."""
    return resident_compiled(case, checkpointing=False)


def fsdp2(case: Case) -> System:
    """PyTorch's fully_shard with parameters and optimizer on the CPU, in fp32; computation in bf16, blocks compiled."""
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
    """DeepSpeed ZeRO-3 with parameters and optimizer on the CPU, by its own CPU Adam; computation in bf16."""
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
    "resident": resident,
    "resident, compiled": resident_compiled,
    "resident, compiled, nothing recomputed": resident_kept,
    "FSDP2 CPU offload, compiled": fsdp2,
    "ZeRO-3 offload": zero3,
}


def _compile_blocks(model: Any) -> None:
    for block in model.model.layers:
        block.compile()


def _accumulate(
    model: Any, ids: torch.Tensor, case: Case, syncs: Callable[[bool], None] = lambda is_last: None
) -> torch.Tensor:
    """Forward and backward of a batch in parts, as the mean over all tokens. ``syncs`` is told which part is the last."""
    parts = ids.split(case.rows_at_once)
    losses = []
    for number, rows in enumerate(parts):
        syncs(number == len(parts) - 1)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss / len(parts)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _one_process() -> None:
    """What torch.distributed wants to know, for a world of one."""
    settings = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
