"""megatrain's training step in one process, without files. The one-process benchmarks time it."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from megatrain.comm import create_mesh
from megatrain.config.config import Config
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.data.step_batch import StepBatch
from megatrain.parallel.pipeline import PipelineInput
from megatrain.schedule import build_schedule
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import StepOutcome, train_step


class BenchmarkTrainer:
    """The model of one rank on one device, with a black box as in production. `close` removes the black box."""

    def __init__(self, config: Config, device: torch.device) -> None:
        identity = Identity("benchmark", "main", 0, 0, Layout(), os.getpid(), "localhost")
        self.recorder: Recorder = open_recorder(
            identity,
            directory=config.telemetry.black_box_directory,
            run_key="benchmark",
            num_records=config.telemetry.black_box_records,
        )
        mesh = create_mesh(Layout(), 0, device, self.recorder)
        self.config = config
        self.rank_model: RankModel = build_rank_model(config, mesh, self.recorder, device)
        self.rank_model.initialize()
        self.rank_model.set_training(True)
        self._step = 0

    def step(self, tokens_SB: Tensor, labels_SB: Tensor) -> StepOutcome:
        """Train on one global batch, split into micro-batches. Shapes: [S, global_batch_size]."""
        size = self.config.batch.micro_batch_size
        sample_B = torch.arange(tokens_SB.shape[1])
        inputs = [
            self.rank_model.pipeline_input(tokens, labels, samples, None)
            for tokens, labels, samples in zip(
                tokens_SB.split(size, 1), labels_SB.split(size, 1), sample_B.split(size), strict=True
            )
        ]
        return self._train(inputs, labels_SB.numel())

    def step_of(self, batch: StepBatch) -> StepOutcome:
        """Train on the micro-batches of a reader."""
        return self._train([self.rank_model.input_of(micro) for micro in batch.microbatches], batch.num_label_tokens)

    def _train(self, inputs: list[PipelineInput], num_label_tokens: int) -> StepOutcome:
        self.recorder.set_step(self._step)
        outcome = train_step(
            self.rank_model,
            build_schedule("1f1b", 1, 1, len(inputs)),
            inputs,
            num_label_tokens=num_label_tokens,
            lr=self.config.optimizer.lr,
            grad_clip=self.config.optimizer.grad_clip,
            recorder=self.recorder,
        )
        self.recorder.complete_step()
        self._step += 1
        return outcome

    def close(self) -> None:
        self.recorder.close()
