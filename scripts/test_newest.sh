#!/usr/bin/env bash
# Run a sample of the tests with the newest transformers that can be installed; all else has the versions of constraints.txt.
#
#   scripts/test_newest.sh [FILE...]     FILE: tests to run; default: those below
#
# TORCH=torch takes the newest torch, too, which is several gigabytes with CUDA. VENV=/a/folder sets the environment;
# default: .venv-newest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-$PWD/.venv-newest}
torch=${TORCH:-$(grep '^torch==' constraints.txt)}
tests=("$@")
if [ $# = 0 ]; then  # numbers, the uses of a plain model, trainers, a sample of all model types, and runs
    tests=(
        tests/numerics/test_parity.py tests/numerics/test_opening.py tests/numerics/test_packing.py tests/seams tests/trainer
        tests/census tests/repository/test_fragile_names.py tests/e2e/test_resume.py tests/laws/test_runs.py tests/e2e/test_merge.py tests/e2e/test_eval.py
    )
fi

python=$venv/bin/python
wanted="$torch $(cat scripts/test_newest.sh pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$venv/.horizon-lm-newest" 2>/dev/null)" != "$wanted" ]; then
    echo "Creating $venv with $torch and the newest transformers (about 1 GB, or several with a CUDA build of torch)."
    python3 -m venv --clear "$venv"
    grep -v '^torch==' constraints.txt > "$venv/constraints.txt"
    pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }
    pip install "$torch"
    pip install --constraint "$venv/constraints.txt" "$torch" --editable ".[dev]"
    pip install --upgrade transformers  # afterwards: without versions, pip searches those of all packages for a long time
    echo "$wanted" > "$venv/.horizon-lm-newest"
fi
"$python" -m pip --disable-pip-version-check list 2>/dev/null | grep -iE '^(torch|transformers|tokenizers|huggingface.hub|safetensors|trl|peft) '
"$python" -m pytest -n 2 --dist worksteal -p no:cacheprovider -q "${tests[@]}"
