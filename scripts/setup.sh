#!/bin/sh
# Create a virtual environment and install Redraft into it: setup.sh VENV [EXTRA]
# With an NVIDIA GPU the default torch is installed; without one the locked CPU set of requirements/cpu.txt.
set -eu
cd "$(dirname "$0")/.."
venv=$1
target=.${2:+[$2]}
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
    done
fi
[ -n "$python" ] || { echo "setup: Python 3.11 or newer was not found; set PYTHON=/path/to/python" >&2; exit 1; }

echo "Installing Redraft into $venv (about a minute) ..." >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install() { "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@"; }
if nvidia-smi >/dev/null 2>&1; then
    install --no-compile -e "$target"
    exit 0
fi
torch=$(grep '^torch==' requirements/cpu.txt)
# An index that offers PyTorch's CPU builds serves them directly; otherwise uv knows where PyTorch publishes them.
if ! install --no-compile -c requirements/cpu.txt "$torch" 2>/dev/null; then
    install uv
    "$venv/bin/python" -m uv pip install -q --python "$venv/bin/python" --torch-backend cpu "${torch%%+*}"
fi
install --no-compile -c requirements/cpu.txt -e "$target"
