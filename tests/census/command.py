"""The command line of the census."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.census.opening_page import section, section_of, with_section
from tests.census.page import page
from tests.census.runner import run, summary, tasks_of
from tests.census.table import table
from tests.census.worker import serve

ROOT = Path(__file__).parents[2]
PAGE, TABLE = ROOT / "docs/generated/models.md", ROOT / "src/horizon_lm/model/proven.json"
MAPPINGS = "causal,image_text,seq2seq,masked,classification,tokens,speech"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.census")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="compare every model type")
    runs.add_argument("--mappings", default=MAPPINGS, help="of transformers, with commas")
    runs.add_argument("--types", help="some model types only, with commas")
    runs.add_argument("--cases", help="some cases only, with commas")
    runs.add_argument("--shard", default="1/1", help="1/4 for the first of four")
    runs.add_argument("--jobs", type=int, default=2, help="processes")
    runs.add_argument("--timeout", type=float, default=60, help="seconds of one case")
    runs.add_argument("--output", type=Path, default=Path("runs/census/results.json"))
    renders = commands.add_parser(
        "render", help="write docs/generated/models.md and the table that ships with the package"
    )
    renders.add_argument("results", type=Path, nargs="*", default=[Path("runs/census/results.json")])
    openings = commands.add_parser(
        "openings", help="write the section about opening folders in docs/generated/models.md"
    )
    openings.add_argument(
        "results", nargs="+", metavar="VERSION=FILE,...", help="a version of transformers, and its results"
    )
    commands.add_parser("worker", help="what run starts")
    arguments = parser.parse_args()
    if arguments.command == "worker":
        serve()
    elif arguments.command == "run":
        _run(arguments)
    elif arguments.command == "openings":
        pairs = [each.split("=", 1) for each in arguments.results]
        _render_openings({version: files.split(",") for version, files in pairs})
    else:
        _render(merge(arguments.results))


def _run(arguments: argparse.Namespace) -> None:
    types, cases = (each and each.split(",") for each in (arguments.types, arguments.cases))
    mappings = arguments.mappings.split(",")
    tasks = tasks_of(mappings, types, arguments.shard)
    results: dict[str, Any] = {mapping: {} for mapping in mappings}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for number, (task, result) in enumerate(run(tasks, cases, arguments.jobs, arguments.timeout), 1):
        results[task[0]][task[1]] = result
        print(f"[{number}/{len(tasks)}] {' '.join(task)}: {summary(result)}", file=sys.stderr, flush=True)
        arguments.output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _render_openings(files: dict[str, list[str]]) -> None:
    results = {version: merge([Path(file) for file in each]) for version, each in files.items()}
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), section(results)), encoding="utf-8")


def _render(results: dict[str, Any]) -> None:
    PAGE.write_text(with_section(page(results), section_of(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
    TABLE.write_text(dump(table(results)), encoding="utf-8")


def merge(files: list[Path]) -> dict[str, Any]:
    """Merge the results of several shards; if two shards have results of a type, the cases of the later file count."""
    merged: dict[str, Any] = {mapping: {} for mapping in MAPPINGS.split(",")}
    for file in files:
        for mapping, types in json.loads(file.read_text(encoding="utf-8")).items():
            for model_type, result in types.items():
                before = merged[mapping].get(model_type, {}).get("cases", {})
                merged[mapping][model_type] = result | {"cases": before | result["cases"]}
    return {mapping: found for mapping, found in merged.items() if found}


def dump(proven: dict[str, Any]) -> str:
    """Return JSON with one line per type."""
    types, classifiers = (
        ",\n".join(f'  "{name}": {json.dumps(each)}' for name, each in proven[kind].items())
        for kind in ("types", "classifiers")
    )
    version = proven["transformers"]
    return (
        f'{{\n "transformers": "{version}",\n "types": {{\n{types}\n }},\n "classifiers": {{\n{classifiers}\n }}\n}}\n'
    )
