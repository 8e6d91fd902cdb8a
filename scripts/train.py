#!/usr/bin/env python3
"""Train a network on one rank or many: ``mpirun -n 4 python scripts/train.py --model resnet50 --data synthetic``.

All options: ``python scripts/train.py --help``. The same as the command ``minidl train``.
"""

import sys

from minidl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
