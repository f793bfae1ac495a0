"""Checks on a small random copy of the architecture, in fp32 on the CPU, before anything large is loaded:

1. Logits equal those of HuggingFace's eager forward of each document alone. 2. Changing one document leaves the logits
of the others unchanged. 3. Training mode, without dropout and jitter, gives the logits of inference with them.

A family that passes packed is laid out packed; one that passes only padded is laid out padded; a family that passes
neither, and whose attention does not use transformers' attention interface, is tried with its own eager code, padded;
weft refuses other families.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import psutil
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.selfcheck.image import check_images, check_videos
from weft.engine.selfcheck.kinds import kinds_of
from weft.engine.selfcheck.shrink import fewer_layers, narrow
from weft.errors import UserError
from weft.models import hf
from weft.models.facts import find_facts, position_limit
from weft.models.families import FAMILIES, OWN_ATTENTION, family_of, with_family
from weft.models.families.family import Layout
from weft.models.mixer_kernels import dispatch_by_device
from weft.models.train_module import TrainModule
from weft.ops import attention
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds, Traits
from weft.parallel.memory import local_ranks
from weft.terminal import byte_count, counted

# Single documents, too, are longer than every window and chunk (16) of a small copy; one has a single token.
# 2, 3 and 4 divide the sum and the longest length, as tp divides rows with sequence parallelism
LENGTHS = (36, 1, 24, 35)
LONGEST = 64 * LENGTHS[0]  # tokens of the longest document with which weights are sought that only long ones use
LOGIT_TOLERANCE = 2e-5  # relative to the largest logit; most families are below 4e-6
# Copies with several state mixers amplify rounding: ten times HuggingFace's own error is allowed, up to this tolerance.
# Mistakes change logits by 1e-3 and more.
WIDEST_TOLERANCE = 1e-4
KNOWN_LAYER_TYPES = {
    "full_attention", "sliding_attention", "chunked_attention", "attention", "linear_attention", "mamba", "conv",
    "recurrent", "hybrid", "dense", "sparse", "moe", "mlp",
}  # fmt: skip


Check = TypeVar("Check", bound=Callable[..., Any])
results: dict[tuple[Any, ...], Any] = {}  # of the checks that this process has run
_replaced: list[str] = []  # names of the code that is replaced now


def compute_result(config: PretrainedConfig, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """The result of a check that this process has not run. Tests replace this function (support/shared_results.py)."""
    return compute()


def once_per_process(check: Check) -> Check:
    """Decorator: a process runs a check once for equal arguments, because a policy, its reference and its critic have
    the same architecture. The check runs on one thread: its operations are so small that several threads are a hundred
    times slower on a busy machine. check: a function of a config and hashable arguments. Errors are not cached."""

    @wraps(check)
    def cached(config: PretrainedConfig, *args: Any, **kwargs: Any) -> Any:
        def compute() -> Any:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return check(config, *args, **kwargs)
            finally:
                torch.set_num_threads(threads)

        of_config = (type(config), config.to_json_string(use_diff=False))
        key = (check.__qualname__, *_replaced, *of_config, args, tuple(sorted(kwargs.items())))
        if key not in results:
            results[key] = compute_result(config, key, compute)
        return results[key]

    return cast(Check, cached)


def forget_checks() -> None:
    """Drop all cached results. Call this when code that the checks run was replaced."""
    results.clear()


@contextmanager
def replaced_code(name: str) -> Iterator[None]:
    """Inside, code that checks run is replaced. Their results are kept under this name; afterwards the earlier results
    are valid again."""
    _replaced.append(name)
    try:
        yield
    finally:
        _replaced.pop()


@dataclass(frozen=True)
class ModelSupport:
    """The result of the checks. uses_bounds: whether the model's forward needs document bounds. error: largest logit
    difference to HuggingFace, relative to the largest logit. attends: whether the model has attention. attention: the
    kinds of its attention calls. mixers: classes of the modules that carry state along the sequence. copy: the small
    copy, in words. head: name of the head. images, videos: why documents with them are refused; empty if they are not.
    longest: tokens of the longest document of the checks; with it, the documents use the weights that only long
    documents use. uses_all: whether they use every weight of the decoder layers.
    """

    layout: Layout
    uses_bounds: bool
    error: float
    attends: bool
    attention: tuple[Traits, ...]
    mixers: tuple[str, ...]
    copy: str
    head: str
    images: str = ""
    videos: str = ""
    longest: int = LENGTHS[0]
    uses_all: bool = True


def implementation(config: PretrainedConfig, kernel: str) -> str:
    """The attention implementation, in transformers' naming, for this architecture."""
    return family_of(config.get_text_config().model_type).attention or f"weft_{kernel}"


