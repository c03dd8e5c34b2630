"""A QLoRA step on the CPU with the compiled decoder and with the codec's torch code, which take turns in one process.

    python benchmarks/decoders_cpu.py [--rounds 5] [--output FILE.md]

A model of 6 blocks with random weights in NF4, adapters of rank 16 on all linear layers, AdamW, one row. Processor seconds are
those of all threads of the process; they tell more than the clock on a machine that other programs use, too.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import peft
import torch
from peers_cpu import processor, versions
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import horizon_lm
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.kernels import host_decoding

CONFIG = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
    vocab_size=8192,
)  # fmt: skip
CASES = [("float32", 256), ("bf16", 256), ("float32", 1024), ("bf16", 1024)]  # precision and tokens of a step


def by_torch(codec: Codec, components: Any, out: torch.Tensor, dtype: torch.dtype) -> None:
    codec.decode_part(components, out, dtype)


DECODERS = {"compiled": host_decoding.decode, "torch": by_torch}


def measure(folder: Path, precision: str, tokens: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of the clock and of the processor for each decoder."""
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = horizon_lm.from_pretrained(folder, device="cpu", precision=precision, quantization_config=quantization)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    optimizer = horizon_lm.AdamW(model, lr=1e-4)
    ids = torch.randint(0, CONFIG.vocab_size, (1, tokens))

    def step(decode: Callable[..., None]) -> tuple[float, float]:
        host_decoding.decode = decode
        clock, busy = time.perf_counter(), time.process_time()
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        horizon_lm.synchronize(base)
        return time.perf_counter() - clock, time.process_time() - busy

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in DECODERS}
    for number in range(rounds + 1):
        for name in list(DECODERS)[:: 1 if number % 2 else -1]:
            seconds = step(DECODERS[name])
            if number:  # the first round compiles
                found[name].append(seconds)
    clocks = {name: statistics.median(clock for clock, _ in each) for name, each in found.items()}
    busy = {name: statistics.median(busy for _, busy in each) for name, each in found.items()}
    return {name: (clocks[name], busy[name]) for name in DECODERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = [
        "# Decoders of a quantized base on the CPU",
        "",
        f"{date.today().isoformat()}, {processor()}. {versions('torch', 'transformers', 'peft', 'numba')}.",
        f"Medians of {args.rounds} rounds without the first; a model of 6 blocks of width {CONFIG.hidden_size} in NF4, LoRA of rank 16.",
        "",
        f"Command: `python benchmarks/decoders_cpu.py --rounds {args.rounds}`",
        "",
        "| precision | tokens | step, s: compiled | torch | times compiled | processor, s: compiled | torch | times compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
        for precision, tokens in CASES:
            (clock, busy), (other, other_busy) = measure(Path(folder), precision, tokens, args.rounds).values()
            cells = f"{clock:.2f} | {other:.2f} | {other / clock:.2f} | {busy:.2f} | {other_busy:.2f} | {other_busy / busy:.2f}"
            lines.append(f"| {precision} | {tokens} | {cells} |")
            print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
