"""Replaces NCCL, which needs GPUs: tensors go through the store of the group. The rest of a
transfer is vLLM's own.

A server uses it with `start(…, wired=True)`; the trainer's side is replaced in the test's own
process.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)


class OnServer(nccl_engine.NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info: Any) -> None:
        rank = self.parallel_config.rank + init_info.rank_offset
        self.model_update_group = _joined(init_info, rank)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for name in self.parse_update_info(update_info).names:
            self.model.load_weights([(name, self.model_update_group.broadcast(torch.empty(0), 0))])

    def shutdown(self) -> None:
        self.model_update_group = None


class OnTrainer(nccl_engine.NCCLTrainerWeightTransferEngine):
    def _broadcast(self, source: Any, meta: Any) -> None:
        for _, weight in source if not self.is_sender else self._checked_iter(source, meta):
            if self.is_sender:
                self.model_update_group.broadcast(weight, 0)

    def shutdown(self) -> None:
        self.model_update_group = None


def _joined(info: Any, rank: int) -> StatelessProcessGroup:
    return StatelessProcessGroup.create(
        info.master_address, info.master_port, rank, info.world_size
    )


def replace_nccl() -> None:
    WeightTransferEngineFactory._registry["nccl"] = lambda: OnServer
    WeightTransferTrainerFactory._registry["nccl"] = lambda: OnTrainer
    nccl_engine.open_trainer_endpoint = lambda info: _joined(info, 0)
