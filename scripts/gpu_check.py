"""Run the checks that need a GPU: the calls of docs/first-contact.md, each complete in itself and done in ten minutes.

    python3 scripts/gpu_check.py [CALL ...] [--output runs/gpu-check] [--device cuda] [--minutes 9.5]

Calls: 1 (what the machine can do, first steps, kernels), 2 (tests), 3 (a 3B model), 4 (a 7B model), 5 (compiled blocks and
experts); for two GPUs: 6 (rates, bits and memory), 7 (sleeps, speed and kills). Default: 1 and 2. A call goes on after a
failure, and says at its end what failed. A Python with the required packages runs the package from the checkout, without a
network; wheels in .whl/ are installed for this run only. Any other Python hands over to the one that scripts/bootstrap.sh
creates.

Writes environment.txt, a log of each command, and the results of the commands, at most eight files a call. A command that
does not end is stopped, and its log ends with the stack of each thread. Exits with 1 if anything failed. ``--device cpu`` runs
toys, by default those of calls 1 to 5, to try the check itself.
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
SLOWER = {"cuda": 1, "cpu": 3}  # times as many minutes
HANG_SECONDS = 120  # after which a test is considered to hang
CALLS = ("1", "2", "3", "4", "5", "6", "7")
IMPORTS = """
import time
start = time.perf_counter()
import torch, transformers, horizon_lm
print(f"imports: {time.perf_counter() - start:.1f} s", flush=True)
product = torch.ones(256, 256, device="DEVICE") @ torch.ones(256, 256, device="DEVICE")
assert product.sum().item() == 256**3
print(f"with a first product: {time.perf_counter() - start:.1f} s")
"""
ONE_DECODE = "values_equal and triton and mxfp4 and bfloat16"


@dataclass(frozen=True)
class Command:
    """One command of a call.

    Attributes:
        name: the name of its log.
        arguments: its arguments for Python.
        minutes: its time limit on a GPU; a CPU gets `SLOWER` as many.
        before: a program that runs Python, with its arguments; the command is left out where it is not installed.
    """

    name: str
    arguments: list[str]
    minutes: float
    before: tuple[str, ...] = ()


def commands(call: str, device: str, output: Path) -> list[Command]:
    """Return the commands of a call: the most telling ones first."""
    on_gpu, slower = device == "cuda", SLOWER[device]

    def tests(*arguments: str, processes: int = 1) -> list[str]:
        parallel = ["-n", str(processes)] if processes > 1 and is_installed("xdist") else []
        common = ["-W", "default", "-p", "no:cacheprovider", "-rA", "-v", "--durations", "10", "--maxfail", "20"]
        return ["-m", "pytest", "--device", device, *arguments, *parallel, *hang_options(), *common]

    def training(name: str, minutes: float, *arguments: str) -> Command:
        own = ["benchmarks/gpu.py", *arguments, "--device", device, "--minutes", f"{slower * minutes - 0.3:.1f}"]
        results = ["--output", str(output / f"{name}.md"), "--trace-dir", str(output)]
        return Command(name, [*own, *results, *([] if on_gpu else ["--steps", "1"])], minutes)

    def several(name: str, minutes: float) -> Command:
        return Command(name, ["benchmarks/gpu_pair.py", name, "--device", device], minutes)

    kernels = [f"tests/gpu/test_gpu_{name}.py" for name in ("decoding", "attention", "link")]
    done = [] if on_gpu else [f"--ignore={file}" for file in kernels]  # by call 1, in CI's minutes
    decode = ["tests/gpu/test_gpu_decoding.py", "-m", "gpu", "-k", ONE_DECODE]
    profile = ["--profile", str(output / "profile.json")]
    compiled = [
        "-k",
        "llama or mixtral or gpu_steps" if on_gpu else "llama or gpu_steps",
    ]  # tests/numerics has the others
    experts = ["tests/gpu/test_gpu_parity.py", "-m", "gpu" if on_gpu else "gpu and not compiled", "-k", "expert"]
    sanitizer = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    return {
        "1": [
            Command("import", ["-c", IMPORTS.replace("DEVICE", device)], 0.7),
            Command("ceilings", ["benchmarks/gpu_ceilings.py", device, *profile], 2.0),
            Command("first_steps", ["benchmarks/gpu_first_steps.py", device], 1.3),
            Command("kernels", tests("-m", "gpu", *kernels), 2.5),
            Command("attention", ["benchmarks/gpu_attention.py", device], 0.5),
            Command("sanitizer", tests(*decode), 2.5, sanitizer),
        ],
        "2": [
            Command("tests", tests("tests/gpu", "-m", "gpu and not compiled", *done, processes=PROCESSES[device]), 9.5)
        ],
        "3": [training("3b", 9.5, "3b" if on_gpu else "toys")],
        "4": [training("7b", 9.5, "7b")] if on_gpu else [],  # the toys have such a case
        "5": [
            Command("compiled", tests("tests/gpu", "-m", "compiled", *compiled, processes=PROCESSES[device]), 5.5),
            Command("experts", tests(*experts), 1.0),
            *([training("moe", 3.0, "moe")] if on_gpu else []),
        ],
        "6": [several("rates", 2.0), several("bits", 2.5), several("memory", 2.5)],
        "7": [several("sleeps", 2.5), several("kills", 2.5), several("speed", 4.5)],
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
    parser.add_argument("calls", nargs="*", metavar="CALL", help=f"{', '.join(CALLS)}. Default: 1 2; on a CPU 1 to 5")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu-check", help="folder for all results")
    parser.add_argument("--minutes", type=float, default=9.5, help="with a GPU: time limit of each call")
    arguments = parser.parse_args()
    calls = arguments.calls or CALLS[: 2 if arguments.device == "cuda" else 5]
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
            for command in commands(call, arguments.device, output):
                if command.before and shutil.which(command.before[0]) is None:
                    print(f"{command.name}: left out, {command.before[0]} is not installed", flush=True)
                    continue
                seconds = min(60 * SLOWER[arguments.device] * command.minutes, end - time.monotonic())
                words = [*command.before, sys.executable, *command.arguments]
                if seconds <= 1 or not run(command.name, words, output, seconds, environment):
                    failed.append(command.name)
    where = f"Results are in {os.path.relpath(output)}; {time.monotonic() - began:.0f} s."
    print(f"FAILED, or out of time: {', '.join(failed)}. {where}" if failed else where)
    return 1 if failed else 0


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
    """Run a command with its output in a file, and return whether it passed. Kill its process group at the limit."""
    print(f"{name} ...", flush=True)
    began = time.monotonic()
    log = output / f"{name}.txt"
    with log.open("w") as file:
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
    print("".join(log.read_text().splitlines(keepends=True)[-25:]))
    print(f"{name}: {ending}, {time.monotonic() - began:.0f} s", flush=True)
    return ending == "passed"


if __name__ == "__main__":
    sys.exit(main())
