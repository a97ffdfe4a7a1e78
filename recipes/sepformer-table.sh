#!/usr/bin/env bash
# A SepFormer, the conversions of its attention and their tables: made for one H200.
#
#   recipes/sepformer-table.sh [MINUTES]     train the SepFormer that long by the clock (default 5.5); run again, it goes on
#
# LPA_DATA  folder that holds LibriSpeech's dev-clean            TEST     what is measured on ($LPA_DATA/test-clean)
# RUNS      where runs are kept (runs)                           RESULTS  where records are written (results)
# LIMIT     utterances of TEST for the tables (100)              DEVICE   cuda or cpu
# LPA       the command (lpa)                                    SET      more of `--set key=value` for the conversions
#
# Outside a git clone set LPA_COMMIT: every step is recorded, and stops where it cannot say which code it is of.
set -euo pipefail

MINUTES=${1:-5.5}
: "${LPA_DATA:?set LPA_DATA to the folder that holds dev-clean}"
LPA=${LPA:-lpa} RUNS=${RUNS:-runs} RESULTS=${RESULTS:-results} LIMIT=${LIMIT:-100} DEVICE=${DEVICE:-cuda} SET=${SET:-}
TEST=${TEST:-$LPA_DATA/test-clean} RECIPES=$(dirname "$0") MODEL=$RUNS/sepformer/model
mkdir -p "$RUNS" "$RESULTS"
export LPA_DATA OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

record=(--record --results "$RESULTS")

convert() { # NAME RECIPE ARGUMENTS…; with its steps the sweep is recorded that gives it its order
    local name=$1 recipe=$2
    shift 2
    # shellcheck disable=SC2086
    $LPA convert "$MODEL" --data "$LPA_DATA/dev-clean" --recipe "$RECIPES/$recipe.toml" --out "$RUNS/$name" \
        --set train.cache="$RUNS/cache" "${record[@]}" $SET "$@" >"$RUNS/$name.log" 2>&1
}

control() { # OF NAME: as soon as it is settled which layers, in which order
    for _ in $(seq 300); do [ -e "$RUNS/$1/order.json" ] && break || sleep 1; done
    $LPA control "$RUNS/$1" --out "$RUNS/$2" "${record[@]}" >"$RUNS/$2.log" 2>&1
}

$LPA train "$RECIPES/sepformer.toml" --out "$RUNS/sepformer" --set minutes="$MINUTES" --set paths.data="$LPA_DATA" --set cache="$RUNS/cache"

# All side by side: five of them fill the GPU, so run nothing beside.
jobs=()
for mixer in pyramid lpa summary; do
    convert "sepformer-$mixer" sepformer-convert --mixer $mixer & jobs+=($!)
done
convert sepformer-window sepformer-convert --mixer window --set mixer_config.side=16 & jobs+=($!)
control sepformer-pyramid sepformer-control & jobs+=($!)
for job in "${jobs[@]}"; do wait "$job" || echo "a conversion failed; see $RUNS/*.log" >&2; done
MODEL=$RUNS/sepformer-pyramid/model convert sepformer-inter sepformer-inter # what it left: the attention across chunks
control sepformer-inter sepformer-inter-control

measure() { $LPA table "$@" --data "$TEST" --limit "$LIMIT" --device "$DEVICE" "${record[@]}"; }
measure "$RUNS"/sepformer-{lpa,pyramid,window,summary,control} & jobs=($!)
measure "$RUNS"/sepformer-inter "$RUNS"/sepformer-inter-control & jobs+=($!)
for noise in white babble; do
    $LPA evaluate --model "$MODEL" --model "$RUNS/sepformer-pyramid/model" --model "$RUNS/sepformer-inter/model" \
        --data "$TEST" --limit "$LIMIT" --noise $noise --device "$DEVICE" "${record[@]}" & jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
