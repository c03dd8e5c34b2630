"""Measure seconds and memory to prepare a million short conversations, the first time and from the cache.

    python benchmarks/million_rows.py --model .cache/smollm2-135m-instruct [--rows 1000000] [--num_proc 2] [--output FILE.md]

Each measurement is a process of its own, whose anonymous memory, including its children's, is sampled ten times a second.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import datasets
import psutil
import torch

WORDS = [
    "star",
    "dome",
    "keeper",
    "island",
    "mirror",
    "cloud",
    "tide",
    "lamp",
    "night",
    "watch",
    "boat",
    "glass",
    "winter",
    "comet",
    "rope",
    "harbour",
    "clock",
]


def write_rows(path: Path, count: int) -> None:
    """Write distinct conversations of one or two turns."""
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            turns = []
            for _ in range(1 + number % 2):
                question = " ".join(generator.choices(WORDS, k=6))
                turns.append({"role": "user", "content": f"Entry {number}: what of {question}?"})
                turns.append(
                    {"role": "assistant", "content": " ".join(generator.choices(WORDS, k=generator.randint(4, 16)))}
                )
            stream.write(json.dumps({"messages": turns}) + "\n")


def prepare(model: str, path: Path, num_proc: int) -> None:
    """Prepare rows as a run does before its first step, and print the figures of this process."""
    from horizon_lm.runs.admission.inputs import RowShape, fetch_source
    from horizon_lm.runs.config.load import as_config
    from horizon_lm.runs.data.checks import check_rows
    from horizon_lm.runs.data.loader import Loader
    from horizon_lm.runs.data.preprocess import prepare as prepare_rows
    from horizon_lm.runs.training.rows import preprocess_config, training_sampler
    from horizon_lm.runs.training.setup import load_tokenizer

    config = as_config(
        {"model_name_or_path": model, "datasets": str(path), "max_length": 256, "dataset_num_proc": num_proc}
    )
    process, peak = psutil.Process(), [0]

    def watch() -> None:
        while True:
            total = 0
            for each in (process, *process.children(recursive=True)):
                try:
                    memory = each.memory_full_info() if platform.system() != "Linux" else each.memory_info()
                    total += memory.rss - getattr(memory, "shared", 0)
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total)
            time.sleep(0.1)

    tokenizer = load_tokenizer(config, fetch_source(config).model)
    before = process.memory_info()
    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    report = prepare_rows(config.datasets or (), tokenizer, preprocess_config(config))
    rows = report.rows
    prepared = time.perf_counter()
    findings = check_rows(report, tokenizer)
    audited = time.perf_counter()
    loader = Loader(rows, training_sampler(config, rows))
    RowShape.of(loader, [])
    planned = time.perf_counter()
    loader.batch(loader.sampler.steps_per_epoch - 1)
    batch = time.perf_counter()
    print(json.dumps({
        "rows": len(rows), "tokens": int(rows.num_tokens.sum()), "findings": len(findings), "prepare": prepared - start,
        "audit": audited - prepared, "shape": planned - audited, "batch": batch - planned,
        "before": before.rss - before.shared, "peak": peak[0],
    }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--num_proc", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        prepare(arguments.model, arguments.child, arguments.num_proc)
        return
    lines = [
        "# Preparing a million rows", "",
        f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}. torch {torch.__version__}, datasets {datasets.__version__}.", "",
        f"    python benchmarks/million_rows.py --model .cache/smollm2-135m-instruct --rows {arguments.rows} "
        f"--num_proc {arguments.num_proc}", "",
        "| | rows | tokens | tokenize, s | audit, s | lengths, s | a batch, ms | memory before, MiB | peak, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, arguments.rows)
        small = Path(folder) / "small.jsonl"
        write_rows(small, arguments.rows // 10)
        environment = {**os.environ, "HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        for name, file in (("a tenth of the rows", small), ("first time", path), ("cached", path)):
            command = [
                sys.executable,
                __file__,
                "--model",
                arguments.model,
                "--num_proc",
                str(arguments.num_proc),
                "--child",
                str(file),
            ]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            found = json.loads(result.stdout.splitlines()[-1])
            lines.append(
                f"| {name} | {found['rows']:,} | {found['tokens']:,} | {found['prepare']:.1f} | {found['audit']:.1f} | "
                f"{found['shape']:.1f} | {found['batch'] * 1e3:.1f} | {found['before'] / 2**20:.0f} | {found['peak'] / 2**20:.0f} |"
            )
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
