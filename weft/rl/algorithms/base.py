"""The declarations in a file of this folder: an algorithm, and the advantages and losses that it adds.

The declarations define the values that the config accepts, the keys without effect, the tables of
docs/reference/algorithms.md, and the plain implementation for `weft verify`. An advantage, a loss and a preset of one
file may be combined with those of other files through the config.

The config reads these files at every start. So their top level imports neither torch nor numpy; functions import
returns.py (NumPy) and plain.py (torch) when they run. Groups and samples are those of weft/inference/types.py, tokens
those of weft/engine/losses/policy.py, rows those of weft/verify/rl_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class AdvantageSpec:
    """A value of rl.advantage.

    estimate: (groups, keys of `rl`) -> for each group and sample, a number or an array [G] for its G sampled tokens.
    Every sample of the groups has a reward. plain: (rows, rewards, keys of `rl`) -> for each row, a tensor [G] in fp64;
    rewards: for each row, [G] rewards of its tokens. It must share no code with `estimate`, because `weft verify`
    compares the two. formula: for the docs. reads: keys of `rl` that only some advantages read. compares_group: whether
    a reward is compared with those of the same prompt. needs_critic: whether a critic's values are read. per_token:
    whether the advantages of a sample's tokens depend on how many tokens it has, or on their order.
    """

    name: str
    estimate: Callable[[Sequence[Any], Any], Sequence[Sequence[Any]]]
    plain: Callable[[Sequence[Any], Sequence[Any], Any], Sequence[Any]]
    formula: str
    reads: tuple[str, ...] = ()
    compares_group: bool = False
    needs_critic: bool = False
    per_token: bool = False


@dataclass(frozen=True)
class TokenLossSpec:
    """A value of rl.policy_loss.

    loss: (tokens of a row, keys of `rl`) -> [N] the loss of each token. plain: (logprobs [G], row, keys of `rl`) ->
    [G]; it must share no code with `loss`. formula: for the docs. reads: keys of `rl` that only some losses read.
    ratio: the attribute of the tokens with the ratio that metrics report: of a token, of a sample's mean, or of a whole
    sample. clipping: which tokens outside of rl.clip count as clipped: `all`, `growing` (only where the advantage would
    move the ratio further away), or `none`.
    """

    name: str
    loss: Callable[[Any, Any], Any]
    plain: Callable[[Any, Any, Any], Any]
    formula: str
    reads: tuple[str, ...] = ("clip", "dual_clip")
    ratio: Literal["ratio", "sequence_ratio", "product_ratio"] = "ratio"
    clipping: Literal["all", "growing", "none"] = "growing"


@dataclass(frozen=True)
class AlgorithmSpec:
    """A value of rl.algorithm. paper: its number at arXiv. preset: key of `rl` -> value as in the paper; other keys
    have the schema's default."""

    name: str
    paper: str
    preset: Mapping[str, Any]


Spec = AdvantageSpec | TokenLossSpec | AlgorithmSpec
