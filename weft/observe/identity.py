"""The identity of a run: values that are compared between ranks at the start, and with a run that is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor
from transformers import PretrainedConfig

from weft.config.render import to_dict
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.data.documents import DataReport
from weft.launch.consistency import versions
from weft.launch.summary import versions as package_versions
from weft.models import hf
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.source import open_model_weights

# Keys that may differ between ranks: data are compared by content.
MAY_DIFFER = ("run.dir", "data.path", "eval.path", "data.sources", "eval.sources", "data.workers", "data.cache")
_LOOKED_AT = 64  # tensors, about, that the fingerprint of a base model samples


def identity(config: SftConfig, data: DataReport) -> dict[str, str]:
    """Name -> value of all that must be equal on every rank: config without MAY_DIFFER, versions, model and data."""
    keys = {f"{section}.{key}": str(v) for section, values in to_dict(config).items() for key, v in values.items()}
    keys = {name: value for name, value in keys.items() if name not in MAY_DIFFER}
    packages = {name: str(version) for name, version in package_versions().items()}
    model = hf.read_config(config.model.path).to_json_string()
    return {
        **keys, **packages, **versions(),
        "config.json of the model": hashlib.blake2b(model.encode(), digest_size=8).hexdigest(),
        "documents of the data": f"{data.documents} ({data.digest})",
    }  # fmt: skip


def model_fingerprint(config: SftConfig | RlConfig) -> str:
    """Digest of the model's config.json without keys that do not affect the computation. With adapters also of a sample
    of the base weights, which no checkpoint holds."""
    raw, _ = PretrainedConfig.get_config_dict(config.model.path)
    for name in ("_commit_hash", "_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        raw.pop(name, None)
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    if config.lora.on:
        for row in _rows_of(config.model.path):
            digest.update(row.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _rows_of(path: str) -> Iterator[Tensor]:
    """Yields the middle row of some of a model's tensors, enough to tell its weights from those of another model."""
    with closing(open_model_weights(path)) as source:
        names = sorted(source.files)
        for name in names[:: -(-len(names) // _LOOKED_AT)]:
            shape = source.files[name].entries[name].shape
            if 0 in shape:
                continue
            middle, rows = tuple(size // 2 for size in shape[:-1]), (1,) * len(shape[:-1])
            yield source.raw(name, Box((*middle, 0), (*rows, shape[-1])) if shape else None).flatten()
