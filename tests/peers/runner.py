"""Run a suite: pytest in the other project's folder, on plain models and then on streamed ones."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from tests.peers.suites import SUITES

ROOT = Path(__file__).parents[2]
MODES = ("plain", "streamed")


def results_of(results: Path, suite: str, mode: str) -> Path:
    return results / f"{suite}.{mode}.jsonl"


def run(folder: Path, results: Path, name: str, share: int = 100, also: str = "", timeout: int = 300) -> None:
    """Run `share` percent of a suite's tests and those that match the pattern `also`; those that have a result are not run again.

    Raises:
        SystemExit: if pytest could not collect the tests.
    """
    suite = SUITES[name]
    for mode in MODES:
        output = results_of(results, name, mode).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = {
            "PEER_MODE": mode,
            "PEER_HUB": str((folder / "hub").resolve()),
            "PEER_OUT": str(output),
            "PEER_ONLY": "" if mode == "plain" else str(results_of(results, name, "plain").resolve()),
            "PEER_SHARE": str(share),
            "PEER_ALSO": also,
            "PEER_OPENS": str(int(suite.opens)),
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT / "src", (folder / "site").resolve()))),
            **dict.fromkeys(("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "TQDM_DISABLE"), "1"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        options = ["-p", "peers.plugin", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore", "-q", "--tb=short"]
        chosen = [f"--timeout={timeout}", "-k", suite.select, *suite.files]
        command = [sys.executable, "-m", "pytest", *options, *chosen]
        log = output.with_suffix(".log")
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(
                command, cwd=folder / suite.source, env=os.environ | settings, stdout=file, stderr=subprocess.STDOUT
            )
        if done.returncode not in (0, 1, 5):  # passed, failed, none left to run
            raise SystemExit(f"{name}, {mode}: pytest ended with {done.returncode}; see {log}")


def forget(results: Path, name: str, tests: Collection[str]) -> None:
    """Remove the streamed results of some tests, so that `run` runs them again."""
    path = results_of(results, name, "streamed")
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line).get("id") not in tests), encoding="utf-8")
