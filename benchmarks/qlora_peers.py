"""Train 4-bit LoRA adapters of SmolLM2-135M on real rows: plain PEFT with bitsandbytes, and streamed.

    python benchmarks/qlora_peers.py --model .cache/smollm2-135m-instruct --data DATA [--rounds 3] [--output FILE.md]

Each system trains in a process of its own; within a round the systems take turns. The same rows, adapters, learning rates and
AdamW; NF4 with double quantization, computing in float32. Needs bitsandbytes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from peers_cpu import processor, versions

STEPS, ROWS, HELD_OUT, LENGTH = 12, 4, 16, 256
SYSTEMS = ("PEFT + bitsandbytes", "Horizon-LM, `load_in_4bit`")


def rows_of(model: str, data: Path) -> list[Any]:
    """Return batches of 4 rows: those of the training steps, then those that are held out."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = [json.loads(line) for line in (data / "gsm8k_train_1000.jsonl").read_text().splitlines()]
    found = []
    for line in lines[: STEPS * ROWS + HELD_OUT]:
        ids = tokenizer(f"{line['question']}\n{line['answer']}{tokenizer.eos_token}").input_ids[:LENGTH]
        found.append(torch.tensor(ids))
    batches = []
    for start in range(0, len(found), ROWS):
        rows = found[start : start + ROWS]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return batches


def train(model: str, data: Path, streamed: bool) -> dict[str, Any]:
    """Train in this process, and return what was seen."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, set_seed

    import horizon_lm
    from horizon_lm.common.resources import resident_bytes

    batches, before = rows_of(model, data), resident_bytes()
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    if streamed:
        opened = horizon_lm.from_pretrained(model, device="cpu", precision="float32", quantization_config=config)
    else:
        opened = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=config)
    set_seed(7)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(opened, lora)
    if streamed:
        optimizer: Any = horizon_lm.AdamW(adapted, lr=2e-4)
    else:
        optimizer = torch.optim.AdamW([param for param in adapted.parameters() if param.requires_grad], lr=2e-4)
    held_out = [held_out_loss(adapted, batches[STEPS:])]
    losses, seconds = [], []
    for batch in batches[:STEPS]:
        start = time.perf_counter()
        loss = adapted.train()(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    held_out.append(held_out_loss(adapted, batches[STEPS:]))
    seen = {"losses": losses, "held_out": held_out, "seconds": seconds, "peak": _peak_bytes() - before}
    seen["tokens"] = sum(int(batch["attention_mask"].sum()) for batch in batches[:STEPS]) / STEPS
    if streamed:
        stats = horizon_lm.stats(opened)
        seen |= {"device": stats["device_bytes_peak"], "host": stats["host_bytes"]}
    return seen


def held_out_loss(model: Any, batches: list[Any]) -> float:
    """Return the mean loss of batches, in training mode, which differs by no dropout here.

    In evaluation mode on a CPU, bitsandbytes 0.50 packs its weights for another kernel, and does not train right afterwards.
    """
    import torch

    with torch.no_grad():
        return statistics.mean(float(model.train()(**batch).loss) for batch in batches)


def _peak_bytes() -> int:
    """Return the largest resident size of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def in_a_process(arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", arguments.model, "--data", str(arguments.data), "--system", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr[-3000:])
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def row(name: str, rounds: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """Return a system's line of the table."""
    step = statistics.median(statistics.median(each["seconds"][1:]) for each in rounds)
    ratio = statistics.median(
        statistics.median(ours["seconds"][1:]) / statistics.median(other["seconds"][1:])
        for ours, other in zip(rounds, plain, strict=True)
    )
    off = max(abs(a - b) / abs(b) for a, b in zip(rounds[0]["losses"], plain[0]["losses"], strict=True))
    peak, seen = statistics.median(each["peak"] for each in rounds), rounds[0]
    streamed = f"{seen['host'] / 1e6:.0f} MB | {seen['device'] / 1e6:.0f} MB" if "host" in seen else "- | -"
    first, last = seen["held_out"]
    return f"| {name} | {step:.2f} | {ratio:.2f} | {first:.5f} | {last:.5f} | {off:.1e} | {peak / 1e9:.2f} GB | {streamed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="Markdown file. Default: standard output")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        print(json.dumps(train(arguments.model, arguments.data, arguments.system != SYSTEMS[0])))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for number in range(arguments.rounds):
        for name, rounds in found.items():
            rounds.append(in_a_process(arguments, name))
            print(f"round {number}: {name}: {rounds[-1]}", flush=True)
    plain, ours = (found[name] for name in SYSTEMS)
    difference = abs(plain[0]["held_out"][1] - ours[0]["held_out"][1])
    lines = [
        "# QLoRA: plain PEFT with bitsandbytes, and streamed", "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, device cpu. "
        f"{versions('torch', 'transformers', 'peft', 'bitsandbytes', 'numba')}.",
        f"SmolLM2-135M-Instruct in NF4 with double quantization, LoRA of rank 16 on all linear layers, float32; the first {STEPS * ROWS} rows of "
        f"GSM8K in {STEPS} steps of {ROWS}, {plain[0]['tokens']:.0f} tokens each; loss of the next {HELD_OUT} rows before and after; "
        f"medians of {arguments.rounds} rounds, without each run's first step.", "",
        f"Command: `python benchmarks/qlora_peers.py --model .cache/smollm2-135m-instruct --data DATA --rounds {arguments.rounds}`", "",
        "| system | step, s | times PEFT's | held-out loss before | after | losses of steps off by | peak of the process above its start "
        "| host store | device buffers |", "|" + "---|" * 9,
        *(row(name, rounds, plain) for name, rounds in found.items()), "",
        f"The held-out losses after training differ by {difference:.1e}. The device is the CPU, so its buffers are part of the process.",
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
