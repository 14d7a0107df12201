"""transformers' Trainer with a strategy of dstrat; what is private to the Trainer of versions 5 is named here only."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from packaging.version import Version
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.optimization import Adafactor
from transformers.trainer_pt_utils import find_batch_size

from dstrat.checkpoint.formats import io_for
from dstrat.checkpoint.strategy_state import read_checkpoint, restore_optimization
from dstrat.errors import CheckpointError, ConflictError, MissingRequirementError
from dstrat.own_loop import checkpoint
from dstrat.parallel.gathered_optimizer import GatheredOptimizer
from dstrat.parallel.process_group import noting_failed_steps, wait_for_all_ranks
from dstrat.plugins.known import pip_command
from dstrat_transformers.accelerate import DstratAccelerator, StrategyOptimizer
from dstrat_transformers.divided_batches import sequence_ranks
from dstrat_transformers.models import is_peft, is_pretrained_model
from dstrat_transformers.prepared_model import PreparedModel
from dstrat_transformers.saving import save_pretrained

if TYPE_CHECKING:
    from torch.nn import Module

    from dstrat.interfaces.strategy import Strategy

OLDEST_TRANSFORMERS = "5.19.0"
"""The first version whose Trainer counts the labels of processes that share a batch as this module does."""
SHARDS = "dstrat"
"""Name of the folder in a checkpoint of the Trainer with the state of a strategy that shards it."""

_logger = logging.getLogger(__name__)

_OF_DDP = {  # the Trainer's options, and the values that leave it to the strategy
    "ddp_find_unused_parameters": (None, False),
    "ddp_bucket_cap_mb": (None,),
    "ddp_broadcast_buffers": (None, False),  # False is the default of sentence-transformers
    "ddp_static_graph": (None, False),
}
_OF_COMMUNICATION = {  # the Trainer's options, their defaults, and the strategy's arguments for the same
    "ddp_backend": (None, "process_group_backend"),
    "ddp_timeout": (1800, "timeout"),
}
_NUM_SAMPLES, _SAMPLE_SIZE = 256, 4096  # of a file; a training changes nearly all of it
_RATE = "_steps_per_second"  # the end of a name in the Trainer's metrics
_OF_SHARDS = "dstrat.json"
"""Name of the file beside that folder which says of what weights the shards are."""
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
    is_in_train: bool
    label_smoother: Any
    model: Any
    model_accepts_loss_kwargs: bool
    optimizer: Any
    state: Any
    _train_batch_size: int
    _loss_is_checked = False
    _counts_local_batch = False
    _num_retries = 0
    _num_steps_evaluated: int | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy, with its environment set up."""
        model = getattr(self, "model", None)  # None until model_init has made it
        prepared = None if model is None else PreparedModel.of(model)  # another one may have been prepared since
        strategy: Strategy = self.accelerator.strategy if prepared is None else prepared.strategy
        return strategy

    @property
    def _is_sharded(self) -> bool:
        """Whether each process has shards of the model now."""
        prepared = PreparedModel.of(self.model)
        return prepared is not None and not (self.strategy.replicates_state or prepared.has_full_weights)

    @property
    def _trains_apart(self) -> bool:
        """Whether each process has the model, with other weights."""
        is_prepared = PreparedModel.of(self.model) is not None
        return is_prepared and not self._is_sharded and self.strategy.trains_apart

    @property
    def _saves_state_of_all(self) -> bool:
        """Whether the state of the training is that of all processes together, rather than of any of them."""
        return self._is_sharded or self._trains_apart

    def create_accelerator_and_postprocess(self) -> None:
        check_version()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # of the Trainer
        DstratAccelerator.convert(self.accelerator, runs_steps=True)
        # The Trainer has that of the Accelerator until its first evaluation ends.
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        self._check_options()
        self._log_options_without_effect()
        if self.args.n_gpu > 1:  # on one device of several: the Trainer would run torch's DataParallel on all of them
            self.args._n_gpu = 1  # noqa: SLF001 - as the Trainer itself does where it leaves the devices to a model

    def _check_options(self) -> None:
        """Refuse options that the strategy cannot have.

        Raises:
            ConflictError: There is one.
        """
        args, strategy = self.args, type(self.strategy).__name__
        shares_batches, is_sharded = self.get_tp_size() > 1, not self.strategy.replicates_state
        divides_sequences = sequence_ranks(self.strategy) > 1
        of_ddp = next((name for name, neutral in _OF_DDP.items() if getattr(args, name, None) not in neutral), None)
        conflicts = {
            "train_sampling_strategy='batch_rebalance' divides batches among all processes, and some read the same "
            f"batch with {strategy}: choose another": shares_batches
            and args.train_sampling_strategy == "batch_rebalance",
            "eval_use_gather_object=True gathers the objects of all processes, of which some have those of the same "
            f"batch with {strategy}: leave it out": shares_batches and args.eval_use_gather_object,
            f"{of_ddp} is an option of the Trainer's own DDP, and dstrat_transformers.use has selected a strategy "
            "instead: leave it out, and select one that has it, such as 'ddp_find_unused_parameters_true'": of_ddp,
            f"neftune_noise_alpha scales noise by the length of a sequence, and processes of {strategy} have parts of "
            "it: leave it or cp out": divides_sequences and args.neftune_noise_alpha is not None,
            "save_only_model=True leaves out the shards of the strategy, by which load_best_model_at_end=True loads a "
            "model: leave one of the two out": is_sharded and args.save_only_model and args.load_best_model_at_end,
        }
        save = super()._save_optimizer_and_scheduler  # type: ignore[misc]
        if is_sharded and save.__func__ is not Trainer._save_optimizer_and_scheduler:  # noqa: SLF001 - the Trainer's
            raise ConflictError(
                f"{type(self).__name__} has its own _save_optimizer_and_scheduler, and {strategy} saves shards of the "
                "optimizer instead: write further files in a TrainerCallback, in on_save"
            )
        for message, is_conflict in conflicts.items():
            if is_conflict:
                raise ConflictError(message)

    def _log_options_without_effect(self) -> None:
        args, strategy = self.args, type(self.strategy).__name__
        if args.ddp_broadcast_buffers is False:
            _logger.info("ddp_broadcast_buffers=False has no effect: %s decides it", strategy)
        for name, (default, argument) in _OF_COMMUNICATION.items():
            if getattr(args, name) != default:
                _logger.warning(
                    "%s=%r has no effect, as dstrat_transformers.use has opened the communication: construct the "
                    "strategy with %s=, such as dstrat_ddp.DDPStrategy(%s=...)",
                    name,
                    getattr(args, name),
                    argument,
                    argument,
                )
        if self._full_eval and not self.strategy.replicates_state:
            _logger.warning(
                "%s=True has no effect on evaluations in a training, and is an error in others, as %s has shards of "
                "the model: take bf16=True, which evaluates in bfloat16 too",
                self._full_eval,
                strategy,
            )
        if args.save_on_each_node and not self.strategy.replicates_state:
            _logger.warning(
                "save_on_each_node=True has no effect on weights and shards: %s writes these once, to a path that all "
                "nodes share",
                strategy,
            )

    @property
    def _full_eval(self) -> str | None:
        """The option, if there is one, by which evaluations convert the whole model, unless they are in a training."""
        return next((name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(self.args, name)), None)

    def _move_model_to_device(self, model: Module, device: torch.device) -> None:
        """Move other models than the Trainer's own: the strategy moves that, or its shards only."""
        known = getattr(self, "model", None)  # None while the Trainer moves the one that model_init has made
        if known is not None and model is not known:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    @property
    def _num_readers(self) -> int:
        """Number of groups of processes that read different batches."""
        readers: int = self.strategy.distributed_sampler_kwargs.get("num_replicas", 1)
        return readers

    def get_tp_size(self) -> int:
        """Return the number of processes that read the same batch; 1 while the Trainer counts what one of them has."""
        return 1 if self._counts_local_batch else self.strategy.world_size // self._num_readers

    # What the Trainer sums up over all processes, where some of them read the same batch

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # It divides the labels of its own batch, too, which it has not added up.
        self._counts_local_batch = not self.args.average_tokens_across_devices
        try:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        finally:
            self._counts_local_batch = False

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()

    def store_flos(self) -> None:
        before = self.state.total_flos
        super().store_flos()  # type: ignore[misc]
        self.state.total_flos = before + (self.state.total_flos - before) / self.get_tp_size()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        strategy = self.strategy
        # It reads rows and columns of whole matrices, which engines that step flat pieces do not have.
        has_matrices = strategy.allows_new_optimizers and not strategy.replicates_state
        if is_new and isinstance(optimizer, Adafactor) and has_matrices:
            self.optimizer = GatheredOptimizer(Adafactor, optimizer.param_groups, **optimizer.defaults)
        return self.optimizer

    def _has_mixed_mesh_grads(self, model: Module) -> bool:  # noqa: ARG002 - the Trainer's signature
        return False  # the accelerator computes the norm over all meshes

    def _inner_training_loop(self, batch_size: int | None = None, **options: Any) -> Any:
        fuses_loss = (self.args.liger_kernel_config or {}).get("fused_linear_cross_entropy", True)
        is_divided = sequence_ranks(self.strategy) > 1 or self.strategy.compiled_steps() is not None
        if self.args.use_liger_kernel and fuses_loss and is_divided:  # trl switches it off after it was made
            raise ConflictError(
                "use_liger_kernel=True computes a loss without logits, of which "
                f"{type(self.strategy).__name__} computes its loss: pass "
                "liger_kernel_config={'fused_linear_cross_entropy': False}, or leave pp and cp out"
            )
        try:
            with noting_failed_steps():  # those of data and callbacks, too
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

    def _loss_of_stages(self) -> Any:
        """Return the function of logits and a microbatch that returns its mean loss; None for the model's own."""
        compute, smooth = self.compute_loss_func, self.label_smoother
        if compute is None and smooth is None:
            return None
        prepared, strategy = self.accelerator.prepared_model, cast("Any", self.strategy)
        divides_sequences = sequence_ranks(strategy) > 1

        def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
            labels = batch.get("shift_labels")
            # Its loss is of whole sequences, on each of the ranks that have parts of these.
            if compute is not None and divides_sequences:
                logits, batch = strategy.join_sequences(logits), {"labels": strategy.join_sequences(batch["labels"])}
            output = prepared.convert_output(CausalLMOutputWithPast(logits=logits))
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
        if self._full_eval and not self.is_in_train and not self.strategy.replicates_state:
            raise ConflictError(
                f"{self._full_eval}=True converts the whole model for this evaluation, and "
                f"{type(self.strategy).__name__} has shards of it: leave it out, or take bf16=True, which evaluates in "
                "bfloat16 too"
            )
        if PreparedModel.of(self.model) is None:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        with noting_failed_steps(), self.strategy.evaluation_context():
            output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        self._num_steps_evaluated = math.ceil(output.num_samples / (self.args.eval_batch_size * self._num_readers))
        return output

    def prediction_step(self, model: Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._count_last_batch(inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _count_last_batch(self, inputs: Any) -> None:
        """Tell Accelerate how many samples the last batch of a stream has, of which the Trainer repeats the loss.

        Where Accelerate divides batches among processes, it counts them itself.
        """
        loader = self.accelerator.gradient_state.active_dataloader
        is_last = loader is not None and loader.end_of_dataloader and loader.remainder == -1
        if is_last and self._num_readers == 1 < self.strategy.world_size:
            loader.remainder = find_batch_size(inputs) or -1

    # The Trainer counts a batch of an evaluation for each of its processes, in the rate that it logs or returns.

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self._correct_rate(logs)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        output = super().predict(*args, **kwargs)  # type: ignore[misc]
        self._correct_rate(output.metrics)
        return output

    def _correct_rate(self, metrics: dict[str, float]) -> None:
        """Put in the steps per second of the evaluation that has ended, where processes read the same batch."""
        name = next((name for name in metrics if name.endswith(_RATE) and not name.startswith("train")), None)
        if name is None:
            return
        steps, self._num_steps_evaluated = self._num_steps_evaluated, None
        if steps is not None and self._num_readers < self.strategy.world_size:
            runtime = metrics[name.removesuffix(_RATE) + "_runtime"]
            metrics[name] = round(steps / max(runtime, 1e-4), 3)

    # Files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # In an evaluation the model has the mean of what processes train apart.
        with self.strategy.evaluation_context() if self._trains_apart else nullcontext():
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]  # calls _save in all processes

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        save, trainer = super()._save, cast("Any", self)  # type: ignore[misc]
        if not self._is_sharded:
            save(output_dir, state_dict)
            return
        prepared = cast("PreparedModel", PreparedModel.of(self.model))
        folder = Path(output_dir or self.args.output_dir)
        is_overridden = save.__func__ is not Trainer._save  # noqa: SLF001 - the Trainer's
        if is_overridden or not (is_pretrained_model(self.model) or is_peft(self.model)):
            with prepared.full_weights() as has_weights:
                if has_weights:
                    save(str(folder))
            return
        save_pretrained(prepared.module, folder, strategy=prepared.strategy)
        if self.args.should_save:
            folder.mkdir(exist_ok=True, parents=True)  # of another node
            processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path = Path(output_dir, SHARDS)
        # The Trainer writes over checkpoints of an earlier run, which may have been that of another strategy.
        if self.strategy.broadcast(path.exists()):
            if self.strategy.is_global_zero:
                path.with_name(_OF_SHARDS).unlink(missing_ok=True)
            self.strategy.remove_checkpoint(path)
            self.strategy.barrier("remove_checkpoint")
        if not self._saves_state_of_all:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        checkpoint.save(self.strategy, path, {}, (), ())
        if self.strategy.is_global_zero:
            note = {"weights": weights_digest(path.parent)}
            path.with_name(_OF_SHARDS).write_text(json.dumps(note) + "\n", encoding="utf-8")
        if self.args.should_save:
            path.with_name(_OPTIMIZER).unlink(missing_ok=True)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))  # type: ignore[attr-defined]

    def _has_shards_of_weights(self, folder: Path) -> bool:
        """Return whether a checkpoint has the state of a strategy, and not that of earlier weights; collective."""
        answer = None
        if self.strategy.is_global_zero:
            note = folder / _OF_SHARDS  # older checkpoints lack it
            saved = json.loads(note.read_text(encoding="utf-8"))["weights"] if note.exists() else None
            has_shards, digest = (folder / SHARDS).exists(), weights_digest(folder)
            is_current = saved is None or digest is None or saved == digest
            if has_shards and not is_current:
                _logger.warning(
                    "%s is of other weights than the checkpoint it is in, which were written later: these are loaded "
                    "instead, and the optimizer only from %s",
                    folder / SHARDS,
                    _OPTIMIZER,
                )
            answer = has_shards and is_current
        return bool(self.strategy.broadcast(answer))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *of_model: Module) -> None:
        if not self._is_sharded:  # a class with a method of its own may take the checkpoint alone
            super()._load_from_checkpoint(resume_from_checkpoint, *of_model)  # type: ignore[misc]  # as many as its own
        elif not self._has_shards_of_weights(Path(resume_from_checkpoint)):  # otherwise loaded with the optimizer
            raise CheckpointError(
                f"checkpoint {resume_from_checkpoint!r} has no folder {SHARDS!r} of its weights, and the model is "
                "sharded already: resume in a new Trainer, before train or evaluate"
            )

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        path = None if checkpoint_folder is None else Path(checkpoint_folder, SHARDS)
        if path is None or not self._has_shards_of_weights(path.parent):
            super()._load_optimizer_and_scheduler(checkpoint_folder)  # type: ignore[misc]
            return
        checkpoint.load(self.strategy, path, (), ())
        scheduler = torch.load(path.with_name(_SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)  # type: ignore[attr-defined]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.strategy.finish_training()  # before the best model is loaded; groups exchange their weights
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        if not self._saves_state_of_all:
            super()._load_best_model()  # type: ignore[misc]
            return
        path = Path(self.state.best_model_checkpoint, SHARDS)
        load = super()._load_best_model  # type: ignore[misc]
        is_overridden = load.__func__ is not Trainer._load_best_model  # noqa: SLF001 - the Trainer's
        if self._is_sharded and (is_overridden or not self._has_shards_of_weights(path.parent)):
            prepared, state = cast("PreparedModel", PreparedModel.of(self.model)), {}
            with prepared.full_weights() as has_weights:
                if has_weights:
                    with prepared.intercepted_loading() as loaded:
                        load()
                    state = {**self.model.state_dict(), **prepared.with_tied(loaded)}
            prepared.load_state_dict(state)
            return
        saved = read_checkpoint(
            self.strategy,
            io_for(path, self.strategy.checkpoint_io),
            path,
            has_optimizers=bool(self.strategy.optimizers),
        )
        if self.strategy.optimizers:  # which have copies of the weights in some strategies
            restore_optimization(self.strategy, saved, path)


def weights_digest(folder: Path) -> str | None:
    """Return a digest of samples of the files of weights in a checkpoint of the Trainer; None if there are none."""
    digest, files = (
        hashlib.sha256(),
        sorted(one for ending in ("safetensors", "bin") for one in folder.glob(f"*model*.{ending}")),
    )
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(_NUM_SAMPLES):
                file.seek(size * number // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_SIZE))
    return digest.hexdigest() if files else None


def check_version() -> None:
    """Refuse versions of transformers whose Trainer divides losses by other numbers of labels.

    Raises:
        MissingRequirementError: An older one than ``OLDEST_TRANSFORMERS`` is installed.
    """
    installed = transformers.__version__
    if Version(installed) < Version(OLDEST_TRANSFORMERS):
        raise MissingRequirementError(
            f"strategies in transformers' Trainer need transformers {OLDEST_TRANSFORMERS} or newer, and {installed} is "
            f"installed, whose Trainer counts labels otherwise: {pip_command(f'transformers>={OLDEST_TRANSFORMERS}')}"
        )


def with_strategy(trainer_class: type[Any]) -> type[Any]:
    """Return a class of Trainers, such as ``trl.SFTTrainer``, with the strategy that :func:`use` has selected.

    Args:
        trainer_class: The class, which derives from transformers' Trainer.

    Raises:
        MissingRequirementError: The installed transformers is too old.
    """
    check_version()
    return type(trainer_class.__name__, (StrategyTrainer, trainer_class), {"__module__": trainer_class.__module__})


class DstratTrainer(StrategyTrainer, Trainer):  # type: ignore[misc]  # not imported by mypy
    """transformers' Trainer with the strategy that :func:`use` has selected; its arguments are those of the Trainer."""
