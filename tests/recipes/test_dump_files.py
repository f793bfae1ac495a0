"""Batches in the files that other trainers write: each is read as the same samples."""

from __future__ import annotations

import io
import json
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.errors import UserError
from weft.rl.step_dump import StepDump, read_step_dump

P, R, PROMPTS, LENGTHS = 5, 6, (5, 3, 2), (6, 2, 4)
T = P + R


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    """Three sequences in verl's layout: prompts padded on the left, responses on the right. Row 1 has a token of a tool
    in its response."""
    draw = torch.Generator().manual_seed(0)
    attention, mask = torch.zeros(3, T, dtype=torch.long), torch.zeros(3, R, dtype=torch.long)
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        attention[row, P - prompt : P + length] = 1
        mask[row, :length] = 1
    ids = torch.randint(5, 250, (3, T), generator=draw) * attention
    arrays = ("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages")
    floats = {name: torch.randn(3, R, generator=draw) for name in arrays}
    return {"input_ids": ids, "attention_mask": attention, "response_mask": mask, **floats}


def samples_of(batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The sequences without padding; other arrays are those of the response."""
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        yield {
            "input_ids": batch["input_ids"][row, P - prompt : P + length],
            **{name: values[row, :length] for name, values in batch.items() if values.shape[1] == R},
        }


def joined(sample: Mapping[str, Tensor], name: str) -> Tensor:
    """An array of the response, with zeros before it."""
    tokens = len(sample["input_ids"])
    return torch.cat([torch.zeros(tokens - len(sample[name])), sample[name].float()])


def miles(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    samples = list(samples_of(batch))
    names = {
        "tokens": "input_ids", "loss_masks": "response_mask", "log_probs": "old_log_probs",
        "ref_log_probs": "ref_log_prob", "rollout_log_probs": "rollout_log_probs", "advantages": "advantages",
    }  # fmt: skip
    return {
        **{name: [sample[field] for sample in samples] for name, field in names.items()},
        "response_lengths": list(LENGTHS),
        "total_lengths": [a + b for a, b in zip(PROMPTS, LENGTHS, strict=True)],
        "sample_indices": [0, 1, 2],
        "num_microbatches": [1],
        "raw_reward": [1.0, 0.0, 1.0],
    }


def write_miles(batch: Mapping[str, Tensor], folder: Path) -> Path:
    """A file for each of three ranks: two data ranks, the second with two ranks of tensor parallelism."""
    data = miles(batch)
    for rank, rows in enumerate((slice(0, 2), slice(2, 3), slice(2, 3))):
        local = {name: values[rows] if len(values) == 3 else values for name, values in data.items()}
        content = {"rollout_id": 0, "rank": rank, "rollout_data": local, "cp_rank": 0, "cp_size": 1}
        torch.save(content, folder / f"0_{rank}.pt")
    return folder


def write_packed(batch: Mapping[str, Tensor], folder: Path) -> Path:
    data = {name: torch.cat(v) if isinstance(v[0], Tensor) else v for name, v in miles(batch).items()}
    torch.save({"rollout_data": data}, folder / "packed.pt")
    return folder / "packed.pt"


def write_slime(batch: Mapping[str, Tensor], folder: Path) -> Path:
    data = miles(batch)
    columns = {name: values for name, values in data.items() if len(values) == 3}
    samples = [{name: values[row] for name, values in columns.items()} for row in range(3)]
    content = {"format_version": 2, "samples": samples, "dp_shards": [{"rank": 0, "num_microbatches": [1]}]}
    torch.save(content, folder / "slime.pt")
    return folder / "slime.pt"


class FakeModules:
    """Packages that are not installed here, while a file with their classes is written."""

    def __enter__(self) -> tuple[type, Callable[[], None], type]:
        class TensorDict:
            pass

        class DataProto:
            def __getstate__(self) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
                torch.save(self.batch, buffer := io.BytesIO())  # type: ignore[attr-defined]
                return buffer.getvalue(), {"uid": np.array(["a", "b", "c"], object)}, {"temperature": 1.0}

        def _rebuild_tensordict_files_consolidated() -> None:
            pass

        classes = (TensorDict, _rebuild_tensordict_files_consolidated, DataProto)
        for module, value in zip(("tensordict._td", "tensordict._reductions", "verl.protocol"), classes, strict=True):
            value.__module__, value.__qualname__ = module, value.__name__
            sys.modules[module] = types.ModuleType(module)
            setattr(sys.modules[module], value.__name__, value)
            sys.modules.setdefault(module.partition(".")[0], types.ModuleType(module.partition(".")[0]))
        return classes

    def __exit__(self, *error: object) -> None:
        for module in ("tensordict._td", "tensordict._reductions", "verl.protocol", "tensordict", "verl"):
            sys.modules.pop(module, None)


def write_tensordict(batch: Mapping[str, Tensor], folder: Path) -> Path:
    with FakeModules() as (tensordict, _, _):
        content = tensordict()
        content.__dict__ |= {"_tensordict": dict(batch), "_batch_size": torch.Size([3])}
        torch.save(content, folder / "batch.pt")
    return folder / "batch.pt"


def write_nested(batch: Mapping[str, Tensor], folder: Path) -> Path:
    """Nested tensors, as verl's trainers without padding have them; and a tensor with attributes."""
    samples = list(samples_of(batch))
    names = ("input_ids", "response_mask", "old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages")
    content = {
        name: torch.nested.as_nested_tensor([sample[name] for sample in samples], layout=torch.jagged) for name in names
    }
    torch.save(content, folder / "nested.pt")
    return folder / "nested.pt"


def write_dataproto(batch: Mapping[str, Tensor], folder: Path, nested: bool = False) -> Path:
    """As data.save_to_disk does: tensors one after the other in one storage."""
    tensors = dict(batch)
    if nested:
        for name in [name for name in batch if name != "attention_mask"]:
            parts = [sample[name] for sample in samples_of(batch)]
            tensors[f"<NJT_VALUES>{name}"] = torch.cat(parts)
            tensors[f"<NJT_OFFSETS>{name}"] = torch.tensor([0, *np.cumsum([len(part) for part in parts])])
            del tensors[name]
        del tensors["attention_mask"]

    class Consolidated:
        def __reduce__(self) -> Any:
            leaves, parts, start = {}, [], 0
            for name, tensor in tensors.items():
                parts.append(tensor.contiguous().view(-1).view(torch.uint8))
                leaves[name] = (str(tensor.dtype), list(tensor.shape), start, start + len(parts[-1]), 0)
                start += len(parts[-1])
            return rebuild, ({"cls": "TensorDict", "non_tensors": {}, "leaves": leaves}, torch.cat(parts))

    with FakeModules() as (_, rebuild, dataproto):
        data = dataproto()
        data.batch = Consolidated()
        (folder / "data.pkl").write_bytes(pickle.dumps(data))
    return folder / "data.pkl"


def write_trl(batch: Mapping[str, Tensor], folder: Path) -> Path:
    """With the mask of tools apart, and completions whose padding is in no mask but theirs."""
    length = batch["attention_mask"][:, P:]
    content = {
        "prompt_ids": batch["input_ids"][:, :P], "prompt_mask": batch["attention_mask"][:, :P],
        "completion_ids": batch["input_ids"][:, P:], "completion_mask": length,
        "tool_mask": torch.where(length.bool(), batch["response_mask"], 1), "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_log_probs"], "ref_per_token_logps": batch["ref_log_prob"],
        "sampling_per_token_logps": batch["rollout_log_probs"], "num_items_in_batch": batch["response_mask"].sum(),
    }  # fmt: skip
    torch.save(content, folder / "inputs.pt")
    return folder / "inputs.pt"


