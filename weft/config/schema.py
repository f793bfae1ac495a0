"""Every key that weft accepts, with its type, default and meaning. Imports no torch.

A key is here only if code reads it: tests/config/test_every_key_has_an_effect.py has a test for each.
The help texts, and the docstrings of sections, become docs/reference/config.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weft.config import conditions as when
from weft.config.keys import key, with_former_names
from weft.config.ranges import (
    AT_LEAST_1,
    AXIS,
    BELOW_1,
    MOST_DOCUMENTS,
    NOT_NEGATIVE,
    PIXEL_LIMITS,
    POSITIVE,
    POWER_OF_2,
    PROCESSES,
    RECOMPUTED,
    RESHARDING,
    SHARD_GROUPS,
    SHARE,
    TEMPLATE_KWARGS,
    TILE,
    TWO_TOKENS,
    UNITS_AHEAD,
    VIDEO_LIMITS,
    Range,
    up_to,
)
from weft.config.recompute import Offload, RecomputeSetting, TileSetting
from weft.config.run_schema import ProfileConfig, RunConfig, TrackConfig
from weft.config.sources import HUB_NAME, is_hub_name

LabelKind = Literal["", "number", "class", "steps"]  # the labels in rows for a reward model


@with_former_names
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The HuggingFace model, and how its layers are computed."""

    path: str = key(
        "A HuggingFace model directory, local or on an object store (s3://bucket/model), or a hub id. With `init: "
        "random` the directory needs only config.json."
    )
    init: Literal["pretrained", "random"] = key(
        "`pretrained` reads the weights; `random` initialises them as transformers does for this architecture, with "
        "train.seed.",
        "pretrained",
    )
    imports: tuple[str, ...] = key(
        "Python modules to import before the model is loaded, as in [my_model]. They register your architecture with "
        "transformers' Auto classes (docs/how-to/own-architecture.md). weft searches the installed packages, "
        "PYTHONPATH and the working directory, never the model's folder.",
        (),
    )
    dcp_weights: str | None = key(
        "Directory of torch.distributed.checkpoint (torchtitan, ROLL, ...) or of verl. weft reads the weights from "
        "there instead of model.path, which then needs only config and tokenizer (docs/how-to/dcp.md).",
        None,
        formerly="weights",
    )
    ignore_weights: tuple[str, ...] = key(
        "Patterns of tensors that are in the model's files but not in its class, and that weft may ignore. Others are "
        "an error.",
        (),
    )
    attention: Literal["auto", "per_document", "varlen", "fa4", "flex"] = key(
        "Attention kernel. `auto` chooses the fastest kernel that is correct for this model, dtype and device; "
        "RUN/opening.txt prints the choice. `fa4` needs the package flash-attn-4 and a GPU of the Hopper generation "
        "or later.",
        "auto",
    )
    recompute: RecomputeSetting = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Activations that backward recomputes, to save memory. `full` stores only each layer's input and recomputes "
        "the layer: about a third more compute. `selective` also stores the results of attention kernels, of "
        "collectives (tp, cp, ep) and of every second matmul with a weight, so none of these runs twice. A mapping "
        "has `keep`: some of attention, collectives, matmuls, and `every`: recompute every n-th layer and store "
        "everything of the others, as in {keep: [attention], every: 2}. `auto`: of the settings that fit, the fastest "
        "by the estimate of `weft plan --search`, with model.tiled_mlp and, on an accelerator, "
        "model.offload_activations; RUN/config.yaml has the choice (docs/how-to/out-of-memory.md).",
        "none",
        within=RECOMPUTED,
    )
    offload_activations: Offload = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Copy the activations that recomputation keeps to the host, and back one layer before backward needs them; "
        "the copies overlap with compute. `inputs`: the layers' inputs. `kept`: also the results that model.recompute "
        "keeps. Gradients do not change. weft pins the host memory and prints its size at the start.",
        "off",
    )
    tiled_mlp: TileSetting = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Compute the decoder's dense MLPs and shared experts for this many tokens at a time, in forward and in "
        "backward, so that intermediate results exist for only one tile; backward recomputes each tile. Weights are "
        "still gathered once, and their gradients reduced once. `auto`: 16384 for rows of 65,536 tokens and more "
        "(with model.recompute, without model.compile and lora.dropout); `off`: never (docs/how-to/out-of-memory.md).",
        "auto",
        within=TILE,
    )
    router_aux_loss: Literal["none", "document", "step"] = key(
        "Load balancing loss of a mixture of experts: transformers' auxiliary loss. `document` computes it for each "
        "document, weighted by its tokens. `step` computes it once over all tokens of the optimizer step, on all "
        "ranks; this needs an additional forward (about a third more compute) to count the experts' choices first. "
        "`none` omits it. Neither depends on how the step is split.",
        "none",
    )
    router_aux_loss_coef: float | None = key(
        "Coefficient of router_aux_loss; null: router_aux_loss_coef of the model's config.",
        None,
        within=POSITIVE,
        unread=(when.NO_ROUTER_LOSS,),
    )
    router_bias_rate: float | None = key(
        "For families with a correction bias of the router (DeepSeek-V3, GLM-4.5): how much the bias of an expert "
        "rises after a step if the expert was chosen less often than the mean, and falls otherwise. null: biases do "
        "not change.",
        None,
        within=POSITIVE,
    )
    compile: bool | Literal["auto"] = key(
        "Compile each decoder layer with torch.compile; attention over documents and experts with their routers stay "
        "outside the graphs. The first steps are slow, later ones faster on accelerators. `auto`: true for training in "
        "16 bits on CUDA, if a test on a small copy passes. It is false if a full row computes for less time than the "
        "host needs to launch compiled layers, and with images, layers with state, layers that call experts "
        "themselves, mesh.pp, model.transforms, hidden readouts or train.deterministic. If the test fails, weft prints "
        "this.",
        "auto",
    )
    fused_norms: bool | Literal["auto"] = key(
        "Compute each RMSNorm with torch's fused kernel, if its class has the same values and gradients in fp32 (not "
        "Gemma's 1 + weight). In 16 bits it rounds once where the model's own code rounds twice. `auto`: on CUDA, "
        "except with rl.on_policy=exact. Engines in the trainer's ranks use the same setting.",
        "auto",
    )
    transforms: tuple[Literal["fp8"], ...] = key(
        "Changes to how layers compute. `fp8`: linear layers of the decoder multiply 8-bit floating-point numbers, "
        "with a scale for each token and each row of weights; weights and their gradients keep their dtypes. Not "
        "exact. For CUDA devices of capability 8.9 or newer; emulated on the CPU (docs/how-to/fp8.md).",
        (),
    )
    freeze: tuple[str, ...] = key(
        "Parameters to freeze: names of parameters or modules, with `*` for any part, as in [model.embed_tokens, "
        "'model.layers.*.mlp']. They have no gradient and no optimizer state. For vision-language models, `vision` "
        "(the tower), `projector` and `language` name parts, as in [vision, projector].",
        (),
        unread=(when.WITH_ADAPTERS,),
    )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The arrangement of the ranks. The product of the axes is the number of ranks."""

    dp_replicate: int = key(
        "Replicas of the sharded model (HSDP); gradients are summed over them. -1: as many as the ranks allow.",
        1,
        within=AXIS,
    )
    dp_shard: int = key(
        "Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). "
        "-1: as many as the ranks allow.",
        -1,
        within=AXIS,
    )
    cp: int = key(
        "Ranks that share documents longer than step.max_tokens_per_device (context parallelism); documents may be up "
        "to cp times as long. Shorter documents stay on one rank. Parameters are also sharded over these ranks.",
        1,
        within=AT_LEAST_1,
    )
    ulysses: int | None = key(
        "Number of cp ranks that exchange heads for tokens (Ulysses); groups of them exchange keys and values. It "
        "must divide cp and the attention heads; with layers with state it must be cp. null: the value that sends the "
        "fewest bytes.",
        None,
        within=AT_LEAST_1,
    )
    tp: int = key(
        "Ranks that share the work on each layer (tensor parallelism). They process the same documents, and split "
        "heads, intermediate widths and the vocabulary.",
        1,
        within=AT_LEAST_1,
    )
    ep: int = key(
        "Number of ranks of dp_shard x cp that share the experts of a mixture-of-experts model (expert parallelism). "
        "Each has a part of the experts, and ranks send tokens to their experts and back. It must divide dp_shard x "
        "cp.",
        1,
        within=AT_LEAST_1,
    )
    pp: int = key(
        "Pipeline stages of consecutive decoder layers, each on separate ranks. Stages send each other a row's hidden "
        "states; the other axes are within a stage.",
        1,
        within=AT_LEAST_1,
    )
    pp_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = key(
        "Order in which a rank runs the forwards and backwards of a step's micro-batches. `1F1B`: each backward as "
        "soon as possible, with at most pp micro-batches in memory. `GPipe`: all forwards first. `Interleaved1F1B`: "
        "several stages per rank, so ranks wait less. The zero-bubble schedules compute the weight gradients of "
        "linear layers separately, while a rank would wait: InterleavedZeroBubble with interleaved stages, "
        "ZBVZeroBubble with the stages in a V, so that the first rank has the first and the last stage.",
        "1F1B",
        unread=(when.NO_STAGES,),
    )
    pp_stages_per_rank: int | None = key(
        "Stages per rank of pp, for Interleaved1F1B and InterleavedZeroBubble; consecutive stages are on consecutive "
        "ranks. With more stages ranks wait less and send more. null: 2.",
        None,
        within=AT_LEAST_1,
        unread=(when.NO_STAGES, when.STAGES_BY_SCHEDULE),
    )


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """Precision and communication of the sharded model."""

    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] = key(
        "Dtype of compute and of gathered parameters. `auto`: bf16 on accelerators, fp32 on CPU. `fp16` enables "
        "dynamic loss scaling.",
        "auto",
    )
    loss_scale: float = key(
        "fp16: the initial loss scale; halved when a gradient overflows.",
        65536.0,
        within=POWER_OF_2,
        unread=(when.ONLY_FP16,),
    )
    loss_scale_interval: int = key(
        "fp16: the loss scale doubles after this many steps without overflow.",
        2000,
        within=AT_LEAST_1,
        unread=(when.ONLY_FP16,),
    )
    reduce_dtype: Literal["fp32", "bf16"] = key("Dtype in which gradients are summed over ranks.", "fp32")
    master_dtype: Literal["fp32", "bf16"] = key(
        "Dtype of the master weights, which the optimizer updates, of their gradients, and of the optimizer state "
        "unless optimizer.state_dtype is set.",
        "fp32",
    )
    wrap: Literal["auto"] | tuple[str, ...] = key(
        "FSDP units: a list of `layers` (each decoder layer), `head` (with the final norm), `embedding`, and class "
        "names of the model, such as Qwen3MoeExperts. Units may be nested, and the root has the rest. `auto` is "
        "[layers, head], except where tied weights prevent it. On a single CUDA device it is [] for models of up to 2 "
        "GiB in the compute dtype, because units cost time on the host.",
        "auto",
    )
    overrides: dict[str, Literal["full", "replicate"] | int] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Modules with another sharding: a pattern of module names -> `full` (over dp_shard), `replicate` (replicated "
        "on every rank), or an integer (over groups of that many ranks, replicated over the others), as in "
        "{'*.mlp.gate': replicate, model.embed_tokens: 2}. The outermost matching modules become units with "
        "everything in them. Gradients are still summed over all data ranks.",
        default_factory=dict,
        within=SHARD_GROUPS,
    )
    reshard_after_forward: bool | int = key(
        "true: free gathered parameters after forward (ZeRO-3); false: keep them until backward (ZeRO-2); an integer: "
        "reshard to groups of that many ranks. On one data rank, gathered parameters are copies in the compute dtype: "
        "false keeps them for the whole step, and true also does so on CUDA from the second step on, if an eighth of "
        "the memory is free.",
        True,
        within=RESHARDING,
    )
    prefetch: int | tuple[int, int] | None = key(
        "Units to gather ahead of the running one: a number for forward and backward, or [forward, backward]. More "
        "overlaps more communication and needs more memory. null: FSDP2's default, the next unit.",
        None,
        within=UNITS_AHEAD,
    )
    cpu_offload: bool | Literal["optimizer"] = key(
        "`optimizer`: keep master weights, gradients and optimizer state in host memory and update there; the "
        "accelerator keeps the weights in the compute dtype. Gradients are copied, and their norm is computed, during "
        "backward. true: keep no weights on the accelerator either, and copy each unit there when it runs: fits "
        "larger models, slowly.",
        False,
    )
    cast_forward_inputs: tuple[str, ...] = key(
        "Cast the floating-point inputs of the outermost modules that match these patterns to the compute dtype, as "
        "in ['backbone.layers.*']. Other modules get their inputs unchanged: rotary tables and routers stay in fp32.",
        (),
    )
    reduce: Literal["every", "scatter", "last"] = key(
        "When gradients are reduced within a step. `every`: each micro-batch over all data ranks. `scatter`: each "
        "micro-batch over dp_shard, and the last one over dp_replicate. `last`: only at the last (more memory, less "
        "traffic).",
        "scatter",
    )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of `data.sources`: the location of its documents, and their number in an epoch."""

    path: str = key("Like data.path.")
    name: str | None = key("Name of the source in reports and metrics; null: the file's name without its ending.", None)
    weight: float = key(
        "Number of its documents in an epoch, as a multiple of its size: with 0.5 an epoch has half of them, and the "
        "next epoch the other half; with 2 each epoch has each document twice.",
        1.0,
    )
    split: str | None = key("Like data.split.", None)
    subset: str | None = key("Like data.subset.", None)
    columns: dict[str, str] = key("Like data.columns.", default_factory=dict)  # noqa: RUF009 - it is dataclasses.field()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training documents. See docs/reference/data.md."""

    path: str | None = key(
        "A file (.jsonl, .json, .csv, .tsv, .txt, .parquet; all except the last also as .gz), a pattern such as "
        "data/train-*.parquet, a folder written by datasets' save_to_disk, or a dataset on the hub (owner/name). All "
        "except the last may be on an object store, as in s3://bucket/train-*.jsonl."
    )
    split: str | None = key(
        "Split of a dataset on the hub or of a saved dataset (null: train, or the only one). `[from:to]` after it "
        "selects a part, in rows or in percent: `train[:1000]`. For a file, write only `[:1000]`.",
        None,
        unread=(when.PER_SOURCE,),
    )
    subset: str | None = key("Subset (configuration) of a dataset on the hub.", None, unread=(when.PER_SOURCE,))
    columns: dict[str, str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Maps weft's columns to columns of your data; join names and list indices of nested columns by dots, as in "
        "{prompt: question, completion: reward_model.ground_truth} or {messages: extra_info.turns}.",
        default_factory=dict,
        unread=(when.PER_SOURCE,),
    )
    sources: tuple[SourceConfig, ...] | None = key(
        "Several sources, instead of data.path, each with its path, name, weight, split, subset and columns, as in "
        "[{path: a.jsonl, weight: 2}, {path: b.parquet, columns: {text: body}}].",
        None,
    )
    text_unit: Literal["line", "paragraph", "document"] | None = key(
        "The documents of a .txt file: each line, each paragraph (text between blank lines), or the whole file. null: "
        "each line, but weft reads a file whose first line is a JSON object as .jsonl.",
        None,
        unread=(when.NO_TEXT_FILE,),
    )
    roles: dict[str, str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Maps other role names to system, user, assistant or tool, as in {human: user, bot: assistant}; map a role "
        "that the template defines to itself. weft knows ShareGPT's `from: human` and `gpt`.",
        default_factory=dict,
    )
    message_keys: dict[str, str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Maps weft's keys of a message to the keys of your data, as in {role: speaker, content: text}. weft knows "
        "ShareGPT's `from` and `value`.",
        default_factory=dict,
    )
    ignore: tuple[str, ...] = key(
        "Columns, and keys of messages, parts and calls, to ignore, as in [mask, label]. Otherwise a key that weft "
        "does not read, and that may change the trained tokens, is an error.",
        (),
    )
    system: str | None = key("Default system prompt, added to every row without a system message.", None)
    train_on: Literal["answers", "last", "all"] = key(
        "Trained tokens. `answers`: every assistant message that is not `train: false`, or the completion; `last`: "
        "the last of them; `all`: every token.",
        "answers",
    )
    chat_template: str | None = key(
        "Chat template instead of the tokenizer's: a Jinja file, or `chatml`. It is saved with every checkpoint.", None
    )
    template_kwargs: dict[str, bool | int | str | tuple[str, ...]] = key(  # noqa: RUF009 - dataclasses.field()
        "Variables for the chat template, as in {enable_thinking: false}; a document's `chat_template_kwargs` "
        "override them.",
        default_factory=dict,
        within=TEMPLATE_KWARGS,
    )
    template_date: str | None = key(
        "The date that some chat templates write (gpt-oss, Llama 3.2), as YYYY-MM-DD; null: the first day of the run.",
        None,
    )
    shuffle: bool = key("Shuffle the documents by train.seed and the epoch; false keeps the order of the file.", True)
    max_length: int | None = key(
        "Maximum length of a document in tokens; null: what fits a row (step.max_tokens_per_device).",
        None,
        within=TWO_TOKENS,
    )
    long_documents: Literal["error", "truncate", "drop"] = key("How to handle longer documents.", "error")
    bad_rows: Literal["error", "drop"] = key(
        "How to handle a row that cannot be read, rendered or trained on. `error` ends the run; `drop` omits the row, "
        "counts it, and writes it with the problem to RUN/bad_rows.jsonl. Applies to eval.path and eval.sources, too.",
        "error",
    )
    image_pixels: dict[str, int] = key(  # noqa: RUF009 - dataclasses.field()
        "Limits of the vision model's processor for the pixels of an image, as in {min: 3136, max: 1003520}; either "
        "may be missing. Larger images are resized and take fewer tokens. Refused if the processor has no such limit.",
        default_factory=dict,
        within=PIXEL_LIMITS,
    )
    video: dict[str, float] = key(  # noqa: RUF009 - dataclasses.field()
        "Frame sampling of videos, as in {fps: 2, max_frames: 768}, with the names of qwen-vl-utils "
        "(docs/reference/data.md#videos).",
        default_factory=dict,
        within=VIDEO_LIMITS,
    )
    check_images: bool = key(
        "Decode every image and video before training, to find damaged ones; false reads only their sizes.",
        True,
    )
    max_image_pixels: int = key(
        "Maximum number of pixels of an image; a larger one is an error before it is decoded.",
        89_478_485,
        within=Range(lambda v: 1 <= v <= 178_956_970, "1 to 178956970, which is all that Pillow opens"),
    )
    fetch_images: bool = key(
        "Download images and videos from http and https URLs once, while reading the data, and cache them with the "
        "tokens.",
        False,
    )
    max_row_bytes: int = key(
        "Maximum size of a row of the data in bytes (a line, an object, a row of a table). A larger one is an error "
        "that names it; weft does not read it completely.",
        32 << 20,
        within=Range(lambda v: 1 <= v <= 1 << 40, "1 to 1099511627776 (a TiB)"),
    )
    workers: int | None = key(
        "Processes that tokenise data of 64 MiB and more; null: one per core, if there are more than two; 1: the rank "
        "itself, which uses two cores.",
        None,
        within=PROCESSES,
    )
    cache: str | None = key(
        "Folder that caches the tokens of large data for later runs and other ranks, by content; null: no cache, and "
        "every rank tokenises for itself.",
        "~/.cache/weft",
    )


