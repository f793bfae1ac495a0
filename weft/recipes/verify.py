"""`weft verify`: the configured mesh against one plain process, on the user's own model or a shrunken copy of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from weft.cluster.options import VerifyOptions
from weft.cluster.process import Ranks, join
from weft.config.schema import OptimizerConfig, SftConfig
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.models import hf
from weft.models.shrink import fewer_layers
from weft.parallel.parallelize import Precision
from weft.recipes.sft import engine_config
from weft.verification.documents import awkward_steps
from weft.verification.harness import Verdict, compare_once, verify
from weft.verification.observed import Step
from weft.verification.plants import planted
from weft.verification.show import print_verdict

# Adam divides each element by its own size: below this epsilon the rounding of a gradient near zero becomes a whole
# step, in the reference as here, and would be all that the comparison of weights sees.
EPSILON = 1e-5
LEARNING_RATE = 1e-3  # smaller ones drown in the rounding of the weights themselves
COPIES = 10  # of the fp32 weights: what the reference and the record of the engine hold at their peak


@dataclass(frozen=True)
class Subject:
    """path: a HuggingFace directory with weights. words: what it is, where it is not simply the user's model. cut:
    whether it has fewer layers than the user's."""

    path: str
    words: str
    cut: bool = False


def run(config: SftConfig, options: VerifyOptions) -> bool:
    """Entry point of one rank: whether everything is within tolerance, the same answer on every rank."""
    torch.set_float32_matmul_precision("highest")
    with join(options.device, config.train.timeout) as ranks, tempfile.TemporaryDirectory() as folder:
        subject = choose_subject(config, options, ranks, folder)
        steps = awkward_steps(hf.read_config(subject.path).get_text_config().vocab_size)
        with planted(options.plant) as plant:
            try:
                verdict = check(config, subject, steps, ranks)
            except UserError as error:
                if subject.cut:
                    raise UserError(_of_a_copy(error, subject)) from error
                raise
        answer = [verdict is None or verdict.passed]
        if verdict is not None:
            print_verdict(verdict, config, ranks, subject.words, plant)
        dist.broadcast_object_list(answer, src=0)
        return answer[0]


def check(config: SftConfig, subject: Subject, steps: Sequence[Step], ranks: Ranks) -> Verdict | None:
    """The verdict in fp32, with the figures of the configured dtype as remarks; on the first rank."""
    exact = verified_config(config, subject.path)
    verdict = verify(Engine(engine_config(exact), ranks), subject.path, steps, [LEARNING_RATE] * len(steps))
    if Precision.of(config.fsdp, ranks.device) == Precision.of(exact.fsdp, ranks.device):
        return verdict
    kernel = config.model.attention if ranks.device.type == "cuda" else "auto"
    model = replace(exact.model, attention=kernel)
    configured = Engine(engine_config(replace(exact, fsdp=config.fsdp, model=model)), ranks)
    remark, moved = compare_once(configured, subject.path, steps[0])
    if verdict is None:
        return None
    return replace(verdict, figures=[*verdict.figures, moved], remarks=[*verdict.remarks, remark])


def verified_config(config: SftConfig, path: str) -> SftConfig:
    """The user's config, in fp32, on these weights, without dropout, with an optimizer whose noise leaves something to
    see.

    Attention is left to weft: the kernel of model.attention may know 16 bits only.
    """
    optimizer: OptimizerConfig = config.optimizer
    if optimizer.name == "adamw":
        optimizer = replace(optimizer, eps=max(optimizer.eps, EPSILON))
    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "master_dtype": "fp32"}
    return replace(
        config,
        model=replace(config.model, path=path, init="pretrained", attention="auto"),
        lora=replace(config.lora, dropout=0.0),
        fsdp=replace(config.fsdp, **exact),  # type: ignore[arg-type]
        optimizer=optimizer,
    )


def choose_subject(config: SftConfig, options: VerifyOptions, ranks: Ranks, folder: str) -> Subject:
    """The user's weights where the reference fits beside them; else, or as asked, a random copy with fewer layers."""
    layers = options.layers
    fits = [_fits(config)]
    dist.broadcast_object_list(fits, src=0)  # free memory changes from one look to the next
    if layers is None and not fits[0]:
        layers = 2
    if layers is None and config.model.init == "pretrained":
        return Subject(config.model.path, f"{config.model.path}, its own weights")
    shape = hf.read_config(config.model.path)
    words = f"{config.model.path}, random weights"
    if layers is not None:
        shape = fewer_layers(shape, layers)
        why = "as asked" if options.layers is not None else "because the reference would not fit this machine"
        words += f", cut to {shape.get_text_config().num_hidden_layers} layers ({why})"
    shared = [str(Path(folder) / "model")]
    dist.broadcast_object_list(shared, src=0)
    if ranks.local_rank == 0:
        shape.architectures = [hf.model_class(shape).__name__]
        hf.build_random(shape, dtype=torch.float32, attention="eager", seed=config.train.seed).save_pretrained(
            shared[0]
        )
    dist.barrier()
    return Subject(shared[0], words, cut=layers is not None)


def _of_a_copy(error: UserError, subject: Subject) -> str:
    return (
        f"{error}\nWhat is verified is {subject.words}. If the whole model has what the config names, give --layers a "
        "number that reaches it, or verify without that key."
    )


def _fits(config: SftConfig) -> bool:
    shape = hf.without_noise(hf.read_config(config.model.path))
    model = hf.build_meta(shape, dtype=torch.float32, attention="eager")
    needed = sum(p.numel() for p in model.parameters()) * 4 * COPIES
    return needed < 0.8 * psutil.virtual_memory().available