def write_prime(batch: Mapping[str, Tensor], folder: Path) -> Path:
    """A file for each rank. It has the reference and the old policy nowhere."""
    for rank, sample in enumerate(samples_of(batch)):
        line = {
            "schema_version": 1, "step": 3, "rank": rank, "env_name": "math", "token_ids": sample["input_ids"].tolist(),
            "loss_mask": [bool(value) for value in joined(sample, "response_mask")],
            "advantages": joined(sample, "advantages").tolist(),
            "inference_logprobs": joined(sample, "rollout_log_probs").tolist(),
            "trainer_logprobs": [0.0] * len(sample["input_ids"]), "rl_weights": [None] * len(sample["input_ids"]),
        }  # fmt: skip
        (folder / f"rank_{rank}.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def write_nemo(batch: Mapping[str, Tensor], folder: Path) -> Path:
    """Every line is a batch of one; padded on the right."""
    lines = []
    for index, sample in enumerate(samples_of(batch)):
        missing = T - len(sample["input_ids"])
        names = {
            "token_loss_mask": "response_mask", "advantages": "advantages",
            "generation_logprobs": "rollout_log_probs", "prev_logprobs": "old_log_probs",
        }  # fmt: skip
        line: dict[str, Any] = {}
        for name, field in names.items():
            line[name] = [joined(sample, field).tolist() + [0.0] * missing]
        line |= {"token_ids": [sample["input_ids"].tolist() + [9] * missing], "sample_loss_mask": [1.0], "idx": index}
        lines.append(json.dumps(line | {"input_lengths": [len(sample["input_ids"])], "content": ["text"]}))
    (folder / "train_data_step1.jsonl").write_text("\n".join(lines))
    return folder / "train_data_step1.jsonl"


def write_roll(batch: Mapping[str, Tensor], folder: Path) -> Path:
    """T - 1 columns of arrays, T of the mask."""
    content = {name: batch[name] for name in ("input_ids", "attention_mask")}
    names = {"old_log_probs": "old_log_probs", "ref_log_probs": "ref_log_prob", "infer_logprobs": "rollout_log_probs"}
    for name, field in {**names, "advantages": "advantages"}.items():
        content[name] = torch.cat([torch.zeros(3, P - 1), batch[field]], 1)
    content["response_mask"] = torch.cat([torch.zeros(3, P, dtype=torch.long), batch["response_mask"]], 1)
    torch.save(content, folder / "roll.pt")
    return folder / "roll.pt"


def write_openrlhf(batch: Mapping[str, Tensor], folder: Path) -> Path:
    """A list of experiences of one sequence each."""
    experiences = []
    for sample in samples_of(batch):
        names = {
            "action_mask": "response_mask", "action_log_probs": "old_log_probs",
            "base_action_log_probs": "ref_log_prob", "rollout_log_probs": "rollout_log_probs",
            "advantages": "advantages",
        }  # fmt: skip
        experience = {name: joined(sample, field)[None, 1:] for name, field in names.items()}
        experience |= {"sequences": sample["input_ids"][None]}
        experience |= {"attention_mask": torch.ones(1, len(sample["input_ids"]), dtype=torch.long)}
        experiences.append(experience)
    torch.save(experiences, folder / "experiences.pt")
    return folder / "experiences.pt"


WRITERS: dict[str, Callable[[Mapping[str, Tensor], Path], Path]] = {
    "Miles": write_miles, "packed": write_packed, "slime": write_slime, "TensorDict": write_tensordict,
    "nested": write_nested, "DataProto": write_dataproto,
    "nested in DataProto": lambda batch, folder: write_dataproto(batch, folder, nested=True),
    "TRL": write_trl, "prime-rl": write_prime, "NeMo-RL": write_nemo, "ROLL": write_roll,
    "OpenRLHF": write_openrlhf,
}  # fmt: skip
MISSING = {"prime-rl": ("old_logprobs", "ref_logprobs"), "NeMo-RL": ("ref_logprobs",)}


def read(path: Path) -> StepDump:
    return read_step_dump(str(path), loss=0.5)


@pytest.mark.parametrize("trainer", WRITERS)
def test_a_file_of_each_trainer_is_the_same_batch(trainer: str, batch: dict[str, Tensor], tmp_path: Path) -> None:
    batch = {**batch, "response_mask": batch["response_mask"].clone()}
    batch["response_mask"][2, 1] = 0  # a tool wrote it
    np.savez(tmp_path / "plain.npz", **{name: values.numpy() for name, values in batch.items()})
    plain = read(tmp_path / "plain.npz")
    (tmp_path / "other").mkdir()
    dump = read(WRITERS[trainer](batch, tmp_path / "other"))
    assert dump.has_rollout and dump.loss == 0.5 and dump.grad_norm is None
    assert dump.step_tokens == (11 if trainer == "TRL" else None)
    assert [sample.length for sample in dump.samples] == [6, 2, 3] and len(plain.samples) == 3
    for ours, expected in zip(dump.samples, plain.samples, strict=True):
        assert ours.tokens.tolist() == expected.tokens.tolist()
        assert ours.sampled.tolist() == expected.sampled.tolist()
        for name in ("old_logprobs", "ref_logprobs", "advantages", "rollout_logprobs"):
            value = getattr(ours, name)
            if name in MISSING.get(trainer, ()):
                assert value is None
            else:
                assert value is not None and np.array_equal(value[ours.sampled], getattr(expected, name)[ours.sampled])


class Dangerous:
    def __reduce__(self) -> Any:
        return open, ("/dev/null/never",)


BAD: dict[str, tuple[Any, str]] = {
    "generations of verl": ([{"input": "a", "output": "b", "score": 1.0}], "verl writes to trainer.rollout_data_dir"),
    "rollouts of Miles": (
        {"samples": [{"tokens": [1, 2, 3], "response_length": 1, "reward": 1.0, "loss_mask": [1]}]},
        "Give it a file of --save-debug-train-data",
    ),
    "before advantages": (
        {"input_ids": torch.ones(2, 3, dtype=torch.long), "token_level_scores": torch.ones(2, 2)},
        "it was written before the advantages were computed",
    ),
    "context parallelism": (
        {"rollout_data": {"tokens": [torch.arange(3)]}, "cp_rank": 0, "cp_size": 2}, "--context-parallel-size 1",
    ),
    "no attention mask": (
        {"prompts": torch.ones(2, 3), "responses": torch.ones(2, 3), "advantages": torch.ones(2)},
        "which tells padding from tokens",
    ),
    "weights": ({"layer.weight": torch.ones(2)}, "has no input_ids or tokens"),
    "a call": ({"input_ids": Dangerous()}, "has no input_ids or tokens"),
    "not a pickle": (b"not a pickle", "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_other_files_are_refused_with_what_to_write(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    if isinstance(content, list):
        path = tmp_path / "1.jsonl"
        path.write_text("\n".join(map(json.dumps, content)))
    elif isinstance(content, bytes):
        (path := tmp_path / "step.pt").write_bytes(content)
    else:
        torch.save(content, path := tmp_path / "step.pt")
    with pytest.raises(UserError) as error:
        read(path)
    assert message in str(error.value)


def test_a_module_that_only_begins_as_numpy_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy_of_mine.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "step.pkl").write_bytes(b"cnumpy_of_mine\nscalar\n(tR.")
    with pytest.raises(UserError, match="has no input_ids or tokens"):
        read(tmp_path / "step.pkl")


def test_a_folder_of_files_of_several_kinds_is_refused(tmp_path: Path) -> None:
    for name in ("a.pt", "b.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"has files that end in \.jsonl and \.pt"):
        read(tmp_path)
    with pytest.raises(UserError, match="there is no such file"):
        read(tmp_path / "none.pt")