# Values of lora.init that initialise adapters with a part of the base.
MOVES_BASE = ("pissa", "pissa_niter_16", "olora")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters instead of all weights (docs/reference/lora.md); enabled by lora.rank or lora.path."""

    rank: int | None = key(
        "Rank of the adapters; null: no adapters, all weights are trained.",
        None,
        within=AT_LEAST_1,
        unread=(when.FROM_ADAPTER,),
    )
    alpha: float | None = key(
        "Adapters are scaled by alpha / rank; null: twice the rank.",
        None,
        within=POSITIVE,
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    rslora: bool = key(
        "Scale by alpha / sqrt(rank) instead (rank-stabilised LoRA).",
        False,
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    dropout: float = key(
        "Dropout on the inputs of adapters of linear layers. Each rank draws masks for its row, so results depend on "
        "how a step is split.",
        0.0,
        within=BELOW_1,
        unread=(when.NO_ADAPTERS,),
    )
    dora: bool = key(
        "Also train the norm of each row of adapted linear layers (DoRA): y = m (W + s B A) x / ||W + s B A||.",
        False,
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    init: Literal["default", "gaussian", "pissa", "pissa_niter_16", "olora", "loftq"] = key(
        "Initialisation of new adapters. `default` (A uniform) and `gaussian`: B = 0. `pissa`, `pissa_niter_16` "
        "(faster) and `olora`: a part of the weights, which is subtracted from the base. `loftq`: the rounding errors "
        "of lora.base. Adapters of pissa and olora are saved with twice the rank, for the original base.",
        "default",
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    plus_ratio: float | None = key(
        "Learning rate of B, and of the magnitudes of DoRA, as a multiple of optimizer.lr (LoRA+); null: 1. "
        "optimizer.groups takes precedence.",
        None,
        within=POSITIVE,
        unread=(when.NO_ADAPTERS,),
    )
    targets: Literal["all-linear"] | tuple[str, ...] = key(
        "Adapted layers: `all-linear` (every linear layer except the head), or a list of name endings or patterns: of "
        "linear layers (q_proj, 'model.layers.1?.mlp.*'), of the embedding (embed_tokens), of fused experts "
        "(mlp.experts.gate_up_proj); the list may include `all-linear`.",
        "all-linear",
        within=Range(lambda v: len(v) > 0, "all-linear, or a list that is not empty"),
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    modules_to_save: tuple[str, ...] = key(
        "Modules to train completely and save with the adapter, by the ends of their names, as in [lm_head]. Weights "
        "tied to them become separate.",
        (),
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    base: Literal["compute", "nf4", "int8", "fp8", "mxfp4"] = key(
        "Format of the frozen base. `compute`: the compute dtype. The others store the decoder's linear layers and "
        "experts in fewer bits; weft quantises them while it reads the files. `nf4`: 4 bits (QLoRA), bitsandbytes' "
        "NF4 with double quantisation; `int8`: a scale for each row; `fp8`: e4m3, a scale for each block of 128 x "
        "128. Weights that the files have in this format keep their bytes; `mxfp4` can only be read from files. Not "
        "exact: adapters train on the dequantised weights (docs/how-to/lora.md).",
        "compute",
        unread=(when.NO_ADAPTERS,),
    )
    sampling: Literal["auto", "merged", "separate"] = key(
        "Weights with which a model with adapters samples (weft rl, eval.prompts, distill.on_policy). `merged`: W + s "
        "B A in the compute dtype, which is fast and needs the memory of a model without adapters. `separate`: the "
        "base in the format of lora.base, dequantised in each layer, and separate adapters, as in the trainer: "
        "slower, with the memory of the stored base. `auto`: separate for a quantised base and in vLLM, otherwise "
        "merged (docs/how-to/lora.md).",
        "auto",
        unread=(when.NO_ADAPTERS, when.NOTHING_SAMPLED),
    )
    path: str | None = key(
        "Continue from this adapter, a folder written by peft or weft; it defines rank, alpha, targets and "
        "modules_to_save.",
        None,
    )

    @property
    def on(self) -> bool:
        """Whether there are adapters."""
        return self.rank is not None or self.path is not None


@with_former_names
@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The documents of an optimizer step, and how they are split into micro-batches."""

    documents: int | None = key(
        "Documents in an optimizer step, over all ranks; null if step.tokens is set.",
        64,
        within=up_to(MOST_DOCUMENTS),
    )
    tokens: int | None = key(
        "Instead of step.documents: a step has as many documents as fit into this many tokens, over all ranks.",
        None,
        within=TWO_TOKENS,
    )
    max_tokens_per_device: int = key(
        "Tokens of one forward on one rank. weft splits a step into as many micro-batches as necessary.",
        8192,
        within=TWO_TOKENS,
    )
    padding: Literal["free", "buckets", "fixed"] = key(
        "Row lengths: `free`: the sum of the documents; `buckets`: rounded up to one of a few lengths; `fixed`: "
        "always step.max_tokens_per_device.",
        "free",
        formerly="shapes",
    )
    share_prefixes: Literal["auto", "off"] = key(
        "Forward the common prefix of a group's documents once (answers to one prompt, a preference pair). `auto`: if "
        "this saves at least 5% of a step's tokens; `off`: never.",
        "auto",
    )


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """An entry of optimizer.groups. match: patterns of parameter names. lr: peak learning rate. lr_scale: learning rate
    as a share of optimizer.lr."""

    match: tuple[str, ...]
    lr: float | None = None
    lr_scale: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule."""

    name: str = key(
        "`adamw` (decoupled decay), `muon` (orthogonal updates of matrices; AdamW for embeddings, the head and "
        "vectors), `lion` (signs of a momentum), `adafactor` (second moments of rows and columns), `sgd`, or the "
        "import path of an element-wise optimizer, such as torch.optim.Adagrad (docs/reference/training.md).",
        "adamw",
    )
    lr: float = key("Peak learning rate.", 1.0e-5, within=POSITIVE)
    weight_decay: float = key(
        "Decay of matrices and embeddings; biases, norms, conv1d kernels and A_log have no decay.",
        0.1,
        within=NOT_NEGATIVE,
    )
    betas: tuple[float, float] = key(
        "AdamW's running-average factors; Lion's for the update and the momentum (Lion's authors: 0.9, 0.99).",
        (0.9, 0.95),
        within=Range(lambda v: all(0 <= beta < 1 for beta in v), "two numbers, each 0 or more and below 1"),
        unread=(when.HAS_BETAS,),
    )
    eps: float = key("AdamW's epsilon.", 1.0e-8, within=POSITIVE, unread=(when.HAS_ADAMW,))
    momentum: float = key("SGD's momentum.", 0.0, within=BELOW_1, unread=(when.ONLY_SGD,))
    muon_lr: float | None = key(
        "Peak learning rate of Muon's matrices; optimizer.lr is then AdamW's. null: optimizer.lr for both.",
        None,
        within=Range(lambda v: v > 0, "above 0, or null for optimizer.lr"),
        unread=(when.ONLY_MUON,),
    )
    muon_momentum: float = key("Momentum of Muon's matrices.", 0.95, within=BELOW_1, unread=(when.ONLY_MUON,))
    muon_scale: Literal["match_rms_adamw", "original"] = key(
        "Factor on a matrix's orthogonal update. `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), which suits "
        "learning rates of AdamW; `original`: sqrt(max(1, rows / columns)), torch's default.",
        "match_rms_adamw",
        unread=(when.ONLY_MUON,),
    )
    muon_dtype: Literal["auto", "fp32", "bf16"] = key(
        "Dtype of the orthogonalisation; `auto`: bf16 on accelerators, like torch.optim.Muon, and fp32 on CPU.",
        "auto",
        unread=(when.ONLY_MUON,),
    )
    muon_heads: bool = key(
        "Orthogonalise each head of query, key and value projections separately.",
        False,
        unread=(when.ONLY_MUON,),
    )
    options: dict[str, Any] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Arguments of an optimizer with an import path, as in {eps: 1e-6}; lr and weight_decay come from the keys "
        "above.",
        default_factory=dict,
        unread=(when.ONLY_IMPORTED,),
    )
    groups: tuple[ParameterGroup, ...] = key(
        "Parameters with other settings: a list such as [{match: [model.embed_tokens, '*.mlp'], lr_scale: 0.1, "
        "weight_decay: 0}]. A parameter belongs to the first group with a matching pattern (patterns as in "
        "model.freeze). `lr` (a peak) or `lr_scale` (a share of optimizer.lr) follows the schedule. `weight_decay` "
        "applies to the whole group; without it, optimizer.weight_decay applies by its usual rule.",
        (),
    )
    state_dtype: Literal["auto", "fp32", "bf16", "int8"] = key(
        "Dtype of the optimizer state; `auto`: that of the master weights. Otherwise the update is computed in fp32, "
        "and the state is rounded after every step. Not exact: `bf16` halves the state's memory; `int8` (AdamW) needs "
        "a quarter, as codes with a scale for every 256, which are the same on every mesh.",
        "auto",
        unread=when.NO_OWN_STATE,
    )
    rounding: Literal["nearest", "stochastic", "kahan"] = key(
        "Rounding of bf16 master weights after a step of AdamW. `nearest` loses updates that are small compared with "
        "a weight; `stochastic` keeps them on average, with random bits that are the same on every mesh; `kahan` "
        "keeps the rounding error in 2 more bytes per parameter.",
        "nearest",
        unread=(when.ONLY_ADAMW, when.WIDE_MASTERS),
    )
    load_state: bool = key(
        "Start with the optimizer state in model.dcp_weights (AdamW's moments and steps, SGD's momentum). Steps, "
        "learning rate and data order start from the beginning.",
        False,
        unread=when.NO_SAVED_STATE,
    )
    max_grad_norm: float | None = key(
        "Clip the gradient of a step to this global norm; null: no clipping.",
        1.0,
        within=Range(lambda v: v > 0, "above 0, or null for no clipping"),
    )
    ema_decay: float | None = key(
        "Keep a moving average of the weights in fp32, e = d e + (1 - d) w after every update, with this d (such as "
        "0.999), and save it in checkpoints. null: none.",
        None,
        within=Range(lambda v: 0 < v < 1, "above 0 and below 1, or null for no average"),
    )


@dataclass(frozen=True, kw_only=True)
class UndecayedOptimizerConfig(OptimizerConfig):
    """As in `weft sft`, but without decay by default."""

    weight_decay: float = key(
        "Decay of matrices and embeddings; biases, norms, conv1d kernels and A_log have no decay.",
        0.0,
        within=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyOptimizerConfig(UndecayedOptimizerConfig):
    """As in `weft sft`, but by default with a tenth of the learning rate and without decay."""

    lr: float = key("Peak learning rate.", 1.0e-6, within=POSITIVE)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps."""

    name: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd"] = key(
        "Shape of the learning rate after warm-up.", "cosine"
    )
    warmup_ratio: float = key(
        "Warm-up steps as a share of all steps (rounded up).", 0.03, within=SHARE, unread=(when.WARMUP_IN_STEPS,)
    )
    warmup_steps: int | None = key("Warm-up steps; instead of warmup_ratio.", None, within=NOT_NEGATIVE)
    min_lr_ratio: float = key(
        "Learning rate of the last step, as a share of the peak.",
        0.1,
        within=SHARE,
        unread=(when.CONSTANT_RATE, when.NO_LOWEST_RATE),
    )
    decay_ratio: float = key(
        "wsd: share of all steps during which the rate decays.",
        0.1,
        within=SHARE,
        unread=(when.only_with("schedule.name", "wsd"),),
    )
    decay: Literal["linear", "cosine", "1-sqrt"] = key(
        "wsd: shape of that decay.", "linear", unread=(when.only_with("schedule.name", "wsd"),)
    )
    cycles: int = key(
        "cosine_with_restarts: number of cycles; each starts at the peak.",
        1,
        within=AT_LEAST_1,
        unread=(when.only_with("schedule.name", "cosine_with_restarts"),),
    )
    power: float = key(
        "polynomial: exponent of the share of remaining steps; 1 is linear.",
        1.0,
        within=POSITIVE,
        unread=(when.only_with("schedule.name", "polynomial"),),
    )
    timescale: int | None = key(
        "inverse_sqrt: steps after warm-up in which the rate falls to 0.71 of the peak; null: the warm-up steps, or "
        "10000 without warm-up.",
        None,
        within=AT_LEAST_1,
        unread=(when.only_with("schedule.name", "inverse_sqrt"),),
    )


