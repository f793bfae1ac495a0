# ms-swift: a reward model with adapters.
NPROC_PER_NODE=2 \
swift rlhf \
    --rlhf_type rm \
    --model org/instruct-7b \
    --train_type lora \
    --dataset org/emoji-preferences \
    --split_dataset_ratio 0.01 \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-4 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --gradient_accumulation_steps 8 \
    --center_rewards_coefficient 0.01 \
    --eval_steps 100 \
    --save_steps 100 \
    --max_length 2048 \
    --output_dir output \
    --warmup_ratio 0.05 \
    --deepspeed zero2
