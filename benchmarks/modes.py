"""Compare the optimizer's modes on a real model: losses, and host memory.

    python benchmarks/modes.py --model FOLDER [--steps 24] [--output FILE.md]

Each mode is a run of `horizon-lm train` on examples/sft.yaml with overridden settings, in a process of its own. FOLDER is a
Hugging Face folder (`make demo` leaves one in .cache/smollm2-135m-instruct).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from peers_cpu import processor, versions

ROOT = Path(__file__).resolve().parent.parent
MODES: dict[str, list[str]] = {
    "float32": ["--precision", "float32"],
    "fp32_master": [],
    "bf16": ["--precision", "bf16"],
    "fp32_master, bfloat16 moments": ["--moments", "bfloat16"],
    "bf16, bfloat16 moments": ["--precision", "bf16", "--moments", "bfloat16"],
    "fp32_master, 8bit moments": ["--moments", "8bit"],
    "bf16, 8bit moments": ["--precision", "bf16", "--moments", "8bit"],
    "fp32_master, fp32 gradients": ["--grad_dtype", "float32"],
    "float32, no clipping": ["--precision", "float32", "--max_grad_norm", "0"],
    "fp32_master, update_in_backward": ["--update_in_backward", "true", "--max_grad_norm", "0"],
    "bf16, update_in_backward": ["--precision", "bf16", "--update_in_backward", "true", "--max_grad_norm", "0"],
}


def train(model: str, steps: int, overrides: list[str], folder: Path) -> list[dict[str, float]]:
    """Train with overridden settings and return the metrics."""
    settings = {"model_name_or_path": model, "output_dir": folder, "max_steps": steps, "logging_steps": 1}
    command = [sys.executable, "-m", "horizon_lm.cli", "train", "examples/sft.yaml", "--device_memory", "null"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    result = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{overrides} failed:\n{result.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model = str(Path(arguments.model).resolve())
    shown = [step for step in (1, 4, 8, 12, 16, 20, 24, 32) if step <= arguments.steps]
    lines = [
        "# The optimizer's modes on a real model",
        "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores. {versions('torch', 'transformers', 'numba')}.",
        f"Model: {Path(model).name}; examples/sft.yaml for {arguments.steps} steps, with the settings of each mode. Modes "
        "without clipping follow the second float32 row.",
        "",
        f"Command: `python benchmarks/modes.py --model {Path(model).name} --steps {arguments.steps}`",
        "",
        f"| mode | {' | '.join(f'loss of step {step}' for step in shown)} | eval loss after | host GiB |",
        "|---|" + "---|" * (len(shown) + 2),
    ]
    for name, overrides in MODES.items():
        with tempfile.TemporaryDirectory() as folder:
            metrics = train(model, arguments.steps, overrides, Path(folder))
        losses = {line["step"]: line["loss"] for line in metrics if "loss" in line}
        memory = max(line["host_bytes"] for line in metrics if "loss" in line) / 2**30
        values = " | ".join(f"{losses[step]:.4f}" for step in shown)
        lines.append(f"| {name} | {values} | {metrics[-1]['eval_loss']:.4f} | {memory:.2f} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
