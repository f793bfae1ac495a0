"""A config back into plain data and YAML that load_config reads to the same config."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from weft.config.checks import inert_keys
from weft.config.keys import default_of, get, schema_keys
from weft.config.yaml12 import Dumper


def to_dict(config: Any) -> dict[str, dict[str, Any]]:
    """section -> key -> value, for JSON or YAML. Keys that this config does not read are left out."""
    rendered: dict[str, dict[str, Any]] = {}
    unread = inert_keys(config)
    for name in schema_keys(type(config)):
        section, _, leaf = name.partition(".")
        if name not in unread:
            value = get(config, name)
            rendered.setdefault(section, {})[leaf] = _plain(value)
    return rendered


def to_yaml(config: Any) -> str:
    """The resolved config as a YAML file, every default filled in."""
    return str(yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def _plain(value: Any) -> Any:
    """Tuples as lists, and of a dataclass in a list (a source of data.sources) what differs from its defaults."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        given = {spec.name: getattr(value, spec.name) for spec in fields(value)}
        defaults = {spec.name: default_of(spec) for spec in fields(value)}
        return {name: item for name, item in given.items() if item != defaults[name]}
    return value