def resolve_attention(config: PretrainedConfig) -> None:
    """Register, in this process, an architecture that must run with its own attention code (`examine`). For processes
    that have not built an engine of it."""
    if _may_have_own_attention(config):
        with suppress(UserError):  # the training process prints the warning
            examine(hf.without_noise(copy.deepcopy(config)))


def _may_have_own_attention(config: PretrainedConfig) -> bool:
    is_known = config.get_text_config().model_type in FAMILIES
    return not is_known and not hf.uses_attention_interface(config)


def compute_exactly(model: PreTrainedModel) -> None:
    """Select the attention and experts code that rl.on_policy=exact needs, together with weft.ops.exact.numerics."""
    hf.set_attention(model, implementation(model.config, attention.EXACT))
    hf.run_experts_one_by_one(model)


def check_kernel(
    config: PretrainedConfig, kernel: str, support: ModelSupport, device: torch.device, compute: torch.dtype
) -> None:
    """Raises UserError if model.attention names a kernel that cannot serve this model, device or dtype."""
    if kernel == "auto":
        return
    if implementation(config, kernel) != f"weft_{kernel}" or not support.attends:
        reason = "computes attention in its own code" if support.attends else "has no attention"
        raise UserError(
            f"model.attention={kernel} would have no effect: {config.get_text_config().model_type} {reason}. "
            "Set model.attention=auto."
        )
    unserved: dict[str, list[Traits]] = {
        name: [traits for traits in support.attention if not of_table.suits(device, compute, traits)]
        for name, of_table in attention.KERNELS.items()
    }
    if unserved[kernel]:
        able = [name for name, lacking in unserved.items() if not lacking]
        remedy = attention.KERNELS[kernel].remedy(device, compute, support.attention)
        raise UserError(
            f"model.attention={kernel} cannot serve this run: {str(compute).removeprefix('torch.')} on {device.type}, "
            f"{' and '.join(map(str, unserved[kernel]))}. {remedy} model.attention to auto or {' or '.join(able)}."
        )


@once_per_process
def examine(config: PretrainedConfig, noise: hf.Noise = ()) -> ModelSupport:
    """Run the checks for this architecture. noise: dropout and jitter of the model's config, which are 0 in `config`.
    If its attention does not use transformers' interface, its own eager code is tried on padded documents, and is used
    in this process if it is exact. Raises UserError, with the family, if no layout is exact."""
    hf.register_kernels()
    text = config.get_text_config()
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - KNOWN_LAYER_TYPES)
    if unknown and family_of(text.model_type).attention is None:
        raise _refusal(
            text, f"weft does not know whether layers of type {', '.join(unknown)} isolate the documents of a row"
        )
    try:
        return _examine(config, noise)
    except UserError as refused:
        if not _may_have_own_attention(config):
            raise
        with suppress(UserError), with_family(text.model_type, OWN_ATTENTION):
            return _examine(config, noise)
        raise refused from None


