"""The command line of the census."""

import argparse
import json
from pathlib import Path

from tests.census.runner import run, worker


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.census")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="compare every model type")
    runs.add_argument("--mappings", default="causal,image_text")
    runs.add_argument("--types", help="some model types only, with commas")
    runs.add_argument("--cases", help="some cases only, with commas")
    runs.add_argument("--shard", default="1/1", help="the first of four: 1/4")
    runs.add_argument("--jobs", type=int, default=2, help="processes")
    runs.add_argument("--timeout", type=float, default=60, help="seconds of one case")
    runs.add_argument("--output", type=Path, default=Path("runs/census/results.json"))
    commands.add_parser("worker")
    arguments = parser.parse_args()
    if arguments.command == "worker":
        worker()
        return
    results = run(
        arguments.mappings.split(","), arguments.types and arguments.types.split(","),
        arguments.cases and arguments.cases.split(","), arguments.shard, arguments.jobs, arguments.timeout,
    )  # fmt: skip
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
