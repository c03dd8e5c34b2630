"""Random sequences of PEFT's calls on a streamed and a plain model: python -m tests.seams.fuzz_adapters --seconds 600 --seed 0.

After each call both models must have the same names, weights and logits. A sequence ends when a call unloads the adapters, and
the model that is left must compute the same, too.
"""

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch

import horizon_lm
from tests.seams.compare import difference
from tests.support import tiny_models

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "tokens": {"trainable_token_indices": [3, 9, 40]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved layer": {"modules_to_save": ["v_proj"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}
TOLERANCE = 2e-5


class Divergence(Exception):  # noqa: N818
    """Raised if the streamed model behaves differently from the plain model."""


def config(kind: str, rank: int = 4) -> peft.LoraConfig:
    """Return the config of adapters that are not zero."""
    return peft.LoraConfig(
        **(
            {"r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
            | KINDS[kind]
        )
    )


class World:
    """A model with adapters, and the names of these."""

    def __init__(self, model: Any, kind: str) -> None:
        self.kind, self.names, self.unloaded = kind, ["default"], False
        torch.manual_seed(1)
        self.model: Any = peft.get_peft_model(model, config(kind))


def train(world: World, chosen: random.Random) -> Any:
    params = [param for param in world.model.parameters() if param.requires_grad]
    if not params or any(getattr(module, "merged", False) is True for module in world.model.modules()):
        return None  # a plain model has no gradients while it is merged
    optimizer, losses = torch.optim.SGD(params, lr=0.05), []
    for _ in range(2):
        loss = world.model.train()(**tiny_models.batch(seed=chosen.randrange(50))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def logits(world: World, chosen: random.Random) -> Any:
    batch, inference = tiny_models.batch(seed=chosen.randrange(50)), chosen.random() < 0.4
    with torch.inference_mode() if inference else torch.no_grad():
        return world.model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.clone()


def disabled(world: World, chosen: random.Random) -> Any:
    # Not in inference mode, in which PEFT leaves inference tensors in a plain model that it unmerges.
    batch = tiny_models.batch(seed=chosen.randrange(50))
    with world.model.disable_adapter(), torch.no_grad():
        return world.model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.clone()


def merge(world: World, chosen: random.Random) -> Any:
    names = chosen.choice([None, world.names[:1], world.names if world.kind in ("lora", "dora", "bias") else None])
    world.model.merge_adapter(names, safe_merge=chosen.random() < 0.3)


def unmerge(world: World, chosen: random.Random) -> Any:
    world.model.unmerge_adapter()


def switch(world: World, chosen: random.Random) -> Any:
    world.model.set_adapter(chosen.choice(world.names))


def add(world: World, chosen: random.Random) -> Any:
    name = f"adapter{len(world.names)}"
    if name not in world.names:
        world.names.append(name)
        world.model.add_adapter(name, config(world.kind if world.kind != "tokens" else "lora", chosen.choice((2, 4))))


def delete(world: World, chosen: random.Random) -> Any:
    if len(world.names) > 1:
        world.model.unmerge_adapter()
        world.model.set_adapter(world.names[0])
        world.model.delete_adapter(world.names.pop())


def unload(world: World, chosen: random.Random) -> Any:
    how = chosen.choice(("merge_and_unload", "unload"))
    world.model, world.unloaded = getattr(world.model, how)(), True


CALLS: dict[Callable[[World, random.Random], Any], int] = {
    train: 4, logits: 3, disabled: 4, merge: 4, unmerge: 2, switch: 3, add: 2, delete: 1, unload: 1
}  # fmt: skip


def result(call: Callable[..., Any], world: World, seed: int) -> Any:
    torch.manual_seed(seed)
    try:
        return call(world, random.Random(seed))
    except (ValueError, KeyError, RuntimeError) as error:  # those of PEFT
        return type(error).__name__ if not isinstance(error, horizon_lm.errors.HorizonError) else error


def state(world: World) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in world.model.named_parameters()}


def play(seed: int, length: int = 10) -> str:
    """Make a sequence of calls on both models. Return a description.

    Raises:
        Divergence: the models differ; the message has the calls.
    """
    chosen = random.Random(seed)
    kind, late, tied = chosen.choice(list(KINDS)), chosen.random() < 0.5, chosen.random() < 0.3
    tied = tied and kind not in ("embedding", "saved head")
    head, calls = chosen.choice(("whole", "chunked")), []
    plain, inside = (tiny_models.build("llama", tie_word_embeddings=tied) for _ in range(2))
    options: dict[str, Any] = {"precision": "float32", "head": head, "resident_blocks": chosen.choice((None, 2))}
    worlds = [World(plain, kind)]
    if late:
        worlds.append(World(horizon_lm.stream(inside, **options), kind))
    else:
        worlds.append(World(inside, kind))
        worlds[1].model = horizon_lm.stream(worlds[1].model, **options)
    for call in chosen.choices(list(CALLS), list(CALLS.values()), k=length):
        number = chosen.randrange(10**6)
        calls.append(call.__name__)
        expected, got = (result(call, world, number) for world in worlds)
        found = difference(expected, got, TOLERANCE) or difference(*map(state, worlds), TOLERANCE)
        found = found or difference(*(result(logits, world, 3) for world in worlds), TOLERANCE)
        if found:
            raise Divergence(
                f"seed {seed}, {kind}, {'late' if late else 'early'}, tied {tied}, {head}, {calls}: {found}; {got}"
            )
        if worlds[0].unloaded:
            break
    return f"{kind}: {' '.join(calls)}"


def main() -> int:
    """Play sequences for some time, and print what diverges."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    start, seed, failures = time.monotonic(), arguments.seed, 0
    while time.monotonic() - start < arguments.seconds:
        try:
            play(seed)
        except Exception as error:
            failures += 1
            print(f"{seed}: {type(error).__name__}: {str(error)[:700]}", flush=True)
        seed += 1
    print(f"{seed - arguments.seed} sequences, {failures} failures, {time.monotonic() - start:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
