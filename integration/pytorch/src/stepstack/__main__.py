"""`python -m stepstack` is the command `stepstack`."""

import sys

from stepstack._command import main

sys.exit(main())