def _examine(config: PretrainedConfig, noise: hf.Noise) -> ModelSupport:
    family = family_of(config.get_text_config().model_type)
    small, reference, words = small_copies(config, "per_document")
    module = TrainModule(small).eval()
    longest, uses_all = _longest_document(reference)
    documents = documents_of(text_vocabulary(module), longest)
    expected = [_reference_logits(reference, ids) for ids in documents]
    tolerance = _tolerance(reference, documents, expected)
    _check_noise(config, reference, noise, documents[0], expected[0])
    layouts: list[Layout] = ["padded"] if family.layout == "padded" else ["packed", "padded"]
    worst, kinds = float("inf"), set[Traits]()
    for layout in layouts:
        uses_bounds = family.attention is None and hf.accepts(module.base, BOUNDS_ARGUMENT)
        if layout == "packed" and not uses_bounds:
            continue
        try:
            with attention.watched(lambda call: kinds.add(call.traits)):
                worst, logits = _check_layout(module, documents, expected, layout, uses_bounds)
        except Exception as error:  # bounds did not reach attention, or the family's code cannot run this layout
            if layout == layouts[-1]:
                raise _refusal(config, str(error)) from error
            continue
        if (
            worst <= tolerance
            or _differs_in_double(module, reference, documents, layout, uses_bounds) <= LOGIT_TOLERANCE
        ):
            _check_training_mode(config, module, documents, logits, layout, uses_bounds)
            attends = family.attention is not None or bool(kinds)
            images = (
                check_images(module, reference, WIDEST_TOLERANCE) if layout == "packed" else "its documents are padded"
            )
            videos = images or check_videos(module, reference, WIDEST_TOLERANCE)
            return ModelSupport(
                layout, uses_bounds and (attends or bool(module.mixers)), worst, attends, tuple(sorted(kinds)),
                tuple(sorted({type(boundary.mixer).__name__ for boundary in module.mixers.values()})), words,
                module.facts.head, images, videos, longest, uses_all,
            )  # fmt: skip
    raise _refusal(config, f"its logits differ from HuggingFace's eager forward by {worst:.1e} of the largest logit")


def _differs_in_double(
    module: TrainModule, reference: PreTrainedModel, documents: list[Tensor], layout: Layout, uses_bounds: bool
) -> float:
    """The worst difference of `_check_layout` in fp64. Random copies with many layers, or with experts, can amplify
    fp32 rounding beyond every tolerance. A real difference also appears in fp64."""
    module, reference = copy.deepcopy((module, reference))
    for model in (module, reference):
        hf.run_experts_one_by_one(model)  # torch's grouped matmul does not support fp64
        model.double()
    try:
        with hf.in_double():
            expected = [_reference_logits(reference, ids) for ids in documents]
            return _check_layout(module, documents, expected, layout, uses_bounds)[0]
    except Exception:  # any exception type: the family's code cannot run in fp64
        return float("inf")


@torch.no_grad()
def _tolerance(reference: PreTrainedModel, documents: list[Tensor], expected: list[Tensor]) -> float:
    """Ten times the change that right padding alone makes to HuggingFace's logits, within the two tolerances."""
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    padded = reference(input_ids=ids, use_cache=False).logits
    moved = _largest([a[: len(b)] - b for a, b in zip(padded, expected, strict=True)])
    return max(LOGIT_TOLERANCE, min(WIDEST_TOLERANCE, 10 * float(moved / _largest(expected))))


def _check_noise(
    config: PretrainedConfig, reference: PreTrainedModel, noise: hf.Noise, ids: Tensor, expected: Tensor
) -> None:
    """Raises UserError if logits of inference depend on config keys that should only add noise in training."""
    if not noise:
        return
    noisy = _build(hf.with_noise(copy.deepcopy(reference.config), noise), "eager")
    noisy.load_state_dict(reference.state_dict())
    if not torch.allclose(
        _reference_logits(noisy, ids), expected, rtol=0.0, atol=float(LOGIT_TOLERANCE * expected.abs().max())
    ):
        keys = ", ".join(sorted({name for _, name, _ in noise}))
        raise _refusal(
            config,
            f"its inference depends on {keys}, which weft sets to 0 because they should only add noise in training",
        )


@torch.no_grad()
def _check_training_mode(
    config: PretrainedConfig,
    module: TrainModule,
    documents: list[Tensor],
    expected: list[Tensor],
    layout: Layout,
    uses_bounds: bool,
) -> None:
    """Raises UserError if the model computes differently in training mode, for example if it samples routes. expected:
    its logits in inference mode."""
    logits = logits_of(module.train(), documents, layout, uses_bounds)
    module.eval()
    difference = _largest([a - b for a, b in zip(logits, expected, strict=True)]) / _largest(expected)
    if not difference <= LOGIT_TOLERANCE:
        raise _refusal(
            config, f"its logits in training mode differ by {difference:.1e} from its logits in inference mode"
        )


