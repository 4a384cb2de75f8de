#!/usr/bin/env bash
# A perceptron on MNIST under GSP (dist_gsync). Written by make_scripts.py.
# The files are explained in docs/how-to/launch.md: hosts, groups and data_sharding.
set -euo pipefail
cd "$(dirname "$0")"
epochs="${NUM_EPOCHS:-10}"
allocator="${DATA_ALLOCATOR:-1}"
sharding=""
[ "$allocator" = 0 ] || sharding="${DATA_SHARDING:-data_sharding}"
exec echelon launch \
  -n "${NUM_WORKERS:-3}" \
  -s "${NUM_SERVERS:-3}" \
  -i "${INTERFACE:-eth0}" \
  --launcher "${LAUNCHER:-ssh}" \
  -H "${HOSTS:-hosts}" \
  --groups "${GROUPS_FILE:-groups}" \
  ${sharding:+--data-sharding "$sharding"} \
  python train_mnist.py \
  --network mlp \
  --data-dir "${DATA_DIR:-data}" \
  --batch-size "${BATCH_SIZE:-64}" \
  --lr "${LR:-0.05}" \
  --lr-factor "${LR_FACTOR:-0.94}" \
  --lr-step-epochs "${LR_STEP_EPOCHS:-$(seq -s , "$epochs")}" \
  --num-epochs "$epochs" \
  --num-examples "${NUM_EXAMPLES:-60000}" \
  ${GPUS:+--gpus "$GPUS"} \
  --kv-store dist_gsync \
  --data-allocator "$allocator" \
  ${STALENESS:+--staleness "$STALENESS"} \
  "$@"
