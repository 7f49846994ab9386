#!/bin/sh
# Run the tests of redraft.hf under several transformers, each in a virtual environment that is removed afterwards:
# test_transformers_versions.sh [VERSION ...], by default the oldest supported, one in between, and the newest.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 5.12.1 5.17.0 newest
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=
for version in "$@"; do
    venv=$scratch/$version
    scripts/setup.sh "$venv" dev
    # Unconstrained: another transformers may need other versions of what it depends on.
    if [ "$version" = newest ]; then wanted=transformers; else wanted=transformers==$version; fi
    "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-compile --upgrade "$wanted"
    echo "== $("$venv/bin/python" -m pip --disable-pip-version-check freeze | grep '^transformers==')" >&2
    "$venv/bin/python" -m pytest tests/hf || failed="$failed $version"
    rm -rf "$venv"
done
[ -z "$failed" ] || { echo "tests of redraft.hf fail under transformers$failed" >&2; exit 1; }
