from functools import partial

import pytest

from stepfold.adapter import Trainer
from stepfold.adapter.overriding import call_with, chosen_collect, is_overridden

from . import digits

pytestmark = pytest.mark.usefixtures("compiled_once")


class Own(Trainer):
    def create_collect_function(self):
        return lambda batch: {"seen": sorted(batch)}


def test_a_method_of_a_subclass_or_of_the_object_itself_is_another():
    made = digits.trainer(Own, given={"dataset_eval": None})
    assert is_overridden(made, Trainer, "create_collect_function")
    assert not is_overridden(made, Trainer, "on_log")
    made.on_log = print
    assert is_overridden(made, Trainer, "on_log")


def test_a_function_is_called_with_what_it_takes():
    assert call_with(lambda: 1, a=2) == 1
    assert call_with(lambda **options: options, a=2) == {"a": 2}
    assert call_with(partial(lambda a, b: (a, b), 1), b=2) == (1, 2)


def test_who_makes_batches():
    rows = [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
    chosen = lambda kind=Trainer, given=None, **changes: chosen_collect(
        digits.trainer(kind, given={"dataset_eval": None, **(given or {})}, **changes), Trainer, ""
    )
    assert chosen() is None
    assert chosen(max_length=64)([{"ids": [1, 2]}])["ids"].shape == (1, 64)
    assert chosen(given={"data_collator": len}) is len
    assert chosen(Own)(rows) == {"seen": ["x", "y"]}
    collator = lambda examples: {"mine": examples}
    assert chosen(Own, given={"data_collator": collator})(rows) == {"seen": ["mine"]}


def test_a_method_for_all_kinds_is_asked_before_the_default_of_one():
    made = digits.trainer(Own, given={"dataset_eval": None})
    for kind in ("", "grain_", "tfds_"):
        assert chosen_collect(made, Trainer, kind)([{"x": 1}]) == {"seen": ["x"]}

    class Grain(Own):
        def create_grain_collect_function(self, max_sequence_length, truncation_mode):
            return lambda batch: (max_sequence_length, truncation_mode)

    made = digits.trainer(Grain, given={"dataset_eval": None})
    assert chosen_collect(made, Trainer, "grain_")([{"x": 1}]) == (None, "keep_end")
