"""Try a training on two GPUs of one machine: rates, bits, memory, races, speed, and the end of a rank.

    python3 benchmarks/gpu_pair.py CHECK [--device cuda]

CHECK: rates (copies and collectives of both ranks at once), bits (losses and weights against one process), memory (planned and
used, contexts and threads of each process), sleeps (300 steps with random sleeps against the same without), kills (a rank that
is killed ends the other, which names it), speed (a 3B model on one and on two). Every rank is a process of its own. Prints a
line for each result, and exits with 1 if a check failed. ``--device cpu`` runs toys that are connected by gloo.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GIB = 2**30
WORLD = 2
SECONDS_TO_END = 60.0  # for a rank, once the other was killed
_TOY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 997, "tie_word_embeddings": False,
}  # fmt: skip
_MIDDLE = _TOY | {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "vocab_size": 32_000}


# One rank


class Rank:
    """Context manager: this process as a rank, with torch.distributed if there are others.

    Args:
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, device: str) -> None:
        self.number, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = f"cuda:{self.number}" if device == "cuda" else "cpu"

    def __enter__(self) -> "Rank":
        if self.device != "cpu":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            backend = "cpu:gloo" if self.device == "cpu" else "cpu:gloo,cuda:nccl"
            device_id = None if self.device == "cpu" else torch.device(self.device)
            dist.init_process_group(backend, timeout=timedelta(seconds=120), device_id=device_id)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.world > 1 and kind is None:
            dist.destroy_process_group()

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def train(rank: Rank, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train some steps on random rows of each rank; one process computes the rows of all ranks. Yield what was found.

    Args:
        rank: this rank.
        case: ``model``, ``rows`` of each rank, ``length``, ``steps``, ``precision``; ``folder``, for
            the trained model; ``sleep``, the most milliseconds between two phases; ``dies``, the step in which rank 1 kills itself.
    """
    from gpu_models import make_config

    import horizon_lm

    torch.manual_seed(0)
    config = make_config(case["model"], case["length"])
    own = [rank.number] if rank.world > 1 else list(range(WORLD))
    targets = WORLD * case["rows"] * (case["length"] - 1)
    options = {"precision": case["precision"], **case.get("options", {})}
    model = horizon_lm.from_config(config, device=rank.device, **options).train()
    optimizer = horizon_lm.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    draw, most = random.Random(rank.number), case.get("sleep", 0) / 1000
    losses, seconds = [], []
    with ExitStack() as watched:
        if rank.world > 1:
            _watch(watched, model)
        for step in range(case["steps"]):
            start = time.perf_counter()
            total = 0.0
            for number in own:
                seed = torch.Generator().manual_seed(1000 * step + number)
                ids = torch.randint(3, config.vocab_size, (case["rows"], case["length"]), generator=seed)
                loss = model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss
                time.sleep(most * draw.random())
                loss.backward()
                total += loss.item()
            if step == case.get("dies") and rank.number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(most * draw.random())
            optimizer.step()
            optimizer.zero_grad()
            rank.synchronize()
            losses.append(total)
            seconds.append(time.perf_counter() - start)
        if "folder" in case:
            model.save_pretrained(case["folder"])  # called by all ranks, written by the first
    plan = model._horizon.planner.plan
    yield {
        "losses": losses,
        "seconds": sorted(seconds[2:])[len(seconds[2:]) // 2] if len(seconds) > 2 else None,
        "planned": plan.peak if plan is not None else 0,
        "peak": torch.cuda.max_memory_allocated() if rank.device != "cpu" else 0,
        "reserved": torch.cuda.max_memory_reserved() if rank.device != "cpu" else 0,
        "threads": sum(thread.name.startswith("horizon-host") for thread in threading.enumerate()),
        "cores": len(os.sched_getaffinity(0)),
        "contexts": _contexts(os.getpid()),
    }


def _watch(stack: ExitStack, model: Any) -> None:
    """Notice a rank that dies, as a run does."""
    from horizon_lm.distributed.monitor import Monitor

    monitor = Monitor(model._horizon.engine.mesh, hang_seconds=60.0)
    stack.push(lambda kind, error, trace: _report(monitor, error))


def _report(monitor: Any, error: BaseException | None) -> bool:
    if error is not None:
        print(f"{type(error).__name__}: {monitor.reason() or error}", file=sys.stderr, flush=True)
    monitor.stop("" if error is None else str(error))
    return False


def _contexts(process: int) -> list[str]:
    """Return the GPUs on which a process has a context, with its memory there."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return [line.partition(", ")[2] for line in lines if line.partition(", ")[0].strip() == str(process)]


def measure_rates(rank: Rank) -> Iterator[dict[str, Any]]:
    """Measure copies between host and device, and collectives, of all ranks at the same time."""
    num_bytes, rounds = (2**30, 10) if rank.device != "cpu" else (2**22, 2)
    on_gpu = rank.device != "cpu"
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    local = torch.ones(num_bytes // 4 // rank.world, device=rank.device)
    whole = torch.ones(local.numel() * rank.world, device=rank.device)
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=rank.device)
    works = {
        "copy in": lambda: buffer.copy_(host, non_blocking=True),
        "copy out": lambda: host.copy_(buffer, non_blocking=True),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, local),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(local, whole),
    }
    found = {}
    for name, work in works.items():
        work()
        rank.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(rounds):
            work()
        rank.synchronize()
        found[name] = round(rounds * num_bytes / (time.perf_counter() - start) / 1e9, 2)
    yield found


# All ranks


class Failed(Exception):  # noqa: N818
    """A check that failed."""


def start(world: int, device: str, job: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Start the ranks of a job, each with the environment that torchrun would give it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    several = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    own = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    command = [sys.executable, __file__, "worker", "--device", device, "--job", json.dumps(job)]
    return [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | own | (several | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}),
        )
        for rank in range(world)
    ]  # fmt: skip


