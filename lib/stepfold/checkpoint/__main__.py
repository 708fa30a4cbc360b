"""`python -m stepfold.checkpoint ls|show|verify|diff DIR`: inspect checkpoints from a shell."""

import sys

from stepfold.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
