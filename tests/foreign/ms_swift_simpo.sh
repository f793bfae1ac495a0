# ms-swift: SimPO of all weights, with names of version 2.
nproc_per_node=2

CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=$nproc_per_node \
swift rlhf \
    --rlhf_type simpo \
    --model_id_or_path org/instruct-8b \
    --sft_type full \
    --dataset org/emoji-preferences \
    --num_train_epochs 1 \
    --batch_size 1 \
    --weight_decay 0.05 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps $((16 / nproc_per_node)) \
    --warmup_ratio 0.03 \
    --eval_steps 100 \
    --save_steps 100
