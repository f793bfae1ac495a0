"""vLLM's side of a weight sync: methods that --worker-extension-cls adds to its workers.

This file runs in vLLM's environment. Of weft, only the files that server.py copies exist there (_PARTS). It is written
for vLLM 0.32 and uses the worker's `reload_weights`, which can load repeatedly, also on CPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.inference.vllm import readback
from weft.inference.weight_sync import protocol


class VllmSyncWorker:
    """A mixin of vLLM's worker. The declared attributes are the worker's."""

    reload_weights: Any
    list_loras: Any
    add_lora: Any
    model_runner: Any
    model_config: Any
    parallel_config: Any
    device: Any
    rank: int
    # With deltas (rollout.sync): what was sent last, by name, and its version. vLLM joins and packs its own tensors.
    _weft_sent: dict[str, protocol.Bytes] | None = None
    _weft_holds: int | None = None

    def weft_receive(self, ticket: str, version: int, has: int | None, based: bool, folder: str) -> dict[str, Any]:
        """Receive one sync: weights, or an adapter and possibly its base.

        ticket: as JSON; its member is replaced by this worker's rank. has: version of the engine's weights; None: none
        that it may sample with. based: whether the engine has an adapter's base. folder: where an adapter is written,
        in peft's format. Returns {"adapter": whether one came, "verify": whether it must be read back}, or {"error":
        text}, because an exception would end the engine.
        """
        try:
            worker_ticket = protocol.Ticket.from_json({**json.loads(ticket), "member": self.rank})
            adapter = verify = patches = False
            holds, self._weft_holds = self._weft_holds, None
            with protocol.Delivery(worker_ticket, version, has=has, base=based, holds=holds) as delivery:
                for part in delivery.parts():
                    patches = part.deltas
                    if part.kind == "adapter":
                        adapter, verify = True, part.verify
                        _write_adapter(part, Path(folder) if self.rank == 0 else None)
                    elif part.deltas:
                        self._weft_patch(part)
                    else:
                        self._weft_sent = None
                        self._weft_load(_tensors(part), part.verify)
                    part.finish()
            self._weft_holds = version if patches else None
            return {"adapter": adapter, "verify": verify}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def weft_adapter(self, name: str, folder: str) -> dict[str, Any]:
        """Load the adapter in `folder` again, under its current number. Returns {} or {"error": text}.

        After a load through the server's own route, vLLM would load the adapter again for every batch. After a new base
        the adapter has no number, and vLLM loads it at its next use.
        """
        from vllm.lora.request import LoRARequest

        try:
            for number in self.list_loras():
                self.add_lora(LoRARequest(name, number, folder, load_inplace=True))
            return {}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def weft_check_adapter(self, folder: str) -> dict[str, Any]:
        """Check that the adapter in use is the one in `folder`. Returns {} or {"error": text}. An adapter that vLLM
        will load at its next use has no number yet and is not checked. With tensor parallelism no adapter is
        checked."""
        from safetensors.torch import load_file

        try:
            config = json.loads((Path(folder) / "adapter_config.json").read_text())
            scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
            adapter = load_file(Path(folder) / "adapter_model.safetensors")
            for slot, number in enumerate(self.model_runner.lora_manager._adapter_manager.lora_index_to_id):
                if number is not None and self.parallel_config.world_size == 1:
                    readback.check_adapter(self.model_runner.get_model(), slot, adapter, scaling)
            return {}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def weft_reload(self, folder: str) -> dict[str, Any]:
        """Load all weights from a HuggingFace directory and verify them. Returns {} or {"error": text}."""
        from safetensors.torch import load_file

        try:
            files = sorted(Path(folder).glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(f"{folder} holds no *.safetensors")
            tensors = ((name, tensor) for file in files for name, tensor in load_file(file).items())
            self._weft_load(tensors, verify=True)
            return {}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _weft_patch(self, part: protocol.SyncPart) -> None:
        """Update the tensors of the last sync with a part's tensors and patches, and load all of them. If a patch does
        not fit, it is reported and nothing is loaded: the sender sends all tensors again."""
        sent = self._weft_sent = {} if self._weft_sent is None else self._weft_sent
        for entry, data in part.tensors(sent.__getitem__):
            if data is not sent.get(entry.name):
                sent[entry.name] = data.copy()
        if not part.mismatched:  # copies, because a later patch changes these bytes in place
            entries = part.manifest.values()
            tensors = ((entry.name, protocol.as_torch(entry, sent[entry.name]).clone()) for entry in entries)
            self._weft_load(tensors, part.verify)

    def _weft_load(self, tensors: Iterator[tuple[str, Tensor]], verify: bool) -> None:
        """Load all weights. A failed load leaves layers half filled, and the next load would continue with them. So
        layers are reset after a failure, and the engine has no weights until a complete load.

        verify: whether to read values back and compare them, without tensor parallelism. SyncError if values differ, or
        if a parameter did not get all of its values.
        """
        model, sent = self.model_runner.get_model(), readback.Digests()
        verify = verify and self.parallel_config.world_size == 1  # with more, a worker has only a part of each tensor
        proof = self._weft_proof()
        before = readback.digests_of(model) if verify and proof.first else {}
        if self.device.type == "cpu":
            _forget_packed_experts(model)
        try:
            with readback.complete(model):
                self.reload_weights(weights_iterator=_noted(tensors, sent) if verify else tensors)
        except BaseException:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(model, self.model_config)
            raise
        if self.device.type == "cpu":
            _pack_heads(model)
        if verify:
            proof.check(model, sent, before)

    def _weft_proof(self) -> readback.LoadVerifier:
        if not hasattr(self, "_weft_own_proof"):  # vLLM does not call a mixin's __init__
            self._weft_own_proof = readback.LoadVerifier()
        return self._weft_own_proof


# On CPU, layers multiply with packed copies of their weights. vLLM 0.32 does not renew some of them at later loads.


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Drop the kernels of experts; call before a load. vLLM does not pack the weights of experts that already have a
    kernel, but the kernel reads them as packed."""
    for module in model.modules():
        if hasattr(module, "moe_kernel"):
            module.moe_kernel = None


def _pack_heads(model: torch.nn.Module) -> None:
    """Pack the heads again; call after a load. For a tied head no tensor arrives under the head's name, so vLLM does
    not renew its packed copy, although the weight itself, the embedding's, is new."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _noted(tensors: Iterator[tuple[str, Tensor]], digests: readback.Digests) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        digests[name] = readback.digest(tensor)
        yield name, tensor


def _tensors(part: protocol.SyncPart) -> Iterator[tuple[str, Tensor]]:
    """Copies of a part's tensors. vLLM keeps tensors until their layer is complete, but the sync reuses the memory."""
    for entry, data in part.tensors():
        yield entry.name, protocol.as_torch(entry, data).clone()


def _write_adapter(part: protocol.SyncPart, folder: Path | None) -> None:
    """Receive an adapter and write it to `folder`, replacing the previous adapter. folder: None: receive only."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu() for name, tensor in _tensors(part)}
    if folder is not None:
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "new")
        (folder / "new").replace(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(part.adapter))
