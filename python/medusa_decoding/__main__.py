"""`python -m medusa_decoding`: the `medusa` command, in the form that `torchrun -m` can start."""

import sys

from medusa_decoding.cli import main

if __name__ == "__main__":
    sys.exit(main())
