"""Run the checks that need a GPU: the calls of docs/first-contact.md, each complete in itself and done in ten minutes.

    python3 scripts/gpu_check.py [CALL ...] [--output runs/gpu-check] [--device cuda] [--minutes 9.5]

Calls: A (products, a 3B model beside resident ones, new code), B (a 7B model, other offloaders, losses), C (a 14B model, and
models in 24 GB), T (all tests, first steps, kernels, experts); for two GPUs: D (rates, bits and memory), E (sleeps, speed and
kills). Default: A, B and C. A call goes on after a failure, and says at its end what failed. A Python with the required
packages runs the package from the checkout, without a network; wheels in .whl/ are installed for this run only. Any other
Python hands over to the one that scripts/bootstrap.sh creates.

Writes environment.txt, a log of each call, and the results of the commands as soon as they are known. A command that does
not end is stopped, and its log ends with the stack of each thread. Exits with 1 if anything failed. ``--device cpu`` runs
toys, by default those of A, B, C and T, to try the check itself; ``--break NAME`` lets a command fail, to try that.
"""

import argparse
import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["torch", "triton", "transformers", "numba", "numpy", "safetensors", "pytest", "deepspeed", "flash-attn"]
REQUIRED = ["torch", "transformers", "numpy", "numba", "safetensors", "psutil", "pytest"]  # by the engine, and pytest
PROCESSES = {"cuda": 4, "cpu": 2}  # of tests, if pytest-xdist is installed
SLOWER = {"cuda": 1, "cpu": 3}  # times as many minutes
HANG_SECONDS = 120  # after which a test is considered to hang
CALLS = ("A", "B", "C", "T", "D", "E")
DEFAULT = {"cuda": CALLS[:3], "cpu": CALLS[:4]}
IMPORTS = """
import time
start = time.perf_counter()
import torch, transformers, horizon_lm
print(f"imports: {time.perf_counter() - start:.1f} s", flush=True)
product = torch.ones(256, 256, device="DEVICE") @ torch.ones(256, 256, device="DEVICE")
assert product.sum().item() == 256**3
print(f"with a first product: {time.perf_counter() - start:.1f} s")
"""
NEVER_RUN = (
    "attention",
    "experts",
    "generation",
    "muon",
    "decoding",
)  # code that no GPU has run, in tests/gpu/test_gpu_*.py
MINUTES = "{minutes}"  # in a command's arguments: those that it has, less some seconds to write its results
ONE_DECODE = "values_equal and triton and mxfp4 and bfloat16"


@dataclass(frozen=True)
class Command:
    """One command of a call.

    Attributes:
        name: the name of its log.
        arguments: its arguments for Python.
        minutes: its time limit on a GPU; a CPU gets `SLOWER` as many.
        before: a program that runs Python, with its arguments; the command is left out where it is not installed.
        needs: a package without which the command is left out, and said to be; empty for none.
    """

    name: str
    arguments: list[str]
    minutes: float
    before: tuple[str, ...] = ()
    needs: str = ""

    @property
    def missing(self) -> str:
        """What the command needs and is not installed; empty if all is there."""
        if self.before and shutil.which(self.before[0]) is None:
            return self.before[0]
        return self.needs if self.needs and not is_installed(self.needs) else ""


