# ms-swift: GKD of all weights, on the data alone.
NPROC_PER_NODE=4 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
swift rlhf \
    --rlhf_type gkd \
    --model org/base-7b \
    --teacher_model org/instruct-14b \
    --tuner_type full \
    --dataset 'org/alpaca-en#2000' 'org/alpaca-zh#2000' \
    --lmbda 0 \
    --seq_kd false \
    --beta 0.7 \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 4 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps 1 \
    --save_steps 50 \
    --max_length 2048 \
    --max_completion_length 512 \
    --output_dir output \
    --warmup_ratio 0.05 \
    --save_only_model true \
    --deepspeed zero3 \
    --attn_impl flash_attn
