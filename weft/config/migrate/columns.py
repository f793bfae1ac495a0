"""The data sections of other trainers' configs as keys of weft: columns, roles, lists of sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.config.migrate.draft import Draft
from weft.config.migrate.names import entry_of
from weft.config.migrate.trainer import TABLES
from weft.config.sources import MESSAGE_KEYS

# axolotl's names for the keys of messages: one mapping, ours -> theirs, or a name for each key. weft knows ShareGPT's
# names.
_MAPPINGS = "message_property_mappings"
_KEYS = {"message_field_role": "role", "message_field_content": "content", "message_field_training": "train"}
_SHAREGPT = {"role": "from", "content": "value"}
_TYPE = "weft renders conversations, and columns of instructions, with the tokenizer's chat template, not as {type}."


def take_columns(draft: Draft, column_settings: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """Set data.columns for columns that weft would not find by their names. column_settings: the trainer's key -> the
    column. settings: all names of the config with their values."""
    names = {**TABLES.columns, **(draft.job.columns if draft.job else {})}
    columns = {names[draft.entry(name)]: column for name, column in column_settings.items()}
    values = {entry_of(name): value for name, value in settings.items()}
    if "messages" in columns and "instruction" in columns:  # verl has both columns, and a switch
        for unused in ("instruction", "output") if values.get("multiturn.enable") else ("messages",):
            columns.pop(unused, None)
    for our_name, inside in (("instruction", "prompt_dict_keys"), ("output", "response_dict_keys")):
        path = values.get(inside)
        if our_name in columns and path:  # verl: the path of the text within the column
            columns[our_name] = ".".join([columns[our_name], *map(str, path if isinstance(path, list) else [path])])
    if "output" not in columns:
        columns.pop("instruction", None)  # the prompts of reinforcement learning
    if any(foreign != our_name for our_name, foreign in columns.items()):
        draft.take(
            "data.columns",
            columns,
            next(iter(column_settings)),
            ", ".join(map(draft.entry, column_settings)),
        )


def take_sources(draft: Draft, name: str, entries: Any) -> None:
    """Set data.path or data.sources, or the same keys of eval, from axolotl's list of data sets."""
    named = [key for key, key_of_source in TABLES.shared.sources.keys.items() if key_of_source == "path"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and {*named} & {*entry} for entry in entries):
        draft.notes[name] = "it is not a list of data sets with paths."
        return
    section = TABLES.shared.sources.lists[name]
    sources = [_source(draft, name, entry) for entry in entries]
    stems = [source.get("name") or Path(str(source["path"])).stem for source in sources]
    for index, source in enumerate(sources):  # a data set may be listed several times
        if (before := stems[:index].count(stems[index])) > 0:
            source["name"] = f"{stems[index]}-{before + 1}"
    if len(sources) > 1 or (section == "eval" and len(sources[0]) > 1):
        draft.take(f"{section}.sources", sources, name)
    elif sources:
        for leaf, value in sources[0].items():
            draft.take(f"{section}.{leaf}", value, name)


def take_datasets(draft: Draft, section: str, value: Any, name: str) -> None:
    """Set data.path or data.sources, or the same keys of eval, from ms-swift's data sets: PATH, PATH:SUBSET,
    PATH#ROWS. section: data or eval."""
    sources = []
    for text in value if isinstance(value, list) else [value]:
        path, _, rows = str(text).partition("#")
        path, _, subset = path.removeprefix("hf::").removeprefix("HF::").partition(":")
        source = {"path": path} | ({"subset": subset} if subset else {})
        if rows:
            split = "" if Path(path).suffix else "train"
            source["split"] = f"{split}[:{rows}]"
            draft.notes[f"{name} {text}"] = f"these were {rows} rows drawn at random; the draft uses the first {rows}."
        sources.append(source)
    if len(sources) > 1:
        draft.take(f"{section}.sources", sources, name)
    for leaf, value in sources[0].items() if len(sources) == 1 else ():
        draft.take(f"{section}.{leaf}", value, name)


