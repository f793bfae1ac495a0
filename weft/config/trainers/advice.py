"""What to say in weft, in the words of the messages. Several names often get the same answer.

Each is a whole sentence that may follow a colon. Whether a key is in this version yet is added by aliases.py.
"""

from __future__ import annotations

# the batch
BATCH = (
    "a step is a set of documents, whatever the number of devices. Say `step.documents` = per-device batch x "
    "accumulation x data ranks; micro-batches follow from `step.max_tokens_per_device`."
)
GLOBAL_BATCH = "say `step.documents` (over all ranks, per optimizer step)."
MICRO_BATCH = (
    "micro-batches are cut by tokens, not by a count: say `step.max_tokens_per_device` (sequences x their length)."
)
TOKEN_BUDGET = "say `step.max_tokens_per_device`."
EVAL_BATCH = "evaluation is cut by `step.max_tokens_per_device`, like training: leave it out."
PACKED = (
    "documents are always packed into rows of `step.max_tokens_per_device` tokens and never see each other: leave it "
    "out."
)
PACKED_SIZE = "documents are always packed; the size of a row is `step.max_tokens_per_device`."
PADDED = "rows are padded only where `step.shapes` says so: buckets or fixed."
BALANCED = "ranks are always balanced by estimated FLOPs: leave it out."
LAST_BATCH = (
    "the last step of an epoch is trained short, with its own normaliser; no document is dropped: leave it out."
)
TOKEN_MEAN = (
    "the loss is always the mean over the trained tokens of the whole step, on any number of ranks: leave it out."
)

# length
LENGTH = "say `data.max_length`, and what happens to longer documents with `data.long_documents`."
TRUNCATION = "say `data.long_documents`: error, truncate (keeps the start) or drop."

# the model
MODEL = "say `model.path`: a HuggingFace directory or hub id."
TOKENIZER = "the tokenizer is the one in `model.path`: leave it out, or copy its files there."
REMOTE_CODE = "only architectures that transformers ships are trained, none from a repository's own code: leave it out."
REVISION = "download that revision into a folder and name it in `model.path`."
FROM_CONFIG = "say `model.init`: pretrained, or random for a model without weights."
DTYPE = (
    "say `fsdp.param_dtype` (compute), `fsdp.reduce_dtype` and `fsdp.master_dtype`; the default computes in bf16 on "
    "accelerators and keeps fp32 masters."
)
MASTERS = "say `fsdp.master_dtype`: fp32 (the default) or bf16."
REDUCE_DTYPE = "say `fsdp.reduce_dtype`: fp32 (the default) or bf16."
LOSS_SCALE = "say `fsdp.loss_scale` and `fsdp.loss_scale_interval`, with `fsdp.param_dtype` fp16."
ATTENTION = "say `model.attention`: auto takes the fastest kernel that is right for model, dtype and device."
RECOMPUTE = "say `model.recompute`: none or full."
RECOMPUTE_HOW = (
    "`model.recompute` full keeps each layer's input and nothing else; there is no more to set: leave it out."
)
COMPILE = "say `model.compile`: each decoder layer is compiled."
FREEZE = "say `model.freeze`: a list of names of parameters or modules."
CHUNKED = "the loss is always computed in chunks of tokens and full logits are never held: leave it out."
ROUTER_LOSS = "say `model.router_aux_loss` (none, document or step) and `model.router_aux_loss_coef`."
ROUTER_COEFFICIENT = "say `model.router_aux_loss_coef`, with `model.router_aux_loss` document or step."
FP32_SUMS = "sums over ranks, softmax and loss are in fp32 unless `fsdp.reduce_dtype` says otherwise: leave it out."
NO_DROPOUT = "dropout and router jitter of the base model are 0 while weft trains it: leave it out."
QUANTISED = "training on a quantised base is not in this version: leave it out."
ACTIVATION_OFFLOAD = "activations are not offloaded; `model.recompute` full saves most of their memory. Leave it out."
EXPERT_KERNEL = "how experts are computed is transformers' own choice: leave it out."

