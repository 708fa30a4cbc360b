"""Texts by which stepfold recognizes errors and files of other packages.

No package promises its texts, and no class tells these errors apart. If a release changes one, the
user sees the original error without advice, unless noted otherwise here.
"""

import re

# jax and XLA
OUT_OF_MEMORY = re.compile("(RESOURCE_EXHAUSTED|Out of memory).*")  # to the end of the line
DELETED_ARRAY = re.compile("Array has been deleted|deleted or donated")
DEBUG_NANS = re.compile(r"invalid value \(")  # of FloatingPointError, which numpy raises too
UNBOUND_AXIS = re.compile("unbound axis name:? ([^.]+)")
COMPILER_OPTION = re.compile("(compile|setting) option")
NO_LIBTPU = re.compile("not installed")
UNKNOWN_TOPOLOGY = re.compile("INVALID_ARGUMENT|NOT_FOUND")

# optax, and Python on calls of optimizers and on arithmetic with an `Average`
INTEGER_LABELS = re.compile("numpy.integer")
NEEDS_LOSS = re.compile("missing .*keyword-only argument|(obj|grad|value)_fn must be provided")
REFUSES_VALUE = re.compile("unexpected keyword argument 'value'")
AVERAGE_OPERAND = re.compile("'Average'")

# numpy
READ_ONLY = re.compile("read-only")

# Python, the system, and the packages that repeat their messages. If those on a full disk change,
# a run without room for temporary saves ends instead of continuing without them.
AT_EXIT = re.compile("interpreter shutdown|cannot schedule new futures")
DISK_FULL = re.compile("No space left|quota exceeded", re.IGNORECASE)
MANY_OPEN_FILES = re.compile("Too many open files")
OS_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")  # of safetensors; otherwise it counts as EIO

# tensorstore. The statuses of damage are those of missing, truncated or changed files. Any other,
# such as a lack of memory, says nothing about the step. If the texts change, a damaged array only
# "cannot be read", and a restore of the newest step does not fall back to an older one. If the text
# on retries changes, requests to a server that does not answer are tried again. If that on ranges
# changes, `sf.files` cannot index files at URLs.
STATUS = re.compile("[A-Z_]+(?=:)")
DAMAGE = ("NOT_FOUND", "DATA_LOSS", "OUT_OF_RANGE", "INVALID_ARGUMENT", "FAILED_PRECONDITION")
PERMISSION_DENIED = re.compile("PERMISSION_DENIED|UNAUTHENTICATED")
OUT_OF_RANGE = re.compile("OUT_OF_RANGE")
RETRIES_FAILED = re.compile("retry attempts failed")

# orbax writes a step into a folder of this name. If it uses another, those of killed runs stay.
ORBAX_UNFINISHED = "orbax-checkpoint-tmp"
