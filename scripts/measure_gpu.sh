#!/bin/sh
# Measure a GPU for docs/log.md in one run: measure_gpu.sh OUT [MODEL]
# Writes what every command prints to OUT/NAME.txt, its JSON line last; goes on when one fails, and fails at the end.
# PYTHON names the interpreter, DATA a folder with GSM8K (else it is downloaded). The comparison with transformers comes last: its compilation takes minutes.
set -u
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { echo "usage: measure_gpu.sh OUT [MODEL]" >&2; exit 2; }
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
model=${2:-random:26b-a4b}
failed=

run() {
    name=$1
    shift
    echo "redraft $*" >&2
    began=$(date +%s)
    { echo "\$ redraft $*"; "${PYTHON:-python3}" -m redraft "$@" --json; } >"$out/$name.txt" 2>&1 || failed="$failed $name"
    echo "  $(($(date +%s) - began)) s" >&2
}

TRITON_CACHE_DIR=$(mktemp -d)
trap 'rm -rf "$TRITON_CACHE_DIR"' EXIT
export TRITON_CACHE_DIR
for kernels in not-cached cached; do
    run "first-answer-$kernels" generate "$model" "Why is the sky blue?" --max-new-tokens 1 --steps 16
done
run batch bench batch "$model" --sizes 1,2,4,8,16,32
run serve-loop bench serve-loop "$model"
run profile profile "$model"
run long-context bench step "$model" --prompt-tokens 7936 --passes 8 --rounds 3
for tier in off bitexact turbo; do run "demo-$tier" demo --tier "$tier"; done
run demo-accuracy eval demo --task demo:all --limit 200
run kernels bench kernels --no-compile
run compare-ar compare-ar "$model" --prompt-tokens 1024
run ab ab "$model" --arms bf16,w4-off,w4-turbo --tasks gsm8k --limit 3 --fixed-steps 16 \
    --out "$out/ab" ${DATA:+--data "$DATA"}
run step bench step "$model" --vs transformers,transformers-compiled --rounds 3
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
