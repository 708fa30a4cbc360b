import inspect

import pytest

from stepfold import errors

ALL = [error for _, error in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_a_stepfold_error_and_a_builtin_error(error):
    assert issubclass(error, errors.StepfoldError)
    if error is not errors.StepfoldError:
        assert issubclass(error, ValueError | OSError | TypeError | MemoryError)
