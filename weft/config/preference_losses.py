"""Facts about the losses of `weft dpo` that the config needs. To add a loss, add a function in
weft/engine/losses/preference/formulas.py, and a line here. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossFacts:
    """reference: whether the loss reads a reference model. paired: whether it compares the two answers of a pair;
    otherwise it reads single answers. whole_step: whether an answer's gradient depends on other pairs, so that weft
    computes all answers of the step first. margin: whether the loss subtracts the column `margin`. smoothing: whether
    it reads preference.label_smoothing. tail: whether preference.ld_alpha has an effect, because the loss reads sums
    over tokens. source: of the formula."""

    source: str
    reference: bool = True
    paired: bool = True
    whole_step: bool = False
    margin: bool = False
    smoothing: bool = False
    tail: bool = True


LOSSES: dict[str, LossFacts] = {
    "sigmoid": LossFacts("DPO, arXiv:2305.18290, equation 7", margin=True, smoothing=True),
    "hinge": LossFacts("SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657", margin=True),
    "ipo": LossFacts("IPO, arXiv:2310.12036, equation 17, of means over tokens"),
    "robust": LossFacts("robust DPO, arXiv:2403.00409, equation 14", margin=True, smoothing=True),
    "exo_pair": LossFacts("EXO, arXiv:2402.00856, equation 16", margin=True, smoothing=True),
    "nca_pair": LossFacts("NCA, arXiv:2402.05369"),
    "bco_pair": LossFacts("BCO, arXiv:2404.04656, without its shift"),
    "sppo_hard": LossFacts("SPPO, arXiv:2405.00675, equation 4.7 with probabilities 1 and 0"),
    "apo_zero": LossFacts("APO, arXiv:2408.06266, equation 7"),
    "apo_down": LossFacts("APO, arXiv:2408.06266, equation 8"),
    "discopop": LossFacts("DiscoPOP, arXiv:2406.08414, equation 5", margin=True),
    "sigmoid_norm": LossFacts("length-normalised DPO, of means over tokens (Tulu 3, arXiv:2411.15124)"),
    "sft": LossFacts("RPO, arXiv:2404.19733: cross entropy of the chosen answers", reference=False, tail=False),
    "aot": LossFacts("AOT, arXiv:2406.05882", whole_step=True, smoothing=True),
    "aot_unpaired": LossFacts("AOT, arXiv:2406.05882", whole_step=True, smoothing=True),
    "simpo": LossFacts("SimPO, arXiv:2405.14734, equation 6", reference=False, margin=True, smoothing=True, tail=False),
    "cpo": LossFacts("CPO, arXiv:2401.08417, equation 3", reference=False, margin=True, smoothing=True, tail=False),
    "orpo": LossFacts("ORPO, arXiv:2403.07691, equations 6 and 7", reference=False, tail=False),
    "kto": LossFacts("KTO, arXiv:2402.01306, equation 8", paired=False, tail=False),
    "apo_zero_unpaired": LossFacts("APO, arXiv:2408.06266, equation 7, answer by answer", paired=False, tail=False),
}
# A user's function: nothing is known about it, so weft computes all answers of the step first.
OF_USER = LossFacts("", whole_step=True, margin=True, smoothing=True)


def facts_of(name: str) -> LossFacts:
    """The facts of a loss by its name or import path."""
    return LOSSES.get(name, OF_USER)
