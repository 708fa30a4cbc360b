import inspect

from stepfold.adapter.protocol import BaseTrainerProtocol


def public(members):
    return [name for name in members if not name.startswith("_")]


def test_a_class_that_inherits_from_it_may_leave_members_out():
    class Own(BaseTrainerProtocol):
        def __init__(self):
            self.model = None

    assert Own().model is None


def test_an_object_with_all_members_is_a_trainer():
    class Complete:
        pass

    names = public({*vars(BaseTrainerProtocol), *BaseTrainerProtocol.__annotations__})
    trainer = Complete()
    for name in names:
        setattr(trainer, name, print)
    assert isinstance(trainer, BaseTrainerProtocol)
    for name in names:
        delattr(trainer, name)
        assert not isinstance(trainer, BaseTrainerProtocol)
        setattr(trainer, name, print)


def test_it_has_the_members_that_easydel_published():
    signature = inspect.signature(BaseTrainerProtocol.log_metrics)
    assert list(signature.parameters) == [
        *("self", "metrics", "pbar", "step", "mode"),
        *("update_progress", "log_to_backends", "force_report"),
    ]
    defaults = [p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert defaults == [True, True, False]
    assert list(inspect.signature(BaseTrainerProtocol.log_watchers).parameters) == [
        *("self", "state", "step"),
    ]
