"""Tests of ranks and collectives."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dstrat.testing.ranks.communication import OPERATIONS, rank_values
from dstrat.testing.ranks.fits import Fit, step_collectives
from dstrat.testing.ranks.modules import GLOBAL_BATCH
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dstrat.interfaces.communication import Collective

_SLACK = 0.02  # seconds
_UNDECLARED_BYTES, _UNDECLARED_SHARE = 100, 0.1  # of flags and norms, and of padding and alignment


class Collectives(StrategyTests):
    """Every collective against a reference."""

    @standard("processes", "collectives")
    def test_each_rank_knows_where_it_is(self, world_size: int) -> None:
        positions = self.collected("positions", world_size)
        for rank, position in enumerate(positions):
            expected = {"world_size": world_size, "global_rank": rank, "local_rank": rank, "node_rank": 0}
            expected["is_global_zero"] = rank == 0
            for name, value in expected.items():
                if position[name] != value:
                    fail(
                        f"{name} is {position[name]!r} in rank {rank} of {world_size}, where it should be {value!r}",
                        fix="take it from the cluster environment, as ParallelStrategy does.",
                    )

    @standard("processes", "collectives")
    def test_its_ranks_divide_the_data_among_them(self, world_size: int) -> None:
        shares = [position["sampler"] for position in self.collected("positions", world_size)]
        readers = {share.get("num_replicas", 1) for share in shares}
        expected_ranks = set(range(next(iter(readers))))
        ranks = {share.get("rank", 0) for share in shares}
        if len(readers) != 1 or ranks != expected_ranks:
            fail(
                f"distributed_sampler_kwargs of the {world_size} ranks are {shares}: together they read "
                f"{len(ranks)} of {max(readers)} parts of the data, so that samples are used twice or never",
                expected='the same "num_replicas" in all ranks, and a "rank" for each part.',
            )

    @standard("processes", "collectives")
    def test_a_step_communicates_the_declared_bytes(self, pair: int) -> None:
        work = Fit(samples=6 * GLOBAL_BATCH, accumulate=2, accelerator=self.accelerator)
        layout, collectives = self.job(step_collectives, pair, subject=self.subject, work=work)[0]
        if layout is None:
            not_declared(f"{self.alias} does not declare its communication (communication_layout returns None)")
        if layout.assumption:
            not_declared(f"{self.alias} declares its communication for some modules: {layout.assumption}")
        if not self.subject.make().uses_torch_distributed:
            not_declared(f"{self.alias} has collectives of its own, and those of torch.distributed alone are counted")
        declared, sent = _bytes_by_kind(layout.collectives), _bytes_by_kind(collectives)
        for kind in sorted({*declared, *sent}):
            if abs(sent[kind] - declared[kind]) > _UNDECLARED_BYTES + _UNDECLARED_SHARE * declared[kind]:
                fail(
                    f"a rank of {pair} begins collectives of the kind {kind} with {sent[kind]} bytes in an optimizer "
                    f"step of two batches, and communication_layout declares {declared[kind]}",
                    expected="all that is communicated in a step, but for flags and norms of a few bytes.",
                    fix="count full tensors: what all_gather returns, and what reduce_scatter takes.",
                )

    @standard("processes", "collectives")
    def test_reduce_gives_mean_sum_max_and_min(self, world_size: int) -> None:
        columns = list(zip(*(rank_values(shard) for shard in range(self.readers(world_size))), strict=True))
        for rank, results in enumerate(self.collected("reductions", world_size)):
            for operation in OPERATIONS:
                expected = [_reduced(operation, column) for column in columns]
                _check_reduction(operation, results[operation]["reduced"], expected, columns, rank)

    @standard("processes", "collectives")
    def test_reduce_leaves_its_argument_and_other_values_alone(self, world_size: int) -> None:
        for results, position in zip(
            self.collected("reductions", world_size), self.collected("positions", world_size), strict=True
        ):
            if results["other"] != "not a tensor":
                fail(f'reduce("not a tensor") returned {results["other"]!r}: it must return other values as they are')
            argument = rank_values(position["sampler"].get("rank", 0))
            changed = [name for name in OPERATIONS if results[name]["argument"] != argument]
            if changed:
                fail(
                    f"reduce with reduce_op={changed[0]!r} changed the tensor that it was given",
                    fix="reduce a clone of it.",
                )

    @standard("processes", "collectives")
    def test_reduce_gives_the_mean_of_integers_as_a_float(self, world_size: int) -> None:
        largest = self.readers(world_size) - 1
        for results in self.collected("reductions", world_size):
            if abs(results["integers"] - largest / 2) > 1e-6:
                fail(
                    f"reduce of the integers 0 to {largest} gave {results['integers']}, and their mean is "
                    f"{largest / 2}",
                    fix="divide after the sum, with `/`.",
                )

    @standard("processes", "collectives")
    def test_all_gather_stacks_in_the_order_of_ranks(self, world_size: int) -> None:
        for rank, result in enumerate(self.collected("gathering", world_size)):
            _, readers = result["reader"]
            expected = [[rank_values(reader)] * 2 for reader in range(readers)]
            values = result["values"]
            if values == expected:
                continue
            order = [expected.index(tensor) if tensor in expected else None for tensor in values]
            if None not in order:
                fail(
                    f"all_gather gave the tensors of ranks {order} to rank {rank}, in the wrong order of ranks",
                    expected=f"those of ranks {list(range(readers))}, whatever the rank.",
                )
            fail(
                f"all_gather gave rank {rank} a tensor that is not the stack of all ranks' tensors",
                expected=f"the shape ({readers}, *shape), also in a world of one; ranks that share a batch count once.",
                details=f"expected {expected}\ngot      {values}",
            )
        for rank, result in enumerate(self.collected("gathering", world_size)):
            _check_scalars(result["scalars"], rank, result["reader"][1])
            if result["of_processes"] != [[float(number)] for number in range(world_size)]:
                fail(
                    f"gather_from_processes gave rank {rank} {result['of_processes']} for the number of each rank",
                    expected=f"those of all {world_size} ranks, in their order, also of those that share a batch.",
                )

    @standard("processes", "collectives")
    def test_all_gather_lets_gradients_flow_back_only_when_asked(self, world_size: int) -> None:
        for rank, result in enumerate(self.collected("gathering", world_size)):
            reader, readers = result["reader"]
            expected = [float(readers * (reader + 1))] * 2  # each of the losses weights this rank's part so
            if result["needs_gradient"]:
                fail("all_gather returned a tensor that needs gradients though sync_grads is False: detach it")
            if result["gradient"] != expected:
                fail(
                    f"the gradient through all_gather(sync_grads=True) is {result['gradient']} in rank {rank}",
                    expected=f"{expected}, the sum over all ranks of the gradients of this rank's part.",
                )

    @standard("processes", "collectives")
    def test_broadcast_sends_the_object_of_the_source_rank(self, world_size: int) -> None:
        for rank, objects in enumerate(self.collected("broadcasts", world_size)):
            for source, received in enumerate(objects):
                if received != {"from": source, "text": "x" * source}:
                    came = received.get("from") if isinstance(received, dict) else None
                    from_where = repr(received) if came is None else f"the object of rank {came}"
                    fail(
                        f"broadcast(obj, src={source}) gave rank {rank} {from_where}",
                        expected=f"the object of the source, rank {source}.",
                    )

    @standard("processes", "collectives")
    def test_barrier_waits_for_every_rank(self, world_size: int) -> None:
        results = self.collected("barriers", world_size)
        for rank, times in enumerate(results):
            if isinstance(times, str):
                fail(
                    f"rank {rank} of {world_size} did not get out of a barrier to which all ranks came",
                    expected="barrier returns in every rank as soon as all have called it.",
                    fix="call the same collectives in all ranks: one that a rank skips is one in which others wait.",
                    details=times,
                )
        for last in range(world_size):
            latest = max(times[last][0] for times in results)
            for rank, times in enumerate(results):
                if times[last][1] < latest - _SLACK:
                    fail(
                        f"rank {rank} of {world_size} passed the barrier {latest - times[last][1]:.2f} s before rank "
                        f"{last} had come to it",
                        expected="barrier returns in no rank before all ranks have called it.",
                    )

    @standard("processes", "collectives")
    def test_decisions_are_taken_together(self, world_size: int) -> None:
        alone = world_size == 1
        expected = {
            "all of nobody": False,
            "any of nobody": False,
            "all of the last rank": alone,
            "any of the last rank": True,
            "all of everybody": True,
            "any of everybody": True,
        }
        for rank, decisions in enumerate(self.collected("decisions", world_size)):
            wrong = [name for name, value in expected.items() if decisions[name] != value]
            if wrong:
                way, _, voters = wrong[0].partition(" of ")
                fail(
                    f"reduce_boolean_decision returned {decisions[wrong[0]]} with all={way == 'all'} in rank {rank} of "
                    f"{world_size}, where {voters} had voted for it",
                    expected="whether all ranks voted for it, or any with all=False; the same in each rank.",
                )


def _check_scalars(gathered: object, rank: int, readers: int) -> None:
    if gathered != [float(other) for other in range(readers)]:
        fail(
            f"all_gather gave rank {rank} {gathered} for a tensor without dimensions, which held "
            "the number of each rank",
            expected=f"the shape ({readers},): one new dimension, also where there was none.",
            fix="gather into a list and torch.stack it; torch.cat makes no new dimension.",
        )


def _reduced(operation: str, values: Sequence[float]) -> float:
    if operation in ("mean", "avg"):
        return sum(values) / len(values)
    if operation == "sum":
        return sum(values)
    return max(values) if operation == "max" else min(values)


def _check_reduction(
    operation: str, reduced: list[float], expected: list[float], columns: Sequence[Sequence[float]], rank: int
) -> None:
    if all(abs(one - other) < 1e-5 for one, other in zip(reduced, expected, strict=True)):
        return
    matching = [
        name for name in ("sum", "mean", "max", "min") if reduced == [_reduced(name, column) for column in columns]
    ]
    instead = f", which is the {matching[0]}" if matching else ""
    fail(
        f"reduce(tensor, reduce_op={operation!r}) gave {reduced}{instead} in rank {rank}",
        expected=f"the {operation} over {len(columns[0])} ranks, {expected}.",
    )


def _bytes_by_kind(collectives: Iterable[Collective]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for one in collectives:
        totals[one.kind] += one.bytes if one.ranks > 1 else 0
    return totals
