"""Run the checks that need a GPU, in the order of docs/first-contact.md. ``make gpu-check`` runs the first two parts.

    python scripts/gpu_check.py [PART ...] [--device cuda] [--output runs/gpu-check] [--minutes 8]

Parts: first (the machine's rates, and three steps of a small model in each mode), tests (those marked ``gpu`` that do not
compile), compiled (those that compile), toys (with ``--device cpu``: the systems of the benchmark). The check stops at the
first failure. A Python with the required packages runs the package from the checkout, without a network; wheels in .whl/
are installed for this run only. Any other Python hands over to the one that scripts/bootstrap.sh creates.

Writes environment.txt, a log of each command, and the results of the commands. A command that does not end is stopped, and
its log ends with the stack of each thread. Exits with 1 if anything failed. ``--device cpu`` runs everything on toy models,
to try the check itself.
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

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["torch", "triton", "transformers", "numba", "numpy", "safetensors", "pytest", "deepspeed", "flash-attn"]
REQUIRED = ["torch", "transformers", "numpy", "numba", "safetensors", "psutil", "pytest"]  # by the engine, and pytest
PROCESSES = {"cuda": 4, "cpu": 2}  # of tests, if pytest-xdist is installed
HANG_SECONDS = 120  # after which a test is considered to hang


@dataclass(frozen=True)
class Command:
    """One command of a part: the name of its log, its arguments for Python, and its time limit in minutes."""

    name: str
    arguments: list[str]
    minutes: float


def commands(part: str, device: str, output: Path) -> list[Command]:
    """Return the commands of a part, in order."""
    parallel = is_installed("xdist")
    tests = [
        "-m", "pytest", "tests/gpu", "--device", device, "-m", "gpu and not compiled" if part == "tests" else "compiled",
        *(["-n", str(PROCESSES[device])] if parallel else []), *hang_options(),
        "-W", "default", "-p", "no:cacheprovider", "-rA", "-v", "--durations", "10",
        *(["-x"] if part == "tests" and not parallel else ["--maxfail", "5"]),
        *(["-k", "llama or gpu_steps"] if part == "compiled" and device == "cpu" else []),  # tests/numerics has the other families
    ]  # fmt: skip
    toys = [
        "benchmarks/gpu.py", "toys", "--device", device, "--steps", "1", "--minutes", "8", "--output", str(output / "benchmark.md"),
        "--trace-dir", str(output),
    ]  # fmt: skip
    slower = 1.0 if device == "cuda" else 3.0  # a CPU is slower, and has one process
    return {
        "first": [
            Command("ceilings", ["benchmarks/gpu_ceilings.py", device], 0.7 * slower),
            Command("first_steps", ["benchmarks/gpu_first_steps.py", device], 0.9 * slower),
            Command("attention", ["benchmarks/gpu_attention.py", device], 0.4 * slower),
        ],
        "tests": [Command("tests", tests, 6.0 * slower)],
        "compiled": [Command("compiled", tests, 6.0 * slower)],
        "toys": [Command("benchmark", toys, 8.0)],
    }[part]


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
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return os.environ | own | {"TORCHINDUCTOR_COMPILE_THREADS": str(workers)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="first, tests, compiled, toys. Default: the first two")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu-check", help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="with a GPU: time limit of all commands")
    arguments = parser.parse_args()
    parts = arguments.parts or ["first", "tests", *(["compiled", "toys"] if arguments.device == "cpu" else [])]
    if unknown := set(parts) - {"first", "tests", "compiled", "toys"}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from first, tests, compiled, toys")
    began, output = time.monotonic(), arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as site:
        paths = [ROOT / "src", ROOT, ROOT / "benchmarks", *install_wheels(Path(site))]
        sys.path[:0] = map(str, paths)
        if missing := [name for name in REQUIRED if not is_installed(name)]:
            return run_with_bootstrap(missing)
        environment = make_environment(paths, PROCESSES[arguments.device])
        (output / "environment.txt").write_text(describe_machine())
        for command in [command for part in parts for command in commands(part, arguments.device, output)]:
            seconds = 60 * command.minutes
            if arguments.device == "cuda":
                seconds = min(seconds, 60 * arguments.minutes - (time.monotonic() - began))
            if not run(command.name, command.arguments, output, seconds, environment):
                print(f"Stopped at {command.name}. Its log is in {os.path.relpath(output)}.")
                return 1
    print(f"Results are in {os.path.relpath(output)}; {time.monotonic() - began:.0f} s.")
    return 0


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


def run(name: str, command: list[str], output: Path, seconds: float, environment: dict[str, str]) -> bool:
    """Run a Python command with its output in a file, and return whether it passed. Kill its process group at the limit."""
    print(f"{name} ...", flush=True)
    began = time.monotonic()
    log = output / f"{name}.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
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
    print("".join(log.read_text().splitlines(keepends=True)[-25:]))
    print(f"{name}: {ending}, {time.monotonic() - began:.0f} s", flush=True)
    return ending == "passed"


if __name__ == "__main__":
    sys.exit(main())
