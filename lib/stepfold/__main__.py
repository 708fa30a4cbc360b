"""The commands of stepfold.

python -m stepfold launch --processes 4 script.py ...
    start the processes of one machine, and start all of them again when one dies

python -m stepfold diff RUN_A RUN_B
    say where two runs part, and what may be the cause

python -m stepfold evaluate script.py:make RUN_DIR
    evaluate the checkpoints of a run

    def make():  # what sf.evaluate_run takes
        state = jax.eval_shape(lambda: sf.init_state(init, tx, jax.random.key(0)))
        return state, sf.Evaluation(measure, test_batches)
"""

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

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
    text = "say where two runs part, and what may be the cause; return 1 if they do"
    compare = verbs.add_parser("diff", help=text, description=text)
    for name in ("a", "b"):
        compare.add_argument(name, metavar=name.upper(), help="a run_dir of fit, or its upload")
    text = "the relative difference of metrics that is allowed; compares metrics alone"
    compare.add_argument("--rtol", type=float, default=0.0, metavar="X", help=text)
    options = parser.parse_args(arguments)
    if options.verb == "launch":
        return launcher.run(launcher.launch_from(options, launch))
    from stepfold.errors import ConfigError, StepfoldError  # imports jax; launch does without

    try:
        if options.verb == "diff":
            from stepfold.debug.diff import diff

            found = diff(options.a, options.b, rtol=options.rtol)
            print(found)  # noqa: T201  this is a command
            return int(found.differs_at is not None)
        _evaluate(options)
    except KeyboardInterrupt:
        return 130
    except StepfoldError as error:
        print(error, file=sys.stderr)  # noqa: T201  this is a command
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _evaluate(options: argparse.Namespace) -> None:
    from stepfold.core.validation import absolute_path, is_url, spell_call, suggest, takes
    from stepfold.errors import refuse
    from stepfold.loop.evaluator import find_store, follow_run

    path, _, name = options.function.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        expected, advice = "script.py:make", "name a file and its function"
        refuse("evaluate", expected, options.function, advice)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    names = runpy.run_path(path)
    if name not in names:
        got = f"no {name!r} in {path}"
        refuse(options.function, "a function without arguments", got, suggest(name, names))
    make = names[name]
    if not callable(make) or not takes(make, 0):
        got = spell_call(make) if callable(make) else f"{make!r:.80}"
        refuse(options.function, "a function without arguments", got)
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        refuse(options.function, "(state, evaluations) from it", f"{made!r:.80}")
    run_dir = options.run_dir
    run_dir = run_dir if is_url(run_dir) else absolute_path("run_dir", run_dir)
    results = follow_run(
        run_dir,
        *made,
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
