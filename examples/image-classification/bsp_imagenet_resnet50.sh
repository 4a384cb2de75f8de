#!/usr/bin/env bash
# ResNet-50 on ImageNet under BSP (dist_sync). Written by make_scripts.py.
# The files are explained in docs/how-to/launch.md: hosts, and data_sharding with DATA_ALLOCATOR=1.
set -euo pipefail
cd "$(dirname "$0")"
epochs="${NUM_EPOCHS:-100}"
allocator="${DATA_ALLOCATOR:-0}"
sharding=""
[ "$allocator" = 0 ] || sharding="${DATA_SHARDING:-data_sharding}"
exec echelon launch \
  -n "${NUM_WORKERS:-3}" \
  -s "${NUM_SERVERS:-3}" \
  -i "${INTERFACE:-eth0}" \
  --launcher "${LAUNCHER:-ssh}" \
  -H "${HOSTS:-hosts}" \
  ${sharding:+--data-sharding "$sharding"} \
  python train_imagenet.py \
  --network resnet --num-layers 50 \
  --data-dir "${DATA_DIR:-data}" \
  --batch-size "${BATCH_SIZE:-30}" \
  --lr "${LR:-0.1}" \
  --lr-factor "${LR_FACTOR:-0.1}" \
  --lr-step-epochs "${LR_STEP_EPOCHS:-30,60,90}" \
  --num-epochs "$epochs" \
  --num-examples "${NUM_EXAMPLES:-1281167}" \
  ${GPUS:+--gpus "$GPUS"} \
  --kv-store dist_sync \
  --data-allocator "$allocator" \
  "$@"
