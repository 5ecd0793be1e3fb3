#!/usr/bin/env bash
# Ten runs of random batch size (1-32) and sequence length (128-512), 500 repeats each:
#     bench/stress.sh [REPEAT]          MODEL=model.bin SEED=7 RUNS=3 bench/stress.sh 20
# Prints a line a run: P50, P99 and max latency of a token, resident memory and how much it grew within the run.
#     bench/stress.sh --soak MINUTES [--clients N] [--json]
# instead keeps the service under random load for so long, 3 minutes at least for its memory to settle: see bench/soak.py.
# Exits with 1 if a run fails, if memory grows within a run, or if it grows in every run over the one before.
set -uo pipefail
cd "$(dirname "$0")/.."
SEED=${SEED:-1}
MODEL=${MODEL:-moe-32.bin}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
case ${1:-} in --*) exec "$PYTHON" -m bench.soak --model "$MODEL" --seed "$SEED" "$@" ;; esac
REPEAT=${1:-${REPEAT:-500}}
RUNS=${RUNS:-10}
[[ $REPEAT =~ ^[1-9][0-9]*$ ]] || { echo "REPEAT: $REPEAT, expected 1 or more, or --soak MINUTES" >&2; exit 2; }
GROWTH_MIB=4 # within a run: the allocator's slack

[ "$MODEL" != moe-32.bin ] || [ -f "$MODEL" ] || "$PYTHON" -m converter models/moe-32.pt "$MODEL" || exit 1
echo "seed $SEED, $RUNS runs of $REPEAT repeats, $MODEL"
RANDOM=$SEED
failed=0 growing=1 previous=
for ((run = 1; run <= RUNS; run++)); do
    batch=$((RANDOM % 32 + 1)) length=$((RANDOM % 385 + 128))
    label=$(printf 'run %2d: batch %2d, length %3d' "$run" "$batch" "$length") # after the run, which shows its progress
    if ! json=$("$PYTHON" -m colibri.run --model "$MODEL" --batch-size "$batch" --seq-len "$length" \
                --repeat "$REPEAT" --seed "$SEED" --json); then
        echo "$label: failed"
        failed=1
        continue
    fi
    read -r p50 p99 max resident growth < <("$PYTHON" -c '
import json, sys
run = json.loads(sys.argv[1])
itl = run["itl_ms"]
print("%.3f %.3f %.3f" % (itl["p50"], itl["p99"], itl["max"]),
      "%.1f %.1f" % (run["resident_mib"], run["resident_growth_mib"]))' "$json")
    echo "$label: P50 $p50, P99 $p99, max $max ms; $resident MiB resident, grew by $growth MiB"
    if awk "BEGIN {exit !($growth > $GROWTH_MIB)}"; then
        echo "run $run: memory grew by $growth MiB, expected at most $GROWTH_MIB" >&2
        failed=1
    fi
    [ -z "$previous" ] || awk "BEGIN {exit !($resident > $previous)}" || growing=0
    previous=$resident
done
if [ "$RUNS" -gt 4 ] && [ "$growing" = 1 ]; then
    echo "memory grew from every run to the next" >&2
    failed=1
fi
exit $failed
