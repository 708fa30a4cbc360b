import pytest

import stepfold as sf
from stepfold.adapter.naming import refuse_unknown


def test_a_name_that_is_near_none_is_told_all_there_are():
    with pytest.raises(sf.ConfigError, match="Trainer: there is no 'xyz'; there are alpha, beta"):
        refuse_unknown("Trainer", ["xyz"], ["alpha", "beta"])


def test_known_names_pass():
    refuse_unknown("Trainer", ["beta"], ["alpha", "beta"])
