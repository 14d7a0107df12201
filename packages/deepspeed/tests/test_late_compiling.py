"""What DeepSpeed decorates with torch.compile is compiled when it is called."""

import torch

from dstrat_deepspeed.internals import compiled_when_called


def twice(number):
    return 2 * number


def test_a_function_is_compiled_once_when_it_is_called_first(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    late = compiled_when_called(twice)
    assert compiled == []
    assert [late(1), late(2)] == [2, 4]
    assert compiled == [twice]


def test_a_part_of_a_function_that_is_compiled_is_not_compiled_by_itself(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.delattr(torch, "compile")
    assert compiled_when_called(twice)(1) == 2
