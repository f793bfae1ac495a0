"""Memory while a base is quantised from bf16 files: the process's largest anonymous memory, above its own at the start.

    python benchmarks/load_quantised.py                # 8B in the shape of Llama 3; 10 GiB of memory
    python benchmarks/load_quantised.py --layers 4 --bases nf4

The file of weights is sparse: zeros that take no disk, which changes neither memory nor the bytes that are read.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.load import LoadPeak


def make_source(folder: Path, layers: int) -> None:
    """A bf16 checkpoint of zeros in the shape of Llama 3 8B, with so many layers."""
    from transformers import LlamaConfig

    from weft.models import hf
    from weft.parallel.shards.layout import map_tensors

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    entries, end = {}, 0
    for mapping in map_tensors(hf.build_meta(config, dtype=torch.bfloat16, attention="eager"), None):
        begin, end = end, end + 2 * prod(mapping.shape)
        entries[mapping.disk] = {"dtype": "BF16", "shape": list(mapping.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def measure(path: str, base: str) -> None:
    """Load the base in this process, and print a row of the table."""
    from weft.config.schema import FsdpConfig, LoraConfig, ModelConfig
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.launch.process import join
    from weft.parallel.shards.boxes import local_box

    config = EngineConfig(
        model=ModelConfig(path=path), lora=LoraConfig(rank=16, base=base), fsdp=FsdpConfig(param_dtype="bf16")
    )
    with join("cpu") as ranks:
        with LoadPeak() as peak:
            engine = Engine(config, ranks)
        sizes = [local_box(tensor)[1].nbytes for tensor in engine.module.state_dict(keep_vars=True).values()]
        print(f"| {base} | {sum(sizes) / 2**30:.2f} | {max(sizes) / 2**30:.2f} | {peak.most / 2**30:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--bases", nargs="+", default=["nf4", "int8", "fp8"])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(*arguments.measure)
    print("| base | parameters, GiB | the largest, GiB | peak while loading, GiB |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_source(Path(folder), arguments.layers)
        for base in arguments.bases:
            subprocess.run([sys.executable, __file__, "--measure", folder, base], check=True)


if __name__ == "__main__":
    main()
