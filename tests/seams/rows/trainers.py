"""Accelerate, and losses and loops of other libraries. transformers' Trainer is tested in test_trainer.py."""

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from tests.seams.seam import EITHER, Case, row
from tests.seams.use import adamw, copied_weights, evaluated, train
from tests.support import tiny_models

SECTION = "Trainers"


def fresh_accelerator(**settings: Any) -> Accelerator:
    """Return an Accelerator with fresh settings, because those of an earlier one would apply to the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **settings)


def _accelerated(model: Any, optimizer: Any, accelerator: Accelerator) -> list[float]:
    losses = []
    for step in range(4):
        with accelerator.accumulate(model):
            value = model(**tiny_models.batch(seed=step)).loss
            accelerator.backward(value)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses


@row("accelerate.train", SECTION, "`Accelerator.prepare`, `accumulate`, `backward`, `clip_grad_norm_`",
     cases={"ours": Case(arguments={"ours": True}), "torch": Case(arguments={"ours": False})})  # fmt: skip
def accelerate_train(model: Any, ours: bool) -> Any:
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    optimizer = adamw(model) if ours else torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses = _accelerated(prepared, optimizer, accelerator)
    return [losses, copied_weights(accelerator.unwrap_model(prepared)), accelerator.unwrap_model(prepared) is model]


@row("accelerate.mixed-precision", SECTION, "`Accelerator(mixed_precision='bf16')`", tolerance=3e-2)
def accelerate_mixed_precision(model: Any) -> Any:
    accelerator = fresh_accelerator(mixed_precision="bf16")
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    losses = _accelerated(prepared, optimizer, accelerator)
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    return [losses, evaluated(unwrapped)]


@row("fabric.train", SECTION, "Lightning Fabric: `setup(model, optimizer, move_to_device=False)`, `backward`, with our `max_grad_norm`",
     cases={"ours": Case(arguments={"ours": True}), "torch": Case(arguments={"ours": False})})  # fmt: skip
def fabric_train(model: Any, ours: bool) -> Any:
    from lightning_fabric import Fabric

    streamed = hasattr(model, "_horizon")
    fabric = Fabric(accelerator="cpu", devices=1)
    if ours and streamed:
        optimizer = adamw(model, max_grad_norm=0.5)
    else:
        optimizer = adamw(model) if ours else torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    wrapped, optimizer = fabric.setup(model, optimizer, move_to_device=False)
    losses = []
    for step in range(4):
        value = wrapped(**tiny_models.batch(seed=step)).loss
        fabric.backward(value)
        if not (ours and streamed):
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return [losses, copied_weights(model)]


@row("accelerate.offload", SECTION, "`accelerate.cpu_offload`", EITHER, survives=False)
def accelerate_offload(model: Any) -> Any:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    expected = evaluated(model)
    try:
        cpu_offload(model, execution_device=torch.device("cpu"))
        return [expected, evaluated(model)]
    finally:
        remove_hook_from_submodules(model)


@row("trainers.scheduler", SECTION, "Schedulers of torch and of transformers, with our optimizer and torch's",
     cases={"ours": Case(arguments={"ours": True}), "torch": Case(arguments={"ours": False})})  # fmt: skip
def scheduler(model: Any, ours: bool) -> Any:
    from transformers import get_linear_schedule_with_warmup

    optimizer = adamw(model) if ours else torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    schedule, losses = get_linear_schedule_with_warmup(optimizer, 2, 6), []
    for _ in range(5):
        losses += train(model, optimizer, steps=1)
        schedule.step()
    return [losses, schedule.get_last_lr(), evaluated(model)]


@row("trainers.groups", SECTION, "Parameter groups by name, with decay for some: as Trainer makes them",
     cases={"ours": Case(arguments={"ours": True}), "torch": Case(arguments={"ours": False})})  # fmt: skip
def groups(model: Any, ours: bool) -> Any:
    decayed = [p for n, p in model.named_parameters() if "norm" not in n]
    others = [p for n, p in model.named_parameters() if "norm" in n]
    made = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    optimizer = adamw(model, params=made) if ours else torch.optim.AdamW(made, lr=1e-2, foreach=False)
    return [train(model, optimizer, steps=4), copied_weights(model)]


@row("trainers.checkpoint-reload", SECTION, "Load the best checkpoint into the model at the end: `load_state_dict(load_file(...))`",
     cases={p: Case(options={"precision": p}) for p in ("float32", "bf16")})  # fmt: skip
def checkpoint_reload(model: Any) -> Any:
    from safetensors.torch import load_file

    optimizer = adamw(model)
    train(model, optimizer)
    expected = evaluated(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        train(model, optimizer)
        model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)
    return round(evaluated(model) - expected, 5)


@row("trainers.grad-scaler", SECTION, "`torch.amp.GradScaler`: scale the loss, unscale gradients, step",
     cases={"ours": Case(arguments={"ours": True}), "torch": Case(arguments={"ours": False})})  # fmt: skip
def grad_scaler(model: Any, ours: bool) -> Any:
    optimizer = adamw(model) if ours else torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=256.0), []
    for step in range(3):
        value = model(**tiny_models.batch(seed=step)).loss
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(value))
    return [losses, copied_weights(model)]


@row("trainers.closure", SECTION, "`optimizer.step(closure)`, and LBFGS, which calls it repeatedly",
     cases={"ours": Case(arguments={"kind": "ours"}), "lbfgs": Case(arguments={"kind": "lbfgs"})}, tolerance=1e-3)  # fmt: skip
def closure(model: Any, kind: str) -> Any:
    optimizer = adamw(model) if kind == "ours" else torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(**tiny_models.batch()).loss
        value.backward()
        return value

    return [float(optimizer.step(evaluate)) for _ in range(2)] + [evaluated(model)]
