"""The training loop, from top to bottom."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from checkpoint import CheckpointManager
from omniload import DataLoader, MixtureLoader
from storage.spans import start_recording
from training.config import TrainConfig
from training.digests import write_final_state
from training.errors import ConfigError
from training.faults import Faults
from training.model import CausalLM, hf_config
from training.optim import build_optimizer, learning_rate
from training.parallel import build_mesh, parallelise, process_group
from training.resume import restore
from training.runlog import LaneRecord, RunLog, rewind
from training.shutdown import StopRequest
from training.step import Lane, train_step


def train(config: TrainConfig) -> None:
    """Run a configuration to its last step, to the end of its data, or to the step at which it is asked to stop.

    Every rank calls it, under ``torchrun`` or alone. What it writes is described in the README of this package.

    Raises:
        TrainingError: the configuration does not fit the data, the mesh or the output folder.
    """
    with process_group(config.timeout_s), StopRequest() as stop:
        start_recording()
        mesh = build_mesh(config.parallel.tp, config.model)
        dp_rank, dp_size = mesh.get_local_rank("dp"), mesh["dp"].size()
        tp_rank, tp_size = mesh.get_local_rank("tp"), mesh["tp"].size()

        dtype: torch.dtype = getattr(torch, config.dtype)
        model = CausalLM(config.model, dtype, config.seed)
        parallelise(model, mesh)
        optimizer = build_optimizer(model, config.optimizer)
        loader = DataLoader(
            config.mixture,
            dp_rank=dp_rank,
            dp_size=dp_size,
            steps=config.steps,
            timeout_s=config.timeout_s,
            execution=config.execution,
        )
        check_data_fits(config, loader)

        # All that the next step depends on, and what an export needs to know of the model.
        progress = {"step": 0}
        state = {
            "model": model,
            "optimizer": optimizer,
            "loader": loader,
            "hf_config": hf_config(config.model, dtype),
            "extra": progress,
        }
        manager = CheckpointManager(
            config.out / "checkpoints", keep_last=config.keep_last, timeout_s=config.timeout_s
        )
        first_step = restore(config.resume, manager, state, progress, timeout_s=config.timeout_s)
        faults = Faults(config.faults, dp_rank)
        faults.on_restore(optimizer)

        if dist.get_rank() == 0:
            config.out.mkdir(parents=True, exist_ok=True)
            rewind(config.out, first_step)
        say(f"dp {dp_size} x tp {tp_size}: steps {first_step} to {config.steps}, out {config.out}")
        dist.barrier()  # until the folder exists

        with loader, RunLog(config.out, dist.get_rank()) as log:
            lanes_by_step: Iterator[Sequence[Lane]] = loader.steps()
            saved_step = first_step
            for step in range(first_step, config.steps):
                began = time.perf_counter()
                lanes = next(lanes_by_step, None)
                if lanes is None:
                    say(f"the data ended before step {step}")
                    break
                loaded = time.perf_counter()

                records = [LaneRecord.of(lane, loader.samples(lane)) for lane in lanes]
                lanes, records = faults.on_lanes(step, lanes, records)
                lr = learning_rate(step, config.steps, config.optimizer)
                clip_norm = config.optimizer.clip_norm
                result = train_step(
                    model, optimizer, lanes, mesh, lr=lr, clip_norm=clip_norm, stop=stop.requested
                )
                trained = time.perf_counter()

                progress["step"] = step + 1
                if config.checkpoint_every and (step + 1) % config.checkpoint_every == 0:
                    manager.async_save(step + 1, state)
                    saved_step = step + 1
                ended = time.perf_counter()

                log.step(
                    {
                        "step": step,
                        "loss": result.loss,
                        "grad_norm": result.grad_norm,
                        "clipped": result.grad_norm > clip_norm,
                        "lr": lr,
                        "tokens": result.tokens,
                        "num_target_tokens": lanes[0]["num_target_tokens"],
                        "step_ms": (ended - began) * 1e3,
                        "stall_ms": (loaded - began) * 1e3,
                        "checkpoint_ms": (ended - trained) * 1e3,
                        "time": time.time(),
                        "dp_rank": dp_rank,
                        "tp_rank": tp_rank,
                        "lanes": [record.to_json() for record in records],
                    }
                )
                if step % config.log_every == 0 or step + 1 == config.steps:
                    say(
                        f"step {step} loss {result.loss:.6f} grad_norm {result.grad_norm:.4f} lr {lr:.2e} "
                        f"tokens {result.tokens} step_ms {(ended - began) * 1e3:.0f} "
                        f"stall_ms {(loaded - began) * 1e3:.0f} checkpoint_ms {(ended - trained) * 1e3:.0f}"
                    )
                faults.on_step_end(step)
                if result.stop:
                    say(f"stopping after step {step}, as asked by SIGTERM")
                    break

            if progress["step"] != saved_step:
                manager.async_save(progress["step"], state)
            manager.wait()
        write_final_state(model, progress["step"], config.out)


def check_data_fits(config: TrainConfig, loader: MixtureLoader) -> None:
    """Refuse a mixture whose lanes the model cannot take.

    Raises:
        ConfigError: names the key of the mixture and that of the configuration.
    """
    mixture, limit = loader.mixture, config.model.max_position_embeddings
    if mixture.labels != "shifted":
        raise ConfigError(f"{config.mixture}: labels: {mixture.labels}; this trainer needs 'labels: shifted'")
    if mixture.seq_len > limit:
        raise ConfigError(
            f"{config.mixture}: seq_len: {mixture.seq_len} exceeds model.max_position_embeddings: {limit}; "
            "raise this or lower that"
        )


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
