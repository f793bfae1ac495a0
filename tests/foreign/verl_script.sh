#!/usr/bin/env bash
# verl.trainer.fsdp_sft_trainer, started with overrides
set -xeuo pipefail

NUM_GPUS=${NUM_GPUS:-8}
TP=2
MODEL=${MODEL:-models/${MODEL_ID:-org/base-7b}}
name=gsm8k-tp${TP}

if [ "$#" -lt 1 ]; then
    echo "Usage: run.sh <nproc> --lr 3 data.train_batch_size=1"
    exit 1
fi

OPTIM="\
    optim.lr=1e-4 \
    optim.betas=[0.9,0.98]"

torchrun --standalone --nnodes=1 --nproc_per_node=${NUM_GPUS} \
     -m verl.trainer.fsdp_sft_trainer \
    data.train_files=data/gsm8k/train.parquet \
    data.val_files=$VAL \
    data.train_batch_size=32 \
    data.max_token_len_per_gpu=8192 \
    data.prompt_key=extra_info \
    data.response_key=extra_info \
    data.prompt_dict_keys=['question'] \
    +data.response_dict_keys=['answer'] \
    model.partial_pretrain=$MODEL \
    ${OPTIM} \
    trainer.default_local_dir=out/$name \
    trainer.experiment_name=$name \
    trainer.logger=['console','wandb'] \
    trainer.total_epochs=2 \
    trainer.default_hdfs_dir=null $@ \
    model.lora_rank=32\
    model.lora_alpha=16 \
    model.target_modules=[q_proj,v_proj] \
    use_remove_padding=true

    # Or:
    # model.target_modules=all-linear \
