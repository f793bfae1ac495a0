"""Renders a config as plain data and as YAML. load_config reads the same config from this YAML."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from weft.config.keys import default_of, get, schema_keys
from weft.config.urls import named
from weft.config.validate import inert_keys
from weft.config.yaml12 import Dumper


def to_dict(config: Any) -> dict[str, dict[str, Any]]:
    """section -> key -> value, for JSON or YAML. Keys that have no effect in this config are omitted."""
    rendered: dict[str, dict[str, Any]] = {}
    unread = inert_keys(config)
    for name in schema_keys(type(config)):
        section, _, leaf = name.partition(".")
        if name not in unread:
            value = get(config, name)
            rendered.setdefault(section, {})[leaf] = plain_value(value)
    return rendered


def plain_value(value: Any) -> Any:
    """A value as plain lists and mappings. Records (a source, a group) contain only the fields that differ from their
    defaults. A local copy becomes its URL."""
    if isinstance(value, str):
        return named(value)
    if is_dataclass(value):
        values = {spec: getattr(value, spec.name) for spec in fields(value)}
        return {spec.name: plain_value(item) for spec, item in values.items() if item != default_of(spec)}
    if isinstance(value, tuple | list):
        return [plain_value(item) for item in value]
    return {name: plain_value(item) for name, item in value.items()} if isinstance(value, dict) else value


def to_yaml(config: Any) -> str:
    """The resolved config as YAML, with every default filled in."""
    return str(yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True))
