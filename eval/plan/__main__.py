"""`python -m eval.plan`."""

import sys

from eval.plan.cli import main

if __name__ == "__main__":
    sys.exit(main())
