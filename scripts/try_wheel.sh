#!/usr/bin/env bash
# Build wheel and sdist, install the wheel into a temporary environment, and run it outside the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
rm -rf dist build
"$python" -m build --outdir dist . > /dev/null
ls -l dist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv --without-pip "$work/env"
# Dependencies come from the active environment, and from that which it sees, but the package itself must come from the wheel.
site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m pip --disable-pip-version-check --quiet install --no-deps --target "$site" dist/*.whl
"$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' > "$site/borrowed.pth"
cd "$work"
"$work/env/bin/python" -c "
import horizon_lm
assert horizon_lm.__file__.startswith('$site'), horizon_lm.__file__
from horizon_lm.cli import main
import sys
sys.argv = ['horizon-lm', '--help']
main()
"
