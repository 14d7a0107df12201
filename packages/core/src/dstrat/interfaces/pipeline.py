"""Pipeline of a module: its layers in order and its loss, which a strategy divides into stages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor
from torch.nn import Module, Sequential

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_columns, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def first_of_batch(batch: Any) -> Any:
    """Return the first element of a batch that is a tuple or list, or else the batch."""
    return batch[0] if isinstance(batch, tuple | list) else batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Result of ``configure_pipeline`` of a module: a chain of layers, and the loss of its output.

    A strategy with a pipeline assigns consecutive layers to its stages, and computes with microbatches.
    ``training_step`` serves where there is one stage only::

        def configure_pipeline(self):
            return Pipeline(model=self.net, loss=lambda output, batch: mse_loss(output, batch[1]))

    Attributes:
        model: The module whose ``forward`` is the chain of the layers; evaluation steps call it with its input.
        loss: Function of the model's output and a microbatch that returns the mean loss of the microbatch.
        layers: The layers in order: each is called with the result of the one before, a tensor; None for those of a
            model that is an ``nn.Sequential``.
        inputs: Function of a batch that returns the input of the model, a tensor.  It is called for all microbatches
            before the first loss, to which it passes nothing on.
        weight: Function of a microbatch that returns the number that its loss is the mean of, such as the number of
            labels without padding; None for its number of samples.  With it, batches of other processes and accumulated
            batches count by their numbers too.  The loss of a microbatch without labels may be nan, as that of torch's
            ``cross_entropy``; one that divides by hand has nan gradients, unless by ``count.clamp(min=1)``.
        compute: Function of the layers of a stage, its input and the microbatch that returns the output of the last of
            these layers; None calls them one after the other.  Layers of other stages have no values.  In an
            evaluation the microbatch is what the model is called with: its argument, a tuple of several positional
            ones, or a dict of keywords.
        on_loss: Function that each process calls with the loss of a training batch, such as to log it.
    """

    model: Module
    loss: Callable[[Any, Any], Tensor]
    layers: Sequence[Module] | None = None
    inputs: Callable[[Any], Any] = first_of_batch
    weight: Callable[[Any], Any] | None = None
    compute: Callable[[Sequence[Module], Any, Any], Any] | None = None
    on_loss: Callable[[Tensor], None] | None = None

    @property
    def chain(self) -> list[Module]:
        """The layers in order.

        Raises:
            MisuseError: They are not known.
        """
        if self.layers is not None:
            return list(self.layers)
        if isinstance(self.model, Sequential) and type(self.model).forward is Sequential.forward:
            return list(self.model)
        raise MisuseError(
            f"Pipeline(model={type(self.model).__name__}) does not say in which order its layers are called: pass "
            "layers=[self.first, *self.blocks, self.last], or a model that is an nn.Sequential with the forward of that"
        )


def check_loss_of_stages(module: Module, method: str) -> None:
    """Check that no method computes another loss of a module than the pipeline that it inherits.

    Args:
        module: The module, with a ``configure_pipeline``.
        method: The name of a method that stages do not call, such as ``training_step``.

    Raises:
        MisuseError: A subclass of the class that defines the pipeline overrides it.
    """
    cls = type(module)
    definer = next((base for base in cls.__mro__ if "configure_pipeline" in vars(base)), cls)
    inherited = getattr(definer, method, None)
    if inherited is not None and inherited is not getattr(cls, method):
        raise MisuseError(
            f"{cls.__name__} overrides {method} of {definer.__name__}, which stages do not call, and inherits its "
            "configure_pipeline: define configure_pipeline too, with the same loss, or leave pp out"
        )


def split_batch(batch: Any, count: int) -> list[Any]:
    """Return a batch as microbatches, whose sizes differ by at most one sample.

    Args:
        batch: Nested data whose tensors have the samples along their first dimension.  Lists, tuples and arrays of as
            many other values are divided too; everything else is in each microbatch.
        count: The number of microbatches.

    Raises:
        MisuseError: Tensors have different numbers of samples, there are fewer samples than microbatches, or a list is
            divided in two ways.
    """
    size = batch_size(batch)
    if size < count:
        raise MisuseError(
            f"a batch of {size} samples cannot be divided into {count} microbatches: give batches of {count} samples "
            "or more (drop_last=True for the last one), or fewer microbatches"
        )

    if count == 1:
        return [batch]
    ends = [0, *itertools.accumulate(size // count + (index < size % count) for index in range(count))]

    def microbatch(samples: slice) -> Any:
        return apply_to_columns(
            batch,
            lambda value: _has_value_for_each(value, size),
            lambda column: column if isinstance(column, Tensor) and not column.dim() else column[samples],
        )

    return [microbatch(slice(*bounds)) for bounds in itertools.pairwise(ends)]


def _has_value_for_each(value: Any, size: int) -> bool:
    """Return whether a list, tuple or array has a value for each sample of a batch.

    Raises:
        MisuseError: It has as many lists of as many values each.
    """
    if type(value).__module__ == "numpy":
        return bool(value.shape[:1] == (size,))
    is_list = isinstance(value, list | tuple) and not isinstance(value, Size) and not hasattr(value, "_fields")
    if not is_list or len(value) != size or any(tensor.dim() for tensor in tensors_in(value)):
        return False
    if all(isinstance(inner, list | tuple) and len(inner) == size for inner in value):
        raise MisuseError(
            f"a batch of {size} samples has {size} lists of {size} values, and either may be the samples: give these "
            "values as a tensor, or as a dict for each sample"
        )
    return True


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        MisuseError: Its tensors have different numbers.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_in(batch) if tensor.dim()]
    sizes = {shape[0] for shape in shapes}
    if len(sizes) != 1:
        raise MisuseError(
            f"a batch with tensors of the shapes {shapes} cannot be divided into microbatches: the first dimension of "
            "each must be the samples"
        )
    return sizes.pop()
