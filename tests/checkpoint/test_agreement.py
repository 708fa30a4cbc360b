"""Alone, one is of one mind; tests/processes/test_checkpoints.py has two processes agree."""

from stepfold.checkpoint.agreement import same_as_first, worst_of


def test_one_process_agrees_with_itself():
    assert [worst_of(number) for number in range(3)] == [0, 1, 2]
    assert same_as_first([3, 1 << 40]) == [3, 1 << 40]
    assert same_as_first([]) == []
