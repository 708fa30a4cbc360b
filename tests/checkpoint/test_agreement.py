"""Alone, one is of one mind; tests/processes/test_checkpoints.py has two processes agree."""

from stepfold.checkpoint.agreement import all_of, same_as_first


def test_one_process_agrees_with_itself():
    assert all_of(True) is True
    assert all_of(False) is False
    assert same_as_first([3, 1 << 40]) == [3, 1 << 40]
    assert same_as_first([]) == []
