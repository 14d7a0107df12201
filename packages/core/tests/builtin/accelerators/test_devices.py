"""What a user's words for devices mean."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.errors import DeviceError


def parse(devices, available=4):
    return parse_devices(devices, everything=available, limit=available, name="acme")


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        ("auto", [0, 1, 2, 3]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        (1, [0]),
        (3, [0, 1, 2]),
        ("3", [0, 1, 2]),
        ([0], [0]),
        ([3, 1], [3, 1]),
        ((1, 2), [1, 2]),
        (range(2), [0, 1]),
        ("0,1", [0, 1]),
        (" 2, 0 ", [2, 0]),
        ("1,", [1]),
    ],
)
def test_all_forms_are_understood(devices, indices):
    assert parse(devices) == indices


class Index:
    def __index__(self):
        return 2


def test_numbers_of_other_libraries_are_understood():
    assert operator.index(Index()) == 2
    assert parse(Index()) == [0, 1]
    assert parse([Index()]) == [2]


@pytest.mark.parametrize("devices", [0, "0", -2, "-2"])
def test_a_number_that_is_none_is_refused(devices):
    with pytest.raises(DeviceError, match=rf"^devices={devices!r} is not a number of acme devices: ask for \"auto\""):
        parse(devices)


@pytest.mark.parametrize("devices", [[], ()])
def test_no_device_is_refused(devices):
    with pytest.raises(DeviceError, match="names no device: ask for"):
        parse(devices)


@pytest.mark.parametrize("devices", [5, "5"])
def test_more_than_there_are_is_refused(devices):
    with pytest.raises(DeviceError, match="is more than there are: at most 4 acme devices can be used here"):
        parse(devices)


@pytest.mark.parametrize(("devices", "missing"), [([0, 4], 4), ("0,7", 7), ([-1], -1), ("-1,", -1)])
def test_an_index_that_is_not_there_is_refused(devices, missing):
    with pytest.raises(DeviceError, match=rf"names acme {missing}, which is not there: indices go from 0 to 3"):
        parse(devices)


@pytest.mark.parametrize("devices", [[1, 1], "0,1,0"])
def test_a_device_named_twice_is_refused(devices):
    with pytest.raises(DeviceError, match="names a device twice"):
        parse(devices)


@pytest.mark.parametrize(
    "devices",
    [
        "",
        ",",
        "two",
        "0;1",
        "0,,1",
        "1.0",
        "٢",
        "9" * 5000,
        1.0,
        True,
        None,
        [True],
        ["0"],
        [0.5],
        {0: 1},
        {0, 1},
        b"01",
    ],
)
def test_what_makes_no_sense_is_refused(devices):
    with pytest.raises(DeviceError, match="is not understood: ask for"):
        parse(devices)


@pytest.mark.parametrize("devices", ["auto", 1, [0]])
def test_hardware_that_is_not_there_is_said_to_be_so(devices):
    with pytest.raises(DeviceError, match="this machine has no acme device that torch can use"):
        parse(devices, available=0)


words = st.one_of(st.text("0123456789,-auto ", max_size=8), st.text(max_size=5))
anything = st.one_of(st.integers(), st.booleans(), st.floats(), st.none(), words, st.lists(st.integers(-3, 6)))


@given(devices=anything, available=st.integers(0, 6))
def test_the_outcome_is_devices_that_are_there_or_a_device_error(devices, available):
    try:
        indices = parse(devices, available)
    except DeviceError:
        return
    assert indices
    assert len(set(indices)) == len(indices)
    assert set(indices) <= set(range(available))