# the data
DATA = "say `data.path`."
DATASET = "say `data.path`, a file or a dataset on the hub: built-in names (dataset_info.json) are not known."
HELD_OUT = "no share of the training data is held out: name held-out documents in `eval.path`."
ROLES = "say `data.roles`, as in {human: user, bot: assistant}."
SPLIT = "say `data.split`."
SUBSET = "say `data.subset`."
MIXTURE = "say `data.sources`: a list of name, path and weight."
COLUMNS = (
    "`messages`, `prompt` and `completion`, and `text` are found by name; say `data.columns` for columns that are "
    "called otherwise."
)
THINKING = (
    "a column that says so of each document is not read: say `data.template_kwargs` ({enable_thinking: false}) for all "
    "of them, or have a column `chat_template_kwargs` of such objects."
)
MASKED = (
    "the loss falls on assistant turns of `messages`, on `completion`, or on all of `text`; say `data.train_on` for "
    "another choice."
)
TEMPLATE = "the tokenizer's chat template is used; say `data.chat_template` for another one."
TEMPLATE_KWARGS = "say `data.template_kwargs`."
SHUFFLE = "say `data.shuffle`."
WORKERS = "say `data.workers`."
CACHE = "say `data.cache`."
STREAMING = "leave it out: tokens are kept on disk (`data.cache`) and mapped, so that data may be larger than memory."
SAMPLES = "all documents of the file are used: cut the file, or end the run earlier with `train.steps`."
READ_ONCE = "data is tokenised before training, and no loader runs beside it: leave it out."
IMAGES = "images, audio and video are not in this version: leave it out."
EOS = "the end-of-text token is the tokenizer's own: set it there."

# the optimizer and its schedule
LR = "say `optimizer.lr`."
OPTIMIZER = "say `optimizer.name`: adamw or sgd."
OPTIMIZER_OPTIONS = "say `optimizer.options`."
OPTIMIZER_KERNEL = "the optimizer's kernel is chosen by device: leave it out."
GROUPS = "say `optimizer.groups`; biases, norms and vectors are never decayed."
DECAY = "say `optimizer.weight_decay`."
BETAS = "say `optimizer.betas`, for example [0.9, 0.95]."
EPS = "say `optimizer.eps`."
MOMENTUM = "say `optimizer.momentum`, with `optimizer.name` sgd."
STATE_DTYPE = "say `optimizer.state_dtype`: auto, fp32 or bf16."
CLIP = "say `optimizer.max_grad_norm`."
SCHEDULE = "say `schedule.name`: constant, linear, cosine or wsd."
WARMUP = "say `schedule.warmup_steps`."
WARMUP_RATIO = "say `schedule.warmup_ratio`."
WARMUP_START = "warm-up rises from 0, and step 1 already has lr / warm-up steps: leave it out."
MIN_LR = "say `schedule.min_lr_ratio` = min_lr / `optimizer.lr`."
MIN_LR_RATIO = "say `schedule.min_lr_ratio`."
WSD_RATIO = "say `schedule.decay_ratio` = decay steps / all steps, with `schedule.name` wsd."
WSD_SHAPE = "say `schedule.decay`: linear, cosine or 1-sqrt, with `schedule.name` wsd."
DECAY_TO_END = "the schedule ends with the run, at `train.steps` or after `train.epochs`: leave it out."
CYCLES = "cosine is one half wave from the peak to `schedule.min_lr_ratio`: leave it out."
EMA = "say `optimizer.ema_decay`, such as 0.999; `checkpoint.weights` says which weights are saved for use."
OBJECTIVE = "the loss is cross entropy over trained tokens; say `train.objective` for one of your own: leave it out."

# the length of the run
EPOCHS = "say `train.epochs`."
STEPS = "say `train.steps` (optimizer steps)."
SEED = "say `train.seed`."
DETERMINISTIC = "say `train.deterministic`."
TIMEOUT = "say `train.timeout` (seconds)."
NONFINITE = (
    "a step that is not finite is skipped and named; say after how many the run ends with `train.max_nonfinite`."
)
IS_TRAINING = "`weft sft` trains, and evaluates where `eval.path` is set: leave it out."

