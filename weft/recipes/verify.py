"""`weft verify`: compares the configured mesh with one plain process, on the user's model or a smaller copy of it."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from weft.config.distill_schema import AVERAGE, BASE, DATA, DistillConfig, is_served
from weft.config.dpo_schema import DpoConfig
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import OptimizerConfig, SftConfig
from weft.data.documents import lengths_of
from weft.data.encode import load_tokenizer
from weft.engine.batch.document import choose
from weft.engine.config import EngineConfig
from weft.engine.document_sums import read_sums
from weft.engine.engine import Engine
from weft.engine.losses.load import choose_objective
from weft.engine.optim.custom_optimizer import find_class
from weft.engine.optim.optimizer import lossy_parts
from weft.engine.selfcheck.kinds import kinds_of
from weft.engine.selfcheck.shrink import fewer_layers
from weft.engine.teachers import Teacher
from weft.errors import UserError
from weft.launch import flight
from weft.launch.options import VerifyOptions
from weft.launch.process import Ranks, join
from weft.launch.scratch import scratch_folder
from weft.models import hf
from weft.parallel.fsdp import DTYPES
from weft.parallel.memory import local_ranks
from weft.parallel.parallelize import Precision
from weft.recipes import answers
from weft.recipes.distill import Distillation
from weft.recipes.dpo import Dpo
from weft.recipes.reward import RewardRecipe
from weft.recipes.run_data import TRAINED
from weft.recipes.teachers import open_teacher
from weft.recipes.verified_steps import RecipeSteps
from weft.rl.trainer import TrainerRank
from weft.terminal import counted
from weft.verify.adapter import randomize_adapters
from weft.verify.distill_harness import DrawnLists, PlainTeachers, verify_distillation
from weft.verify.documents import awkward_steps, forest_steps, special_ids
from weft.verify.dpo_harness import (
    Readings,
    awkward_preferences,
    preference_data,
    shows_whole_step,
    verify_preferences,
)
from weft.verify.fp8_layers import compare_layers
from weft.verify.harness import Figure, Verdict, cut_documents, verify, worst_five
from weft.verify.image_documents import steps_for, takes_images
from weft.verify.image_reference import Images
from weft.verify.masters import compare_steps, rounds_steps
from weft.verify.narrow import compare_as_configured
from weft.verify.observed import Step
from weft.verify.plants import planted
from weft.verify.reward_harness import answer_data, awkward_answers, verify_reward
from weft.verify.rl_harness import verify_rl
from weft.verify.rl_rollouts import recorded_rollouts
from weft.verify.score_check import score_figures, with_room_to_verify
from weft.verify.show import print_verdict
from weft.verify.training import disturb_weights

# Adam divides each element by its magnitude. With a smaller epsilon, the rounding of a gradient near zero becomes a
# full update, in the reference and in the engine, and would dominate the comparison of weights.
EPSILON = 1e-5
LEARNING_RATE = 1e-3  # the rounding of the weights would hide the updates of a smaller rate
Config = TypeVar("Config", SftConfig, RlConfig)
# Peak memory, as multiples of the fp32 weights. In host memory: the reference and the results of both sides (measured
# with one rank), and the records of each further rank. On an accelerator: the training reference, whose optimizer has
# two states, and a copy of its gradients, in addition to the engine.
COPIES = 24
COPIES_OF_A_RANK = 5
COPIES_IN_DOUBLE = 4  # added if the reference also trains in fp64
COPIES_ON_DEVICE = 7
RL_COPIES = 30  # for RL: with a reference, a critic, and the plain side twice


@dataclass(frozen=True)
class VerifiedModel:
    """The verified model. path: a HuggingFace directory with weights. words: its description for the output. cut:
    whether it has fewer layers than the user's model."""

    path: str
    words: str
    cut: bool = False


def run(config: SftConfig | RlConfig, options: VerifyOptions) -> bool:
    """Entry point of one rank. Returns whether every check is within tolerance, the same on all ranks."""
    compute_in_fp32()
    hf.import_architectures(config.model.imports, config.model.path)
    require_packages(config.model.path)
    with join(options.device, config.train.timeout) as ranks, scratch_folder() as folder:
        subject = choose_subject(config, options, ranks, str(folder))
        with planted(options.plant) as plant:
            try:
                verdict = CHECKS.get(config.command, check)(config, subject, ranks, options)
            except UserError as error:
                if subject.cut:
                    raise UserError(
                        f"{error}\nThe verified model is {subject.words}. If the config's names exist in deeper "
                        f"layers of the complete model, raise --layers, or verify without the key."
                    ) from error
                raise
        answer = [verdict is None or verdict.passed]
        if verdict is not None:
            print_verdict(verdict, config, ranks, subject.words, plant)
        dist.broadcast_object_list(answer, src=0, group=ranks.group)
        return answer[0]


