"""TrainModule of any model of transformers."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from dstrat import TrainModule
from dstrat.errors import MisuseError, RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.pipeline import check_loss_of_stages
from dstrat_transformers.initialization import initialize, make_model
from dstrat_transformers.models import (
    IGNORED_LABEL,
    accepts_argument,
    base_model,
    blocks,
    count_labels,
    expert_layers,
    is_peft,
)
from dstrat_transformers.optimization import make_optimizer, make_scheduler, scheduler_config
from dstrat_transformers.pipeline import causal_loss, check_not_divided, make_pipeline, return_outputs
from dstrat_transformers.pretrained import is_from_pretrained, load_pretrained
from dstrat_transformers.reduction import keep_made_layers, keep_model_layers
from dstrat_transformers.saving import DEFAULT_SHARD_SIZE, save_pretrained
from dstrat_transformers.sequences import FullMasks, check_divided_sequences, cut_sequences, join_batch
from dstrat_transformers.tensor_parallel import check_tensor_parallel, parallelize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from dstrat import Pipeline
    from dstrat.interfaces.strategy import Strategy

_logger = logging.getLogger(__name__)

_TENSOR_PARALLEL = ("tensor_parallel", "tp")  # dimensions of the meshes of strategies


class HFModule(TrainModule):
    """A model of transformers with its loss, optimizer and schedule: ``trainer.fit(HFModule(model), loader)``.

    Batches are mappings of the arguments of the model's ``forward``, with ``labels``, as the collators of transformers
    make them.  The loss is the one that the model returns.  Of several processes, accumulated batches, or batches of an
    evaluation, each counts by the number of its labels, so that padding does not change the result.

    The model is an object, such as of ``from_pretrained``, which each process has once in full before it is sharded;
    or a function that makes it, so that it is made sharded where the strategy can do that: a new one from its config,
    or one with weights, which each process reads layer by layer::

        HFModule(partial(LlamaForCausalLM, config), scheduler="cosine", warmup_steps=0.1)
        HFModule(partial(LlamaForCausalLM.from_pretrained, "my-model"))

    Args:
        model: The model, or a function that returns it.  A model in evaluation mode, as ``from_pretrained`` leaves it,
            is put into training mode.
        optimizer: The name of a class in ``torch.optim``, in any case; or a class or function that takes groups of
            parameters and ``lr``.
        scheduler: A name of ``transformers.get_scheduler``, or None for a constant learning rate.
        learning_rate: The learning rate after the warm-up.
        weight_decay: Of all parameters but biases and those of normalizations.
        warmup_steps: Optimizer steps of the warm-up, or below 1 their share of the whole training.
        num_training_steps: Optimizer steps of the whole training; None asks the Trainer.
        optimizer_kwargs: Further arguments of the optimizer.
        scheduler_kwargs: Further arguments of the scheduler.
        metrics: Functions of the model's output and the batch that return a number, by the names under which their
            means are logged in evaluations, after the prefix of the stage.
        gradient_checkpointing: Whether layers compute their activations again in the backward pass; a dict is the
            ``gradient_checkpointing_kwargs`` of transformers.
        tensor_parallel_plan: Styles of layers for ``model_parallel`` and ``mesh``, by their names with ``*`` for
            numbers; None is the model's own plan.

    Attributes:
        model: The model; None before ``configure_model`` where a function makes it.
    """

    def __init__(
        self,
        model: Module | Callable[[], Module],
        optimizer: str | Callable[..., Optimizer] = "adamw",
        scheduler: str | None = "linear",
        *,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        warmup_steps: float = 0,
        num_training_steps: int | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] | None = None,
        gradient_checkpointing: bool | Mapping[str, Any] = False,
        tensor_parallel_plan: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model", "optimizer", "metrics", "tensor_parallel_plan"])
        if not isinstance(model, nn.Module) and not callable(model):
            raise RequestError(
                f"HFModule got a {type(model).__name__}: pass a model, or a function that makes one, such as "
                "functools.partial(AutoModelForCausalLM.from_config, config)"
            )
        self.model: Any = model if isinstance(model, nn.Module) else None
        self._factory = None if isinstance(model, nn.Module) else model
        self.optimizer, self.scheduler = optimizer, scheduler
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.warmup_steps, self.num_training_steps = warmup_steps, num_training_steps
        self.optimizer_kwargs, self.scheduler_kwargs = optimizer_kwargs, scheduler_kwargs
        self.metrics = dict(metrics or {})
        self.gradient_checkpointing = gradient_checkpointing
        self.tensor_parallel_plan = tensor_parallel_plan
        self._strategy: Strategy | None = None
        self._fixed_arguments: dict[str, Any] = {}
        self._masks: FullMasks | None = None
        self._outputs: RemovableHandle | None = None
        self._has_labels: bool | None = None  # of this evaluation; None if no step of this class has run
        if self.model is not None:
            self._take_model()

    def __getstate__(self) -> dict[str, Any]:
        of_run = {"_strategy": None, "_masks": None, "_outputs": None}  # in this process
        return {**super().__getstate__(), **of_run}

    # The model

    def configure_model(self) -> None:
        self.prepare(self.trainer.strategy)

    def prepare(self, strategy: Strategy) -> None:
        """Make the model, and split it where the strategy is tensor parallel; a Trainer calls it.

        In a loop of one's own it is called before ``loop.setup``, within ``strategy.model_sharded_context()``.

        Args:
            strategy: The strategy, whose communication is open.
        """
        self._strategy = strategy
        if self.model is None and self._factory is not None:
            make = load_pretrained if is_from_pretrained(self._factory) else make_model
            self.model = make(self._factory)
            self._take_model()
        if strategy.compiled_steps() is not None and self._outputs is None:
            self._outputs = return_outputs(self.model)
        mesh = _tensor_parallel_mesh(strategy)
        if mesh is None or mesh.size() == 1:
            return
        # A model that is kept between two runs is split already.
        if not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            divides_experts = getattr(strategy, "expert_parallel_size", 1) > 1
            parallelize(self.model, mesh, self.tensor_parallel_plan, leaves_experts=divides_experts)

    @override
    def teardown(self, stage: str) -> None:
        self._strategy = None
        if self._masks is not None:
            self._masks.undo()
            self._masks = None
        if self._outputs is not None:
            self._outputs.remove()
            self._outputs = None

    def _take_model(self) -> None:
        self.model.train()
        if accepts_argument(self.model, "use_cache"):
            # A cache is for generation, and with one the model would not separate packed documents by their positions.
            self._fixed_arguments = {"use_cache": False}
        if self.gradient_checkpointing is not False:
            options = {} if self.gradient_checkpointing is True else self.gradient_checkpointing
            # The other variant of torch does not see parameters that a strategy gathers in the backward pass.
            kwargs = {"use_reentrant": False, **options}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
            if is_peft(self.model):  # with use_reentrant=True, frozen embeddings would end all gradients
                self.model.enable_input_require_grads()

    def configure_pipeline(self) -> Pipeline:
        """Return the layers of a causal language model for a strategy with stages, such as ``"mesh(pp=2)"``.

        Raises:
            MisuseError: Its layers are not known, or a subclass has another loss.
        """
        for method in ("loss_and_weight", "loss"):
            check_loss_of_stages(self, method)

        def log_loss(loss: Tensor) -> None:
            if self._trainer is not None:  # in a loop of one's own there is none
                self.log("train_loss", loss, prog_bar=True)

        return make_pipeline(self.model, log_loss, self._arguments_of)

    def configure_experts(self) -> list[Module]:
        """Return the layers of experts for a strategy that divides them, such as ``"mesh(ep=2)"``.

        Raises:
            MisuseError: The model has no plan of experts in transformers.
        """
        layers = expert_layers(self.model)
        if not layers:
            raise MisuseError(
                f"{type(self.model).__name__} has no plan of experts in transformers (ep_plan): leave ep out, or "
                "return its layers of experts from configure_experts in a subclass of HFModule"
            )
        return layers

    @override
    def keep_layers(self, count: int) -> dict[str, tuple[int, int]]:
        """Remove layers but for the first ones, for ``dstrat verify --layers``, in the model and in its config.

        Where a function makes the model of a config, or of the name of one, as few layers are ever made; weights of
        ``from_pretrained`` are not read then.

        Args:
            count: Number of layers.

        Returns:
            The numbers before and after, by name.

        Raises:
            MisuseError: The model has adapters of peft, and was made without memory.
        """
        if self.model is None and self._factory is not None:
            made = keep_made_layers(self._factory, count)
            if made is None:  # the model is reduced when it is made
                return {}
            self._factory, reduced = made
            return reduced
        reduced = keep_model_layers(self.model, count)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            if is_peft(self.model):
                raise MisuseError("first values of adapters are those of peft, which computes them with memory")
            initialize(self.model, 0)
        return reduced

    def check_tensor_parallel(self, size: int, divides_experts: bool) -> None:
        """Check that the model's layers can be split, before anything runs.

        Args:
            size: Number of ranks that share a layer.
            divides_experts: Whether the strategy divides layers of experts by ``ep``.

        Raises:
            RequestError: The model has no plan, a style that torch does not have, or a layer that ranks do not divide.
        """
        check_tensor_parallel(self.model, size, self.tensor_parallel_plan, leaves_experts=divides_experts)

    def check_divided_sequences(self) -> None:
        """Check that a strategy can divide the sequences of the model, before anything runs.

        Raises:
            MisuseError: The model is no causal language model with ``attn_implementation="sdpa"``.
        """
        check_divided_sequences(self.model)

    def cut_sequences(self, batch: Mapping[str, Any], cut: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return a rank's part of a batch, for a strategy that divides sequences, such as ``"mesh(cp=2)"``.

        Args:
            batch: The batch.
            cut: Function of a tensor that returns its part.

        Raises:
            MisuseError: The model is no causal language model with ``attn_implementation="sdpa"``.
        """
        if self._masks is None:
            self._masks = FullMasks(self.model)
        return cut_sequences(batch, cut)

    def join_sequences(self, outputs: Any, join: Callable[[Tensor], Tensor]) -> Any:
        """Return a prediction with the logits and hidden states of whole sequences, where a strategy divides them.

        Args:
            outputs: The output of the model; a subclass whose ``predict_step`` returns something else overrides this.
            join: Function of a tensor that returns that of whole sequences.

        Raises:
            MisuseError: They are no output of the model.
        """
        if not hasattr(outputs, "logits"):
            raise MisuseError(
                f"predict_step of {type(self).__name__} returned a {type(outputs).__name__}, not the model's output: "
                "define join_sequences(self, outputs, join), which returns the outputs with join(tensor) for each "
                "tensor with a part for each token"
            )
        for name in ("logits", "hidden_states"):
            if outputs.get(name) is not None:
                outputs[name] = apply_to_tensors(outputs[name], join)
        return outputs

    def _arguments_of(self, batch: Mapping[str, Any]) -> AbstractContextManager[Mapping[str, Any]]:
        return nullcontext(batch) if self._masks is None else self._masks.of(batch)

    @property
    def auto_wrap_policy(self) -> Callable[[Module], bool] | None:
        """The blocks that ``fsdp`` shards as units: the model's ``_no_split_modules``; None where it has none."""
        selected = set() if self.model is None else set(map(id, blocks(self.model)))
        return (lambda layer: id(layer) in selected) if selected else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        return self.model(*args, **kwargs)

    # Steps

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a training batch, by whose mean over all processes each label counts the same.

        Accumulated batches count alike: use :meth:`loss_and_weight` for these.  The loss of a batch without labels,
        where all are -100, is 0, and so are its gradients.

        Args:
            batch: Arguments of the model, with labels.

        Raises:
            MisuseError: The model returns no loss.
        """
        return self._weighted_over_ranks(*self.loss_and_weight(batch))

    def _weighted_over_ranks(self, loss: Tensor, labels: Tensor | None) -> Tensor:
        strategy = self._strategy
        if labels is None or strategy is None or strategy.world_size == 1:
            return loss
        # Strategies average gradients over ranks: the factor makes that the mean over all labels.
        count = labels.to(loss.dtype)
        # At least one label of all ranks, or a batch without any would divide 0 by 0.
        mean = strategy.reduce(count.clone(), reduce_op="mean").clamp(min=1 / strategy.world_size)
        weighted: Tensor = loss * (count / mean)
        return weighted

    def loss_and_weight(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss over the labels of a training batch, and their number.

        In a loop of one's own each label of all processes and accumulated batches counts the same by::

            loop.backward(*loop.compute(module.loss_and_weight, batch))

        Args:
            batch: Arguments of the model, with labels.

        Returns:
            The loss, which is 0 without labels; and their number, a scalar on the device, or None for a model whose
            labels have no number.

        Raises:
            MisuseError: The model returns no loss, or the batch has a number by which it would be divided.
        """
        check_not_divided(base_model(self.model), batch)
        loss: Tensor = self._output(batch).loss
        labels = count_labels(self.model, batch)
        if labels is None:
            return loss, None
        # The mean of no labels is nan; torch.where, as an if would read the number from the device in each step.
        return torch.where(labels > 0, loss, torch.zeros_like(loss)), labels

    def _output(self, batch: Mapping[str, Any]) -> Any:
        if not hasattr(batch, "keys"):
            raise MisuseError(
                f"HFModule got a batch of type {type(batch).__name__}: a batch is a mapping of the arguments of "
                f"{type(self.model).__name__}, as the collators of transformers make it"
            )
        output = self._call(batch)
        if isinstance(output, tuple):
            raise MisuseError(
                f"{type(base_model(self.model)).__name__} returned a tuple, and HFModule reads the loss of an output "
                "by its name: leave out return_dict=False"
            )
        if getattr(output, "loss", None) is None:
            raise MisuseError(
                f"{type(base_model(self.model)).__name__} returned no loss for a batch with {', '.join(batch.keys())}: "
                "give it labels, as DataCollatorForLanguageModeling(tokenizer, mlm=False) does"
            )
        return output

    def _call(self, batch: Mapping[str, Any]) -> Any:
        with self._arguments_of(batch) as arguments:
            output = self.model(**{**self._fixed_arguments, **arguments})
        if self._masks is not None and batch.get("labels") is not None:  # which the model does not get
            output["loss"] = causal_loss(base_model(self.model), output.logits, batch)
        return output

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any]:
        loss, labels = self.loss_and_weight(batch)
        if self._trainer is None:  # an estimate of memory
            return loss
        self.log("train_loss", loss, prog_bar=True)
        if labels is None or not self.trainer.strategy.weighs_losses:
            return self._weighted_over_ranks(loss, labels)
        return {"loss": loss, "weight": labels}

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call(batch)

    def _evaluate(self, prefix: str, batch: Mapping[str, Any]) -> None:
        check_not_divided(base_model(self.model), batch)
        output = self._output(batch)
        labels = count_labels(self.model, batch)
        weight = None if labels is None else float(labels)
        has_labels = weight != 0
        self._has_labels = bool(self._has_labels) or has_labels
        values = {"loss": output.loss if has_labels else 0.0}
        if self.metrics and self._masks is not None:  # on all ranks of a sequence, also those without labels
            join = cast("Any", self._strategy).join_sequences
            output, batch = self.join_sequences(output, join), join_batch(batch, join)
        for name, metric in self.metrics.items():
            values[name] = metric(output, batch) if has_labels else 0.0  # with the weight 0
        for name, value in values.items():
            self.log(f"{prefix}_{name}", value, batch_size=weight, prog_bar=name == "loss")

    def on_validation_epoch_start(self) -> None:
        self._has_labels = None

    def on_test_epoch_start(self) -> None:
        self._has_labels = None

    def on_validation_epoch_end(self) -> None:
        self._check_labels("val")

    def on_test_epoch_end(self) -> None:
        self._check_labels("test")

    def _check_labels(self, prefix: str) -> None:
        """Log a warning where no process has had a label, as the mean of nothing is nan; collective."""
        strategy = self.trainer.strategy
        flags = [float(self._has_labels is not None), float(bool(self._has_labels))]
        num_ranks, num_with_labels = strategy.reduce(torch.tensor(flags, device=strategy.root_device), reduce_op="sum")
        if num_ranks > 0 and num_with_labels == 0 and strategy.is_global_zero:
            _logger.warning(
                "%s_loss is nan: every label of this evaluation is %d; check the collator, and whether the prompt "
                "alone fills the sequences",
                prefix,
                IGNORED_LABEL,
            )

    # Optimization

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(
            self.model,
            self.optimizer,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            optimizer_kwargs=self.optimizer_kwargs,
        )
        if self.scheduler is None:
            return optimizer
        steps: float | None = self.num_training_steps
        if steps is None and self._trainer is not None:  # in a loop of one's own there is none
            steps = self.trainer.estimated_stepping_batches
        scheduler = make_scheduler(
            optimizer,
            self.scheduler,
            num_training_steps=steps,
            warmup_steps=self.warmup_steps,
            scheduler_kwargs=self.scheduler_kwargs,
        )
        return {"optimizer": optimizer, "lr_scheduler": scheduler_config(scheduler, "val_loss")}

    # Saving

    def save_pretrained(self, folder: str | Path, max_shard_size: int = DEFAULT_SHARD_SIZE) -> None:
        """Write a folder for ``from_pretrained``; every process calls it, in a run or after it.

        See :func:`~dstrat_transformers.save_pretrained`.
        """
        in_run = self._trainer is None or self._trainer.is_running  # after it the strategy has no communication
        save_pretrained(self, folder, strategy=self._strategy if in_run else None, max_shard_size=max_shard_size)


def adapt_model(model: Module) -> HFModule:
    """Return a model as a TrainModule, with the optimizer and schedule that transformers' Trainer has by default."""
    return HFModule(model)


def _tensor_parallel_mesh(strategy: Strategy) -> Any:
    """Return the mesh of the ranks that share a batch; None where the strategy has none."""
    try:
        mesh = strategy.device_mesh
    except MisuseError:  # of every strategy but those with a mesh
        return None
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return next((mesh[name] for name in _TENSOR_PARALLEL if name in names), None)