# what comes out
OUTPUT = "say `run.dir`."
NEVER_OVERWRITTEN = "a folder that holds a run is never overwritten: set another `run.dir`, or go on with --resume."
LOGGING = "every step is written to RUN/metrics.jsonl; say `train.log_every` for the lines that are printed."
TRACKER = "say `track.to`: a list of tensorboard, wandb, trackio and mlflow."
PROJECT = "say `track.project`."
RUN_NAME = "say `track.name`; the run's folder is `run.dir`."
HUB = "say `checkpoint.push`: OWNER/NAME."
HUB_WHEN = "say `checkpoint.push_at`: `end` or `save`, with `checkpoint.push`."
HUB_PRIVATE = "say `checkpoint.push_private`, with `checkpoint.push`."
HUB_BRANCH = "say `checkpoint.push_revision`, with `checkpoint.push`."
HUB_TOKEN = "the token is HF_TOKEN's, or that of `hf auth login`: leave it out of configs."
UPLOAD = "checkpoints are written beside training: leave it out. `checkpoint.push` uploads them to the hub."
PROFILE = "say `profile.steps`."
MEMORY_PROFILE = "say `profile.memory`, with `profile.steps`."
SAVE = "say `checkpoint.every` (optimizer steps; the last step is always saved)."
SAVE_SWITCH = "say `checkpoint.every`: 0 saves the last step only."
SAVE_MODE = "say `checkpoint.every` (optimizer steps) or `checkpoint.every_minutes`; 0: only the last."
SAVE_FOLDER = "checkpoints are RUN/checkpoints: say `run.dir`."
SAVE_FORMAT = "every checkpoint is a HuggingFace directory of safetensors, with no conversion: leave it out."
KEEP = "say `checkpoint.keep` (null keeps all), and `checkpoint.keep_every` for those that stay."
KEEP_BEST = "say `checkpoint.keep_best`; the lowest `eval.metric` is the best."
AT_START = "say `eval.at_start`."
ASYNC = "say `checkpoint.async`: true (the default) or false."
WEIGHTS_ONLY = (
    "every checkpoint is a HuggingFace directory; say `checkpoint.trainer_state`: all, last, or none for weights alone."
)
SAVE_DTYPE = "say `checkpoint.dtype`: auto, bf16, fp16 or fp32."
RESUME = "resuming is no key: `weft sft --resume RUN`."
FROM_WEIGHTS = "to start from the weights of a checkpoint, name its folder in `model.path`."
EVAL_DATA = "say `eval.path`."
PER_EPOCH = (
    "intervals count optimizer steps, of which an epoch has documents / `step.documents`: say `checkpoint.every` or "
    "`eval.every`."
)
EVAL = "say `eval.every` (optimizer steps; 0: only at the end)."
PATIENCE = "say `eval.patience` (evaluations), and `eval.min_delta`."

PYTHON = "in Python sections are keywords of weft.sft, and on_step is called after each step: leave it out."

# ranks
SHARD = "say `mesh.dp_shard` (-1: all ranks)."
REPLICATE = "say `mesh.dp_replicate`."
TP = "weft calls it `mesh.tp`."
CP = "weft calls it `mesh.cp`."
EP = "weft calls it `mesh.ep`."
PP = "weft calls it `mesh.pp`."
AXIS_DETAIL = "it belongs to a kind of parallelism that is not in this version: leave it out."
RANKS = "the number of ranks is --nproc on the command line, or torchrun's: leave it out."
DEVICES = "ranks take the devices of their machine in order, or CUDA_VISIBLE_DEVICES: leave it out."
LAUNCHER = "ranks are weft's own or torchrun's, and nothing else has to be set up: leave it out."
DEVICE = "the device is --device on the command line: leave it out."
BACKEND = "weft has one backend, PyTorch FSDP2: leave it out."
ENVIRONMENT = "set environment variables in the shell that starts weft: leave it out."
BUILT = "weft builds its own objects from its keys: leave it out."

# FSDP
RESHARD = "say `fsdp.reshard_after_forward`."
WRAP = "say `fsdp.wrap`: auto (the units are printed at start), or a list of layers, head, embedding and class names."
PREFETCH = "say `fsdp.prefetch`: how many units ahead, in forward and backward; null leaves it to FSDP2."
OFFLOAD = "say `fsdp.cpu_offload` (parameters, gradients and optimizer together)."
REDUCE = "say `fsdp.reduce`: every, scatter or last."
LOADING = "every rank reads its own shards from the files: leave it out."
ALL_UNITS = "experts are gathered with their layer, whichever of them are used: leave it out."

# LoRA, and what is not supervised fine-tuning
LORA = "say `lora.rank`; null trains all weights."
LORA_ALPHA = "say `lora.alpha`; null is twice `lora.rank`."
LORA_DROPOUT = "say `lora.dropout`."
LORA_TARGETS = "say `lora.targets`: all-linear, or a list of patterns; fused experts are named there too."
LORA_SAVED = "say `lora.modules_to_save`."
LORA_KIND = "adapters are LoRA's, with no other start or scaling of their matrices than `lora.rslora`: leave it out."
METHOD = "say `lora.rank` for adapters, and `model.freeze` for what is not to be trained."
LORA_PATH = "say `lora.path`, the folder of an adapter."
RSLORA = "say `lora.rslora`."
TASK = (
    "`weft sft` trains on documents and `weft rl` on rewards, and preference tuning is not in this version: leave it "
    "out."
)
RL = "it belongs to reinforcement learning, `weft rl`: leave it out of supervised fine-tuning."
REWARD = "the reward is `weft rl`'s: leave it out of supervised fine-tuning."
