#!/usr/bin/env bash
# Everything that is run on one GPU without a network, in two calls. README.md in this folder lists what to bring.
#
#   OUT=out/gpu/1 benches/gpu/call.sh 1    # tests/gpu, then the rows head-narrow and trainer; at most 480 s
#   OUT=out/gpu/2 benches/gpu/call.sh 2    # the other rows, the profile of a step, ncu; at most 480 s
#
# OUT is an empty folder for the results, P the interpreter (python3), LIMIT the seconds of the whole call, MOST those of
# one part, WHEELS the folder of wheels, SCRATCH a folder for what is unpacked. REHEARSE=1 runs the same on a CPU at tiny
# sizes, with SLOWER (10) times the seconds. PLAN=1 prints the command of each part instead of running it.
set -uo pipefail

CALL=${1:-}
case $CALL in
1) LIMIT=${LIMIT:-480} RESERVE=20 ;; # the last seconds pack the caches
2) LIMIT=${LIMIT:-480} RESERVE=5 ;;
*) echo "usage: [OUT=DIR] [P=python3] [REHEARSE=1] benches/gpu/call.sh 1|2" >&2 && exit 2 ;;
esac
P=${P:-python3}
OUT=$(realpath -m "${OUT:-out/gpu/$CALL}")
cd "$(dirname "$0")/../.." || exit 1
WHEELS=$(realpath -m "${WHEELS:-wheels}")
SCRATCH=${SCRATCH:-/tmp/tracegrad-gpu} # the same in both calls: compile caches hold paths
REHEARSE=${REHEARSE:-} PLAN=${PLAN:-}
ON_CPU=() INTERPRET=()
if [ -z "$REHEARSE" ]; then
  SLOWER=1
else
  SLOWER=${SLOWER:-10} ON_CPU=(--rehearse) INTERPRET=(TRITON_INTERPRET=1)
fi
DEADLINE=$((LIMIT * SLOWER - RESERVE))
MOST=${MOST:-$DEADLINE}

export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error PYTORCH_ALLOC_CONF=expandable_segments:True
export TORCHINDUCTOR_CACHE_DIR=$SCRATCH/cache/inductor TRITON_CACHE_DIR=$SCRATCH/cache/triton
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}

