"""Every key that weft accepts, with its type, default and meaning. Imports no torch.

A key is here only if something reads it: tests/config/test_every_key_has_an_effect.py holds a test for each.
`help` texts and docstrings of sections become docs/reference/config.md.
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

LabelKind = Literal["", "number", "class", "steps"]  # of the rows of a reward model


@with_former_names
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, as HuggingFace knows it, and how its layers are computed."""

    path: str = key(
        "A HuggingFace model directory, here or on an object store (s3://bucket/model), or hub id; with `init: random` "
        "a directory that holds at least config.json."
    )
    init: Literal["pretrained", "random"] = key(
        "`pretrained` reads the weights; `random` draws them as transformers does for this architecture, "
        "from train.seed.",
        "pretrained",
    )
    imports: tuple[str, ...] = key(
        "Modules that are imported before the model is looked at, as in [my_model]: those in which you register an "
        "architecture of your own with transformers' Auto classes (docs/how-to/own-architecture.md). They are looked "
        "for among the installed packages, in PYTHONPATH and in the working directory, never in the model's folder.",
        (),
    )
    dcp_weights: str | None = key(
        "Directory of torch.distributed.checkpoint (torchtitan, ROLL, ...), or of verl, that is read in place of the "
        "weights at model.path, which then needs config and tokenizer alone (docs/how-to/dcp.md).",
        None,
        formerly="weights",
    )
    ignore_weights: tuple[str, ...] = key(
        "Globs of tensors in the model's files that its class does not have and that may be left out; others are an "
        "error.",
        (),
    )
    attention: Literal["auto", "per_document", "varlen", "fa4", "flex"] = key(
        "Attention kernel; `auto` takes the fastest that is right for this model, dtype and device, "
        "and RUN/opening.txt names the choice. `fa4` needs the package flash-attn-4 and a GPU from Hopper on.",
        "auto",
    )
    recompute: RecomputeSetting = key(  # noqa: RUF009 - key() is dataclasses.field()
        "What backward computes again, for less memory. `full` stores only each layer's input and runs the layer "
        "again: about a third more compute. `selective` also stores the results of attention kernels, of collectives "
        "(tp, cp, ep) and of every second product with a weight, so that none of these runs twice. As a mapping: "
        "`keep`, some of attention, collectives, matmuls; `every`: run one layer in so many again, and store "
        "everything of the others, as in {keep: [attention], every: 2}. `auto`: the one that takes the least time of "
        "those that fit, by the arithmetic of `weft plan`; RUN/config.yaml has it (docs/how-to/out-of-memory.md).",
        "none",
        within=RECOMPUTED,
    )
    offload_activations: Offload = key(  # noqa: RUF009 - key() is dataclasses.field()
        "What recomputation keeps for backward goes to the host, and comes back one layer before it is needed; copies "
        "run beside the computation. `inputs`: the layers' inputs. `kept`: also the results that model.recompute "
        "keeps. Gradients do not change. The host's memory is pinned; its size is said at the start.",
        "off",
    )
    tiled_mlp: TileSetting = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Run the decoder's dense MLPs and shared experts over so many tokens at a time, in forward and in backward, so "
        "that their intermediate results exist for one tile only; backward runs each tile again. Weights are gathered, "
        "and their gradients reduced, once. `auto`: 16384 for rows of 65,536 tokens and more (model.recompute other "
        "than none, no model.compile, no lora.dropout); `off`: never (docs/how-to/out-of-memory.md).",
        "auto",
        within=TILE,
    )
    router_aux_loss: Literal["none", "document", "step"] = key(
        "Load balancing of a mixture of experts, by transformers' own auxiliary loss: `document` computes it for each "
        "document, weighted by its tokens; `step` once over all tokens of the optimizer step, on all ranks, which "
        "takes a forward more (about a third more compute) to count the experts' choices first; `none` leaves it out. "
        "No cut of the step changes either.",
        "none",
    )
    router_aux_loss_coef: float | None = key(
        "Factor of that loss; null: router_aux_loss_coef of the model's config.",
        None,
        within=POSITIVE,
        unread=(when.NO_ROUTER_LOSS,),
    )
    router_bias_rate: float | None = key(
        "By how much a router's correction bias, where a family has one (DeepSeek-V3, GLM-4.5), rises after a step for "
        "each expert that was chosen less often than the mean, and falls for the others. null: they stay.",
        None,
        within=POSITIVE,
    )
    compile: bool | Literal["auto"] = key(
        "Compile each decoder layer with torch.compile; attention over documents stays outside the graphs. The first "
        "steps are slow, others faster on accelerators. `auto`: true for training in 16 bits on CUDA, after a trial on "
        "a small copy; false where a full row computes for less time than the host takes to start them, with experts, "
        "images, layers that carry state, mesh.pp, model.transforms, hidden readouts, "
        "train.deterministic, and wherever the trial fails, which is said.",
        "auto",
    )
    fused_norms: bool | Literal["auto"] = key(
        "Compute each RMSNorm as torch's fused kernel, where its class has the same values and gradients in fp32 (not "
        "Gemma's 1 + weight); in 16 bits it rounds once where stock modules round twice. `auto`: on CUDA, but not "
        "with rl.on_policy=exact. Engines in the trainer's ranks follow it.",
        "auto",
    )
    transforms: tuple[Literal["fp8"], ...] = key(
        "Changes to how layers compute. `fp8`: linear layers of the decoder multiply 8-bit floating-point numbers, "
        "with a scale for each token and each row of weights; weights and their gradients keep their dtypes. Not "
        "exact. For CUDA devices of capability 8.9 or newer; emulated on the CPU (docs/how-to/fp8.md).",
        (),
    )
    freeze: tuple[str, ...] = key(
        "Parameters that are not trained: names of parameters or of modules, `*` for any part, as in "
        "[model.embed_tokens, 'model.layers.*.mlp']. They get no gradient and no optimizer state. Of vision-language "
        "models, `vision` (the tower), `projector` and `language` name parts, as in [vision, projector].",
        (),
        unread=(when.WITH_ADAPTERS,),
    )


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How the ranks are arranged. The product of the axes is the number of ranks."""

    dp_replicate: int = key(
        "Copies of the sharded model (HSDP): gradients are summed over them. -1: as many as the ranks allow.",
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
        "Ranks that share documents which are longer than step.max_tokens_per_device (context parallelism): up to cp "
        "times as long. Shorter documents stay on one rank. Parameters are sharded over these ranks, too.",
        1,
        within=AT_LEAST_1,
    )
    ulysses: int | None = key(
        "Of the ranks of cp, how many exchange heads for tokens (Ulysses); groups of them exchange keys and values. "
        "A divisor of cp and of the attention heads; cp where layers carry state. null: what sends the fewest bytes.",
        None,
        within=AT_LEAST_1,
    )
    tp: int = key(
        "Ranks that share the work on each layer (tensor parallelism): heads, intermediate widths and the vocabulary "
        "are divided over them, and they hold the same documents.",
        1,
        within=AT_LEAST_1,
    )
    ep: int = key(
        "Of the ranks of dp_shard x cp, how many share the experts of a mixture-of-experts model (expert parallelism): "
        "each computes with its part of them, and tokens travel to their experts and back. A divisor of dp_shard x cp.",
        1,
        within=AT_LEAST_1,
    )
    pp: int = key(
        "Stages of consecutive decoder layers, each on ranks of its own (pipeline parallelism): a row's hidden states "
        "travel from stage to stage, and the other axes are of one stage's ranks.",
        1,
        within=AT_LEAST_1,
    )
    pp_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = key(
        "In which order a rank runs the forwards and backwards of a step's micro-batches: as soon as it can (1F1B, "
        "which keeps at most pp of them in memory), all forwards first (GPipe), or with several stages per rank, so "
        "that ranks wait less (Interleaved1F1B). The zero-bubble schedules compute the gradients of linear layers' "
        "weights apart, when a rank would wait: in the same order, or with the stages in a V, so that the first rank "
        "has the first and the last one (ZBVZeroBubble).",
        "1F1B",
        unread=(when.NO_STAGES,),
    )
    pp_stages_per_rank: int | None = key(
        "Stages of each rank of pp, for Interleaved1F1B and InterleavedZeroBubble: consecutive stages are on "
        "consecutive ranks. More wait less and send more. null: 2.",
        None,
        within=AT_LEAST_1,
        unread=(when.NO_STAGES, when.STAGES_BY_SCHEDULE),
    )


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """Precision and communication of the sharded model."""

    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] = key(
        "Dtype of compute and of gathered parameters. `auto`: bf16 on accelerators, fp32 on CPU. `fp16` comes with "
        "dynamic loss scaling.",
        "auto",
    )
    loss_scale: float = key(
        "fp16: the first factor on the loss; halved when a gradient overflows.",
        65536.0,
        within=POWER_OF_2,
        unread=(when.ONLY_FP16,),
    )
    loss_scale_interval: int = key(
        "fp16: the factor is doubled after so many steps without overflow.",
        2000,
        within=AT_LEAST_1,
        unread=(when.ONLY_FP16,),
    )
    reduce_dtype: Literal["fp32", "bf16"] = key("Dtype in which gradients are summed over ranks.", "fp32")
    master_dtype: Literal["fp32", "bf16"] = key(
        "Dtype of the weights that the optimizer steps, of their gradients, and of its state unless "
        "optimizer.state_dtype says otherwise.",
        "fp32",
    )
    wrap: Literal["auto"] | tuple[str, ...] = key(
        "Modules that are gathered as units of their own: a list of `layers` (each decoder layer), `head` (with the "
        "final norm), `embedding`, and names of classes in the model, such as Qwen3MoeExperts; units may lie inside "
        "others, and the root holds the rest. `auto` is [layers, head], less what tied weights forbid; on a single "
        "CUDA device it is [] for models of up to 2 GiB in the compute dtype, because units take the host time.",
        "auto",
    )
    overrides: dict[str, Literal["full", "replicate"] | int] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "How modules are sharded that are to differ: pattern of module names -> `full` (over dp_shard), `replicate` "
        "(whole on every rank), or an integer (over groups of that many ranks, replicated over the others), as in "
        "{'*.mlp.gate': replicate, model.embed_tokens: 2}. The outermost modules that a pattern names become units, "
        "with all that lies in them; gradients are summed over all data ranks all the same.",
        default_factory=dict,
        within=SHARD_GROUPS,
    )
    reshard_after_forward: bool | int = key(
        "true: free gathered parameters after forward (ZeRO-3); false: keep them until backward (ZeRO-2); "
        "an int: reshard to groups of that many ranks. On one data rank, gathered parameters are copies in the compute "
        "dtype: false keeps them for the whole step; true does so, too, on CUDA from the second step on, where an "
        "eighth of the memory stays free.",
        True,
        within=RESHARDING,
    )
    prefetch: int | tuple[int, int] | None = key(
        "Units that are gathered ahead of the one that runs: a number for forward and backward, or [forward, "
        "backward]; more overlaps more communication and holds more memory. null: FSDP2's default, the next unit.",
        None,
        within=UNITS_AHEAD,
    )
    cpu_offload: bool | Literal["optimizer"] = key(
        "`optimizer`: keep masters, gradients and optimizer state in the host's memory and step there, while the "
        "accelerator keeps the weights in the compute dtype; gradients travel, and their norm is computed, during "
        "backward. true: keep no weights on the accelerator either, and copy each unit there when it runs: fits larger "
        "models, slowly.",
        False,
    )
    cast_forward_inputs: tuple[str, ...] = key(
        "The outermost modules that these patterns name get their floating-point inputs in the compute dtype, as in "
        "['backbone.layers.*']. Others get what the model gives them: rotary tables and routers stay in fp32.",
        (),
    )
    reduce: Literal["every", "scatter", "last"] = key(
        "When gradients are reduced within a step: `every` micro-batch over all data ranks; `scatter` over dp_shard "
        "each micro-batch and over dp_replicate at the last; `last`: only at the last (more memory, less traffic).",
        "scatter",
    )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of the sources that `data.sources` lists: where its documents are, and how many of them an epoch takes."""

    path: str = key("As data.path.")
    name: str | None = key("What it is called in reports and metrics; null: the file's name without its ending.", None)
    weight: float = key(
        "Documents of an epoch, as a multiple of the source's: 0.5 deals half of them, the other half in the next "
        "epoch; 2 deals each twice.",
        1.0,
    )
    split: str | None = key("As data.split.", None)
    subset: str | None = key("As data.subset.", None)
    columns: dict[str, str] = key("As data.columns.", default_factory=dict)  # noqa: RUF009 - it is dataclasses.field()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training documents. docs/reference/data.md tells more."""

    path: str | None = key(
        "A file (.jsonl, .json, .csv, .tsv, .txt, .parquet; all but the last also as .gz), a pattern of several such "
        "as data/train-*.parquet, a folder written by datasets' save_to_disk, or a dataset on the hub (owner/name). "
        "All but the last may lie on an object store, as in s3://bucket/train-*.jsonl."
    )
    split: str | None = key(
        "Split of a dataset on the hub or of a saved one (null: train, or the only one); with `[from:to]` behind it, "
        "in rows or in percent, a part: `train[:1000]`. Of a file, `[:1000]` alone.",
        None,
        unread=(when.PER_SOURCE,),
    )
    subset: str | None = key("Subset (configuration) of a dataset on the hub.", None, unread=(when.PER_SOURCE,))
    columns: dict[str, str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Which of weft's columns lies where in the data, names and list indices joined by dots where it is nested, as "
        "in {prompt: question, completion: reward_model.ground_truth} or {messages: extra_info.turns}.",
        default_factory=dict,
        unread=(when.PER_SOURCE,),
    )
    sources: tuple[SourceConfig, ...] | None = key(
        "In place of data.path: several sources, each with its own path, name, weight, split, subset and columns, as "
        "in [{path: a.jsonl, weight: 2}, {path: b.parquet, columns: {text: body}}].",
        None,
    )
    text_unit: Literal["line", "paragraph", "document"] | None = key(
        "What of a .txt file is a document: each line, each paragraph (what blank lines divide), or the whole file. "
        "null: each line, but a file whose first line is a JSON object is read as .jsonl.",
        None,
        unread=(when.NO_TEXT_FILE,),
    )
    roles: dict[str, str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Who speaks, where messages say it in words of their own: their word -> system, user, assistant or tool, as in "
        "{human: user, bot: assistant}; a role of the template's own is mapped to itself. ShareGPT's `from: human` and "
        "`gpt` are known.",
        default_factory=dict,
    )
    message_keys: dict[str, str] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Which key of a message holds what, where they have other names: weft's name -> theirs, as in {role: speaker, "
        "content: text}. ShareGPT's `from` and `value` are known.",
        default_factory=dict,
    )
    ignore: tuple[str, ...] = key(
        "Columns, and keys of messages, parts and calls, that are left out on purpose, as in [mask, label]. One that "
        "weft does not read, and that may change what is trained, is an error otherwise.",
        (),
    )
    system: str | None = key(
        "Default system prompt: put before the messages of every row that has no message of the system.", None
    )
    train_on: Literal["answers", "last", "all"] = key(
        "What the loss falls on: `answers`, every message of the assistant that is not `train: false`, or the "
        "completion; `last`, the last of them; `all`, every token.",
        "answers",
    )
    chat_template: str | None = key(
        "Chat template in place of the tokenizer's: a Jinja file, or `chatml`. It is saved with every checkpoint.", None
    )
    template_kwargs: dict[str, bool | int | str | tuple[str, ...]] = key(  # noqa: RUF009 - dataclasses.field()
        "What the chat template is told besides the messages, as in {enable_thinking: false}; a document's "
        "`chat_template_kwargs` come on top.",
        default_factory=dict,
        within=TEMPLATE_KWARGS,
    )
    template_date: str | None = key(
        "The day that some chat templates write (gpt-oss, Llama 3.2), as YYYY-MM-DD; null: the day on which the run "
        "begins.",
        None,
    )
    shuffle: bool = key(
        "Deal the documents in an order drawn from train.seed and the epoch; false keeps the order of the file.", True
    )
    max_length: int | None = key(
        "Longest document in tokens; null: what fits a row (step.max_tokens_per_device).", None, within=TWO_TOKENS
    )
    long_documents: Literal["error", "truncate", "drop"] = key("What to do with longer documents.", "error")
    bad_rows: Literal["error", "drop"] = key(
        "What to do with a row that cannot be read, rendered or trained on: `error`, or `drop`, which leaves it out, "
        "counts it, and writes it to RUN/bad_rows.jsonl with what is wrong. Of eval.path and eval.sources, too.",
        "error",
    )
    image_pixels: dict[str, int] = key(  # noqa: RUF009 - dataclasses.field()
        "Limits of a vision model's own processor for the pixels of an image, as in {min: 3136, max: 1003520}; either "
        "may be left out. Larger images are made smaller, and take fewer tokens. Refused where the processor has no "
        "such limit.",
        default_factory=dict,
        within=PIXEL_LIMITS,
    )
    video: dict[str, float] = key(  # noqa: RUF009 - dataclasses.field()
        "How videos are seen, as in {fps: 2, max_frames: 768}: names of qwen-vl-utils (docs/reference/data.md#videos).",
        default_factory=dict,
        within=VIDEO_LIMITS,
    )
    check_images: bool = key(
        "Decode every image and video before training, so that a damaged one is found then; false reads only sizes.",
        True,
    )
    max_image_pixels: int = key(
        "Most pixels of an image that is decoded: a larger one is an error, before it fills the memory.",
        89_478_485,
        within=Range(lambda v: 1 <= v <= 178_956_970, "1 to 178956970, which is all that Pillow opens"),
    )
    fetch_images: bool = key(
        "Fetch images and videos of http and https URLs once, while the data are read; they are kept with the tokens.",
        False,
    )
    max_row_bytes: int = key(
        "Largest row of the data in bytes (a line, an object, a row of a table): a larger one is an error that names "
        "it, found before it is read whole.",
        32 << 20,
        within=Range(lambda v: 1 <= v <= 1 << 40, "1 to 1099511627776 (a TiB)"),
    )
    workers: int | None = key(
        "Processes that tokenise data of 64 MiB and more; null: one per core, where there are more than two; 1: the "
        "rank, which keeps two cores busy.",
        None,
        within=PROCESSES,
    )
    cache: str | None = key(
        "Folder that keeps the tokens of large data for later runs and other ranks, by content; null: nothing is kept, "
        "and every rank tokenises for itself.",
        "~/.cache/weft",
    )