def commands(call: str, device: str, output: Path) -> list[Command]:
    """Return the commands of a call: the most telling ones first."""
    on_gpu = device == "cuda"
    rates, profile = str(output / f"ceilings_{call}.json"), str(output / f"profile_{call}.json")

    def tests(*arguments: str, processes: int = 1) -> list[str]:
        parallel = ["-n", str(processes)] if processes > 1 and is_installed("xdist") else []
        common = ["-W", "default", "-p", "no:cacheprovider", "-rA", "-v", "--durations", "10", "--maxfail", "20"]
        return ["-m", "pytest", "--device", device, *arguments, *parallel, *hang_options(), *common]

    def ceilings(minutes: float, *, with_profile: bool = False) -> Command:
        measured = ["--output", rates, *(["--profile", profile] if with_profile else [])]
        return Command(f"ceilings_{call}", ["benchmarks/gpu_ceilings.py", device, *measured], minutes)

    def training(name: str, minutes: float, *suites: str) -> Command:
        limit = ["--device", device, "--minutes", MINUTES]
        found = ["--ceilings", rates, "--profile", profile, "--trace-dir", str(output)]
        found += ["--output", str(output / f"{name}.md")]
        return Command(
            name, ["benchmarks/gpu.py", *suites, *limit, *found, *([] if on_gpu else ["--steps", "1"])], minutes
        )

    def several(name: str, minutes: float) -> Command:
        return Command(name, ["benchmarks/gpu_pair.py", name, "--device", device], minutes)

    def sizes(on_cuda: Any, on_cpu: Any) -> Any:
        return on_cuda if on_gpu else on_cpu

    losses = ["benchmarks/gpu_losses.py", device, "--output", str(output / "losses.md"), *sizes([], ["--steps", "3"])]
    small = sizes(
        ["--device-memory", "24GB", "--layers", "8", "--seconds", "80"],
        ["--toy", "--layers", "2", "--tokens", "64", "--steps", "3"],
    )
    quantized = ["benchmarks/quantized_scale.py", "--device", device, *small, "--output", str(output / "quantized.md")]
    # A CPU leaves out the slow cases, in CI's minutes.
    marked = "gpu and not compiled" if on_gpu else "gpu and not compiled and not slow"
    new = [f"tests/gpu/test_gpu_{name}.py" for name in NEVER_RUN]
    others = [] if on_gpu else [f"--ignore={file}" for file in new]  # by call A, in CI's minutes
    decode = ["tests/gpu/test_gpu_decoding.py", "-m", "gpu", "-k", ONE_DECODE]
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    # tests/numerics has other families and settings compiled on a CPU.
    families = ["-k", sizes("llama or mixtral or gpu_steps", "(llama and fp32) or never_waits")]
    return {
        "A": [
            ceilings(1.6, with_profile=True),
            training("3b", 2.6, "3b"),
            training("resident-3b", 2.3, "resident-3b"),
            Command("new", tests("-m", marked, *new, processes=PROCESSES[device]), 1.9),
            Command(
                "compiled", tests("tests/gpu", "-m", "gpu and compiled", *families, processes=PROCESSES[device]), 1.1
            ),
        ],
        "B": [
            ceilings(0.4),
            training("7b", 2.9, "7b"),
            training("peers", 3.0, "peers"),
            Command("losses", losses, 1.5),
            *sizes([training("resident-7b", 1.7, "resident-7b")], []),  # the toys of A have such a case
        ],
        "C": [
            ceilings(0.4),
            training("14b", 5.3, "14b"),
            training("8b-24gb", 2.1, "8b-24gb"),
            Command("quantized", quantized, 1.7, needs="peft"),
        ],
        "T": [
            Command("import", ["-c", IMPORTS.replace("DEVICE", device)], 0.5),
            Command("first_steps", ["benchmarks/gpu_first_steps.py", device], 1.0),
            Command("attention", ["benchmarks/gpu_attention.py", device], 0.5),
            Command("tests", tests("tests/gpu", "-m", marked, *others, processes=PROCESSES[device]), 4.3),
            training("moe", 2.4, *sizes(["moe"], ["moe", "--systems", "horizon"])),
            Command("sanitizer", tests(*decode), 0.8, sanitizer),
        ],
        "D": [several("rates", 2.0), several("bits", 2.5), several("memory", 2.5)],
        "E": [several("sleeps", 2.5), several("kills", 2.5), several("speed", 4.5)],
    }[call]


def hang_options() -> list[str]:
    """Return pytest options that print the stacks of a hanging test, also in C code, and end it if pytest can."""
    exits = int(version("pytest").partition(".")[0]) >= 9
    return [
        "-o",
        f"faulthandler_timeout={HANG_SECONDS}",
        *(["-o", "faulthandler_exit_on_timeout=true"] if exits else []),
    ]


