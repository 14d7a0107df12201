"""Identity of the replicated state, and which of two the groups take."""

from dstrat_torchft.history import History


def steps(*quorums):
    history = History.of_first_values(0)
    for quorum, participants in quorums:
        history = history.take_step(quorum, participants)
    return history


def test_first_values_are_those_of_the_group_with_the_lowest_number():
    versions = [History.of_first_values(group).version for group in range(12)]
    assert versions == sorted(set(versions), reverse=True)


def test_groups_of_the_same_quorums_have_the_same_history():
    assert steps(("a", 2), ("b", 1)) == steps(("a", 2), ("b", 1))
    assert steps(("a", 2), ("b", 1)).digest != steps(("b", 2), ("b", 1)).digest


def test_the_most_steps_count_then_the_most_participants():
    common = [("a", 2)] * 9
    pair, alone, ahead = (steps(*common, *more) for more in ([("a", 2)], [("b", 1)], [("b", 1), ("b", 1)]))
    assert alone.version < pair.version < ahead.version


def test_states_of_as_many_participants_still_differ():
    assert len({steps(("a", 2), (name, 1)).version for name in "bcdefgh"}) == 7


def test_a_training_counts_more_than_a_group_that_waits_with_the_same_state():
    training = steps(("a", 2))
    waiting = History.load(training.state_dict())
    assert waiting.version < training.version == waiting.begin().version


def test_a_state_follows_only_the_one_that_it_results_from():
    common = [("a", 2)] * 9
    pair, alone = (steps(*common, more) for more in (("a", 2), ("b", 1)))
    after = pair.take_step("c", 2)
    assert after.follows(pair)
    assert not after.follows(alone)
    assert not after.follows(steps(*common))


def test_a_checkpoint_without_a_digest_has_the_same_version_in_all_groups():
    old = {"step": 20, "batches_committed": 40}
    assert History.load(old) == History.load(old)
    assert History.load(old).step == 20


def test_versions_fit_into_the_integers_of_torchft():
    assert History(step=9 * 10**8, num_participants=10**6, digest="f" * 32).version < 2**63