# Values of lora.init with which adapters begin with a part of the base.
MOVES_BASE = ("pissa", "pissa_niter_16", "olora")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters instead of all weights (docs/reference/lora.md); on where lora.rank or lora.path is set."""

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
        "Dropout on the inputs of adapters of linear layers. Masks are drawn by each rank for its own row, so that "
        "results depend on how a step is cut.",
        0.0,
        within=BELOW_1,
        unread=(when.NO_ADAPTERS,),
    )
    dora: bool = key(
        "Also train the length of each row of adapted linear layers (DoRA): y = m (W + s B A) x / ||W + s B A||.",
        False,
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    init: Literal["default", "gaussian", "pissa", "pissa_niter_16", "olora", "loftq"] = key(
        "How new adapters begin: `default` (A uniform) and `gaussian`, with B = 0; `pissa`, `pissa_niter_16` (faster) "
        "and `olora`, with a part of the weights, which is subtracted from the base; `loftq`, with the rounding errors "
        "of lora.base. Adapters of pissa and olora are saved with twice the rank, for the whole base.",
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
        "What is adapted: `all-linear` (every linear layer but the head), or a list of ends or patterns of names: of "
        "linear layers (q_proj, 'model.layers.1?.mlp.*'), of the embedding (embed_tokens), of fused experts "
        "(mlp.experts.gate_up_proj); `all-linear` may be one of them.",
        "all-linear",
        within=Range(lambda v: len(v) > 0, "all-linear, or a list that is not empty"),
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    modules_to_save: tuple[str, ...] = key(
        "Modules that are trained whole and saved with the adapter, by the ends of their names, as in [lm_head]. What "
        "was tied to them is not any more.",
        (),
        unread=(when.NO_ADAPTERS, when.FROM_ADAPTER),
    )
    base: Literal["compute", "nf4", "int8", "fp8", "mxfp4"] = key(
        "How the frozen base is stored: `compute`, in the compute dtype; else the decoder's linear layers and experts "
        "in fewer bits, made from the files while they are read: `nf4`, 4 bits (QLoRA), bitsandbytes' NF4 with double "
        "quantisation; `int8`, a scale for each row; `fp8`, e4m3, a scale for each block of 128 x 128. Weights that "
        "the files hold in this format keep their bytes; `mxfp4` is read from files only. Not exact: adapters train "
        "on the weights that the bytes say (docs/how-to/lora.md).",
        "compute",
        unread=(when.NO_ADAPTERS,),
    )
    sampling: Literal["auto", "merged", "separate"] = key(
        "What a model with adapters samples with (weft rl, eval.prompts, distill.on_policy): `merged`: weights "
        "W + s B A in the compute dtype, which is fast, and takes the memory of a model without adapters; `separate`: "
        "the base as lora.base stores it, dequantised in each layer, and the adapters beside it, as the trainer "
        "computes: slower, in the memory of the stored base. `auto`: separate over a quantised base and in vLLM, else "
        "merged (docs/how-to/lora.md).",
        "auto",
        unread=(when.NO_ADAPTERS, when.NOTHING_SAMPLED),
    )
    path: str | None = key(
        "Go on from this adapter, a folder that peft or weft has written; it says rank, alpha, targets and "
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
    """The documents of an optimizer step, and how they are cut into micro-batches."""

    documents: int | None = key(
        "Documents in an optimizer step, over all ranks; null where step.tokens is set.",
        64,
        within=up_to(MOST_DOCUMENTS),
    )
    tokens: int | None = key(
        "Instead of step.documents: a step takes documents until one more would exceed this many tokens, "
        "over all ranks.",
        None,
        within=TWO_TOKENS,
    )
    max_tokens_per_device: int = key(
        "Tokens of one forward on one rank; a step is cut into as many micro-batches as this needs.",
        8192,
        within=TWO_TOKENS,
    )
    padding: Literal["free", "buckets", "fixed"] = key(
        "Row lengths: `free` as the documents give them, `buckets` rounded up to one of a few, "
        "`fixed` always step.max_tokens_per_device.",
        "free",
        formerly="shapes",
    )
    share_prefixes: Literal["auto", "off"] = key(
        "Forward the equal beginnings of a group's documents once (answers to one prompt, a preference pair): `auto` "
        "wherever this saves a step 5% of its tokens or more, `off` never.",
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
        "`adamw` (decoupled decay), `muon` (orthogonal steps of matrices; AdamW for embeddings, the head and vectors), "
        "`lion` (signs of a momentum), `adafactor` (second moments of rows and columns), `sgd`, or the import path of "
        "any other that steps each element by itself, as in torch.optim.Adagrad; more in docs/reference/training.md.",
        "adamw",
    )
    lr: float = key("Peak learning rate.", 1.0e-5, within=POSITIVE)
    weight_decay: float = key(
        "Decay of matrices and embeddings; biases, norms, conv1d kernels and A_log are never decayed.",
        0.1,
        within=NOT_NEGATIVE,
    )
    betas: tuple[float, float] = key(
        "AdamW's running-average factors; Lion's for the step and the momentum (Lion's authors: 0.9, 0.99).",
        (0.9, 0.95),
        within=Range(lambda v: all(0 <= beta < 1 for beta in v), "two numbers, each 0 or more and below 1"),
        unread=(when.HAS_BETAS,),
    )
    eps: float = key("AdamW's epsilon.", 1.0e-8, within=POSITIVE, unread=(when.HAS_ADAMW,))
    momentum: float = key("SGD's momentum.", 0.0, within=BELOW_1, unread=(when.ONLY_SGD,))
    muon_lr: float | None = key(
        "Peak learning rate of Muon's matrices; optimizer.lr is AdamW's. null: optimizer.lr for both.",
        None,
        within=Range(lambda v: v > 0, "above 0, or null for optimizer.lr"),
        unread=(when.ONLY_MUON,),
    )
    muon_momentum: float = key("Momentum of Muon's matrices.", 0.95, within=BELOW_1, unread=(when.ONLY_MUON,))
    muon_scale: Literal["match_rms_adamw", "original"] = key(
        "What a matrix's orthogonal step is multiplied by: `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), with which "
        "rates of AdamW fit; `original`: sqrt(max(1, rows / columns)), torch's default.",
        "match_rms_adamw",
        unread=(when.ONLY_MUON,),
    )
    muon_dtype: Literal["auto", "fp32", "bf16"] = key(
        "Dtype in which matrices are orthogonalised; `auto`: bf16 on accelerators, as torch.optim.Muon, fp32 on CPU.",
        "auto",
        unread=(when.ONLY_MUON,),
    )
    muon_heads: bool = key(
        "Orthogonalise each head of projections to queries, keys and values by itself.",
        False,
        unread=(when.ONLY_MUON,),
    )
    options: dict[str, Any] = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Arguments of an optimizer that is named by its import path, as in {eps: 1e-6}; lr and weight_decay are given "
        "as above.",
        default_factory=dict,
        unread=(when.ONLY_IMPORTED,),
    )
    groups: tuple[ParameterGroup, ...] = key(
        "Parameters that are treated apart: a list such as [{match: [model.embed_tokens, '*.mlp'], lr_scale: 0.1, "
        "weight_decay: 0}]. A parameter belongs to the first group with a pattern that names it (patterns as in "
        "model.freeze). `lr` (a peak) or `lr_scale` (a share of optimizer.lr) follows the schedule; `weight_decay` "
        "falls on the whole group; without it optimizer.weight_decay falls on what it would fall on anyway.",
        (),
    )
    state_dtype: Literal["auto", "fp32", "bf16", "int8"] = key(
        "Dtype in which the optimizer keeps its state; `auto`: the masters'. Another one is rounded after every step, "
        "which is computed in fp32. Not exact: `bf16` halves the state's memory; `int8` (AdamW) takes a quarter, as "
        "codes with a scale for every 256, which are the same on every mesh.",
        "auto",
        unread=when.NO_OWN_STATE,
    )
    rounding: Literal["nearest", "stochastic", "kahan"] = key(
        "How masters in bf16 are rounded after a step of AdamW: `nearest` loses steps that are small beside a weight; "
        "`stochastic` keeps them on average, by bits that are the same on every mesh; `kahan` keeps what is rounded "
        "away in 2 more bytes per parameter.",
        "nearest",
        unread=(when.ONLY_ADAMW, when.WIDE_MASTERS),
    )
    load_state: bool = key(
        "Begin with the optimizer's state that is in model.dcp_weights (AdamW's moments and steps, SGD's momentum); "
        "steps, learning rate and order of the data begin anew.",
        False,
        unread=when.NO_SAVED_STATE,
    )
    max_grad_norm: float | None = key(
        "Clip the gradient of a step to this global norm; null: never.",
        1.0,
        within=Range(lambda v: v > 0, "above 0, or null for no clipping"),
    )
    ema_decay: float | None = key(
        "Keep a moving average of the weights in fp32, e = d e + (1 - d) w after every update, with this d (such as "
        "0.999); checkpoints hold it. null: none.",
        None,
        within=Range(lambda v: 0 < v < 1, "above 0 and below 1, or null for no average"),
    )


@dataclass(frozen=True, kw_only=True)
class UndecayedOptimizerConfig(OptimizerConfig):
    """As in `weft sft`, with other defaults: no decay."""

    weight_decay: float = key(
        "Decay of matrices and embeddings; biases, norms, conv1d kernels and A_log are never decayed.",
        0.0,
        within=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyOptimizerConfig(UndecayedOptimizerConfig):
    """As in `weft sft`, with other defaults: a tenth of the learning rate, and no decay."""

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
        "wsd: share of all steps in which the rate decays.",
        0.1,
        within=SHARE,
        unread=(when.only_with("schedule.name", "wsd"),),
    )
    decay: Literal["linear", "cosine", "1-sqrt"] = key(
        "wsd: shape of that decay.", "linear", unread=(when.only_with("schedule.name", "wsd"),)
    )
    cycles: int = key(
        "cosine_with_restarts: how often the rate falls from the peak.",
        1,
        within=AT_LEAST_1,
        unread=(when.only_with("schedule.name", "cosine_with_restarts"),),
    )
    power: float = key(
        "polynomial: exponent of the share of steps that remain; 1 is linear.",
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
    """How long to train, and what ends a run early."""

    steps: int | None = key("Optimizer steps; instead of train.epochs.", None, within=AT_LEAST_1)
    epochs: int | None = key("Passes over the data; null where train.steps is set.", 1, within=AT_LEAST_1)
    seed: int = key("Seed of initial weights and of the data order.", 0, within=NOT_NEGATIVE)
    timeout: float = key(
        "Seconds a collective may wait for the other ranks, or a phase pass without progress, before the run ends with "
        "an error; loading, saving and the first step have ten times as long outside of collectives.",
        600.0,
        within=POSITIVE,
    )
    loss: str | None = key(
        "Import path of the loss, as in my_losses:Focal: a class that is made without arguments, or an object, with "
        "what docs/how-to/objective.md asks for; null: cross entropy over trained tokens.",
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
        "Elsewhere than on a terminal, optimizer steps between two lines of what is printed; null: a line every 5 "
        "seconds at most. The first and the last step are always printed; RUN/metrics.jsonl has every step.",
        None,
        within=AT_LEAST_1,
    )
    max_nonfinite: int = key(
        "End the run after this many steps in a row whose loss or gradient is not finite; in RL also after so many "
        "rollout steps in a row of which no sample is to be trained.",
        3,
        within=AT_LEAST_1,
    )
    deterministic: bool = key("Ask torch for deterministic algorithms (slower on accelerators).", False)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and what is in them. Every checkpoint is a HuggingFace directory
    (docs/reference/checkpoints.md)."""

    every: int = key(
        "Optimizer steps between checkpoints; 0: only the last. The last step is always saved.",
        100,
        within=NOT_NEGATIVE,
    )
    every_minutes: float | None = key(
        "Save after so many minutes without a checkpoint, too; null: never.",
        None,
        within=Range(lambda v: v > 0, "above 0, or null"),
    )
    keep: int | None = key(
        "Newest checkpoints that are kept; null: all.", 3, within=Range(lambda v: v >= 1, "1 or more, or null for all")
    )
    keep_every: int | None = key(
        "Checkpoints whose step is a multiple of this are never removed; a multiple of checkpoint.every.",
        None,
        within=AT_LEAST_1,
        unread=(when.KEEPS_ALL_CHECKPOINTS, when.SAVES_LAST_ONLY),
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = key(
        "Dtype of the HuggingFace weights; `auto`: each tensor as in the source's files. Resuming never reads them.",
        "auto",
    )
    weights: Literal["raw", "ema"] = key(
        "Which weights the HuggingFace directory of a checkpoint holds: the `raw` ones that are trained, or their "
        "average (optimizer.ema_decay). The trainer state holds both; `weft export --ema` writes the average, too.",
        "raw",
        unread=(when.NO_AVERAGE,),
    )
    trainer_state: Literal["all", "last", "none"] = key(
        "Which checkpoints hold what resuming takes (masters, moments, random numbers, place in the data): `all`, "
        "only the `last`, or `none`.",
        "all",
    )
    async_: bool = key(
        "Write in the background: training waits only for a copy in host memory. false: it waits for the disk.", True
    )
    verify: Literal["none", "size", "digest"] = key(
        "What is compared before a checkpoint gets its name: each file's `size`; or a `digest` of every tensor, taken "
        "from memory, with what another rank reads from the disk, which costs reading all that was written.",
        "digest",
    )
    keep_best: bool = key(
        "Save whenever an evaluation is the best so far (eval.metric), keep that checkpoint whatever `keep` says, and "
        "let the link `best` name it.",
        False,
        unread=(when.NO_DOCUMENTS, when.EVALUATES_LAST_ONLY),
    )
    push: str | None = key(
        "Upload the run's model to this repository of the HuggingFace hub, OWNER/NAME, with a model card; the trainer "
        "state stays. The repository is made before training where it is missing, and an upload that fails never ends "
        "the run. null: nothing is uploaded.",
        None,
        within=Range(is_hub_name, HUB_NAME),
    )
    push_at: Literal["end", "save"] = key(
        "What is uploaded: at the `end` the last checkpoint, or with checkpoint.keep_best the best; `save`: besides, "
        "while training goes on, the newest after each save.",
        "end",
        unread=(when.NOTHING_PUSHED,),
    )
    push_private: bool = key(
        "Create that repository as a private one, if it does not exist.", False, unread=(when.NOTHING_PUSHED,)
    )
    push_revision: str | None = key(
        "Branch of it, created if it does not exist; null: main.", None, unread=(when.NOTHING_PUSHED,)
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during training, and what follows from it. docs/reference/evaluation.md tells more."""

    path: str | None = key("Held-out documents: data like data.path's, with the columns that data.columns says.", None)
    sources: tuple[SourceConfig, ...] | None = key(
        "In place of eval.path: several sources, each with its own path, name, split, subset and columns, as in "
        "[{path: chat.jsonl}, {name: code, path: code.parquet}]. Each is reported apart, too.",
        None,
    )
    share: float | None = key(
        "In place of eval.path: hold out this share of the documents of data.path, or of each of data.sources, drawn "
        "from train.seed. They are not trained on.",
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
        "Evaluate before the first step, too; the line of step 0 in metrics.jsonl.",
        False,
        unread=(when.NOTHING_TO_EVALUATE,),
    )
    metric: str = key(
        "The figure whose lowest value is the best evaluation: eval/loss, or eval/NAME/loss of one of eval.sources.",
        "eval/loss",
        unread=(when.NO_BEST,),
    )
    patience: int | None = key(
        "End the run, with all saved, after so many evaluations in a row that did not improve eval.metric; null: "
        "never.",
        None,
        within=AT_LEAST_1,
        unread=(when.NO_DOCUMENTS, when.EVALUATES_LAST_ONLY),
    )
    min_delta: float = key(
        "How much lower eval.metric must be to count as improved.", 0.0, within=NOT_NEGATIVE, unread=(when.NO_PATIENCE,)
    )
    target: float | None = key(
        "End the run, with all saved, once eval/exact is at least this: the share of held-out documents all of whose "
        "trained tokens are the likeliest, so that greedy decoding would write them; null: never.",
        None,
        within=Range(lambda v: 0 < v <= 1, "above 0 and at most 1, or null"),
        unread=(when.NO_DOCUMENTS, when.EVALUATES_LAST_ONLY, when.NO_EXACT_FIGURE),
    )
    prompts: str | tuple[str, ...] | None = key(
        "Prompts that the model answers at every evaluation: a list of texts, a .txt file with one in each line, or a "
        "JSONL file with `messages` or `prompt` in each. Answers go to RUN/samples.jsonl. Each rank that answers holds "
        "the whole model for the time.",
        None,
    )
    max_new_tokens: int = key("Longest answer in tokens.", 128, within=AT_LEAST_1, unread=(when.NO_PROMPTS,))
    temperature: float = key(
        "0: the likeliest token each time; above: sampled, from train.seed and the step.",
        0.0,
        within=NOT_NEGATIVE,
        unread=(when.NO_PROMPTS,),
    )


@dataclass(frozen=True, kw_only=True)
class FrozenModelConfig:
    """A model beside the trained one that is only read (weft/engine/frozen.py): an engine of its own, which takes turns
    with it on the same ranks. What is null is as for the trained model."""

    param_dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = key(
        "Dtype that it is kept and computed in; null: fsdp.param_dtype.", None
    )
    dp_replicate: int | None = key("Copies of its sharded weights; null: mesh.dp_replicate.", None, within=AXIS)
    dp_shard: int | None = key("Ranks over which its weights are sharded; null: mesh.dp_shard.", None, within=AXIS)
    tp: int | None = key("Ranks that divide each of its layers; null: mesh.tp.", None, within=AT_LEAST_1)
    pp: int | None = key("Stages of its layers, as mesh.pp has them; null: mesh.pp.", None, within=AT_LEAST_1)
    cpu_offload: bool | None = key("Keep its weights in the host's memory; null: fsdp.cpu_offload.", None)
    max_tokens_per_device: int | None = key(
        "Tokens of one of its forwards on one rank; null: step.max_tokens_per_device. It keeps no activations, so that "
        "more fit.",
        None,
        within=TWO_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class FrozenRanksConfig(FrozenModelConfig):
    """A FrozenModelConfig whose model takes turns with the trained one, or has ranks of its own."""

    ranks: int | None = key(
        "How many of the run's ranks (--nproc) have this model and no other. They read each step's documents while the "
        "other ranks, which mesh divides, train on the step before. Its mesh is then by default dp_shard over all of "
        "them. null: it takes turns with the trained model on all ranks.",
        None,
        within=AT_LEAST_1,
    )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(FrozenModelConfig):
    """How the teacher of rl.teacher is computed: an engine of its own on the trainer's ranks, which only reads."""

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
        """Whether rows of the data are of preferences (weft/data/preferences.py), not documents."""
        return False

    @property
    def tail_weight(self) -> float | None:
        """Of preferences, the loss weight of an answer's tokens beyond the length of the shorter of its pair."""
        return None

    @property
    def row_options(self) -> dict[str, Any]:
        """What rows hold that are no plain documents: fields of weft/data/records.py:ParseOptions."""
        return {"preferences": self.reads_preferences}
