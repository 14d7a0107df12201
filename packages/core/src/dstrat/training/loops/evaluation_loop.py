"""Loop of validation, test and prediction over one or several loaders."""

from __future__ import annotations

import itertools
import logging
import pickle
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.data.combined_loader import CombinedLoader, map_leaves
from dstrat.data.division import take_indices
from dstrat.data.limits import limit_of, round_to_items
from dstrat.data.loaders import as_list, length_of, prepare_evaluation_loader, sequential
from dstrat.data.prefetch import move_batches
from dstrat.data.samplers import set_epoch
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.strategy import gather_objects
from dstrat.launch.job import describe_unpicklable
from dstrat.parallel.internals import RefusedCollectives
from dstrat.parallel.layers import restored_modes
from dstrat.training.hooks import hook_of
from dstrat.training.loops.batches import batch_mover, can_copy_ahead, can_prefetch
from dstrat.training.loops.sources import PURPOSES
from dstrat.training.loops.steps import bind_step, count_arguments, requires_arguments
from dstrat.training.loops.stopping import EvaluationVotes, stop_by
from dstrat.training.metrics.logged import LoggedValues
from dstrat.training.metrics.metric_objects import share_updates, unchanged_metrics
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from dstrat.interfaces.strategy import StepName, Strategy
    from dstrat.training.loops.sources import Source
    from dstrat.training.run import Run


_log = logging.getLogger(__name__)


