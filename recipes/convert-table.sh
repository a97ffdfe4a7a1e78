#!/usr/bin/env bash
# The tables of conversions: more than half an hour of one H200, so name what matters most with ONLY.
#
#   recipes/convert-table.sh [MINUTES]     stop training after that long (default 22); run it again and it goes on
#
# Measuring on test-clean comes last and takes a few minutes more, for what has been finished and was not measured before.
# LPA_DATA  folder that holds LibriSpeech's dev-clean and test-clean     MODELS   whisper-base-ctc and wav2vec2-12 (models)
# RUNS      where runs are kept (runs/table)                             RESULTS  where records are written (results)
# LPA_SYNTHETIC  more speech to train on, if set
# LANES     runs side by side (3): three fill an H200, and more only slow one another
# ONLY      only jobs whose name matches this pattern                    LPA      the command (lpa)
# MEASURE   empty: train only, measure another time
#
# Outside a git clone set LPA_COMMIT, or nothing is recorded. What is trained hears dev-clean less four speakers, who judge it;
# what comes out is then measured on test-clean.
set -uo pipefail

MINUTES=${1:-22}
LPA=${LPA:-lpa} MODELS=${MODELS:-models} RUNS=${RUNS:-runs/table} RESULTS=${RESULTS:-results} LANES=${LANES:-3} ONLY=${ONLY:-}
DEVICE=${DEVICE:-cuda}
: "${LPA_DATA:?set LPA_DATA to the folder that holds dev-clean and test-clean}"
DEADLINE=$(($(date +%s) + MINUTES * 60))
CACHE=$RUNS/cache
WHISPER=$MODELS/whisper-base-ctc WAVE=$MODELS/wav2vec2-12
mkdir -p "$RUNS" "$CACHE" "$RESULTS"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} LPA RUNS RESULTS DEADLINE LPA_DATA DEVICE

left() { # minutes until the deadline, never 0
    local seconds=$((DEADLINE - $(date +%s)))
    echo "$((seconds > 6 ? seconds / 60 : 0)).$(printf %02d $((seconds > 6 ? seconds % 60 * 100 / 60 : 10)))"
}

run() { # VERB NAME ARGUMENTS…: unless it is done, or time is up
    local verb=$1 name=$2 done=$RUNS/$2/result.json
    shift 2
    [ "$verb" = sweep ] && done=$RUNS/$name/sweep.json
    [ "$verb" = ablate ] && done=$RUNS/$name/ablate.json
    [ -e "$done" ] && return 0
    [ "$(date +%s)" -ge "$DEADLINE" ] && return 1
    # shellcheck disable=SC2086
    $LPA $verb "$@" --out "$RUNS/$name" --record --results "$RESULTS" --max-minutes "$(left)" \
        >>"$RUNS/$name.log" 2>&1 || echo "failed: $name (see $RUNS/$name.log)" >&2
    [ -e "$done" ]
}
export -f left run

# --- what is run: NAME<TAB>COMMAND, in the order of importance

heard="--data $LPA_DATA/dev-clean"
keep="--held-out 1272,2035,5338,6241 --set train.cache=$CACHE --set front_gb=8.0 --set train.pad_seconds=1.0"
train="$heard $keep"
[ -n "${LPA_SYNTHETIC:-}" ] && heard="$heard --data $LPA_SYNTHETIC --set shares=[0.4,0.6]"
masks="--set train.time_masks=4.0 --set train.time_mask_seconds=0.3"
best="$heard $keep $masks --recipe best"
placeless="$best --set positions=false"
# the paper's epochs, scaled: its 8 of a stage are of 100 to 360 h
scaled="--set warm_epochs=0.5 --set settle_epochs=2.0 --set align_epochs=1.0 --set final_epochs=2.0"
ablated="--set warm_epochs=0.2 --set settle_epochs=0.5 --set align_epochs=0.4 --set final_epochs=0.75"

after() { # FILE COMMAND…: once the file is there
    while [ ! -e "$1" ] && [ "$(date +%s)" -lt "$DEADLINE" ]; do sleep 0.5; done
    "${@:2}"
}
export -f after

pair() { # NAME ARGUMENTS…: a conversion, then its control; both wait for $WAIT, if that is set
    printf '%s\t%srun convert %s %s && run control %s-control %s\n' "$1" "${WAIT:+after $WAIT }" "$1" "${*:2}" "$1" "$RUNS/$1"
}
one() { printf '%s\trun convert %s %s\n' "$1" "$1" "${*:2}"; }
swept() { # MIXER NAME ARGUMENTS…: a conversion that takes its order from a sweep
    printf '%s\tafter %s run convert %s %s --set sweep=%s\n' "$2" "$RUNS/sweep-$1/sweep.json" "$2" "${*:3}" "$RUNS/sweep-$1"
}