def results(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Wait for ranks; return what each has found, or raise Failed."""
    found = []
    for rank, process in enumerate(processes):
        output, errors = process.communicate()
        if process.returncode:
            for other in processes:
                other.kill()
            raise Failed(f"rank {rank} ended with {process.returncode}: {errors[-3000:]}")
        found.append(json.loads(output.splitlines()[-1]))
    return found


def run(device: str, world: int, **case: Any) -> list[dict[str, Any]]:
    """Train as ``world`` ranks; return what each has found."""
    toy = {"model": _TOY, "rows": 2, "length": 32, "steps": 10, "precision": "float32", "options": {"compile": False}}
    return results(start(world, device, {"train": toy | case}))


def run_and_save(device: str, world: int, **case: Any) -> tuple[list[float], str]:
    """Train; return the losses of each step, summed over ranks, and a checksum of the trained weights."""
    with tempfile.TemporaryDirectory() as folder:
        found = run(device, world, folder=folder, **case)
        bits = hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()[:16]
    return [sum(losses) for losses in zip(*(each["losses"] for each in found), strict=True)], bits


def rates(device: str) -> Iterator[str]:
    alone = results(start(WORLD, device, {"rates": True}))
    for rank, found in enumerate(alone):
        yield f"rank {rank}, all ranks at once, GB/s: {', '.join(f'{name} {rate}' for name, rate in found.items())}"


def bits(device: str) -> Iterator[str]:
    for precision in ("float32", "bf16") if device == "cuda" else ("float32",):
        (one, alone), (two, together) = (run_and_save(device, world, precision=precision) for world in (1, WORLD))
        difference = max(abs(a - b) / b for a, b in zip(two, one, strict=True))
        yield f"{precision}: losses differ by {difference:.1e} from one process, weights {together} and {alone}"
        if precision == "float32" and (difference > 1e-5 or (device == "cpu" and together != alone)):
            raise Failed("two processes compute something else than one")


def memory(device: str) -> Iterator[str]:
    model = _MIDDLE if device == "cuda" else _TOY
    rows, length = (8, 2048) if device == "cuda" else (2, 32)
    for rank, found in enumerate(run(device, WORLD, model=model, rows=rows, length=length, precision="bf16")):
        yield (
            f"rank {rank}: planned {found['planned'] / GIB:.2f} GiB, allocated at most {found['peak'] / GIB:.2f}, reserved "
            f"{found['reserved'] / GIB:.2f}; {found['threads']} host threads on {found['cores']} cores; contexts: "
            f"{'; '.join(found['contexts']) or 'unknown'}"
        )
        if len(found["contexts"]) > 1:
            raise Failed(f"rank {rank} has contexts on several GPUs")
        if found["planned"] and found["peak"] > 1.05 * found["planned"]:
            raise Failed(f"rank {rank} allocated more than was planned")


def sleeps(device: str) -> Iterator[str]:
    steps, most = (300, 20) if device == "cuda" else (10, 20)
    options = {"compile": False, "activation_checkpoints": "host", "attn_implementation": "eager"}
    (losses, weights), (late_losses, late_weights) = (
        run_and_save(device, WORLD, steps=steps, options=options, sleep=sleep) for sleep in (0, most)
    )
    equal = sum(a == b for a, b in zip(losses, late_losses, strict=True))
    yield f"{steps} steps with sleeps of up to {most} ms: {equal} losses equal, weights {late_weights} and {weights}"
    if equal < steps or weights != late_weights:
        raise Failed("sleeps change results, so a wait is missing")


def kills(device: str) -> Iterator[str]:
    case = {
        "model": _TOY,
        "rows": 2,
        "length": 32,
        "steps": 1000,
        "precision": "float32",
        "options": {"compile": False},
    }
    survivor, killed = start(WORLD, device, {"train": case | {"dies": 5}})
    try:
        killed.wait(120)
        began = time.monotonic()
        _, errors = survivor.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        raise Failed(f"rank 0 goes on {SECONDS_TO_END:.0f} s after rank 1 was killed") from None
    finally:
        for process in (survivor, killed):
            process.kill()
    yield f"rank 0 ended {time.monotonic() - began:.1f} s after rank 1, with exit code {survivor.returncode}"
    if survivor.returncode == 0 or "rank 1 has" not in errors:
        raise Failed(f"rank 0 does not name rank 1: {errors[-2000:]}")


def speed(device: str) -> Iterator[str]:
    from gpu_models import MODELS

    big = {"model": MODELS["qwen2.5-3b"], "rows": 8, "length": 4096, "steps": 5, "precision": "fp32_master"}
    case = {**big, "options": {}} if device == "cuda" else {"steps": 5}
    two, one = run(device, WORLD, **case), run(device, 1, **case)
    yield f"two: {two[0]['seconds']:.3f} s a step; one, with as many tokens: {one[0]['seconds']:.3f} s"


CHECKS = {"rates": rates, "bits": bits, "memory": memory, "sleeps": sleeps, "kills": kills, "speed": speed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=[*CHECKS, "worker"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.check == "worker":
        with Rank(arguments.device) as rank:
            job = arguments.job
            for found in train(rank, job["train"]) if "train" in job else measure_rates(rank):
                print(json.dumps(found), flush=True)
        return 0
    if arguments.device == "cuda" and torch.cuda.device_count() < WORLD:
        print(f"{torch.cuda.device_count()} GPUs, but {WORLD} are needed")
        return 1
    try:
        for line in CHECKS[arguments.check](arguments.device):
            print(line, flush=True)
    except Failed as failure:
        print(f"FAILED: {failure}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
