"""`python -m kintsugi_operator`."""

import sys

from kintsugi_operator.operator import run

if __name__ == "__main__":
    sys.exit(run())
