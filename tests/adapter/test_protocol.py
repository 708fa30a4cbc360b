from stepfold.adapter import BaseTrainerProtocol, Trainer


def test_all_of_its_methods_are_the_trainers():
    methods = [name for name, value in vars(BaseTrainerProtocol).items() if callable(value)]
    public = [name for name in methods if not name.startswith("_")]
    assert len(public) > 20
    assert [name for name in public if not callable(getattr(Trainer, name, None))] == []


def test_a_class_that_inherits_from_it_may_leave_members_out():
    class Own(BaseTrainerProtocol):
        def __init__(self):
            self.model = None

    assert Own().model is None
