# ms-swift: supervised fine-tuning of adapters, as in its quick start.
CUDA_VISIBLE_DEVICES=0 \
swift sft \
    --model org/instruct-7b \
    --train_type lora \
    --dataset 'org/alpaca-zh#500' 'org/alpaca-en#500' 'org/self-cognition#500' \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --learning_rate 1e-4 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --gradient_accumulation_steps 16 \
    --eval_steps 50 \
    --save_steps 50 \
    --save_total_limit 2 \
    --logging_steps 5 \
    --max_length 2048 \
    --output_dir output \
    --system 'You are a helpful assistant.' \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 4 \
    --model_author us \
    --model_name helper