def require_packages(path: str) -> None:
    """Raise UserError if transformers, which computes the reference, cannot read the files."""
    method = (getattr(hf.read_config(path), "quantization_config", None) or {}).get("quant_method")
    missing = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    if method == "bitsandbytes" and missing:
        raise UserError(
            f"model.path: {path} is quantised by bitsandbytes. weft trains it without that package, but weft verify "
            f"compares with transformers, which needs it to read the files: pip install {' '.join(missing)}."
        )


def compute_in_fp32() -> None:
    """Turns off TF32, in matmuls and in cuDNN's convolutions (of state mixers), where it is the default.

    This uses torch's older switches, which do not warn in versions 2.11 to 2.15. After the newer switches
    (fp32_precision) have been used for cuDNN, torch's own code that reads the older ones raises.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def check(config: Any, subject: VerifiedModel, ranks: Ranks, options: VerifyOptions) -> Verdict | None:
    """The verdict in fp32, and in the configured dtypes if they differ (narrow.py); None except on the first rank."""
    exact = verified_config(config, subject.path)
    objective = None if config.train.loss is None else choose_objective(config.train.loss)
    engine = Engine(EngineConfig.from_config(exact), ranks, readouts=() if objective is None else objective.readouts)
    special, remark = special_ids(engine, subject.path)
    steps = awkward_steps(hf.vocabulary_size(subject.path), special=special)
    if not engine.planner.apart:
        steps += forest_steps(hf.vocabulary_size(subject.path))[:1]
    shown, images, image_plan = steps_for(engine, subject.path, steps)
    verdict = verify(engine, subject.path, shown, [LEARNING_RATE] * len(shown), images, objective, image_plan)
    if verdict is not None:
        verdict = replace(verdict, remarks=[*verdict.remarks, *([remark] if remark else [])])
    if verdict is not None:
        verdict = replace(verdict, remarks=[*verdict.remarks, *lossy_features(config)])
    verdict = _with_lossy_steps(verdict, config, exact, subject, ranks, steps)
    same_dtypes = Precision.from_config(config.fsdp, ranks.device) == Precision.from_config(exact.fsdp, ranks.device)
    if same_dtypes and not config.model.transforms:
        return verdict
    kernel = config.model.attention if ranks.device.type == "cuda" else "auto"
    model = replace(exact.model, attention=kernel, transforms=config.model.transforms)
    configured = Engine(EngineConfig.from_config(replace(exact, fsdp=config.fsdp, model=model)), ranks)
    of_layers = compare_layers(configured, steps[0]) if config.model.transforms else []
    figures, remark = compare_as_configured(configured, subject.path, steps[0])
    if verdict is None:
        return None
    return replace(verdict, figures=[*verdict.figures, *of_layers, *figures], remarks=[*verdict.remarks, remark])


def lossy_features(config: Any, *, steps: bool = True) -> list[str]:
    """A line for each feature of the config that rounds, and the computation with which it is compared. steps: whether
    compare_steps compares steps with master weights in bf16."""
    master, base = DTYPES[config.fsdp.master_dtype], config.lora.base
    rounding_reference = "compared with one process that rounds in the same way"
    lines = [
        f"lossy    optimizer: {part}; {rounding_reference}"
        for part in lossy_parts(config.optimizer, master if steps else torch.float32)
    ]
    if not steps and master == torch.bfloat16:
        lines.append(
            "lossy    master weights in bf16: not exact; `weft verify` compares them only with a config of sft"
        )
    if config.model.transforms:
        layers_compared = "layers and model compared with plain ones that round in the same way"
        sft_only = "`weft verify` compares them only with a config of sft"
        lines.append(f"lossy    'model.transforms=[fp8]': not exact; {layers_compared if steps else sft_only}")
    if config.lora.on and base != "compute":
        lines.append(f"lossy    lora.base={base}: not exact; compared with peft over a base rounded in the same way")
    return lines


def check_rl(config: Any, subject: VerifiedModel, ranks: Ranks, options: VerifyOptions) -> Verdict | None:
    """The verdict for reinforcement learning, only in fp32: updates of the configured algorithm from given rollouts."""
    exact: RlConfig = verified_config(config, subject.path)
    model = replace(exact.model, router_aux_loss="none", router_aux_loss_coef=None)  # `check` verifies that loss
    critic = replace(exact.critic, lr=exact.optimizer.lr)  # the rates are multiples of this one
    reference, teacher = replace(exact.reference, param_dtype=None), replace(exact.teacher, param_dtype=None)
    if critic.ranks is not None:  # models with separate ranks are verified in the policy's ranks
        critic = replace(critic, ranks=None, dp_replicate=None, dp_shard=None, tp=None, pp=None)
    if reference.ranks is not None:
        reference = replace(reference, ranks=None, dp_replicate=None, dp_shard=None, tp=None, pp=None)
    scorer = with_room_to_verify(replace(exact.reward_model, param_dtype=None), exact.step)
    if scorer.ranks is not None:
        scorer = replace(scorer, ranks=None, dp_replicate=None, dp_shard=None, tp=None, pp=None)
    exact = replace(exact, model=model, critic=critic, reference=reference, teacher=teacher, reward_model=scorer)
    rollouts = None if options.rollouts is None else recorded_rollouts(options.rollouts)
    trainer = TrainerRank(exact, ranks.device.type)
    figures = score_figures(trainer.reward_models, ranks)
    verdict = verify_rl(trainer, LEARNING_RATE, rollouts)
    if verdict is None:
        return None
    remarks = [*verdict.remarks, *lossy_features(config, steps=False)]
    return replace(verdict, figures=[*figures, *verdict.figures], remarks=remarks)


def check_distillation(config: Any, subject: VerifiedModel, ranks: Ranks, options: VerifyOptions) -> Verdict | None:
    """The verdict of `check`, and training by distillation's loss, compared with full logits."""
    exact: DistillConfig = verified_config(config, subject.path)
    exact = replace(exact, teacher=replace(exact.teacher, param_dtype=None))  # null: the student's dtype
    recipe, distill = Distillation(exact), exact.distill
    engine = Engine(EngineConfig.from_config(_without_balance(exact)), ranks)
    special, _ = special_ids(engine, subject.path)
    steps = awkward_steps(hf.vocabulary_size(subject.path), special=special)
    if distill.teacher == AVERAGE:  # it changes with each update
        steps = steps[:1]
    drawn = DrawnLists(hf.vocabulary_size(subject.path))
    is_listed = [name == DATA or is_served(name) for name in distill.named]
    named = [
        drawn if lists else subject.path if name in (BASE, AVERAGE) else name
        for name, lists in zip(distill.named, is_listed, strict=True)
    ]
    teachers = [
        drawn if lists else open_teacher(exact, name, engine)
        for name, lists in zip(distill.named, is_listed, strict=True)
    ]
    images: Images = {}
    remark = ""
    if takes_images(engine) and all(not isinstance(t, Teacher) or takes_images(t.engine) for t in teachers):
        steps, images, _ = steps_for(engine, subject.path, steps)
        remark = ", with images"
    elif takes_images(engine):
        remark = ", without images, which a teacher does not accept"
    plain = PlainTeachers(named, [[index % len(teachers) for index in range(len(step))] for step in steps])
    figures, worst = verify_distillation(
        engine, subject.path, steps, recipe.objective, teachers, plain, distill, LEARNING_RATE, images
    )
    del engine, teachers
    verdict = check(config, subject, ranks, options)
    words = ", ".join("drawn lists" if name is drawn else str(name) for name in named)
    return _joined(verdict, figures, worst, f"distill  {distill.loss} of {words}{remark}, in fp32")


