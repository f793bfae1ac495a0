"""The data sections of other trainers' configs as keys of weft: columns, roles, lists of sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.config.migrate.draft import Draft
from weft.config.migrate.names import entry_of
from weft.config.migrate.trainer import TABLES
from weft.config.sources import MESSAGE_KEYS

# axolotl's names of the keys of messages: all of them in one mapping, ours -> theirs, or one at a time. ShareGPT's are
# known to weft.
_MAPPINGS = "message_property_mappings"
_KEYS = {"message_field_role": "role", "message_field_content": "content", "message_field_training": "train"}
_SHAREGPT = {"role": "from", "content": "value"}
_TYPE = "conversations, and columns of instructions, are rendered by the tokenizer's chat template and not as {type}."


def take_columns(draft: Draft, given: Mapping[str, str], found: Mapping[str, Any]) -> None:
    """Set data.columns for columns that weft would not find by name. given: the trainer's key -> the column. found: all
    names of the config with their values."""
    columns = {TABLES.columns[str(entry_of(name))]: column for name, column in given.items()}
    values = {entry_of(name): value for name, value in found.items()}
    if "messages" in columns and "instruction" in columns:  # verl has both, and a switch
        for unused in ("instruction", "output") if values.get("multiturn.enable") else ("messages",):
            columns.pop(unused, None)
    for ours, inside in (("instruction", "prompt_dict_keys"), ("output", "response_dict_keys")):
        path = values.get(inside)
        if ours in columns and path:  # verl: the path of the text within the column
            columns[ours] = ".".join([columns[ours], *map(str, path if isinstance(path, list) else [path])])
    if "output" not in columns:
        columns.pop("instruction", None)  # the prompts of reinforcement learning
    if any(theirs != ours for ours, theirs in columns.items()):
        draft.take("data.columns", columns, next(iter(given)), ", ".join(str(entry_of(name)) for name in given))


def take_sources(draft: Draft, name: str, entries: Any) -> None:
    """Set data.path or data.sources, or the same keys of eval, from axolotl's list of data sets."""
    named = [key for key, ours in TABLES.shared.sources.keys.items() if ours == "path"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and {*named} & {*entry} for entry in entries):
        draft.left[name] = "it is no list of data sets with a path."
        return
    section = TABLES.shared.sources.lists[name]
    sources = [_source(draft, name, entry) for entry in entries]
    if len(sources) > 1 or (section == "eval" and len(sources[0]) > 1):
        draft.take(f"{section}.sources", sources, name)
    elif sources:
        for leaf, value in sources[0].items():
            draft.take(f"{section}.{leaf}", value, name)


def _source(draft: Draft, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of the list as a source of weft. Its other keys are noted in draft.left."""
    known = TABLES.shared.sources
    source: dict[str, Any] = {ours: entry[key] for key, ours in known.keys.items() if entry.get(key) is not None}
    files = entry.get("data_files")
    given = source["path"]
    if isinstance(files, str | list) and len([files] if isinstance(files, str) else files) == 1:
        source["path"] = files if isinstance(files, str) else files[0]
    columns = {ours: entry[key] for key, ours in known.columns.items() if entry.get(key) not in (None, ours)}
    if columns:
        source["columns"] = columns
    if isinstance(entry.get("roles"), dict):
        roles = {str(one): ours for ours, theirs in entry["roles"].items() for one in theirs or () if one != ours}
        if roles:
            draft.take("data.roles", {**draft.value("data.roles", {}), **roles}, f"{name}.roles")
    mapped = dict(entry.get(_MAPPINGS) or {}) if isinstance(entry.get(_MAPPINGS), dict) else {}
    mapped |= {ours: entry[key] for key, ours in _KEYS.items() if entry.get(key) is not None}
    keys = {ours: str(theirs) for ours, theirs in mapped.items() if ours in MESSAGE_KEYS and theirs != ours}
    keys = {ours: theirs for ours, theirs in keys.items() if _SHAREGPT.get(ours) != theirs}
    if keys:
        draft.take("data.message_keys", {**draft.value("data.message_keys", {}), **keys}, f"{name}.{_MAPPINGS}")
    if unknown := [ours for ours in mapped if ours not in MESSAGE_KEYS]:
        draft.left[f"{name}.{_MAPPINGS}"] = f"weft has no key of a message {unknown[0]}: data.message_keys."
    taken = {
        *known.keys,
        *known.columns,
        "roles",
        _MAPPINGS,
        *_KEYS,
        *(("data_files",) if source["path"] != given else ()),
    }
    for key, value in entry.items():
        if key not in taken and value is not None and value not in known.silent.get(key, (False,)):
            text = _TYPE.format(type=value) if key == "type" else f"weft has no such key of a source ({value})."
            draft.left[f"{name}.{key}"] = text
    return source


def columns_of_sources(draft: Draft) -> None:
    """Move data.columns into each source."""
    if "data.sources" not in draft.taken or "data.columns" not in draft.taken:
        return
    columns, _, _ = draft.taken.pop("data.columns")
    if "eval.path" in draft.taken:
        path, origin, name = draft.taken.pop("eval.path")
        draft.taken["eval.sources"] = ([{"path": path}], origin, name)
    for key in ("data.sources", "eval.sources"):
        if key in draft.taken:
            sources, origin, name = draft.taken[key]
            draft.taken[key] = ([{**source, "columns": columns} for source in sources], origin, name)


def take_adapted(draft: Draft, found: Mapping[str, Any]) -> None:
    """Set lora.targets from torchtune's three keys."""
    values = {name.rpartition(".")[2]: value for name, value in found.items()}
    modules = values.get("lora_attn_modules")
    if not isinstance(modules, list):
        return
    targets = ["o_proj" if module == "output_proj" else module for module in modules]
    targets += ["gate_proj", "up_proj", "down_proj"] if values.get("apply_lora_to_mlp") else []
    targets += ["lm_head"] if values.get("apply_lora_to_output") else []
    draft.take("lora.targets", targets, "lora_attn_modules")
    for name in list(draft.left):
        if name.rpartition(".")[2] in ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output"):
            del draft.left[name]
