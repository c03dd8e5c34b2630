"""Teach a small LLaVA with random weights to caption drawn pictures: by a run file, and by plain Hugging Face.

    python benchmarks/picture_task.py --tokenizer .cache/smollm2-135m-instruct [--seeds 0 1] [--output FILE.md --figure FILE.jpg]

The tokenizer is that of SmolLM2 (`make demo` writes its folder), the processor that of transformers; the pictures are drawn, so nothing
is downloaded. Plain Hugging Face is a short loop over the same rows in the same order, with torch's AdamW. It also captions
the held-out pictures, with the folder that the run has exported. Seeds may be run at once, each by a command of its own; a last
command with all of them reads their results and writes the page.
"""

import argparse
import json
import os
import shutil
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import picture_model
import torch
import transformers
from peers_cpu import processor, versions
from picture_rows import KNOWN, NEW, answer_of, read_rows, write_rows

import horizon_lm

COMPARED = 20  # steps whose losses are compared one by one
SHOWN = 16  # pictures in the figure


def settings(model: Path, rows: Path, output: Path, steps: int, batch: int, seed: int) -> dict[str, Any]:
    """Return the run file."""
    return {
        "objective": "sft", "model_name_or_path": str(model), "datasets": [str(rows)], "device": "cpu", "precision": "float32",
        "freeze_vision_tower": False, "freeze_multi_modal_projector": False, "per_device_train_batch_size": batch, "max_steps": steps,
        "learning_rate": 1.5e-3, "lr_scheduler_type": "cosine", "warmup_steps": min(20, steps // 2), "adam_beta2": 0.95, "seed": seed,
        "logging_steps": 1, "save_strategy": "no", "output_dir": str(output),
    }  # fmt: skip


def run_seed(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train both from the same weights; return losses, held-out rows and their captions, which are read again if the seed has been run."""
    folder = arguments.runs / f"seed{seed}"
    if not (folder / "result.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        rows = write_rows(folder / "train", KNOWN, arguments.rows, seed=3 * seed)
        write_rows(folder / "known", KNOWN, arguments.held_out, seed=3 * seed + 1)
        write_rows(folder / "new", NEW, arguments.held_out, seed=3 * seed + 2)
        start = picture_model.save_model(folder / "start", arguments.tokenizer, seed)
        run = settings(start, rows, folder / "run", arguments.steps, arguments.batch, seed)
        (folder / "result.json").write_text(json.dumps(train_both(folder, run, arguments.plain_steps)))
    held_out = {kind: read_rows(folder / kind / "rows.jsonl") for kind in ("known", "new")}
    return json.loads((folder / "result.json").read_text()) | {"rows": held_out}


def train_both(folder: Path, run: dict[str, Any], plain_steps: int) -> dict[str, Any]:
    """Return the losses of both, and the captions of the model that the run has exported."""
    plain = []
    for step, loss in enumerate(picture_model.train(run, plain_steps)):
        plain.append(loss)
        print(f"plain: step {step + 1}: {loss:.6f}", flush=True)
    exported = horizon_lm.train(run, print_fn=lambda line: print(line, flush=True)).model_dir
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "horizon": [line["loss"] for line in lines if "loss" in line],
        "plain": plain,
        "captions": {
            kind: picture_model.captions_of(exported, read_rows(folder / kind / "rows.jsonl"))
            for kind in ("known", "new")
        },
        "parameters": picture_model.open_model(exported)[1].num_parameters(),
    }


def share_exact(captions: list[str], rows: list[dict[str, Any]]) -> float:
    """Return the share of captions that are those of the rows, character by character."""
    return sum(caption == answer_of(row) for caption, row in zip(captions, rows, strict=True)) / len(rows)


def relative_differences(found: dict[str, Any]) -> list[float]:
    return [abs(ours - plain) / plain for ours, plain in zip(found["horizon"], found["plain"], strict=False)]


def report(arguments: argparse.Namespace, results: dict[int, dict[str, Any]]) -> str:
    """Return the page about all seeds."""
    command = f"python benchmarks/picture_task.py --tokenizer .cache/smollm2-135m-instruct --seeds {' '.join(map(str, results))}"
    first = next(iter(results.values()))
    lines = [
        "# Captions of drawn pictures", "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s). {versions('torch', 'transformers')}.",
        f"Command: `{command}`; it reads the results of seeds that have been run before, each in a process of its own.", "",
        f"A LLaVA with random weights ({first['parameters'] / 1e6:.1f}M parameters: a tower of CLIP and a llama, 2 layers of width 128 each, with SmolLM2's tokenizer) "
        "learns to caption pictures of 48 x 48 pixels, which have two shapes of one colour and two digits in their quarters. Tower, projector and "
        f"llama are trained, for {arguments.steps} steps of {arguments.batch} rows out of {arguments.rows:,}; float32, AdamW, cosine schedule. Quarters, places, sizes, angles, tints and "
        f"noise are random in each picture. Colours, shapes and digits make {len(KNOWN) + len(NEW)} combinations, of which {len(NEW)} are in no training row. "
        f"A caption such as `{answer_of(first['rows']['new'][0])}` is right if each of its characters is; plain transformers decode it "
        "greedily, with the folder that the run has exported.", "",
        f"| seed | loss of the first step | mean loss of the last {COMPARED} | right, {arguments.held_out} held-out pictures "
        f"| right, {arguments.held_out} pictures of new combinations | first {len(first['plain'])} losses beside Hugging Face's, largest relative difference |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for seed, found in results.items():
        shares = " | ".join(f"{share_exact(found['captions'][kind], rows):.3f}" for kind, rows in found["rows"].items())
        last = statistics.fmean(found["horizon"][-COMPARED:])
        off = max(relative_differences(found))
        lines.append(f"| {seed} | {found['horizon'][0]:.4f} | {last:.4f} | {shares} | {off:.1e} |")
    if arguments.figure:
        link = os.path.relpath(arguments.figure, arguments.output.parent if arguments.output else Path())
        lines += ["", f"![Losses of both, and captions of held-out pictures]({link})"]
    lines += [
        "",
        "| step | " + " | ".join(f"Horizon-LM, seed {seed} | Hugging Face | difference" for seed in results) + " |",
    ]
    lines.append("|---" * (1 + 3 * len(results)) + "|")
    for step in range(len(first["plain"])):
        figures = (
            f"{found['horizon'][step]:.7f} | {found['plain'][step]:.7f} | {relative_differences(found)[step]:.1e}"
            for found in results.values()
        )
        lines.append(f"| {step + 1} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def draw_figure(path: Path, found: dict[str, Any]) -> None:
    """Draw the losses of a seed, and captions of pictures of new combinations; wrong ones are red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=90, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    axes = above.add_subplot()
    for losses, label, width in ((found["plain"], "Hugging Face", 4), (found["horizon"], "Horizon-LM", 1)):
        axes.plot(range(1, len(losses) + 1), losses, label=f"{label}, {len(losses)} steps", linewidth=width)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend(frameon=False)
    captions, rows = found["captions"]["new"], found["rows"]["new"]
    grid = below.subplots(2, SHOWN // 2, squeeze=False).flat
    for place, caption, row in zip(grid, captions, rows, strict=False):
        place.imshow(row["picture"])
        place.set_title(caption, fontsize=7, color="black" if caption == answer_of(row) else "red")
        place.axis("off")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=6400)
    parser.add_argument("--plain-steps", type=int, default=COMPARED)
    parser.add_argument("--held-out", type=int, default=300)
    parser.add_argument("--runs", type=Path, default=Path("runs/picture_task"))
    parser.add_argument("--output", type=Path, help="Markdown file. Default: standard output")
    parser.add_argument("--figure", type=Path, help="image file of losses and captions")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    results = {seed: run_seed(arguments, seed) for seed in arguments.seeds}
    if arguments.figure:
        draw_figure(arguments.figure, results[arguments.seeds[0]])
    text = report(arguments, results)
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