unpack() { # wheels and caches; a tracegrad wheel goes before the tree's own package, and that before an installed one
  mkdir -p "$OUT" "$SCRATCH/cache"
  rm -rf "$SCRATCH/site" && mkdir "$SCRATCH/site"
  local wheel path="$SCRATCH/site"
  for wheel in "$WHEELS"/*.whl; do
    [ -f "$wheel" ] && "$P" -m zipfile -e "$wheel" "$SCRATCH/site"
  done
  for wheel in "$SCRATCH"/site/*.data/*lib; do # files that a wheel wants next to its package
    [ -d "$wheel" ] && cp -r "$wheel/." "$SCRATCH/site"
  done
  if [ ! -d "$SCRATCH/site/tracegrad" ] && [ -f python/tracegrad/_core.abi3.so ]; then path+=":$PWD/python"; fi
  if [ -f "$WHEELS/cache.tgz.0" ]; then cat "$WHEELS"/cache.tgz.* | tar xz -C "$SCRATCH/cache"; fi
  export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
}

part() { # NAME LOG SECONDS COMMAND...: run a command, ended after so many seconds; not begun if less than 15 s are left
  local name=$1 log=$2 most=$(($3 * SLOWER)) began=$SECONDS status
  shift 3
  if [ -n "$PLAN" ]; then echo "$name: ${*@Q}" && return; fi
  if [ $((DEADLINE - began)) -lt 15 ]; then
    echo "== $name: not begun, $((DEADLINE - began)) s are left" >>"$OUT/day.txt" && return 1
  fi
  if [ "$most" -gt $((DEADLINE - began)) ]; then most=$((DEADLINE - began)); fi
  if [ "$most" -gt "$MOST" ]; then most=$MOST; fi
  timeout -k 5 "$most" "$@" >>"$OUT/$log" 2>&1
  status=$?
  echo "== $name: exit status $status, $((SECONDS - began)) s, ended at $SECONDS s" >>"$OUT/day.txt"
  return $status
}

check() { # NAME [ENVIRONMENT] ARGUMENTS...: tests of tests/gpu, with a log of their own
  local name=$1
  shift
  part "check $name" "check_$name.log" 170 env "$@" "${ON_CPU[@]}"
}

row() { # NAME SECONDS: a row of rows.py in a process of its own, which stops to measure 40 s before it would be ended
  local seconds=$(($2 * SLOWER)) left=$((DEADLINE - SECONDS))
  if [ "$seconds" -gt $left ]; then seconds=$left; fi
  if [ "$seconds" -lt 45 ]; then seconds=45; fi
  part "row $1" day.txt "$2" \
    "$P" benches/gpu/run.py --quick --seconds $((seconds - 40)) --out "$OUT" --rows "$1" "${ON_CPU[@]}"
}

versions() {
  echo "call $CALL${REHEARSE:+, rehearsal}, $(date -u +%FT%TZ)"
  if command -v nvidia-smi; then nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv; fi
  timeout $((MOST < 60 ? MOST : 60)) "$P" - <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

for name in ("tracegrad", "torch", "triton", "transformers", "numpy", "peft", "accelerate", "pyarrow", "datasets", "trl",
             "liger-kernel", "cut-cross-entropy"):
    try:
        print(name, version(name), end="; ")
    except PackageNotFoundError:
        print(name, "is absent", end="; ")
print("Python", sys.version.split()[0])
PYTHON
}

interprets() { # Triton 3.6 and before interpret kernels with numpy below 2.4 alone
  timeout 60 "$P" - <<'PYTHON'
import sys
from importlib.metadata import version

triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
if triton < (3, 7) and numpy >= (2, 4):
    sys.exit("Triton 3.6 interprets no kernel with numpy 2.4 or newer. Run: pip install 'numpy<2.4'")
PYTHON
}

call_1() { # is it right, and the two headlines
  if [ -n "$REHEARSE" ] && [ -z "$PLAN" ] && ! interprets >>"$OUT/day.txt" 2>&1; then
    echo "== stopped: the kernels cannot be rehearsed" >>"$OUT/day.txt" && return
  fi
  local tests=("$P" -m pytest -m gpu -v -rA --tb=short -p no:cacheprovider -p no:logging) kernels qwen3 right=0
  check kernels "${INTERPRET[@]}" "${tests[@]}" tests/gpu/test_gpu_kernels.py & kernels=$!
  check qwen3 "${tests[@]}" tests/gpu/test_gpu_forward.py -k Qwen3 & qwen3=$!
  check gemma3 "${tests[@]}" tests/gpu/test_gpu_forward.py -k Gemma3 &
  check step "${tests[@]}" tests/gpu/test_gpu_update.py -k "whole_step or cut or waits or adapters" &
  check rest "${tests[@]}" tests/gpu/test_gpu_processes.py tests/gpu/test_gpu_compiled.py -k "nccl or passes" &
  wait $kernels || right=1
  wait $qwen3 || right=1
  wait
  if [ -z "$PLAN" ]; then
    tail -v -n +1 "$OUT"/check_*.log >"$OUT/checks.log" && rm "$OUT"/check_*.log # few files come back
  fi
  if [ $right != 0 ]; then
    echo "== stopped: the kernels or Qwen3 are wrong, so nothing is timed. Fix them first." >>"$OUT/day.txt" && return
  fi
  row head-narrow 130
  row trainer 220
}

call_2() { # the rest, and where time goes
  local profiler=(ncu --clock-control none --set roofline -k "regex:_statistics|_gradient" -c 2)
  if [ -n "$REHEARSE" ]; then profiler=(env); fi
  row small 110
  part where where.log 150 "$P" benches/gpu/where.py --out "$OUT" "${ON_CPU[@]}"
  row shared 110
  row mask 50
  part ncu ncu.log 60 "${profiler[@]}" "$P" benches/gpu/where.py --head "${ON_CPU[@]}"
  row head 120
  row longest 200
}

screen() { # failures and the diary last; 12,000 characters of the screen come back
  if [ "$CALL" = 1 ]; then
    grep -hE "^(FAILED|ERROR|E  )|^=+ .*(passed|failed|error).* in " "$OUT/checks.log" | cut -c 1-200 | head -c 5000
  else
    tail -n 30 "$OUT/where.log" | cut -c 1-110
    grep -E "Duration|Throughput|==ERROR==" "$OUT/ncu.log" | cut -c 1-110
  fi
  tail -c 6500 "$OUT/day.txt"
}

if [ -n "$PLAN" ]; then "call_$CALL" && exit; fi
unpack
versions >>"$OUT/day.txt" 2>&1
"call_$CALL"
if [ "$CALL" = 1 ]; then # in pieces, since one file of 16 MiB is too large for some ways home
  timeout $((RESERVE - 2)) tar cz -C "$SCRATCH/cache" . | split -b 15M -d -a 1 - "$OUT/cache.tgz."
fi
screen
! grep -qE "^== (stopped|.*: exit status [1-9]|.*: not begun)" "$OUT/day.txt"