def check_reward(config: Any, subject: VerifiedModel, ranks: Ranks, options: VerifyOptions) -> Verdict | None:
    """The verdict of training by the configured loss of scores, in fp32 and on random tokens."""
    exact: RewardConfig = verified_config(config, subject.path)
    engine = Engine(EngineConfig.from_config(_without_balance(exact)), ranks)
    randomize_adapters(engine)
    vocabulary, recipe = hf.vocabulary_size(subject.path), RewardRecipe(exact)
    steps, images = awkward_answers(engine, subject.path, vocabulary, exact.reward)
    counts = [sum(len(example) for example in step) for step in steps]
    documents = recipe.prepared(answer_data(engine, steps, exact.reward, images))
    prepared = RecipeSteps(engine, recipe, documents, counts, paired=recipe.pairs is not None)
    figures, worst = verify_reward(engine, subject.path, prepared, steps, exact.reward, LEARNING_RATE, images)
    image_words = ", with images" * bool(images)
    remarks = [f"reward   {exact.reward.loss}{image_words}, in fp32", *lossy_features(config, steps=False)]
    return Verdict(figures, worst, remarks) if figures else None


def _without_balance(config: Config) -> Config:
    """The config without the auxiliary loss of experts, which `check` verifies."""
    return replace(config, model=replace(config.model, router_aux_loss="none", router_aux_loss_coef=None))


