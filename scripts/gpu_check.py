"""Everything that needs a GPU, in one go: the tests marked ``gpu``, then the quick benchmark. Run by ``make gpu-check``.

    python scripts/gpu_check.py [--device cuda] [--output runs/gpu-check] [--minutes 9]

A Python that has what is needed runs the package from the checkout, without a network; wheels that lie in .whl/ are
installed for this run alone. Any other Python leaves it to the one that scripts/bootstrap.sh makes.
Leaves environment.txt, tests.txt, benchmark.txt, benchmark.md and the trace of its last steps. Exit code 1 if anything
failed. With ``--device cpu`` toys stand in for all of it, to try the check itself.
"""

import argparse
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["torch", "triton", "transformers", "numba", "numpy", "safetensors", "pytest", "deepspeed", "flash-attn"]
NEEDED = ["torch", "transformers", "numpy", "numba", "safetensors", "psutil", "pytest"]  # the engine's, and pytest
TESTS_SHARE = 0.6  # of the time, at most; the benchmark has what is left
SUITES = {"cuda": ["quick"], "cpu": ["main", "peers", "long", "moe"]}  # on a CPU, every system once


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu-check", help="a folder for the results")
    parser.add_argument("--minutes", type=float, default=9.0, help="what is not done after so long is given up")
    arguments = parser.parse_args()
    began, output = time.monotonic(), arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)

    def seconds_left() -> float:
        return 60 * arguments.minutes - (time.monotonic() - began)

    with tempfile.TemporaryDirectory() as site:
        paths = [ROOT / "src", ROOT, *install_wheels(Path(site))]
        sys.path[:0] = map(str, paths)
        if missing := [name for name in NEEDED if not is_installed(name)]:
            return run_elsewhere(missing)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
        (output / "environment.txt").write_text(describe_machine())
        tests = [
            "-m", "pytest", "tests/gpu", "-m", "gpu", "--device", arguments.device,
            *(["-n", "4" if arguments.device == "cuda" else "2"] if is_installed("xdist") else []),
            *(["-o", "faulthandler_timeout=120"] if not is_installed("pytest_timeout") else []),  # says where it hangs
            "-W", "default", "-p", "no:cacheprovider", "-rA", "-v", "--durations", "10",
        ]  # fmt: skip
        passed = [run("tests", tests, output, TESTS_SHARE * seconds_left(), environment)]
        left = seconds_left() - 15  # to write what there is before it is stopped
        benchmark = [
            "benchmarks/gpu.py", *SUITES[arguments.device], "--device", arguments.device, "--minutes", f"{left / 60:.2f}",
            "--output", str(output / "benchmark.md"), "--trace-dir", str(output),
            *(["--steps", "1"] if arguments.device == "cpu" else []),
        ]  # fmt: skip
        passed.append(run("benchmark", benchmark, output, seconds_left(), environment))
    print(f"Results are in {os.path.relpath(output)}; {time.monotonic() - began:.0f} s.")
    return 0 if all(passed) else 1


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def run_elsewhere(missing: list[str]) -> int:
    """This Python lacks something: the same with the one that bootstrap.sh finds or makes, which needs a network."""
    print(f"{sys.executable} lacks {', '.join(missing)}. Without a network: put their wheels into .whl/.", flush=True)
    found = subprocess.run([ROOT / "scripts" / "bootstrap.sh", "dev"], stdout=subprocess.PIPE, text=True)
    python = found.stdout.strip()
    if found.returncode or Path(python) == Path(sys.executable):
        return 1
    return subprocess.run([python, *sys.argv]).returncode


def install_wheels(site: Path) -> list[Path]:
    """Wheels that travel with the checkout, into a folder of this run; nothing if there are none."""
    wheels = sorted(map(str, (ROOT / ".whl").glob("*.whl")))
    if not wheels:
        return []
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*pip, str(site), *wheels], check=True)
    return [site]


def describe_machine() -> str:
    """What a result depends on, for people."""
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
    """A Python command, its output into a file; stopped with everything it started when its time is over."""
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
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print("".join(log.read_text().splitlines(keepends=True)[-25:]))
    print(f"{name}: {ending}, {time.monotonic() - began:.0f} s", flush=True)
    return ending == "passed"


if __name__ == "__main__":
    sys.exit(main())
