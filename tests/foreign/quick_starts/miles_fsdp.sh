#!/bin/bash
# The command that Miles' scripts/run_mcore_fsdp.py (31f1ca96) runs with its defaults on 8 GPUs, with --use-ref left out.
python3 train.py \
  --hf-checkpoint /root/models/Qwen3-4B-Instruct-2507 \
  --load /root/shared_data/run/checkpoints --save /root/shared_data/run/checkpoints \
  --save-interval 20 --save-retain-interval 20 \
  --prompt-data /root/datasets/dapo-math-17k/dapo-math-17k.jsonl --input-key prompt --label-key label \
  --apply-chat-template --rollout-shuffle --balance-data --rm-type math \
  --num-rollout 3000 --rollout-batch-size 64 --n-samples-per-prompt 16 --rollout-max-response-len 32768 \
  --rollout-temperature 1 --global-batch-size 1024 \
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 \
  --advantage-estimator grpo --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00 \
  --eps-clip 0.2 --eps-clip-high 0.28 \
  --use-dynamic-batch-size --max-tokens-per-gpu 32768 \
  --eval-interval 20 --eval-prompt-data aime /root/datasets/aime-2024/aime-2024.jsonl \
  --n-samples-per-eval-prompt 16 --eval-max-response-len 32768 --eval-top-p 1 \
  --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.75 --sglang-decode-log-interval 1000 \
  --sglang-chunked-prefill-size 4096 \
  --train-backend fsdp --train-env-vars '{"PYTORCH_CUDA_ALLOC_CONF":"expandable_segments:True"}' --use-fault-tolerance --dump-details /root/shared_data/run/dump_details --use-wandb --wandb-project miles-dev-megatron-fsdp --wandb-group qwen3-4B-fsdp-noref --update-weight-buffer-size 536870912 --gradient-checkpointing \
  --attn-implementation flash_attention_2 \
  --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
