"""Names of accelerate's own file (`accelerate config`): ranks, precision and FSDP, and nothing of what is trained."""

from __future__ import annotations

from weft.config.trainers import advice as say
from weft.config.trainers.trainer import Trainer, same

_INTRODUCTION = """\
The file that `accelerate launch --config_file` reads says where and how a script runs, not what it trains. `weft`
starts its own ranks, or joins torchrun's; give `weft migrate` the trainer's file along with it.

```yaml file=theirs.yaml
# accelerate launch --config_file this.yaml train.py       # weft sft mine.yaml --nproc 8
distributed_type: FSDP                                     # always, FSDP2
mixed_precision: bf16                                      # fsdp: {param_dtype: bf16}
num_processes: 8                                           # --nproc 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true                         # fsdp: {reshard_after_forward: true}, the default
  fsdp_offload_params: false                               # fsdp: {cpu_offload: false}, the default
  fsdp_activation_checkpointing: true                      # model: {recompute: full}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP            # fsdp: {wrap: auto}, the default
parallelism_config:
  parallelism_config_dp_replicate_size: 2                  # mesh: {dp_replicate: 2, dp_shard: 4}
  parallelism_config_dp_shard_size: 4
```

What is different:

- A batch is a number of documents over all ranks, so that `num_processes` multiplies what the trainer's file says.
- DeepSpeed and Megatron are not used: ZeRO-3 is `fsdp.reshard_after_forward: true`, ZeRO-2 is false.
- Loading needs no switch: every rank reads its own shards.
"""

ACCELERATE = Trainer(
    "accelerate",
    "accelerate",
    _INTRODUCTION,
    {
        "Ranks": {
            "num_processes": say.RANKS,
            "num_machines": say.RANKS,
            "machine_rank": say.RANKS,
            "main_process_ip": say.RANKS,
            "main_process_port": say.RANKS,
            "rdzv_backend": say.RANKS,
            "same_network": say.RANKS,
            "gpu_ids": say.DEVICES,
            "compute_environment": say.LAUNCHER,
            "main_training_function": say.LAUNCHER,
            "enable_cpu_affinity": say.LAUNCHER,
            "debug": say.LAUNCHER,
            "command_file": say.LAUNCHER,
            "commands": say.LAUNCHER,
            "mpirun_config.*": say.LAUNCHER,
            "ec2_instance_type": say.LAUNCHER,
            "iam_role_name": say.LAUNCHER,
            "use_cpu": say.DEVICE,
            "tpu_env": say.DEVICE,
            "tpu_name": say.DEVICE,
            "tpu_zone": say.DEVICE,
            "tpu_use_cluster": say.DEVICE,
            "tpu_use_sudo": say.DEVICE,
            "ipex_config.*": say.DEVICE,
        },
        "Precision": {
            "mixed_precision": say.DTYPE,
            "downcast_bf16": say.DTYPE,
            "fp8_config.*": say.DTYPE,
            "dynamo_config.*": say.COMPILE,
            "dynamo_backend": say.COMPILE,
        },
        "FSDP": {
            "distributed_type": say.BACKEND,
            "fsdp_config": say.BACKEND,
            "fsdp_version": say.BACKEND,
            "fsdp_sharding_strategy": say.RESHARD,
            "fsdp_reshard_after_forward": say.RESHARD,
            "fsdp_auto_wrap_policy": say.WRAP,
            "fsdp_transformer_layer_cls_to_wrap": say.WRAP,
            "transformer_layer_cls_to_wrap": say.WRAP,
            "fsdp_min_num_params": say.WRAP,
            "fsdp_offload_params": say.OFFLOAD,
            "fsdp_activation_checkpointing": say.RECOMPUTE,
            "fsdp_cpu_ram_efficient_loading": say.LOADING,
            "fsdp_sync_module_states": say.LOADING,
            "fsdp_use_orig_params": say.BACKEND,
            "fsdp_state_dict_type": say.SAVE_FORMAT,
            "forward_prefetch": say.PREFETCH,
            "backward_prefetch": say.PREFETCH,
            "fsdp_forward_prefetch": say.PREFETCH,
            "fsdp_backward_prefetch": say.PREFETCH,
            "fsdp_backward_prefetch_policy": say.PREFETCH,
        },
        "Parallelism": {
            "parallelism_config_dp_shard_size": say.SHARD,
            "parallelism_config_dp_replicate_size": say.REPLICATE,
            "parallelism_config_cp_size": say.CP,
            "parallelism_config_tp_size": say.TP,
            "parallelism_config_cp_comm_strategy": say.AXIS_DETAIL,
        },
        "DeepSpeed and Megatron": {
            "deepspeed.*": say.BACKEND,
            "deepspeed_config": say.BACKEND,
            "zero_stage": say.RESHARD,
            "offload_optimizer_device": say.OFFLOAD,
            "offload_param_device": say.OFFLOAD,
            "zero3_init_flag": say.LOADING,
            "zero3_save_16bit_model": say.SAVE_FORMAT,
            "gradient_clipping": say.CLIP,
            "megatron_lm_config.*": say.BACKEND,
        },
    },
    {},
    signs=("compute_environment", "distributed_type", "num_processes", "num_machines", "fsdp_config.fsdp_*",
           "parallelism_config.*", "deepspeed_config.*", "main_training_function"),
    moves={
        "parallelism_config_dp_shard_size": "mesh.dp_shard",
        "parallelism_config_dp_replicate_size": "mesh.dp_replicate",
        "gradient_clipping": "optimizer.max_grad_norm",
    },
    means={
        "mixed_precision": {"no": {"fsdp.param_dtype": "fp32"}},
        "fsdp_sharding_strategy": {
            **same(("full_shard", "1"), {"fsdp.reshard_after_forward": True}),
            **same(("shard_grad_op", "2"), {"fsdp.reshard_after_forward": False}),
        },
        "zero_stage": {"3": {"fsdp.reshard_after_forward": True}, "2": {"fsdp.reshard_after_forward": False}},
        "parallelism_config_cp_size": {"1": {}},
        "parallelism_config_tp_size": {"1": {}},
    },
)  # fmt: skip
