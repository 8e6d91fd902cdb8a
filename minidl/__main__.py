"""``python -m minidl`` is the command ``minidl``."""

import sys

from minidl.cli import main

sys.exit(main())
