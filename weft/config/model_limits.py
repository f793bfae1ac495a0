"""Combinations of config and model that config.json of the model rules out. Imports no torch and starts no rank.

The ranks check the model's modules. The checks here refuse a part of it before ranks start, from numbers that
config.json has. A hub id is not downloaded for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft import strict_json
from weft.config.mesh import MeshSizes
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.errors import UserError

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS = ("expert", "moe")  # parts of names and values in config.json of every mixture of experts


def check_model(config: SftConfig | RlConfig, sizes: MeshSizes) -> None:
    """Raises UserError if the model cannot have the mesh, or lacks the parts that a key needs."""
    facts = None if config.model.imports else _read(config.model.path)
    if facts is None:  # or of classes of the user's, whose names say nothing
        return
    text = next((facts[name] for name in ("text_config", "llm_config") if isinstance(facts.get(name), dict)), facts)
    has_experts = any(part in str(facts).lower() for part in _EXPERTS)
    kind, layers = text.get("model_type") or facts.get("model_type"), _number(text, "num_hidden_layers")
    if sizes.ep > 1 and not has_experts:
        raise UserError(f"mesh.ep={sizes.ep}: weft finds no experts in a model of type {kind}. Set mesh.ep=1.")
    experts = next((count for name in _COUNTS if (count := _number(text, name))), None)
    if experts and sizes.ep > experts:
        raise UserError(
            f"mesh.ep={sizes.ep} is more than the {experts} experts of this model. Set mesh.ep to {experts} or less."
        )
    if layers and sizes.pp > layers:
        raise UserError(
            f"mesh.pp={sizes.pp} is more than the {layers} decoder layers of this model allow: set mesh.pp={layers}."
        )
    if config.model.router_aux_loss != "none" and not has_experts:
        raise UserError(
            f"model.router_aux_loss={config.model.router_aux_loss}: {kind} models have no experts to balance. Set "
            "model.router_aux_loss=none."
        )
    if config.model.router_bias_rate is not None and not has_experts:
        raise UserError(f"model.router_bias_rate: {kind} models have no routers. Set model.router_bias_rate=null.")


def _read(path: str) -> dict[str, Any] | None:
    """config.json of a local folder; None if there is none. The code that builds the model reports a damaged file."""
    file = Path(path) / "config.json"
    if not file.is_file():  # reading a FIFO would wait
        return None
    try:
        content = strict_json.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _number(facts: dict[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