def _joined(verdict: Verdict | None, figures: Sequence[Figure], worst: Sequence[Figure], remark: str) -> Verdict | None:
    """The verdict of `check`, followed by the figures of a loss; None except on the first rank."""
    if verdict is None:
        return None
    remarks, worst_parameters = [*verdict.remarks, remark], worst_five([*worst, *verdict.worst])
    return replace(verdict, figures=[*figures, *verdict.figures], worst=worst_parameters, remarks=remarks)


def check_preferences(config: Any, subject: VerifiedModel, ranks: Ranks, options: VerifyOptions) -> Verdict | None:
    """The verdict of `check`, and training by preference losses, with the reference, pair by pair."""
    exact: DpoConfig = verified_config(config, subject.path)
    exact = replace(exact, reference=replace(exact.reference, param_dtype=None))  # null: the trained model's dtype
    with scratch_folder() as cache:
        if exact.preference.cache == "disk":  # a new cache, which is written and read
            exact = replace(exact, data=replace(exact.data, cache=str(cache)))
        engine = Engine(EngineConfig.from_config(_without_balance(exact)), ranks)
        steps, images = awkward_preferences(engine, subject.path, hf.vocabulary_size(subject.path), exact)
        randomize_adapters(engine)
        disturb_weights(engine)
        recipe, documents = Dpo(exact), preference_data(engine, steps, exact, images)
        counts = [sum(len(example) for example in step) for step in steps]
        prepared = RecipeSteps(engine, recipe, documents, counts, paired=exact.preference.is_paired)
        readings = Readings(None)
        reference = recipe.readings
        if exact.preference.has_reference:
            if reference.engine not in (None, engine):
                metadata = reference.engine.planner.metadata(documents)
                cut_documents(reference.engine, max(lengths_of(documents)), metadata)
            readings = Readings(reference.sums_of(TRAINED, range(len(documents))))
        for seed in range(1, 9):
            kl = 0.0
            if "kto" in exact.preference.losses:
                kl = answers.mismatched_kl(exact, engine, reference, documents, prepared.indices(0))
            if shows_whole_step(exact, read_sums(engine, choose(documents, prepared.indices(0))), readings, kl):
                break
            disturb_weights(engine, seed)
        readings = replace(readings, kl=kl)
        flight.enter(flight.ENDLESS)
        figures, worst = verify_preferences(
            engine, subject.path, exact, prepared, steps, readings, LEARNING_RATE, images
        )
        del engine, recipe, prepared, reference
    verdict = check(config, subject, ranks, options)
    losses, against = " + ".join(exact.preference.losses), exact.reference.path or "the model before training"
    image_words = ", with images" * bool(images)
    remark = f"dpo      {losses}{f' against {against}' if exact.preference.has_reference else ''}{image_words}, in fp32"
    return _joined(verdict, figures, worst, remark)


def _with_lossy_steps(
    verdict: Verdict | None, config: Any, exact: Any, subject: VerifiedModel, ranks: Ranks, steps: Sequence[Step]
) -> Verdict | None:
    """The verdict, with figures of the optimizer's steps from equal gradients, if a step rounds something."""
    fsdp = replace(exact.fsdp, master_dtype=config.fsdp.master_dtype)
    if not rounds_steps(exact.optimizer, DTYPES[fsdp.master_dtype]):
        return verdict
    engine = Engine(EngineConfig.from_config(replace(exact, fsdp=fsdp)), ranks)
    figures = compare_steps(engine, subject.path, steps[:3], LEARNING_RATE)
    return None if verdict is None else replace(verdict, figures=[*verdict.figures, *figures])


