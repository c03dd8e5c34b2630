"""Fine-tune SmolLM2-135M with TRL's SFTTrainer on real rows: as it is, and streamed by `horizon_lm.trainer`.

    python benchmarks/trainer_sft.py --model .cache/smollm2-135m-instruct --data DATA [--rounds 3] [--output FILE.md]

Each system trains in a process of its own; within a round the systems take turns. TRL's defaults, with 4 micro-batches a step;
its default, autocast to bfloat16, is a system of its own, so that float32 is compared with float32.
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

STEPS = 5
SYSTEMS: dict[str, dict[str, Any]] = {
    "TRL, float32": {"streamed": False},
    "Horizon-LM, `float32`": {"streamed": True, "precision": "float32"},
    "TRL, autocast to bfloat16": {"streamed": False, "bf16": True},
    "Horizon-LM, `fp32_master`": {"streamed": True, "precision": "fp32_master"},
}


def train(model: str, data: Path, system: dict[str, Any]) -> dict[str, Any]:
    """Train in this process, and return what was seen."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    import horizon_lm
    from horizon_lm.common.resources import resident_bytes

    before = resident_bytes()
    if system["streamed"]:
        opened = horizon_lm.from_pretrained(model, device="cpu", precision=system["precision"])
        cls = horizon_lm.trainer(SFTTrainer)
    else:
        opened, cls = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), SFTTrainer
    lines = [json.loads(line) for line in (data / "gsm8k_train_1000.jsonl").read_text().splitlines()[:200]]
    rows = [
        {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]}
        for r in lines
    ]
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    args = SFTConfig(
        "unused", max_steps=STEPS, per_device_train_batch_size=1, gradient_accumulation_steps=4, logging_steps=1, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, bf16=system.get("bf16", False), learning_rate=1e-4, seed=7, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = cls(
        model=opened, args=args, train_dataset=datasets.Dataset.from_list(rows), callbacks=[Clock()],
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    seen = {
        "losses": [line["loss"] for line in logs], "norms": [float(line["grad_norm"]) for line in logs], "seconds": seconds,
        "tokens": logs[-1]["num_tokens"] / STEPS, "peak": _peak_bytes() - before,
    }  # fmt: skip
    if system["streamed"]:
        stats = horizon_lm.stats(opened)
        moved = sum(n for op, n in stats["moved_bytes"].items() if op.startswith("stream_in:block"))
        blocks = sum(
            slabs.plain.weights.nbytes for unit, slabs in opened._horizon.engine.store.units.items() if unit.is_block
        )
        seen |= {"device": stats["device_bytes_peak"], "host": stats["host_bytes"], "loads": moved / blocks / STEPS}
    return seen


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
    return json.loads(result.stdout.splitlines()[-1])


def row(name: str, rounds: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """Return a system's line of the table."""
    step = statistics.median(statistics.median(each["seconds"][1:]) for each in rounds)
    ratio = statistics.median(
        statistics.median(ours["seconds"][1:]) / statistics.median(other["seconds"][1:])
        for ours, other in zip(rounds, plain, strict=True)
    )
    off = [
        max(abs(a - b) / abs(b) for a, b in zip(rounds[0][key], plain[0][key], strict=True))
        for key in ("losses", "norms")
    ]
    peak = statistics.median(r["peak"] for r in rounds)
    seen = rounds[0]
    streamed = (
        f"{seen['host'] / 1e9:.2f} GB | {seen['device'] / 1e9:.2f} GB | {seen['loads']:.1f}"
        if "host" in seen
        else "- | - | -"
    )
    return (
        f"| {name} | {step:.2f} | {ratio:.2f} | {seen['losses'][0]:.6f} to {seen['losses'][-1]:.6f} | {off[0]:.1e} | {off[1]:.1e} "
        f"| {peak / 1e9:.2f} GB | {streamed} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="Markdown file. Default: standard output")
    parser.add_argument("--system", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.system:
        print(json.dumps(train(arguments.model, arguments.data, SYSTEMS[arguments.system])))
        return
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    for number in range(arguments.rounds):
        for name, rounds in found.items():
            rounds.append(in_a_process(arguments, name))
            print(f"round {number}: {name}: {rounds[-1]}", flush=True)
    plain = found["TRL, float32"]
    lines = [
        "# TRL's SFTTrainer, plain and streamed", "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, device cpu. {versions('torch', 'transformers', 'trl', 'numba')}.",
        f"SmolLM2-135M-Instruct, the first 200 rows of GSM8K; {STEPS} steps of 4 micro-batches of 1 row, {plain[0]['tokens']:.0f} tokens a step; "
        f"medians of {arguments.rounds} rounds, without each run's first step.", "",
        f"Command: `python benchmarks/trainer_sft.py --model .cache/smollm2-135m-instruct --data DATA --rounds {arguments.rounds}`", "",
        "| system | step, s | times TRL's in float32 | loss | losses off by | gradient norms off by | peak of the process above its start "
        "| host store | device buffers | loads of a block and step |", "|" + "---|" * 10,
        *(row(name, rounds, plain) for name, rounds in found.items()), "",
        "The device is the CPU, so its buffers are part of the process. On a GPU they alone would be device memory.",
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
