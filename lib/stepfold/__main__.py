"""The commands of stepfold.

python -m stepfold launch --processes 4 script.py ...
    start the processes of one machine, and start all of them again when one dies

python -m stepfold diff RUN_A RUN_B
    say where two runs part, and what may be the cause; the exit code is 0 if they are equal, 1 if
    they differ, and 2 if they cannot be compared up to their ends

    def make(config):  # for --replay script.py:make; called with the config of each run
        return state, step, batches

python -m stepfold evaluate script.py:make RUN_DIR
    evaluate the checkpoints of a run

    def make():  # what sf.evaluate_run takes
        state = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
        return state, sf.Evaluation(measure, test_batches)

python -m stepfold report RUN_DIR [RUN_DIR…]
    write the page of a run, or one page that compares several runs

python -m stepfold rename FILE [FILE…]
    rewrite names of version 0.2 in scripts, notebooks and pages; with --check, only print what
    would change
"""

import argparse
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from stepfold.cluster import launcher


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return 2 if an argument is wrong, 1 after another error."""
    parser = argparse.ArgumentParser(
        prog="python -m stepfold",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    text = "start the processes of one machine, and start all of them again when one dies"
    launch = verbs.add_parser("launch", help=text, description=text)
    launcher.add_arguments(launch)
    _add_evaluate(verbs)
    _add_diff(verbs)
    _add_report(verbs)
    _add_rename(verbs)
    options = parser.parse_args(arguments)
    if options.verb == "launch":
        return launcher.run(launcher.launch_from(options, launch))
    if options.verb == "report":
        from stepfold.runs.report import command

        return command.run(options)
    if options.verb == "rename":
        from stepfold.rename import run

        return run(options)
    from stepfold.errors import ConfigError, StepfoldError

    try:
        if options.verb == "diff":
            return _diff(options)
        _evaluate(options)
    except KeyboardInterrupt:
        return 130
    except StepfoldError as error:
        print(error, file=sys.stderr)  # noqa: T201  this is a command
        return 2 if isinstance(error, ConfigError) or options.verb == "diff" else 1
    return 0


def _add_evaluate(verbs: Any) -> None:
    text = "evaluate each checkpoint of a run as it appears, until the run ends"
    evaluate = verbs.add_parser("evaluate", help=text, description=text)
    text = "where to find make() -> (state, evaluations)"
    evaluate.add_argument("function", metavar="script.py:make", help=text)
    text = "a run_dir of fit, or the directory or URL of checkpoints"
    evaluate.add_argument("run_dir", metavar="RUN_DIR", help=text)
    text = "evaluate all steps, rather than the newest of those that wait"
    evaluate.add_argument("--all", action="store_true", help=text)
    text = "evaluate what is there, and do not wait for more"
    evaluate.add_argument("--once", action="store_true", help=text)
    text = "seconds without a new checkpoint after which to end"
    evaluate.add_argument("--timeout", type=float, metavar="SECONDS", help=text)


def _add_diff(verbs: Any) -> None:
    text = "say where two runs part, and what may be the cause"
    compare = verbs.add_parser("diff", help=text, description=text)
    for name in ("a", "b"):
        compare.add_argument(name, metavar=name.upper(), help="a run_dir of fit, or its upload")
    text = "the relative difference of metrics that is allowed; compares metrics alone"
    compare.add_argument("--rtol", type=float, default=0.0, metavar="X", help=text)
    text = "print the result as JSON"
    compare.add_argument("--json", action="store_true", help=text)
    text = "run their steps again, with what make(config) -> (state, step, batches) returns"
    compare.add_argument("--replay", metavar="script.py:make", help=text)


def _add_report(verbs: Any) -> None:
    text = "write report.html and metrics.csv of a run, or one page that compares several runs"
    report = verbs.add_parser("report", help=text, description=text)
    report.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run_dir of fit")
    text = (
        "the page to write, and nothing else (default: report.html in the directory of the run or, "
        "for several runs, in the parent directory of the first)"
    )
    report.add_argument("--out", metavar="FILE", help=text)


def _add_rename(verbs: Any) -> None:
    text = "rewrite names of version 0.2, which work until 0.4, as they are now"
    rename = verbs.add_parser("rename", help=text, description=text)
    rename.add_argument("files", nargs="+", metavar="FILE", help="a .py, .ipynb or .md file")
    text = "print what would change without writing, with exit code 1 if that is anything"
    rename.add_argument("--check", action="store_true", help=text)


def _diff(options: argparse.Namespace) -> int:
    from stepfold.debug.diff import diff
    from stepfold.debug.run_record import RunRecord

    parts: dict[str, Any] = {}
    if options.replay is not None:
        make = _load("--replay", options.replay, "a function of a config", 1)
        for suffix, run in (("", options.a), ("_b", options.b)):
            state, step, batches = _check(
                options.replay, make(RunRecord(run).config), "(state, step, batches)", 3
            )
            parts |= {f"step{suffix}": step, f"batches{suffix}": batches}
            parts.setdefault("state", state)
    difference = diff(options.a, options.b, rtol=options.rtol, **parts)
    print(json.dumps(difference.as_json()) if options.json else difference)  # noqa: T201  this is a command
    return difference.exit_code


def _load(verb: str, name: str, expected: str, count: int) -> Callable[..., Any]:
    """Load a function of `count` arguments from script.py:name."""
    from stepfold.core.validation import spell_call, suggest, takes
    from stepfold.errors import refuse

    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        refuse(verb, "script.py:make", name, "name a file and its function")
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    names = runpy.run_path(path)
    if attribute not in names:
        got = f"no {attribute!r} in {path}"
        refuse(name, expected, got, suggest(attribute, names))
    function = names[attribute]
    if not callable(function) or not takes(function, count):
        got = spell_call(function) if callable(function) else f"{function!r:.80}"
        refuse(name, expected, got)
    return cast("Callable[..., Any]", function)


def _check(name: str, returned: Any, expected: str, count: int) -> tuple[Any, ...]:
    from stepfold.errors import refuse

    if not isinstance(returned, tuple) or len(returned) != count:
        refuse(name, f"{expected} from it", f"{returned!r:.80}")
    return returned


def _evaluate(options: argparse.Namespace) -> None:
    from stepfold.core.validation import absolute_path, is_url
    from stepfold.runs.evaluator import find_store, follow_run

    make = _load("evaluate", options.function, "a function without arguments", 0)
    returned = _check(options.function, make(), "(state, evaluations)", 2)
    run_dir = options.run_dir
    run_dir = run_dir if is_url(run_dir) else absolute_path("run_dir", run_dir)
    results = follow_run(
        run_dir,
        *returned,
        steps="all" if options.all else "newest",
        follow=not options.once,
        timeout=options.timeout,
        on_wait=lambda location: _report(f"waiting for checkpoints in {location}"),
    )
    evaluated = set()
    for step, metrics in results:
        numbers = "  ".join(f"{name} {value:.5g}" for name, value in (metrics or {}).items())
        text = "left out, since a newer step is there" if metrics is None else numbers
        print(f"step {step}  {text}", flush=True)  # noqa: T201
        evaluated |= set() if metrics is None else {step}
    reason = ""
    if not evaluated:
        store = find_store(run_dir)
        reason = ": none waits for an evaluation" if store.steps() else ": there are no checkpoints"
        reason += f" in {store.location}"
    _report(f"evaluated {len(evaluated)} step{'s' * (len(evaluated) != 1)}{reason}")


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
