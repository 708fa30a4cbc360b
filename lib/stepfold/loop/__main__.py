"""`python -m stepfold.loop report`, the command of version 0.2; now `python -m stepfold report`."""

import sys

from stepfold.__main__ import main

if __name__ == "__main__":
    print("python -m stepfold.loop report is now python -m stepfold report", file=sys.stderr)  # noqa: T201
    sys.exit(main(sys.argv[1:]))
