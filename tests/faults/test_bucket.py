"""Object storage: killed clients, a killed server, and a run that resumes as if it was not cut."""

import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest
from tests import s3
from tests.laws import course, network

import stepfold as sf
from stepfold import object_storage
from stepfold.checkpoint import bucket
from stepfold.checkpoint.store import open_store


def tree(step):
    return {"w": np.arange(40, dtype=np.float32) + step, "n": np.full(3, step)}


def restored(url, **options):
    found = sf.restore(url, tree(0), **options)
    for name, leaf in tree(found.step).items():
        assert np.array_equal(found.state[name], leaf)
    return found


def saves(url, credentials):
    """Save steps 3 and 4, each of which deletes an older one."""
    os.environ.update(credentials)
    bucket._OBJECT = 100  # several objects for each step
    object_storage._RETRIES = {"max_retries": 2, "initial_delay": "50ms", "max_delay": "100ms"}
    with sf.Checkpoints(url, keep=2) as series:
        for step in (3, 4):
            tree = {"w": np.arange(40, dtype=np.float32) + step, "n": np.full(3, step)}
            series.save(tree, step=step)
            series.wait()
            print("saved", step)


def check_after_a_kill(url, done):
    """Check that all steps are whole, and that the next run goes on and removes the rest."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(url).step >= max([2, *done])
    problems = sf.checkpoint.verify(url)
    assert len(problems) >= 2
    assert not any(problems.values())
    newest = max(problems)
    with sf.Checkpoints(url, keep=2) as series:
        for step in (newest + 1, newest + 2):
            series.save(tree(step), step=step)
    assert sf.checkpoint.verify(url) == {newest + 1: [], newest + 2: []}
    left = open_store(url).other_names()
    assert len(left) <= 2
    with pytest.MonkeyPatch.context() as patch:
        now = time.time()
        patch.setattr(time, "time", lambda: now + 90000)
        open_store(url).clean()
    assert open_store(url).other_names() == []
    assert restored(url).step == newest + 2


def saved_steps(output):
    return [int(line.split()[1]) for line in output.splitlines()]


def save_two(server, path):
    for step in (1, 2):
        sf.save(server.url(path), tree(step), step=step)


def test_a_kill_at_any_request_leaves_whole_steps(server, forks, tmp_path, count):
    """What a kill would leave is copied before a request is passed on, since processes are slow.

    A kill after an answer leaves what one before the next request does.
    """
    path, copies, client, one_at_a_time = tmp_path.name, {}, [], threading.Lock()
    stride = count(20, 1)

    def copy(number, method, name):
        with one_at_a_time:
            if number % stride == stride // 2:
                copies[f"{path}-{number}"] = saved_steps(client[0].output() if client else "")
                for each in server.objects(f"{path}/"):
                    target = f"{path}-{number}{each.removeprefix(path)}"
                    server.write(target, server.read(each))

    save_two(server, path)
    with s3.Proxy(server, copy) as proxy:
        client.append(forks.start(saves, proxy.url(path), s3.CREDENTIALS))
        end = client[0].wait()
    assert end.output == "saved 3\nsaved 4\n", end
    assert len(copies) >= 30 // stride
    for copied, done in copies.items():
        check_after_a_kill(server.url(copied), done)


@pytest.mark.full
@pytest.mark.parametrize("at", [10, 25, 40])
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_client_that_is_killed_leaves_whole_steps(server, forks, tmp_path, at, is_answered):
    path = tmp_path.name

    def fault(number, method, name):
        if number != at:
            return None
        return client.kill if is_answered else client.kill()

    save_two(server, path)
    with s3.Proxy(server, fault) as proxy:
        client = forks.start(saves, proxy.url(path), s3.CREDENTIALS)
        end = client.wait()
    assert end.code == -signal.SIGKILL, end
    check_after_a_kill(server.url(path), saved_steps(end.output))


@pytest.mark.full
def test_a_killed_server_is_an_error_within_bounds(forks, tmp_path, count):
    for at in range(3, 33, 30 // count(1, 6)):
        with s3.Server() as server:

            def fault(number, method, name, server=server, at=at):
                if number == at:
                    server.process.kill()
                    server.process.wait()

            with s3.Proxy(server, fault) as proxy:
                end = forks.run(saves, proxy.url("run"), s3.CREDENTIALS)
        assert end.code == 1, (at, end)
        last = end.errors.strip().splitlines()[-1]
        assert last.startswith("stepfold.errors.CheckpointError: s3://checkpoints/run/"), (at, end)
        assert s3.CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in last


def races(url, credentials, go, value):
    """Save a step at the moment that another process does."""
    os.environ.update(credentials)
    os.mkdir(f"{go}.{value}")
    while not os.path.exists(go):
        time.sleep(0.005)
    for step in range(5):
        try:
            sf.save(url, {"value": np.full(3, value)}, step=step)
            print(step)
        except sf.errors.CheckpointError as error:
            if f"step {step} already exists; delete it" not in str(error):
                raise


@pytest.mark.full
def test_of_two_processes_that_save_a_step_exactly_one_wins(server, forks, tmp_path):
    url, go = server.url(tmp_path.name), tmp_path / "go"
    racing = [forks.start(races, url, s3.CREDENTIALS, str(go), number) for number in (0, 1)]
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    go.touch()
    ends = [process.wait() for process in racing]
    assert [end.code for end in ends] == [0, 0], ends
    won = [[int(line) for line in end.output.splitlines()] for end in ends]
    assert sorted(won[0] + won[1]) == [0, 1, 2, 3, 4]
    for number, steps in enumerate(won):
        for step in steps:
            found = sf.restore(url, {"value": np.zeros(3, int)}, step=step)
            assert (found.state["value"] == number).all()
    assert open_store(url).other_names() == []


def saves_at_google(endpoint):
    # tensorstore's own variables for tests.
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = endpoint
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "a-secret"
    url = "gs://checkpoints/run"
    with sf.Checkpoints(url, keep=2) as series:
        for step in range(1, 5):
            series.save({"w": np.full(3, step)}, step=step)
    try:
        sf.save(url, {"w": np.zeros(3)}, step=4)
    except sf.errors.CheckpointError as error:
        print(str(error).partition("; ")[0])
    store = open_store(url)
    assert store.set_aside(4) == "4.damaged"
    restored = sf.restore(url, {"w": np.zeros(3, int)})
    print(sf.checkpoint.verify(url), restored.state, store.other_names())


def test_google_cloud_storage_takes_the_same_requests(forks):
    with s3.GoogleServer() as server:
        end = forks.run(saves_at_google, server.endpoint)
    assert end.code == 0, end
    assert end.output.splitlines() == [
        "gs://checkpoints/run: step 4 already exists",
        "{3: []} {'w': array([3, 3, 3])} ['4.damaged']",
    ]
    commits = [query for method, name, query in server.requests if name == "run/4.commit"]
    assert sum("ifGenerationMatch" in query for query in commits) == 2  # written once, deleted once
    kept = {name.split("/")[1] for name in server.objects}
    assert kept == {"3.commit", "4.damaged", "saves", "stepfold.json"}
    assert len({name.split("/")[2] for name in server.objects if "/saves/" in name}) == 2


# Runs


def run(url, run_dir, **options):
    checkpoints = sf.Checkpoints(url, every=course.SAVE, keep=2, best="eval/loss")
    return course.run(run_dir, checkpoints=checkpoints, **options)


def test_a_run_resumes_from_a_bucket_as_if_it_was_not_cut(server, tmp_path):
    url, whole = server.url(tmp_path.name), course.run(tmp_path / "whole")

    def cut(event):
        if event.step == 25:
            raise OSError("cut here")

    with pytest.raises(OSError, match="cut here"):
        run(url, tmp_path / "run", hooks=cut)
    cut_at = sf.checkpoint.latest_step(url)
    result = run(url, tmp_path / "run")
    assert (result.resumed, result.steps) == (cut_at, course.STEPS)
    assert network.bits(result.state) == network.bits(whole.state)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert rows == (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert sf.checkpoint.verify(url).keys() >= {35, course.STEPS}
    assert result.best in sf.checkpoint.verify(url)
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(
        sf.errors.ConfigError, match=r"resume=False: expected a directory without .* s3://"
    ):
        run(url, tmp_path / "new", resume=False)


LIMIT = 10.0  # seconds, for one request


@pytest.mark.filterwarnings("ignore:upload. the files of the run are not up to date")
@pytest.mark.parametrize("is_signalled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "fault",
    [
        "freezes",
        *(pytest.param(x, marks=pytest.mark.full) for x in ("refuses", "freezes for writes")),
    ],
)
def test_a_run_waits_once_for_a_server_that_fails(
    server, tmp_path, monkeypatch, fault, is_signalled
):
    retries = {"max_retries": 3, "initial_delay": "200ms", "max_delay": "400ms"}
    monkeypatch.setattr(object_storage, "_RETRIES", retries)
    monkeypatch.setattr(object_storage, "_TIMEOUT", LIMIT)
    monkeypatch.setattr(object_storage, "_PROBE", 0.2)
    failed_at, is_over = [], threading.Event()

    def fail(number, method, name):
        if not failed_at or (fault == "freezes for writes" and method != "PUT"):
            return None
        return 503 if fault == "refuses" else (is_over.wait(60) and None)

    def hook(event):
        if event.is_train and event.step == 10:
            failed_at.append(time.monotonic())
        if event.is_train and event.step == 15 and is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    with s3.Proxy(server, fail) as proxy:
        checkpoints = sf.Checkpoints(proxy.url(f"{tmp_path.name}/run"), every=7)
        run_dir = sf.RunDirectory(tmp_path, upload=proxy.url(f"{tmp_path.name}/files"))
        with pytest.raises(sf.errors.CheckpointError, match="cannot be"):
            course.run(run_dir=run_dir, checkpoints=checkpoints, hooks=hook)
        seconds = time.monotonic() - failed_at[0]
        is_over.set()
    assert seconds < 2 * LIMIT, seconds


def test_a_server_that_recovers_is_used_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr(object_storage, "_TIMEOUT", 2.0)
    is_down, is_over = threading.Event(), threading.Event()
    fail = lambda *_: is_over.wait(60) and None if is_down.is_set() else None
    with s3.Proxy(server, fail) as proxy:
        state = {"w": np.ones(3)}
        with sf.Checkpoints(proxy.url(tmp_path.name), keep=None) as series:
            series.save(state, step=1)
            series.wait()
            is_down.set()
            with pytest.raises(sf.errors.CheckpointError, match="did not answer"):
                series.save(state, step=2)
            is_down.clear()
            is_over.set()
            series.save(state, step=3)
        assert sf.checkpoint.verify(proxy.url(tmp_path.name)) == {1: [], 3: []}
