#!/usr/bin/env bash
# The tests that compute, with the kernels that torch, oneDNN, MKL and OpenBLAS choose on other processors, with other
# numbers of threads and with the other sign of eigenvectors. One line per setting; fails if one of them fails.
#
#   tests/other_processors.sh [PYTEST ARGUMENTS]     files instead of those below; --quick, -x, -k ...
#
# Takes some minutes per setting. ONLY=TEXT takes those that contain it. What a setting that fails printed is kept.
set -uo pipefail
cd "$(dirname "$0")/.."

COMPUTE=(
    tests/kernels/test_reference.py tests/kernels/test_ops.py tests/kernels/test_batch_norm_ops.py
    tests/kernels/test_interpreted.py
    tests/kernels/test_interpreted_backward.py
    tests/objectives tests/networks tests/optimization
    tests/evaluation/test_knn.py tests/evaluation/test_sharded_knn.py tests/evaluation/test_knn_probe.py
    tests/evaluation/test_linear.py tests/evaluation/test_linear_sweep.py tests/evaluation/test_finetune.py
    tests/evaluation/test_knn_grid.py tests/evaluation/test_features.py
    tests/pipelines/test_photometric.py tests/pipelines/test_parameters.py tests/pipelines/test_cutmix.py
    tests/training/test_reduction.py tests/training/test_target.py tests/training/test_optimizers_at_stages.py
    tests/training/test_ranks.py tests/training/test_methods.py
    tests/benchmarks/test_bench_objective.py tests/benchmarks/test_bench_methods.py tests/benchmarks/test_bench_step.py
)
SETTINGS=(
    ATEN_CPU_CAPABILITY=default
    ATEN_CPU_CAPABILITY=avx2
    DNNL_MAX_CPU_ISA=AVX2
    DNNL_MAX_CPU_ISA=SSE41
    MKL_CBWR=COMPATIBLE
    OPENBLAS_CORETYPE=Nehalem # of NumPy, in which Triton's interpreter computes
    OMP_NUM_THREADS=1
    OMP_NUM_THREADS=2
    OMP_NUM_THREADS=3
    EIGENVECTORS=flipped
)

for argument in "$@"; do
    [[ $argument == tests/* ]] && COMPUTE=()
done
output=$(mktemp -d) failed=0
for setting in "${SETTINGS[@]}"; do
    [[ $setting == *${ONLY:-}* ]] || continue
    log=$output/$setting.txt
    env "$setting" OMP_WAIT_POLICY=PASSIVE PYTHONPATH="$PWD" .venv/bin/python -m pytest -q -p no:cacheprovider \
        --color=no "${COMPUTE[@]}" "$@" >"$log" 2>&1
    status=$?
    printf '%-27s  %s\n' "$setting" "$(tail -n 1 "$log")"
    [ $status = 0 ] && rm "$log" && continue
    grep -E '^(FAILED|ERROR)' "$log"
    echo "    all of it: $log"
    failed=1
done
rmdir "$output" 2>/dev/null
exit $failed