def text_vocabulary(module: TrainModule) -> int:
    return int(module.head.weight.shape[0])


def _refusal(config: PretrainedConfig, reason: str) -> UserError:
    return UserError(
        f"model.path: weft does not train model_type {config.get_text_config().model_type!r} "
        f"({', '.join(config.architectures or ['no architecture named'])}): {reason}."
    )


def small_copy(config: PretrainedConfig, kernel: str = "auto") -> PreTrainedModel:
    """A small random model of this architecture with weft's attention. Raises UserError if none can be built."""
    hf.register_kernels()
    return small_copies(config, kernel)[0]


def small_copies(config: PretrainedConfig, kernel: str) -> tuple[PreTrainedModel, PreTrainedModel, str]:
    """(a random model as weft runs it, the same model as HuggingFace's eager code runs it, its description).

    It has every kind of layer that the whole model has. Raises UserError if no such copy can be built.
    """
    try:
        kinds = kinds_of(config)
        fewer = fewer_layers(config, 2, kinds)
        count = counted(fewer.get_text_config().num_hidden_layers, "layer")
    except UserError:
        raise
    except Exception as error:  # any exception type: the family's code failed on its config
        raise _refusal(config, f"no model could be built from its config ({error})") from error
    failure = ""
    # Try the cheapest copy first.
    shrinkings: list[tuple[str, Callable[[], PretrainedConfig]]] = [
        (f"{count}, narrow", lambda: narrow(fewer)),
        ("all layers, narrow", lambda: narrow(config)),
        (count, lambda: copy.deepcopy(fewer)),
    ]
    for words, make in shrinkings:
        try:
            small = make()
            _require_room(small)
            model, reference = (_build(copy.deepcopy(small), name) for name in (implementation(small, kernel), "eager"))
            has_all_kinds = kinds.are_those_of(reference)
            _reference_logits(reference, torch.arange(3))
        except UserError:
            raise
        except Exception as error:  # the family's code does not support these shapes
            failure = failure or f"{type(error).__name__}: {error}"
            continue
        if has_all_kinds:
            reference.load_state_dict(model.state_dict())
            return model, reference, words
        failure = failure or f"a copy with {words} does not have the same kinds of layers as the model"
    raise _refusal(config, f"weft could not build a small copy of it ({failure})")


def _require_room(config: PretrainedConfig) -> None:
    """Raises ValueError if a copy needs more than half of the free memory. Each rank builds it twice, and some families
    can only be copied at full width."""
    weights = sum(p.numel() for p in hf.build_meta(config, dtype=torch.float32, attention="eager").parameters())
    room = psutil.virtual_memory().available / 2 / local_ranks(1)
    if 2 * 4 * weights > room:
        raise ValueError(f"a copy would have {weights:,} weights, too many for {byte_count(int(room))} of memory")


