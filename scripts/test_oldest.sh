#!/usr/bin/env bash
# Run tests with the oldest versions that pyproject.toml allows, with only the engine's dependencies and pytest installed.
#
#   scripts/test_oldest.sh [FILE...]     FILE: tests to run; default: those below
#
# torch is the exception: its oldest version is a CUDA build of several gigabytes, used only with TORCH=torch==2.11.0.
# VENV=/a/folder sets the environment; default: .venv-oldest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-$PWD/.venv-oldest}
torch=${TORCH:-$(grep '^torch==' constraints.txt)}
tests=("$@")
skipped=""
if [ $# = 0 ]; then  # skip tests that take minutes and hardly depend on versions, and tests that need all dependencies
    skipped="chunking compile convergence memory plan_bytes reference train trl"
    tests=(tests/repository/test_fragile_names.py tests/laws/test_placement.py tests/laws/test_updates.py)
    for file in tests/numerics/test_*.py; do
        name=${file##*/test_}
        [[ " $skipped " = *" ${name%.py} "* ]] || tests+=("$file")
    done
fi

base=""
for candidate in python3.11 python3.12; do  # the oldest numpy has no wheels for later versions
    "$candidate" -c '' 2>/dev/null && base=$candidate && break
done
if [ -z "$base" ]; then
    echo "The oldest versions need Python 3.11 or 3.12; neither is on the PATH." >&2
    exit 2
fi
oldest=$("$base" - <<'END'
import re, tomllib

for requirement in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    name, version = re.match(r"([\w.-]+)>=([\d.]+)", requirement).groups()
    if name in ("transformers", "numpy", "numba", "safetensors", "psutil"):
        print(f"{name}=={version}")
END
)
# constraints.txt has newer versions of these and of huggingface_hub.
oldest="$oldest huggingface_hub==1.33.0"
others=$(grep -viE '^(torch|transformers|numpy|numba|llvmlite|safetensors|psutil|huggingface.hub)==' constraints.txt)

python=$venv/bin/python
wanted="$torch $(cat scripts/test_oldest.sh pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$venv/.horizon-lm-oldest" 2>/dev/null)" != "$wanted" ]; then
    echo "Creating $venv with $torch and" $oldest "(about 300 MB, or several GB with a CUDA build of torch)."
    "$base" -m venv --clear "$venv"
    echo "$others" > "$venv/constraints.txt"
    pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }
    pip install --constraint "$venv/constraints.txt" "$torch"
    pip install --constraint "$venv/constraints.txt" "$torch" $oldest pytest
    pip uninstall --yes typer rich pydantic  # needed by transformers' command line only; the engine must not depend on them
    # Installed outside the environment: the GPU check must run without it.
    pip install --constraint "$venv/constraints.txt" --target "$venv/xdist" --no-deps pytest-xdist execnet
    echo "$wanted" > "$venv/.horizon-lm-oldest"
fi
"$python" - <<'END'
import importlib.util

unwanted = ("accelerate", "datasets", "hypothesis", "matplotlib", "plotly", "pydantic", "rich", "ruamel", "trl", "typer")
if present := [name for name in unwanted if importlib.util.find_spec(name)]:
    raise SystemExit(f"The environment must only have the engine's dependencies, but has {', '.join(present)}.")
END
"$python" -m pip --disable-pip-version-check list 2>/dev/null | grep -iE '^(torch|transformers|numpy|numba|safetensors|psutil|pytest) '

export PYTHONPATH=$PWD/src:$venv/xdist
"$python" -m pytest -n 2 --dist worksteal -p no:cacheprovider -q \
    -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true "${tests[@]}"
if [ -n "$skipped" ]; then echo "Skipped in tests/numerics: $skipped. Name files to run them."; fi
