"""Models that another library calls with whole batches, where a strategy divides these into stages' or ranks' parts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError
from dstrat_transformers.models import base_model, count_labels
from dstrat_transformers.module import HFModule
from dstrat_transformers.pipeline import causal_loss, check_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.nn import Module

    from dstrat import Pipeline
    from dstrat.interfaces.strategy import Strategy

_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments of a model that only its loss reads."""
_FUSED_HEAD = "fused_lm_head"
"""Argument of a model that trl has changed, with which it returns values of each token's label instead of logits."""
_DIMENSIONS_OF_TOKENS = 2  # samples and tokens


class CalledModule(HFModule):
    """An HFModule whose model is called by another library, which computes a loss from the output, or lets the model.

    Attributes:
        microbatch_loss: Function of logits and a microbatch that returns its mean loss, for stages; None for the
            model's own.
        joins_logits: Whether a training step returns the logits of whole sequences, where ranks have parts of them.
    """

    microbatch_loss: Callable[[Tensor, Mapping[str, Any]], Tensor] | None = None
    joins_logits = True

    def configure_pipeline(self) -> Pipeline:
        pipeline = super().configure_pipeline()

        def loss(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
            return (self.microbatch_loss or pipeline.loss)(logits, batch)

        return dataclasses.replace(pipeline, loss=loss)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model, and of trl's fused head, which reads the labels that tokens predict."""
        if not batch.get(_FUSED_HEAD):
            return super().predict_step(batch, *args, **kwargs)
        with self._arguments_of(batch) as arguments:
            return self.model(**{**self._fixed_arguments, **arguments, "shift_labels": batch.get("shift_labels")})

    def join_sequences(self, outputs: Any, join: Callable[[Tensor], Tensor]) -> Any:
        """Return a prediction with the logits, or what trl's fused head returns of each token, of whole sequences."""
        if getattr(outputs, "log_probs", None) is None:
            return super().join_sequences(outputs, join)
        for name, value in outputs.items():
            if value.dim() == _DIMENSIONS_OF_TOKENS:
                joined = join(value) if value.is_floating_point() else join(value.int()).to(value.dtype)
                outputs[name] = joined
        return outputs

    def join_training_sequences(self, outputs: Any, join: Callable[[Tensor], Tensor]) -> Any:
        """Return the output of a training step, with the logits of whole sequences if the loop reads them."""
        return self.join_sequences(outputs, join) if self.joins_logits else outputs


class DividedBatches:
    """Calls of a model with whole batches, and training steps of them, where a strategy divides batches.

    Stages (``pp``) run the forward and backward passes of microbatches together, so that a training step is one call of
    :meth:`train`.  Where ranks have parts of sequences (``cp``), the model is called as ever: its loss is that of whole
    sequences, and so are its logits, unless the module says that nothing reads them.

    Args:
        module: The module with the model.
        strategy: The strategy that has set it up.

    Attributes:
        has_stages: Whether a training step is one call of :meth:`train`.
    """

    def __init__(self, module: CalledModule, strategy: Strategy) -> None:
        self._module, self._strategy = module, strategy
        self._model = base_model(module.model)
        self.has_stages = strategy.compiled_steps() is not None
        self._num_sequence_ranks = sequence_ranks(strategy)

    def call(self, *args: Any, is_training: bool, **kwargs: Any) -> Any:
        """Return the model's output for a batch; of a training step gradients flow back to the parameters.

        Raises:
            ConflictError: It is a training step of stages, or they have no output that is asked for.
        """
        strategy, module = self._strategy, self._module
        if is_training and self.has_stages:
            raise ConflictError(
                f"{type(self._model).__name__} was called with gradients, and {type(strategy).__name__} runs forward "
                "and backward passes of its stages together: leave pp out where a program computes a loss of its own"
            )
        batch = {**self._named(args), **kwargs}
        if batch.get(_FUSED_HEAD):
            return self._call_fused_head(batch, is_training=is_training)
        inputs = {name: value for name, value in batch.items() if name not in _OF_LOSS}
        has_labels = batch.get("labels") is not None
        if is_training and has_labels and not module.joins_logits:
            count = batch.get("num_items_in_batch")
            if count is None:
                count = self.count_labels(batch)
            output = strategy.training_step(module.predict_step, {**batch, "num_items_in_batch": count})
            output["loss"] = output["loss"] * self._num_sequence_ranks  # as gradients are averaged over the parts, too
            return output
        run_step = strategy.training_step if is_training else strategy.predict_step
        output = run_step(module.predict_step, inputs)
        if has_labels:
            output["loss"] = causal_loss(self._model, output.logits, batch)
        return output

    def _call_fused_head(self, batch: dict[str, Any], *, is_training: bool) -> Any:
        """Return what the fused head of trl does for whole sequences."""
        strategy = self._strategy
        if self.has_stages:
            raise ConflictError(
                f"{type(self._model).__name__} was called with {_FUSED_HEAD}=True, as trl's Trainers do, and "
                f"{type(strategy).__name__} returns logits from its stages: leave pp out"
            )
        divisor = batch.pop("num_items_in_batch", None)
        run_step = strategy.training_step if is_training else strategy.predict_step
        output = run_step(self._module.predict_step, batch)
        if batch.get("labels") is not None:  # the last token predicts none of them, and has no value in one process
            for name, value in output.items():
                if value.dim() == _DIMENSIONS_OF_TOKENS:
                    output[name] = value[:, :-1]
        number = output.label_mask.sum().clamp(min=1) if divisor is None else divisor
        output["loss"] = -output.log_probs.sum() / number
        return output

    def train(
        self,
        batch: Mapping[str, Any],
        loss: Callable[[Tensor, Mapping[str, Any]], Tensor] | None,
        divisor: Tensor | float | None,
        factor: float,
    ) -> Tensor:
        """Run the forward and backward passes of a batch, and return its loss on every rank.

        The loss is the sum over the labels of the batch, divided by a number, times a factor.

        Args:
            batch: Arguments of the model, with labels.
            loss: Function of logits and a microbatch that returns its mean loss; None for the model's own.
            divisor: The number; None for that of the labels in the batch.
            factor: The factor.

        Raises:
            MisuseError: The batch has no labels.
        """
        if loss is None or batch.get("shift_labels") is None:
            check_labels(self._model, batch)  # on all ranks, before any of them waits for another
        number = self.count_labels(batch) if divisor is None else divisor
        scale = factor * self._num_sequence_ranks  # as gradients are averaged over the parts, too

        def weigh(weight: Tensor) -> Tensor:
            weighed: Tensor = weight * scale / number
            return weighed

        self._module.microbatch_loss, self._strategy.weigh_batch = loss, weigh
        outputs = self._strategy.training_step(self._module.loss_and_weight, batch)
        total: Tensor = outputs["loss"] * weigh(outputs["weight"])
        return total

    def count_labels(self, batch: Mapping[str, Any]) -> Any:
        """Return the number of labels of a batch, at least 1."""
        count = count_labels(self._model, batch)
        return 1 if count is None else count.clamp(min=1)

    def generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the model's ``generate`` does, of which each rank computes all tokens, or its layers of them."""
        if self.has_stages:
            kwargs["use_cache"] = False  # no rank has that of the layers of others
        return self._strategy.run_step("validation_step", functools.partial(generate, *args, **kwargs))

    def _named(self, args: tuple[Any, ...]) -> dict[str, Any]:
        names = inspect.signature(self._model.forward).parameters
        return dict(zip(names, args, strict=False))


def sequence_ranks(strategy: Strategy) -> int:
    """Return the number of ranks that divide sequences."""
    size: int = getattr(getattr(strategy, "axes", None), "cp", 1)
    return size


def divided_batches(
    module: Module, strategy: Strategy, *, runs_steps: bool, num_optimizers: int
) -> DividedBatches | None:
    """Return the steps of a module whose batches a strategy divides, or None; the strategy has set it up.

    Args:
        module: The module of the strategy.
        strategy: The strategy.
        runs_steps: Whether training steps are calls of :meth:`DividedBatches.train`.
        num_optimizers: Number of optimizers.

    Raises:
        ConflictError: The loop cannot train the module with the strategy.
    """
    name, has_stages = type(strategy).__name__, strategy.compiled_steps() is not None
    if not has_stages and sequence_ranks(strategy) == 1:
        return None
    if not isinstance(module, CalledModule):
        raise ConflictError(
            f"{name} divides batches, and {type(module).__name__} is no model of transformers, of which it is known "
            "how: choose a layout without pp and cp, or use dstrat.Trainer"
        )
    if has_stages and num_optimizers and not runs_steps:
        raise ConflictError(
            f"{name} runs forward and backward passes together here, which the loops of programs with Accelerate take "
            "apart: use transformers' Trainer or dstrat.Trainer with it, or choose another layout"
        )
    if has_stages and num_optimizers > 1:
        raise ConflictError(
            f"{name} runs forward and backward passes together here, for all parameters, and there are "
            f"{num_optimizers} optimizers: put the parameters into groups of one"
        )
    return DividedBatches(module, strategy)
