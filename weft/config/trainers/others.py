"""Names of further trainers (Lightning, DeepSpeed), which have no page of their own."""

from __future__ import annotations

from weft.config.trainers import advice as say

OTHERS: dict[str, str] = {
    "accumulate_grad_batches": say.BATCH,
    "grad_acc_steps": say.BATCH,
    "model_max_length": say.LENGTH,
    "activation_checkpoint": say.RECOMPUTE,
    "initial_scale_power": say.LOSS_SCALE,
    "use_flash_attn": say.ATTENTION,
    "freeze_modules": say.FREEZE,
    "frozen_modules": say.FREEZE,
    "freeze_params": say.FREEZE,
    "train_file": say.DATA,
    "shuffle_seed": say.SEED,
    "gradient_clip_val": say.CLIP,
    "max_epochs": say.EPOCHS,
    "nproc_per_node": say.RANKS,
    "standalone": say.LAUNCHER,
    "dist_timeout_s": say.TIMEOUT,
    "save_every": say.SAVE,
    "save_every_steps": say.SAVE,
    "save_on_epoch_end": say.SAVE_MODE,
    "sp_size": say.CP,
    "ema": say.EMA,
    "ema_decay": say.EMA,
    "optim_dtype": say.STATE_DTYPE,
    "param_groups": say.GROUPS,
    "momentum": say.MOMENTUM,
}