CHECKS = {"rl": check_rl, "dpo": check_preferences, "distill": check_distillation, "reward": check_reward}


def verified_config(config: Config, path: str) -> Config:
    """The user's config in fp32, with the weights at `path`, no dropout, no noise on embeddings, and an optimizer that
    does not amplify rounding. model.attention becomes auto, because the configured kernel may support only 16-bit
    types. Transforms are omitted, because they are not exact."""
    optimizer: Any = replace(_with_larger_eps(config.optimizer), load_state=False)
    return replace(
        config,
        model=replace(config.model, path=path, init="pretrained", dcp_weights=None, attention="auto", transforms=()),
        lora=replace(config.lora, dropout=0.0),
        train=replace(config.train, neftune_noise_alpha=None),
        fsdp=replace(config.fsdp, param_dtype="fp32", reduce_dtype="fp32", master_dtype="fp32"),
        optimizer=optimizer,
    )


def _with_larger_eps(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The optimizer with EPSILON instead of a smaller epsilon, if it has a single number of that name."""
    if optimizer.name in ("adamw", "muon"):
        return replace(optimizer, eps=max(optimizer.eps, EPSILON), muon_dtype="fp32")
    if optimizer.name == "sgd":
        return optimizer
    parameter = inspect.signature(find_class(optimizer)[0]).parameters.get("eps")
    eps = optimizer.options.get("eps", None if parameter is None else parameter.default)
    if not isinstance(eps, float):
        return optimizer
    return replace(optimizer, options={**optimizer.options, "eps": max(eps, EPSILON)})


def choose_subject(config: SftConfig | RlConfig, options: VerifyOptions, ranks: Ranks, folder: str) -> VerifiedModel:
    """The user's weights, or a copy with random weights. The copy has fewer layers with --layers, or if the reference
    would not fit into memory. folder: where the copy is written; the first rank's is used. Collective."""
    layers = options.layers
    fits = [_fits(config, ranks)]
    dist.broadcast_object_list(fits, src=0, group=ranks.group)  # the free memory may differ between ranks
    if layers is None and not fits[0]:
        # Each pipeline stage of the model, its reference and its critic needs at least one layer.
        roles = (config.reference.pp, config.critic.pp) if isinstance(config, RlConfig) else ()
        layers = max(2, config.mesh.pp, *(pp or 1 for pp in roles))
    if layers is None and config.model.init == "pretrained" and config.model.dcp_weights is None:
        return VerifiedModel(config.model.path, f"{config.model.path}, with its weights")
    shape = hf.read_config(config.model.path)
    words = f"{config.model.path}, random weights"
    if layers is not None:
        shape = fewer_layers(shape, layers, kinds_of(shape))
        why = "--layers" if options.layers is not None else "because the reference would not fit this machine"
        words += f", cut to {counted(shape.get_text_config().num_hidden_layers, 'layer')} ({why})"
    shared = [str(Path(folder) / "model")]
    dist.broadcast_object_list(shared, src=0, group=ranks.group)
    if ranks.local_rank == 0:
        shape.architectures = [hf.model_class(shape).__name__]
        hf.build_random(shape, dtype=torch.float32, attention="eager", seed=config.train.seed).save_pretrained(
            shared[0]
        )
        if isinstance(config, RlConfig):
            load_tokenizer(config.model.path).save_pretrained(shared[0])
    dist.barrier(ranks.group)
    return VerifiedModel(shared[0], words, cut=layers is not None)


def _fits(config: SftConfig | RlConfig, ranks: Ranks) -> bool:
    """Whether the reference fits on this rank's device, and all compared tensors into host memory."""
    shape = hf.without_noise(hf.read_config(config.model.path))
    model = hf.build_meta(shape, dtype=torch.float32, attention="eager")
    weights = sum(p.numel() for p in model.parameters()) * 4
    rl = isinstance(config, RlConfig)
    further_ranks = COPIES_OF_A_RANK * (local_ranks(ranks.world) - 1)
    in_double = COPIES_IN_DOUBLE if config.mesh.tp > 1 else 0
    if weights * (RL_COPIES if rl else COPIES + further_ranks + in_double) > 0.8 * psutil.virtual_memory().available:
        return False
    if ranks.device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(ranks.device)
    return weights * (RL_COPIES if rl else COPIES_ON_DEVICE + in_double) < 0.8 * free
