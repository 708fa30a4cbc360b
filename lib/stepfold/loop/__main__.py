"""`python -m stepfold.loop report RUN_DIR [RUN_DIR…]`: write the page of a run, or compare runs."""

import sys

from stepfold.loop.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
