"""A tiny training, and hashes of all that it changes, to compare with what a checkpoint restores."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

import horizon_lm
from tests.support import tiny_models

Digests = dict[str, str]
BUFFERED = "deepseek_v3"  # has persistent buffers


def opened(
    device: Any = "cpu", precision: str = "float32", moments: str = "float32", in_backward: bool = False, tied: bool = False,
    family: str = "llama", seed: int = 0, frozen: str = "", size: Mapping[str, int] | None = None, **settings: Any,
) -> tuple[Any, Any]:  # fmt: skip
    plain = tiny_models.build(family, seed, tie_word_embeddings=tied, **size or {})
    for name, param in plain.named_parameters():
        param.requires_grad_(not frozen or frozen not in name)
    model = horizon_lm.stream(plain, device, precision=precision, **settings)
    clip = {} if in_backward else {"max_grad_norm": 0.5}
    return model, horizon_lm.AdamW(model, lr=1e-2, moments=moments, update_in_backward=in_backward, **clip)


def digest(model: Any, optimizer: Any) -> Digests:
    """Return hashes of everything in memory that training changes."""
    horizon_lm.synchronize(model)
    store, found = model._horizon.engine.store, {}
    for slab in store.slabs:
        own = optimizer.moments.slabs[slab].values()
        for number, each in enumerate((slab.weights, slab.low, *(m.values for m in own), *(m.scales for m in own))):
            if each is not None:
                found[f"{slab.name} {number}"] = hashlib.sha256(each.view(torch.uint8).numpy().data).hexdigest()
    for name, buffer in model.named_buffers():
        found[name] = hashlib.sha256(buffer.contiguous().view(torch.uint8).numpy().data).hexdigest()
    scalars = optimizer.scalars()
    # The last digit of a norm depends on the pieces in which a simulated device lands gradients.
    scalars["unit_grad_norms"] = {unit: round(norm, 9) for unit, norm in scalars["unit_grad_norms"].items()}
    scalars["grad_norm"] = round(scalars["grad_norm"] or 0.0, 9)
    found["optimizer"] = json.dumps(scalars, sort_keys=True)
    return found
