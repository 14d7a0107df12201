"""transformers' Trainer with a strategy of dstrat; what is private to the Trainer of versions 5 is named here only."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

from dstrat.checkpoint.formats import io_for
from dstrat.checkpoint.strategy_state import read_checkpoint, restore_optimization
from dstrat.errors import CheckpointError, ConflictError
from dstrat.own_loop import checkpoint
from dstrat.parallel.process_group import wait_for_all_ranks
from dstrat_transformers.accelerate import DstratAccelerator, StrategyOptimizer
from dstrat_transformers.divided_batches import sequence_ranks
from dstrat_transformers.models import is_peft, is_pretrained_model
from dstrat_transformers.prepared_model import PreparedModel
from dstrat_transformers.saving import save_pretrained

if TYPE_CHECKING:
    from torch.nn import Module

    from dstrat.interfaces.strategy import Strategy

SHARDS = "dstrat"
"""Name of the folder in a checkpoint of the Trainer with the state of a strategy that shards it."""

_logger = logging.getLogger(__name__)

_OF_DDP = {  # the Trainer's options, and the values that leave it to the strategy
    "ddp_find_unused_parameters": (None, False),
    "ddp_bucket_cap_mb": (None,),
    "ddp_broadcast_buffers": (None, False),  # False is the default of sentence-transformers
    "ddp_static_graph": (None, False),
}
_ARGUMENTS, _OPTIMIZER, _SCHEDULER = "training_args.bin", "optimizer.pt", "scheduler.pt"  # the Trainer's files


class StrategyTrainer:
    """Base of a Trainer whose model is trained by the strategy that :func:`use` has selected.

    It comes before a Trainer among the bases of a class; :func:`with_strategy` makes one.  Data, loss, loop, callbacks,
    logs and files are the Trainer's.  Where the strategy shards the state, checkpoints have the weights for
    ``from_pretrained``, and in the folder ``dstrat`` the portable format, instead of ``optimizer.pt``.
    """

    accelerator: Any
    args: Any
    compute_loss_func: Any
    current_gradient_accumulation_steps: int
    label_smoother: Any
    model: Any
    model_accepts_loss_kwargs: bool
    optimizer: Any
    state: Any
    _train_batch_size: int
    _loss_is_checked = False
    _num_retries = 0

    @property
    def strategy(self) -> Strategy:
        """The strategy, with its environment set up."""
        strategy: Strategy = self.accelerator.strategy
        return strategy

    @property
    def _is_sharded(self) -> bool:
        """Whether each process has shards of the model now."""
        return PreparedModel.of(self.model) is not None and not self.strategy.replicates_state

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # of the Trainer
        DstratAccelerator.convert(self.accelerator, runs_steps=True)
        # The Trainer has that of the Accelerator until its first evaluation ends.
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        if self.strategy.world_size > self._num_readers and self.args.train_sampling_strategy == "batch_rebalance":
            raise ConflictError(
                "train_sampling_strategy='batch_rebalance' divides batches among all processes, and some read the same "
                f"batch with {type(self.strategy).__name__}: choose another"
            )
        used = [name for name, neutral in _OF_DDP.items() if getattr(self.args, name, None) not in neutral]
        if used:
            raise ConflictError(
                f"{used[0]} is an option of the Trainer's own DDP, and dstrat_transformers.use has selected a strategy "
                "instead: leave it out, and select one that has it, such as 'ddp_find_unused_parameters_true'"
            )
        if self.args.ddp_broadcast_buffers is False:
            _logger.info("ddp_broadcast_buffers=False has no effect: %s decides it", type(self.strategy).__name__)
        if self.args.save_on_each_node and not self.strategy.replicates_state:
            _logger.warning(
                "save_on_each_node=True has no effect on weights and shards: %s writes these once, to a path that all "
                "nodes share",
                type(self.strategy).__name__,
            )
        if self.args.save_only_model and self.args.load_best_model_at_end and not self.strategy.replicates_state:
            raise ConflictError(
                "save_only_model=True leaves out the shards of the strategy, by which load_best_model_at_end=True "
                "loads a model: leave one of the two out"
            )

    def _move_model_to_device(self, model: Module, device: torch.device) -> None:
        """Do nothing: the strategy moves the model, or its shards only."""

    @property
    def _num_readers(self) -> int:
        """Number of groups of processes that read different batches."""
        readers: int = self.strategy.distributed_sampler_kwargs.get("num_replicas", 1)
        return readers

    def get_tp_size(self) -> int:
        """Return the number of processes that read the same batch."""
        return self.strategy.world_size // self._num_readers

    def _has_mixed_mesh_grads(self, model: Module) -> bool:  # noqa: ARG002 - the Trainer's signature
        return False  # the accelerator computes the norm over all meshes

    def _inner_training_loop(self, batch_size: int | None = None, **options: Any) -> Any:
        try:
            return super()._inner_training_loop(batch_size, **options)  # type: ignore[misc]
        except Exception as error:
            if self.args.auto_find_batch_size and should_reduce_batch_size(error):
                self._reset_after_failed_step(error)
            raise

    def _reset_after_failed_step(self, error: Exception) -> None:
        """Let the next try set up the strategy again, as the failed step has left gradients and hooks behind."""
        if self.state.global_step > 0 and self._is_sharded:
            # The state of the optimizer refers to shards that are released.
            raise ConflictError(
                f"step {self.state.global_step + 1} ran out of memory, and auto_find_batch_size=True cannot reduce the "
                f"batches of {type(self.strategy).__name__} after the first step: start again, or resume from a "
                f"checkpoint, with per_device_train_batch_size below {self._train_batch_size}"
            ) from error
        if isinstance(self.optimizer, StrategyOptimizer):
            self.optimizer = self.optimizer.optimizer
            if self._is_sharded:
                self.optimizer.state.clear()  # of the shards, if the first step had begun
        self._num_retries += 1
        # Others may be at work, if they had shorter samples: they must not meet this one in other collectives.
        wait_for_all_ranks(f"reduce the batch size for the {self._num_retries}. time")

    # Steps

    def training_step(self, model: Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        prepared: PreparedModel = self.accelerator.prepared_model
        if prepared.divided is None or not prepared.divided.has_stages:
            if prepared.divided is not None:
                prepared.module.joins_logits = self._reads_logits
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            return loss
        self._check_loss_of_stages()
        model.train()
        self.optimizer.train()  # of those without a schedule
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        loss = prepared.train(dict(inputs), self._loss_of_stages(), *self._scale_of_loss(num_items_in_batch))
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return loss

    @property
    def _reads_logits(self) -> bool:
        """Whether something else than the model computes its loss from its logits."""
        computes = self._computes_loss or self.compute_loss_func is not None
        return computes or self.label_smoother is not None

    @property
    def _computes_loss(self) -> bool:
        """Whether a subclass of the Trainer computes losses."""
        method = getattr(self.compute_loss, "__func__", self.compute_loss)  # type: ignore[attr-defined]
        return method is not Trainer.compute_loss

    def _check_loss_of_stages(self) -> None:
        """Refuse a training whose steps or losses are not the Trainer's.

        Raises:
            ConflictError: They are those of a subclass, or of an option.
        """
        name, strategy = type(self).__name__, type(self.strategy).__name__
        step = super().training_step  # type: ignore[misc]
        replaced = "compute_loss" if self._computes_loss else "training_step"
        if self._computes_loss or step.__func__ is not Trainer.training_step:
            raise ConflictError(
                f"{name} has its own {replaced}, and {strategy} computes losses of microbatches in the last of its "
                "stages: leave pp out, or pass a compute_loss_func to a Trainer"
            )
        if "lomo" in str(self.args.optim).lower():
            raise ConflictError(
                f"LOMO steps within the backward pass, and {strategy} after it: choose another optimizer"
            )
        if self.args.auto_find_batch_size:
            raise ConflictError(
                "auto_find_batch_size=True starts again where a step ran out of memory, and the other stages of "
                f"{strategy} wait for the rest of that step: leave it out, and choose per_device_train_batch_size"
            )
        if self.compute_loss_func is not None and sequence_ranks(self.strategy) > 1:
            raise ConflictError(
                f"compute_loss_func gets whole sequences, of which the last stages of {strategy} have parts: leave it, "
                "pp or cp out"
            )

    def _loss_of_stages(self) -> Any:
        """Return the function of logits and a microbatch that returns its mean loss; None for the model's own."""
        compute, smooth = self.compute_loss_func, self.label_smoother
        if compute is None and smooth is None:
            return None
        prepared = self.accelerator.prepared_model

        def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
            output = prepared.convert_output(CausalLMOutputWithPast(logits=logits))
            labels = batch.get("shift_labels")
            value: torch.Tensor
            if compute is not None:
                number = prepared.divided.count_labels(batch)
                value = compute(output, batch["labels"], num_items_in_batch=number)
                if not self._loss_is_checked:  # once, as it waits for the device
                    self._check_sum(value, compute(output, batch["labels"], num_items_in_batch=2 * number))
                    # What is 0, or not finite, says nothing.
                    self._loss_is_checked = bool(value.isfinite() & (value != 0))
            elif labels is not None:
                value = smooth(output, labels)
            else:
                value = smooth(output, batch["labels"], shift_labels=True)
            return value

        return loss

    def _check_sum(self, loss: torch.Tensor, half: torch.Tensor) -> None:
        """Refuse a ``compute_loss_func`` that is no sum over labels divided by ``num_items_in_batch``."""
        if not torch.allclose(loss, 2 * half, rtol=1e-3, equal_nan=True):
            raise ConflictError(
                f"compute_loss_func returned {float(loss):.6g} for num_items_in_batch=n, and {float(half):.6g} for "
                "2 * n, and stages need a sum over labels divided by num_items_in_batch, as they compute microbatches: "
                "divide by it, or leave pp out"
            )

    def _scale_of_loss(self, num_items_in_batch: Any) -> tuple[Any, float]:
        """Return the number by which the sum over the labels of a batch is divided, and a factor of it.

        The number is None for that of the labels in the batch.
        """
        is_divided = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        is_divided = is_divided and num_items_in_batch is not None
        factor = float(self._num_readers) if is_divided and self.args.average_tokens_across_devices else 1.0
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if not (is_divided or self.compute_loss_func is not None if is_scaled is None else is_scaled):
            factor /= self.current_gradient_accumulation_steps
        return (num_items_in_batch if is_divided else None), factor

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if PreparedModel.of(self.model) is None:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        with self.strategy.evaluation_context():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    # Files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._is_sharded:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        trainer: Any = self
        folder = Path(output_dir or self.args.output_dir)
        if is_pretrained_model(self.model) or is_peft(self.model):
            save_pretrained(self.strategy.module, folder, strategy=self.strategy)
            if self.args.should_save:
                folder.mkdir(exist_ok=True, parents=True)  # of another node
                processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
                if processing is not None:
                    processing.save_pretrained(folder)
                torch.save(self.args, folder / _ARGUMENTS)
        else:
            prepared: Any = PreparedModel.of(self.model)
            with prepared.full_weights() as has_weights:
                if has_weights:
                    trainer._save(str(folder))  # noqa: SLF001 - the Trainer's
        if self.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path = Path(output_dir, SHARDS)
        # The Trainer writes over checkpoints of an earlier run, which may have been that of another strategy.
        if self.strategy.broadcast(path.exists()):
            self.strategy.remove_checkpoint(path)
            self.strategy.barrier("remove_checkpoint")
        if not self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        checkpoint.save(self.strategy, path, {}, (), ())
        if self.args.should_save:
            path.with_name(_OPTIMIZER).unlink(missing_ok=True)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))  # type: ignore[attr-defined]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Module | None = None) -> None:
        if not self._is_sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        elif not Path(resume_from_checkpoint, SHARDS).exists():  # otherwise loaded with the optimizer
            raise CheckpointError(
                f"checkpoint {resume_from_checkpoint!r} has no folder {SHARDS!r}, and the model is sharded already: "
                "resume in a new Trainer, before train or evaluate"
            )

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        path = None if checkpoint_folder is None else Path(checkpoint_folder, SHARDS)
        if path is None or not path.exists():
            super()._load_optimizer_and_scheduler(checkpoint_folder)  # type: ignore[misc]
            return
        checkpoint.load(self.strategy, path, (), ())
        scheduler = torch.load(path.with_name(_SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)  # type: ignore[attr-defined]

    def _load_best_model(self) -> None:
        if not self._is_sharded:
            super()._load_best_model()  # type: ignore[misc]
            return
        path = Path(self.state.best_model_checkpoint, SHARDS)
        saved = read_checkpoint(
            self.strategy,
            io_for(path, self.strategy.checkpoint_io),
            path,
            has_optimizers=bool(self.strategy.optimizers),
        )
        if self.strategy.optimizers:  # which have copies of the weights in some strategies
            restore_optimization(self.strategy, saved, path)


def with_strategy(trainer_class: type[Any]) -> type[Any]:
    """Return a class of Trainers, such as ``trl.SFTTrainer``, with the strategy that :func:`use` has selected."""
    return type(trainer_class.__name__, (StrategyTrainer, trainer_class), {"__module__": trainer_class.__module__})


class DstratTrainer(StrategyTrainer, Trainer):  # type: ignore[misc]  # not imported by mypy
    """transformers' Trainer with the strategy that :func:`use` has selected; its arguments are those of the Trainer."""
