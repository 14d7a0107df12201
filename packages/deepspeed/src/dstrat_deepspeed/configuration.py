"""DeepSpeed's configuration of a run, from options and the user's own."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from dstrat_deepspeed.batch_size import SIZES, MicroBatch
from dstrat_deepspeed.config import (
    files_in,
    from_options,
    merged,
    nvme_paths,
    settings_of,
    settings_of_precision,
    zero_stage,
)
from dstrat_deepspeed.config_check import check_config
from dstrat_deepspeed.config_source import read_config
from dstrat_deepspeed.feasibility import (
    check_can_offload,
    check_clipping,
    check_options,
    check_parts,
    check_ranks,
)
from dstrat_deepspeed.nvme import folder_in
from dstrat_deepspeed.optimizer_section import check_named_optimizer, check_one_optimizer
from dstrat_deepspeed.options import read_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch.optim import Optimizer

    from dstrat.interfaces.parts import Parts, TrainerLike

_logger = logging.getLogger(__name__)


class Configuration:
    """The options of a strategy, with the user's own configuration over them.

    Args:
        options: By name.
        given: The argument ``config``.
        batch_size: The argument ``logging_batch_size_per_gpu``.

    Attributes:
        options: In their groups.
        stage: Of ZeRO.

    Raises:
        RequestError: There is no such option, or a value is none of its own.
        ConflictError: Two options exclude each other.
    """

    def __init__(
        self, options: Mapping[str, Any], given: Mapping[str, Any] | str | Path | None, batch_size: int | str
    ) -> None:
        self.options = read_options(options)
        self._given = read_config(given, os.environ)
        self.stage = zero_stage(self.options, self._given)
        self._micro_batch = MicroBatch(batch_size, self._given)
        self._folders: dict[str, str] = {}
        check_options(self.options, self._known, self.stage)
        if self.options.checkpoints.load_full_weights:
            _logger.info("load_full_weights=True changes nothing: whole weights of a checkpoint are dealt out anyway")

    @property
    def _known(self) -> dict[str, Any]:
        """The configuration as far as it is known before a run: what is sharded, and where."""
        return merged(from_options(self.options, self.stage), self._given)

    def check_parts(self, parts: Parts) -> None:
        """Check what it needs of the other parts, as far as they are known, and of this machine."""
        if parts.precision_plugin is not None and parts.parallel_devices:
            check_parts(self.options, self._known, parts.precision_plugin.flag, parts.parallel_devices[0].type)
        check_can_offload(self._known, os.environ)
        if parts.parallel_devices:
            check_named_optimizer(self._known, parts.parallel_devices[0].type, os.environ, self._given.place)

    def check_ranks(self, world_size: int) -> None:
        """Check that the ranks can be divided as it says."""
        check_ranks(self._known, world_size, self._given.place)

    def check_batch(self, batch: Any) -> None:
        """Compare the sizes that it states with a batch of the training."""
        self._micro_batch.check(batch)

    @contextmanager
    def own_folders(self) -> Iterator[None]:
        """Let what is in files be in folders of this run alone in a ``with`` block; they are removed at its end."""
        with ExitStack() as made:
            self._folders = {path: made.enter_context(folder_in(path)) for path in nvme_paths(self._known)}
            try:
                yield
            finally:
                self._folders = {}

    def of_creation(self, flag: str) -> dict[str, Any]:
        """Return what stage 3 needs to know when layers are made, in a precision.

        Raises:
            RequestError: DeepSpeed does not take it.
            ConflictError: It contradicts the precision.
        """
        known = merged(from_options(self.options, self.stage), self._given, settings_of_precision(flag, self.options))
        config = {key: value for key, value in files_in(self._folders, known).items() if key not in SIZES}
        config["train_micro_batch_size_per_gpu"] = 1
        check_config(config, self._given.place)
        return config

    def of_run(
        self, trainer: TrainerLike, optimizer: Optimizer | None, *, flag: str, world_size: int
    ) -> dict[str, Any]:
        """Return the whole configuration of a run.

        Args:
            trainer: Its settings come before the user's configuration, which may not contradict them.
            optimizer: What ``configure_optimizers`` has returned.
            flag: Of the precision.
            world_size: Number of ranks.

        Raises:
            RequestError: DeepSpeed does not take it.
            ConflictError: It contradicts something else; both places are named.
        """
        if trainer.gradient_clip_val is not None:
            check_clipping(trainer.gradient_clip_algorithm)
        settings = [*settings_of(trainer), *settings_of_precision(flag, self.options)]
        config = files_in(self._folders, merged(from_options(self.options, self.stage), self._given, settings))
        self._micro_batch.complete(config, world_size=world_size)
        check_config(config, self._given.place)
        if not trainer.is_fitting:
            config.pop("optimizer", None)
        check_one_optimizer(config, optimizer, self._given.place, is_fitting=trainer.is_fitting)
        return config
