"""Record the numbers of runs and plans, and compare them bit for bit with an earlier record: ``make golden``.

A change of the code's structure must change no number. The record holds, for runs that combine every two values of the
factors below, each step's loss and gradient norm, and hashes of the exported model and of the units of a checkpoint; and
the plans of known models on known machines. It depends on the machine and its libraries, so it is not committed::

    python -m tests.golden.record RECORD.json             # write it, or compare with it if it exists
    python -m tests.golden.record RECORD.json --only 3    # compare one run
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "family": {"tied": {}, "untied": {}, "experts": {}, "hybrid": {}, "images": {}},
    "precision": {name: {"precision": name} for name in ("fp32_master", "bf16", "float32")},
    "moments": {name: {"moments": name} for name in ("float32", "bfloat16", "8bit")},
    "head": {"chunked": {"head_chunk_tokens": 48}, "whole": {"head": "whole"}},
    "micro_batches": {"one": {"device_micro_batch_size": 4}, "two": {"device_micro_batch_size": 2}},
    "accumulation": {"one": {}, "two": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}},
    "base": {
        "full": {},
        "lora": {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.1, "lora_r": 4},
        "4bit": {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 4, "load_in_4bit": True},
    },
    "ranks": {"one": {}, "two": {}},
    "objective": {"sft": {}, "dpo": {"objective": "dpo"}},
    "residency": {
        "none": {},
        "host": {"activation_checkpoints": "host"},
        "graphs": {"resident_blocks": 1, "resident_graphs": 1},
        "in_backward": {"update_in_backward": True, "max_grad_norm": 0},
    },
}  # fmt: skip
MACHINES = ("rtx-4090", "h200", "gb10")
PLANS: dict[str, list[str]] = {
    "Qwen/Qwen2.5-7B": [],
    "Qwen/Qwen3-30B-A3B": ["--precision", "bf16", "--moments", "8bit"],
    "openai/gpt-oss-120b": ["--use_peft", "true", "--lora_target_modules", "all-linear"],
    "google/gemma-2-9b": ["--per_device_train_batch_size", "4", "--activation_checkpoints", "host"],
}


def combinations() -> list[dict[str, str]]:
    """Return a value of each factor for each run, so that any two values of two factors meet in a run."""
    names, chance = list(FACTORS), random.Random(7)
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(FACTORS[a], FACTORS[b])
    }
    found = []
    while missing:
        candidates = []
        for _ in range(60):
            first = dict(chance.choice(sorted(tuple(sorted(pair)) for pair in missing)))
            drawn = {name: first.get(name) or chance.choice(list(FACTORS[name])) for name in names}
            candidates.append((len(missing & _pairs(drawn)), sorted(drawn.items())))
        chosen = dict(max(candidates)[1])
        missing -= _pairs(chosen)
        found.append({name: chosen[name] for name in names})
    return found


def _pairs(chosen: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}


def run(chosen: dict[str, str], folder: Path) -> dict[str, Any]:
    """Train and return losses, gradient norms and hashes, or the error that rejects the combination."""
    settings = {
        "model_name_or_path": str(_model(chosen["family"], folder)), "output_dir": str(folder / "run"), "device": "cpu",
        "host_memory": "8GiB", "max_steps": 20, "logging_steps": 1, "max_length": 40, "per_device_train_batch_size": 4,
        "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 10, "seed": 3, "compile": False,
    }  # fmt: skip
    for factor, value in chosen.items():
        settings |= FACTORS[factor][value]
    settings["datasets"] = str(_rows(chosen["objective"], folder))
    if chosen["accumulation"] == "two":
        settings["device_micro_batch_size"] = 2 if chosen["micro_batches"] == "one" else 1
    command = [sys.executable, "-m", "horizon_lm.cli", "train"]
    if chosen["ranks"] == "two":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command[1:]]
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error: " in line]
        return {"error": errors[0].replace(str(folder), "") if errors else done.stderr[-3000:]}
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [[line.get(name) for name in ("step", "loss", "grad_norm", "eval_loss")] for line in lines]
    return {"steps": steps, "files": dict(_hashes(folder / "run"))}


def _model(family: str, folder: Path) -> Path:
    import torch

    from tests.e2e import tiny
    from tests.support import tiny_models

    tokenizer, target = tiny.build_tokenizer(), folder / "model"
    shared = {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(1)
    if family == "images":
        from transformers import AutoModelForCausalLM, Gemma3Config

        text = tiny_models._COMMON | tiny_models.FAMILIES["gemma3_text"] | shared | {"num_hidden_layers": 4}
        text.pop("attn_implementation", None)
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        }
        config = Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=300,
            boi_token_index=301,
            eoi_token_index=302,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        name = {"tied": "llama", "untied": "qwen2", "experts": "qwen3_moe", "hybrid": "qwen3_next"}[family]
        model = tiny_models.build(name, tie_word_embeddings=family == "tied", **shared).bfloat16()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def _rows(objective: str, folder: Path) -> Path:
    from tests.e2e import tiny

    pairs = [
        {"prompt": f"Night {n}? ", "chosen": "The keeper counts." * (1 + n % 2), "rejected": "Rain."} for n in range(40)
    ]
    return tiny.write_jsonl(folder / "rows.jsonl", pairs if objective == "dpo" else tiny.alpaca_rows(40))


def _hashes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the hash of each file of weights, and of each unit of a checkpoint."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (path.suffix in (".safetensors", ".bin") or "units" in path.parts):
            yield str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()


def plan(model: str, machine: str, more: list[str]) -> Any:
    """Return the plan of a model as JSON values."""
    command = [sys.executable, "-m", "horizon_lm.cli", "plan", "--model", model, "--device", machine, "--json"]
    rows = [] if "--per_device_train_batch_size" in more else ["--per_device_train_batch_size", "2"]
    done = subprocess.run(
        [*command, "--max_length", "2048", "--max_steps", "10", *rows, *more], capture_output=True, text=True
    )
    return json.loads(done.stdout) if done.stdout.startswith("{") else {"error": done.stderr[-3000:]}


def record(only: int | None) -> Iterator[tuple[str, Any]]:
    """Yield the name and the numbers of each run and plan."""
    for number, chosen in enumerate(combinations()):
        if only in (None, number):
            with tempfile.TemporaryDirectory() as name:
                yield (
                    f"{number}: " + " ".join(f"{key}={value}" for key, value in chosen.items()),
                    run(chosen, Path(name)),
                )
    if only is None:
        for (model, more), machine in itertools.product(PLANS.items(), MACHINES):
            yield f"{model} on {machine}", plan(model, machine, more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--only", type=int, default=None, help="number of the only run to compare")
    options = parser.parse_args()
    options.record.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(options.record.read_text()) if options.record.exists() else None
    found, different = {}, 0
    for name, numbers in record(options.only):
        found[name] = json.loads(json.dumps(numbers))
        if before is None:
            print("recorded", name, numbers.get("error", "")[:200], flush=True)
        else:
            same = before.get(name) == found[name]
            different += not same
            print("same" if same else "DIFFERENT", name, "" if same else numbers.get("error", ""), flush=True)
    if before is None:
        options.record.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} compared, {different} different" if before is not None else f"{len(found)} recorded")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
