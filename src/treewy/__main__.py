"""`python -m treewy`: the command line."""

import sys

from treewy.cli.main import main

sys.exit(main())