class EvaluationLoop:
    """A loop that runs a step of the module for every batch of its loaders.

    Args:
        run: Has the settings.
        loaders: The user's loader, or a list of them.
        source: Source of the loaders, which determines the step, the hooks and the limit.

    Attributes:
        loaders: The loaders of this process.
        logged: The values that the module logs.
        batch_indices: Indices in the dataset of the samples of the current prediction batch, if a callback reads them
            and the loader has them; otherwise None.
        current_batches: Number of batches of each loader in the current or last evaluation; None for an unknown one.
        batches_seen: Number of batches in all completed evaluations, by the index of the loader; without sanity checks.
    """

    def __init__(self, run: Run, loaders: Any, source: Source) -> None:
        purpose = PURPOSES[source]
        self._run, self._module, self._purpose = run, run.module, purpose
        self._limit_name = f"limit_{source}_batches"
        name: StepName = f"{purpose}_step"  # type: ignore[assignment]  # mypy does not join literals
        self._step = run.profiled(name, bind_step(run.strategy, run.module, name))
        module_step = getattr(run.module, name)
        self._num_arguments = count_arguments(module_step)
        self._requires_index = requires_arguments(module_step) > 2
        self._per_item = run.strategy.evaluation_batches_per_item()
        self.logged = LoggedValues(training=False)
        self._keeps_outputs = purpose == "predict" and run.return_predictions
        self._outputs: list[list[Any]] = []
        self._votes: EvaluationVotes | None = None
        self._at_most: int | None = None
        self.batches_seen = Counter[int]()
        self.current_batches: list[int | None] = []
        self._step_communicates = False
        self._last_batch: Any = None
        self._records_indices = purpose == "predict" and any(callback.reads_batch_indices for callback in run.callbacks)
        self.batch_indices: list[Any] | None = None
        self.load(loaders)

    def load(self, loaders: Any) -> None:
        """Replace the loaders."""
        run = self._run
        if run.settings.data.overfit_batches and run.is_fitting and loaders is not None:
            loaders = sequential(loaders)  # as for training: the same batches in every epoch
        self._passed_structure = loaders
        passed = as_list(loaders)
        prepared = [
            prepare_evaluation_loader(
                loader,
                run.strategy,
                distribute=run.settings.data.use_distributed_sampler,
                records_indices=self._records_indices,
                keeps_batches=self._purpose == "predict",
            )
            for loader in passed
        ]
        self.loaders = [loader for loader, _ in prepared]
        self._passed_loaders = passed  # undivided, for padding batches of a rank without any
        self._longest: list[int] | None = None
        self._limit_of_longest: Any = None
        self._are_known: list[bool] = []  # whether all ranks know the length of a loader
        self._reach_all_ranks: list[bool] = []  # whether each rank has a batch of a loader
        self._takes_loader = self._num_arguments > 2 and (len(passed) > 1 or self._requires_index)
        self._divided = [divided for _, divided in prepared]
        for limited, count in zip(self._limited(), self.num_batches, strict=True):
            if limited != count:
                _log.warning(
                    "%s=%s lets %s run over %d batches, as one call of the compiled step takes %d",
                    self._limit_name,
                    self._limit,
                    self._purpose,
                    count,
                    self._per_item,
                )

    @property
    def _limit(self) -> Any:
        return getattr(self._run.settings.data, self._limit_name)  # which a callback may change between validations

    @property
    def structure(self) -> Any:
        """The loaders of this process in the user's structure: one, or a list or dict; None without a loader."""
        passed, prepared = self._passed_structure, iter(self.loaders)
        if isinstance(passed, CombinedLoader) and passed.mode == "sequential":
            passed = passed.iterables
        return map_leaves(passed, lambda _: next(prepared)) if self.loaders else None

    @property
    def num_batches(self) -> list[int | None]:
        """Number of batches of each loader; None for an unknown one."""
        return [round_to_items(count, self._per_item) for count in self._limited()]

    def _limited(self) -> list[int | None]:
        """Return the number of batches of each loader by the limit, not rounded to complete items."""
        lengths = [length_of(loader) for loader in self.loaders]
        batches = [None if length is None else length * self._per_item for length in lengths]
        return [limit_of(self._limit, count, self._limit_name) for count in batches]

    def run(self, at_most: int | None = None, *, before_end: Callable[[], None] | None = None) -> None:
        """Run the steps and hooks, and publish the values of the epoch.

        Args:
            at_most: Maximal number of batches from each loader, beside the Trainer's limit.
            before_end: Called before the last hook, such as ``on_validation_end``.
        """
        if self.loaders and self._limit != 0:  # val_dataloader may have returned None
            if self._run.is_fitting:  # as in Lightning: samplers only, as a training may read the same dataset
                for loader in self.loaders:
                    set_epoch(loader, self._run.fit_loop.epoch, datasets=False)
            with self._run.strategy.evaluation_context(), self._no_gradients():
                self._evaluate(at_most, before_end)

    def _evaluate(self, at_most: int | None, before_end: Callable[[], None] | None) -> None:
        run, hooks, purpose = self._run, self._run.hooks, self._purpose
        run.log_to(self.logged)
        run.evaluation_loop, run.is_evaluating = self, True
        self.current_batches = counts = [
            round_to_items(_smaller(count, at_most), self._per_item) for count in self.num_batches
        ]
        if purpose != "predict":
            self.logged.start_epoch()
        self._outputs, self._at_most = [], at_most
        self._votes = None
        if run.world_size > 1:
            self._votes = EvaluationVotes(run.strategy, run.interruption, beat=run.beat)
        with restored_modes(self._module):  # also after an error, as another fit may follow
            hook_of(self._module, f"on_{purpose}_model_eval", TrainModule)()
            hooks.call(f"on_{purpose}_start")
            hooks.call(f"on_{purpose}_epoch_start")
            missing = [0] * len(counts) if self._votes is None else self._missing_batches(counts, at_most)
            seen = {
                dataloader_idx: self._run_loader(dataloader_idx, loader, count, missing[dataloader_idx])
                for dataloader_idx, (loader, count) in enumerate(zip(self.loaders, counts, strict=True))
            }
            if self._votes is not None:
                self._votes.finish()
                share_updates(self._module, run.strategy)
            run.publisher.publish_epoch(self.logged, hooks.of(f"on_{purpose}_epoch_end"))
            if not run.sanity_checking:
                self.batches_seen.update(seen)
            if before_end is not None:
                before_end()
            for hook in hooks.early(f"on_{purpose}_end"):
                hook()
            # Late hooks save checkpoints, from which the next epoch starts: with metric objects that are reset.
            self.logged.reset_metrics()
            for hook in hooks.late(f"on_{purpose}_end"):
                hook()
        hook_of(self._module, f"on_{purpose}_model_train", TrainModule)()
        run.is_evaluating = False

    def predictions(self) -> list[list[Any]]:
        """Return the results of the steps for each loader, in the order of its batches; collective.

        Every process returns the predictions of all ranks; of a loader that was not divided, its own.
        """
        strategy = self._run.strategy
        if not any(self._divided):
            return self._outputs
        readers = self._reader_ranks()
        try:
            outputs_of_ranks = [strategy.broadcast(self._outputs, src=rank) for rank in readers]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            unpicklable = describe_unpicklable({"predictions": self._outputs})
            raise MisuseError(
                f"predictions go to every process, and {unpicklable} cannot be pickled: let predict_step return "
                "tensors, or pass return_predictions=False and write them with a PredictionWriter"
            ) from error
        return [
            _interleave([outputs[index] for outputs in outputs_of_ranks]) if divided else self._outputs[index]
            for index, divided in enumerate(self._divided)
        ]

    def _reader_ranks(self) -> list[int]:
        """Return the first rank of each share of the data; ranks of model parallelism read the same share."""
        strategy = self._run.strategy
        share = strategy.distributed_sampler_kwargs["rank"]
        shares = gather_objects(strategy, share)
        return [shares.index(number) for number in range(strategy.distributed_sampler_kwargs["num_replicas"])]

    def _no_gradients(self) -> AbstractContextManager[Any]:
        """Return the context of steps and hooks without gradients."""
        # Tensors of inference mode cannot be used in autograd later, and a fit may do so after a validation.
        run = self._run
        if run.settings.evaluation.inference_mode and run.strategy.allows_inference_mode and not run.is_fitting:
            return torch.inference_mode()
        return torch.no_grad()

    def _missing_batches(self, counts: list[int | None], at_most: int | None) -> list[int]:
        """Return how many batches this rank has less than the rank with the most, for each loader; collective."""
        strategy = self._run.strategy
        # Kept until loaders or the limit change: one collective, not one per validation.
        if self._longest is None or self._limit != self._limit_of_longest:
            self._limit_of_longest = self._limit
            lengths = [-1 if count is None else count for count in self.num_batches]
            unknown = [int(count is None) for count in self.num_batches]
            without = [int(count == 0) for count in self.num_batches]
            most = strategy.reduce(strategy.from_host(torch.tensor([lengths, unknown, without])), reduce_op="max")
            self._longest, any_unknown, any_without = most.tolist()
            self._are_known = [not number for number in any_unknown]
            self._reach_all_ranks = [not number for number in any_without]
        if strategy.evaluates_together:  # these pad in any case
            return [0] * len(counts)
        longest = [_smaller(count, at_most) or 0 for count in self._longest]
        return [0 if count is None else most - count for count, most in zip(counts, longest, strict=True)]

    def _run_loader(self, dataloader_idx: int, loader: Any, count: int | None, num_missing: int) -> int:
        """Run the steps and hooks for the batches of a loader, and return the number of these batches."""
        outputs_of_loader: list[Any] = []
        self._outputs.append(outputs_of_loader)
        index_of_loader = (dataloader_idx,) if len(self.loaders) > 1 else ()
        takes_index = self._num_arguments > 1
        index_for_step = (dataloader_idx,) if self._takes_loader else ()
        # Looked up once, as attributes cost time for each batch.
        logged, keeps = self.logged, self._keeps_outputs
        step = self._step_for(dataloader_idx, num_missing)
        is_alone, interruption = self._votes is None, self._run.interruption
        publishes = bool(self._run.settings.output.log_every_n_steps and self._run.loggers)
        batch_start = self._with_index(f"on_{self._purpose}_batch_start", 2, dataloader_idx)
        batch_end = self._with_index(f"on_{self._purpose}_batch_end", 3, dataloader_idx)
        profiler = None if self._run.is_fitting else self._run.profiler  # in a fit it counts training batches
        logged.in_step, logged.dataloader_idx = True, dataloader_idx if index_of_loader else None
        batch_idx = -1
        indices = itertools.count(0, self._per_item)
        batches = self._batches(dataloader_idx, loader, count)
        for batch_idx, batch in zip(indices, batches, strict=False):  # indices are endless
            logged.batch = batch
            if self._records_indices:
                self.batch_indices = take_indices(loader)
            for hook, index in batch_start:
                hook(batch, batch_idx, *index)
            outputs = step(batch, batch_idx, *index_for_step) if takes_index else step(batch)
            for hook, index in batch_end:
                hook(outputs, batch, batch_idx, *index)
            if keeps:  # on the host, as all predictions together may be larger than the device
                outputs_of_loader.append(apply_to_tensors(outputs, self._run.strategy.to_host))
            if logged.writes_steps and publishes:
                count_seen = self.batches_seen[dataloader_idx] + batch_idx + self._per_item
                self._run.publisher.publish_evaluation_step(logged, count_seen)
            if profiler is not None:
                profiler.step()
            if is_alone and interruption.requested:  # several ranks vote on it, in _batches
                stop_by(interruption.requested)
        if num_missing:
            self._pad(dataloader_idx, batch_idx, num_missing // self._per_item)
        logged.lacks_a_loader = logged.lacks_a_loader or batch_idx < 0
        logged.in_step, logged.dataloader_idx, logged.batch = False, None, None
        return 0 if batch_idx < 0 else batch_idx + self._per_item

    def _step_for(self, dataloader_idx: int, num_missing: int) -> Callable[..., Any]:
        """Return the step for the batches of a loader, which takes care of ranks with fewer of them."""
        if num_missing:  # only a rank that pads must know its last batch
            return self._observed_step()
        if self._votes is None or self._run.strategy.evaluates_together or self._reach_all_ranks[dataloader_idx]:
            return self._step
        return self._step_without_collectives()

    def _observed_step(self) -> Callable[..., Any]:
        """Return the step, observed for its batch and for whether it communicates."""
        self._step_communicates = False
        count_collectives = self._run.strategy.collectives_begun

        def observed(batch: Any, *args: Any) -> Any:
            self._last_batch = _copied(batch)
            begun = count_collectives()
            outputs = self._step(batch, *args)
            self._step_communicates |= count_collectives() != begun
            return outputs

        return observed

    def _step_without_collectives(self) -> Callable[..., Any]:
        """Return the step, in which a collective would wait for ever for a rank without any batch."""
        strategy, name = self._run.strategy, f"{self._purpose}_step"
        error = MisuseError(
            f"{name} communicates on rank {strategy.global_rank} of {strategy.world_size}, and another rank has no "
            f"batch, so that it does not run {name}: give each rank a batch, or communicate in "
            f"on_{self._purpose}_epoch_end"
        )

        def refusing(*args: Any) -> Any:
            with RefusedCollectives(error):
                return self._step(*args)

        return refusing

    def _pad(self, dataloader_idx: int, batch_idx: int, num_steps: int) -> None:
        """Run steps without results if steps communicate, as those of other ranks wait for this one then.

        A rank that has had no batch cannot know that, and runs none.
        """
        for index in range(batch_idx + 1, batch_idx + 1 + num_steps):
            if self._step_communicates:
                self._run_padding_step(_copied(self._last_batch), index, dataloader_idx)
            if self._votes is not None:  # ranks vote after the same number of batches
                self._votes.count()
        self._last_batch = None

    def _run_padding_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        arguments = (batch, batch_idx, dataloader_idx) if self._takes_loader else (batch, batch_idx)
        with discard_results(self._run, batch):
            self._step(*arguments[: self._num_arguments])

    def _with_index(
        self, name: str, num_arguments: int, dataloader_idx: int
    ) -> list[tuple[Callable[..., Any], tuple[int, ...]]]:
        """Return the functions of a hook, each with its trailing arguments: the index of the loader, or none.

        The index is passed if there are several loaders, or if the hook requires it.

        Args:
            name: Of the hook.
            num_arguments: Number of arguments before the index.
            dataloader_idx: The index.
        """
        hooks, several = self._run.hooks.of(name), len(self.loaders) > 1
        return [
            (hook, (dataloader_idx,) if several or requires_arguments(hook) > num_arguments else ()) for hook in hooks
        ]

    def _batches(self, dataloader_idx: int, loader: Any, count: int | None) -> Iterable[Any]:
        """Return the batches of a loader on the device; several processes vote between them."""
        items = None if count is None else count // self._per_item
        host_batches = self._run.profiled_batches(itertools.islice(loader, items))
        if self._votes is None:
            return self._batches_of_rank(dataloader_idx, host_batches, loader)
        if self._run.strategy.evaluates_together:
            return self._batches_together(dataloader_idx, host_batches, items, self._votes)
        return self._votes.between(self._batches_of_rank(dataloader_idx, host_batches, loader))

    def _mover(self, dataloader_idx: int) -> Callable[[Any], Any]:
        return self._run.profiled("transfer_batch", batch_mover(self._run, dataloader_idx))

    def _batches_of_rank(self, dataloader_idx: int, host_batches: Iterable[Any], loader: Any) -> Iterable[Any]:
        """Return the batches on the device."""
        run, move = self._run, self._mover(dataloader_idx)
        in_threads, ahead = can_prefetch(run, loader), can_copy_ahead(run)
        return move_batches(host_batches, move, run.strategy, in_threads=in_threads, ahead=ahead)

    def _batches_together(
        self, dataloader_idx: int, host_batches: Iterable[Any], items: int | None, votes: EvaluationVotes
    ) -> Iterator[Any]:
        """Yield the batches of this process, and run padding steps while other processes still have batches."""
        run, loader, longest = self._run, self._passed_loaders[dataloader_idx], None
        move = self._mover(dataloader_idx)
        if items is not None and self._longest is not None and self._are_known[dataloader_idx]:
            longest = (_smaller(self._longest[dataloader_idx], self._at_most) or 0) // self._per_item
        padded = pad_to_longest(host_batches, loader, run.strategy, longest)
        ahead = longest is not None and can_copy_ahead(run)  # votes keep their order
        copied = move_batches(
            padded, lambda pair: (move(pair[0]), pair[1]), run.strategy, in_threads=False, ahead=ahead
        )
        for index, (batch, counts) in enumerate(copied):
            if counts:
                yield batch
            else:
                self._run_padding_step(batch, index, dataloader_idx)
            votes.count()


def _interleave(rank_batches: list[list[Any]]) -> list[Any]:
    """Return batches in the order of the dataset: the first of each rank, then the second of each, and so on."""
    longest = max(map(len, rank_batches))
    return [batches[index] for index in range(longest) for batches in rank_batches if index < len(batches)]


def _smaller(count: int | None, at_most: int | None) -> int | None:
    if at_most is None:
        return count
    return at_most if count is None else min(count, at_most)


# Padding to the process with the most batches, for strategies whose steps are collective


def pad_to_longest(
    batches: Iterable[Any], substitutes: Iterable[Any], strategy: Strategy, longest: int | None = None
) -> Iterator[tuple[Any, bool]]:
    """Yield this process's batches, then padding until every process has finished; collective.

    Where their numbers are unknown, the processes agree before each batch whether any of them has one.

    Args:
        batches: The batches of this process.
        substitutes: Loader of a padding batch, if this process has no batch at all.
        strategy: Whose ``evaluates_together`` is True.
        longest: Number of batches of the process with the most; None where it is unknown.

    Yields:
        A batch, and whether it is this process's own, not padding.

    Raises:
        MisuseError: Another process has batches, and there is none for this one.
    """
    iterator, nothing = iter(batches), object()
    last = nothing
    for index in itertools.count():
        if index == longest:
            return
        batch = next(iterator, nothing)
        if longest is None and not strategy.reduce_boolean_decision(batch is not nothing, all=False):
            return
        if batch is not nothing:
            last = _copied(batch)
            yield batch, True
        else:
            if last is nothing:
                last = next(iter(substitutes), nothing)
            if last is nothing:
                raise MisuseError(
                    f"a loader for evaluation gave no batch on rank {strategy.global_rank} of {strategy.world_size}, "
                    f"and each step of {type(strategy).__name__} communicates: give each rank a batch at least"
                )
            yield _copied(last), False


def _copied(batch: Any) -> Any:
    """Return the batch in new containers, as a step may take values out of those that it gets."""
    return apply_to_tensors(batch, Tensor.detach)


@contextmanager
def discard_results(run: Run, batch: Any) -> Iterator[None]:
    """Discard logged values and updates of metric objects in a ``with`` block.

    Args:
        run: Has the logged values, and the module with metric objects.
        batch: The batch of the step.
    """
    logged, run.logged = run.logged, LoggedValues(training=False)
    run.logged.start_epoch()
    run.logged.in_step, run.logged.batch = True, batch
    try:
        with unchanged_metrics(run.module):
            yield
    finally:
        run.logged = logged
