"""scripts/bootstrap.sh installs into an active environment or into .venv, and into no other Python."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
echo "$0 $*" >> "$CALLS"
case "$1 $2" in
    "-c "*tomllib*) exec "$REAL_PYTHON" "$@" ;;
    "-m venv") mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    "-c "*'"torch"'*) [ -n "$HAS_TORCH" ] ;;
    "-c "*sys.prefix*) dirname "$(dirname "$0")" ;;
esac
"""


def bootstrap(
    folder: Path, has_torch: bool, active: Path | None = None, *, extra: Sequence[str] = ("gguf",)
) -> list[str]:
    """Run the script in a checkout with a Python that only records its calls, and return these."""
    (folder / "scripts").mkdir()
    for name in ("scripts/bootstrap.sh", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    for bin_folder in (folder / "usr", *([active / "bin"] if active else [])):
        bin_folder.mkdir(parents=True)
        for name in ("python3", "python"):
            (bin_folder / name).write_text(PYTHON)
            (bin_folder / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    env |= {
        "PATH": f"{folder / 'usr'}:/usr/bin:/bin",
        "CALLS": str(folder / "calls"),
        "REAL_PYTHON": sys.executable,
        "HAS_TORCH": "1" if has_torch else "",
    }
    if active is not None:
        env["VIRTUAL_ENV"] = str(active)
    result = subprocess.run(
        [folder / "scripts/bootstrap.sh", *extra], env=env, capture_output=True, text=True, check=True
    )
    assert result.stderr.endswith(f"Using the environment {Path(result.stdout).parents[1]}.\n")
    return [*(folder / "calls").read_text().splitlines(), result.stdout.strip()]


@pytest.mark.parametrize("has_torch", [True, False])
def test_a_plain_python_is_left_alone(tmp_path: Path, has_torch: bool) -> None:
    *calls, chosen = bootstrap(tmp_path, has_torch)
    assert chosen == str(tmp_path / ".venv/bin/python")
    assert {line.partition(" ")[0] for line in calls if "-m pip" in line} == {chosen}
    (made,) = (line for line in calls if "-m venv" in line)
    assert ("--system-site-packages" in made) is has_torch


def test_an_active_environment_is_used(tmp_path: Path) -> None:
    *calls, chosen = bootstrap(tmp_path, has_torch=True, active=tmp_path / "mine")
    assert chosen == str(tmp_path / "mine/bin/python")
    assert {line.partition(" ")[0] for line in calls if "-m pip" in line} == {chosen}
    assert not (tmp_path / ".venv").exists()


def test_the_pages_need_neither_torch_nor_the_package(tmp_path: Path) -> None:
    """Those of `make docs` are rendered in an environment of their own, whatever environment is active."""
    *calls, chosen = bootstrap(tmp_path, True, tmp_path / "mine", extra=("docs", "--alone"))
    assert chosen == str(tmp_path / ".venv-docs/bin/python")
    assert not any("site-packages" in line for line in calls)
    (installed,) = (line.partition(" install ")[2] for line in calls if " install " in line)
    assert "mkdocs-material>=" in installed
    assert "torch" not in installed
    assert "--editable" not in installed