def _source(draft: Draft, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of the list as a source of weft. Its other keys are noted in draft.notes."""
    table = TABLES.shared.sources
    source: dict[str, Any] = {leaf: entry[key] for key, leaf in table.keys.items() if entry.get(key) is not None}
    files = entry.get("data_files")
    path = source["path"]
    if isinstance(files, str | list) and len([files] if isinstance(files, str) else files) == 1:
        source["path"] = files if isinstance(files, str) else files[0]
    columns = {leaf: entry[key] for key, leaf in table.columns.items() if entry.get(key) not in (None, leaf)}
    if columns:
        source["columns"] = columns
    if isinstance(entry.get("roles"), dict):
        roles = {
            str(foreign_role): leaf
            for leaf, foreign in entry["roles"].items()
            for foreign_role in foreign or ()
            if foreign_role != leaf
        }
        if roles:
            draft.take("data.roles", {**draft.value("data.roles", {}), **roles}, f"{name}.roles")
    mapped = dict(entry.get(_MAPPINGS) or {}) if isinstance(entry.get(_MAPPINGS), dict) else {}
    mapped |= {leaf: entry[key] for key, leaf in _KEYS.items() if entry.get(key) is not None}
    keys = {leaf: str(foreign) for leaf, foreign in mapped.items() if leaf in MESSAGE_KEYS and foreign != leaf}
    keys = {leaf: foreign for leaf, foreign in keys.items() if _SHAREGPT.get(leaf) != foreign}
    if keys:
        draft.take("data.message_keys", {**draft.value("data.message_keys", {}), **keys}, f"{name}.{_MAPPINGS}")
    if unknown := [leaf for leaf in mapped if leaf not in MESSAGE_KEYS]:
        draft.notes[f"{name}.{_MAPPINGS}"] = f"weft has no message key {unknown[0]}: set data.message_keys."
    for key in ("step_separator", "train_on_last_step_only"):  # keys of process rewards
        if entry.get(key) is not None and f"reward.{key}" in draft.keys:
            draft.take(f"reward.{key}", entry[key], f"{name}.{key}")
    handled = {
        "step_separator",
        "train_on_last_step_only",
        *table.keys,
        *table.columns,
        "roles",
        _MAPPINGS,
        *_KEYS,
        *(("data_files",) if source["path"] != path else ()),
    }
    for key, value in entry.items():
        if key not in handled and value is not None and value not in table.silent.get(key, (False,)):
            text = _TYPE.format(type=value) if key == "type" else f"sources of weft have no such key ({value})."
            draft.notes[f"{name}.{key}"] = text
    return source


def columns_of_sources(draft: Draft) -> None:
    """Move data.columns into each source."""
    if "data.sources" not in draft.values or "data.columns" not in draft.values:
        return
    columns, _, _ = draft.values.pop("data.columns")
    if "eval.path" in draft.values:
        path, origin, name = draft.values.pop("eval.path")
        draft.values["eval.sources"] = ([{"path": path}], origin, name)
    for key in ("data.sources", "eval.sources"):
        if key in draft.values:
            sources, origin, name = draft.values[key]
            draft.values[key] = ([{**source, "columns": columns} for source in sources], origin, name)


def take_adapted(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set lora.targets from torchtune's three keys."""
    values = {name.rpartition(".")[2]: value for name, value in settings.items()}
    modules = values.get("lora_attn_modules")
    if not isinstance(modules, list):
        return
    targets = ["o_proj" if module == "output_proj" else module for module in modules]
    targets += ["gate_proj", "up_proj", "down_proj"] if values.get("apply_lora_to_mlp") else []
    targets += ["lm_head"] if values.get("apply_lora_to_output") else []
    draft.take("lora.targets", targets, "lora_attn_modules")
    for name in list(draft.notes):
        if name.rpartition(".")[2] in ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output"):
            del draft.notes[name]
