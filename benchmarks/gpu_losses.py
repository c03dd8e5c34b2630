"""Compare the losses of some steps on real text: ours, and a model that is resident on the device, from the same weights.

    python3 benchmarks/gpu_losses.py [cuda] [--steps 20] [--output FILE.md]

The model has the shape of Qwen2.5-0.5B and random weights, and the text is this repository's documentation, cut into tokens by
a vocabulary that is built from it: a machine without a network has neither published weights nor a published text. Each
column starts from the same weights, which are exact in bf16, and trains on the same rows with AdamW and clipping.
"""

import argparse
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_models import MODELS, make_config, random_model, toy
from gpu_systems import MAX_GRAD_NORM, FusedMasters
from peers_cpu import processor, versions

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE = 3e-4
VOCABULARY = 8192
_FIRST_ID = 3  # ids below have meanings of their own in many models


def read_tokens(vocabulary: int) -> torch.Tensor:
    """Return the documentation of this repository in tokens of a vocabulary that is built from it."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    files = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [file.read_text() for file in files]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    size = max(256, vocabulary - _FIRST_ID)
    tokenizer.train_from_iterator(
        texts, BpeTrainer(vocab_size=size, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    )
    ids = [each for text in texts for each in tokenizer.encode(text).ids]
    return torch.tensor(ids) + _FIRST_ID


def batches(ids: torch.Tensor, steps: int, rows: int, length: int) -> list[torch.Tensor]:
    """Return the rows (B, T) of each step: consecutive tokens, from the beginning again where they end."""
    needed = steps * rows * length
    repeated = ids.repeat(-(-needed // len(ids)))[:needed]
    return list(repeated.view(steps, rows, length))


def ours(model: Any, device: torch.device, precision: str, rows: list[torch.Tensor]) -> list[float]:
    """Train a model as a streamed one, and return the loss of each step."""
    import horizon_lm

    streamed = horizon_lm.stream(model, device.type, precision)
    optimizer = horizon_lm.AdamW(streamed, lr=LEARNING_RATE, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM)
    losses = []
    for ids in rows:
        loss = streamed(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def resident(model: Any, device: torch.device, precision: str, rows: list[torch.Tensor]) -> list[float]:
    """Train a model on the device: in float32, or in bf16 with float32 masters. Return the loss of each step."""
    if precision == "float32":
        model = model.float().to(device)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    else:
        model = model.bfloat16().to(device)
        optimizer = FusedMasters(model.parameters(), LEARNING_RATE)
    losses = []
    for ids in rows:
        on_device = ids.to(device)
        loss = model(input_ids=on_device, labels=on_device, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


COLUMNS: dict[str, tuple[Callable[..., list[float]], str]] = {
    "resident, float32": (resident, "float32"),
    "resident, bf16 with fp32 masters": (resident, "fp32_master"),
    "ours, `fp32_master`": (ours, "fp32_master"),
    "ours, `float32`": (ours, "float32"),
}


def compare(device: torch.device, steps: int, write: Callable[[str], None]) -> None:
    """Train each column, and write the table when one more column is known."""
    on_gpu = device.type == "cuda"
    settings, (rows, length) = (MODELS["qwen2.5-0.5b"], (8, 1024)) if on_gpu else (toy(MODELS["qwen2.5-0.5b"]), (2, 64))
    settings = settings if on_gpu else settings | {"vocab_size": 512}
    batch = batches(read_tokens(min(VOCABULARY, settings["vocab_size"])), steps, rows, length)
    torch.backends.cuda.enable_cudnn_sdp(False)  # which may choose other kernels when a block is recomputed
    losses: dict[str, list[float]] = {}
    for name, (train, precision) in COLUMNS.items():
        torch.manual_seed(0)
        model = random_model(make_config(settings, length), torch.bfloat16, device, torch.device("cpu"))
        if train is ours:
            model = model.float() if precision == "float32" else model
            for module in model.modules():  # buffers were computed where weights were drawn
                module._buffers.update({key: each.cpu() for key, each in module._buffers.items() if each is not None})
        losses[name] = train(model, device, precision, batch)
        del model
        write(describe(losses, device, rows, length, on_gpu))


def describe(losses: dict[str, list[float]], device: torch.device, rows: int, length: int, on_gpu: bool) -> str:
    """Return the text of the result."""
    names = list(losses)
    exact = losses[names[0]]
    where = torch.cuda.get_device_name(device) if on_gpu else "CPU (a toy)"
    lines = [
        "# Losses on real text, streamed and resident", "",
        f"{date.today().isoformat()}, {where}; host {processor()}, {os.cpu_count()} cores. {versions('torch', 'transformers', 'numba')}.", "",
        f"{'Qwen2.5-0.5B' if on_gpu else 'A toy'} with random weights from seed 0, {rows} x {length} tokens a step of this repository's documentation, in a vocabulary "
        f"built from it; AdamW with learning rate {LEARNING_RATE:g}, clipped to {MAX_GRAD_NORM:g}. Uncompiled resident models; ours as it is by default.",
        "",
        f"| step | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|",
        *(f"| {step + 1} | {' | '.join(f'{losses[name][step]:.5f}' for name in names)} |" for step in range(len(exact))), "",
    ]  # fmt: skip
    for name in names[1:]:
        differences = [abs(a - b) for a, b in zip(losses[name], exact, strict=True)]
        lines.append(
            f"- {name}: at most {max(differences):.2e} from {names[0]}, {differences[-1]:.2e} in the last step"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="Markdown file, rewritten after each column")
    arguments = parser.parse_args()
    texts: list[str] = []

    def write(text: str) -> None:
        texts.append(text)
        if arguments.output is not None:
            arguments.output.write_text(text)

    compare(torch.device(arguments.device), arguments.steps, write)
    print(texts[-1])


if __name__ == "__main__":
    main()
