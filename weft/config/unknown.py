"""What to say of a key that weft does not have."""

from __future__ import annotations

import difflib

from weft.config.aliases import advice_for, not_yet
from weft.config.keys import schema_keys, sections
from weft.config.yaml12 import Node


def unknown_key(name: str, node: Node, schema: type) -> list[str]:
    """One message for each thing wrong with the key or section `name`, which the schema does not have."""
    planned = not_yet(name)
    if planned is not None:
        return [f"{node.where}: {name} is not in this version yet: leave it out."]
    advice = advice_for(name)
    if node.is_section and (_any_advice(node) or (node.value and not advice and not _near_section(name, schema))):
        return [line for leaf, child in node.value.items() for line in unknown_key(f"{name}.{leaf}", child, schema)]
    if advice is not None:
        return [f"{node.where}: {name} is not a key of weft: {advice}"]
    return [f"{node.where}: {name} is not a key of weft: {_nearest(name, schema)}"]


def _any_advice(node: Node) -> bool:
    return any(advice_for(leaf) or (child.is_section and _any_advice(child)) for leaf, child in node.value.items())


def _near_section(name: str, schema: type) -> bool:
    return "." not in name and bool(difflib.get_close_matches(name, sections(schema), cutoff=0.75))


def _nearest(name: str, schema: type) -> str:
    """The same leaf elsewhere, else names spelled alike, else what there is."""
    keys = schema_keys(schema)
    section, _, leaf = name.rpartition(".")
    candidates = [key.name for key in keys.values() if key.leaf == leaf]
    candidates = difflib.get_close_matches(name, candidates, n=1, cutoff=0.75) or candidates
    if not candidates and not section:
        candidates = difflib.get_close_matches(name, sections(schema), n=1, cutoff=0.75)
    if not candidates and section in sections(schema):
        own = [key.leaf for key in keys.values() if key.name.startswith(section + ".")]
        candidates = [f"{section}.{match}" for match in difflib.get_close_matches(leaf, own, n=2)]
    if not candidates:
        candidates = difflib.get_close_matches(name, keys, n=2, cutoff=0.7)
    if candidates:
        return f"did you mean {' or '.join(candidates)}?"
    if section in sections(schema):
        own = [key.leaf for key in keys.values() if key.name.startswith(section + ".")]
        return f"{section} has {', '.join(own)}."
    return f"the sections are {', '.join(sections(schema))} (docs/config.md lists their keys)."
