"""Train adapters on random quantized weights in the shape of a published model, and compare its bytes with the plan.

    python benchmarks/quantized_scale.py [--model gpt-oss-120b] [--layers 2] [--tokens 128] [--device cpu] [--output FILE.md]
    python benchmarks/quantized_scale.py --device cuda --device-memory 24GB --tokens 32768     # the whole model, on a GPU

Needs no network and no file: codes and scales are drawn into host memory, in threads. It stops by itself before ``--seconds``.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers_cpu import processor, versions

import horizon_lm
from horizon_lm.common.quantities import format_bytes, parse_bytes
from horizon_lm.common.resources import usable_cores
from horizon_lm.engine.opening.filling import add_adapters, with_store
from horizon_lm.engine.opening.options import StreamArguments, open_device
from horizon_lm.memory.store import Store
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.files.quantized_checkpoint import Quantized
from horizon_lm.model.known_models import find_known, known_config
from horizon_lm.model.quantization import expected_codecs
from horizon_lm.model.skeletons import build_skeleton
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.request import Machine, Request
from horizon_lm.planning.arithmetic.residency import ExpectedBatch
from horizon_lm.planning.measure.model_outline import outline_model
from horizon_lm.schedule.trace import Trace, exposed_seconds

LENGTH = 4096
ADAPTERS = Adapters(r=16, lora_dropout=0.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
_CHUNK = 1 << 26  # bytes that are drawn once and repeated


@dataclass
class Planned:
    """The plan of the run: host bytes, device buffers, and how many rows a micro-batch has."""

    host: dict[str, int]
    device: dict[str, int]
    parameters: int


# Sizes of a toy in the formats of the true ones, to try this script.
_TOY = {
    "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip


def configured(name: str, layers: int | None, is_toy: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the config of a known model, cut to this many layers, and the format of its weights. A toy is narrow, too."""
    known = find_known(name)
    if known is None or known.quantization is None:
        raise SystemExit(f"{name} is not a known model with quantized weights")
    config = known_config(known)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    for size, value in _TOY.items() if is_toy else ():
        if hasattr(config, size):
            setattr(config, size, value)
    return config, dict(known.quantization)


def plan(config: Any, quantization: dict[str, Any], rows: int, length: int, options: dict[str, Any]) -> Planned:
    outline = outline_model(ModelSource(config, "random"), length=length, dtype=torch.bfloat16, masked=False, adapters=ADAPTERS, quantized=Quantized.of(quantization, None))  # fmt: skip
    request = Request(
        rows,
        precision="fp32_master",
        grad_bytes=4,
        activation_checkpoints="host",
        distinct_tokens=rows * length,
        **options,
    )
    step = choose(outline, request, Machine("here", True, None)).step
    return Planned(
        dict(host_bytes(step)), dict(device_use(step).buffers),
        outline.layout.num_parameters,
    )  # fmt: skip