def make_environment(paths: list[Path], processes: int) -> dict[str, str]:
    """Return the environment of all commands: the checkout's package, stacks on SIGABRT, and one compiler per core."""
    workers = max(1, (os.cpu_count() or 1) // processes)
    given = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path
    ]  # what this process was found with
    own = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *given]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    return os.environ | own | {"TORCHINDUCTOR_COMPILE_THREADS": str(workers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "calls", nargs="*", metavar="CALL", help=f"{', '.join(CALLS)}. Default: A B C; on a CPU A B C T"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu-check", help="folder for all results")
    parser.add_argument("--minutes", type=float, default=9.5, help="with a GPU: time limit of each call")
    parser.add_argument("--break", dest="broken", metavar="NAME", help="let this command fail, to try the check itself")
    arguments = parser.parse_args()
    calls = arguments.calls or DEFAULT[arguments.device]
    if unknown := set(calls) - set(CALLS):
        parser.error(f"unknown call {', '.join(sorted(unknown))}; choose from {', '.join(CALLS)}")
    began, output = time.monotonic(), arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as site:
        paths = [ROOT / "src", ROOT, ROOT / "benchmarks", *install_wheels(Path(site))]
        sys.path[:0] = map(str, paths)
        if missing := [name for name in REQUIRED if not is_installed(name)]:
            return run_with_bootstrap(missing)
        environment = make_environment(paths, PROCESSES[arguments.device])
        (output / "environment.txt").write_text(describe_machine())
        for call in calls:
            end = time.monotonic() + 60 * arguments.minutes if arguments.device == "cuda" else float("inf")
            log = output / f"log_{call}.txt"
            log.unlink(missing_ok=True)
            of_call = commands(call, arguments.device, output)
            for number, command in enumerate(of_call):
                if command.missing:
                    print(f"{command.name}: left out, {command.missing} is not installed", flush=True)
                    continue
                later = 60 * sum(other.minutes for other in of_call[number + 1 :])
                seconds = 60 * SLOWER[arguments.device] * command.minutes
                if arguments.device == "cuda":  # with what the commands before have left
                    left = end - time.monotonic()
                    seconds = min(left, max(seconds, left - later))
                words = words_of(command, seconds, arguments.broken)
                if seconds <= 1 or not run(command.name, words, log, seconds, environment):
                    failed.append(command.name)
    where = f"Results are in {os.path.relpath(output)}; {time.monotonic() - began:.0f} s."
    print(f"FAILED, or out of time: {', '.join(failed)}. {where}" if failed else where)
    return 1 if failed else 0


def words_of(command: Command, seconds: float, broken: str | None) -> list[str]:
    """Return the words of a command that has so many seconds; those of one that fails if it is the broken one."""
    if command.name == broken:
        return [sys.executable, "-c", "raise SystemExit('this command was made to fail')"]
    limit = f"{max(0.0, seconds - 12) / 60:.2f}"
    return [*command.before, sys.executable, *(limit if word == MINUTES else word for word in command.arguments)]


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_with_bootstrap(missing: list[str]) -> int:
    """Run this script with the Python that bootstrap.sh finds or creates, which needs a network."""
    print(f"{sys.executable} lacks {', '.join(missing)}. Without a network, put their wheels into .whl/.", flush=True)
    found = subprocess.run([ROOT / "scripts" / "bootstrap.sh", "dev"], stdout=subprocess.PIPE, text=True)
    python = found.stdout.strip()
    if found.returncode or Path(python) == Path(sys.executable):
        return 1
    return subprocess.run([python, *sys.argv]).returncode


def install_wheels(site: Path) -> list[Path]:
    """Install the wheels in .whl/, if any, into a folder of this run; return the paths to add."""
    wheels = sorted(map(str, (ROOT / ".whl").glob("*.whl")))
    if not wheels:
        return []
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*pip, str(site), *wheels], check=True)
    return [site]


def describe_machine() -> str:
    """Return a description of the software and hardware that results depend on."""
    lines = [f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {platform.machine()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name}: not installed")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lines.append(f"locked memory: {'unlimited' if soft == resource.RLIM_INFINITY else f'{soft} bytes'}")
    for command in (["lscpu"], ["free", "-g"], ["nvidia-smi"], ["nvidia-smi", "topo", "-m"]):
        if shutil.which(command[0]):
            done = subprocess.run(command, capture_output=True, text=True)
            lines += ["", f"$ {' '.join(command)}", done.stdout.strip() or done.stderr.strip()]
    return "\n".join(lines) + "\n"


def run(name: str, command: list[str], log: Path, seconds: float, environment: dict[str, str]) -> bool:
    """Run a command with its output at the end of a file, and return whether it passed. Kill its process group at the limit."""
    print(f"{name} ...", flush=True)
    began = time.monotonic()
    with log.open("a") as file:
        file.write(f"\n===== {name}: {' '.join(command)}\n")
        file.flush()
        start = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(max(1.0, seconds))
            ending = "passed" if process.returncode == 0 else f"FAILED with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            ending = f"STOPPED after {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGABRT)  # each of its processes writes the stacks of its threads
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ending = f"{name}: {ending}, {time.monotonic() - began:.0f} s"
    with log.open("r+", errors="replace") as file:
        file.seek(start)
        print("".join(file.read().splitlines(keepends=True)[-25:]))
        file.write(f"===== {ending}\n")
    print(ending, flush=True)
    return process.returncode == 0 and "STOPPED" not in ending


if __name__ == "__main__":
    sys.exit(main())