def _build(config: PretrainedConfig, name: str) -> PreTrainedModel:
    model = hf.build_random(config, dtype=torch.float32, attention=name, seed=0).eval()
    for kind in {type(module) for module in model.modules()}:
        dispatch_by_device(kind)  # else transformers calls fla's kernels, if installed, with CPU tensors
    with torch.no_grad():  # weights of exactly 0 or 1 would hide mistakes
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim < 2 or not parameter.any():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def documents_of(vocabulary: int, longest: int = LENGTHS[0]) -> list[Tensor]:
    """Random ids of the lengths in LENGTHS, each below `vocabulary`. longest: length of the first document."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, vocabulary, (n,), generator=generator) for n in (longest, *LENGTHS[1:])]


def _longest_document(reference: PreTrainedModel) -> tuple[int, bool]:
    """(tokens of the longest document of the checks; whether it uses all weights of the decoder layers). It is longer
    than LENGTHS[0] only if further weights are used with it."""
    tokens = longest = LENGTHS[0]
    fewest = _unused_weights(reference, longest)
    while fewest and tokens < LONGEST and position_limit(reference.config.get_text_config()) is None:
        tokens *= 4
        try:
            unused = _unused_weights(reference, tokens)
        except Exception:  # any exception type: more tokens than the family's code supports
            break
        if unused < fewest:
            longest, fewest = tokens, unused
    return longest, fewest == 0


def _unused_weights(reference: PreTrainedModel, tokens: int) -> int:
    """Number of weights in the decoder layers that a document of this length does not use: their module does not run,
    and they have no gradient. Modules that choose keys run without a gradient; some code reads weights of modules that
    do not run."""
    layers, ran = f"{find_facts(reference).layers}.", set[nn.Module]()
    modules = [module for name, module in reference.named_modules() if name.startswith(layers)]
    hooks = [module.register_forward_hook(lambda module, *_: ran.add(module)) for module in modules]
    ids = documents_of(int(reference.config.get_text_config().vocab_size), tokens)[0]
    logits = reference(input_ids=ids[None], use_cache=False).logits
    for hook in hooks:
        hook.remove()
    weights = [p for module in modules if module not in ran for p in module.parameters(recurse=False)]
    weights = [p for p in weights if p.requires_grad]
    if not weights:
        return 0
    return sum(gradient is None for gradient in torch.autograd.grad(logits.sum(), weights, allow_unused=True))


@torch.no_grad()
def _reference_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids[None], use_cache=False).logits[0]


@torch.no_grad()
def logits_of(module: TrainModule, documents: list[Tensor], layout: Layout, uses_bounds: bool) -> list[Tensor]:
    """Logits [T, V] of each document, from one row of this layout."""
    head = module.head
    hidden = hidden_of(module, documents, layout, uses_bounds)
    return [head.transform(torch.nn.functional.linear(h, head.weight, head.bias)) for h in hidden]


def hidden_of(module: TrainModule, documents: list[Tensor], layout: Layout, uses_bounds: bool) -> list[Tensor]:
    """Last hidden states [T, H] of each document, from one row of this layout. uses_bounds: as in ModelSupport."""
    lengths, device = tuple(len(ids) for ids in documents), module.head.weight.device
    if layout == "packed":
        bounds = Bounds.packed(lengths, device) if uses_bounds else None
        ids, positions = torch.cat(documents)[None], torch.cat([torch.arange(n) for n in lengths])[None]
        return list(module.hidden(ids.to(device), positions.to(device), bounds)[0].split(lengths))
    bounds = Bounds((max(lengths),) * len(lengths), padded=True) if uses_bounds else None
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    positions = torch.arange(ids.shape[1]).repeat(len(documents), 1)
    hidden_BTH = module.hidden(ids.to(device), positions.to(device), bounds)
    return [hidden_TH[:n] for hidden_TH, n in zip(hidden_BTH, lengths, strict=True)]


def _check_layout(
    module: TrainModule, documents: list[Tensor], expected: list[Tensor], layout: Layout, uses_bounds: bool
) -> tuple[float, list[Tensor]]:
    """(the largest difference to HuggingFace's logits, or to a document's logits after another document changed,
    relative to the largest logit; the logits of each document)."""
    logits = logits_of(module, documents, layout, uses_bounds)
    scale = _largest(expected)
    worst = [_largest([a - b for a, b in zip(logits, expected, strict=True)])]
    for index in (0, 2):
        changed = list(documents)
        changed[index] = (documents[index] + 7) % text_vocabulary(module)
        moved = logits_of(module, changed, layout, uses_bounds)
        neighbours = [i for i in range(len(documents)) if i != index]
        worst.append(_largest([moved[i] - logits[i] for i in neighbours]))
    return float(torch.stack(worst).max() / scale), logits


def _largest(tensors: list[Tensor]) -> Tensor:
    """The largest magnitude of all elements; NaN if any element is, unlike Python's max."""
    return torch.stack([tensor.abs().max() for tensor in tensors]).max()