def fill(store: Store) -> float:
    """Draw all weights, in threads, and return the seconds it took."""
    begin = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (_CHUNK,), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 122, (_CHUNK,), dtype=torch.uint8, generator=generator)  # powers of two: 2**-9 to 2**-6
    values = (torch.randn(_CHUNK // 2, generator=generator) * 0.02).to(torch.bfloat16)

    def repeat(target: torch.Tensor, source: torch.Tensor) -> None:
        for part in target.split(len(source)):
            part.copy_(source[: len(part)])

    jobs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for slabs in store.units.values():
        jobs += [(part, values) for slab in slabs.of_weights for part in slab.weights.split(_CHUNK) if part.numel()]
        for name, codec in slabs.codecs.items():
            for component, view in codec.views(store.packed(name), store.shape(name)).items():
                jobs += [(part, scales if component == "scales" else codes) for part in view.view(-1).split(_CHUNK)]
    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(lambda job: repeat(*job), jobs))
    return time.perf_counter() - begin


def train_step(model: Any, optimizer: Any, ids: torch.Tensor) -> float:
    """Run a step on rows of tokens and return its loss."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(arguments: argparse.Namespace) -> str:
    rows = max(1, arguments.tokens // LENGTH)
    if arguments.device.startswith("cuda") and arguments.device_memory is not None:
        total = torch.cuda.get_device_properties(arguments.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, arguments.device_memory / total), torch.device(arguments.device)
        )
    length = arguments.tokens // rows
    config, quantization = configured(arguments.model, arguments.layers, arguments.toy)
    options: dict[str, Any] = {"device_micro_batch_size": 1, "head_chunk_tokens": min(512, length)}
    planned = plan(config, quantization, rows, length, options)
    begin = time.perf_counter()
    device = open_device(arguments.device, arguments.device_memory)
    settings = StreamArguments(
        device=device, precision="fp32_master", compute_dtype=torch.bfloat16, activation_checkpoints="host", compile=False,
        **options,
    )  # fmt: skip
    model = build_skeleton(config).requires_grad_(False)
    find_codecs = partial(expected_codecs, quantization=quantization)
    examined, store = with_store(model, settings, True, find_codecs)
    filled = fill(store)
    store.source_dtypes |= dict.fromkeys(store.unit_of, torch.bfloat16)
    torch.manual_seed(0)
    adapted = add_adapters(ADAPTERS, examined.parts, store, settings).train()
    inside = adapted.base_model.model
    engine = inside._horizon.engine
    engine.expect_batch(ExpectedBatch(rows * length, rows * length))
    optimizer = horizon_lm.AdamW(adapted, lr=1e-4, max_grad_norm=1.0)
    loaded = time.perf_counter() - begin
    seconds: list[float] = []
    losses: list[float] = []
    trace = Trace()
    while (
        len(seconds) < arguments.steps
        and time.perf_counter() - begin + 1.3 * max(seconds, default=0) < arguments.seconds
    ):
        if len(seconds) == min(2, arguments.steps - 1):
            horizon_lm.synchronize(inside)
            engine.device.trace = trace
            moved = dict(horizon_lm.stats(inside)["moved_bytes"])
            traced_from = len(seconds)
        ids = torch.randint(0, config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(len(seconds)))
        start = time.perf_counter()
        losses.append(train_step(adapted, optimizer, ids))
        horizon_lm.synchronize(inside)
        seconds.append(time.perf_counter() - start)
        print(f"step {len(seconds)}: loss {losses[-1]:.4f}, {seconds[-1]:.2f} s", flush=True)
    stats = horizon_lm.stats(inside)
    traced = len(seconds) - traced_from
    per_step = {
        direction: sum(n - moved.get(op, 0) for op, n in stats["moved_bytes"].items() if op.startswith(kinds)) / traced
        for direction, kinds in (("in", ("stream_in", "fetch")), ("out", ("stream_out", "offload")))
    }
    exposed = ", ".join(f"{cause} {value / traced:.2f} s" for cause, value in exposed_seconds(trace.spans).items())
    middle = sorted(seconds[1:] or seconds)[len(seconds[1:] or seconds) // 2]
    host = {kind: n for kind, n in stats["host_bytes_by_kind"].items() if n}
    buffers = stats["device_bytes_by_kind"]
    reserved = torch.cuda.max_memory_reserved() if arguments.device.startswith("cuda") else None
    lines = [
        f"# Adapters on quantized weights in the shape of {arguments.model}", "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, device {_name(arguments.device)}. "
        f"{versions('torch', 'transformers', 'peft', 'numba')}.",
        f"{planned.parameters / 1e9:.2f}B parameters in {config.num_hidden_layers} layers of {'toy' if arguments.toy else 'true'} width, with random codes; LoRA of rank 16 on the "
        f"attention, {len(seconds)} steps of {rows} x {length} tokens, computed in bf16, activation checkpoints in host memory.", "",
        f"- {middle:.2f} s a step, {rows * length / middle:,.1f} tokens/s; loss {losses[0]:.4f} to {losses[-1]:.4f}; weights drawn in {filled:.1f} s, "
        f"ready after {loaded:.1f} s.",
        f"- Over the link in a step: {format_bytes(round(per_step['in']))} in, {format_bytes(round(per_step['out']))} out. "
        f"Time without computation: {exposed or 'none'}.",
        *([f"- Reserved by torch on the device: {format_bytes(reserved)}."] if reserved is not None else []),
        "", "| host memory | planned | allocated |", "|---|---|---|",
        *(f"| {kind} | {planned.host.get(kind, 0):,} | {host.get(kind, 0):,} |" for kind in {**planned.host, **host}),
        f"| total | {sum(planned.host.values()):,} | {sum(host.values()):,} |", "",
        "| device buffers | planned | allocated |", "|---|---|---|",
        *(f"| {kind} | {planned.device.get(kind, 0):,} | {buffers.get(kind, 0):,} |" for kind in {**planned.device, **buffers}),
        f"| total | {sum(planned.device.values()):,} | {stats['device_bytes_peak']:,} (peak) |", "",
        f"Command: `python benchmarks/quantized_scale.py --model {arguments.model} --layers {config.num_hidden_layers} --tokens {arguments.tokens} "
        f"--device {arguments.device} --steps {arguments.steps}`",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _name(device: str) -> str:
    return f"{device} ({torch.cuda.get_device_name()})" if device.startswith("cuda") else device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="gpt-oss-120b", help="a known model that was published with quantized weights"
    )
    parser.add_argument("--layers", type=int, help="number of layers; all of them by default")
    parser.add_argument("--tokens", type=int, default=32768, help=f"tokens of a step, in rows of {LENGTH}")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no step that would end later")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-memory", type=parse_bytes, help="limit of the buffers on the device, such as 24GB")
    parser.add_argument("--toy", action="store_true", help="a narrow model, to try this script")
    parser.add_argument("--output", type=Path, help="Markdown file. Default: standard output")
    arguments = parser.parse_args()
    text = train(arguments)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
