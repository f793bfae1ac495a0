#!/bin/bash
# a GRPO run of slime on Megatron, with arrays of arguments
set -ex
export PYTHONUNBUFFERED=1
NUM_GPUS=${NUM_GPUS:-8}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/base-4b.sh"

CKPT_ARGS=(
   --hf-checkpoint /models/base-4b
   #--hf-checkpoint /models/base-4b-fp8
   --ref-load /models/base-4b_torch_dist
   --save /checkpoints/base-4b/
   --save-interval 10
)
ROLLOUT_ARGS=(
   --prompt-data /data/math.jsonl
   --input-key question
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 100
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --global-batch-size 128
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)
EVAL_ARGS=(
   --eval-interval 5
   --eval-prompt-data aime /data/aime.jsonl amc /data/amc.jsonl
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 0.7
)
UNUSED_ARGS=(
   --eps-clip-c 3.0
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --context-parallel-size 2
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001
   --kl-loss-type low_var_kl
   --eps-clip 0.2
   --eps-clip-high 0.28
   --use-tis
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --lr-warmup-iters 10 --weight-decay 0.1)
OPTIMIZER_ARGS+=(--adam-beta1 0.9 --adam-beta2 0.98)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
   --sglang-chunked-prefill-size 4096
)
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{"env_vars": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \
   -- python3 train.py \
   --actor-num-nodes 2 \
   --actor-num-gpus-per-node ${NUM_GPUS} \
   --colocate \
   --update-weight-buffer-size $(( 1024 * 1024 * 1024 * 2 )) \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   "${OPTIMIZER_ARGS[@]}" \
   ${GRPO_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${SGLANG_ARGS[@]}
