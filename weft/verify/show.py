"""Prints the verdict as a table: comparison, difference, tolerance, and the reference's noise if it was measured."""

from __future__ import annotations

from rich.table import Table

from weft.config.mesh import resolve_mesh
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.launch.process import Ranks
from weft.terminal import Console
from weft.verify.harness import Figure, Verdict
from weft.verify.plants import Plant


def print_verdict(
    verdict: Verdict, config: SftConfig | RlConfig, ranks: Ranks, subject: str, plant: Plant | None
) -> None:
    """Print the verdict to standard output, as plain text if that is not a terminal. subject: the model, in words.
    plant: the planted bug, if any."""
    console = Console(width=None if Console().is_terminal else 120)
    sizes = resolve_mesh(config.mesh, ranks.world)
    console.print(f"model    {subject}")
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.named.items() if axis != "ep")
    experts = f", experts over {sizes.ep}," if sizes.ep > 1 else ""
    console.print(f"mesh     {axes}{experts} on {ranks.device.type}")
    reference_name = "peft on transformers, random adapters" if config.lora.rank is not None else "transformers alone"
    reference_name = (
        "peft on transformers, the adapter of lora.path" if config.lora.path is not None else reference_name
    )
    console.print(f"against  {reference_name}: one process, fp32, eager attention, one document at a time")
    if isinstance(config, SftConfig) and config.train.loss is not None:
        console.print(f"loss     cross entropy; {config.train.loss} is compared on the documents of the first step")
    if isinstance(config, RlConfig):
        console.print(f"update   {config.rl.algorithm}: the same rollouts on both sides")
    if plant is not None:
        console.print(f"planted  {plant.name}: {plant.summary} ({plant.hits} hits)")
    console.print(_table("check", verdict.figures))
    console.print(_table("parameters whose gradients differ most", verdict.worst))
    for remark in verdict.remarks:
        console.print(remark)
    if verdict.passed:
        console.print("PASS: on this mesh, loss, gradients and weights are those of one plain process.")
    else:
        console.print(f"FAIL: over tolerance: {', '.join(verdict.failed)}.", soft_wrap=True)


def _table(title: str, figures: list[Figure]) -> Table:
    table = Table(box=None, pad_edge=False)
    measured = any(figure.noise is not None for figure in figures)
    table.add_column(title)
    for name in ("differs by", "allowed", *(["noise"] * measured)):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("where", overflow="fold")
    for figure in figures:
        noise = ["" if figure.noise is None else f"{figure.noise:.1e}"] * measured
        mark = "ok" if figure.passed else "OVER"
        table.add_row(figure.name, f"{figure.value:.1e}", f"{figure.tolerance:.1e}", *noise, mark, figure.note)
    return table
