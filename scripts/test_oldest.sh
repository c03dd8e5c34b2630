#!/usr/bin/env bash
# Run tests with the oldest versions that pyproject.toml allows, where nothing is installed but what the engine needs, and pytest.
#
#   scripts/test_oldest.sh [FILE...]     FILE: tests to run; those below if none are named
#
# Only torch is the one that everything else is tested with: its oldest comes as a CUDA build of several gigabytes.
# TORCH=torch==2.11.0 takes that. VENV=/a/folder makes another environment than .venv-oldest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-$PWD/.venv-oldest}
torch=${TORCH:-$(grep '^torch==' constraints.txt)}
tests=("$@")
left_out=""
if [ $# = 0 ]; then  # what takes minutes and depends on versions little, and what needs the whole installation, is left out
    left_out="chunking compile convergence memory plan_bytes reference train trl"
    tests=(tests/unit/test_fragile_names.py)
    for file in tests/numerics/test_*.py; do
        name=${file##*/test_}
        [[ " $left_out " = *" ${name%.py} "* ]] || tests+=("$file")
    done
fi

base=""
for candidate in python3.11 python3.12; do  # the oldest numpy has no wheels for later ones
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
# What constraints.txt has of these belongs to newer ones, and so does its huggingface_hub.
oldest="$oldest huggingface_hub==1.33.0"
others=$(grep -viE '^(torch|transformers|numpy|numba|llvmlite|safetensors|psutil|huggingface.hub)==' constraints.txt)

python=$venv/bin/python
wanted="$torch $(cat scripts/test_oldest.sh pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$venv/.horizon-lm-oldest" 2>/dev/null)" != "$wanted" ]; then
    echo "Making $venv with $torch and" $oldest "(about 300 MB, or several GB with a CUDA build of torch)."
    "$base" -m venv --clear "$venv"
    echo "$others" > "$venv/constraints.txt"
    pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }
    pip install --constraint "$venv/constraints.txt" "$torch"
    pip install --constraint "$venv/constraints.txt" "$torch" $oldest pytest
    pip uninstall --yes typer rich pydantic  # of transformers' command line, on which the engine must not lean
    # Beside the environment and not in it: the GPU check has to run without.
    pip install --constraint "$venv/constraints.txt" --target "$venv/xdist" --no-deps pytest-xdist execnet
    echo "$wanted" > "$venv/.horizon-lm-oldest"
fi
"$python" - <<'END'
import importlib.util

kept_out = ("accelerate", "datasets", "hypothesis", "matplotlib", "plotly", "pydantic", "rich", "ruamel", "trl", "typer")
if present := [name for name in kept_out if importlib.util.find_spec(name)]:
    raise SystemExit(f"The environment shall have the engine's dependencies alone, and has {', '.join(present)}.")
END
"$python" -m pip --disable-pip-version-check list 2>/dev/null | grep -iE '^(torch|transformers|numpy|numba|safetensors|psutil|pytest) '

export PYTHONPATH=$PWD/src:$venv/xdist
"$python" -m pytest -n 2 --dist worksteal -p no:cacheprovider -q \
    -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true "${tests[@]}"
if [ -n "$left_out" ]; then echo "Left out of tests/numerics: $left_out. Name files to run them."; fi