@with_former_names
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of training, and conditions that end a run early."""

    steps: int | None = key("Optimizer steps; instead of train.epochs.", None, within=AT_LEAST_1)
    epochs: int | None = key("Passes over the data; null if train.steps is set.", 1, within=AT_LEAST_1)
    seed: int = key("Seed of initial weights and of the data order.", 0, within=NOT_NEGATIVE)
    timeout: float = key(
        "Seconds that a collective may wait for other ranks, or that a phase may take without progress, before the "
        "run ends with an error. Loading, saving and the first step may take ten times as long outside of "
        "collectives.",
        600.0,
        within=POSITIVE,
    )
    loss: str | None = key(
        "Import path of the loss, as in my_losses:Focal: an object, or a class that weft creates without arguments "
        "(docs/how-to/objective.md); null: cross entropy over trained tokens.",
        None,
        formerly="objective",
    )
    neftune_noise_alpha: float | None = key(
        "Noise on embeddings in training (NEFTune), uniform within alpha / sqrt(tokens of the document x hidden size); "
        "papers use 5 to 15. null: none.",
        None,
        within=Range(lambda v: v > 0, "above 0, or null for no noise"),
    )
    log_every: int | None = key(
        "Without a terminal, optimizer steps between two printed lines; null: at most one line every 5 seconds. The "
        "first and the last step are always printed; RUN/metrics.jsonl has every step.",
        None,
        within=AT_LEAST_1,
    )
    max_nonfinite: int = key(
        "End the run after this many consecutive steps with a loss or gradient that is not finite; in RL also after "
        "this many consecutive rollout steps without a trainable sample.",
        3,
        within=AT_LEAST_1,
    )
    deterministic: bool = key("Use torch's deterministic algorithms (slower on accelerators).", False)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and their contents. Every checkpoint is a HuggingFace directory
    (docs/reference/checkpoints.md)."""

    every: int = key(
        "Optimizer steps between checkpoints; 0: only the last. The last step is always saved.",
        100,
        within=NOT_NEGATIVE,
    )
    every_minutes: float | None = key(
        "Also save after this many minutes without a checkpoint; null: never.",
        None,
        within=Range(lambda v: v > 0, "above 0, or null"),
    )
    keep: int | None = key(
        "Number of newest checkpoints to keep; null: all.",
        3,
        within=Range(lambda v: v >= 1, "1 or more, or null for all"),
    )
    keep_every: int | None = key(
        "Never remove checkpoints whose step is a multiple of this number, itself a multiple of checkpoint.every.",
        None,
        within=AT_LEAST_1,
        unread=(when.KEEPS_ALL_CHECKPOINTS, when.SAVES_LAST_ONLY),
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = key(
        "Dtype of the HuggingFace weights; `auto`: each tensor as in the source's files. Resuming does not use these "
        "weights.",
        "auto",
    )
    weights: Literal["raw", "ema"] = key(
        "Weights in the HuggingFace directory of a checkpoint: the `raw` trained weights, or their average `ema` "
        "(optimizer.ema_decay). The trainer state has both; `weft export --ema` also writes the average.",
        "raw",
        unread=(when.NO_AVERAGE,),
    )
    trainer_state: Literal["all", "last", "none"] = key(
        "Checkpoints that can be resumed, with master weights, moments, random numbers and position in the data: "
        "`all`, only the `last`, or `none`.",
        "all",
    )
    async_: bool = key(
        "Write in the background: training waits only for a copy in host memory. false: training waits for the disk.",
        True,
    )
    verify: Literal["none", "size", "digest"] = key(
        "Check before a checkpoint gets its final name. `size` compares file sizes. `digest` compares a digest of "
        "every tensor in memory with what another rank reads from disk, which reads everything once more.",
        "digest",
    )
    keep_best: bool = key(
        "Save whenever an evaluation is the best so far (eval.metric), keep that checkpoint regardless of `keep`, and "
        "link to it as `best`.",
        False,
        unread=(when.NO_DOCUMENTS, when.EVALUATES_LAST_ONLY),
    )
    push: str | None = key(
        "Upload the run's model to this repository of the HuggingFace hub, OWNER/NAME, with a model card but without "
        "trainer state. weft creates a missing repository before training; a failed upload never ends the run. null: "
        "no upload.",
        None,
        within=Range(is_hub_name, HUB_NAME),
    )
    push_at: Literal["end", "save"] = key(
        "When to upload. `end`: the last checkpoint, or with checkpoint.keep_best the best; `save`: also the newest "
        "one after each save, during training.",
        "end",
        unread=(when.NOTHING_PUSHED,),
    )
    push_private: bool = key("Create a missing repository as private.", False, unread=(when.NOTHING_PUSHED,))
    push_revision: str | None = key(
        "Branch of the repository; created if missing. null: main.", None, unread=(when.NOTHING_PUSHED,)
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training, and actions that depend on it. See docs/reference/evaluation.md."""

    path: str | None = key("Held-out documents, in the forms of data.path, with the columns of data.columns.", None)
    sources: tuple[SourceConfig, ...] | None = key(
        "Several sources, instead of eval.path, each with its path, name, split, subset and columns, as in [{path: "
        "chat.jsonl}, {name: code, path: code.parquet}]. Each is also reported separately.",
        None,
    )
    share: float | None = key(
        "Instead of eval.path: hold out this share of the documents of data.path, or of each of data.sources, drawn "
        "with train.seed. weft does not train on them.",
        None,
        within=Range(lambda v: 0 < v < 1, "between 0 and 1, both excluded"),
    )
    every: int = key(
        "Optimizer steps between evaluations; 0: only after the last. The last step is always evaluated.",
        100,
        within=NOT_NEGATIVE,
        unread=(when.NOTHING_TO_EVALUATE,),
    )
    at_start: bool = key(
        "Also evaluate before the first step; metrics.jsonl then has a line for step 0.",
        False,
        unread=(when.NOTHING_TO_EVALUATE,),
    )
    metric: str = key(
        "The metric of the best evaluation, lowest is best: eval/loss, or eval/NAME/loss of one of eval.sources.",
        "eval/loss",
        unread=(when.NO_BEST,),
    )
    patience: int | None = key(
        "Save and end the run after this many consecutive evaluations that did not improve eval.metric; null: never.",
        None,
        within=AT_LEAST_1,
        unread=(when.NO_DOCUMENTS, when.EVALUATES_LAST_ONLY),
    )
    min_delta: float = key(
        "Minimum decrease of eval.metric that counts as an improvement.",
        0.0,
        within=NOT_NEGATIVE,
        unread=(when.NO_PATIENCE,),
    )
    target: float | None = key(
        "Save and end the run when eval/exact is at least this: the share of held-out documents in which every "
        "trained token is the most likely one, so that greedy decoding would write them. null: never.",
        None,
        within=Range(lambda v: 0 < v <= 1, "above 0 and at most 1, or null"),
        unread=(when.NO_DOCUMENTS, when.EVALUATES_LAST_ONLY, when.NO_EXACT_FIGURE),
    )
    prompts: str | tuple[str, ...] | None = key(
        "Prompts that the model answers at every evaluation: a list of texts, a .txt file with one per line, or a "
        "JSONL file with `messages` or `prompt` in each line. weft writes the answers to RUN/samples.jsonl. Each rank "
        "with a prompt temporarily needs memory for the full model.",
        None,
    )
    max_new_tokens: int = key(
        "Maximum length of an answer in tokens.", 128, within=AT_LEAST_1, unread=(when.NO_PROMPTS,)
    )
    temperature: float = key(
        "0: always the most likely token; above 0: sampled, with a seed from train.seed and the step.",
        0.0,
        within=NOT_NEGATIVE,
        unread=(when.NO_PROMPTS,),
    )


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig:
    """A frozen model that runs alongside the trained one (weft/engine/frozen.py): a separate engine that alternates
    with it on the same ranks. Keys that are null have the trained model's value."""

    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = key(
        "Dtype of its weights and compute; null: fsdp.param_dtype.", None
    )
    dp_replicate: int | None = key("Replicas of its sharded weights; null: mesh.dp_replicate.", None, within=AXIS)
    dp_shard: int | None = key("Ranks over which its weights are sharded; null: mesh.dp_shard.", None, within=AXIS)
    tp: int | None = key("Ranks that split each of its layers; null: mesh.tp.", None, within=AT_LEAST_1)
    pp: int | None = key("Pipeline stages of its layers; null: mesh.pp.", None, within=AT_LEAST_1)
    cpu_offload: bool | None = key("Keep its weights in host memory; null: fsdp.cpu_offload.", None)
    max_tokens_per_device: int | None = key(
        "Tokens of one of its forwards on one rank; null: step.max_tokens_per_device. It stores no activations, so "
        "more tokens fit.",
        None,
        within=TWO_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class FrozenRanksConfig(FrozenModelConfig):
    """A FrozenModelConfig whose model alternates with the trained one, or has separate ranks."""

    ranks: int | None = key(
        "Number of the run's ranks (--nproc) that have only this model. They process each step's documents while the "
        "other ranks, to which mesh applies, train on the previous step. By default the model's mesh is dp_shard over "
        "all its ranks. null: the model alternates with the trained model on all ranks.",
        None,
        within=AT_LEAST_1,
    )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(FrozenModelConfig):
    """The engine of rl.teacher: a separate engine without training, on the trainer's ranks."""

    ranks: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """The config of `weft sft`, one field per section; commands that share its loop add sections (commands.py)."""

    command: ClassVar[str] = "sft"

    model: ModelConfig
    data: DataConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    step: StepConfig = field(default_factory=StepConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def reads_preferences(self) -> bool:
        """Whether the rows of the data are preferences (weft/data/preferences.py), not documents."""
        return False

    @property
    def tail_weight(self) -> float | None:
        """For preferences: the loss weight of tokens beyond the length of the shorter answer of the pair."""
        return None

    @property
    def row_options(self) -> dict[str, Any]:
        """Fields of weft/data/records.py:ParseOptions for rows that are not plain documents."""
        return {"preferences": self.reads_preferences}
