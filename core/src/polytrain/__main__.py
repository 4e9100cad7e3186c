"""`python -m polytrain`."""

import sys

from polytrain.view.cli import main

sys.exit(main())
