"""`python -m apps` is `anygpu`."""

import sys

from apps.cli import main

sys.exit(main())
