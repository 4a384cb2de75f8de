#!/usr/bin/env bash
# ResNet-164 on CIFAR10 under GSP (dist_gsync). Written by make_scripts.py.
# The files are explained in docs/how-to/launch.md: hosts, groups and data_sharding.
set -euo pipefail
cd "$(dirname "$0")"
epochs="${NUM_EPOCHS:-300}"
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
  python train_cifar10.py \
  --network resnet --num-layers 164 \
  --data-dir "${DATA_DIR:-data}" \
  --batch-size "${BATCH_SIZE:-20}" \
  --lr "${LR:-0.05}" \
  --lr-factor "${LR_FACTOR:-0.1}" \
  --lr-step-epochs "${LR_STEP_EPOCHS:-150,225}" \
  --num-epochs "$epochs" \
  --num-examples "${NUM_EXAMPLES:-50000}" \
  ${GPUS:+--gpus "$GPUS"} \
  --kv-store dist_gsync \
  --data-allocator "$allocator" \
  ${STALENESS:+--staleness "$STALENESS"} \
  "$@"
