#!/usr/bin/env bash
# The main job on generated data: stock nnU-Net, the stock model repaired, and nnU-Net trained to be
# calibrated, on the CPU, in minutes.
# Usage: bash scripts/demo.sh [FOLDER [EPOCHS]]   (default: demo 12; an epoch or two only show the steps)
set -euo pipefail
out="$(realpath -m "${1:-$(dirname "$0")/../demo}")"
cd "$(dirname "$0")/.."
epochs="${2:-12}"
if [ -e "$out" ] && [ ! -f "$out/.segcal-demo" ]; then # before the installation, which takes minutes
  echo "$out exists and is no demo; name another folder" >&2
  exit 2
fi
. scripts/venv.sh

rm -rf "$out"
mkdir -p "$out/raw" "$out/preprocessed" "$out/results"
touch "$out/.segcal-demo"
out="$(cd "$out" && pwd)"
export nnUNet_raw="$out/raw" nnUNet_preprocessed="$out/preprocessed" nnUNet_results="$out/results"
export nnUNet_def_n_proc=1 nnUNet_n_proc_DA=1
export OMP_WAIT_POLICY=PASSIVE # on a busy machine, waiting threads must not spin
data="$nnUNet_raw/Dataset900_Phantom"

quietly() { # runs a command with its output in a log, which is shown if it fails
  local log="$out/$1.log"
  shift
  "$@" > "$log" 2>&1 || { tail -n 30 "$log" >&2; echo "failed; the whole log is $log" >&2; exit 1; }
}

echo "1/6 Generating hearts with known posterior"
segcal phantom "$data" --train 15 --test 8 --seed 0
echo "2/6 Planning and preprocessing"
quietly plan nnUNetv2_plan_and_preprocess -d 900 -c 2d -np 1 -npfp 1 --verify_dataset_integrity
quietly plan_small python scripts/small_plans.py 900 2d --patch 64,64 --batch 12 --features 16,32,64
for trainer in nnUNetTrainer nnUNetTrainerConfidence; do
  echo "3/6 Training $trainer"
  quietly "train_$trainer" segcal nnunet train 900 2d_small 0 -tr "$trainer" -device cpu \
    --epochs "$epochs" --iterations 40 --val-iterations 10 --seed 0 --calibrate
  echo "4/6 Predicting with $trainer"
  calibrator=none # stock stays stock, until 5/6
  [ "$trainer" = nnUNetTrainer ] || calibrator=model
  quietly "predict_$trainer" segcal nnunet predict -i "$data/imagesTs" -o "$out/$trainer" -d 900 \
    -c 2d_small -f 0 -tr "$trainer" -device cpu -npp 1 -nps 1 --calibrator "$calibrator"
done
echo "5/6 Repairing the stock model: a calibrator, fitted to the validation cases of its training"
fold=("$nnUNet_results"/Dataset900_Phantom/nnUNetTrainer__*/fold_0)
quietly calibrate segcal calibrate apply "$out/nnUNetTrainer" "${fold[0]}/calibrator.json" \
  -o "$out/nnUNetTrainer_calibrated"
echo "6/6 Evaluating"
for what in nnUNetTrainer nnUNetTrainer_calibrated nnUNetTrainerConfidence posterior; do
  predictions="$out/$what"
  [ "$what" = posterior ] && predictions="$data/posteriorTs"
  echo
  echo "== $what =="
  segcal evaluate "$predictions" "$data/labelsTs" -o "$out/report_$what"
done
echo
echo "The last one is the true posterior: what perfect calibration looks like on these 8 cases."
echo "Reports: $out/report_*/  Multipliers per epoch:"
ls "$nnUNet_results"/Dataset900_Phantom/nnUNetTrainerConfidence*/fold_0/segcal_log.jsonl
