"""Finetuning: callbacks that freeze layers, and unfreeze them during the training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # torch's only common base class of batch norms
from typing_extensions import override

from dstrat.errors import MisuseError
from dstrat.interfaces.state_dict import canonical_name, canonical_parameters
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.group_schedules import extend_schedulers, scale_schedule, schedule_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

Modules: TypeAlias = "nn.Module | Iterable[Modules]"
"""A module, or modules in any nesting of iterables."""

_log = logging.getLogger(__name__)


class BaseFinetuning(Callback):
    """Base class of callbacks that freeze layers before a training, and unfreeze them during it.

    Optimizers must not have the parameters that are frozen at the start: ``configure_optimizers`` excludes them, and
    :meth:`unfreeze_and_add_param_group` adds them later::

        class UnfreezeEncoder(BaseFinetuning):
            def freeze_before_training(self, module):
                self.freeze(module.encoder)

            def finetune_function(self, module, epoch, optimizer):
                if epoch == 5:
                    self.unfreeze_and_add_param_group(module.encoder, optimizer)


        class Net(TrainModule):
            def configure_optimizers(self):
                return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)

    Checkpoints have the added groups and the names of frozen parameters, so that a resumed training continues exactly.
    :meth:`finetune_function` is called once for each epoch, also for one that is interrupted and resumed.  It has to
    decide alike on all ranks, which is checked.

    Some strategies cannot unfreeze parameters during a training, and raise an error.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._tuned_epoch = -1
        self._added_groups: list[list[dict[str, Any]]] = []
        self._frozen: list[str] = []
        self._untracked: list[str] = []
        self._num_configured: list[int] = []
        self._resumes = False

    # Methods to implement

    def freeze_before_training(self, module: TrainModule) -> None:  # noqa: ARG002 - for subclasses
        """Freeze layers before the training, with :meth:`freeze`."""
        raise MisuseError(f"{type(self).__name__} must implement freeze_before_training(module)")

    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:  # noqa: ARG002 - for subclasses
        """Unfreeze layers at the start of an epoch, with :meth:`unfreeze_and_add_param_group`.

        Args:
            module: The module.
            epoch: Index of the epoch, from 0.
            optimizer: One of the optimizers; the method is called for each of them.
        """
        raise MisuseError(f"{type(self).__name__} must implement finetune_function(module, epoch, optimizer)")

    # Methods for subclasses

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules with direct parameters, and those without children, in order."""
        return [module for module in _all_modules(modules) if module._parameters or not list(module.children())]  # noqa: SLF001 - torch has no public name for those of the module alone

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[Parameter]:
        """Yield the trainable parameters, or with ``requires_grad=False`` the frozen ones.

        Args:
            modules: The modules.
            train_bn: Whether to include those of batch-norm layers.
            requires_grad: Whether to yield trainable or frozen parameters.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (p for p in module.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters, and the running statistics of batch-norm layers."""
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, enabled=True)

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of one module, without those of its children."""
        _set_trainable(module, enabled=False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters.

        Args:
            modules: The modules.
            train_bn: Whether batch-norm layers stay trainable.
        """
        for module in BaseFinetuning.flatten_modules(modules):
            _set_trainable(module, enabled=train_bn and isinstance(module, _BatchNorm))

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Parameter]) -> list[Parameter]:
        """Return the parameters that an optimizer does not have, without duplicates; warn about those that it has."""
        params = list(dict.fromkeys(params))
        existing = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        new = [parameter for parameter in params if parameter not in existing]
        if len(new) < len(params):
            _log.warning(
                "%d of %d parameters to unfreeze are in the %s already and stay in their group: let "
                "configure_optimizers leave out what is frozen: %s(p for p in self.parameters() if p.requires_grad)",
                len(params) - len(new),
                len(params),
                type(optimizer).__name__,
                type(optimizer).__name__,
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to an optimizer as a group.

        Args:
            modules: The modules.
            optimizer: The optimizer.
            lr: Learning rate of the group; None is that of the first group divided by ``initial_denom_lr``.
            initial_denom_lr: The divisor.
            train_bn: Whether the group has batch-norm layers.
        """
        existing = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        # Norms that were never frozen are in the optimizer rightly; only frozen ones in it are worth a warning.
        trained = existing.intersection(BaseFinetuning.filter_params(modules))
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        unfrozen = (p for p in BaseFinetuning.filter_params(modules, train_bn=train_bn) if p not in trained)
        new = BaseFinetuning.filter_on_optimizer(optimizer, unfrozen)
        if new:
            count = len(optimizer.param_groups)
            optimizer.add_param_group({"params": new, "lr": rate})
            schedule_groups(optimizer, count, share=1 / initial_denom_lr if lr is None else None)

    # The run

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._begin()
            self.freeze_before_training(module)

    @override
    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        # Not in load_state_dict, which is too late: groups must exist before the optimizer's state is loaded.
        if trainer.is_fitting and self.state_key in checkpoint.get("callbacks", {}):
            self._resumes = True
            self.load_state_dict(checkpoint["callbacks"][self.state_key])

    @override
    def on_configure_optimizers(self, trainer: Trainer, module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
        self._num_configured = [len(optimizer.param_groups) for optimizer in optimizers]
        if not self._resumes:
            return
        self._resumes = False
        # By name: the parameters are other objects than those of the run that saved them.
        parameters = canonical_parameters(module)
        frozen, untracked = (set(map(canonical_name, names)) for names in (self._frozen, self._untracked))
        for name, parameter in parameters.items():
            parameter.requires_grad_(name not in frozen)
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm):
                layer.track_running_stats = canonical_name(name) not in untracked
        for optimizer, groups in zip(optimizers, self._added_groups, strict=False):
            for group in groups:
                optimizer.add_param_group(
                    {**group, "params": [parameters[canonical_name(name)] for name in group["params"]]}
                )
        extend_schedulers(config.scheduler for config in trainer.strategy.lr_schedulers)

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.current_epoch == self._tuned_epoch:  # resumed in the middle of it
            return
        self._tuned_epoch = trainer.current_epoch
        for optimizer, count in zip(trainer.optimizers, self._num_configured, strict=True):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            self.finetune_function(module, trainer.current_epoch, optimizer)
            self._schedule(trainer, optimizer, rates, count)
        self._note(module, trainer.optimizers)
        self._check_ranks(trainer, module)

    def _schedule(self, trainer: Trainer, optimizer: Optimizer, rates: Sequence[float], num_configured: int) -> None:
        """Let schedulers follow the groups that were added, and those whose rates have changed."""
        schedulers = [config.scheduler for config in trainer.strategy.lr_schedulers]
        schedule_groups(optimizer, len(rates))
        extend_schedulers(schedulers)
        groups = optimizer.param_groups[num_configured : len(rates)]
        for group, rate in zip(groups, rates[num_configured:], strict=True):
            if rate and float(group["lr"]) != rate:
                scale_schedule(group, float(group["lr"]) / rate, schedulers)

    def _check_ranks(self, trainer: Trainer, module: TrainModule) -> None:
        """Raise an error if this rank trains other parameters than rank 0, or with other rates; collective.

        Raises:
            MisuseError: It does; replicas would diverge, or wait for each other's gradients.
        """
        strategy = trainer.strategy
        if strategy.world_size == 1:
            return
        names = {parameter: name for name, parameter in module.named_parameters()}
        trained: dict[str, tuple[bool, float | None]] = {
            name: (parameter.requires_grad, None) for parameter, name in names.items()
        }
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in names:  # an optimizer of a sharded model may have tensors of its own
                        trained[names[parameter]] = (parameter.requires_grad, float(group["lr"]))
        of_rank_0: dict[str, tuple[bool, float | None]] = strategy.broadcast(trained)
        # Stages of a pipeline have different parameters.
        different = [name for name, value in trained.items() if of_rank_0.get(name, value) != value]
        if different:
            raise MisuseError(
                f"{type(self).__name__}.finetune_function has set requires_grad or the learning rate of "
                f"{different[0]!r} otherwise on rank {strategy.global_rank} than on rank 0, in epoch "
                f"{trainer.current_epoch}: decide by what all ranks have in common, such as the epoch, or a value that "
                "is logged with sync_dist=True"
            )

    def _note(self, module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
        """Record the added groups and the frozen parameters by name, for checkpoints."""
        names = {parameter: name for name, parameter in canonical_parameters(module).items()}
        self._frozen = [name for parameter, name in names.items() if not parameter.requires_grad]
        self._untracked = [
            canonical_name(name)
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and not layer.track_running_stats
        ]
        self._added_groups = [
            [
                {**group, "params": [names[parameter] for parameter in group["params"]]}
                for group in optimizer.param_groups[count:]
            ]
            for optimizer, count in zip(optimizers, self._num_configured, strict=True)
        ]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "tuned_epoch": self._tuned_epoch,
            "added_groups": self._added_groups,
            "frozen": self._frozen,
            "untracked": self._untracked,
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._tuned_epoch = state_dict["tuned_epoch"]
        self._added_groups = state_dict["added_groups"]
        self._frozen = state_dict["frozen"]
        self._untracked = state_dict["untracked"]


class BackboneFinetuning(BaseFinetuning):
    """Freeze ``module.backbone`` at the start, and unfreeze it in a later epoch.

    The backbone's learning rate starts below that of the head, and is multiplied in each epoch until it reaches it.

    Args:
        unfreeze_backbone_at_epoch: Index of the first epoch that trains the backbone.
        lambda_func: Returns the factor of the backbone's learning rate from the number of the epoch; by default 2.
        backbone_initial_ratio_lr: Ratio of the backbone's first learning rate to the head's.
        backbone_initial_lr: The backbone's first learning rate, instead of the ratio.
        should_align: Whether the backbone's learning rate is limited to the head's.
        initial_denom_lr: Divisor of the head's learning rate, if no other rate is set.
        train_bn: Whether batch-norm layers of the backbone are trained.
        verbose: Whether to log both learning rates in each epoch.
        rounding: Number of digits of logged learning rates.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] | None = None,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), nn.Module):
            raise MisuseError(
                f"{type(self).__name__} freezes {type(module).__name__}.backbone, and there is no module of that name: "
                "call the part that is to be frozen 'backbone', or derive from BaseFinetuning"
            )
        super().setup(trainer, module, stage)

    @override
    def _begin(self) -> None:
        super()._begin()
        self.previous_backbone_lr: float | None = None

    @override
    def freeze_before_training(self, module: TrainModule) -> None:
        self.freeze(_backbone(module))

    @override
    def finetune_function(self, module: TrainModule, epoch: int, optimizer: Optimizer) -> None:
        head_lr = optimizer.param_groups[0]["lr"]
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        # None after that epoch: a checkpoint without this callback's state was resumed.
        if epoch == self.unfreeze_backbone_at_epoch or self.previous_backbone_lr is None:
            lr = self.backbone_initial_lr
            lr = head_lr * self.backbone_initial_ratio_lr if lr is None else lr
            self.unfreeze_and_add_param_group(
                _backbone(module), optimizer, lr, initial_denom_lr=self.initial_denom_lr, train_bn=self.train_bn
            )
        else:
            factor = 2.0 if self.lambda_func is None else self.lambda_func(epoch + 1)
            lr = factor * self.previous_backbone_lr
            lr = min(lr, head_lr) if self.should_align else lr
            # An optimizer may have divided the added group, as Muon does.
            backbone = set(_backbone(module).parameters())
            for group in optimizer.param_groups:
                if backbone.issuperset(group["params"]):
                    group["lr"] = lr
        self.previous_backbone_lr = lr
        if self.verbose:
            _log.info("learning rate %s, of the backbone %s", round(head_lr, self.rounding), round(lr, self.rounding))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]


def _backbone(module: TrainModule) -> nn.Module:
    backbone: nn.Module = module.backbone  # type: ignore[assignment]  # setup has checked it
    return backbone


def _all_modules(modules: Modules) -> Iterator[nn.Module]:
    if isinstance(modules, nn.Module):  # first, since containers are iterable, but may have direct parameters
        yield from modules.modules()
    else:
        for module in modules:
            yield from _all_modules(module)


def _set_trainable(module: nn.Module, *, enabled: bool) -> None:
    """Freeze or unfreeze one module, without its children."""
    if isinstance(module, _BatchNorm):  # without it, a frozen layer would still update its statistics
        module.track_running_stats = enabled
    for parameter in module.parameters(recurse=False):
        parameter.requires_grad_(enabled)