of_whisper() {
    # with no training: as many keys in a window as the pyramid has windows
    one free-whisper-pyramid "$WHISPER --recipe none --mixer pyramid"
    one free-whisper-window "$WHISPER --recipe none --mixer window --set mixer_config.side=16"
    pair default-0 "$WHISPER $placeless"
    for mixer in window conv summary ladder; do one "default-$mixer" "$WHISPER $placeless --mixer $mixer"; done
    one default-window16 "$WHISPER $placeless --mixer window --set mixer_config.side=16"
    for seed in 1 2; do pair default-$seed "$WHISPER $placeless --set seed=$seed"; done
    for epochs in 0.2 0.6 2.0 4.0; do # WER against training seconds
        one "default-epochs-$epochs" "$WHISPER $placeless --set settle_epochs=$epochs"
    done
    # what the positions cost
    one default-positions "$WHISPER $best"
    one free-default "$WHISPER $train --recipe none --mixer pyramid --set positions=false"
}

of_wave() { # the longest first: a lane each
    local short="--set settle_epochs=4.0"
    eight() { # SEED
        WAIT=$RUNS/sweep-pyramid/sweep.json \
            pair "eight-$1" "$WAVE $best $short --layers 8 --set sweep=$RUNS/sweep-pyramid --set seed=$1"
    }
    printf 'sweep-lpa\trun sweep sweep-lpa %s %s --mixer lpa\n' "$WAVE" "$train"
    printf 'sweep-pyramid\trun sweep sweep-pyramid %s %s --mixer pyramid\n' "$WAVE" "$train"
    swept lpa paper "$WAVE $train --recipe paper $scaled"
    printf 'ablate\tafter %s run ablate ablate %s %s %s --layers 8 --set sweep=%s\n' \
        "$RUNS/sweep-lpa/sweep.json" "$WAVE" "$train" "$ablated" "$RUNS/sweep-lpa"
    pair all-0 "$WAVE $best $short"
    eight 0
    one free-wave-pyramid "$WAVE --recipe none --mixer pyramid"
    one free-wave-window "$WAVE --recipe none --mixer window --set mixer_config.side=16"
    for seed in 1 2; do
        pair all-$seed "$WAVE $best $short --set seed=$seed"
        eight $seed
    done
    one all-window16 "$WAVE $best $short --mixer window --set mixer_config.side=16"
    for mixer in window conv summary ladder; do one "all-$mixer" "$WAVE $best $short --mixer $mixer"; done
    one paper-depth "$WAVE $train --recipe paper $scaled --layers 8 --order depth"
    one paper-random "$WAVE $train --recipe paper $scaled --layers 8 --order random:0"
    # the planner: what it predicts, what that comes to as it is, and after training
    printf 'plan\t%s plan %s %s --mixer pyramid --mixer ladder --mixer window --budget 2 --out %s && %s && %s\n' \
        "$LPA" "$WAVE" "$train" "$RUNS/plan" \
        "run convert plan-free $WAVE $train --recipe none --plan $RUNS/plan/choice.json" \
        "run convert plan-best $WAVE $best $short --plan $RUNS/plan/choice.json"
}

lanes() { # read jobs, run LANES at a time in their order
    awk -F'\t' -v only="$ONLY" '$1 ~ only { print $2 }' | tr '\n' '\0' | xargs -0 -r -P "$LANES" -I{} bash -c '{}' || true
}

# --- how it is measured: whole utterances, joined ones, gates at other temperatures; a process for a few models

measure() { # KIND OPTIONS MODEL…: those that are there and were not measured so before
    local kind=$1 options=$2 names=() model
    for model in "${@:3}"; do
        [ -e "$model/plan.json" ] && [ ! -e "$RUNS/measured/$kind/${model//\//_}" ] && names+=("$model")
    done
    [ ${#names[@]} -eq 0 ] && return 0
    mkdir -p "$RUNS/measured/$kind"
    # shellcheck disable=SC2086
    $LPA evaluate $(printf -- '--model %s ' "${names[@]}") --data "$LPA_DATA/test-clean" $options \
        --device "$DEVICE" --batch-seconds 600 --record --results "$RESULTS" &&
        for model in "${names[@]}"; do touch "$RUNS/measured/$kind/${model//\//_}"; done
}
export -f measure

measurements() { # every model that came out, and every depth of the paper's recipe
    local joins="--join 5 --join 20 --join 60 --join 180 --join 600" taus="--tau 0.5 --tau 0.1 --tau 0.01 --tau hard"
    find "$RUNS" -path '*/model/plan.json' \( ! -path '*/step-*' -o -path "$RUNS/paper*/step-*" \) -printf '%h\n' | sort |
        { echo "$WHISPER"; echo "$WAVE"; cat; } | xargs -n 6 printf 'whole\tmeasure whole "" %s %s %s %s %s %s\n'
    for model in "$WHISPER" "$RUNS/default-0/model" "$WAVE" "$RUNS/all-0/model" "$RUNS/all-window16/model" "$RUNS/paper/step-08/model"; do
        printf 'join\tmeasure join "%s" %s\n' "$joins" "$model"
    done
    printf 'tau\tmeasure tau "%s" %s %s\n' "$taus" "$RUNS/paper/step-04/model" "$RUNS/paper/step-08/model"
}

{ of_whisper; of_wave; } | lanes
[ -n "${MEASURE-yes}" ] && measurements | ONLY= lanes
echo "finished runs: $(find "$RUNS" -maxdepth 2 -name result.json | wc -l); records in $RESULTS"
