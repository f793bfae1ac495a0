# ms-swift: ORPO of adapters, with the accumulation left to it.
swift rlhf \
    --rlhf_type orpo \
    --model org/instruct-7b \
    --train_type lora \
    --beta 0.2 \
    --dataset org/emoji-preferences \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --max_length 2048 \
    --output_dir output
