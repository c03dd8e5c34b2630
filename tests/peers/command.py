"""The command line of the suites."""

import argparse
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

from tests.peers.kernelless_torchvision import import_torchvision
from tests.peers.page import summary, verdicts, write_pages
from tests.peers.runner import ROOT, forget, results_of, run
from tests.peers.suites import SUITES

SAMPLE = {"peft-decoders": 1, "peft-adapters": 5}  # percent of the tests


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="sources, hub and results (.peers)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("hub", help="make the tiny models and data sets")
    runs = commands.add_parser("run", help="run suites; tests that have a result are not run again")
    runs.add_argument("suites", nargs="*", help=", ".join(SUITES))
    runs.add_argument("--share", type=int, default=100, help="percent of the tests")
    runs.add_argument("--also", default="", help="a pattern; tests whose ids match are run whatever the share")
    runs.add_argument("--timeout", type=int, default=300, help="seconds of one test")
    runs.add_argument("--failed", action="store_true", help="run again what did not pass")
    commands.add_parser("page", help="write docs/generated/peers.md and peers-images.md")
    commands.add_parser("sample", help="download PEFT's tests and run a few of them")
    arguments = parser.parse_args()
    folder, results = arguments.folder, arguments.folder / "results"
    if arguments.command == "hub":
        make_hub(folder, folder / "trl" if (folder / "trl").exists() else None)
    elif arguments.command == "run":
        for name in arguments.suites or SUITES:
            if arguments.failed and results_of(results, name, "streamed").exists():
                kept = ("pass", "unused")
                forget(results, name, {t for t, each in verdicts(results, name).items() if each.kind not in kept})
            run(folder, results, name, arguments.share, arguments.also, arguments.timeout)
            print(summary(name, verdicts(results, name)), flush=True)
    elif arguments.command == "page":
        write_pages(results)
    else:
        sys.exit(sample(folder))


def make_hub(folder: Path, trl_source: Path | None) -> None:
    """Make the tiny models and data sets; those with images if TRL's source and torchvision are there."""
    sys.path.append(str(folder / "site"))
    images = import_torchvision()
    from tests.peers import hub  # transformers looks for torchvision when it is imported

    if trl_source and not images:
        print(f"torchvision is not in {folder / 'site'}: no models with images are made")
    hub.make(folder / "hub", trl_source, images)


def sample(folder: Path) -> int:
    """Run a few of PEFT's tests and return 1 if one fails. Where its sdist cannot be downloaded, report it and return 0."""
    if not (folder / "peft").exists() and not _download_peft(folder):
        print("PEFT's sdist cannot be downloaded: its tests are not run")
        return 0
    if not (folder / "hub").exists():
        make_hub(folder, None)
    results = folder / "sample"
    shutil.rmtree(results, ignore_errors=True)
    failed = 0
    for name, share in SAMPLE.items():
        run(folder, results, name, share)
        found = verdicts(results, name)
        print(summary(name, found), flush=True)
        passed = any(each.kind == "pass" for each in found.values())
        failed |= not passed or any(each.kind == "fail" for each in found.values())
    return int(failed)


def _download_peft(folder: Path) -> bool:
    """Unpack the tests of the installed version of PEFT; return False if pip cannot download them."""
    name = f"peft-{version('peft')}"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    if subprocess.run([sys.executable, "-m", "pip", "download", *options, name.replace("-", "==")]).returncode:
        return False
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    (folder / name / "tests" / "__init__.py").touch()  # its modules import each other relatively
    (folder / name).rename(folder / "peft")
    return True
